"""How a run begins: afresh, from given weights, or where another one stopped, and then with the same settings."""

import hashlib
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from models_cmm import CurriculumMaskingModule
from util import checkpoint as ckpt
from util.cli import UserError, logger
from util.data.sources import Source, image_names
from util.misc import NativeScalerWithGradNormCount, gather_objects, is_main_process

# Flags that may change from one part of a run to the next: they change no result but for rounding. Others must agree.
# Some are compared by what they lead to (see `identity`): where the images lie may change, the images may not.
FREE = {
    *("output_dir", "log_dir", "save_every", "save_minutes", "keep", "vis_every", "knn_every"),
    *("resume", "init", "finetune", "start_epoch", "allow_changes", "eval", "dist_eval", "data_name", "classes"),
    *("data_path", "download", "class_list", "max_bad_images", "num_workers", "pin_mem"),
    *("device", "amp", "compile", "grad_checkpointing", "batch_size", "global_batch_size", "cmm_lr"),
    *("world_size", "local_rank", "dist_on_itp", "dist_url", "commit"),
}


SETTINGS = ("weight_decay", "lr_scale")  # of parameter groups: a resumed run has its own, which may be others


@dataclass
class TrainingState:
    """Everything that training changes. For vanilla MAE, and for a classifier, the CMM's three are None."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scaler: NativeScalerWithGradNormCount
    cmm: CurriculumMaskingModule | None = None
    optimizer_cmm: torch.optim.Optimizer | None = None
    scaler_cmm: NativeScalerWithGradNormCount | None = None

    def state_dict(self) -> dict[str, dict]:
        return {name: part.state_dict() for name, part in vars(self).items() if part is not None}

    def load(self, checkpoint: dict, source: str) -> None:
        for name, part in vars(self).items():
            if part is None:
                continue
            if name not in checkpoint:
                raise UserError(
                    f"{source} has no {name!r}; was it trained with another --masking, or not by this program?"
                )
            if isinstance(part, torch.nn.Module):
                ckpt.load_weights(part, checkpoint[name], source)
            elif isinstance(part, torch.optim.Optimizer):
                own = [{key: group[key] for key in SETTINGS if key in group} for group in part.param_groups]
                part.load_state_dict(checkpoint[name])
                for group, values in zip(part.param_groups, own, strict=True):
                    group.update(values)
            else:
                part.load_state_dict(checkpoint[name])


@dataclass
class Start:
    """The first epoch to train, how many of its updates are done already, and what it has logged so far."""

    epoch: int
    steps_done: int = 0
    log_state: dict | None = None


def begin(state: TrainingState, steps_per_epoch: int, args: Namespace) -> Start:
    """Load what `--resume` or `--init` name, if anything. All processes must come to the same."""
    found = find_checkpoint(args)
    if found is None:
        if args.init:
            load_init(state, ckpt.load_checkpoint(args.init), args.init)
        start = Start(args.start_epoch)
    elif "optimizer" not in found[0]:  # upstream's released models, for one
        load_init(state, *found)
        start = Start(args.start_epoch)
    else:
        start = go_on(state, *found, steps_per_epoch, args)
    return agreed(start)


def agreed(start: Start) -> Start:
    """`start`, after a check that all processes have the same."""
    if len(set(gather_objects((start.epoch, start.steps_done)))) > 1:
        raise UserError("processes found different checkpoints; put --output_dir on a disk that all of them share")
    return start


def find_checkpoint(args: Namespace) -> tuple[dict, str] | None:
    """The checkpoint that `--resume` names, and its file."""
    folder = Path(args.output_dir) if args.output_dir else None
    if args.resume == "auto":
        return newest_for_all(folder)
    if args.resume:
        return ckpt.load_checkpoint(args.resume), args.resume
    if folder and ckpt.any_checkpoint(folder):
        raise UserError(
            f"--output_dir {folder} holds another run's checkpoints; add --resume auto to continue it, "
            "or choose another folder"
        )
    return None


def newest_for_all(folder: Path | None) -> tuple[dict, str] | None:
    """The first process chooses, so that all take the same file."""
    newest = ckpt.newest_checkpoint(folder) if folder and is_main_process() else None
    path = gather_objects(newest and str(newest[1]))[0]
    if path is not None:
        return (newest[0] if newest else ckpt.load_checkpoint(path)), path
    if folder and ckpt.any_checkpoint(folder):
        raise UserError(f"none of the checkpoints in {folder} can be read; remove them to start from the beginning")
    logger.info("--resume auto: no checkpoint in %s, starting from the beginning", folder)
    return None


def go_on(state: TrainingState, checkpoint: dict, source: str, steps_per_epoch: int, args: Namespace) -> Start:
    if changed := differences(checkpoint.get("args", {}), vars(args)):
        listing = "; ".join(changed)
        if not args.allow_changes:
            raise UserError(
                f"{source} was trained with other settings: {listing}. Give the same, or --allow_changes to go on"
            )
        logger.warning("going on from %s with other settings: %s", source, listing)
    start = Start(checkpoint["epoch"] + 1)
    refuse_later_checkpoints(start.epoch, args)
    state.load(checkpoint, source)
    if log := checkpoint.get("log"):
        if log["iterations"] == steps_per_epoch * args.accum_iter:
            start.steps_done, start.log_state = checkpoint["step"] - start.epoch * steps_per_epoch, log
        else:
            logger.warning("epochs have another length now: epoch %d starts over", start.epoch)
    logger.info("resuming from %s: epoch %d, after %d of its updates", source, start.epoch, start.steps_done)
    return start


def refuse_later_checkpoints(epoch: int, args: Namespace) -> None:
    """A run that goes on from an older file would soon be mistaken for the newer one in the same folder."""
    if not args.output_dir or args.resume == "auto":
        return
    later = [path for path in ckpt.numbered_checkpoints(Path(args.output_dir)) if ckpt.number_of(path) >= epoch]
    if later:
        raise UserError(
            f"--output_dir {args.output_dir} holds {later[-1].name}, which is later than --resume {args.resume}; "
            "remove it and those after it, or choose another folder"
        )


def differences(theirs: dict, ours: dict) -> list[str]:
    """The settings in which two runs differ, as "--flag theirs, now ours". What only one of them knows is no
    difference: it may be older than the flag."""
    theirs, ours = identity(theirs), identity(ours)
    both = [name for name in ours if name in theirs and name not in FREE]
    return [f"{shown(name)} {theirs[name]}, now {ours[name]}" for name in both if theirs[name] != ours[name]]


def identity(args: dict) -> dict:
    """Settings in a form that can be compared: what a run is, not how it is shared out or where its data lies."""
    settings = dict(args)
    if isinstance(settings.get("input_size"), int):  # as upstream has it
        settings["input_size"] = [settings["input_size"]] * 2
    if "batch_size" in settings:
        settings["images per iteration"] = settings["batch_size"] * settings.get("world_size", 1)
    if "data_identity" in settings:
        settings["list of images"] = settings.pop("data_identity")
    if "pretrained_sha256" in settings:
        settings["pretrained weights"] = (settings.pop("pretrained_sha256") or "none")[:16]
    return settings


def shown(name: str) -> str:
    return name if " " in name or name == "precision" else f"--{name}"


def data_identity(source: Source) -> str:
    """A hash of the images' names, in order: the same wherever the folder lies, and cheap for millions of them."""
    # Images without files count as "SET/pretrain/N", in fine-tuning too; a folder's names end in .jpg or the like.
    names = re.sub(r"^(\w+)/train/(\d+)$", r"\1/pretrain/\2", "\n".join(image_names(source)), flags=re.MULTILINE)
    return f"{len(source)} images, {hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:16]}"


def load_init(state: TrainingState, checkpoint: dict, source: str) -> None:
    """Weights alone, for a new run. An encoder without decoder, as upstream publishes them, gets a fresh decoder."""
    weights = dict(checkpoint.get("model", checkpoint))
    own = state.model.state_dict()
    decoder = {name: value for name, value in own.items() if name.startswith("decoder") or name == "mask_token"}
    if not any(name in weights for name in decoder):
        weights |= decoder
        logger.info("%s has no decoder: that is drawn anew", source)
    ckpt.load_weights(state.model, weights, source)
    if state.cmm is not None and "cmm" in checkpoint:
        ckpt.load_weights(state.cmm, checkpoint["cmm"], source)
    logger.info("weights from %s; training starts at its beginning", source)


class Unfinished:
    """One file, written after every epoch and removed at the end. Without a path nothing is kept.

    `identity` holds the settings that must be the same for a probe to be continued.
    """

    def __init__(self, path: Path | None, identity: dict, resume: bool):
        self.path, self.identity = path, identity
        if path is not None and path.exists() and not resume:
            raise UserError(f"{path} is an unfinished probe; add --resume auto to continue it, or delete it")

    def load(self) -> dict | None:
        """What `save` was last given, or None at the very beginning."""
        there = gather_objects(self.path is not None and self.path.exists())
        if not any(there):
            return None
        if not all(there):
            raise UserError(f"only some processes see {self.path}; put --output_dir on a disk that all share")
        state = ckpt.load_checkpoint(self.path)
        theirs = state.get("identity", {})
        if differing := [name for name, value in self.identity.items() if theirs.get(name) != value]:
            raise UserError(f"{self.path} was begun with another {', '.join(differing)}; delete it to start over")
        logger.info("continuing %s after epoch %d", self.path, state["epoch"])
        return state

    def save(self, state: dict) -> None:
        if self.path is not None and is_main_process():
            ckpt.save_checkpoint(self.path, {**state, "identity": self.identity})

    def remove(self) -> None:
        if self.path is not None and is_main_process():
            self.path.unlink(missing_ok=True)
