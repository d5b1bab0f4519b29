"""The table of a recipe: means and deviations over seeds, beside the paper's figures; and the health of the masks."""

import json
import statistics
from argparse import Namespace
from dataclasses import dataclass

import numpy as np

from experiments.plan import Run, Step
from experiments.recipe import Recipe, Variant
from util.evaluation.compare import check_same_images, mcnemar_of_seeds
from util.evaluation.results import FEW_SHOT, PROTOCOLS, Result, read_predictions
from util.evaluation.tables import SIGNIFICANT, Cell, Group, Table, p_value

HEALTH = {  # of a run's last epoch, by the heading in the table
    "visible": "train_mask_visible",
    "distinct": "train_mask_distinct",
    "distance": "train_mask_hamming",
    "unseen": "train_mask_unseen",
    "decisive": "train_mask_decisive",
}
ERROR = "mask_error_vs_random"


@dataclass
class Row:
    """A variant, and of each seed what is finished."""

    variant: Variant
    runs: list[Run]

    def results(self, position: int) -> dict[int, Result]:
        """Of the evaluation at a position of the runs' lists, by seed."""
        found = {run.seed: run.result(run.evaluations[position]) for run in self.runs if run.checkpoint().exists()}
        return {seed: result for seed, result in found.items() if result is not None}


def build_tables(recipe: Recipe, runs: list[Run], args: Namespace) -> list[Table]:
    rows = [Row(variant, [run for run in runs if run.variant is variant]) for variant in recipe.variants_at(args.scale)]
    baseline = next((row for row in rows if row.variant.name == recipe.baseline), None)
    tables = []
    for position, step in enumerate(runs[0].evaluations):
        if step.protocol == FEW_SHOT:
            tables.append(few_shot_table(rows, position, step))
        else:
            tables.append(accuracy_table(rows, baseline, position, step))
    return [table for table in (*tables, health_table(rows)) if table.rows]


def accuracy_table(rows: list[Row], baseline: Row | None, position: int, step: Step) -> Table:
    columns = ["Acc@1", "Acc@5", "seeds"]
    groups = [Group("", columns)]
    if baseline:
        groups.append(Group(f"over {baseline.variant.name}:", ["gain@1", "p@1", "gain@5", "p@5"]))
    with_paper = step.protocol == "knn" and any(row.variant.paper for row in rows)
    if with_paper:
        groups.append(Group("paper:", ["Acc@1", "Acc@5"]))
    reference = baseline.results(position) if baseline else {}
    lines = []
    for row in rows:
        results = row.results(position)
        cells = accuracy_cells(results, len(row.runs))
        if baseline:
            cells += gain_cells(results, reference, row is baseline)
        if with_paper:
            cells += paper_cells(row.variant)
        lines.append(([row.variant.name], cells))
    title = f"{PROTOCOLS[step.protocol]} on {step.data} (%)"
    return Table(title[0].upper() + title[1:], [""], groups, lines)


def accuracy_cells(results: dict[int, Result], wanted: int) -> list[Cell]:
    scores = [result.scores[None] for result in results.values()]
    number = Cell(str(len(scores)), f" of {wanted}" if len(scores) < wanted else "")
    return [*(mean_cell([score.acc[metric] for score in scores]) for metric in (0, 1)), number]


def mean_cell(values: list[float], digits: int = 2) -> Cell:
    """The mean and the sample standard deviation."""
    if not values:
        return Cell("-")
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return Cell(f"{statistics.fmean(values):.{digits}f}", spread)


def gain_cells(results: dict[int, Result], reference: dict[int, Result], is_baseline: bool) -> list[Cell]:
    """Mean gains over the same seeds of the baseline, and the largest p-value of these seeds' paired tests."""
    seeds = [seed for seed in results if seed in reference]
    if is_baseline or not seeds:
        return [Cell("")] * 4
    cells = []
    own, base = (hits([side[seed] for seed in seeds]) for side in (results, reference))
    for metric in (0, 1):
        gains = [results[seed].scores[None].acc[metric] - reference[seed].scores[None].acc[metric] for seed in seeds]
        p, agreed = mcnemar_of_seeds(own[metric], base[metric])
        star = "*" if p < SIGNIFICANT and agreed else ""
        gain = mean_cell(gains)
        cells += [Cell(f"{float(gain.number) + 0.0:+.2f}", gain.tail + star), Cell(p_value(p))]
    return cells


def hits(results: list[Result]) -> np.ndarray:
    """Which images each result recognised, first or among five: bool [2, R, N]. Repeated probes of one encoder are
    represented by their first."""
    predictions = [read_predictions(result) for result in results]
    for other in predictions[1:]:
        check_same_images(predictions[0], other)
    return np.stack([each.hits[None][:, 0] for each in predictions], axis=1)


def paper_cells(variant: Variant) -> list[Cell]:
    figures = variant.paper or (None, None)
    return [Cell("-" if figure is None else f"{figure:.1f}") for figure in figures]


def few_shot_table(rows: list[Row], position: int, step: Step) -> Table:
    """Acc@1 by the number of labelled images per class. (main_compare.py tests two encoders image by image.)"""
    by_row = [row.results(position) for row in rows]
    shots = sorted({number for results in by_row for result in results.values() for number in result.scores})
    lines = []
    for row, results in zip(rows, by_row, strict=True):
        values = [[result.scores[number].acc[0] for result in results.values()] for number in shots]
        lines.append(([row.variant.name], [mean_cell(each) for each in values]))
    title = f"Few-shot linear probing on {step.data}, Acc@1 (%)"
    return Table(title, [""], [Group("shots", list(map(str, shots)))], lines if shots else [])


def health_table(rows: list[Row]) -> Table:
    """Masks at the end of training, and how the error of hidden patches over random masks' went."""
    lines = []
    for row in rows:
        logs = [log for run in row.runs if (log := epochs_of(run)) and ERROR in log[-1]]
        if not logs:
            continue
        cells = [mean_cell([log[-1][key] for log in logs if key in log[-1]]) for key in HEALTH.values()]
        courses = [[epoch[ERROR] for epoch in log if ERROR in epoch] for log in logs]
        moments = [(course[0], min(course), course[-1]) for course in courses]
        cells += [mean_cell(list(values), 3) for values in zip(*moments, strict=True)]
        cells.append(mean_cell([log[-1]["train_loss"] for log in logs], 3))
        lines.append(([row.variant.name], cells))
    groups = [
        Group("last epoch:", list(HEALTH)),
        Group("error / random:", ["first", "lowest", "last"]),
        Group("", ["training loss"]),
    ]
    return Table("Health of the masks", [""], groups, lines)


def epochs_of(run: Run) -> list[dict]:
    """The log of a finished run."""
    log = run.folder / "log.txt"
    if not log.exists() or not run.checkpoint().exists():
        return []
    return [json.loads(line) for line in log.read_text().splitlines()]
