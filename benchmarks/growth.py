"""How time grows: nearest neighbours with the training set, an iteration with the batch and with the number of tokens.

    OMP_NUM_THREADS=1 python -m benchmarks.growth       # a few minutes on one core; writes benchmarks/growth.png

Each point is the fastest of some rounds, and the rounds go through all sizes in turn, because a shared machine is
slower at some times than at others: what disturbs a measurement can only add to it. The exponent is the slope of a
straight line through the points in the log-log plot: 1 is linear.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.bench_knn import features
from benchmarks.bench_step import Contender
from util.arguments import check_at_least
from util.cli import ArgumentParser, UserError, logger, run
from util.evaluation.neighbours import nearest_neighbours
from util.plots.style import COLOURS, MARKERS, save_figure

PICTURE = Path(__file__).with_suffix(".png")
METHODS = ("MAE", "CL-MAE")
PATCH = 4  # of mae_vit_micro_patch4


@dataclass(frozen=True)
class Series:
    name: str
    sizes: list[int]
    seconds: list[float]

    @property
    def exponent(self) -> float:
        return fit_exponent(self.sizes, self.seconds)[0]


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.growth", description=__doc__.split("\n")[0])
    sizes = [10_000, 20_000, 50_000, 100_000, 200_000]
    parser.add_argument("--train", default=sizes, type=int, nargs="+", help="training vectors of the neighbour search")
    parser.add_argument("--queries", default=512, type=int, help="its query vectors")
    parser.add_argument("--width", default=384, type=int, help="of the vectors")
    parser.add_argument("--batches", default=[16, 32, 64, 128], type=int, nargs="+", help="images per iteration")
    parser.add_argument("--inputs", default=[16, 24, 32, 48, 64], type=int, nargs="+", help="sides of images, px")
    parser.add_argument("--rounds", default=3, type=int, help="of which the fastest counts")
    parser.add_argument("--threads", default=1, type=int, help="of torch")
    return parser


def check_args(args: Namespace) -> None:
    check_at_least(args, 1, "queries", "width", "rounds", "threads")
    for name in ("train", "batches", "inputs"):
        values = getattr(args, name)
        if len(set(values)) < 2 or min(values) < 1:
            raise UserError(f"--{name} takes at least two different sizes above 0: one point has no slope")
    if any(side % PATCH for side in args.inputs):
        raise UserError(f"--inputs {' '.join(map(str, args.inputs))} must be multiples of {PATCH}, the patch size")
    if min(args.train) < 20:
        raise UserError(f"--train {min(args.train)} has fewer than the 20 neighbours that are searched for")


def fit_exponent(sizes: list[float], seconds: list[float]) -> tuple[float, float]:
    """Exponent and factor of the power law that fits best: a least-squares line through the logarithms."""
    exponent, logarithm = np.polyfit(np.log(sizes), np.log(seconds), 1)
    return float(exponent), float(np.exp(logarithm))


def fastest(works: list[Callable[[], object]], rounds: int) -> list[float]:
    """Seconds of each, after one run to warm up."""
    for work in works:
        work()
    best = [float("inf")] * len(works)
    for _ in range(rounds):
        for i, work in enumerate(works):
            start = time.perf_counter()
            work()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure_neighbours(args: Namespace) -> Series:
    largest = features(max(args.train), args.width, "train")
    queries = features(args.queries, args.width, "queries")
    works = [lambda n=n: nearest_neighbours(largest[:n], queries, 20) for n in args.train]
    return Series("20 nearest neighbours", args.train, fastest(works, args.rounds))


def contender(method: str, batch_size: int, input_size: int) -> Contender:
    """Exactly a quarter of the tokens is visible (topk), so that no untrained mask adds a growth of its own."""
    settings = dict(model="mae_vit_micro_patch4", batch_size=batch_size, input_size=input_size, device="cpu", amp="off")
    return Contender(method, Namespace(**settings, select="topk", compile=False, grad_checkpointing=False))


def measure_steps(sizes: list[int], build: Callable[[str, int], Contender], rounds: int) -> list[Series]:
    """Seconds of an iteration, both methods in turn at each size."""
    contenders = [build(method, size) for method in METHODS for size in sizes]
    times = fastest([lambda c=c: c.iterate(2) for c in contenders], rounds)
    per_method = [times[i : i + len(sizes)] for i in range(0, len(times), len(sizes))]
    return [
        Series(name, sizes, [seconds / 2 for seconds in each]) for name, each in zip(METHODS, per_method, strict=True)
    ]


def plain_ticks(axes: Axes, sizes: list[int]) -> None:
    axes.set_xticks(sizes, [f"{size // 1000}k" if size >= 10_000 else str(size) for size in sizes])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def draw(axes: Axes, series: list[Series], title: str, label: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for i, each in enumerate(series):
        exponent, factor = fit_exponent(each.sizes, each.seconds)
        axes.plot(each.sizes, each.seconds, MARKERS[i], color=COLOURS[i], label=f"{each.name}: exponent {exponent:.2f}")
        axes.plot(each.sizes, [factor * size**exponent for size in each.sizes], color=COLOURS[i], linewidth=1)
    plain_ticks(axes, sorted(set(series[0].sizes)))
    every = [seconds for each in series for seconds in each.seconds]
    axes.set_ylim(min(every) / 2, max(every) * 3)  # room for the legend, and for a label on the axis
    axes.set(title=title, xlabel=label, ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)


def make_figure(panels: list[tuple[list[Series], str, str]]) -> Figure:
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        draw(axes, *panel)
    return figure


def main(args: Namespace) -> None:
    check_args(args)
    torch.set_num_threads(args.threads)
    neighbours = measure_neighbours(args)
    by_batch = measure_steps(sorted(args.batches), lambda method, n: contender(method, n, 32), args.rounds)
    by_side = measure_steps(sorted(args.inputs), lambda method, side: contender(method, 32, side), args.rounds)
    by_tokens = [Series(s.name, [(side // PATCH) ** 2 for side in s.sizes], s.seconds) for s in by_side]
    panels = [
        ([neighbours], f"Neighbours of {args.queries:,} queries, width {args.width}", "training vectors"),
        (by_batch, "An iteration, 64 tokens per image", "images in a batch"),
        (by_tokens, "An iteration, 32 images", "tokens per image"),
    ]
    for series, title, label in panels:
        for each in series:
            points = ", ".join(
                f"{size:,}: {seconds:.3g} s" for size, seconds in zip(each.sizes, each.seconds, strict=True)
            )
            logger.info("%s; %s by %s: exponent %.2f (%s)", title, each.name, label, each.exponent, points)
    save_figure(make_figure(panels), PICTURE.with_suffix(""), formats=("png",), dpi=120)
    logger.info("wrote %s", PICTURE.name)


if __name__ == "__main__":
    run(main, get_args_parser())
