"""A snapshot of a pretraining run: a checkpoint's networks, what they do to images, and which images to show."""

import os
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from masking import Ask, Masking, image_keys, masking_of
from models_mae import MaskedAutoencoderViT
from models_vit import mae_of
from util import checkpoint as ckpt
from util.arguments import DEFAULT_DATA_PATH, add_data_arguments, refuse_unused_data_flags
from util.cli import ArgumentParser, UserError, logger
from util.data.decode import MODES, open_image, to_mode
from util.data.listing import Names, list_images
from util.data.sources import ImageList, Source, build_source
from util.datasets import Values, build_eval_transform
from util.misc import generator
from util.plots.style import short_names, verbatim


@dataclass
class Masked:
    """What a snapshot does to images [N, C, H, W]: the masking module's values [N, L] or None, the mask [N, L],
    predicted patches [N, L, P]."""

    values: torch.Tensor | None
    mask: torch.Tensor  # 0 is keep, 1 is remove
    pred: torch.Tensor


@dataclass
class Snapshot:
    """The networks of a checkpoint in evaluation mode, and the masks of its run."""

    name: str  # of the run
    model: MaskedAutoencoderViT
    masking: Masking
    settings: dict  # the run's flags; empty if the file has none
    epoch: int | None  # the last complete one, from 0
    lambda_cl: float | None  # None if masks do not follow it
    mask_ratio: float

    @property
    def title(self) -> str:
        parts = [verbatim(self.name)]
        if self.epoch is not None:
            epochs = self.settings.get("epochs")
            parts.append(f"after epoch {self.epoch + 1}" + (f" of {epochs}" if epochs else ""))
        masks = f"{self.masking.settings.masking} masks"
        parts.append(masks if self.lambda_cl is None else f"$\\lambda_{{CL}}$ = {self.lambda_cl:.2f}")
        return ", ".join(parts)

    @property
    def statistics(self) -> tuple[Values, Values]:
        """Mean and standard deviation of the pixels, if recorded."""
        return self.settings.get("mean"), self.settings.get("std")

    @torch.no_grad()
    def mask(self, imgs: torch.Tensor, seed: int = 0, first: int = 0) -> Masked:
        """Mask and reconstruct as in training; `seed` is for random masks, `first` the index of the first image if a
        larger set is masked in parts."""
        values, ask = self.masking.values(imgs), self.ask(imgs, seed, first)
        _, pred, mask = self.model(imgs, ask.mask_ratio, **self.masking.choose(ask, values))
        return Masked(values, mask, pred)

    def ask(self, imgs: torch.Tensor, seed: int, first: int = 0) -> Ask:
        index = torch.arange(first, first + len(imgs)) + (seed << 32)
        ask = self.masking.ask(imgs, index, 0, 0.0)
        ask.lambda_cl, ask.mask_ratio = self.lambda_cl or 0.0, self.mask_ratio
        # The same draw for all snapshots: masks change between them because of training, not by chance.
        ask.keys = image_keys(0, 0, index.to(imgs.device))
        return ask

    @torch.no_grad()
    def hidden_share(self, imgs: torch.Tensor, draws: int = 64) -> torch.Tensor:
        """How often each patch [N, L] is hidden, over masks drawn with `draws` seeds."""
        values = self.masking.values(imgs)
        return torch.stack([self.mask_alone(imgs, values, seed) for seed in range(draws)]).mean(dim=0)

    def mask_alone(self, imgs: torch.Tensor, values: torch.Tensor | None, seed: int) -> torch.Tensor:
        """The mask [N, L] without a reconstruction."""
        ask = self.ask(imgs, seed)
        chosen = self.masking.choose(ask, values)
        if "visible" in chosen:
            return (~chosen["visible"]).float()
        kept = int(ask.num_patches * (1 - ask.mask_ratio))
        return (chosen["noise"].argsort(dim=1).argsort(dim=1) >= kept).float()


def load_snapshot(path: Path, name: str, norm_pix_loss: bool = False, device: torch.device | str = "cpu") -> Snapshot:
    """The networks of a checkpoint of this project or of upstream MAE. `norm_pix_loss` is for files without flags."""
    checkpoint = ckpt.load_checkpoint(path)
    settings = ckpt.settings_of(checkpoint)
    model = mae_of(checkpoint, str(path))
    model.norm_pix_loss = settings.get("norm_pix_loss", norm_pix_loss)
    masking = masking_of(checkpoint, model, str(path))
    if masking.module is not None:
        masking.module.to(device).eval()
    epoch, weight = checkpoint.get("epoch"), ckpt.lambda_cl_of(checkpoint)
    # Older checkpoints do not store the ratio. Within the first epoch, none is complete yet.
    ratio = checkpoint.get("moment", {}).get("mask_ratio", masking.settings.ratio(max(epoch or 0, 0)))
    return Snapshot(name, model.to(device).eval(), masking, settings, epoch, weight, ratio)


def snapshots_of(path: Path) -> list[Path]:
    """A run's checkpoints from the oldest to the newest, or the file itself."""
    if not path.is_dir():
        return [path]
    found = ckpt.numbered_checkpoints(path)[::-1] or list(path.glob(ckpt.LAST))
    if not found:
        raise UserError(f"{path} is a folder without checkpoint-N.pth")
    return found


def evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spaced; always the last, and the first unless `most` is 1."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    return [items[(len(items) - 1) * i // (most - 1)] for i in range(most)]


# --- Which runs, which images ---


def name_runs(args: Namespace) -> None:
    """Set `args.names`, one for each of `args.runs`: by default their folders' names."""
    if missing := [path for path in args.runs if not Path(path).exists()]:
        raise UserError(f"there is no checkpoint or folder {missing[0]}")
    if args.names is None:
        folders = [Path(os.path.abspath(path if Path(path).is_dir() else Path(path).parent)) for path in args.runs]
        distinct = list(dict.fromkeys(folders))
        names = dict(zip(distinct, short_names(distinct), strict=True))
        args.names = [names[folder] for folder in folders]
    if len(args.names) != len(args.runs):
        raise UserError(f"--names has {len(args.names)} names for {len(args.runs)} runs; give one for each")


def checkpoints_by_run(named: Iterable[tuple[str, str]]) -> dict[str, list[Path]]:
    """The checkpoints of folders or files by the name of their run; those with the same name belong to one run."""
    runs: dict[str, list[Path]] = {}
    for name, path in named:
        runs.setdefault(name, []).extend(snapshots_of(Path(path)))
    return runs


def open_source(args: Namespace, snapshot: Snapshot) -> Source:
    """`--images`, or a data set, by default the run's; its held-out images if there are any."""
    if args.images:
        return ImageList(Names.pack(path for given in args.images for path in image_files(Path(given))))
    refuse_unused_data_flags(args)
    args = Namespace(**vars(args))  # another run's data may be others
    if args.data_set == "folder" and args.data_path is None:  # none given: use the run's, as far as flags do not differ
        for name, default in data_flags().items():
            if getattr(args, name) == default and name in snapshot.settings:
                setattr(args, name, snapshot.settings[name])
    args.input_size, args.in_chans = list(snapshot.model.img_size), snapshot.model.in_chans
    if args.data_set == "folder":
        args.data_path = args.data_path or DEFAULT_DATA_PATH
        if args.data_path == DEFAULT_DATA_PATH and not Path(DEFAULT_DATA_PATH).is_dir():
            raise UserError("which images? Give --images FILE ..., --data_path FOLDER or --data_set shapes")
    listing = list_images(args)
    seen = listing is not None and args.split is None and listing.place("val") is None
    return build_source(args, "train" if seen else "val", listing=listing)


def data_flags() -> dict[str, Any]:
    """All flags that define a data set, with their defaults."""
    add_data_arguments(parser := ArgumentParser(), of_run=True)
    return vars(parser.parse_args([]))


def image_files(path: Path) -> list[str]:
    """A file itself, or all image files in a folder and below."""
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.suffix.lower() in IMG_EXTENSIONS)
        if not files:
            raise UserError(f"--images {path}: no image files in this folder")
        return files
    if not path.exists():
        raise UserError(f"--images {path}: no such file or folder")
    return [str(path)]


def read_images(source: Source, most: int, seed: int) -> list[Image.Image]:
    """At most `most` images, drawn from the source; unreadable ones are skipped and reported."""
    indices = torch.randperm(len(source), generator=generator("pictures", seed))[:most].sort().values.tolist()
    images = [image for index in indices if (image := readable_image(source, index)) is not None]
    if not images:
        raise UserError("none of the images can be read")
    return images


def readable_image(source: Source, index: int) -> Image.Image | None:
    try:
        data = source.read(index)
        image = open_image(data) if isinstance(data, bytes) else data
        image.load()
        return image
    except Exception as error:  # on damaged files, decoders raise almost anything
        logger.warning("unreadable image, left out: %s (%s)", source.name(index), error)
        return None


def as_input(images: list[Image.Image], snapshot: Snapshot, device: torch.device) -> torch.Tensor:
    """Images [N, C, H, W] as input for the snapshot's networks."""
    in_chans, (mean, std) = snapshot.model.in_chans, snapshot.statistics
    size = list(snapshot.model.img_size)
    transform = build_eval_transform(Namespace(input_size=size, in_chans=in_chans, mean=mean, std=std))
    return torch.stack([transform(to_mode(image, MODES[in_chans])) for image in images]).to(device)
