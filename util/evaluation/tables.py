"""Tables for terminals, Markdown, HTML and LaTeX; comparisons as such tables, and as CSV.

Each format has one function that escapes any text for it: `plain`, `markdown`, `html_text`, `tex` and `csv_text`.
"""

import csv
import html
import io
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from util.cli import logger, plain
from util.evaluation.compare import Comparison, Gain, missing
from util.evaluation.results import FEW_SHOT, PROTOCOLS, TOP, Score

SIGNIFICANT = 0.001  # the paper's level
CSV_COLUMNS = (
    *("protocol", "data", "shots", "run", "acc1", "acc1_std", "acc5", "acc5_std"),
    *("gain1", "gain5", "p1", "p5", "checkpoint", "checkpoint_sha256", "predictions"),
)
TEX_NAMES = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
TEX_ESCAPES = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {character: f"{{{character}}}" for character in "[*"}  # else read as arguments of the \\ that ends the row above
    | {character: rf"\text{name}{{}}" for character, name in TEX_NAMES.items()}
)


@dataclass(frozen=True)
class Cell:
    number: str
    tail: str = ""  # a deviation or a star: to the right of the number, never bold
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


# --- Comparisons ---


def comparison_tables(rows: list[Comparison], names: list[str]) -> list[Table]:
    """The main table, protocol by data set, and the few-shot table, data set by shots; empty tables are omitted."""
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
            (["" if words[0] == previous else words[0], words[1]], row_cells(row))
            for (words, row), previous in zip(labelled, above, strict=False)
        ]
        if body:
            tables.append(Table(title, labels, groups, body))
    return tables


def row_cells(row: Comparison) -> list[Cell]:
    """Accuracies of every run, then gains and p-values of all but the first. The best is bold, ties included."""
    accuracies = [[accuracy(score, metric) for score in row.scores if score] for metric in (0, 1)]
    best = [max(numbers, key=float) if len(numbers) > 1 else None for numbers in accuracies]
    cells = [accuracy_cell(score, metric, best[metric]) for score in row.scores for metric in (0, 1)]
    for gains in row.gains[1:]:
        cells += [cell for gain in gains for cell in gain_and_p(gain)] if gains else [Cell("-")] * 4
    return cells


def accuracy(score: Score, metric: int) -> str:
    return f"{score.acc[metric]:.2f}"


def accuracy_cell(score: Score | None, metric: int, best: str | None) -> Cell:
    if score is None:
        return Cell("-")
    std, number = score.std[metric], accuracy(score, metric)
    return Cell(number, "" if std is None else f" ± {std:.2f}", bold=number == best)


def gain_and_p(gain: Gain) -> list[Cell]:
    """A star marks a gain that is significant, and in the same direction, with every seed."""
    points = round(gain.points, 2) + 0.0  # turns -0.0 into 0.0
    star = gain.p < SIGNIFICANT and gain.agreed
    return [Cell(f"{points:+.2f}", "*" if star else ""), Cell(p_value(gain.p))]


def p_value(p: float) -> str:
    if p < 1e-300:  # the exact value may underflow to 0
        return "<1e-300"
    return f"{p:.3f}" if p >= SIGNIFICANT else f"{p:.1e}"


def tallies(rows: list[Comparison], names: list[str]) -> list[str]:
    """A sentence for each run: how many of its accuracies, as printed, beat the baseline's."""
    sentences = []
    for run, name in enumerate(names[1:], start=1):
        both = [(row.scores[run], row.scores[0]) for row in rows]
        cells = [(accuracy(own, m), accuracy(base, m)) for own, base in both if own and base for m in (0, 1)]
        won, lost = (sum(float(a) > float(b) for a, b in pairs) for pairs in (cells, [pair[::-1] for pair in cells]))
        if cells:
            tied = len(cells) - won - lost
            sentences.append(f"{name} beats {names[0]} in {won} of {len(cells)} cells ({tied} tied, {lost} lost)")
    return sentences


def table_notes(names: list[str], rows: list[Comparison]) -> list[str]:
    """The tally, how to read the tables, and which results are missing."""
    notes = tallies(rows, names)
    repeated = any(std is not None for row in rows for score in row.scores if score for std in score.std)
    if repeated:
        notes.append("±: one standard deviation over repeated runs (seeds)")
    if any(gains for row in rows for gains in row.gains):
        notes.append(
            f"gain: points over {names[0]}; p: exact two-sided McNemar test on the same images; *: p < {SIGNIFICANT}"
        )
        if repeated:
            notes.append(
                "with several seeds, p is the largest over seeds, each paired with the same seed of the baseline; a "
                "star requires a difference in the same direction for every seed"
            )
    classes = {row.data: result.settings["classes"] for row in rows for result in row.results if result}
    notes += [
        f"{data} has {number} classes: Acc@5 is uninformative" for data, number in classes.items() if number < TOP
    ]
    return notes + [f"missing: {gap}" for gap in missing(names, rows)]


# --- Text ---


def as_text(table: Table, ansi: bool = False) -> str:
    """Aligned columns; `ansi` shows the best in bold on a terminal."""
    labels = [pad([label, *(words[at] for words, _ in table.rows)]) for at, label in enumerate(table.labels)]
    names = [name for group in table.groups for name in group.columns]
    numbers = [number_column(name, [cells[at] for _, cells in table.rows], ansi) for at, name in enumerate(names)]
    blocks = [text_block("", labels)] if labels else []
    for group in table.groups:
        own, numbers = numbers[: len(group.columns)], numbers[len(group.columns) :]
        blocks.append(text_block(group.heading, own))
    headings, rule, header, *body = ["   ".join(parts) for parts in zip(*blocks, strict=True)]
    head = [headings, rule, header] if headings.strip() else [header]
    return "\n".join(line.rstrip() for line in [plain(table.title), *head, "─" * len(header), *body])


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    table = Table(title, [], [Group("", header)], [([], [Cell(text) for text in row]) for row in rows])
    logger.info("%s", as_text(table))


def show_accuracies(title: str, metrics: dict[str, Any]) -> None:
    show_table(title, ["Acc@1", "Acc@5"], [[shown(metrics, "acc1"), shown(metrics, "acc5")]])


def shown(metrics: dict[str, Any], name: str) -> str:
    """71.25, or 71.25 ± 0.40 over several seeds."""
    deviation = metrics[f"{name}_std"]
    return f"{metrics[name]:.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


def pad(column: list[str]) -> list[str]:
    column = [plain(text) for text in column]
    width = max(map(len, column))
    return [text.ljust(width) for text in column]


def number_column(heading: str, cells: list[Cell], ansi: bool) -> list[str]:
    """Numbers are right-aligned, regardless of what follows them."""
    heading, numbers = plain(heading), [plain(cell.number) for cell in cells]
    tail = max((len(cell.tail) for cell in cells), default=0)
    width = max(len(heading), tail + max(map(len, numbers), default=0))
    lines = [heading.rjust(width - tail).ljust(width)]
    for number, cell in zip(numbers, cells, strict=True):
        emphasised = f"\033[1m{number}\033[0m" if ansi and cell.bold else number
        lines.append(" " * (width - tail - len(number)) + emphasised + cell.tail.ljust(tail))
    return lines


def text_block(heading: str, columns: list[list[str]]) -> list[str]:
    """The heading, a rule under it, and the columns below; all lines are as wide as the widest."""
    heading, lines = plain(heading), ["  ".join(parts) for parts in zip(*columns, strict=True)]
    width = max(len(heading), len(lines[0]))
    left = (width - len(lines[0])) // 2
    right = width - len(lines[0]) - left
    rule = ("─" if heading else " ") * width
    return [heading.center(width), rule, *(" " * left + line + " " * right for line in lines)]


# --- Markdown ---


def markdown(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]~$&])", r"\\\1", plain(text))


def as_markdown(table: Table) -> str:
    headings = [*table.labels, *(f"{group.heading} {name}".strip() for group in table.groups for name in group.columns)]
    alignment = [":--"] * len(table.labels) + ["--:"] * (len(headings) - len(table.labels))
    lines = [[markdown(heading) for heading in headings], alignment]
    for words, cells in table.rows:
        numbers = [f"**{markdown(cell.number)}**" if cell.bold else markdown(cell.number) for cell in cells]
        tails = [markdown(cell.tail) for cell in cells]
        lines.append([*map(markdown, words), *(number + tail for number, tail in zip(numbers, tails, strict=True))])
    return "\n".join([f"### {markdown(table.title)}", "", *(f"| {' | '.join(line)} |" for line in lines)])


# --- HTML ---


def html_text(text: str) -> str:
    return html.escape(plain(text))


def as_html(table: Table) -> str:
    """Scrolls on its own if it is wider than the page."""
    headings = [f"<th colspan={len(table.labels)}></th>"] if table.labels else []
    headings += [f"<th colspan={len(group.columns)}>{html_text(group.heading)}</th>" for group in table.groups]
    columns = [*table.labels, *(name for group in table.groups for name in group.columns)]
    head = [headings] if any(group.heading for group in table.groups) else []
    head.append([f"<th scope=col>{html_text(name)}</th>" for name in columns])
    body = [
        [*(f"<th scope=row>{html_text(word)}</th>" for word in words), *map(html_cell, cells)]
        for words, cells in table.rows
    ]
    head, body = ("".join(f"<tr>{''.join(row)}</tr>\n" for row in rows) for rows in (head, body))
    title = html_text(table.title)
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{title}"><table><caption>{title}</caption>\n'
        f"<thead>{head}</thead>\n<tbody>{body}</tbody></table></div>"
    )


def html_cell(cell: Cell) -> str:
    number = html_text(cell.number)
    return f"<td>{f'<b>{number}</b>' if cell.bold else number}{html_text(cell.tail)}</td>"


# --- LaTeX ---


def tex(text: str) -> str:
    return plain(text).translate(TEX_ESCAPES)


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
            tex_comment(table.title),
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


def tex_comment(text: str) -> str:
    return f"% {plain(text)}"


def tex_number(cell: Cell) -> str:
    number = "--" if cell.number == "-" else re.sub(r"^-", "$-$", cell.number)
    number = re.sub(r"^(<?)([\d.]+)e-0*(\d+)$", r"$\1\2\\cdot10^{-\3}$", number)
    tail = cell.tail.replace("±", r"$\pm$").replace("*", "$^{*}$")
    return (rf"\textbf{{{number}}}" if cell.bold else number) + tail


# --- CSV ---


def csv_text(text: str) -> str:
    """The single quote keeps spreadsheets from running the text as a formula."""
    text = plain(text)
    start = unicodedata.normalize("NFKC", text).lstrip()[:1]  # some spreadsheets also accept a full-width =
    return f"'{text}" if start in ("=", "+", "-", "@") else text


def as_csv(rows: list[Comparison], names: list[str]) -> str:
    """Long format in full precision: a line per protocol, data set, shots and run; missing results have no line."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        for name, result, score, gains in zip(names, row.results, row.scores, row.gains, strict=True):
            if result and score:
                accuracies = score.acc[0], score.std[0], score.acc[1], score.std[1]
                tests = [*(gain.points for gain in gains), *(gain.p for gain in gains)] if gains else [None] * 4
                files = result.checkpoint or "", result.checkpoint_sha256 or "", str(result.predictions)
                key = csv_text(row.protocol), csv_text(row.data), row.shots, csv_text(name)
                writer.writerow([*key, *accuracies, *tests, *map(csv_text, files)])
    return buffer.getvalue()
