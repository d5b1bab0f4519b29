"""MaskBench's tables: every strategy beside its baseline, and how noisy each measure is."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.costs import Cost, Costs
from experiments.paired import FEWEST_SEEDS, LEVEL, Estimate, detectable, estimate_all, measure_noise, seeds_needed
from experiments.probe import FEATURES, PARTS, ProbedRun
from experiments.strategies import STRATEGIES
from util.checkpoint import write_text
from util.cli import UserError
from util.evaluation.tables import Cell, Group, Table, csv_text, p_value
from util.plots.style import look, save_figure, tidy, verbatim

EFFECT = 0.5  # points: the smallest difference a benchmark should detect
FEATURE_NAMES = {"mean": "mean token", "cls": "[CLS] token", "both": "both tokens"}


@dataclass(frozen=True)
class Entry:
    """A row of the leaderboard: a strategy, trained for so many epochs."""

    label: str
    strategy: str
    epochs: int
    baseline: str  # label of the row that it is compared to; its own, if none


@dataclass(frozen=True)
class Standing:
    """An entry's results; accuracies and differences are in points."""

    entry: Entry
    measure: str
    part: str
    seeds: int  # shared with the baseline, if there is a gain
    accuracy: float  # mean over all of its own seeds
    level: float  # its baseline's accuracy plus its gain: unlike accuracies, comparable between rows of different seeds
    gain: Estimate | None  # None for a baseline, and without its results
    cost: Cost | None
    compute: float | None  # of the whole training, over the baseline's

    @property
    def verdict(self) -> str:
        if self.entry.label == self.entry.baseline:
            return "baseline"
        return self.gain.verdict if self.gain else ""


Probes = dict[str, dict[int, ProbedRun]]  # by label and seed


def standings(
    entries: Sequence[Entry],
    probes: Probes,
    costs: Costs,
    measure: str,
    part: str = "all",
) -> list[Standing]:
    """The rows of the leaderboard, best first; entries without results are left out.

    Gains at equal epochs, at equal compute and at each length of training are families of their own. Strategies as fast
    as the baseline count in both of the first, and have the wider interval.
    """
    check_same(probes)
    known = [entry for entry in entries if probes.get(entry.label)]
    scores = {entry.label: scores_of(probes[entry.label], measure, part) for entry in known}
    compared = {entry: shared for entry in known if (shared := over_baseline(entry, scores)) is not None}
    epochs = {entry.label: entry.epochs for entry in entries}
    families: list[list[Entry]] = []
    for baseline in dict.fromkeys(entry.baseline for entry in known):
        rivals = [entry for entry in compared if entry.baseline == baseline]
        as_long = [entry for entry in rivals if entry.epochs == epochs[baseline]]
        stretched = [entry for entry in rivals if entry not in as_long]
        as_fast = [entry for entry in as_long if entry.strategy in costs and costs[entry.strategy].like_random]
        families += [as_long, stretched + as_fast if stretched else []]
    gains: dict[Entry, Estimate] = {}
    for family in sorted(families, key=lambda family: sum(len(compared[entry]) >= FEWEST_SEEDS for entry in family)):
        gains |= zip(family, estimate_all([compared[entry] for entry in family]), strict=True)
    accuracies = {
        label: float(np.mean([each.mean() for each in of_label.values()])) for label, of_label in scores.items()
    }
    rows = []
    for entry in known:
        cost = costs.get(entry.strategy)
        compute = cost.time * entry.epochs / epochs[entry.baseline] if cost else None
        seeds, gain = len(compared.get(entry, scores[entry.label])), gains.get(entry)
        level = accuracies[entry.baseline] + gain.mean if gain else accuracies[entry.label]
        rows.append(Standing(entry, measure, part, seeds, accuracies[entry.label], level, gain, cost, compute))
    return sorted(rows, key=lambda row: -row.level)


def scores_of(probes: dict[int, ProbedRun], measure: str, part: str) -> dict[int, np.ndarray]:
    """Points of each image [N], by seed."""
    found = {}
    for seed, probe in sorted(probes.items()):
        if measure not in probe.measures:
            raise UserError(f"--measure {measure}: {probe.path} has {', '.join(probe.measures)}")
        chosen = probe.part(part)
        if not chosen.any():
            raise UserError(f"--part {part}: {probe.path} has no such images; the run used all training images")
        found[seed] = 100 * probe.measures[measure][chosen]
    return found


def over_baseline(entry: Entry, scores: dict[str, dict[int, np.ndarray]]) -> np.ndarray | None:
    """Differences from the baseline with the same seeds; None for a baseline, or without common seeds."""
    own, base = scores[entry.label], scores.get(entry.baseline, {})
    seeds = [seed for seed in own if seed in base]
    if not seeds or entry.label == entry.baseline:
        return None
    return np.stack([own[seed] - base[seed] for seed in seeds])


def check_same(probes: Probes) -> None:
    """Scores are paired by position, so all runs need the same images."""
    every = [probe for of_label in probes.values() for probe in of_label.values()]
    for probe in every[1:]:
        if probe.images != every[0].images:
            raise UserError(f"{probe.path} and {every[0].path} are of different images; probe both on the same data")


# --- Tables ---


def leaderboard_table(rows: Sequence[Standing]) -> Table:
    lines = []
    for row in rows:
        gain, cost = row.gain, row.cost
        texts = [str(row.entry.epochs), str(row.seeds), f"{row.accuracy:.2f}"]
        if gain:
            p = "-" if gain.p_holm is None else p_value(gain.p_holm)
            texts += [f"{gain.mean:+.2f}", shown_interval(gain.interval), shown_interval(gain.simultaneous), p]
        else:
            texts += [""] * 4
        if cost and row.compute:
            texts += [f"{cost.time:.2f}", f"{row.compute:.2f}", f"{cost.gflop:.3g}", f"{cost.memory:.2f}"]
        else:
            texts += ["-"] * 4
        lines.append(([row.entry.label, row.verdict], list(map(Cell, texts))))
    groups = [
        Group("", ["epochs", "seeds", "Acc@1"]),
        Group("over its baseline:", ["gain", "95 %", "simultaneous 95 %", "p (Holm)"]),
        Group("cost:", ["step / random", "compute", "GFLOP", "GB"]),
    ]
    return Table(f"Leaderboard: {shown_measure(rows[0].measure)}, {shown_part(rows[0].part)}", ["", ""], groups, lines)


def features_table(by_measure: dict[str, list[Standing]]) -> Table:
    """The kinds of features side by side, in the order of the first."""
    first, *_ = by_measure.values()
    at = {measure: {row.entry: row for row in rows} for measure, rows in by_measure.items()}
    lines = []
    for entry in (row.entry for row in first):
        cells = []
        for rows in at.values():
            row = rows[entry]
            cells += [Cell(f"{row.accuracy:.2f}"), Cell(f"{row.gain.mean:+.2f}" if row.gain else "")]
            cells += [Cell(shown_interval(row.gain.interval) if row.gain else "")]
        lines.append(([entry.label], cells))
    names = [f"{FEATURE_NAMES[measure.split('-')[1]]}:" for measure in by_measure]
    return Table("By features", [""], [Group(name, ["Acc@1", "gain", "95 %"]) for name in names], lines)


def noise_table(entries: Sequence[Entry], probes: Probes) -> Table | None:
    """How much each measure scatters over seeds, from the seeds that all entries of a baseline share; entries with
    fewer than FEWEST_SEEDS would leave the others none."""
    family = [entry for entry in entries if (entry.baseline, entry.epochs) == (entries[0].baseline, entries[0].epochs)]
    family = [entry for entry in family if len(probes.get(entry.label, {})) >= FEWEST_SEEDS]
    family.sort(key=lambda entry: entry.label != entry.baseline)  # it comes first
    seeds = sorted(set.intersection(*(set(probes[entry.label]) for entry in family))) if family else []
    if len(family) < 2 or len(seeds) < 2 or family[0].label != family[0].baseline:
        return None
    first, lines = probes[family[0].label][seeds[0]], []
    every = [probes[entry.label][seed].measures for entry in family for seed in seeds]
    for part in (part for part in PARTS if first.part(part).any()):
        for measure in (name for name in first.measures if all(name in measures for measures in every)):
            scores = [scores_of(probes[entry.label], measure, part) for entry in family]
            noise = measure_noise(np.array([[own[seed].mean(dtype=float) for seed in seeds] for own in scores]))
            corrected = (1 - LEVEL) / (len(family) - 1)
            needed = [seeds_needed(noise.paired, EFFECT), seeds_needed(noise.unpaired, EFFECT, groups=2)]
            needed += [seeds_needed(noise.paired, EFFECT, alpha=corrected)]
            found = [detectable(noise.paired, len(seeds), alpha=alpha) for alpha in (1 - LEVEL, corrected)]
            texts = [f"{value:.2f}" for value in (noise.accuracy, noise.paired, noise.unpaired)]
            texts += [*map(str, needed), *(f"{value:.2f}" for value in found)]
            lines.append(([shown_measure(measure), shown_part(part)], list(map(Cell, texts))))
    among = f"paired, {len(family) - 1} strategies"
    groups = [
        Group("deviation over seeds of:", ["Acc@1", "paired difference", "unpaired difference"]),
        Group(f"seeds to detect {EFFECT} points:", ["paired", "unpaired", among]),
        Group(f"points detectable with {len(seeds)} seeds:", ["paired", among]),
    ]
    return Table(f"Noise, from {len(seeds)} seeds of {len(family)} strategies", ["measure", "images"], groups, lines)


def shown_interval(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"


def shown_measure(measure: str) -> str:
    encoder, feature = measure.split("-")
    names = {"final": "last checkpoint", "last": "mean of last checkpoints", "average": "averaged weights"}
    return f"{FEATURE_NAMES[feature]}, {names[encoder]}"


def shown_part(part: str) -> str:
    return {"all": "all unseen images", "held_out": "held-out images", "test": "test images"}[part]


def leaderboard_csv(rows: Sequence[Standing]) -> str:
    """In full precision; empty where unknown."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    bounds = ("low", "high", "low_simultaneous", "high_simultaneous")
    header = ("label", "strategy", "epochs", "baseline", "measure", "part", "seeds", "acc1", "gain", *bounds)
    writer.writerow([*header, "p", "p_holm", "step_time", "compute", "gflop", "memory_gb"])
    for row in rows:
        gain, cost, entry = row.gain, row.cost, row.entry
        names = [csv_text(entry.label), csv_text(entry.strategy), entry.epochs, csv_text(entry.baseline)]
        limits = [*((gain and gain.interval) or (None, None)), *((gain and gain.simultaneous) or (None, None))]
        tests = [gain.mean, *limits, gain.p, gain.p_holm] if gain else [None] * 7
        costs = [cost.time, row.compute, cost.gflop, cost.memory] if cost else [None] * 4
        writer.writerow([*names, row.measure, row.part, row.seeds, row.accuracy, *tests, *costs])
    return buffer.getvalue()


def leaderboard_figure(rows: Sequence[Standing]) -> Figure:
    """Gains over the baseline by strategy, and accuracy against compute where that was measured.

    Thin bars are simultaneous intervals of the gains, which decide; thick ones are those of each gain alone. Rows with
    too few seeds for an interval are hollow. A strategy looks the same in every figure.
    """
    figure = Figure(figsize=(11, 1.6 + 0.28 * len(rows)), layout="constrained")
    gains, compute = figure.subplots(1, 2, width_ratios=[1, 1.1])
    shortest = min((row.entry.epochs for row in rows if row.verdict == "baseline"), default=rows[0].entry.epochs)
    known = list(dict.fromkeys([*STRATEGIES, *sorted(row.entry.strategy for row in rows)]))  # a user's own come last
    for at, row in enumerate(rows):
        is_baseline, alone, together = row.verdict == "baseline", None, None
        if row.gain:
            alone, together = row.gain.interval, row.gain.simultaneous
        mean = row.gain.mean if row.gain else 0.0
        style = look(known.index(row.entry.strategy)) | ({"color": "black"} if is_baseline else {})
        points = {"markersize": 7, "linestyle": "none", "fillstyle": "full" if is_baseline or alone else "none"}
        gains.plot([mean], [at], **style, **points)
        for interval, width in ((together, 1), (alone, 3)):
            if interval:
                gains.plot(interval, [at, at], color=style["color"], linewidth=width)
        if row.cost:
            x = row.cost.time * row.entry.epochs / shortest
            compute.plot([x], [row.level], **style, **points)
            if together:
                ends = [row.level - mean + end for end in together]
                compute.plot([x, x], ends, color=style["color"], linewidth=0.7)
        if row.verdict == "baseline":
            compute.axhline(row.accuracy, color="0.6", linewidth=1, linestyle="--")
    gains.axvline(0, color="0.6", linewidth=1, linestyle="--")
    few = [f" ({row.seeds} seed{'s' * (row.seeds > 1)})" if row.seeds < FEWEST_SEEDS else "" for row in rows]
    names = [verbatim(row.entry.label) for row in rows]
    gains.set_yticks(range(len(rows)), labels=[f"{name}{seeds}" for name, seeds in zip(names, few, strict=True)])
    gains.invert_yaxis()
    gains.set_xlabel("gain over random masks (points)\n95 % intervals: alone (thick) and simultaneous (thin)")
    compute.set_xscale("log", base=2)
    left, right = compute.get_xlim()
    fine, coarse = (0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.3, 1.5, 2), (0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 12, 16)
    ticks = [tick for tick in (fine if right < 2 * left else coarse) if left <= tick <= right]
    compute.set_xticks(ticks, labels=map(str, ticks))
    compute.minorticks_off()
    compute.set_xlabel("compute relative to random masks\n(measured step time x epochs)")
    compute.set_ylabel("Acc@1 (%)")
    figure.suptitle(f"Linear probe: {shown_measure(rows[0].measure)}; {shown_part(rows[0].part)}", fontsize=10)
    for axes in (gains, compute):
        tidy(axes)
    return figure


def measures_beside(measure: str) -> list[str]:
    """The same encoder with all kinds of features, the chosen one first."""
    encoder, chosen = measure.split("-")
    return [f"{encoder}-{feature}" for feature in sorted(FEATURES, key=lambda name: name != chosen)]


def write_leaderboard(folder: Path, name: str, text: str, rows: Sequence[Standing]) -> list[Path]:
    """NAME.md, NAME.csv and NAME.png."""
    files = {folder / f"{name}.md": text, folder / f"{name}.csv": leaderboard_csv(rows)}
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        write_text(path, content)
    return [*files, *save_figure(leaderboard_figure(rows), folder / name, ["png"])]
