"""Devices, precision and kernels when torch sees two fake GPUs; processes that lose others or collect garbage."""

import gc
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from small_runs import SMALL

import main_pretrain
import util.misc
from util.cli import UserError
from util.evaluation.neighbours import Scan, nearest_neighbours
from util.misc import amp_dtype, full_float32, init_distributed_mode, precision, set_up_device
from util.program import lost_another

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
KERNELS = ("flash", "mem_efficient", "cudnn", "math")


def enabled():
    return ", ".join(name for name in KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")())


@pytest.fixture
def current(monkeypatch):
    """The devices that were made the current one."""
    devices = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: devices.append(str(device)))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    yield devices
    for name in KERNELS:
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    torch.set_float32_matmul_precision("highest")


def test_a_process_makes_its_gpu_the_current_one(current, monkeypatch):
    assert [str(set_up_device(name)) for name in (None, "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"] == current
    assert torch.backends.cudnn.benchmark
    with pytest.raises(UserError, match="--device cuda:2: torch finds no such GPU here"):
        set_up_device("cuda:2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert str(set_up_device("cuda:0")) == "cuda:1", "the launcher knows better"


@pytest.mark.parametrize(
    ("attention", "kernels"),
    [
        ("auto", "flash, mem_efficient, math"),
        ("flash", "flash, math"),
        ("efficient", "mem_efficient, math"),
        ("cudnn", "cudnn, math"),
        ("math", "math"),
    ],
)
def test_the_kernels_of_attention_are_chosen_and_recorded(current, attention, kernels):
    args = main_pretrain.get_args_parser().parse_args(["--attention", attention])
    init_distributed_mode(args)
    assert args.attention_kernels == enabled() == kernels
    set_up_device("cpu", "auto")
    assert enabled() == kernels, "a CPU has its own"


def test_every_program_that_runs_a_model_switches_cudnn_attention_off(current):
    torch.backends.cuda.enable_cudnn_sdp(True)
    set_up_device(None)
    assert enabled() == "flash, mem_efficient, math"


def test_tf32_only_where_asked_and_never_between_neighbours(current, monkeypatch):
    seen = []
    search = Scan.search
    spy = lambda *args: (seen.append(torch.get_float32_matmul_precision()), search(*args))[1]  # noqa: E731
    monkeypatch.setattr(Scan, "search", spy)
    for amp, tf32 in (("tf32", True), ("off", False), ("auto", False)):
        set_up_device(None, amp=amp)
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == tf32
        nearest_neighbours(torch.rand(9, 4), torch.rand(2, 4), 1)
        assert torch.backends.cuda.matmul.allow_tf32 == tf32
        with full_float32():
            assert not torch.backends.cuda.matmul.allow_tf32
    assert seen == ["highest"] * 3
    assert (precision("tf32", CUDA), precision("tf32", CPU)) == ("tf32", "float32")


@pytest.mark.parametrize(("generation", "dtype"), [(7, torch.float16), (8, torch.bfloat16), (9, torch.bfloat16)])
def test_bf16_only_where_it_is_not_emulated(current, monkeypatch, generation, dtype):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Namespace(major=generation))
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert amp_dtype("auto", CUDA) == dtype


@pytest.mark.parametrize(
    ("device", "backend", "connected"), [("cuda", "cpu:gloo,cuda:nccl", torch.device("cuda:1")), ("cpu", "gloo", None)]
)
def test_nccl_learns_the_gpu_when_processes_join(current, monkeypatch, device, backend, connected):
    joined = {}
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: joined.update(options, backend=name))
    monkeypatch.setattr(util.misc, "meet", lambda *_: None)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    args = main_pretrain.get_args_parser().parse_args(["--device", device])
    init_distributed_mode(args)
    assert (joined["backend"], joined["device_id"], joined["rank"]) == (backend, connected, 1)


@pytest.mark.parametrize(
    ("text", "echo"),
    [
        ("[gloo/pair.cc:525] Connection closed by peer [10.0.0.2]:5321", True),
        ("NCCL error in: x.hpp:268, remote process exited or there was a network error, NCCL version 2.21.5", True),
        (
            "NCCL error in: x.cpp:1275, internal error\nLast error:\nNet : Connection closed by remote peer a<47861>",
            True,
        ),
        ("NCCL communicator was aborted on rank 2. Original reason for failure was: ...", True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)", True),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?", True),
        (
            "NCCL error in: x.cpp:3, unhandled system error\nError while creating shared memory segment /dev/shm/n",
            False,
        ),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_a_process_that_lost_another_says_so(text, echo):
    assert lost_another(RuntimeError(text)) == echo


def test_garbage_is_collected_between_steps_and_epochs_only(program, monkeypatch, tmp_path):
    collecting = []
    train = main_pretrain.train_one_epoch
    spy = lambda *args: (collecting.append((gc.isenabled(), gc.get_freeze_count() > 0)), train(*args))[1]  # noqa: E731
    monkeypatch.setattr(main_pretrain, "train_one_epoch", spy)
    assert program(main_pretrain, *SMALL, "--output_dir", tmp_path)[0] == 0
    assert collecting == [(False, True)] * 2
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)
