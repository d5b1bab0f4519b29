"""Curves of runs: metrics over the epochs of their log.txt, and accuracies over the number of shots."""

import math

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from util.plots.style import look, tidy, verbatim

# Title, key in log.txt, the value of a reference line, and what that line means.
PANELS = (
    ("curriculum weight $\\lambda_{CL}$", "train_lambda_cl", 0.0, "neutral"),
    ("error of hidden patches / of random ones", "mask_error_vs_random", 1.0, "below: partner, above: adversary"),
    ("reconstruction error (training loss)", "train_loss", None, ""),
    ("visible fraction", "train_mask_visible", None, ""),
    ("distance of masks (Hamming)", "train_mask_hamming", None, ""),
    ("decisive share of Z", "train_mask_decisive", None, ""),
)


def curve_figure(logs: dict[str, list[dict]]) -> Figure:
    """A panel for each metric of a curriculum's progress, with a curve for each run that logs it."""
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    for axes, (title, key, line, meaning) in zip(figure.subplots(2, 3).flat, PANELS, strict=True):
        for at, (name, log) in enumerate(logs.items()):
            points = [(entry["epoch"] + 1, entry[key]) for entry in log if key in entry]
            series = zip(*points, strict=True) if points else ([], [])
            axes.plot(*series, **look(at), markersize=3, label=verbatim(name))
        if line is not None:
            axes.axhline(line, color="0.6", linewidth=1, linestyle="--")
            at_left = {"transform": axes.get_yaxis_transform(), "ha": "left", "va": "bottom"}
            axes.text(0.02, line, meaning, fontsize=7, color="0.4", **at_left)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("epochs", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        tidy(axes)
        if not any(len(curve.get_xdata()) for curve in axes.lines[: len(logs)]):
            axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, ha="center", color="0.5")
    figure.axes[2].legend(frameon=False, fontsize=9)
    return figure


def few_shot_figure(data: str, curves: dict[str, list[tuple[int, float, float | None]]]) -> Figure:
    """Acc@1 over the number of shots, with bars of one standard deviation. A run's points are (shots, Acc@1, std)."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for at, (name, points) in enumerate(curves.items()):
        if not points:
            continue
        shots, acc, std = zip(*points, strict=True)
        aside = 2 ** (0.05 * (at - (len(curves) - 1) / 2))  # offset slightly, or the bars would overlap
        axes.errorbar(
            [number * aside for number in shots],
            acc,
            yerr=[math.nan if value is None else value for value in std],
            **look(at),
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=verbatim(name),
        )
    ticks = sorted({shots for points in curves.values() for shots, *_ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, labels=map(str, ticks))
    axes.minorticks_off()
    axes.set_xlabel("labelled images per class (shots)")
    axes.set_ylabel("Acc@1 (%)")
    axes.set_title(verbatim(data))
    tidy(axes)
    axes.legend(frameon=False)
    return figure
