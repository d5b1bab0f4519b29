"""The notebook runs from its first cell to its last, offline, and is committed without outputs."""

import ast
import json
import sys

import pytest
from PIL import Image
from processes import ROOT

from masking import STRATEGIES

NOTEBOOK = ROOT / "demo" / "mae_visualize.ipynb"


def cells():
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


def execute(source: str, names: dict):
    """Run a cell; returns what its last line shows, as Jupyter does."""
    tree = ast.parse(source)
    shown = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, NOTEBOOK.name, "exec"), names)
    return None if shown is None else eval(compile(ast.Expression(shown.value), NOTEBOOK.name, "eval"), names)


def test_outputs_are_cleared():
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells())


@pytest.mark.slow
def test_all_cells_run(monkeypatch):
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    registered = dict(STRATEGIES)
    names: dict = {"__name__": "__main__"}
    try:
        shown = [execute("".join(cell["source"]), names) for cell in cells()]
    finally:
        STRATEGIES.clear()
        STRATEGIES.update(registered)
    title, own, curriculum, strategies, hard = (each for each in shown if each is not None)
    assert title == r"this run, after epoch 3 of 3, $\lambda_{CL}$ = -1.00"
    pictures = [own, curriculum, strategies]
    assert all(isinstance(each, Image.Image) for each in pictures)
    assert own.width < curriculum.width < strategies.width  # moments and strategies are side by side
    assert list(hard) == ["its own", "random", "block", "grid", "noise", "stripes"]
    assert all(0 < error < 3 for error in hard.values())
