"""A report of sections with tables and lists, as text for a terminal and as Markdown: the same words in both."""

import textwrap
from dataclasses import dataclass, field

from util.evaluation.tables import markdown, pad

WIDTH = 120


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[str]]


@dataclass
class Section:
    """What was compared, and what that says about the promise made in it."""

    title: str
    promise: str
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    lists: dict[str, list[str]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # a phrase for each breach of the promise
    unchecked: list[str] = field(default_factory=list)  # what could not be compared, and what prevented it

    @property
    def verdict(self) -> str:
        if self.broken:
            return "BROKEN"
        return "not checked" if self.unchecked else "kept"

    def sentences(self) -> list[str]:
        return [
            f"Promised: {self.promise}",
            *self.notes,
            *(f"broken: {phrase}" for phrase in self.broken),
            *(f"not checked: {phrase}" for phrase in self.unchecked),
        ]

    def shown_lists(self) -> list[tuple[str, str]]:
        """Heading with a count, and the items in one line; empty lists are left out."""
        return [(f"{name} ({len(items)})", ", ".join(items)) for name, items in self.lists.items() if items]


def verdicts(sections: list[Section]) -> Table:
    return Table(["promise", "verdict"], [[section.title, section.verdict] for section in sections])


def as_text(title: str, sections: list[Section]) -> str:
    parts = [title]
    for section in sections:
        parts.append("\n".join([section.title, "─" * len(section.title), *map(wrapped, section.sentences())]))
        parts += [text_table(table) for table in section.tables if table.rows]
        lists = [wrapped(f"{name}: {items}") for name, items in section.shown_lists()]
        if lists:
            parts.append("\n".join(lists))
    return "\n\n".join([*parts, text_table(verdicts(sections))])


def wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def text_table(table: Table) -> str:
    columns = [pad(list(column)) for column in zip(table.headings, *table.rows, strict=True)]
    head, *body = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return "\n".join([head, "─" * min(WIDTH, max(map(len, [head, *body]))), *body])


def as_markdown(title: str, sections: list[Section]) -> str:
    parts = [f"# {markdown(title)}", markdown_table(verdicts(sections))]
    for section in sections:
        parts += [f"## {section.title}", *map(markdown, section.sentences())]
        parts += [markdown_table(table) for table in section.tables if table.rows]
        lists = [f"- **{markdown(name)}**: {markdown(items)}" for name, items in section.shown_lists()]
        if lists:
            parts.append("\n".join(lists))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    lines = [table.headings, [":--"] * len(table.headings), *([markdown(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
