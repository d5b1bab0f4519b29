"""A low-noise measure of a pretrained encoder: linear probes, cross-fitted over all labelled images that it never saw.

    python -m experiments.probe output_dir/run

Images: the training images outside the run's --max_images ("held-out") and all test images. Held-out images are
cross-fitted among themselves: each fold is classified by a probe fitted on the others. Test images are classified by a
probe fitted on all held-out images. So settings can be chosen on held-out images alone, and both together give the
least noisy number. A run that used all training images leaves none: its test images are then cross-fitted.

Encoders: each of the run's last checkpoints, and the average of their weights. Features: the mean token, the [CLS]
token, and both concatenated. RUN/probe then has a line in results.jsonl, and an .npz file that also holds
    encoders    str [E]: numbers of the checkpoints, the last one last, then "average"
    features    str [F]: mean, cls, both
    hits        bool [E, F, N]: which of the N images each probe recognised
    held_out    bool [N]: held-out or test
"""

import hashlib
import re
from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import timm.models.vision_transformer
import torch
from torch import nn

import main_pretrain
from engine_probe import fit_softmax, predict
from models_vit import VisionTransformer, encoder_of, infer_model
from util.arguments import add_distributed_arguments, add_machine_arguments, settle_shared_args
from util.checkpoint import load_checkpoint, number_of, numbered_checkpoints, weights_of
from util.cli import ArgumentParser, UserError, count, count_or_zero, number, positive, tracked
from util.data.sources import build_source, image_names
from util.datasets import ImageDataset, build_eval_dataset
from util.evaluation.features import FeatureCache, FeatureSet, extract_features, file_hash
from util.evaluation.results import Outcome, Report, Result, read_arrays
from util.evaluation.subject import Subject
from util.evaluation.tables import show_table
from util.misc import amp_dtype, derive_seed, init_distributed_mode
from util.program import run
from util.training.resume import data_identity

PROTOCOL = "crossfit"
FEATURES = ("mean", "cls", "both")
AVERAGE = "average"
PARTS = ("all", "held_out", "test")


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.probe", description=str(__doc__).split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="folder of a finished pretraining")
    parser.add_argument("--last", default=4, type=count, help="checkpoints to probe and to average, from the end")
    parser.add_argument("--folds", default=5, type=number(int, at_least=2), help="of the held-out images")
    parser.add_argument("--l2", default=1.0, type=positive, help="weight of |W|^2 / 2, added to the sum of the losses")
    parser.add_argument("--data_path", default=None, help="default: where the run found its images")
    parser.add_argument("--output_dir", default=None, help="default: RUN/probe")
    parser.add_argument("--batch_size", default=256, type=count, help="images encoded at once, per process")
    parser.add_argument("--num_workers", default=0, type=count_or_zero, help="loader processes")
    add_machine_arguments(parser)
    add_distributed_arguments(parser)
    return parser


# --- Reading ---


@dataclass(frozen=True)
class ProbedRun:
    """What `python -m experiments.probe` found."""

    path: Path
    images: str  # SHA-256 of the names of the N images
    held_out: np.ndarray  # bool [N]
    encoders: list[str]  # [E]
    hits: np.ndarray  # bool [E, F, N]

    @property
    def final(self) -> int:
        """Index of the last checkpoint among the encoders."""
        return len(self.encoders) - 1 - (AVERAGE in self.encoders)

    @cached_property
    def measures(self) -> dict[str, np.ndarray]:
        """Scores in [0, 1] by measure and image, [N]; such as last-cls, [CLS] averaged over the last checkpoints."""
        checkpoints = list(range(self.final + 1))
        choices = {"final": [self.final]}
        if len(checkpoints) > 1:
            choices |= {"last": checkpoints, AVERAGE: [self.encoders.index(AVERAGE)]}
        return {
            f"{encoder}-{feature}": self.hits[chosen, at].mean(axis=0, dtype=np.float32)
            for encoder, chosen in choices.items()
            for at, feature in enumerate(FEATURES)
        }

    def part(self, name: str) -> np.ndarray:
        """Which images belong to one of PARTS, bool [N]."""
        return {"all": np.ones_like(self.held_out), "held_out": self.held_out, "test": ~self.held_out}[name]

    def accuracies(self) -> dict[str, dict[str, float]]:
        """Percent, by measure and part; a part without images is left out."""
        parts = {name: chosen for name in PARTS if (chosen := self.part(name)).any()}
        return {
            measure: {name: 100 * float(scores[chosen].mean()) for name, chosen in parts.items()}
            for measure, scores in self.measures.items()
        }


def read_probe(result: Result) -> ProbedRun:
    path, kinds = result.predictions, {"images": "U", "held_out": "b", "encoders": "U", "hits": "b"}
    images, held_out, encoders, hits = read_arrays(path, kinds, f"delete {path.parent} and probe again").values()
    return ProbedRun(path, hash_of_names(images), held_out, encoders.tolist(), hits)


def hash_of_names(images: np.ndarray) -> str:
    return hashlib.sha256("\n".join(images).encode(errors="surrogateescape")).hexdigest()


# --- Encoders ---


@dataclass
class TokenEncoder:
    """An encoder that gives the features of --global_pool and of --cls_token in one pass."""

    pooled: VisionTransformer
    norm: nn.Module  # of the [CLS] token

    def __call__(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to mean token and [CLS] token [N, 2 D]."""
        tokens = timm.models.vision_transformer.VisionTransformer.forward_features(self.pooled, imgs)  # not normalised
        return torch.cat([self.pooled.fc_norm(self.pooled.pool(tokens)), self.norm(tokens[:, 0])], dim=1)


def last_checkpoints(folder: Path, number: int) -> list[Path]:
    """Checkpoints of the last `number` epochs, oldest first."""
    found = numbered_checkpoints(folder)[:number][::-1]
    if len(found) < number or number_of(found[-1]) - number_of(found[0]) >= number:
        raise UserError(
            f"{folder} does not have the checkpoints of its last {number} epochs; pretrain with --save_every 1, "
            "or give --last 1"
        )
    return found


def load_encoders(paths: list[Path], device: torch.device) -> dict[str, TokenEncoder]:
    """By number of the checkpoint; and the average of their weights, if there are several."""
    found, checkpoints = {}, {str(number_of(path)): load_checkpoint(path) for path in paths}
    if len(paths) > 1:
        weights = [weights_of(checkpoint) for checkpoint in checkpoints.values()]
        mean = {key: torch.stack([each[key].double() for each in weights]).mean(dim=0).float() for key in weights[0]}
        checkpoints[AVERAGE] = {**checkpoints[str(number_of(paths[-1]))], "model": mean}
    for name, checkpoint in checkpoints.items():
        pooled, single = (encoder_of(checkpoint, str(paths[0].parent), global_pool=pool) for pool in (True, False))
        found[name] = TokenEncoder(pooled.to(device), single.norm.to(device))
    return found


# --- Images ---


@dataclass
class UnseenImages:
    """Labelled images that a run was not pretrained on: training images at the indices `held_out`, and test images."""

    train: ImageDataset
    held_out: list[int]
    test: ImageDataset

    def names(self) -> list[str]:
        """Held-out images come first."""
        return [self.train.source.name(at) for at in self.held_out] + image_names(self.test.source)

    def features(self, encoders: dict[str, TokenEncoder], device: torch.device, args: Namespace) -> FeatureSet:
        """Features [M, E * 2 D] of all; every image is decoded once, for all encoders. Indices are those of `names`."""

        def encode(imgs: torch.Tensor) -> torch.Tensor:
            return torch.cat([encoder(imgs) for encoder in encoders.values()], dim=1)

        parts = []
        for dataset, indices, first in (
            (self.train, self.held_out, 0),
            (self.test, list(range(len(self.test))), len(self.held_out)),
        ):
            found = extract_features(
                encode,
                dataset,
                indices,
                width=sum(2 * encoder.pooled.embed_dim for encoder in encoders.values()),
                device=device,
                amp=amp_dtype(args.amp, device),
                batch_size=args.batch_size,
                num_workers=args.num_workers,
                pin_mem=device.type == "cuda",
                header=f"features of {'test' if dataset is self.test else 'held-out'} images",
            )
            place = {index: first + at for at, index in enumerate(indices)}
            found.indices = torch.tensor([place[at] for at in found.indices.tolist()], dtype=torch.int64)
            parts.append(found)
        return FeatureSet(*(torch.cat([vars(part)[name] for part in parts]) for name in vars(parts[0])))


def find_unseen(args: Namespace) -> UnseenImages:
    """As `build_source` chose what the run was pretrained on, checked against the checkpoint's record of it."""
    seen, recorded = build_source(args, "pretrain"), vars(args).get("data_identity")
    if recorded not in (None, data_identity(seen)):
        raise UserError(
            f"--data_path {args.data_path} does not hold the images that {args.run} was pretrained on "
            f"({data_identity(seen)} instead of {recorded})"
        )
    # Sets without files count as "SET/pretrain/N" in pretraining.
    names = {re.sub(r"^(\w+)/pretrain/(\d+)$", r"\1/train/\2", name) for name in image_names(seen)}
    everything = Namespace(**{**vars(args), "max_images": None})
    train, test = (build_eval_dataset(everything, split) for split in ("train", "val"))
    if not train.source.classes:
        raise UserError(f"--data_path {args.data_path} has no class folders, but a probe needs labels")
    return UnseenImages(train, [at for at, name in enumerate(image_names(train.source)) if name not in names], test)


# --- Probes ---


def fold_of(name: str, folds: int, seed: int) -> int:
    """A function of the image's name, so that all runs share the folds."""
    return derive_seed("fold", seed, name) % folds


def cross_fit(
    features: torch.Tensor, labels: torch.Tensor, folds: torch.Tensor, num_classes: int, l2: float, device: torch.device
) -> torch.Tensor:
    """The five likeliest classes [N, 5] of each image, by a probe fitted on the images of other folds [N].

    No probe is fitted on images of fold -1.
    """
    top5 = torch.empty(len(labels), 5, dtype=torch.int64)
    for fold in folds.unique().tolist():
        chosen, others = folds == fold, (folds != fold) & (folds >= 0)
        head = fit_softmax(features[others], labels[others], num_classes, l2, device)
        top5[chosen] = predict(head, features[chosen])[0, 0]
    return top5


def probe_all(
    unseen: FeatureSet, num_encoders: int, folds: torch.Tensor, num_classes: int, l2: float, device: torch.device
) -> torch.Tensor:
    """The five likeliest classes of each image by each encoder and kind of features: int64 [E, F, N, 5]."""
    tokens = unseen.features.view(len(unseen), num_encoders, 2, -1)
    inputs = [x for e in range(num_encoders) for x in (tokens[:, e, 0], tokens[:, e, 1], tokens[:, e].flatten(1))]
    problems = tracked(inputs, "probes", len(inputs), 1, "probes/s")
    top5 = torch.stack([cross_fit(x, unseen.labels, folds, num_classes, l2, device) for x in problems])
    return top5.view(num_encoders, len(FEATURES), len(unseen), 5)


def unseen_by(args: Namespace, trained: dict) -> UnseenImages:
    """The images that a run with the flags `trained` will be probed on."""
    return find_unseen(settle_probe_args(args, trained))


def settle_probe_args(args: Namespace, trained: dict) -> Namespace:
    """The run's own flags say which images and which kind of encoder; those given here come on top."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    later = vars(main_pretrain.get_args_parser().parse_args([]))  # flags that the run may be older than
    defaults = {"device": None, "output_dir": str(Path(args.run) / "probe")}
    fixed = {"log_dir": "", "data_name": None, "global_pool": True}
    settled = Namespace(**{**later, **trained, **defaults, **given, **fixed})
    settle_shared_args(settled)
    return settled


def main(args: Namespace) -> None:
    paths = last_checkpoints(Path(args.run), args.last)
    args = settle_probe_args(args, load_checkpoint(paths[-1], check=False, mapped=True)["args"])
    device = init_distributed_mode(args)
    images = find_unseen(args)
    names, num_held_out = images.names(), len(images.held_out)
    # Probes are fitted on held-out images or, without any, on test images; the fold of all others is -1.
    fitted_on = num_held_out or len(names)
    fold_at = [fold_of(name, args.folds, args.seed) for name in names[:fitted_on]] + [-1] * (len(names) - fitted_on)
    if len(set(fold_at[:fitted_on])) < 2:
        raise UserError(f"{args.run} leaves {fitted_on} images to fit probes on, too few; give a lower --max_images")
    encoders = load_encoders(paths, device)
    final = list(encoders).index(str(number_of(paths[-1])))
    encoder = list(encoders.values())[final].pooled
    args.model = infer_model(encoder.state_dict(), str(paths[-1]))
    datasets = {"train": images.train, "val": images.test}
    subject = Subject(
        args, encoder, device, paths[-1], file_hash(paths[-1]), None, datasets, {"val": names}, FeatureCache(None)
    )
    report = Report(subject, PROTOCOL)

    unseen = images.features(encoders, device, args)
    folds = torch.tensor(fold_at)[unseen.indices]
    top5 = probe_all(unseen, len(encoders), folds, len(subject.classes), args.l2, device)
    hits = (top5[..., 0] == unseen.labels).numpy()
    chosen = np.array(names)[unseen.indices.numpy()]
    held_out = (unseen.indices < num_held_out).numpy()
    probed = ProbedRun(paths[-1], hash_of_names(chosen), held_out, list(encoders), hits)
    accuracies = probed.accuracies()
    columns = list(next(iter(accuracies.values())))
    rows = [[measure, *(f"{values[part]:.2f}" for part in columns)] for measure, values in accuracies.items()]
    show_table(f"cross-fitted linear probes on {subject.data_name}, Acc@1 (%)", ["measure", *columns], rows)
    settings, fitted = {"folds": args.folds, "l2": args.l2, "last": args.last}, int((folds >= 0).sum())
    arrays = {"encoders": probed.encoders, "features": FEATURES, "hits": hits, "held_out": held_out}
    # The predictions are those of the last checkpoint's mean token.
    report.write(Outcome(unseen, top5[final, :1], [args.seed], settings, fitted, {"measures": accuracies}, arrays))


if __name__ == "__main__":
    run(main, get_args_parser())
