"""Compare finished evaluations: tables as in the paper, few-shot curves, and McNemar's test of every gain.

The first folder is the baseline:
    python main_compare.py output_dir/mae output_dir/clmae --names MAE CL-MAE --output_dir compare

A folder is the --output_dir of one or more evaluations (kNN, linear probing, few-shot) of one checkpoint.
"""

import math
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from util.cli import ArgumentParser, UserError, logger, run
from util.evaluation.compare import Row, compare
from util.evaluation.results import FEW_SHOT, RESULTS, Run, read_run, weights
from util.evaluation.tables import SIGNIFICANT, as_csv, as_markdown, as_tex, as_text, build_tables, markdown
from util.misc import file_name
from util.plots.style import COLOURS, MARKERS, save_figure, short_names, verbatim


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_compare.py", description=__doc__.split("\n")[0])
    parser.add_argument("folders", metavar="DIR", nargs="+", help=f"folder with {RESULTS}; the first is the baseline")
    parser.add_argument("--names", nargs="+", default=None, help="names of the runs; default: those of the folders")
    parser.add_argument("--output_dir", default="./compare", help="tables and curves; '' writes nothing")
    return parser


def check_args(args: Namespace) -> None:
    """Refuse folders and names that cannot be told apart, and settle the names."""
    # Not resolve(): a link's own name says more than what it points to.
    paths = [Path(os.path.abspath(folder)) for folder in args.folders]
    places = [path.parent if path.name == RESULTS else path for path in paths]
    repeated = first_repeated(places)
    if repeated is not None:
        raise UserError(f"{repeated} is given twice; a run cannot be compared with itself")
    if args.names is None:
        args.names = short_names(places)
    if len(args.names) != len(args.folders):
        raise UserError(f"--names has {len(args.names)} names for {len(args.folders)} folders; give one for each")
    repeated = first_repeated(args.names)
    if repeated is not None:
        raise UserError(f"--names {repeated} is given twice; each run needs a name of its own")


def first_repeated(items: list) -> object | None:
    return next((item for at, item in enumerate(items) if item in items[:at]), None)


def table_notes(names: list[str], rows: list[Row]) -> list[str]:
    """What a reader of the tables has to know, and what is not in them."""
    notes = []
    scores = [score for row in rows for score in row.scores if score]
    repeated = any(std is not None for score in scores for std in score.std)
    if repeated:
        notes.append("±: one standard deviation over repeated runs (seeds)")
    if any(score.gain for score in scores):
        notes.append(
            f"gain: points over {names[0]}; p: exact two-sided McNemar test on the same images; *: p < {SIGNIFICANT}"
        )
        if repeated:
            notes.append(
                "with several seeds, p is the largest of theirs, each against the same seed of the baseline, and a "
                "star needs a difference in the same direction with every seed"
            )
    few = {row.data: result.settings["classes"] for row in rows for result in row.results if result}
    notes += [f"{data} has {classes} classes: Acc@5 says little" for data, classes in few.items() if classes < 5]
    return notes + [f"missing: {gap}" for gap in missing(names, rows)]


def missing(names: list[str], rows: list[Row]) -> list[str]:
    """A sentence for each result, or number of shots, that one run has and another lacks."""
    gaps: dict[str, list[str]] = {}
    for row in rows:
        title = next(result for result in row.results if result).title
        for name, result, score in zip(names, row.results, row.scores, strict=True):
            if score is None:
                gaps.setdefault(f"{name} has no {title}", []).extend([str(row.shots)] if result else [])
    return [f"{gap} with {', '.join(shots)} shots" if shots else gap for gap, shots in gaps.items()]


def caveats(runs: list[Run]) -> list[str]:
    """What else but the pretraining could explain a gain: other settings of the evaluation, or mixed checkpoints."""
    found = []
    for each in runs:
        sources = {result.checkpoint_sha256: weights(result) for result in each.results.values()}
        if len(sources) > 1:
            found.append(f"the results of {each.name} come from several checkpoints: {', '.join(sources.values())}")
    baseline, *others = runs
    for other in others:
        for key, result in baseline.results.items():
            ours, theirs = result.settings, other.results.get(key, result).settings
            differing = [name for name in dict.fromkeys([*ours, *theirs]) if ours.get(name) != theirs.get(name)]
            if differing:
                values = (f"{n}: {ours.get(n, 'not set')} against {theirs.get(n, 'not set')}" for n in differing)
                found.append(
                    f"{result.title}, {baseline.name} against {other.name}: {', '.join(values)}; "
                    "a gain could come from that"
                )
    return found


def few_shot_figure(data: str, rows: list[Row], names: list[str]) -> Figure:
    """Acc@1 against the number of shots, with a bar of one standard deviation each way."""
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot()
    for at, name in enumerate(names):
        aside = 2 ** (0.05 * (at - (len(names) - 1) / 2))  # a little apart, or the bars would hide each other
        points = [(row.shots, row.scores[at]) for row in rows if row.scores[at]]
        if not points:
            continue
        axes.errorbar(
            [shots * aside for shots, _ in points],
            [score.acc[0] for _, score in points],
            yerr=[math.nan if score.std[0] is None else score.std[0] for _, score in points],
            color=COLOURS[at % len(COLOURS)],
            marker=MARKERS[at % len(MARKERS)],
            markersize=5,
            linewidth=1.5,
            elinewidth=1,
            capsize=3,
            label=verbatim(name),
        )
    shots = [row.shots for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xticks(shots, labels=map(str, shots))
    axes.minorticks_off()
    axes.set_xlabel("labelled images per class (shots)")
    axes.set_ylabel("Acc@1 (%)")
    axes.set_title(verbatim(data))
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def write_figures(rows: list[Row], names: list[str], output_dir: Path) -> None:
    """fewshot-DATA.png and .pdf for every data set."""
    few_shot = [row for row in rows if row.protocol == FEW_SHOT]
    for data in dict.fromkeys(row.data for row in few_shot):
        figure = few_shot_figure(data, [row for row in few_shot if row.data == data], names)
        save_figure(figure, output_dir / f"fewshot-{file_name(data)}")


def write_files(names: list[str], rows: list[Row], notes: list[str], output_dir: Path) -> None:
    tables = build_tables(rows, names)

    def document(render: Callable, note: Callable[[str], str], head: str = "") -> str:
        return head + "\n\n".join([*map(render, tables), "\n".join(map(note, notes))]).rstrip() + "\n"

    texts = {
        "compare.txt": document(as_text, str),
        "compare.md": document(as_markdown, lambda note: f"- {markdown(note)}"),
        "compare.tex": document(as_tex, lambda note: f"% {note}", head="% needs \\usepackage{booktabs}\n"),
        "compare.csv": as_csv(rows, names),
    }
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (output_dir / name).write_text(text, encoding="utf-8")
        write_figures(rows, names, output_dir)
    except OSError as error:
        raise UserError(f"--output_dir {output_dir} cannot be written: {error.strerror or error}") from None


def main(args: Namespace) -> None:
    check_args(args)
    runs = [read_run(name, Path(folder)) for name, folder in zip(args.names, args.folders, strict=True)]
    rows = compare(runs)
    notes, warnings = table_notes(args.names, rows), caveats(runs)
    tables = [as_text(table, ansi=sys.stdout.isatty()) for table in build_tables(rows, args.names)]
    logger.info("%s", "\n\n".join([*tables, "\n".join(notes)]).rstrip())
    for warning in warnings:
        logger.warning("%s", warning)
    if args.output_dir:
        write_files(args.names, rows, notes + [f"caution: {warning}" for warning in warnings], Path(args.output_dir))
        logger.info("tables and curves are in %s", args.output_dir)


if __name__ == "__main__":
    run(main, get_args_parser())
