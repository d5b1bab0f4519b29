"""What an iteration costs relative to MAE: time, FLOPs and peak memory.

    python -m benchmarks.bench_step                                       # mae_vit_micro_patch4 at 32 px, a minute
    python -m benchmarks.bench_step --model mae_vit_base --batch_size 8   # ViT-B's width; minutes on 2 cores
    python -m benchmarks.bench_step --model mae_vit_base --device cuda --pretrain --amp bf16 --compile

Methods alternate within each round; shown are medians over rounds of times and of ratios, and the ratios' range. An
iteration is engine_pretrain.py's own, on ready images: no loader is involved.
"""

import logging
import resource
import statistics
import sys
from argparse import REMAINDER, Namespace
from collections.abc import Iterator
from functools import cached_property
from multiprocessing import get_context
from typing import cast

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import main_pretrain
from benchmarks.timing import alternate, ratio
from engine_pretrain import train_one_epoch
from models_mae import MODELS, build_mae
from util.cli import ArgumentParser, count, logger
from util.datasets import ImageLoader
from util.evaluation.tables import show_table
from util.misc import generator, set_up_device
from util.program import run
from util.training.progress import EpochLog, LossGuard
from util.training.resume import Start

# Flags of main_pretrain.py; HALF is half of the encoder's width. The preset is that of docs/speed.md.
METHODS = {
    "MAE": "--masking random",
    "CL-MAE": "--masking curriculum",
    "predictive": "--masking predictive",
    "--cmm_every 2": "--cmm_every 2",
    "--cmm_every 4": "--cmm_every 4",
    "--cmm_fraction 0.5": "--cmm_fraction 0.5",
    "--cmm_fraction 0.25": "--cmm_fraction 0.25",
    "--cmm_dim half": "--cmm_dim HALF",
    "preset": "--cmm_every 2 --cmm_fraction 0.25 --cmm_dim HALF",
    "MAE, compiled": "--masking random --compile",
    "CL-MAE, compiled": "--compile",
}
PER_TURN = 4  # iterations of a method before the next has its turn: a multiple of all --cmm_every


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mae_vit_micro_patch4", choices=sorted(MODELS), help="its size")
    parser.add_argument("--input_size", default=None, type=count, help="default: 32 for micro, else 224")
    parser.add_argument("--batch_size", default=64, type=count, help="images per iteration")
    parser.add_argument("--rounds", default=5, type=count, help="turns of each method, after one to warm up")
    eager = [name for name in METHODS if "compiled" not in name]
    parser.add_argument("--methods", default=eager, nargs="+", choices=METHODS, help="the first is the reference")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--memory", action="store_true", help="peak memory of each method, in a process of its own")
    parser.add_argument("--pretrain", default=[], nargs=REMAINDER, metavar="FLAG", help="comes last: pretraining flags")
    return parser


class ReadyImages:
    """A loader's interface around one batch, repeated."""

    batches = sys.maxsize

    def __init__(self, imgs: torch.Tensor):
        self.imgs = imgs

    def set_epoch(self, epoch: int, first_batch: int = 0) -> None:
        pass

    def __iter__(self) -> Iterator[tuple[torch.Tensor, None, torch.Tensor]]:
        for _ in range(self.batches):
            yield self.imgs, None, torch.arange(len(self.imgs))


class Contender:
    """One method, given by flags of main_pretrain.py, with networks of its own, ready to iterate."""

    def __init__(self, method: str, args: Namespace):
        with torch.device("meta"):
            half = build_mae(args.model).cls_token.shape[-1] // 2
        size = args.input_size or (32 if "micro" in args.model else 224)
        flags = f"--model {args.model} --input_size {size} --batch_size {args.batch_size} --device {args.device} "
        flags += "--warmup_epochs 0 --epochs 1 --lr 1e-4 " + method.replace("HALF", str(half))
        self.args = main_pretrain.get_args_parser().parse_args([*flags.split(), *args.pretrain])
        main_pretrain.check_args(self.args)
        main_pretrain.settle_batch_and_rates(self.args)
        self.device = set_up_device(args.device, self.args.attention, self.args.amp)
        self.state = main_pretrain.build_networks(self.args, self.device)
        self.masking = main_pretrain.build_masking(self.state, self.args)
        shape = (args.batch_size, self.args.in_chans, *self.args.input_size)
        imgs = torch.randint(256, shape, dtype=torch.uint8, generator=generator("bench_step"))
        self.loader = ReadyImages(imgs)

    @cached_property
    def loss_guard(self) -> LossGuard:
        return LossGuard(self.state.loss_scales())

    def iterate(self, iterations: int = PER_TURN) -> None:
        logger.setLevel(logging.WARNING)  # the engine's own report is made, but not shown
        log = EpochLog(Start(0), iterations, self.loss_guard, None, self.args)
        loader = cast("ImageLoader", self.loader)
        train_one_epoch(self.state.model, loader, self.masking, self.state, 0, log, self.args)
        logger.setLevel(logging.INFO)

    def take_turn(self, _round: int) -> None:
        self.iterate()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def gflop(self) -> float:
        """Of an iteration; NaN if compiled, which torch's counter does not see into."""
        if self.args.compile:
            return float("nan")
        # The counter knows attention only as the products it consists of.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.iterate()
        return counter.get_total_flops() / PER_TURN / 1e9


def report_time(args: Namespace) -> None:
    contenders = {name: Contender(METHODS[name], args) for name in args.methods}
    times, _ = alternate({name: one.take_turn for name, one in contenders.items()}, args.rounds)
    gflop = {name: contender.gflop() for name, contender in contenders.items()}
    first, rows = args.methods[0], []
    for name, seconds in times.items():
        each, work = statistics.median(seconds) / PER_TURN, [gflop[name] / args.batch_size, gflop[name] / gflop[first]]
        speed = [f"{1000 * each:.0f}", f"{args.batch_size / each:.1f}", ratio(seconds, times[first])]
        rows.append([name, *speed, *(f"{value:.3g}" for value in work)])
    header = ["method", "ms", "images/s", f"time / {first}", "GFLOP per image", f"FLOPs / {first}"]
    show_table("an iteration (medians)", header, rows)


def peak_memory(method: str, args: Namespace) -> float:
    """Gigabytes that a few iterations take beyond what the process has after its imports."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    contender = Contender(method, args)
    contender.iterate(2)  # the first has no state of AdamW yet
    if contender.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / 1e9


def peak_memories(contenders: dict[str, tuple[str, Namespace]]) -> dict[str, float]:
    """Of each, given its method and flags: in a process of its own, because a peak is that of a process."""
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(peak_memory, contender) for name, contender in contenders.items()}
        pool.close()
        pool.join()  # killed while it tidies up, the last process would leave semaphores behind, with a warning
    return peaks


def report_memory(args: Namespace) -> None:
    peaks = peak_memories({method: (METHODS[method], args) for method in args.methods})
    first = args.methods[0]
    rows = [[method, f"{peak:.2f}", f"{peak / peaks[first]:.2f}"] for method, peak in peaks.items()]
    show_table("peak memory", ["method", "GB", f"/ {first}"], rows)


def main(args: Namespace) -> None:
    logger.info("%s, batch %d, %s, %d threads", args.model, args.batch_size, args.device, torch.get_num_threads())
    (report_memory if args.memory else report_time)(args)


if __name__ == "__main__":
    run(main, get_args_parser())
