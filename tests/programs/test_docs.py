"""The documentation: commands marked runnable do run, and the flag reference is up to date."""

import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from processes import ENVIRONMENT, ROOT, run_to_end

import main_pretrain
from tools.flags import PAGE, reference
from util.cli import ArgumentParser
from util.training.launcher import add_job_arguments

PAGES = sorted(page for folder in (".", "docs", "experiments", "benchmarks") for page in (ROOT / folder).glob("*.md"))
RUNNABLE = re.compile(r"^```bash runnable\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"(?:\b((?:main|submitit)_\w+)\.py|-m ((?:experiments|tools|benchmarks)\.[a-z]\w*))(.*)")
FLAG = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_reference_of_flags_is_not_stale():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m tools.flags"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if RUNNABLE.search(page.read_text())], ids=title)
def test_runnable_commands_run(clone, page):
    """All commands of a page, in order: later ones use the output of earlier ones."""
    script = "\n".join(RUNNABLE.findall(page.read_text(encoding="utf-8")))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**ENVIRONMENT, "PATH": path, "PYTHONPATH": ""}
    done = run_to_end(["bash", "-euxo", "pipefail", "-c", script], cwd=clone, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def flags_of(program: str, line: str) -> set[str]:
    """All flags of a program, as its parser has them, when called as in `line`."""
    if not program.startswith("submitit_"):
        return set(importlib.import_module(program).get_args_parser()._option_string_actions)
    add_job_arguments(job := ArgumentParser())
    task = re.search(r"--task (\w+)", line)
    launched = f"main_{task[1]}" if task else program.replace("submitit", "main")
    return set(job._option_string_actions) | flags_of(launched, line) | ({"--task"} if task else set())


def test_flags_in_commands_exist():
    """Every --flag that a page shows in a command of ours is known to that program."""
    checked = 0
    for page in PAGES:
        for block in re.findall(r"^```bash.*?\n(.*?)^```|`(python [^`]*)`", page.read_text("utf-8"), re.M | re.S):
            for line in "".join(block).replace("\\\n", " ").splitlines():
                found = PROGRAM.search(line.split("  #")[0])
                if not found:
                    continue
                own, _, passed_on = found[3].partition(" --pretrain ")  # the rest goes to main_pretrain.py
                program = found[1] or found[2]
                for name, rest in ((program, own), ("main_pretrain", passed_on)):
                    flags = set(FLAG.findall(rest))
                    assert flags <= flags_of(name, line), (page.name, line)
                    checked += len(flags)
    assert checked > 100


IMAGENET = re.compile(
    r"(torchrun .*main|submitit)_pretrain\.py.*--(model mae_vit|config configs/clmae_vit)_(base|large|huge)"
)


def test_imagenet_commands_train_at_the_papers_rate():
    """He et al.'s 1.5e-4 per 256 images: 0.0024 at their batch of 4096, in every command for several processes."""
    lines = [
        (title(page), line)
        for page in PAGES
        for block in re.findall(r"^```bash.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines()
        if IMAGENET.search(line)
    ]
    assert len(lines) >= 3
    for page, line in lines:
        nodes = re.search(r"--n?nodes[ =](\d+)", line)
        per_node = re.search(r"--(?:ngpus|nproc_per_node)[ =](\d+)", line)
        processes = int(nodes[1] if nodes else 1) * int(per_node[1] if per_node else 8)
        words = shlex.split(line.split("_pretrain.py")[1].split("  #")[0].replace("...", ""))
        args, _ = main_pretrain.get_args_parser().parse_known_args(words)
        batch = args.global_batch_size or args.batch_size * args.accum_iter * processes
        assert args.blr * batch / 256 == pytest.approx(0.0024), (page, line)
