"""How a run begins: from scratch, from given weights, or where an earlier run stopped, with the same settings."""

import hashlib
import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from util import checkpoint as ckpt
from util.cli import UserError, logger
from util.data.sources import Source, image_names
from util.misc import NativeScalerWithGradNormCount, gather_objects, is_main_process

MOMENTS = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "LARS": {"mu"}}  # what an optimizer stores for each parameter
FIRST_SCALE = 2.0**16  # initial loss scale; a lower one means that steps were skipped

# Flags that may change on resuming, because they affect results only by rounding. All others must agree. Some are
# compared by their effect (see `identity`): the location of the images may change, the images may not.
FREE = {
    *("output_dir", "log_dir", "track", "save_every", "save_minutes", "keep", "vis_every", "knn_every"),
    *("resume", "init", "finetune", "start_epoch", "allow_changes", "eval", "dist_eval", "data_name", "classes"),
    *("data_path", "cache_dir", "download", "file_list", "class_list", "max_bad_images", "num_workers", "pin_mem"),
    *(
        "device",
        "amp",
        "attention",
        "attention_kernels",
        "compile",
        "grad_checkpointing",
        "batch_size",
        "global_batch_size",
        "cmm_lr",
    ),
    *("world_size", "local_rank", "dist_on_itp", "dist_url", "commit"),
}


@dataclass
class TrainingState:
    """Everything that training changes. The last three belong to a learned masking strategy; otherwise None."""

    model: nn.Module
    optimizer: Optimizer
    scaler: NativeScalerWithGradNormCount
    cmm: nn.Module | None = None
    optimizer_cmm: Optimizer | None = None
    scaler_cmm: NativeScalerWithGradNormCount | None = None

    def masking_parts(self) -> tuple[nn.Module, Optimizer, NativeScalerWithGradNormCount]:
        """Module, optimizer and scaler of a learned masking strategy."""
        if self.cmm is None or self.optimizer_cmm is None or self.scaler_cmm is None:
            raise ValueError("this run's masks are not learned")
        return self.cmm, self.optimizer_cmm, self.scaler_cmm

    def loss_scales(self) -> dict[str, torch.Tensor]:
        """The loss scale of each network under fp16, on the device."""
        scalers = {"loss_scale": self.scaler, "cmm/loss_scale": self.scaler_cmm}
        scales = {name: scaler and scaler.loss_scale() for name, scaler in scalers.items()}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def state_dict(self) -> dict[str, dict]:
        return {name: part.state_dict() for name, part in vars(self).items() if part is not None}

    def load(self, checkpoint: dict, source: str) -> None:
        parts = {name: part for name, part in vars(self).items() if part is not None}
        if missing := [name for name in parts if name not in checkpoint]:
            raise UserError(
                f"{source} has no {missing[0]!r}; was it trained with another --masking, or not by this program?"
            )
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                ckpt.load_weights(part, checkpoint[name], source)
            elif isinstance(part, Optimizer):
                network = self.model if part is self.optimizer else self.cmm
                refuse_lost_moments(checkpoint, name, source)
                load_optimizer(part, with_decaying_tokens(checkpoint[name], part, network), source)
            else:
                part.load_state_dict(checkpoint[name])


def refuse_lost_moments(checkpoint: dict, name: str, source: str) -> None:
    """An optimizer must have state after its first step; under fp16, all steps so far may have been skipped. With
    --start_epoch, steps are also counted that were not made."""
    began = checkpoint.get("step", 0) > 0 or checkpoint.get("epoch", -1) >= 0
    began = began and not ckpt.settings_of(checkpoint).get("start_epoch")
    scale = checkpoint[name.replace("optimizer", "scaler")].get("scale", FIRST_SCALE)
    if began and scale >= FIRST_SCALE and not checkpoint[name]["state"]:
        raise UserError(f"{source} has lost its optimizer state; use an earlier checkpoint, or --init for its weights")


def load_optimizer(optimizer: Optimizer, state: dict, source: str) -> None:
    """Load the state of each parameter after checking that it fits, as fused AdamW does not check shapes. The groups'
    settings stay the run's own."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in state["param_groups"]]:
        raise UserError(f"{source} has optimizer state for other parameters than this model's; check --model")
    for number, kept in state["state"].items():
        if kept.keys() != MOMENTS[type(optimizer).__name__] or not all(
            fits_parameter(value, parameters[number], name) for name, value in kept.items()
        ):
            shape = tuple(parameters[number].shape)
            raise UserError(f"{source} is damaged: its optimizer state of parameter {number}, {shape}, does not fit it")
    optimizer.load_state_dict({"state": state["state"], "param_groups": groups})
    for tensors in optimizer.state.values():  # torch does not copy CPU tensors, which are mapped from the file
        tensors.update({name: value.clone() for name, value in tensors.items() if getattr(value, "is_cpu", False)})


def fits_parameter(value: object, parameter: nn.Parameter, name: str) -> bool:
    """Whether `value` can be a moment of `parameter` or, as in older torch, its number of steps as a plain number."""
    if name == "step" and ckpt.is_number(value):
        return True
    shape = () if name == "step" else parameter.shape
    if not isinstance(value, Tensor) or value.shape != shape or value.layout != parameter.layout:
        return False
    if not value.is_floating_point() or (name in ("step", "exp_avg_sq") and bool((value < 0).any())):
        return False
    return name == "mu" or not bool(value.isnan().any())  # in a grid, heads with too high a rate may diverge


def with_decaying_tokens(state: dict, optimizer: Optimizer, network: nn.Module | None) -> dict:
    """The optimizer state of a checkpoint from before [CLS] and mask tokens had weight decay, in today's order.

    Parameters are identified by number: first those without decay, then those with it.
    """
    theirs, ours = ([len(group["params"]) for group in g] for g in (state["param_groups"], optimizer.param_groups))
    if theirs == ours or network is None or len(theirs) != 2 or sum(theirs) != sum(ours):
        return state
    trained = [(name, p.ndim) for name, p in network.named_parameters() if p.requires_grad]
    exempt = {"cls_token", "mask_token"}
    before = sorted(trained, key=lambda entry: entry[1] > 1 and entry[0] not in exempt)
    now = sorted(trained, key=lambda entry: entry[1] > 1)
    bare = sum(ndim <= 1 for _, ndim in trained)
    groups = [{"params": list(range(bare))}, {"params": list(range(bare, len(now)))}]
    moved = {before.index(entry): at for at, entry in enumerate(now)}
    return {"state": {moved[number]: kept for number, kept in state["state"].items()}, "param_groups": groups}


@dataclass
class Start:
    """The first epoch to train, how many of its updates are already done, and what it has logged so far."""

    epoch: int
    steps_done: int = 0
    log_state: dict | None = None


def start_pretraining(state: TrainingState, steps_per_epoch: int, args: Namespace) -> Start:
    """Load what `--resume` or `--init` refers to, if anything. All processes must find the same."""
    found = checkpoint_to_resume(args)
    if found is None:
        if args.init:
            load_init(state, load_for_all(str(ckpt.resolve_checkpoint(args.init, "--init"))), args.init)
        start = Start(args.start_epoch)
    elif "optimizer" not in found[0]:  # upstream's released models, for one
        load_init(state, *found)
        start = Start(args.start_epoch)
    else:
        start = continue_from(state, *found, steps_per_epoch, args)
    return agreed(start)


def agreed(start: Start) -> Start:
    """`start`, after checking that all processes agree on it."""
    if len(set(gather_objects((start.epoch, start.steps_done)))) > 1:
        raise UserError("processes found different checkpoints; put --output_dir on a disk that all of them share")
    return start


def checkpoint_to_resume(args: Namespace) -> tuple[dict, str] | None:
    """The checkpoint given by `--resume`, and its file."""
    folder = Path(args.output_dir) if args.output_dir else None
    if args.resume == "auto":
        return newest_for_all(folder)
    if args.resume:
        return load_for_all(args.resume), args.resume
    if folder and ckpt.any_checkpoint(folder):
        raise UserError(
            f"--output_dir {folder} holds another run's checkpoints; add --resume auto to continue it, "
            "or choose another folder"
        )
    return None


def load_for_all(path: str) -> dict:
    """A checkpoint, mapped by every process. The first verifies it; if it is damaged, all raise the same error."""
    checkpoint, problem = None, None
    if is_main_process():
        try:
            checkpoint = ckpt.load_checkpoint(path, mapped=True)
        except UserError as error:
            problem = str(error)
    if problem := gather_objects(problem)[0]:
        raise UserError(problem)
    return checkpoint or ckpt.load_checkpoint(path, check=False, mapped=True)


def newest_for_all(folder: Path | None) -> tuple[dict, str] | None:
    """The newest checkpoint; the first process chooses and checks it, so that all load the same file."""
    newest = ckpt.newest_checkpoint(folder) if folder and is_main_process() else None
    path = gather_objects(newest and str(newest[1]))[0]
    if path is not None:
        return (newest[0] if newest else ckpt.load_checkpoint(path, check=False, mapped=True)), path
    if folder and ckpt.any_checkpoint(folder):
        raise UserError(f"none of the checkpoints in {folder} can be read; remove them to start from the beginning")
    logger.info("--resume auto: no checkpoint in %s, starting from the beginning", folder)
    return None


def continue_from(state: TrainingState, checkpoint: dict, source: str, steps_per_epoch: int, args: Namespace) -> Start:
    if changed := differences(ckpt.settings_of(checkpoint), vars(args)):
        listing = "; ".join(changed)
        if not args.allow_changes:
            raise UserError(
                f"{source} was trained with other settings: {listing}. Pass the same settings, or --allow_changes"
            )
        logger.warning("resuming from %s with other settings: %s", source, listing)
    log = checkpoint.get("log")
    if missing := [name for name in ("epoch", "step") if name not in checkpoint and (name == "epoch" or log)]:
        raise UserError(
            f"{source} has no {missing[0]!r}: it is not a checkpoint to resume from; --init takes its weights"
        )
    start = Start(checkpoint["epoch"] + 1)
    refuse_later_checkpoints(start.epoch, args)
    state.load(checkpoint, source)
    if log:
        if log["iterations"] == steps_per_epoch * args.accum_iter:
            start.steps_done, start.log_state = checkpoint["step"] - start.epoch * steps_per_epoch, log
            if not 0 <= start.steps_done <= steps_per_epoch:
                raise UserError(f"{source} is damaged: step {checkpoint['step']} is not in epoch {start.epoch + 1}")
        else:
            logger.warning("the length of an epoch has changed: epoch %d starts over", start.epoch + 1)
    logger.info("resuming from %s: epoch %d, after %d of its updates", source, start.epoch + 1, start.steps_done)
    return start


def refuse_later_checkpoints(epoch: int, args: Namespace) -> None:
    """A run resumed from an older file would soon be confused with the later one in the same folder."""
    if not args.output_dir or args.resume == "auto":
        return
    later = [path for path in ckpt.numbered_checkpoints(Path(args.output_dir)) if ckpt.number_of(path) >= epoch]
    if later:
        raise UserError(
            f"--output_dir {args.output_dir} holds {later[-1].name}, which is later than --resume {args.resume}; "
            "remove it and those after it, or choose another folder"
        )


def differences(theirs: dict, ours: dict) -> list[str]:
    """The settings in which two runs differ, as "--flag theirs, now ours". A flag that only one of them has does not
    count: the other may predate it."""
    theirs, ours = identity(theirs), identity(ours)
    both = [name for name in ours if name in theirs and name not in FREE]
    return [f"{shown_name(name)} {theirs[name]}, now {ours[name]}" for name in both if theirs[name] != ours[name]]


def identity(args: dict) -> dict:
    """Settings in comparable form: what a run is, not how it is distributed or where its data is stored."""
    settings = dict(args)
    if isinstance(settings.get("input_size"), int):  # as in upstream
        settings["input_size"] = [settings["input_size"]] * 2
    if "batch_size" in settings:
        settings["images per iteration"] = settings["batch_size"] * settings.get("world_size", 1)
    if "data_identity" in settings:
        settings["list of images"] = settings.pop("data_identity")
    if "pretrained_sha256" in settings:
        settings["pretrained weights"] = (settings.pop("pretrained_sha256") or "none")[:16]
    return settings


def shown_name(name: str) -> str:
    return name if " " in name or name == "precision" else f"--{name}"


def data_identity(source: Source) -> str:
    """A hash of the images' names, in order: the same wherever the folder is, and cheap even for millions."""
    # Images without files count as "SET/pretrain/N", in fine-tuning too; a folder's names end in .jpg or the like.
    names = re.sub(r"^(\w+)/train/(\d+)$", r"\1/pretrain/\2", "\n".join(image_names(source)), flags=re.MULTILINE)
    return f"{len(source)} images, {hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:16]}"


def load_init(state: TrainingState, checkpoint: dict, source: str) -> None:
    """Weights only, for a new run. An encoder without a decoder, as published by upstream, gets a new decoder."""
    weights = dict(ckpt.weights_of(checkpoint))
    own = state.model.state_dict()
    decoder = {name: value for name, value in own.items() if name.startswith("decoder") or name == "mask_token"}
    if not any(name in weights for name in decoder):
        weights |= decoder
        logger.info("%s has no decoder; a new one is initialised", source)
    ckpt.load_weights(state.model, weights, source)
    ckpt.check_heads(state.model, checkpoint, source)
    if state.cmm is not None and "cmm" in checkpoint:
        ckpt.load_weights(state.cmm, checkpoint["cmm"], source)
    logger.info("weights from %s; training starts from its first epoch", source)


class Unfinished:
    """The state of a long linear probe: one file, written after every epoch and removed at the end.

    `identity` holds the settings that must agree for a probe to be resumed. Without a path, nothing is saved.
    """

    def __init__(self, path: Path | None, identity: dict, resume: bool):
        self.path, self.identity = path, identity
        if path is not None and path.exists() and not resume:
            raise UserError(f"{path} is an unfinished probe; add --resume auto to continue it, or delete it")

    def load(self, heads: nn.Module, optimizer: Optimizer) -> tuple[int, list] | None:
        """The last saved epoch, and the curve so far; None if there is none."""
        there = gather_objects(self.path is not None and self.path.exists())
        if self.path is None or not any(there):
            return None
        if not all(there):
            raise UserError(f"only some processes see {self.path}; put --output_dir on a disk that all share")
        state = ckpt.load_checkpoint(self.path)
        theirs = state.get("identity", {})
        if differing := [name for name, value in self.identity.items() if theirs.get(name) != value]:
            raise UserError(f"{self.path} was started with another {', '.join(differing)}; delete it to start over")
        try:
            heads.load_state_dict(state["heads"])
            load_optimizer(optimizer, state["optimizer"], str(self.path))
            epoch, curve = state["epoch"], [[float(value) for value in row] for row in state["curve"]]
        except (LookupError, RuntimeError, TypeError, AttributeError, ValueError):
            raise UserError(f"{self.path} is not the state of this probe; delete it to start over") from None
        logger.info("resuming %s after epoch %d", self.path, epoch + 1)
        return epoch, curve

    def save(self, epoch: int, curve: list, heads: nn.Module, optimizer: Optimizer) -> None:
        if self.path is not None and is_main_process():
            state = {"heads": heads.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "curve": curve}
            ckpt.save_checkpoint(self.path, {**state, "identity": self.identity})

    def remove(self) -> None:
        if self.path is not None and is_main_process():
            self.path.unlink(missing_ok=True)
