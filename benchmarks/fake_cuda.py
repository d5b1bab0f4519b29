"""Training on GPUs that are not there: torch believes in them, and its tensors have shapes and devices but no values.

    run_on_fake_cuda([sys.executable, "-m", "mine"])    # a process of its own: the stubs are loaded before torch
    with fake_cuda():                                   # in that process
        ...                                             # build networks
        with Recorder() as recorder:
            ...                                         # train

A few functions of the CUDA runtime are replaced by stubs that do nothing and succeed, and FakeTensorMode computes
devices, dtypes and shapes. An op that mixes devices raises; what an op would launch, move or wait for is recorded;
torch chooses its attention kernels as it would on a real GPU. Nothing is timed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from util.cli import ROOT

aten = torch.ops.aten
CAPABILITIES = {"A100": 80, "T4": 75, "H100": 90}  # the fake GPUs in their order: cuda:0 is an A100

# The fields of cudaDeviceProp up to `minor` lie alike in CUDA 12 and 13. After them 12 has one more, so the number of
# multiprocessors is written to both places. CUDA 12 calls the second of the functions for properties, 13 the first.
STUBS = r"""
#include <stddef.h>
#include <string.h>
struct properties {
    char name[256], ids[28];
    size_t memory, shared_memory;
    int registers, warp;
    size_t pitch;
    int threads, block[3], grid[3];
    size_t constant_memory;
    int major, minor;
    size_t alignments[2];
    int multiprocessors, multiprocessors_12;
    char others[552];
};
static const int capabilities[] = {CAPABILITIES};
static __thread int current;
int cudaGetDeviceCount(int *n) { *n = sizeof capabilities / sizeof *capabilities; return 0; }
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = *active = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = *greatest = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaGetDeviceProperties(struct properties *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "fake");
    p->major = capabilities[device] / 10;
    p->minor = capabilities[device] % 10;
    p->memory = (size_t)80 << 30;
    p->warp = 32;
    p->threads = 1024;
    p->multiprocessors = p->multiprocessors_12 = 108;
    return 0;
}
int cudaGetDeviceProperties_v2(struct properties *p, int device) { return cudaGetDeviceProperties(p, device); }
"""


# --- A process with fake GPUs ---


def obstacle() -> str | None:
    """Why there can be no fake GPUs here, if so."""
    if not sys.platform.startswith("linux"):
        return "fake CUDA needs Linux, where libraries can be preloaded"
    if torch.version.cuda is None:
        return "fake CUDA needs a build of torch with CUDA"
    if torch.cuda.is_available():
        return "fake CUDA would stand in the way of the real GPU here"
    return None if shutil.which("cc") else "fake CUDA needs a C compiler called cc"


def run_on_fake_cuda(command: list[str], env: Mapping[str, str] = os.environ) -> str:
    """What a Python program writes to standard output, in a process that sees the fake GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")  # under this name torch finds the driver loaded already
        options = [f"-DCAPABILITIES={','.join(map(str, CAPABILITIES.values()))}", f"-Wl,-soname,{library.name}"]
        compile_ = ["cc", "-shared", "-fPIC", *options, "-x", "c", "-", "-o", str(library)]
        subprocess.run(compile_, input=STUBS, text=True, check=True)
        env = {**env, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Inside, all new tensors are fake."""
    if not torch.cuda.is_available() or torch.cuda.get_device_name(0) != "fake":
        raise RuntimeError("no fake GPUs: start this process by run_on_fake_cuda")
    with ExitStack() as stack:
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") copies, as it really does
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        stack.enter_context(mock.patch.object(nn.Module, "to", moved))
        # Else copies of constants would run on the GPU.
        stack.enter_context(mock.patch.object(FakeTensorMode, "avoid_device_init", True))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def moved(network: nn.Module, device: torch.device) -> nn.Module:
    """Module.to for fake parameters, which torch cannot change in place."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
    return network


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Inside, this is the first of `size` processes, whose collectives return at once. DistributedDataParallel, which
    insists on real memory, is left out, and with it the exchange of gradients."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with mock.patch("main_pretrain.with_ddp", lambda network: network):
            yield
    finally:
        dist.destroy_process_group()


# --- What would happen on the GPU ---

ATTENTION = "_scaled_dot_product_"
COPIES = (aten._to_copy.default, aten.copy_.default)
FREE = {  # besides views: ops that touch no element
    *("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
}


@dataclass
class Launch:
    """An op that launches at least one kernel. `kind` is matrix, attention, cast or other."""

    kind: str
    flops: int
    moved: int  # bytes of its inputs and outputs
    dtype: torch.dtype


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def is_host(device: torch.device | str | None) -> bool:
    return device is None or torch.device(device).type == "cpu"


@cache
def path_in_project(file: str) -> Path | None:
    """Relative to its root; None for libraries, which may lie below it in an environment."""
    path = Path(file)
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) and "site-packages" not in path.parts else None


class Recorder(TorchDispatchMode):
    """Records, while entered, each op on a GPU, and each moment where the host waits for it or copies from or to it,
    by file:function of this project's code.

    Tensors on the host are real. Those on a GPU have no values; what is read from them is `scalar`.
    """

    def __init__(self, scalar: float = 16):
        super().__init__()
        self.scalar = scalar
        self.launches: list[Launch] = []
        self.attention: Counter[str] = Counter()  # forward kernels
        self.syncs: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()  # between host and GPU, with non_blocking=True
        self.collectives: Counter[str] = Counter()
        self.largest = 0  # elements of the largest tensor that was made
        self._patches = ExitStack()

    def __enter__(self) -> "Recorder":
        def tolist(values: torch.Tensor) -> list[float]:
            self.syncs[self.site()] += 1
            return [self.scalar] * values.numel()

        def synchronize(_device: Any = None) -> None:
            self.syncs[self.site()] += 1

        self._patches.enter_context(mock.patch.object(FakeTensor, "tolist", tolist))
        self._patches.enter_context(mock.patch("torch.cuda.synchronize", synchronize))
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, op: Any, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_in((args, kwargs))
        if op.namespace == "c10d":
            self.collectives[op._opname] += 1
        if not any(isinstance(tensor, FakeTensor) for tensor in inputs) and is_host(kwargs.get("device")):
            with unset_fake_temporarily():
                return op(*args, **kwargs)
        if op is aten._local_scalar_dense.default:
            self.syncs[self.site()] += 1
            return self.scalar
        if op is aten._to_copy.default and is_host(kwargs.get("device") or inputs[0].device):
            (self.copies if kwargs.get("non_blocking") else self.syncs)[self.site()] += 1
            with unset_fake_temporarily():
                return torch.full(inputs[0].shape, self.scalar, dtype=kwargs.get("dtype") or inputs[0].dtype)
        result = op(*args, **kwargs)
        outputs = tensors_in(result)
        if all(is_host(tensor.device) for tensor in (*inputs, *outputs)):
            return result
        if any(is_host(tensor.device) and tensor.ndim for tensor in inputs):  # a scalar is a kernel's argument
            asynchronous = op in COPIES and kwargs.get("non_blocking", len(args) > 2 and args[2])
            (self.copies if asynchronous else self.syncs)[self.site()] += 1
        if op not in COPIES or not any(is_host(tensor.device) for tensor in inputs):
            self.launched(op, args, kwargs, outputs, result)
        return result

    def launched(self, op: Any, args, kwargs, outputs: list[torch.Tensor], result: Any) -> None:
        parameters = op._schema.arguments
        given = dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
        changed = [given.get(each.name) for each in parameters if each.alias_info and each.alias_info.is_write]
        written = {id(tensor): tensor for tensor in (*tensors_in(changed), *outputs)}.values()
        if op.is_view or op._opname in FREE or not written:
            return
        name, flops, kind = op._opname, 0, "other"
        if op._overloadpacket in flop_registry:
            flops, kind = flop_registry[op._overloadpacket](*args, **kwargs, out_val=result), "matrix"
        if name.startswith(ATTENTION):
            kind = "attention"
            if not name.endswith("_backward"):
                self.attention[name.removeprefix(ATTENTION).removesuffix("_attention")] += 1
        elif name == "_to_copy":
            kind = "cast"
        involved = (*tensors_in((args, kwargs)), *written)
        bytes_ = sum(tensor.numel() * tensor.element_size() for tensor in involved)
        self.launches.append(Launch(kind, flops, bytes_, involved[0].dtype))
        self.largest = max(self.largest, *(tensor.numel() for tensor in written))

    @staticmethod
    def site() -> str:
        """file:function of the innermost caller in this project, benchmarks and tests apart."""
        frame = sys._getframe(1)
        while frame is not None:
            path = path_in_project(frame.f_code.co_filename)
            if path is not None and path.parts[0] not in ("benchmarks", "tests"):
                return f"{path.as_posix()}:{frame.f_code.co_name}"
            frame = frame.f_back
        return "the backward pass" if threading.current_thread() is not threading.main_thread() else "nowhere"
