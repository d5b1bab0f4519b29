"""Write docs/flags.md, the reference of all flags, from the parsers themselves.

python -m tools.flags
"""

import argparse
import importlib
from argparse import Namespace
from pathlib import Path

from util.cli import ArgumentParser, logger
from util.program import run
from util.training.launcher import add_job_arguments

PROGRAMS = (
    *("main_pretrain", "main_knn", "main_linprobe", "main_fewshot", "main_finetune", "main_compare", "main_masks"),
    *(
        "main_visualize",
        "experiments.run",
        "experiments.maskbench",
        "experiments.probe",
        "tools.export",
        "tools.diff_upstream",
    ),
)
PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
INTRODUCTION = """# All flags

Written by `python -m tools.flags` from the programs' own parsers. A mistake in any of them ends with one sentence and \
exit code 2."""


def get_args_parser() -> ArgumentParser:
    return ArgumentParser("python -m tools.flags", description=(__doc__ or "").split("\n")[0])


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name in PROGRAMS:
        program = importlib.import_module(name)
        title = name if "." in name else f"{name}.py"
        parts += [f"## {title}", (program.__doc__ or "").split("\n")[0], *tables(program.get_args_parser())]
    add_job_arguments(job := ArgumentParser("job"))
    parts += ["## submitit_pretrain.py, submitit_eval.py", "All flags of the program that becomes a job, and:"]
    return "\n\n".join([*parts, *tables(job)]) + "\n"


def tables(parser: ArgumentParser) -> list[str]:
    """A table for each group that has flags."""
    texts = []
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        title = {"options": "other", "positional arguments": "arguments"}.get(group.title or "", group.title)
        head = [f"**{title}**", "", "| flag | default | meaning |", "|---|---|---|"]
        texts += ["\n".join([*head, *rows])] if rows else []
    return texts


def row(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar or action.dest}`"
    meaning, default = (action.help or "") % {"default": action.default, "prog": ""}, action.default
    if action.choices is not None:
        meaning += f" (one of {', '.join(map(str, action.choices))})"
    unset = action.nargs == 0 or default in (None, "", []) or not action.option_strings
    shown = "" if unset else f"`{' '.join(map(str, default)) if isinstance(default, list | tuple) else default}`"
    meaning = meaning.replace("|", r"\|")  # or it would end the cell
    return f"| {names} | {shown} | {meaning} |"


def main(_: Namespace) -> None:
    PAGE.write_text(reference(), encoding="utf-8")
    logger.info("%s", PAGE)


if __name__ == "__main__":
    run(main, get_args_parser())
