"""The tree's rules of order: imports point downwards, --help needs no torch, and a name means one thing.

    main_*, submitit_*, tools, experiments, benchmarks -> engine_* -> masking, models_* -> util
A room of util/ (such as util/training) imports util's own modules and itself.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest
from conftest import ROOT

TOP = ("main_", "submitit_", "hubconf", "tools", "experiments", "benchmarks")
MODELS = ("masking", "models_")

# What modules of util's rooms may import beside util's own modules and their room.
ACROSS_ROOMS = {
    "util.plots.": ("masking", "models_"),  # masks are drawn, and networks opened for it
    "util.plots.snapshot": ("masking", "models_", "util.data."),  # and images to draw them on
    "util.evaluation.forensics": ("models_",),
    "util.evaluation.subject": ("models_", "util.data."),  # a checkpoint, opened as an encoder; images
    "util.evaluation.features": ("util.data.sources",),
    "util.training.resume": ("util.data.sources",),  # a run resumes on the same images
    "util.training.monitor": ("util.evaluation.", "util.plots."),  # quick checks between epochs
}

# Names that several files share, with one meaning in all of them.
SHARED_NAMES = {
    *("main", "get_args_parser", "check_args", "settle", "describe_run"),  # of a program
    *("train", "train_one_epoch", "evaluate"),  # of an engine or a program
    *("report", "measure", "draw"),  # steps of a script that stands alone
}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def nodes(tree: ast.AST, inside_functions: bool = True) -> Iterator[ast.AST]:
    """All below `tree` that runs, or that runs on import."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        yield node
        if inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from nodes(node, inside_functions)


@cache
def modules() -> dict[str, ast.Module]:
    """The tree's modules by name, without its tests."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] != "tests" and not any(part.startswith(".") for part in parts):
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


def imports(name: str, inside_functions: bool = True) -> set[str]:
    """Modules that `name` imports; of the tree's own, the innermost."""
    found = set()
    for node in nodes(modules()[name], inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & modules().keys() or {node.module}
    return found


def level(name: str) -> int | None:
    """The height of a module of the tree; None for a library's."""
    for height, prefixes in enumerate((("util.",), MODELS, ("engine_",), TOP)):
        if name.startswith(prefixes):
            return height
    return None


def room(name: str) -> str | None:
    """util/training and the like; None for what lies in util/ itself or elsewhere."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "util" and len(parts) > 2 else None


def crossings() -> dict[str, set[str]]:
    """What the rooms of util/ import from above and from each other, and util's own modules from above."""
    found = defaultdict(set)
    for name in modules():
        for other in imports(name):
            upwards = level(name) == 0 and (level(other) or 0) > 0
            sideways = room(name) is not None and room(other) not in (None, room(name))
            if upwards or sideways:
                found[name].add(other)
    return found


def test_there_is_something_to_check():
    assert {"masking", "util.cli", "util.training.resume", "main_pretrain"} <= modules().keys()
    assert "util.checkpoint" in imports("util.training.resume")
    assert "masking" not in imports("util.training.monitor"), "imported for types alone"
    assert {"masking", "util.misc"} <= imports("engine_pretrain")
    assert [level(name) for name in ("torch", "util.cli", "masking", "engine_probe", "main_knn")] == [None, 0, 1, 2, 3]


def test_imports_point_down():
    wrong = [
        f"{name} imports {other}"
        for name in modules()
        for other in imports(name)
        if level(name) is not None and level(other) is not None and level(other) > max(level(name), 1)
    ]
    assert not wrong


def test_rooms_of_util_keep_to_themselves_but_for_known_exceptions():
    wrong = [
        f"{name} imports {other}"
        for name, others in crossings().items()
        for other in others
        if not any(name.startswith(inside) and other.startswith(allowed) for inside, allowed in ACROSS_ROOMS.items())
    ]
    assert not wrong


@pytest.mark.parametrize("name", ["util.cli", "util.program", "util.arguments"])
def test_flags_are_parsed_without_torch(name):
    """Nor do they import, on loading, anything of ours that would."""
    todo, seen = [name], set()
    while todo:
        module = todo.pop()
        seen.add(module)
        todo.extend((imports(module, inside_functions=False) & modules().keys()) - seen)
        libraries = {other.split(".")[0] for other in imports(module, inside_functions=False)}
        assert not libraries & {"torch", "torchvision", "timm", "numpy", "matplotlib"}, module


def test_a_name_means_one_thing():
    places = defaultdict(list)
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places[node.name].append(name)
    wrong = {name: where for name, where in places.items() if len(where) > 1 and name not in SHARED_NAMES}
    assert not wrong
