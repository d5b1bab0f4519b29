"""Checkpoints: what they hold, written whole or not at all, read without running anything.

A training checkpoint is a dict of tensors and plain types:
    model, optimizer, scaler            state dicts with upstream's keys
    cmm, optimizer_cmm, scaler_cmm      the same of a learned masking strategy, else absent
    epoch       the last complete epoch, counted from 0
    step        updates of the whole run so far; beyond those of `epoch`, an epoch has begun
    log         what that epoch has logged so far; None between epochs
    moment      where the curriculum stood: mask_ratio and, if masks follow it, lambda_cl
    args        the run's flags and what was derived from them
"""

import argparse
import copy
import errno
import json
import os
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch

from util.cli import UserError, logger

# What torch's reader raises over files that are not what they should be.
DAMAGE = (RuntimeError, EOFError, ValueError, TypeError, LookupError, AttributeError, AssertionError, struct.error)
SAFETENSORS = ".safetensors"
LAST = "checkpoint-last.pth"  # the newest state of a run, mostly from the middle of an epoch


def training_checkpoint(
    states: dict[str, dict], *, epoch: int, step: int, log: dict | None, moment: dict, args: argparse.Namespace
) -> dict:
    """The content of a training checkpoint; `states` are the networks', optimizers' and scalers'."""
    return {**states, "epoch": epoch, "step": step, "log": log, "moment": moment, "args": vars(args)}


def on_host(value: Any) -> Any:
    """A copy in host memory of all tensors in nested dicts and lists; what training changes next does not reach it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the module versions that come with a state dict
        copied.update((name, on_host(part)) for name, part in value.items())
        return copied
    return type(value)(map(on_host, value)) if isinstance(value, list | tuple) else value


def weights_of(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The autoencoder's or classifier's weights; a file may also hold nothing else."""
    return checkpoint.get("model", checkpoint)


def settings_of(checkpoint: dict) -> dict:
    """The run's flags; empty where the file does not tell."""
    return checkpoint.get("args") or {}


def lambda_cl_of(checkpoint: dict) -> float | None:
    """lambda_CL at the moment of a checkpoint, or None where masks do not follow it."""
    if "moment" in checkpoint:
        return checkpoint["moment"].get("lambda_cl")
    if "cmm" not in checkpoint:
        return None
    # Older checkpoints do not store it; their schedule was linear from 1.
    settings, step, log = settings_of(checkpoint), checkpoint["step"], checkpoint.get("log")
    if settings.get("no_curriculum"):
        return 0.0
    # Within an epoch its log tells its length; between epochs the steps so far do.
    per_epoch = log["iterations"] // settings["accum_iter"] if log else step // (checkpoint["epoch"] + 1)
    return 1 - (1 - settings["lambda_cl_end"]) * step / (settings["epochs"] * per_epoch)


def save_checkpoint(path: Path, state: dict) -> None:
    write_whole(path, lambda file: torch.save(state, file))


def save_safetensors(path: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """All or nothing, as `save_checkpoint`. The library's own writer reports a full disk in an error of its own."""
    write_whole(path, lambda file: file.write(safetensors.torch.save(weights, metadata)))


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, so that `path` holds its old content or all of the new one, whatever happens meanwhile."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # what a kill left may be a second name of a finished checkpoint
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    try:
        with replaced(path) as file:
            write(file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        reason = reason_of(error)
        raise UserError(f"cannot write the checkpoint {path} ({reason}); what was there before is untouched") from error


def reason_of(error: BaseException) -> str:
    """What the system said, below what torch made of it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__context__
    return str(error)


def link_checkpoint(existing: Path, path: Path) -> None:
    """Give a checkpoint a second name: at once where the file system has hard links, else by a copy."""
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(existing, partial)
    # Trust the file, not the reply: NFS may report an error for a link that it made.
    if partial.exists() and partial.samefile(existing):
        put_in_place(partial, path)
    else:
        with open(existing, "rb") as source, replaced(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)


def write_text(path: Path, text: str) -> None:
    """All or nothing, as `save_checkpoint`."""
    with replaced(path) as file:
        file.write(os.fsencode(text))  # names of files need not be UTF-8


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete file, and make the new name last through a crash of the machine."""
    os.replace(partial, path)
    with suppress(OSError):  # some file systems cannot sync a folder, and the file is in place
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load_checkpoint(path: str | Path, *, check: bool = True, mapped: bool = False) -> dict:
    """Read a checkpoint of this project or of upstream MAE onto the CPU; `args` comes back as a dict.

    Upstream pickles an argparse.Namespace into its files, which is the one class allowed here. Anything else that
    would run code is refused before it runs. A .safetensors file gives `model`, `metadata` (its header), and of `args`
    what that header tells.

    Without `check`, checksums are not verified: for a file that was checked before, or whose tensors do not matter.
    `mapped` tensors stay on the disk until they are used, and the processes of a machine share them. Copy those that
    outlive the loading: the file may be deleted.
    """
    try:
        if Path(path).suffix == SAFETENSORS:
            return read_safetensors(path)
        if check:
            check_sums(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            mmap = mapped and zipfile.is_zipfile(path)  # torch's older format cannot be mapped
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EISDIR, errno.EACCES):
            raise UserError(f"cannot read the checkpoint {path}: {os.strerror(error.errno)}") from None
        raise UserError(f"the checkpoint {path} is damaged: {error}") from None
    except pickle.UnpicklingError as error:
        detail = str(error).splitlines()[0]
        raise UserError(f"the checkpoint {path} is damaged, or holds objects that could run code: {detail}") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"the checkpoint {path} is damaged or is not a safetensors file: {error}") from None
    except DAMAGE as error:
        raise UserError(f"the checkpoint {path} is damaged or is not a torch file: {error}") from None
    if not isinstance(checkpoint, dict):
        raise UserError(f"the checkpoint {path} holds a {type(checkpoint).__name__}, not a dict")
    if isinstance(checkpoint.get("args"), argparse.Namespace):
        checkpoint["args"] = vars(checkpoint["args"])
    return checkpoint


def read_safetensors(path: str | Path) -> dict:
    open(path, "rb").close()  # for an error with a number, which the library's has not
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, names = file.metadata() or {}, file.keys()
        weights = {name: file.get_tensor(name) for name in names}
    return {"model": weights, "args": args_in(metadata), "metadata": metadata}


def args_in(metadata: dict[str, str]) -> dict:
    """The flags that a model needs, from a header of texts; those in another form are another program's."""
    forms = {"input_size": r"\[\d+, \d+\]", "mask_ratio": r"0\.\d+", "norm_pix_loss": "true|false"}
    return {name: json.loads(metadata[name]) for name in forms if re.fullmatch(forms[name], metadata.get(name, ""))}


def check_sums(path: str | Path) -> None:
    """Refuse a file whose content is not what was written: torch itself does not look at the sums that it writes."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if damaged := file.testzip():
                raise ValueError(f"the checksum of {damaged} is wrong")


def load_weights(model: torch.nn.Module, state_dict: dict, source: str) -> None:
    """Load strictly, and name what does not fit."""
    check_weights(model, state_dict, source)
    model.load_state_dict(state_dict)


def check_weights(model: torch.nn.Module, state_dict: dict, source: str) -> None:
    own = model.state_dict()
    check_numbers(state_dict, source, counters={key for key, value in own.items() if not value.is_floating_point()})
    for key, value in own.items():
        if key in state_dict and value.shape != state_dict[key].shape:
            theirs, ours = tuple(state_dict[key].shape), tuple(value.shape)
            raise UserError(f"{source} has {key} of shape {theirs}, but this model needs {ours}; check --model")
    if missing := [key for key in own if key not in state_dict]:
        raise UserError(f"{source} has no {some_of(missing)}; is it a checkpoint of another model?")
    if unexpected := [key for key in state_dict if key not in own]:
        raise UserError(
            f"{source} has {some_of(unexpected)}, which this model does not; is it a checkpoint of another model?"
        )


def check_numbers(state_dict: dict, source: str, counters: Collection[str] = ()) -> None:
    """Refuse what is no weight: all are finite floating-point tensors, but for `counters`, which are integers."""
    for key, value in state_dict.items():
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not plain or value.is_quantized or value.is_meta:
            raise UserError(f"{source}: {key} is not a plain tensor")
        if value.is_floating_point() == (key in counters) or value.dtype == torch.bool or value.is_complex():
            raise UserError(f"{source}: {key} is of type {value.dtype}, which is no weight's")
        if not bool(value.float().isfinite().all()):
            raise UserError(f"{source}: {key} is not finite; did the training diverge? Take an earlier checkpoint")


def some_of(keys: list[str], most: int = 5) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def numbered_checkpoints(folder: Path) -> list[Path]:
    """checkpoint-N.pth files of `folder`, newest epoch first."""
    found = [path for path in folder.glob("checkpoint-*.pth") if re.fullmatch(r"checkpoint-\d+", path.stem)]
    return sorted(found, key=number_of, reverse=True)


def any_checkpoint(folder: Path) -> bool:
    return bool(numbered_checkpoints(folder)) or (folder / LAST).exists()


def number_of(path: Path) -> int:
    """The epoch in the name of a numbered checkpoint."""
    return int(path.stem.removeprefix("checkpoint-"))


def newest_checkpoint(folder: Path) -> tuple[dict, Path] | None:
    """The checkpoint of `folder` that got furthest and can be read, mapped. Damaged ones are reported and skipped."""
    last = read_or_report(folder / LAST) if (folder / LAST).exists() else None
    for path in numbered_checkpoints(folder):
        if last is not None and last.get("epoch", -1) >= number_of(path):
            break
        checkpoint = read_or_report(path)
        if checkpoint is not None:
            return checkpoint, path
    return None if last is None else (last, folder / LAST)


def read_or_report(path: Path) -> dict | None:
    try:
        return load_checkpoint(path, mapped=True)
    except UserError as error:
        logger.warning("%s; trying the one before it", error)
        return None
