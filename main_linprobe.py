"""Evaluate a frozen encoder with a linear classifier on its features.

Upstream's protocol, with three seeds: augmented images, re-encoded in each of 90 epochs; a batch of 16,384:
    torchrun --nproc_per_node=8 main_linprobe.py --finetune runs/clmae/checkpoint-399.pth --accum_iter 4 --runs 3

The same head on features extracted once, three seeds, with the learning rate chosen on held-out training images:
    python main_linprobe.py --finetune runs/clmae/checkpoint-399.pth --data_path data/aid --split 0.5 \
        --cache_features --runs 3 --lr_grid 0.03 0.1 0.3 1 3 10

A random-weight baseline, on a machine with no GPU and no images:
    python main_linprobe.py --model vit_micro_patch4 --data_set shapes --cache_features
"""

from argparse import Namespace

from util.arguments import add_evaluation_arguments, check_epochs
from util.cli import ArgumentParser, TrainingDiverged, UserError, count, count_or_zero, logger, non_negative, positive
from util.program import answer_early, place_in_world, run

HELD_OUT = 0.1  # fraction of the training images held out to choose from --lr_grid
CACHED_REPORT = 10  # epochs between log lines with cached features, where epochs are short
SETTINGS = ("epochs", "warmup_epochs", "batch_size", "accum_iter", "weight_decay", "min_lr", "lr_grid")


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_linprobe.py", description=str(__doc__).split("\n")[0])
    probe = parser.add_argument_group("linear probing")
    probe.add_argument("--batch_size", default=512, type=count, help="images per process per iteration")
    probe.add_argument("--epochs", default=90, type=count, help="passes over the data")
    probe.add_argument("--accum_iter", default=1, type=count, help="micro-batches per update")
    probe.add_argument("--runs", default=1, type=count, help="number of runs, with seeds seed, seed + 1, ...")
    probe.add_argument(
        "--cache_features", action="store_true", help="train on features extracted once: no augmentation, much cheaper"
    )
    probe.add_argument("--nb_classes", type=count, help="outputs of the head; default: number of classes")

    optim = parser.add_argument_group("optimization")
    optim.add_argument("--weight_decay", default=0, type=non_negative, help="of the head; upstream uses none")
    optim.add_argument("--lr", type=positive, help="absolute learning rate; default: blr * batch / 256")
    optim.add_argument(
        "--blr", default=0.1, type=non_negative, help="base learning rate, per 256 images of the global batch"
    )
    optim.add_argument("--lr_grid", type=positive, nargs="+", help="--blr values to choose from on held-out images")
    optim.add_argument("--min_lr", default=0.0, type=non_negative, help="lower bound of the cosine schedule")
    optim.add_argument("--warmup_epochs", default=10, type=count_or_zero, help="epochs of linear warm-up")

    state = parser.add_argument_group("resuming")
    state.add_argument("--resume", default="", help="auto: resume in --output_dir; or the file of a head, for --eval")
    state.add_argument("--start_epoch", default=0, type=count_or_zero, help="first epoch, counted from 0")
    state.add_argument("--eval", action="store_true", help="only evaluate the head given by --resume")
    state.add_argument(
        "--dist_eval", action="store_true", help="upstream's; no effect: evaluation is always distributed"
    )
    add_evaluation_arguments(parser)
    return parser


answer_early(__name__, get_args_parser)

from dataclasses import dataclass
from pathlib import Path

import torch

from engine_probe import (
    CachedBatches,
    EncodedBatches,
    LinearHeads,
    build_optimizer,
    no_denormals,
    predict,
    train_one_epoch,
)
from util import checkpoint as ckpt
from util.datasets import build_train_loader, probe_augmentation
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import accuracies, summary
from util.evaluation.results import PROTOCOLS, Outcome, Report, best_epoch, say_if_few_classes
from util.evaluation.subject import Subject, open_subject
from util.evaluation.tables import show_accuracies, show_table
from util.lock import sole_run
from util.misc import amp_dtype, generator, get_world_size
from util.training.resume import Unfinished


def check_args(args: Namespace) -> None:
    """Reject invalid combinations of flags."""
    if args.eval != (args.resume not in ("", "auto")):
        raise UserError("--eval needs --resume FILE, the .pth of a finished probe; --resume auto continues one")
    if args.batch_size * place_in_world()[1] < 2:
        raise UserError("--batch_size 1: batch normalisation needs at least two images")
    if args.lr_grid is not None and args.lr is not None:
        raise UserError("--lr_grid chooses the learning rate and cannot be combined with --lr")
    check_epochs(args)


@dataclass
class Fit:
    """Heads for several seeds, and their test Acc@1 after each epoch, [E, R]."""

    seeds: list[int]
    heads: LinearHeads
    curve: torch.Tensor
    train_images: int


def absolute_rate(blr: float, args: Namespace) -> float:
    return blr * args.batch_size * args.accum_iter * get_world_size() / 256


def build_batches(
    subject: Subject, seeds: list[int], train: FeatureSet | None, args: Namespace
) -> CachedBatches | EncodedBatches:
    """Batches of the images in `train`; of all training images if it is None."""
    device, global_batch = subject.device, args.batch_size * get_world_size()
    if args.cache_features and train is not None:
        batches = CachedBatches(train, seeds, global_batch, device)
    else:
        source, (seed,) = subject.datasets["train"].source, seeds
        subset = None if train is None else train.indices.tolist()
        loader = build_train_loader(source, probe_augmentation(args), seed, args, subset)
        batches = EncodedBatches(subject.encoder, loader, device, amp_dtype(args.amp, device), (args.mean, args.std))
    if len(batches) < args.accum_iter:
        raise UserError(
            f"{batches.num_samples} training images do not fill one batch of {global_batch * args.accum_iter}; "
            "lower --batch_size"
        )
    return batches


def fit(
    subject: Subject,
    batches: CachedBatches | EncodedBatches,
    seeds: list[int],
    rates: list[float],
    unfinished: Unfinished,
    args: Namespace,
    test: FeatureSet | None = None,
) -> Fit:
    """Train a head for each seed and absolute learning rate; with `test`, track the test accuracy."""
    num_classes = args.nb_classes or len(subject.classes)
    heads = LinearHeads(seeds, len(rates), subject.encoder.embed_dim, num_classes).to(subject.device)
    optimizer = build_optimizer(heads, args)
    peaks = torch.tensor(rates, device=subject.device)
    start, curve = args.start_epoch, []
    if begun := unfinished.load(heads, optimizer):
        start, curve = begun[0] + 1, begun[1]
    for epoch in range(start, args.epochs):
        losses = train_one_epoch(heads, batches.epoch(epoch), len(batches), optimizer, peaks, epoch, args)
        if not losses.isfinite().any(dim=1).all():  # in a grid, at least one rate per run must survive
            raise TrainingDiverged(f"the loss of the head is not finite in epoch {epoch + 1}; try a lower --blr")
        if test is not None:
            acc1, _ = accuracies(predict(heads, test.features), test.labels)  # [R, G]
            curve.append(acc1[:, 0].tolist())
        if not args.cache_features or (epoch + 1) % CACHED_REPORT == 0 or epoch + 1 == args.epochs:
            loss = " ".join(f"{value:.4f}" for value in losses.nanmean(dim=0))  # for each learning rate
            accuracy = f"  test Acc@1: {sum(curve[-1]) / len(curve[-1]):.2f}" if curve else ""
            logger.info("epoch %d/%d  loss: %s%s", epoch + 1, args.epochs, loss, accuracy)
        unfinished.save(epoch, curve, heads, optimizer)
    return Fit(seeds, heads, torch.tensor(curve), batches.num_samples)


def choose_rate(
    subject: Subject, train: FeatureSet, groups: list[list[int]], files: dict[str, Unfinished], args: Namespace
) -> float:
    """The value of `--lr_grid` whose heads are best, after the last epoch, on held-out training images.

    All runs share it. Test images are not used.
    """
    order = torch.randperm(len(train), generator=generator("held out", args.seed))
    held_out = order[: max(round(HELD_OUT * len(train)), 1)]
    rest = order[len(held_out) :].sort().values
    rates = [absolute_rate(blr, args) for blr in args.lr_grid]
    scores = []
    for seeds in groups:
        batches = build_batches(subject, seeds, train.take(rest), args)
        heads = fit(subject, batches, seeds, rates, files[f"lr_grid-seed{seeds[0]}"], args).heads
        acc1, _ = accuracies(predict(heads, train.features[held_out]), train.labels[held_out])  # [R, G]
        finite = heads.weight.isfinite().flatten(2).all(dim=2).cpu()
        scores.append(torch.where(finite, acc1, 0))
    mean = torch.cat(scores).mean(dim=0)
    rows = [[f"{blr:g}", f"{score:.2f}"] for blr, score in zip(args.lr_grid, mean, strict=True)]
    show_table(f"Acc@1 on {len(held_out)} held-out training images", ["blr", "Acc@1"], rows)
    return args.lr_grid[int(mean.argmax())]


def unfinished_files(subject: Subject, groups: list[list[int]], args: Namespace) -> dict[str, Unfinished]:
    """Where each training run keeps its state: nowhere with cached features, where starting over is quick."""
    identity = {name: getattr(args, name) for name in (*SETTINGS, "blr", "lr", "nb_classes", "seed", "exact_decode")}
    identity |= subject.settings() | {"processes": get_world_size(), "checkpoint": subject.checkpoint_sha256}
    kept = args.output_dir and not args.cache_features and not args.eval
    identity |= {f"images of {split}": subject.fingerprint(split) for split in ("train", "val") if kept}
    stages = ("lr_grid-seed", "seed") if args.lr_grid else ("seed",)
    labels = [f"{stage}{seeds[0]}" for seeds in groups for stage in stages]

    def path(label: str) -> Path | None:
        return Path(args.output_dir) / f"linprobe-{subject.file_name}-{label}.unfinished" if kept else None

    return {label: Unfinished(path(label), identity, resume=args.resume == "auto") for label in labels}


def train_probe(
    subject: Subject, test: FeatureSet, groups: list[list[int]], files: dict[str, Unfinished], args: Namespace
) -> list[Fit]:
    """Heads for every group of seeds; sets `args.lr` to the learning rate they were trained with."""
    if args.lr_grid:
        args.blr = choose_rate(subject, subject.features("train"), groups, files, args)
        logger.info("--blr %g is best on held-out training images; now training on all of them", args.blr)
    args.lr = absolute_rate(args.blr, args) if args.lr is None else args.lr
    fits = []
    train = subject.features("train") if args.cache_features else None
    for seeds in groups:
        batches = build_batches(subject, seeds, train, args)
        fits.append(fit(subject, batches, seeds, [args.lr], files[f"seed{seeds[0]}"], args, test))
    return fits


def check_probe(state: dict, path: str) -> None:
    """Reject a file that is not what `main` writes at the end of a probe."""
    kinds = {"probe": list, "protocol": str, "settings": dict, "train_images": int, "classes": list}
    whole = all(isinstance(state.get(name), kind) for name, kind in kinds.items()) and state["protocol"] in PROTOCOLS
    whole = whole and isinstance(state.get("features", {}), dict)  # older files have none
    if not whole or not state["probe"] or not all(map(is_head, state["probe"])):
        raise UserError(f"--resume {path} is not the .pth of a finished linear probe")


def is_head(entry: object) -> bool:
    """Whether `entry` is a list of seeds, and the state of their heads."""
    match entry:
        case [[*seeds], {"bias": torch.Tensor()}]:
            return all(isinstance(seed, int) for seed in seeds)
    return False


def restore_probe(state: dict, subject: Subject, path: str) -> list[Fit]:
    if state["classes"] != subject.classes:
        raise UserError(f"--resume {path} was trained on other classes than those of {subject.data_name}")
    ours = subject.settings()
    theirs = state.get("features", ours)
    for name in theirs | ours:
        if name != "precision" and theirs.get(name) != ours.get(name):
            raise UserError(
                f"--resume {path} was trained with {name} {theirs.get(name)}, but here it is {ours.get(name)}"
            )
    if state.get("checkpoint_sha256") != subject.checkpoint_sha256:
        logger.warning("%s was trained on the features of another checkpoint", path)
    fits = []
    for seeds, weights in state["probe"]:
        heads = LinearHeads(seeds, 1, subject.encoder.embed_dim, weights["bias"].shape[-1]).to(subject.device)
        ckpt.load_weights(heads, weights, path)
        fits.append(Fit(seeds, heads, torch.zeros(0, len(seeds)), state["train_images"]))
    return fits


def main(args: Namespace) -> None:
    check_args(args)
    finished = ckpt.load_checkpoint(args.resume) if args.eval else {}
    if args.eval:
        check_probe(finished, args.resume)
        args.seed = finished["probe"][0][0][0]  # an encoder of random weights depends on it
    subject = open_subject(args)
    subject.check_outputs(args.nb_classes)
    report = Report(subject, finished.get("protocol", "linprobe-cached" if args.cache_features else "linprobe"))
    seeds = [args.seed + i for i in range(args.runs)]
    # With cached features, all runs train together; otherwise each augments and encodes its own images.
    groups = [seeds] if args.cache_features else [[seed] for seed in seeds]
    files = unfinished_files(subject, groups, args)
    test = subject.features("val")
    if finished:
        fits, settings = restore_probe(finished, subject, args.resume), finished["settings"]
    else:
        # The probe has its own state files, and so its own lock: other evaluations may write to the same folder.
        with (
            no_denormals(),
            sole_run("" if args.cache_features else args.output_dir, f".linprobe-{subject.file_name}.lock"),
        ):
            fits = train_probe(subject, test, groups, files, args)
        settings = {name: getattr(args, name) for name in SETTINGS}
    top5 = torch.cat([predict(fit.heads, test.features)[:, 0] for fit in fits])  # [R, N, 5]

    details = show_results(subject, test, top5, fits, report, args)
    if not finished:
        (details if args.lr_grid else settings)["lr"] = args.lr  # chosen from the grid, or given
    seeds = [seed for fit in fits for seed in fit.seeds]
    path = report.write(Outcome(test, top5, seeds, settings, fits[0].train_images, details))
    if path and not finished:
        state = {
            "probe": [[fit.seeds, fit.heads.state_dict()] for fit in fits],
            "protocol": report.protocol,
            "settings": settings,
            "features": subject.settings(),
            "train_images": fits[0].train_images,
            "classes": subject.classes,
            "checkpoint_sha256": subject.checkpoint_sha256,
        }
        ckpt.save_checkpoint(path.with_suffix(".pth"), state)
    for file in files.values():
        file.remove()


def show_results(
    subject: Subject, test: FeatureSet, top5: torch.Tensor, fits: list[Fit], report: Report, args: Namespace
) -> dict:
    """The last epoch is the result. The best epoch on the test images is for reference only, and returned as such."""
    metrics = summary(top5, test.labels)
    seeds = ", ".join(str(seed) for fit in fits for seed in fit.seeds)
    title = f"linear probing on {subject.data_name}, last epoch, seeds {seeds}"
    say_if_few_classes(fits[0].heads.bias.shape[-1])
    show_accuracies(title, metrics)
    report.accuracies(metrics, args.epochs)
    curve = torch.cat([fit.curve for fit in fits], dim=1).mean(dim=1).tolist()  # [E], mean over runs
    by_epoch = dict(enumerate(curve, start=args.start_epoch))
    for epoch, acc1 in by_epoch.items():
        report.scalar("acc1_by_epoch", acc1, epoch)
    return best_epoch(by_epoch)


if __name__ == "__main__":
    run(main, get_args_parser(), timestamps=True)
