"""The tables of a recipe: means and deviations over seeds, next to the paper's numbers; and mask health."""

import statistics

import numpy as np

from experiments.plan import Run
from util.evaluation.compare import check_same_images, mcnemar_of_seeds
from util.evaluation.results import PROTOCOLS, Result, read_predictions
from util.evaluation.tables import SIGNIFICANT, Cell, Group, Table, p_value
from util.training.progress import has_epochs, read_log

HEALTH = ("visible", "distinct", "hamming", "unseen", "decisive")  # of a run's last epoch
ERROR = "mask_error_vs_random"


def build_tables(runs: list[Run]) -> list[Table]:
    """One for each evaluation, and the health of the masks where there are any."""
    names = dict.fromkeys(run.variant.name for run in runs)
    rows = [[run for run in runs if run.variant.name == name] for name in names]
    tables = [accuracy_table(rows, position) for position in range(1, len(runs[0].steps))]
    return [table for table in (*tables, health_table(rows)) if table.rows]


def accuracy_table(rows: list[list[Run]], position: int) -> Table:
    """A row for each variant and number of shots. `rows` holds the seeds of each variant."""
    step = rows[0][0].steps[position]
    protocol = PROTOCOLS[(step.protocol or "").removesuffix("-cached")]
    data = "imagenet200" if step.data == rows[0][0].pretrain.data else step.data  # as the paper has it
    all_shots = getattr(step.args(), "shots", [None])
    baselines = [runs[0].variant.name for runs in rows if runs[0].variant.baseline]
    reference: dict[int, Result] = {}
    lines, reported = [], []
    for runs in rows:
        variant = runs[0].variant
        results = {run.seed: result for run in runs if (result := run.result(run.steps[position]))}
        reference = results if variant.baseline else reference
        for shots in all_shots:
            scores = [result.scores[shots].acc for result in results.values()]
            cells = [mean_cell([score[metric] for score in scores]) for metric in (0, 1)]
            cells.append(Cell(str(len(scores)), f" of {len(runs)}" if len(scores) < len(runs) else ""))
            if baselines:
                cells += gain_cells(results, {} if variant.baseline else reference, shots)
            reported.append([Cell(number) for number in variant.reported(f"{shots}-shot" if shots else protocol, data)])
            label = [variant.name, str(shots)] if shots else [variant.name]
            lines.append((label, cells))
    groups = [Group("", ["Acc@1", "Acc@5", "seeds"])]
    groups += [Group(f"over {baselines[0]}:", ["gain@1", "p@1", "gain@5", "p@5"])] if baselines else []
    if any(cell.number != "-" for cells in reported for cell in cells):
        groups.append(Group("paper:", ["Acc@1", "Acc@5"]))
        lines = [(label, cells + paper) for (label, cells), paper in zip(lines, reported, strict=True)]
    title = f"{PROTOCOLS[step.protocol or '']} on {step.data} (%)"
    return Table(title[0].upper() + title[1:], ["", "shots"] if all_shots[0] else [""], groups, lines)


def mean_cell(values: list[float], digits: int = 2) -> Cell:
    """The mean and the sample standard deviation."""
    if not values:
        return Cell("-")
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return Cell(f"{statistics.fmean(values):.{digits}f}", spread)


def gain_cells(results: dict[int, Result], reference: dict[int, Result], shots: int | None) -> list[Cell]:
    """Mean gains over the baseline's same seeds, and the largest p-value of all paired tests."""
    seeds, hits = [seed for seed in results if seed in reference], []
    if not seeds:
        return [Cell("")] * 4
    for seed in seeds:
        pair = read_predictions(results[seed]), read_predictions(reference[seed])
        check_same_images(*pair)
        hits.append([side.hits[shots] for side in pair])
    own, base = (np.concatenate(side, axis=1) for side in zip(*hits, strict=True))  # [2, R, N]
    cells = []
    for metric in (0, 1):
        accuracies = [[side[seed].scores[shots].acc[metric] for seed in seeds] for side in (results, reference)]
        gain = mean_cell([a - b for a, b in zip(*accuracies, strict=True)])
        p, agreed = mcnemar_of_seeds(own[metric], base[metric])
        star = "*" if p < SIGNIFICANT and agreed else ""
        cells += [Cell(f"{float(gain.number) + 0.0:+.2f}", gain.tail + star), Cell(p_value(p))]
    return cells


def health_table(rows: list[list[Run]]) -> Table:
    """Masks at the end of training, and the error of hidden patches over random masks' on the way."""
    keys, lines = [f"train_mask_{name}" for name in HEALTH], []
    for runs in rows:
        logs = [read_log(run.folder) for run in runs if run.checkpoint().exists() and has_epochs(run.folder)]
        logs = [log for log in logs if ERROR in log[-1]]
        if not logs:
            continue
        cells = [mean_cell([log[-1][key] for log in logs if key in log[-1]]) for key in keys]
        courses = [[epoch[ERROR] for epoch in log if ERROR in epoch] for log in logs]
        moments = [(course[0], min(course), course[-1]) for course in courses]
        cells += [mean_cell(list(values), 3) for values in zip(*moments, strict=True)]
        lines.append(([runs[0].variant.name], [*cells, mean_cell([log[-1]["train_loss"] for log in logs], 3)]))
    groups = [
        Group("last epoch:", list(HEALTH)),
        Group("error / random:", ["first", "lowest", "last"]),
        Group("", ["training loss"]),
    ]
    return Table("Health of the masks", [""], groups, lines)
