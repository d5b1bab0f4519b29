"""Checkpoints: their content, written atomically and read without running any code they contain.

A training checkpoint is a dict of tensors and plain types:
    model, optimizer, scaler            state dicts with upstream's keys
    cmm, optimizer_cmm, scaler_cmm      the same for a learned masking strategy, else absent
    epoch       the last complete epoch, counted from 0
    step        updates of the whole run so far, including those of an incomplete epoch
    log         what the incomplete epoch has logged so far; None between epochs
    moment      the state of the curriculum: mask_ratio and, if masks follow it, lambda_cl
    args        the run's flags and what was derived from them
FORM defines what each entry must be. Weights-only and upstream files lack some.
"""

import argparse
import copy
import errno
import hashlib
import json
import math
import os
import re
import reprlib
import shutil
import socket
import time
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch

from util.cli import UserError, logger
from util.hub import fetch_snapshot, in_our_terms, is_hub_name, weights_in

SAFETENSORS = ".safetensors"
SUM = "sha256"  # key in the header of a safetensors file: the hash of all its content
HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]  # as part of a file name: short, yet distinct
STALE = 3600  # seconds after which a partial file is considered abandoned
LAST = "checkpoint-last.pth"  # the newest state of a run, usually from the middle of an epoch


# --- The form of a checkpoint ---


def is_count(value: Any, least: int = 1) -> bool:
    return type(value) is int and least <= value < 2**53


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_plain(value: Any) -> bool:
    """Whether the value consists of plain types, which compare by ==, as flags do."""
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, PLAIN)


def is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(map(is_text, value))


def is_optimizer_state(value: Any) -> bool:
    """Parameters are identified by number. The state of each is compared with its shape on loading."""
    numbers = [number for group in value["param_groups"] for number in group["params"]]
    kept = value["state"]
    return numbers == list(range(len(numbers))) and kept.keys() <= set(numbers) and all(map(is_named, kept.values()))


def is_scaler_state(value: Any) -> bool:
    factors = ("scale", "growth_factor", "backoff_factor", "growth_interval")
    return value == {} or (all(is_number(value[name]) for name in factors) and is_count(value["_growth_tracker"], 0))


def is_log(value: Any) -> bool:
    """As EpochLog.state_dict: sums and counts by name."""
    if not value:
        return value is None or value == {}
    sums = [*value["interval"].items(), *value["averages"].items()]
    return is_count(value["iterations"]) and all(
        is_text(name) and is_number(total) and is_count(count) for name, (total, count) in sums
    )


def is_image_size(value: Any) -> bool:
    return value is None or is_count(value) or (len(value) == 2 and all(map(is_count, value)))


def or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


PLAIN = (str, int, float, type(None))
FORM: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("model", "cmm"), is_named),
    **dict.fromkeys(("optimizer", "optimizer_cmm"), is_optimizer_state),
    **dict.fromkeys(("scaler", "scaler_cmm"), is_scaler_state),
    "epoch": lambda value: is_count(value, -1),
    "step": lambda value: is_count(value, 0),
    "log": is_log,
    "moment": lambda value: is_named(value) and all(map(is_number, value.values())),
    "args": or_none(lambda value: is_named(value) and is_plain(value)),
    "metadata": lambda value: is_named(value) and all(map(is_text, value.values())),
}
FLAGS: dict[str, Callable[[Any], bool]] = {  # the entries of `args` that are read
    "input_size": is_image_size,
    "classes": or_none(lambda value: all(map(is_text, value))),
    **dict.fromkeys(("masking", "select", "soft", "kl", "diversity", "data_set"), is_text),
    **dict.fromkeys(("mask_noise", "data_path", "data_identity", "pretrained_sha256", "commit"), or_none(is_text)),
    **dict.fromkeys(("epochs", "batch_size", "world_size", "accum_iter", "cmm_every"), is_count),
    **dict.fromkeys(("cmm_depth", "cmm_dim"), or_none(is_count)),
    **dict.fromkeys(("mask_ratio", "lambda_cl_start", "lambda_cl_end", "cmm_strength", "cmm_fraction"), is_number),
    **dict.fromkeys(("lambda_gauss", "lambda_kl", "lambda_div", "lambda_pos"), is_number),
    "mask_ratio_start": or_none(is_number),
    **dict.fromkeys(("no_curriculum", "norm_pix_loss"), lambda value: isinstance(value, bool)),
    "seed": is_number,
    "mean": or_none(lambda value: all(map(is_number, value)) and len(value) > 0),
    "std": or_none(lambda value: all(is_number(each) and each > 0 for each in value) and len(value) > 0),
}


def check_form(entries: dict, form: dict[str, Callable[[Any], bool]], source: str) -> None:
    """Reject malformed entries, by name."""
    for name, check in form.items():
        try:
            fits = name not in entries or check(entries[name])
        except Exception:  # a check may assume the type it expects
            fits = False
        if not fits:
            raise UserError(f"{source} is damaged, or from another program: `{name}` is {reprlib.repr(entries[name])}")


def check_checkpoint(checkpoint: dict, source: str) -> None:
    if not is_named(checkpoint):
        raise UserError(f"{source} is not a checkpoint: its entries have no names")
    check_form(checkpoint, FORM, source)
    settings = settings_of(checkpoint)
    check_form(settings, FLAGS, source)
    epoch, epochs = checkpoint.get("epoch", -1), settings.get("epochs", math.inf)
    if epoch >= epochs:
        raise UserError(f"{source} is damaged, or from another program: `epoch` is {epoch} of {epochs}")


# --- The content of a checkpoint ---


def training_checkpoint(
    states: dict[str, dict], *, epoch: int, step: int, log: dict | None, moment: dict, args: argparse.Namespace
) -> dict:
    """The content of a training checkpoint; `states` are those of networks, optimizers and scalers."""
    return {**states, "epoch": epoch, "step": step, "log": log, "moment": moment, "args": vars(args)}


def on_host(value: Any) -> Any:
    """A copy in host memory of all tensors in nested dicts and lists, unaffected by further training."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the module versions attached to a state dict
        copied.update((name, on_host(part)) for name, part in value.items())
        return copied
    return type(value)(map(on_host, value)) if isinstance(value, list | tuple) else value


def weights_of(checkpoint: dict) -> dict[str, torch.Tensor]:
    """The autoencoder's or classifier's weights; a file may also be a bare state dict."""
    return checkpoint.get("model", checkpoint)


def settings_of(checkpoint: dict) -> dict:
    """The run's flags; empty if the file has none."""
    return checkpoint.get("args") or {}


def lambda_cl_of(checkpoint: dict) -> float | None:
    """lambda_CL at the time of a checkpoint, or None if masks do not follow it."""
    if "moment" in checkpoint:
        return checkpoint["moment"].get("lambda_cl")
    if "cmm" not in checkpoint:
        return None
    # Older checkpoints do not store it; their schedule was linear from 1.
    settings = settings_of(checkpoint)
    if settings.get("no_curriculum"):
        return 0.0
    try:
        step, log = checkpoint["step"], checkpoint.get("log")
        # Within an epoch, its log gives its length; between epochs, the number of steps so far does.
        per_epoch = log["iterations"] // settings["accum_iter"] if log else step // (checkpoint["epoch"] + 1)
        return 1 - (1 - settings["lambda_cl_end"]) * step / (settings["epochs"] * per_epoch)
    except (KeyError, ZeroDivisionError):
        return None  # not recorded


# --- Writing ---


def save_checkpoint(path: Path, state: dict) -> None:
    write_whole(path, lambda file: torch.save(state, file))


def save_safetensors(path: Path, weights: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """All or nothing, like `save_checkpoint`. The library's own writer reports a full disk by its own error type."""
    header = {**metadata, SUM: content_sum(weights, metadata)}
    write_whole(path, lambda file: file.write(safetensors.torch.save(weights, header)))


def content_sum(weights: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    """A checksum of the whole content of a safetensors file, as the format itself has none."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(weights):
        value = weights[name].detach().cpu().contiguous()
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A file to write, such that `path` holds either its old content or all of the new, whatever happens."""
    if path.exists() and not path.is_file():  # root would replace /dev/null by a file
        raise UserError(f"{path} cannot be replaced: it is not a regular file")
    drop_stale_partials(path.parent)
    partial = partial_of(path)
    partial.unlink(missing_ok=True)  # a leftover of an earlier process with this id may be a hard link to a checkpoint
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


def partial_of(path: Path) -> Path:
    """The temporary name of a file while this process writes it."""
    return path.with_name(f"{path.name}.{HOST}-{os.getpid()}.partial")


def drop_stale_partials(folder: Path) -> None:
    """Remove what killed processes were writing: files of dead processes on this machine, and any that are stale."""
    for partial in folder.glob("*.partial"):
        with suppress(OSError):
            ours = re.fullmatch(rf".*\.{re.escape(HOST)}-(\d+)\.partial", partial.name)
            if (ours and not is_alive(int(ours[1]))) or time.time() - partial.stat().st_mtime > STALE:
                partial.unlink()


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists on this machine."""
    try:
        os.kill(pid, 0)
    except OverflowError:
        return False
    except OSError as error:
        return error.errno == errno.EPERM  # another user's
    return True


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    try:
        with replaced(path) as file:
            write(file)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        reason = reason_of(error)
        raise UserError(f"cannot write the checkpoint {path} ({reason}); existing files are untouched") from error


def reason_of(error: BaseException) -> str:
    """The operating system's error, underneath torch's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__context__
    return str(error)


def link_checkpoint(existing: Path, path: Path) -> None:
    """Give a checkpoint a second name: by a hard link if the file system supports it, else by a copy."""
    partial = partial_of(path)
    partial.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(existing, partial)
    # Trust the file, not the return code: NFS may report an error for a link that it did make.
    if partial.exists() and partial.samefile(existing):
        put_in_place(partial, path)
    else:
        with open(existing, "rb") as source, replaced(path) as file:
            shutil.copyfileobj(source, file, 1 << 20)


def write_text(path: Path, text: str) -> None:
    """All or nothing, like `save_checkpoint`."""
    with replaced(path) as file:
        file.write(os.fsencode(text))  # file names need not be UTF-8


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete file, and make the new name survive a crash of the machine."""
    os.replace(partial, path)
    with suppress(OSError):  # some file systems cannot sync a folder, and the file is in place
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


# --- Reading ---


def load_checkpoint(path: str | Path, *, check: bool = True, mapped: bool = False) -> dict:
    """Read a checkpoint of this project or of upstream MAE onto the CPU; `args` comes back as a dict.

    Upstream pickles an argparse.Namespace into its files, which is the only class allowed here. Anything else that
    could run code is rejected before it runs. A .safetensors file gives `model`, `metadata` (its header), and the
    `args` in that header. Weights of transformers and timm get our names, and the settings beside them are `args`.

    Without `check`, checksums are not verified: for a file that was checked before, or whose tensors do not matter.
    `mapped` tensors stay on disk until they are used, and the processes of a machine share them. Copy those that are
    kept after loading: the file may be deleted.
    """
    source = f"the checkpoint {path}"
    try:
        if not (os.path.isfile(path) or os.path.isdir(path)) and os.path.exists(path):
            raise Damaged("it is not a regular file")  # reading a pipe would block
        checkpoint = read_safetensors(path) if Path(path).suffix == SAFETENSORS else read_pth(path, check, mapped)
        checkpoint = in_our_terms(checkpoint, Path(path))
    except Exception as error:  # zipfile, zlib, pickle, torch and safetensors raise many kinds for a damaged file
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise
        raise UserError(fault_of(error, source)) from None
    if not isinstance(checkpoint, dict):
        raise UserError(f"{source} holds a {type(checkpoint).__name__}, not a dict")
    if isinstance(checkpoint.get("args"), argparse.Namespace):
        checkpoint["args"] = vars(checkpoint["args"])
    check_checkpoint(checkpoint, source)
    return checkpoint


def fault_of(error: Exception, source: str) -> str:
    """What is wrong with a file that cannot be read. Torch's advice to load the file anyway is not passed on."""
    if isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.EISDIR, errno.EACCES):
        return f"cannot read {source}: {os.strerror(error.errno)}"
    if foreign := re.search(r"GLOBAL (\S+)", str(error)):
        return f"{source} is damaged, or holds objects that could run code: {foreign[1]}"
    told = isinstance(error, OSError | Damaged)
    return f"{source} is damaged or is not a checkpoint{f': {error}' if told else ''}"


class Damaged(Exception):
    """The file is not intact, or not a regular file."""


def read_pth(path: str | Path, check: bool, mapped: bool) -> Any:
    with open(path, "rb") as file:
        zipped = file.read(4) == b"PK\3\4"  # as torch decides; its older format has no checksums and cannot be mapped
    if check and zipped:
        check_sums(path)
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about a file that is then rejected
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipped)


def read_safetensors(path: str | Path) -> dict:
    open(path, "rb").close()  # raises an error with an errno, which the library's lacks
    with safetensors.safe_open(path, framework="pt") as file:
        metadata, names = file.metadata() or {}, file.keys()
        weights = {name: file.get_tensor(name) for name in names}
    expected = metadata.pop(SUM, None)  # other programs' files have none
    if expected not in (None, content_sum(weights, metadata)):
        raise Damaged("its checksum is wrong")
    return {"model": weights, "args": args_in(metadata), "metadata": metadata}


def args_in(metadata: dict[str, str]) -> dict:
    """The flags that a model needs, from a header of strings; those in other formats are another program's."""
    forms = {"input_size": r"\[\d+, \d+\]", "mask_ratio": r"0\.\d+", "norm_pix_loss": "true|false"}
    forms |= dict.fromkeys(("mean", "std"), r"\[\d+(\.\d+)?(, \d+(\.\d+)?)*\]")
    return {name: json.loads(metadata[name]) for name in forms if re.fullmatch(forms[name], metadata.get(name, ""))}


def check_sums(path: str | Path) -> None:
    """Reject a file whose content is not what was written: torch does not verify the checksums it writes."""
    with zipfile.ZipFile(path) as file:
        if damaged := file.testzip():
            raise Damaged(f"the checksum of {damaged} is wrong")


def load_weights(model: torch.nn.Module, state_dict: dict, source: str) -> None:
    """Load strictly, and report what does not fit."""
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


def check_heads(model: torch.nn.Module, checkpoint: dict, source: str) -> None:
    """Reject what loads but computes something else: weights do not reveal the number of heads, a config.json does."""
    for name, blocks in {"num_heads": "blocks", "decoder_num_heads": "decoder_blocks"}.items():
        told = settings_of(checkpoint).get(name)
        own = getattr(model, blocks)[0].attn.num_heads if told and hasattr(model, blocks) else told
        if told != own:
            raise UserError(
                f"{source} has {name} {told}, but this model has {own}; the weights would compute something else"
            )


def check_numbers(state_dict: dict, source: str, counters: Collection[str] = ()) -> None:
    """Reject invalid weights: all must be finite floating-point tensors, except for `counters`, which are integers."""
    for key, value in state_dict.items():
        plain = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not plain or value.is_quantized or value.is_meta:
            raise UserError(f"{source}: {key} is not a plain tensor")
        if value.is_floating_point() == (key in counters) or value.dtype == torch.bool or value.is_complex():
            raise UserError(f"{source}: {key} is of type {value.dtype}, which weights cannot have")
        if not bool(value.float().isfinite().all()):
            raise UserError(f"{source}: {key} is not finite; did the training diverge? Use an earlier checkpoint")


def some_of(keys: list[str], most: int = 5) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def resolve_checkpoint(path: str, flag: str = "--finetune") -> Path:
    """The file that `path` refers to: itself; the newest checkpoint of a run's folder, preferably of a complete epoch;
    or the weights of a transformers or timm snapshot, given by its folder or its name on the Hugging Face Hub."""
    found = fetch_snapshot(path, flag) if is_hub_name(path) else Path(path)
    if not found.is_dir():
        return found
    files = [*numbered_checkpoints(found), *found.glob(LAST), *weights_in(found)]
    if not files:
        raise UserError(f"{flag} {path} is a folder without checkpoint-N.pth, or config.json and model.safetensors")
    return files[0]


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
    """The most advanced readable checkpoint of `folder`, mapped. Damaged ones are reported and skipped."""
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
        logger.warning("%s; trying the previous one", error)
        return None
