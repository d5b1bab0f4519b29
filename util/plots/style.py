"""What all figures share: run names, colours, and reproducible files. Only drawing needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from util.cli import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colour-blind-safe palette, without its yellow, which is hard to see on white. Seven colours and eight
# markers: a pair repeats after 56 runs.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
FORMATS = ("png", "pdf")


def short_names(paths: list[Path]) -> list[str]:
    """The shortest path endings that distinguish the paths."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[1:][-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def verbatim(text: str) -> str:
    """Text that matplotlib shows verbatim: no formula between dollars, no label hidden by a leading underscore."""
    return (" " if text.startswith("_") else "") + plain(text).replace("$", r"\$")


def look(number: int) -> dict[str, Any]:
    """Colour and marker of the `number`-th of several runs."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def tidy(axes: "Axes") -> None:
    """A pale grid behind the data, and no frame."""
    axes.grid(color="0.92")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: "Figure", stem: Path, formats: Sequence[str] = FORMATS, dpi: int = 200) -> list[Path]:
    """STEM.png, STEM.pdf or both; equal figures give equal files."""
    import matplotlib

    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in formats]
    for path in paths:
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
        with matplotlib.rc_context({"pdf.fonttype": 42}):  # TrueType: some venues reject Type 3 fonts
            figure.savefig(path, dpi=dpi, metadata=metadata)
    return paths
