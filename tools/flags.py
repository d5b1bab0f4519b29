"""Write docs/flags.md, the reference of all flags, from the parsers themselves.

python -m tools.flags
"""

import argparse
import importlib
import re
from argparse import Namespace
from collections import Counter
from pathlib import Path

from submitit_eval import get_task_parser
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
exit code 2. Groups of flags that several programs share are at the end."""


def get_args_parser() -> ArgumentParser:
    return ArgumentParser("python -m tools.flags", description=(__doc__ or "").split("\n")[0])


def reference() -> str:
    """The whole page. Groups that several programs share come once, at the end."""
    programs = {name: importlib.import_module(name) for name in PROGRAMS}
    groups = {name: tables(program.get_args_parser()) for name, program in programs.items()}
    uses = Counter(group for of_program in groups.values() for group in of_program.items())
    shared = {title: table for (title, table), times in uses.items() if times > 1}
    parts = [INTRODUCTION]
    for name, program in programs.items():
        parts += [f"## {name if '.' in name else name + '.py'}", (program.__doc__ or "").split("\n")[0]]
        parts += [f"**{title}**\n\n{table}" for title, table in groups[name].items() if shared.get(title) != table]
        links = [f"[{title}](#{anchor(title)})" for title, table in groups[name].items() if shared.get(title) == table]
        parts += [f"Shared groups: {', '.join(links)}."] if links else []
    add_job_arguments(job := ArgumentParser("job"))
    parts += ["## submitit_pretrain.py, submitit_linprobe.py, submitit_finetune.py, submitit_eval.py"]
    parts += ["All flags of the program that becomes a job, and:", *tables(job).values()]
    parts += ["submitit_eval.py also takes:", *tables(get_task_parser()).values()]
    parts += [part for title, table in shared.items() for part in (f"## {title}", table)]
    return "\n\n".join(parts) + "\n"


def anchor(title: str) -> str:
    """Of a heading, as GitHub forms it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def tables(parser: ArgumentParser) -> dict[str, str]:
    """A table for each group that has flags, by title."""
    found = {}
    for group in parser._action_groups:
        rows = [row(action) for action in group._group_actions if not isinstance(action, argparse._HelpAction)]
        title = {"options": "other", "positional arguments": "arguments"}.get(group.title or "", group.title)
        if rows:
            found[str(title)] = "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])
    return found


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
