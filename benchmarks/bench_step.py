"""What an iteration of CL-MAE costs beside one of MAE: time, peak memory, and where the time goes.

    python -m benchmarks.bench_step                                       # mae_vit_micro_patch4 at 32 px, a minute
    python -m benchmarks.bench_step --model mae_vit_base --batch_size 8   # ViT-B's width; minutes on 2 cores
    python -m benchmarks.bench_step --model mae_vit_base --batch_size 64 --device cuda --amp bf16 --compile

Methods alternate within each round; shown are medians over rounds of times and of ratios, and the ratios' range. An
iteration is engine_pretrain.py's own, on ready images: no loader is involved.
"""

import logging
import resource
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from timm.layers import Attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import engine_pretrain
from benchmarks.timing import Times, alternate, ratio
from main_pretrain import build_masking, build_networks, check_args, settle_batch_and_rates
from main_pretrain import get_args_parser as pretrain_parser
from models_mae import MODELS, build_mae
from util.cli import ArgumentParser, count, logger, run
from util.datasets import ImageLoader, normalise
from util.evaluation.tables import show_table
from util.misc import amp_dtype, autocast, generator, pick_device
from util.training.progress import EpochLog, LossGuard
from util.training.resume import Start

PRESET = ("--cmm_every", "2", "--cmm_fraction", "0.25")  # with --cmm_dim at half of the width: docs/speed.md
METHODS = {
    "MAE": ("--masking", "random"),
    "CL-MAE": (),
    "--cmm_every 2": ("--cmm_every", "2"),
    "--cmm_every 4": ("--cmm_every", "4"),
    "--cmm_fraction 0.5": ("--cmm_fraction", "0.5"),
    "--cmm_fraction 0.25": ("--cmm_fraction", "0.25"),
    "--cmm_dim half": ("--cmm_dim", "half"),
    "preset": (*PRESET, "--cmm_dim", "half"),
    "MAE, compiled": ("--masking", "random", "--compile"),
    "CL-MAE, compiled": ("--compile",),
}
PLAIN = "plain MAE"  # explicit attention, and a loop that looks at every step's loss and gradient norm
PER_TURN = 4  # iterations of a method before the next has its turn: a multiple of all --cmm_every


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mae_vit_micro_patch4", choices=sorted(MODELS), help="its size")
    parser.add_argument("--input_size", default=None, type=int, help="default: 32 for micro, else 224")
    parser.add_argument("--batch_size", default=64, type=count, help="images per iteration")
    parser.add_argument("--rounds", default=5, type=count, help="turns of each method, after one to warm up")
    eager = [name for name in METHODS if "compiled" not in name]
    parser.add_argument("--methods", default=eager, nargs="+", choices=[*METHODS, PLAIN], help="in this order")
    parser.add_argument("--select", default="threshold", choices=["threshold", "topk"], help="as main_pretrain.py")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--amp", default="auto", choices=["auto", "bf16", "fp16", "off"], help="as main_pretrain.py")
    parser.add_argument("--compile", action="store_true", help="compile the transformer blocks")
    parser.add_argument("--grad_checkpointing", action="store_true", help="as main_pretrain.py")
    parser.add_argument("--profile", action="store_true", help="tell where the time of a CL-MAE iteration goes")
    parser.add_argument("--memory", action="store_true", help="peak memory of each method, in a process of its own")
    parser.add_argument("--one", default=None, help="(internal) run this method alone and tell its peak memory")
    return parser


class ReadyImages:
    """A loader's interface around one batch, given again and again."""

    def __init__(self, imgs: torch.Tensor, iterations: int):
        self.imgs, self.iterations = imgs, iterations

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[torch.Tensor, None, torch.Tensor]]:
        return iter([(self.imgs, None, torch.arange(len(self.imgs)))] * self.iterations)


class Contender:
    """One method with networks of its own, ready to iterate."""

    def __init__(self, name: str, args: Namespace):
        self.name, self.device = name, pick_device(args.device)
        flags = [*("--model", args.model, "--batch_size", args.batch_size, "--device", args.device)]
        flags += ["--amp", args.amp, "--select", args.select, "--warmup_epochs", "0", "--epochs", "1", "--lr", "1e-4"]
        flags += ["--compile"] if args.compile else []
        flags += ["--grad_checkpointing"] if args.grad_checkpointing else []
        with torch.device("meta"):
            width = build_mae(args.model).cls_token.shape[-1]
        method = METHODS["MAE" if name == PLAIN else name]
        flags += [str(width // 2) if flag == "half" else flag for flag in method]
        self.args = pretrain_parser().parse_args(list(map(str, flags)))
        size = args.input_size or (32 if "micro" in args.model else 224)
        self.args.input_size = [size, size]
        check_args(self.args)
        settle_batch_and_rates(self.args)
        self.state = build_networks(self.args, self.device)
        self.masking = build_masking(self.state, self.args)
        shape = (args.batch_size, 3, size, size)
        self.imgs = torch.randint(256, shape, dtype=torch.uint8, generator=generator("bench_step"))
        if name == PLAIN:
            self.make_plain()

    def make_plain(self) -> None:
        """The same model with attention written out, and torch's default AdamW."""
        for module in self.state.model.modules():
            if isinstance(module, Attention):
                module.fused_attn = False  # pyright: ignore[reportAttributeAccessIssue]
        groups = self.state.optimizer.param_groups
        self.state.optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95))

    def iterate(self, iterations: int) -> None:
        logger.setLevel(logging.WARNING)  # the engine's own report is made, but not shown
        if self.name == PLAIN:
            self.iterate_plainly(iterations)
        else:
            self.iterate_engine(iterations)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        logger.setLevel(logging.INFO)

    def iterate_engine(self, iterations: int) -> None:
        state = self.state
        log = EpochLog(Start(0), iterations, LossGuard(skip=True), None, self.args)
        loader = cast("ImageLoader", ReadyImages(self.imgs, iterations))
        engine_pretrain.train_one_epoch(state.model, loader, self.masking, state, 0, log, self.args)

    def iterate_plainly(self, iterations: int) -> None:
        model, optimizer, dtype = self.state.model, self.state.optimizer, amp_dtype(self.args.amp, self.device)
        for _ in range(iterations):
            imgs = normalise(self.imgs.to(self.device, non_blocking=True))
            with autocast(self.device, dtype):
                loss, _, _ = model(imgs, self.args.mask_ratio)
            loss.item()
            loss.backward()
            torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()
            optimizer.step()
            optimizer.zero_grad()

    def gflop(self) -> float:
        """Of an iteration, counted."""
        # The counter knows attention only as the products it consists of.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.iterate(PER_TURN)
        return counter.get_total_flops() / PER_TURN / 1e9


def report(times: Times, gflop: dict[str, float], batch_size: int) -> None:
    """`times` of turns."""
    first = next(iter(times))
    rows = []
    for name, seconds in times.items():
        each, work = statistics.median(seconds) / PER_TURN, gflop.get(name, 0) / gflop.get(first, 1)
        relative = statistics.median(a / b for a, b in zip(seconds, times[first], strict=True))
        counted = [f"{work:.2f}", f"{relative / work:.2f}"] if work else ["-", "-"]
        rows.append([name, f"{1000 * each:.0f}", f"{batch_size / each:.1f}", ratio(seconds, times[first]), *counted])
    header = ["method", "ms", "images/s", f"time / {first}", "FLOPs", "time / FLOPs"]
    show_table("an iteration (medians)", header, rows)


# --- Where the time goes ---


@contextmanager
def timed(owner: object, name: str, spent: dict[str, float], label: str) -> Iterator[None]:
    """Inside, calls of `owner.name` add their seconds to `spent[label]`."""
    original: Callable = getattr(owner, name)

    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            spent[label] += time.perf_counter() - start

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


def profile(contender: Contender, turns: int) -> None:
    """Shares of an iteration by part; a CPU computes while it is called, so wrapped calls tell the time."""
    spent: dict[str, float] = defaultdict(float)
    state = contender.state
    parts = [
        (state.cmm, "forward", "CMM, forward"),
        (state.model, "forward", "MAE, forward"),
        (contender.masking.learned, "errors", "soft pass, forward"),
        (torch.Tensor, "backward", "backward passes"),
        (state.optimizer, "step", "AdamW"),
        (state.optimizer_cmm, "step", "AdamW"),
    ]
    with ExitStack() as stack:
        for owner, name, label in parts:
            stack.enter_context(timed(owner, name, spent, label))
        start = time.perf_counter()
        contender.iterate(PER_TURN * turns)
        total = time.perf_counter() - start
    spent["MAE, forward"] -= spent["soft pass, forward"]  # which is the MAE's, too
    spent["all else"] = total - sum(spent.values())
    rows = [[label, f"{100 * seconds / total:.1f} %"] for label, seconds in spent.items()]
    show_table(f"where the time of {contender.name} goes", ["part", "share"], rows)


# --- Memory ---


def peak_memory(method: str, args: Namespace) -> float:
    """Gigabytes that a few iterations take beyond what the process has after its imports."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender = Contender(method, args)
    contender.iterate(2)  # the first has no state of AdamW yet
    if contender.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9


def report_memory(args: Namespace) -> None:
    """Each method in a fresh process, because a peak is that of a process."""
    rows, first = [], None
    for method in args.methods:
        command = [sys.executable, "-m", "benchmarks.bench_step", *sys.argv[1:], "--one", method]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak = float(done.stdout.splitlines()[-1])
        first = first or peak
        rows.append([method, f"{peak:.2f}", f"{peak / first:.2f}"])
    show_table("peak memory", ["method", "GB", f"/ {args.methods[0]}"], rows)


def main(args: Namespace) -> None:
    if args.one:
        logger.info("%f", peak_memory(args.one, args))
        return
    logger.info("%s, batch %d, %s, %d threads", args.model, args.batch_size, args.device, torch.get_num_threads())
    if args.memory:
        report_memory(args)
        return
    contenders = [Contender(name, args) for name in args.methods]
    times, _ = alternate({each.name: lambda _, each=each: each.iterate(PER_TURN) for each in contenders}, args.rounds)
    # Compiled code computes what the same method computes otherwise, and torch's counter does not see into it.
    gflop = {contender.name: contender.gflop() for contender in contenders if not contender.args.compile}
    report(times, gflop, args.batch_size)
    for contender in contenders:
        if args.profile and contender.name == "CL-MAE":
            profile(contender, args.rounds)


if __name__ == "__main__":
    run(main, get_args_parser())
