"""What every program shares: seeds, devices, processes, mixed precision, the optimizer step, provenance."""

import argparse
import datetime
import gc
import hashlib
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import timm
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from util.cli import Interrupted, UserError, logger, silence
from util.program import STOP_SIGNALS, orphaned, place_in_world

PATIENCE = datetime.timedelta(minutes=10)  # how long processes wait for an unresponsive one
PATIENCE_TO_MEET = datetime.timedelta(minutes=10)  # and for one that has not joined yet, such as on a slow node
HEARTBEAT = 30  # seconds between heartbeats of a process that others wait for
Result = TypeVar("Result")
# The kernels that --attention enables. Torch's "math" stays enabled as a fallback: flash, for one, takes no mask.
# cuDNN's, which torch may prefer on an H100, has a history of wrong results.
SDPA_KERNELS = {
    "auto": ("flash", "mem_efficient"),
    "flash": ("flash",),
    "efficient": ("mem_efficient",),
    "cudnn": ("cudnn",),
    "math": (),
}


def derive_seed(*keys: int | str) -> int:
    """A seed that depends only on its keys, such as ("crop", seed, epoch, index): the same on every machine, in every
    worker, and wherever a run was interrupted."""
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes 63 bits


def generator(*keys: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*keys))


def seed_globals(*keys: int | str) -> None:
    """Seed the global generators of random, numpy and torch from `keys`.

    For libraries that accept no generator, such as timm's augmentations. Every user seeds before drawing, so there is
    no earlier state to restore.
    """
    seed = derive_seed(*keys)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the generator that timm draws from)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # it is not in loader processes
        torch.cuda.manual_seed_all(seed)


def pick_device(name: str | None) -> torch.device:
    """The device given by `--device`; by default a GPU if there is one."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name!r} is not a torch device; use cuda or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"--device {name} is not supported; use cuda or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: torch finds no such GPU here; use --device cpu")
    return device


def set_up_device(name: str | None, attention: str = "auto", amp: str = "auto") -> torch.device:
    """Make the device given by `--device` this process's current one, and choose its kernels."""
    device = pick_device(name)
    if device.type != "cuda":
        return device
    number = int(os.environ.get("LOCAL_RANK", device.index or 0))  # the launcher overrides the flag
    device = torch.device("cuda", own_gpu(number, torch.cuda.device_count()))
    torch.cuda.set_device(device)
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(kernel in SDPA_KERNELS[attention])
    torch.backends.cudnn.benchmark = True  # the only convolution, the patch embedding, has fixed shapes
    # TF32 only on request. By default torch uses it for convolutions, but not for matrix products.
    torch.set_float32_matmul_precision("high" if amp == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = amp == "tf32"
    return device


def attention_kernels(attention: str, device: torch.device) -> str:
    """The kernels that `--attention` enables on `device`; torch uses the first that can run."""
    return ", ".join([*SDPA_KERNELS[attention], "math"]) if device.type == "cuda" else "the CPU's own"


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute matrix products in full float32, not TF32, whatever `--amp` says."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":  # setting it again would make torch.compile recompile
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def init_distributed_mode(args: argparse.Namespace) -> torch.device:
    """Join the processes that torchrun, submitit or srun started; returns this one's device, set up.

    Plain python is a world of one. Sets `args.world_size` to the number of processes.
    """
    use_slurm_step()
    rank, args.world_size = place_in_world()
    device = set_up_device(args.device, args.attention, args.amp)
    args.device, args.attention_kernels = args.device or device.type, attention_kernels(args.attention, device)
    if args.world_size == 1:
        return device
    gpu = device if device.type == "cuda" else None
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=meet(args.dist_url, rank, args.world_size),
        rank=rank,
        world_size=args.world_size,
        timeout=PATIENCE,
        device_id=gpu,  # NCCL connects now, where a network fault is easy to spot, not in the first step
    )
    if not is_main_process():
        silence()  # only the first process logs
    return device


def meet(url: str, rank: int, world_size: int) -> dist.Store:
    """The store through which processes connect, once all of them have joined. While waiting, this one handles signals
    and notices when torchrun is gone. If some are missing, it soon logs a warning, and waits a little longer."""
    names = f"RANK {rank} of WORLD_SIZE {world_size} at {meeting_place(url)}"
    found: list[dist.Store | Exception] = []

    def join() -> None:  # in a thread, because torch blocks signals while it waits
        try:
            found.append(common_store(url, rank, world_size))
        except Exception as error:
            found.append(error)

    threading.Thread(target=join, daemon=True).start()
    begun, told = time.monotonic(), False
    while not found and not orphaned():
        waited = time.monotonic() - begun
        if waited > PATIENCE_TO_MEET.total_seconds():
            raise UserError(f"not all processes have joined: {names}; start that many, with the same address and port")
        if waited > 5 and not told:
            logger.warning("waiting for other processes: %s", names)
            told = True
        time.sleep(0.1)
    if orphaned():
        raise Interrupted("torchrun is gone", set(), together=False)
    store = found[0]
    if isinstance(store, Exception):
        raise UserError(f"processes cannot connect: {names}: {str(store).splitlines()[0]}") from None
    return store


def meeting_place(url: str) -> str:
    if url != "env://":
        return url
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise UserError(f"the environment has no {' and no '.join(missing)}: start several processes with torchrun")
    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def common_store(url: str, rank: int, world_size: int) -> dist.Store:
    """Returns once all processes have joined."""
    store, _, _ = next(dist.rendezvous(url, rank, world_size, timeout=PATIENCE_TO_MEET))
    # torchrun may keep its store when it restarts processes.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    if store.add(f"rank {rank}", 1) > 1:
        raise UserError("another process has the same RANK")
    store.add("processes", 1)
    while store.add("processes", 0) < world_size:
        time.sleep(0.1)
    store.set_timeout(PATIENCE)
    return store


def use_slurm_step() -> None:
    """Make `srun python main_*.py` one run over all its tasks, not one run per task that overwrite each other."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks == "1" or "RANK" in os.environ:
        return
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        raise UserError(
            f"srun starts {tasks} processes, but MASTER_ADDR and MASTER_PORT are not both set; "
            "docs/cluster.md has an sbatch file that sets them"
        )
    os.environ["WORLD_SIZE"] = tasks
    for ours, theirs in (("RANK", "SLURM_PROCID"), ("LOCAL_RANK", "SLURM_LOCALID")):
        os.environ[ours] = os.environ[theirs]


def own_gpu(local_rank: int, gpus: int) -> int:
    """The index of a process's GPU. Some schedulers show each process all GPUs of a node, others only its own."""
    if gpus == 1:
        return 0
    if local_rank >= gpus:
        raise UserError(f"process {local_rank} of this node has no GPU: there are {gpus}; start {gpus} processes")
    return local_rank


def available_cpus() -> int:
    """Those that this process may use; macOS does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_main_process() -> bool:
    return get_rank() == 0


def share_of_rank(length: int) -> slice:
    """The part of `length` items that this process works on: consecutive, in rank order."""
    rank, world_size = get_rank(), get_world_size()
    return slice(rank * length // world_size, (rank + 1) * length // world_size)


def sum_of_processes(values: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start summing `values` over processes, in place and in the background; call the result to get the sum."""
    work: Any = dist.all_reduce(values, async_op=True)

    def finished() -> torch.Tensor:
        work.wait()  # on GPUs the stream waits, not the host
        return values

    return finished


def mean_of_processes(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mean of each scalar over processes, in one reduction. No gradient flows."""
    if get_world_size() == 1:
        return dict(values)
    stacked = torch.stack([value.detach().float() for value in values.values()])
    dist.all_reduce(stacked)
    return dict(zip(values, (stacked / get_world_size()).unbind(), strict=True))


def gather_rows(rows: torch.Tensor, equal: bool = False) -> torch.Tensor:
    """The rows of all processes, in rank order, on every process. No gradient flows.

    Processes may have different numbers of rows; if they are known to be `equal`, a host-device sync is saved.
    """
    if get_world_size() == 1:
        return rows
    counts = [len(rows)] if equal else gather_objects(len(rows))
    padded = torch.cat([rows.detach(), rows.new_zeros(max(counts) - len(rows), *rows.shape[1:])])
    everyone = rows.new_empty(get_world_size() * len(padded), *rows.shape[1:])
    dist.all_gather_into_tensor(everyone, padded)
    if equal:
        return everyone
    return torch.cat([part[:count] for part, count in zip(everyone.split(len(padded)), counts, strict=True)])


def gather_batch(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """For each of `parts` [n, L], the rows of all processes, in rank order, in a single exchange.

    Gradients flow to this process's own rows, multiplied by the number of processes: DDP's mean over processes is then
    the gradient of a loss that every process computes over all rows.
    """
    processes = get_world_size()
    if processes == 1:
        return parts
    mine = torch.cat(parts)
    everyone = gather_rows(mine, equal=True)
    everyone[share_of_rank(len(everyone))] = mine.detach() + processes * (mine - mine.detach())
    gathered = everyone.unflatten(0, (processes, -1)).split([len(part) for part in parts], dim=1)
    return tuple(part.flatten(0, 1) for part in gathered)


def gather_objects(value: object) -> list:
    """Each process's value, in rank order, on every process."""
    if get_world_size() == 1:
        return [value]
    values: list = [None] * get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_process(work: Callable[[], Result]) -> Result:
    """Run `work` in the first process, and return or raise its outcome in every process.

    The others wait as long as it takes, even longer than PATIENCE, but not for a process that is gone.
    """
    if get_world_size() == 1:
        return work()
    outcome: list = []

    def keep_outcome() -> None:
        try:
            outcome.append((work(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=keep_outcome, daemon=True)
    if is_main_process():
        thread.start()
    busy = torch.ones(1)
    while busy.item():
        if is_main_process():
            thread.join(HEARTBEAT)
            busy.fill_(thread.is_alive())
        dist.broadcast(busy, src=0)
    shared = outcome or [None]
    dist.broadcast_object_list(shared, src=0)
    value, error = shared[0]
    if error is not None:
        raise error
    return value


def with_ddp(network: nn.Module) -> nn.Module:
    """Average the network's gradients over processes in the backward pass; in a world of one, the network itself.

    All parameters take part in every backward pass, so torch need not search for unused ones.
    """
    if get_world_size() == 1:
        return network
    device = next(network.parameters()).device
    device_ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(network, device_ids=device_ids, gradient_as_bucket_view=True)
    if device.type == "cpu":
        wrapped.register_comm_hook(None, mean_in_rank_order)
    return wrapped


def without_ddp(network: nn.Module) -> Any:
    """The network itself, without any wrapper."""
    return network.module if isinstance(network, DistributedDataParallel) else network


def exchange_gradients(when: bool, *networks: nn.Module | None) -> None:
    """Set whether the next backward passes of `networks` synchronise gradients, as only updates need it.

    This is the attribute behind DDP's no_sync(), which would have to enclose the forward passes as well.
    """
    for network in networks:
        if isinstance(network, DistributedDataParallel):
            network.require_backward_grad_sync = when


def mean_in_rank_order(_, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average gradients in an order that depends only on the ranks.

    An all-reduce adds in an order that depends on a value's position in its bucket, and DDP rebuilds its buckets after
    a process's first step: with three or more ranks, a resumed run would differ in the last bits.
    """
    parts = bucket.buffer().new_empty(get_world_size(), len(bucket.buffer()))
    work: Any = dist.all_gather_into_tensor(parts.flatten(), bucket.buffer(), async_op=True)

    def mean(exchanged: torch.futures.Future) -> torch.Tensor:
        exchanged.value()  # raises if the exchange failed
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.div_(len(parts))

    return work.get_future().then(mean)


def amp_dtype(amp: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of `--amp` on `device`, or None for float32 throughout."""
    if amp == "auto":
        if device.type != "cuda":
            return None
        # V100s and T4s only emulate bf16, slowly.
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(amp)


def precision(amp: str, device: torch.device) -> str:
    """The name of the precision that `--amp` gives on `device`."""
    if amp == "tf32" and device.type == "cuda":
        return amp
    return str(amp_dtype(amp, device) or torch.float32).removeprefix("torch.")


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


class NativeScalerWithGradNormCount:
    """Backward pass and optimizer step of one network, with loss scaling under fp16.

    Under fp16 a step with non-finite gradients is skipped and the scale halved, by torch's GradScaler.
    """

    def __init__(self, device_type: str = "cuda", enabled: bool = True):
        self._scaler = torch.amp.GradScaler(device_type, enabled=enabled)
        self._device_type = device_type

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: Optimizer,
        clip_grad: float | None = None,
        parameters: Iterable[torch.Tensor] = (),
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

    def loss_scale(self) -> torch.Tensor | None:
        """The factor for the next loss, on the device; None unless losses are scaled."""
        return self._scaler.scale(torch.ones((), device=self._device_type)) if self._scaler.is_enabled() else None

    def state_dict(self) -> dict:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        if state_dict and self._scaler.is_enabled():
            self._scaler.load_state_dict(state_dict)


@contextmanager
def manual_garbage_collection() -> Iterator[None]:
    """Collect garbage only when `gc.collect` is called, and never search objects that already exist.

    Python triggers collection by a process's allocation count, so processes would collect in different steps, and each
    time all the others would wait.
    """
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def start_loader_process(_worker: int = 0) -> None:
    """Ignore signals, which schedulers send to all processes of a job, because the main process still needs its
    loaders; they end when it ends them or is gone. Collect garbage as usual, because batches are prefetched. The main
    process receives and reports loader errors, so stderr is silenced."""
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    gc.enable()


def git_commit() -> str | None:
    """The commit of this code, with "-dirty" if files differ from it; None outside a repository."""
    command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    libraries = {module.__name__: module.__version__ for module in (torch, torchvision, timm, np)}
    return {"python": platform.python_version(), **libraries}
