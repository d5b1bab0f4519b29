"""What evaluations share: a frozen encoder, labelled data, and the encoder's features of it."""

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from models_vit import VisionTransformer, infer_model, load_encoder
from util.arguments import name_of_data, settle_shared_args
from util.checkpoint import load_checkpoint, resolve_checkpoint, settings_of
from util.cli import UserError, file_name, logger
from util.data.listing import Listing, list_images
from util.data.sources import image_names, labels_of
from util.datasets import ImageDataset, build_eval_dataset, pixel_statistics
from util.evaluation.features import FeatureCache, FeatureSet, content_hash, extract_features, file_hash
from util.misc import amp_dtype, init_distributed_mode, on_first_process, precision

SPLITS = {"train": "training", "val": "test"}


@dataclass
class Subject:
    """What is evaluated: an encoder, on the training images and the test images ("val") of a labelled data set."""

    args: Namespace
    encoder: VisionTransformer
    device: torch.device
    checkpoint: Path | None
    checkpoint_sha256: str | None
    listing: Listing | None
    datasets: dict[str, ImageDataset]
    names: dict[str, list[str]]  # of all images, by split
    cache: FeatureCache

    @property
    def classes(self) -> list[str]:
        return self.datasets["train"].source.classes

    @property
    def data_name(self) -> str:
        return self.args.data_name or name_of_data(self.args)

    @property
    def file_name(self) -> str:
        """The data's name as part of a file name."""
        return file_name(self.data_name)

    def settings(self) -> dict:
        """What the features depend on besides weights and images."""
        args = self.args
        return {
            "model": args.model,
            "pooling": "global_pool" if args.global_pool else "cls_token",
            "input_size": list(args.input_size),
            "precision": precision(args.amp, self.device),
            **self.own_statistics(),
        }

    def own_statistics(self) -> dict:
        """Mean and standard deviation of the pixels, unless they are ImageNet's."""
        mean, std = self.args.mean, self.args.std
        return {} if (mean, std) == pixel_statistics(self.args.in_chans) else {"mean": mean, "std": std}

    def data_settings(self) -> dict:
        """The flags that select the images."""
        names = ("split",) if self.args.split else ()
        names += ("max_images",) if self.args.max_images else ()
        names += ("split_seed",) if names else ()
        names += ("num_classes", "class_seed") if self.args.num_classes else ()
        names += ("class_list",) if self.args.class_list else ()
        return {name: getattr(self.args, name) for name in names}

    def check_outputs(self, nb_classes: int | None) -> None:
        """A head needs an output for each class; `--nb_classes` may ask for more."""
        if nb_classes is not None and nb_classes < len(self.classes):
            raise UserError(f"--nb_classes {nb_classes} is less than the {len(self.classes)} classes of the data")

    def fingerprint(self, split: str) -> str:
        source = self.datasets[split].source
        if getattr(self.args, "verify_cache", False):
            return content_hash(source)
        return on_first_process(source.fingerprint)

    def features(self, split: str) -> FeatureSet:
        """Features of a split's centre crops; extracted once, by all processes together."""
        dataset, args = self.datasets[split], self.args
        depends_on = {
            **self.settings(),
            "checkpoint": self.checkpoint_sha256 or f"random weights, seed {args.seed}",
            "transform": repr(dataset.transform),
            "mode": dataset.mode,
            "images": self.fingerprint(split),
        }
        extract = partial(
            extract_features,
            self.encoder.forward_features,
            dataset,
            list(range(len(dataset))),
            width=self.encoder.embed_dim,
            device=self.device,
            amp=amp_dtype(args.amp, self.device),
            batch_size=args.batch_size,
            num_workers=args.num_workers,
            pin_mem=args.pin_mem and self.device.type == "cuda",
            header=f"features of {split}",
        )
        labels, width = labels_of(dataset.source), self.encoder.embed_dim
        found = self.cache.get(split, depends_on, lambda parts: extract(parts=parts), labels=labels, width=width)
        unreadable = len(dataset) - len(found)
        if unreadable > args.max_bad_images:  # cached features may come from a run with a higher limit
            raise UserError(f"{unreadable} images of {split} cannot be read, more than --max_bad_images allows")
        if unreadable:
            logger.info("%d unreadable images of %s are left out", unreadable, split)
        return found


def open_subject(args: Namespace, drop_path: float = 0.0) -> Subject:
    """Check the flags, load the checkpoint and list the images, so that mistakes surface before any work is done."""
    settle_shared_args(args)
    device = init_distributed_mode(args)
    checkpoint = resolve_checkpoint(args.finetune) if args.finetune else None
    encoder = load_encoder(
        checkpoint,
        model=args.model,
        input_size=args.input_size,
        in_chans=args.in_chans,
        global_pool=args.global_pool,
        seed=args.seed,
        drop_path=drop_path,
    )
    return subject_of(encoder, checkpoint, device, args)


def subject_of(encoder: VisionTransformer, checkpoint: Path | None, device: torch.device, args: Namespace) -> Subject:
    """Like `open_subject`, for an encoder already loaded from the file `checkpoint`."""
    # From here on, the flags hold the values in use, given or inferred.
    args.model = args.model or infer_model(encoder.state_dict(), str(checkpoint))
    args.input_size = list(encoder.patch_embed.img_size)
    args.in_chans = encoder.patch_embed.proj.in_channels
    trained = settings_of(load_checkpoint(checkpoint, check=False, mapped=True)) if checkpoint else {}
    statistics = (getattr(args, name) or trained.get(name) for name in ("mean", "std"))
    args.mean, args.std = pixel_statistics(args.in_chans, *statistics)
    listing = list_images(args)
    classes = classes_of_training(trained.get("classes"), checkpoint, listing, args)
    datasets = {split: build_eval_dataset(args, split, classes, listing) for split in SPLITS}
    if not all(dataset.source.classes for dataset in datasets.values()):
        raise UserError(
            f"--data_path {args.data_path} has no class folders or label column, but an evaluation needs labels"
        )
    subject = Subject(
        args,
        encoder.to(device),
        device,
        checkpoint,
        file_hash(checkpoint) if checkpoint else None,
        listing,
        datasets,
        names={split: image_names(dataset.source) for split, dataset in datasets.items()},
        cache=FeatureCache(feature_folder(args)),
    )
    log_subject(subject)
    return subject


def classes_of_training(
    trained: list[str] | None, checkpoint: Path | None, listing: Listing | None, args: Namespace
) -> list[str] | None:
    """The classes that the checkpoint was trained on, if the data has more and no flag selects any; else None."""
    if listing is None or args.num_classes or args.class_list:
        return None
    available = listing.classes(listing.place("train") or "")
    if not trained or not set(trained) < set(available):
        return None
    if args.num_classes == 0:
        logger.info("all %d classes; %s was trained on %d of them", len(available), checkpoint, len(trained))
        return None
    number = f"{len(trained)} of {len(available)}"
    logger.info("only the %s classes that %s was trained on; --num_classes 0 takes all", number, checkpoint)
    return [name for name in available if name in trained]


def feature_folder(args: Namespace) -> Path | None:
    """Where features are cached. Programs that train the encoder do not cache features, and lack these flags."""
    if "no_cache" not in args or args.no_cache:
        return None
    if args.cache_dir:
        Path(args.cache_dir).mkdir(parents=True, exist_ok=True)  # fail before any work is done
        return Path(args.cache_dir)
    return Path(args.output_dir) / "features" if args.output_dir else None


def log_subject(subject: Subject) -> None:
    settings, origin = subject.settings(), subject.checkpoint or f"random weights, seed {subject.args.seed}"
    size = "x".join(map(str, settings["input_size"]))
    shape = f"{settings['pooling']}, width {subject.encoder.embed_dim}, {size} px"
    logger.info("%s (%s) from %s", settings["model"], shape, origin)
    images = " and ".join(f"{len(subject.datasets[split])} {name}" for split, name in SPLITS.items())
    logger.info("%s: %s images of %d classes", subject.data_name, images, len(subject.classes))
