"""What every program shares: user errors, logging, seeds, devices, processes, mixed precision, the optimizer step."""

import argparse
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from tqdm import tqdm

logger = logging.getLogger("clmae")

EXIT_USER_ERROR = 2
EXIT_DIVERGED = 3


class UserError(ValueError):
    """A mistake in a flag or file. Its message names the flag or file and says what to do."""


class TrainingDiverged(RuntimeError):
    """The loss is no longer finite, and going on would only write useless weights."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse that answers a bad flag with one sentence instead of a page of usage, and shows defaults in --help."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        self.exit(EXIT_USER_ERROR, f"{self.prog}: {message} (see --help)\n")


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser) -> None:
    """Parse the flags and call `main`. A user's mistake ends in one sentence, an internal fault in a traceback."""
    args = parser.parse_args()
    setup_logging()
    try:
        main(args)
    except (UserError, TrainingDiverged) as error:
        logger.error("%s", error)
        sys.exit(EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_DIVERGED)
    except KeyboardInterrupt:
        logger.error("interrupted")
        sys.exit(130)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class LineHandler(logging.StreamHandler):
    """Writes above a progress bar, if there is one. (tqdm's own redirection would merge the two streams below.)"""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=self.stream)
            self.flush()
        except Exception:  # as logging's own handlers: a closed terminal must not end a run
            self.handleError(record)


def setup_logging() -> None:
    """Plain lines: progress to standard output, warnings and errors to standard error."""
    progress = LineHandler(sys.stdout)
    progress.addFilter(lambda record: record.levelno < logging.WARNING)
    problems = LineHandler(sys.stderr)
    problems.setLevel(logging.WARNING)
    problems.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [progress, problems]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def derive_seed(*keys: int | str) -> int:
    """A seed that is a function of its keys alone, such as ("crop", seed, epoch, index): the same on every machine,
    in every worker, and wherever a run was interrupted."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


def generator(*keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*keys))


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name!r} is not a torch device; use cuda or cpu") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch finds no GPU here; use --device cpu")
    return device


def refuse_many_processes() -> None:
    """One process per run so far; several would silently write over each other."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UserError("WORLD_SIZE is above 1, but this program runs as one process; start it with plain python")


def init_distributed_mode(device: torch.device) -> torch.device:
    """Join the processes that torchrun started; returns this one's device. Plain python is a world of one."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return device
    backend = "gloo"
    if device.type == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    if not is_main_process():
        logger.setLevel(logging.ERROR)  # the first process speaks for all
    return device


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    return get_rank() == 0


def share_of_rank(length: int) -> slice:
    """The part of `length` things that this process works on: consecutive, in the order of ranks."""
    rank, world_size = get_rank(), get_world_size()
    return slice(rank * length // world_size, (rank + 1) * length // world_size)


def gather_rows(rows: torch.Tensor, equal: bool = False) -> torch.Tensor:
    """The rows of all processes, in the order of ranks, on every process.

    They may have different numbers of rows; saying that they are `equal` spares a host-device sync.
    """
    if get_world_size() == 1:
        return rows
    counts = [len(rows)] * get_world_size() if equal else gather_objects(len(rows))
    padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_objects(value: object) -> list:
    """Each process's value, in the order of ranks, on every process."""
    values = [value]
    if get_world_size() > 1:
        values = [None] * get_world_size()
        dist.all_gather_object(values, value)
    return values


def amp_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype that `--amp` means on `device`, or None for float32 throughout."""
    if amp == "auto":
        if device.type != "cuda":
            return None
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[amp]


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


class NativeScalerWithGradNormCount:
    """Backward pass and optimizer step of one network, with loss scaling under fp16.

    Under fp16 a step whose gradient is not finite is left out and the scale is halved, as torch's GradScaler does.
    """

    def __init__(self, device_type: str = "cuda", enabled: bool = True):
        self._scaler = torch.amp.GradScaler(device_type, enabled=enabled)

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        parameters: Iterable[torch.Tensor] | None = None,
        update_grad: bool = True,
    ) -> None:
        self._scaler.scale(loss).backward()
        if not update_grad:
            return
        if clip_grad is not None:
            self._scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        optimizer.zero_grad()

    def state_dict(self) -> dict:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        if state_dict and self._scaler.is_enabled():
            self._scaler.load_state_dict(state_dict)
