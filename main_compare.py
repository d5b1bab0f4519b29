"""Compare finished evaluations: tables as in the paper, few-shot curves, and McNemar's test of every gain.

The first folder is the baseline:
    python main_compare.py output_dir/mae output_dir/clmae --names MAE CL-MAE --output_dir compare

A folder is the --output_dir of one or more evaluations of one checkpoint.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from util.cli import ArgumentParser, UserError, file_name, label, logger, plain
from util.evaluation.compare import Comparison, caveats, compare
from util.evaluation.results import FEW_SHOT, RESULTS, read_run
from util.evaluation.tables import (
    Table,
    as_csv,
    as_markdown,
    as_tex,
    as_text,
    comparison_tables,
    markdown,
    table_notes,
    tex_comment,
)
from util.plots.style import save_figure, short_names
from util.program import run


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_compare.py", description=str(__doc__).split("\n")[0])
    parser.add_argument("folders", metavar="DIR", nargs="+", help=f"folder with {RESULTS}; the first is the baseline")
    parser.add_argument(
        "--names", type=label, nargs="+", default=None, help="names of the runs; default: their folders' names"
    )
    parser.add_argument("--output_dir", default="./compare", help="tables and curves; '' writes nothing")
    return parser


def check_args(args: Namespace) -> None:
    """Reject repeated folders and names, and set default names."""
    # Not resolve(): a link's own name is more telling than its target's.
    paths = [Path(os.path.abspath(folder)) for folder in args.folders]
    places = [path.parent if path.name == RESULTS else path for path in paths]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise UserError(f"{place} is given twice; a run cannot be compared with itself")
    args.names = args.names or short_names(places)
    if len(args.names) != len(args.folders):
        raise UserError(f"--names has {len(args.names)} names for {len(args.folders)} folders; give one for each")
    for at, name in enumerate(args.names):
        if name in args.names[:at]:
            raise UserError(f"--names {name} is given twice; each run needs a name of its own")


def write_files(names: list[str], rows: list[Comparison], tables: list[Table], notes: list[str], folder: Path) -> None:
    def document(render: Callable[[Table], str], note: Callable[[str], str]) -> str:
        return "\n\n".join([*map(render, tables), "\n".join(map(note, notes))]).rstrip() + "\n"

    texts = {
        "compare.txt": document(as_text, plain),
        "compare.md": document(as_markdown, lambda note: f"- {markdown(note)}"),
        "compare.tex": "% needs \\usepackage{booktabs}\n" + document(as_tex, tex_comment),
        "compare.csv": as_csv(rows, names),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_curves(names, [row for row in rows if row.protocol == FEW_SHOT], folder)


def write_curves(names: list[str], rows: list[Comparison], folder: Path) -> None:
    """fewshot-DATA.png and .pdf for every data set."""
    for data in dict.fromkeys(row.data for row in rows):
        from util.plots.curves import few_shot_figure  # here because it imports matplotlib

        curves = {name: [] for name in names}
        for row in rows:
            for name, score in zip(names, row.scores, strict=True):
                if row.data == data and score:
                    curves[name].append((row.shots, score.acc[0], score.std[0]))
        save_figure(few_shot_figure(data, curves), folder / f"fewshot-{file_name(data)}")


def main(args: Namespace) -> None:
    check_args(args)
    runs = [read_run(name, Path(folder)) for name, folder in zip(args.names, args.folders, strict=True)]
    rows = compare(runs)
    tables, notes, warnings = comparison_tables(rows, args.names), table_notes(args.names, rows), caveats(runs)
    texts = [as_text(table, ansi=sys.stdout.isatty()) for table in tables]
    logger.info("%s", "\n\n".join([*texts, "\n".join(map(plain, notes))]).rstrip())
    for warning in warnings:
        logger.warning("%s", plain(warning))
    if args.output_dir:
        notes += [f"caution: {warning}" for warning in warnings]
        write_files(args.names, rows, tables, notes, Path(args.output_dir))
        logger.info("tables and curves are in %s", args.output_dir)


if __name__ == "__main__":
    run(main, get_args_parser())
