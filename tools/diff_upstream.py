"""Compare this project with a checkout of facebookresearch/mae, and tell whether what upstream promises is kept.

    git clone https://github.com/facebookresearch/mae ../mae
    python -m tools.diff_upstream ../mae                                  # text on standard output
    python -m tools.diff_upstream ../mae --markdown upstream.md           # the same as Markdown, too
    python -m tools.diff_upstream ../mae --python ../old/bin/python       # upstream's side under its own old timm

Upstream promises its users
    files       models_mae.py, models_vit.py and every main_*.py are there;
    names       all classes, constructors, methods, functions and aliases of models_mae.py and models_vit.py take the
                calls that they took, with the same meaning: further parameters have defaults;
    flags       every flag of main_*.py has its meaning and default, but for the EXCEPTIONS below;
    state dict  the keys and shapes of the three model sizes, so that checkpoints can be exchanged;
    numbers     same weights, images and noise give the same loss, prediction, mask and gradients, within 1e-5 of the
                largest value of each.
A broken promise makes the exit code 1. What could not be compared is reported as not checked, and breaks nothing:
upstream pins an old timm, and may not run beside a new one. Helpers in util/ and the inside of engines, programs and
submitit files are reported, but not promised. A name counts as present where a module imports it; methods are looked up
in their class alone, not in its bases.

Upstream's files are read, not imported; its models run in a process of their own. Nothing is written into its folder.
"""

import importlib
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.report import Section, Table, as_markdown, as_text
from tools.upstream_models import ask, ask_upstream, make_inputs, numbers_section, shapes_section
from tools.upstream_source import (
    CHANGED,
    EXTENDED,
    MISSING,
    SAME,
    Expression,
    Flag,
    compare_flags,
    compare_symbols,
    equal,
    lookup,
    parser_flags,
    read_flags,
    read_symbols,
    tree_files,
)
from util.cli import ArgumentParser, UserError, logger, run

ROOT = Path(__file__).resolve().parent.parent
MODELS = ("models_mae.py", "models_vit.py")
EVALUATIONS = ("main_linprobe.py", "main_finetune.py")


@dataclass(frozen=True)
class Deliberate:
    """A flag whose default differs on purpose."""

    flag: str
    programs: tuple[str, ...] | None  # None: all
    defaults: tuple  # those it may have here
    reason: str


EXCEPTIONS = (
    Deliberate("--device", None, ("cuda", "cpu"), "the cpu where there is no GPU"),
    Deliberate("--data_path", None, (None,), "a path of one site is nobody else's default"),
    Deliberate("--model", EVALUATIONS, (None,), "read off the checkpoint"),
    Deliberate("--input_size", ("main_finetune.py",), (None,), "read off the checkpoint"),
    Deliberate("--nb_classes", EVALUATIONS, (None,), "as many as the data has"),
)


class PromiseBroken(UserError):
    """Something that upstream promises is not kept here."""

    exit_code = 1


# --- (1) Files ---


def is_program(file: str) -> bool:
    return file.startswith("main_") and file.endswith(".py") and "/" not in file


def files_section(upstream: Path) -> Section:
    theirs, ours = tree_files(upstream), tree_files(ROOT)
    same = sorted(theirs & ours)
    section = Section(
        "Files",
        "models_mae.py, models_vit.py and every main_*.py of upstream exist here.",
        notes=['Compared by name: "same" is a file of that name in both trees, whatever is in it.'],
        lists={"same": same, "only there": sorted(theirs - ours), "only here": sorted(ours - theirs)},
    )
    section.lists["byte for byte the same"] = [
        name for name in same if (ROOT / name).read_bytes() == (upstream / name).read_bytes()
    ]
    promised = [name for name in sorted(theirs - ours) if name in MODELS or is_program(name)]
    section.broken = [f"{name} is missing here" for name in promised]
    return section


# --- (2) Names and signatures ---


def by_status(found: dict[str, tuple[str, str]], statuses: tuple[str, ...]) -> dict[str, list[str]]:
    return {status: [name for name in found if found[name][0] == status] for status in statuses}


def numbers(lists: list[list[str]]) -> list[str]:
    return [str(len(each)) for each in lists]


def names_section(upstream: Path, common: list[str]) -> Section:
    section = Section(
        "Names and signatures",
        "every call of a name in models_mae.py and models_vit.py that is valid upstream is valid here.",
        notes=[
            "Of each Python file in both trees: functions, classes, methods and aliases; annotations do not matter. "
            '"extended": takes every call that upstream takes, and more. Other files than the two are reported only.'
        ],
    )
    counts, differing = [], []
    for file in (name for name in common if name.endswith(".py")):
        try:
            theirs, ours = read_symbols(upstream / file), read_symbols(ROOT / file)
        except (SyntaxError, ValueError) as error:
            # `unchecked` is about the promise; the other files are reported only.
            unread = section.unchecked if file in MODELS else section.notes
            unread.append(f"{file} could not be read: {type(error).__name__}: {error}")
            continue
        theirs = {name: symbol for name, symbol in theirs.items() if symbol.kind != "import"}
        added = [name for name, symbol in ours.items() if symbol.kind != "import" and name not in theirs]
        found = {name: compare_symbols(symbol, lookup(ROOT, file, name)) for name, symbol in theirs.items()}
        of = by_status(found, (SAME, EXTENDED, CHANGED, MISSING))
        counts.append([file, "yes" if file in MODELS else "no", *numbers([*of.values(), added])])
        differing += [[file, name, status, how] for name, (status, how) in found.items() if how]
        section.lists[f"missing in {file}"] = of[MISSING]
        section.lists[f"added in {file}"] = added
        if file in MODELS:
            section.broken += [f"{file}: {name} is missing here" for name in of[MISSING]]
            section.broken += [f"{file}: {name} is changed: {found[name][1]}" for name in of[CHANGED]]
    section.tables = [
        Table(["file", "promised", SAME, EXTENDED, CHANGED, MISSING, "added"], counts),
        Table(["file", "name", "status", "what differs"], differing),
    ]
    return section


# --- (3) Flags ---


def excepted(program: str, flag: Flag) -> str | None:
    """Why this flag's default may be what it is, if it may."""
    for exception in EXCEPTIONS:
        meant = exception.flag == flag.name and program in (exception.programs or [program])
        if meant and any(equal(flag.default, default) for default in exception.defaults):
            return exception.reason
    return None


def compare_flag(program: str, theirs: Flag, ours: Flag | None) -> tuple[str, str]:
    status, how = compare_flags(theirs, ours)
    if ours is None or isinstance(theirs.default, Expression) or equal(theirs.default, ours.default):
        return status, how
    defaults = f"default {theirs.default!r} upstream, {ours.default!r} here"
    reason = excepted(program, ours)
    if reason is None:
        return CHANGED, "; ".join(filter(None, [how, defaults]))
    return (CHANGED if status == CHANGED else "exception"), "; ".join(filter(None, [how, f"{defaults}: {reason}"]))


def flags_section(upstream: Path, theirs: list[str], ours: list[str]) -> Section:
    section = Section(
        "Flags",
        "of each main_*.py in both trees, every flag of upstream is here with its default, but for the exceptions.",
        notes=['"extended": takes what upstream takes, and more. "exception": another default, on purpose.'],
    )
    statuses = (SAME, EXTENDED, "exception", CHANGED, MISSING)
    counts, differing = [], []
    for program in (name for name in theirs if name in ours):
        try:
            their_flags = read_flags(upstream / program)
            flags = parser_flags(importlib.import_module(program.removesuffix(".py")).get_args_parser())
        except (SyntaxError, ValueError, ImportError) as error:
            section.unchecked.append(f"{program} could not be read: {type(error).__name__}: {error}")
            continue
        if their_flags is None:
            section.unchecked.append(f"{program} has no get_args_parser upstream")
            continue
        section.unchecked += [
            f"{program}: the default of {name} upstream is no literal: {flag.default}"
            for name, flag in their_flags.items()
            if isinstance(flag.default, Expression)
        ]
        found = {name: compare_flag(program, flag, flags.get(name)) for name, flag in their_flags.items()}
        of = by_status(found, statuses)
        added = [name for name in flags if name not in their_flags]
        counts.append([program, *numbers([*of.values(), added])])
        differing += [[program, name, status, how] for name, (status, how) in found.items() if status != SAME]
        section.lists[f"added in {program}"] = added
        section.broken += [f"{program}: {name} is missing here" for name in of[MISSING]]
        section.broken += [f"{program}: {name} is changed: {found[name][1]}" for name in of[CHANGED]]
    exceptions = [
        [each.flag, ", ".join(each.programs or ["all"]), " or ".join(map(repr, each.defaults)), each.reason]
        for each in EXCEPTIONS
    ]
    section.lists["programs only there"] = [program for program in theirs if program not in ours]
    section.lists["programs only here"] = [program for program in ours if program not in theirs]
    section.tables = [
        Table(["program", *statuses, "added"], counts),
        Table(["program", "flag", "status", "what differs"], differing),
        Table(["exception", "programs", "default here", "reason"], exceptions),
    ]
    return section


# --- The report ---


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m tools.diff_upstream", description=__doc__.split("\n")[0])
    parser.add_argument("upstream", metavar="PATH_TO_MAE_CHECKOUT", help="a checkout of facebookresearch/mae")
    parser.add_argument("--markdown", default=None, metavar="FILE", help="write the report as Markdown, too")
    parser.add_argument(
        "--python",
        default=None,
        metavar="INTERPRETER",
        help="runs upstream's models, such as beside old timm; default: the one that runs this",
    )
    parser.add_argument("--timeout", default=600, type=float, help="seconds that the models of each tree may take")
    return parser


def compare(upstream: Path, python: str, timeout: float) -> list[Section]:
    files = files_section(upstream)
    theirs = sorted([*files.lists["same"], *files.lists["only there"]])
    ours = sorted([*files.lists["same"], *files.lists["only here"]])
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder, "inputs.npz")
        make_inputs(inputs)
        with ThreadPoolExecutor(1) as beside:  # most of it is two processes that import torch
            promised = beside.submit(ask_upstream, upstream, inputs, python, timeout)
            our_answer = ask(ROOT, inputs, sys.executable, timeout)
            their_answer = promised.result()
    return [
        files,
        names_section(upstream, files.lists["same"]),
        flags_section(upstream, list(filter(is_program, theirs)), list(filter(is_program, ours))),
        shapes_section(their_answer, our_answer),
        numbers_section(their_answer, our_answer),
    ]


def main(args: Namespace) -> None:
    upstream = Path(args.upstream).resolve()
    if not upstream.is_dir():
        raise UserError(f"{args.upstream} is not a folder; name a checkout of facebookresearch/mae")
    if not (upstream / "models_mae.py").is_file():
        raise UserError(f"{args.upstream} has no models_mae.py; name a checkout of facebookresearch/mae")
    python = shutil.which(args.python or sys.executable)
    if python is None:
        raise UserError(f"--python {args.python} is not a program; name a Python interpreter")
    if args.markdown is not None and not Path(args.markdown).resolve().parent.is_dir():
        raise UserError(f"--markdown {args.markdown}: {Path(args.markdown).parent} is not a folder")
    if args.timeout <= 0:
        raise UserError(f"--timeout {args.timeout:g} must be above 0")
    sections = compare(upstream, os.path.abspath(python), args.timeout)
    title = f"This project and upstream in {args.upstream}"
    logger.info("%s\n", as_text(title, sections))
    if args.markdown is not None:
        try:
            Path(args.markdown).write_text(as_markdown(title, sections), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--markdown {args.markdown} cannot be written: {error.strerror}") from None
    broken = [phrase for section in sections for phrase in section.broken]
    if broken:
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise PromiseBroken(f"upstream's promises are broken: {'; '.join(broken[:3])}{more}")
    unchecked = any(section.unchecked for section in sections)
    logger.info("everything upstream promises is kept%s", ", as far as it could be checked" if unchecked else "")


if __name__ == "__main__":
    run(main, get_args_parser())
