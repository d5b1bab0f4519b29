"""Rows of accuracies as tables for a terminal, Markdown, LaTeX and CSV. Every format shows the same cells."""

import csv
import io
import re
from dataclasses import dataclass

from util.cli import logger
from util.evaluation.compare import Row
from util.evaluation.results import FEW_SHOT, PROTOCOLS, Score

SIGNIFICANT = 0.001  # the paper's level
CSV_COLUMNS = (
    *("protocol", "data", "shots", "run", "acc1", "acc1_std", "acc5", "acc5_std"),
    *("gain1", "gain5", "p1", "p5", "checkpoint", "predictions"),
)
TEX_NAMES = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
TEX_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {character: rf"\text{name}{{}}" for character, name in TEX_NAMES.items()}
)


@dataclass(frozen=True)
class Cell:
    number: str
    tail: str = ""  # a deviation or a star: hangs to the right of the number and is never bold
    bold: bool = False


@dataclass(frozen=True)
class Group:
    """Columns of numbers under a common heading."""

    heading: str
    columns: list[str]


@dataclass(frozen=True)
class Table:
    title: str
    labels: list[str]  # headings of the leading columns, which hold words
    groups: list[Group]
    rows: list[tuple[list[str], list[Cell]]]  # words, then the cells of all groups


def build_tables(rows: list[Row], names: list[str]) -> list[Table]:
    """The main table, protocol by data set, and the few-shot table, data set by shots; an empty one is left out."""
    groups = [Group(name, ["Acc@1", "Acc@5"]) for name in names]
    groups += [Group(f"{name} over {names[0]}", ["gain@1", "p@1", "gain@5", "p@5"]) for name in names[1:]]
    main = [([PROTOCOLS.get(row.protocol, row.protocol), row.data], row) for row in rows if row.protocol != FEW_SHOT]
    few_shot = [([row.data, str(row.shots)], row) for row in rows if row.protocol == FEW_SHOT]
    tables = []
    for title, labels, labelled in (
        ("Accuracy (%)", ["protocol", "data"], main),
        ("Few-shot accuracy (%)", ["data", "shots"], few_shot),
    ):
        above = [None, *(words[0] for words, _ in labelled)]
        body = [
            (["" if words[0] == previous else words[0], words[1]], row_cells(row.scores))
            for (words, row), previous in zip(labelled, above, strict=False)
        ]
        if body:
            tables.append(Table(title, labels, groups, body))
    return tables


def row_cells(scores: list[Score | None]) -> list[Cell]:
    """Accuracies of every run, then gains and p-values of all but the first. The best is bold, ties and all."""
    accuracies = [[f"{score.acc[metric]:.2f}" for score in scores if score] for metric in (0, 1)]
    best = [max(shown, key=float) if len(shown) > 1 else None for shown in accuracies]
    accuracy_cells = [accuracy_cell(score, metric, best[metric]) for score in scores for metric in (0, 1)]
    return accuracy_cells + [cell for score in scores[1:] for metric in (0, 1) for cell in gain_cells(score, metric)]


def accuracy_cell(score: Score | None, metric: int, best: str | None) -> Cell:
    if score is None:
        return Cell("-")
    std, shown = score.std[metric], f"{score.acc[metric]:.2f}"
    return Cell(shown, "" if std is None else f" ± {std:.2f}", bold=shown == best)


def gain_cells(score: Score | None, metric: int) -> list[Cell]:
    """The gain in points and its p-value. A star: significant, and in the same direction, with every seed."""
    if score is None or score.gain is None:
        return [Cell("-"), Cell("-")]
    gain, p = round(score.gain[metric], 2) + 0.0, score.p[metric]  # + 0.0 turns -0.0 into 0.0
    star = p < SIGNIFICANT and score.agreed[metric]
    return [Cell(f"{gain:+.2f}", "*" if star else ""), Cell(p_value(p))]


def p_value(p: float) -> str:
    if p < 1e-300:  # the exact value may be too small for a float, which then says 0
        return "<1e-300"
    return f"{p:.3f}" if p >= SIGNIFICANT else f"{p:.1e}"


def as_text(table: Table, ansi: bool = False) -> str:
    """Aligned columns; `ansi` shows the best in bold on a terminal."""
    cells = [list(column) for column in zip(*(cells for _, cells in table.rows), strict=True)]
    words = zip(*(words for words, _ in table.rows), strict=True)
    labels = [pad([label, *column]) for label, column in zip(table.labels, words, strict=True)]
    blocks = [text_block("", labels)]
    for group in table.groups:
        columns, cells = cells[: len(group.columns)], cells[len(group.columns) :]
        numbers = [number_column(name, column, ansi) for name, column in zip(group.columns, columns, strict=True)]
        blocks.append(text_block(group.heading, numbers))
    lines = ["   ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
    lines.insert(3, "─" * max(map(len, lines[:3])))
    return "\n".join([table.title, *lines])


def pad(column: list[str]) -> list[str]:
    width = max(map(len, column))
    return [text.ljust(width) for text in column]


def number_column(heading: str, cells: list[Cell], ansi: bool) -> list[str]:
    """Numbers end in the same place, whatever hangs to their right."""
    tail = max(len(cell.tail) for cell in cells)
    width = max(len(heading), tail + max(len(cell.number) for cell in cells))
    lines = [heading.rjust(width - tail).ljust(width)]
    for cell in cells:
        number = f"\033[1m{cell.number}\033[0m" if ansi and cell.bold else cell.number
        lines.append(" " * (width - tail - len(cell.number)) + number + cell.tail.ljust(tail))
    return lines


def text_block(heading: str, columns: list[list[str]]) -> list[str]:
    """The heading, a rule under it, and the columns below; all lines are as wide as the widest."""
    lines = ["  ".join(parts) for parts in zip(*columns, strict=True)]
    width = max(len(heading), len(lines[0]))
    left = (width - len(lines[0])) // 2
    right = width - len(lines[0]) - left
    rule = ("─" if heading else " ") * width
    return [heading.center(width), rule, *(" " * left + line + " " * right for line in lines)]


def as_markdown(table: Table) -> str:
    headings = [*table.labels, *(f"{group.heading} {name}".strip() for group in table.groups for name in group.columns)]
    lines = [[markdown(heading) for heading in headings], [":--"] * len(table.labels)]
    lines[1] += ["--:"] * (len(headings) - len(table.labels))
    for words, cells in table.rows:
        numbers = [(f"**{c.number}**" if c.bold else markdown(c.number)) + markdown(c.tail) for c in cells]
        lines.append([*map(markdown, words), *numbers])
    return "\n".join([f"### {table.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<])", r"\\\1", text)


def as_tex(table: Table) -> str:
    """A booktabs tabular, to be read with \\input."""
    heads, rules, at = [""] * len(table.labels), [], len(table.labels) + 1
    for group in table.groups:
        last = at + len(group.columns) - 1
        heads.append(rf"\multicolumn{{{len(group.columns)}}}{{c}}{{{tex(group.heading)}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{last}}}")
        at = last + 1
    columns = [*table.labels, *(name for group in table.groups for name in group.columns)]
    body = [[*map(tex, words), *map(tex_number, cells)] for words, cells in table.rows]
    return "\n".join(
        [
            f"% {table.title}",
            rf"\begin{{tabular}}{{{'l' * len(table.labels)}{'r' * (at - 1 - len(table.labels))}}}",
            r"\toprule",
            rf"{' & '.join(heads)} \\".strip(),
            " ".join(rules),
            rf"{' & '.join(map(tex, columns))} \\",
            r"\midrule",
            *(rf"{' & '.join(line)} \\".strip() for line in body),
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def tex(text: str) -> str:
    return text.translate(TEX_ESCAPES)


def tex_number(cell: Cell) -> str:
    number = "--" if cell.number == "-" else re.sub(r"^-", "$-$", cell.number)
    number = re.sub(r"^(<?)([\d.]+)e-0*(\d+)$", r"$\1\2\\cdot10^{-\3}$", number)
    tail = cell.tail.replace("±", r"$\pm$").replace("*", "$^{*}$")
    return (rf"\textbf{{{number}}}" if cell.bold else number) + tail


def as_csv(rows: list[Row], names: list[str]) -> str:
    """Long format in full precision: a line per protocol, data set, shots and run; what is missing has no line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        for name, result, score in zip(names, row.results, row.scores, strict=True):
            if score is not None:
                accuracies = score.acc[0], score.std[0], score.acc[1], score.std[1]
                tests = (*(score.gain or (None, None)), *(score.p or (None, None)))
                files = result.checkpoint, result.predictions
                writer.writerow([row.protocol, row.data, row.shots, name, *accuracies, *tests, *files])
    return buffer.getvalue()


def shown(figures: dict[str, float | None], name: str) -> str:
    """71.25, or 71.25 ± 0.40 where there were several runs."""
    deviation = figures[f"{name}_std"]
    return f"{figures[name]:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    logger.info("%s", "\n".join([title, *lines]))
