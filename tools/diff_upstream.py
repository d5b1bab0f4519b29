"""Compare this project with a checkout of facebookresearch/mae, and check that upstream's interface is preserved.

    git clone https://github.com/facebookresearch/mae ../mae
    python -m tools.diff_upstream ../mae [--markdown upstream.md] [--python ../old/bin/python]

A broken promise makes the exit code 1. What could not be compared is reported as not checked and breaks nothing.
Upstream's files are read, not imported; its models run in a process of their own. Nothing is written to its folder.
"""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from models_mae import MaskedAutoencoderViT
from tools import mae_probe
from tools import upstream_source as source
from tools.upstream_source import CHANGED, MISSING, SAME
from util.cli import ROOT, ArgumentParser, UserError, logger, positive
from util.misc import generator
from util.program import run

MODELS = ("models_mae.py", "models_vit.py")
TOLERANCE = 1e-5

# What differs on purpose: (program or "*", flag, default or choices here): reason
INTENDED = {
    ("*", "--device", None): "cuda, or the CPU where there is no GPU",
    ("*", "--data_path", "data/imagenet"): "upstream's is a path of one site",
    ("main_linprobe.py", "--model", None): "read off the checkpoint",
    ("main_finetune.py", "--model", None): "read off the checkpoint",
    ("main_finetune.py", "--input_size", None): "read off the checkpoint",
    ("main_linprobe.py", "--nb_classes", None): "as many as the data has",
    ("main_finetune.py", "--nb_classes", None): "as many as the data has",
    ("main_finetune.py", "--remode", ("pixel", "rand", "const")): "timm knows no others",
    ("main_finetune.py", "--mixup_mode", ("batch", "pair", "elem")): "timm knows no others",
    ("main_pretrain.py", "--blr", 1.5e-4): "the base rate of the published recipe",
    ("main_pretrain.py", "--norm_pix_loss", True): "the published recipe normalises patches",
}


class PromiseBroken(UserError):
    """Something that upstream promises is not kept here."""

    exit_code = 1


@dataclass
class Section:
    promise: str
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # a phrase for each breach of the promise
    unchecked: list[str] = field(default_factory=list)  # what could not be compared, and why

    @property
    def verdict(self) -> str:
        return "BROKEN" if self.broken else "not checked" if self.unchecked else "kept"

    def add(self, where: str, found: dict[str, tuple[str, str]], promised: bool = True) -> None:
        """The status of each thing that was compared, and what differs."""
        self.notes.append(f"{where}: {sum(how[0] == SAME for how in found.values())} of {len(found)} are the same")
        self.rows += [[f"`{where}`", f"`{name}`", *how] for name, how in found.items() if how != (SAME, "")]
        for name, (status, how) in found.items():
            if promised and status in (CHANGED, MISSING):
                self.broken.append(f"{where}: {name} is {status}" + (f": {how}" if how else ""))


def python_files(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for pattern in ("*.py", "util/**/*.py") for p in root.glob(pattern))


def module_of(file: str):
    return importlib.import_module(file.removesuffix(".py").replace("/", "."))


def names_section(upstream: Path) -> Section:
    section = Section("Every call of models_mae.py and models_vit.py that is valid upstream is valid here")
    theirs, ours = python_files(upstream), python_files(ROOT)
    section.notes = ['"extended" takes every call that upstream takes, and more. Other files are for information.']
    for where, some, others in (("upstream", theirs, ours), ("here", ours, theirs)):
        section.notes.append(f"files only {where}: {', '.join(file for file in some if file not in others)}")
    section.broken = [f"{f} is missing" for f in theirs if f not in ours and (f in MODELS or f.startswith("main_"))]
    for file in (file for file in theirs if file in ours):
        try:
            names, module = source.read_names(ast.parse((upstream / file).read_bytes())), module_of(file)
        except (SyntaxError, ValueError, ImportError) as error:
            (section.unchecked if file in MODELS else section.notes).append(f"{file} could not be read: {error!r}")
            continue
        found = {name: source.compare_name(module, name, signature) for name, signature in names.items()}
        section.add(file, found, promised=file in MODELS)
    return section


def flags_section(upstream: Path) -> Section:
    section = Section("Every flag of upstream's main_*.py is here with its meaning and default, except where intended")
    for program in sorted(path.name for path in upstream.glob("main_*.py") if (ROOT / path.name).is_file()):
        try:
            theirs = source.flags_of(source.read_parser(upstream / program))
            ours = source.flags_of(module_of(program).get_args_parser())
        except (SyntaxError, ValueError, TypeError, ImportError) as error:
            section.unchecked.append(f"{program} could not be read: {error!r}")
            continue
        found = {}
        for name, flag in theirs.items():
            if isinstance(flag["default"], source.Expression):
                section.unchecked.append(f"{program}: the default of {name} is no literal: {flag['default']}")
                flag["default"] = ours.get(name, flag)["default"]
            found[name] = source.compare_flags(flag, ours.get(name), partial(intended, program, name))
        section.add(program, found)
        section.notes.append(f"{program} adds {', '.join(f'`{name}`' for name in ours if name not in theirs)}")
    return section


def intended(program: str, flag: str, value: object) -> str | None:
    """The reason for this default, or these choices, if they differ on purpose."""
    keys = [key for key in INTENDED if key[0] in ("*", program) and key[1] == flag and source.equal(key[2], value)]
    return INTENDED[keys[0]] if keys else None


def make_inputs(path: Path) -> None:
    """Weights, images and noise for a tiny MAE."""
    weights, draw = MaskedAutoencoderViT(**mae_probe.TINY).state_dict(), generator("diff_upstream")
    inputs = {f"weights/{key}": 0.2 * torch.randn(w.shape, generator=draw) for key, w in weights.items()}
    inputs |= {"imgs": torch.randn(4, 3, 32, 32, generator=draw), "noise": torch.rand(4, 16, generator=draw)}
    arrays: dict = {name: tensor.numpy() for name, tensor in inputs.items()}
    np.savez(path, **arrays)


def ask(tree: Path, inputs: Path, python: str, timeout: float) -> dict:
    """Run mae_probe.py on a tree: "shapes", "arrays", "versions" and "shims", or the "error" that prevented it."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.npz")
        command = [python, "-B", mae_probe.__file__, str(tree), str(inputs), str(answer)]  # -B: leave no compiled files
        command += ["--shim"] if tree != ROOT else []
        try:
            process = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return {"error": f"no answer within {timeout:g} seconds"}
        if not answer.is_file():
            return {"error": (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[-1]}
        with np.load(answer) as arrays:
            found = json.loads(str(arrays["found"]))
            return found | {"arrays": {name: arrays[name] for name in arrays.files if name != "found"}}


def models_section(theirs: dict, ours: dict) -> Section:
    section = Section(f"State dicts have upstream's keys and shapes, and numbers agree within {TOLERANCE:g}")
    for where, answer, failures in (("upstream", theirs, section.unchecked), ("here", ours, section.broken)):
        section.notes.append(f"{where}: {answer.get('ran', 'nothing')}")
        failures += [f"the models do not run {where}: {answer['error']}"] if "error" in answer else []
    found = {}
    for size, their in theirs.get("shapes", {}).items():
        our = ours.get("shapes", {}).get(size, {})
        keys = [f"{key} {their.get(key)} and {our.get(key)}" for key in their | our if their.get(key) != our.get(key)]
        found[size] = (CHANGED if keys else SAME, f"{len(keys)} of {len(their)} keys differ" + ", ".join(["", *keys]))
    section.add("state dict", found)
    worst: dict[str, tuple[float, str]] = {}
    for name, array in theirs.get("arrays", {}).items():
        quantity, largest = " ".join(name.split("/")[:2]), difference(array, ours.get("arrays", {}).get(name))
        worst[quantity] = max(worst.get(quantity, (-1.0, "")), (largest, f"by {largest:.1e} in {name}"))
    section.add("numbers", {name: (CHANGED if far > TOLERANCE else SAME, how) for name, (far, how) in worst.items()})
    return section


def difference(theirs: np.ndarray, ours: np.ndarray | None) -> float:
    """The largest, as a share of upstream's largest value. What is not finite, or has another shape, is infinite."""
    if ours is None or theirs.shape != ours.shape or not (np.isfinite(theirs) & np.isfinite(ours)).all():
        return np.inf
    return float(np.abs(theirs.astype(np.float64) - ours).max() / max(np.abs(theirs).max(), 1e-12))


def render(title: str, sections: list[Section]) -> str:
    """Markdown with aligned tables, so that it reads well on a terminal, too."""
    parts = [f"# {title}"]
    for section in sections:
        items = [f"broken: {phrase}" for phrase in section.broken]
        items += [f"not checked: {phrase}" for phrase in section.unchecked] + section.notes
        parts += [f"## {section.promise}: {section.verdict}", "\n".join(f"- {item}" for item in items)]
        rows = [["where", "what", "status", "what differs"], *section.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * width for width in widths])
        lines = [" | ".join(map(str.ljust, row, widths)) for row in rows]
        parts.append("\n".join(f"| {line} |" for line in lines))
    return "\n\n".join(parts) + "\n"


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m tools.diff_upstream", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("upstream", metavar="PATH_TO_MAE_CHECKOUT", help="a checkout of facebookresearch/mae")
    parser.add_argument("--markdown", default=None, metavar="FILE", help="write the report as Markdown, too")
    text = "runs upstream's models, for example with an older timm; default: the one that runs this"
    parser.add_argument("--python", default=None, metavar="INTERPRETER", help=text)
    parser.add_argument("--timeout", default=600, type=positive, help="seconds that the models of each tree may take")
    return parser


def main(args: Namespace) -> None:
    upstream = Path(os.path.realpath(args.upstream))
    if not (upstream / "models_mae.py").is_file():
        raise UserError(f"{args.upstream} has no models_mae.py; name a checkout of facebookresearch/mae")
    python = shutil.which(args.python or sys.executable)
    if python is None:
        raise UserError(f"--python {args.python} is not a program; name a Python interpreter")
    if args.markdown is not None and not Path(os.path.abspath(args.markdown)).parent.is_dir():
        raise UserError(f"--markdown {args.markdown}: {Path(args.markdown).parent} is not a folder")
    with tempfile.TemporaryDirectory() as folder:
        make_inputs(inputs := Path(folder, "inputs.npz"))
        theirs = ask(upstream, inputs, os.path.abspath(python), args.timeout)
        ours = ask(ROOT, inputs, sys.executable, args.timeout)
    sections = [names_section(upstream), flags_section(upstream), models_section(theirs, ours)]
    report = render(f"This project and upstream in {args.upstream}", sections)
    logger.info("%s", report)
    if args.markdown is not None:
        Path(args.markdown).write_text(report, encoding="utf-8")
    broken = [phrase for section in sections for phrase in section.broken]
    if broken:
        more = f"; and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise PromiseBroken(f"upstream's promises are broken: {'; '.join(broken[:3])}{more}")
    unchecked = any(section.unchecked for section in sections)
    logger.info("everything upstream promises is kept%s", ", as far as it could be checked" if unchecked else "")


if __name__ == "__main__":
    run(main, get_args_parser())
