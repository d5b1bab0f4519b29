"""The models of two trees side by side: each runs in a process of its own, as their modules have the same names."""

import importlib
import json
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tools import mae_probe
from tools.report import Section, Table
from util.cli import UserError
from util.misc import generator

TOLERANCE = 1e-5
OLD_CODE = ("'qk_scale'", "has no attribute 'float'")  # what a new timm and a new numpy say to code for old ones
QUANTITIES = (("loss", "loss"), ("prediction", "pred"), ("mask", "mask"), ("gradients", "grad/"))


@dataclass
class Answer:
    """What mae_probe.py found out about one tree."""

    shapes: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # by part; "import" prevents all parts
    shims: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    as_is: str = ""  # the error without shims, where they were applied

    def prevented(self, part: str) -> str | None:
        reason = self.errors.get("import") or self.errors.get(part)
        return reason and (f"{reason} (with {', '.join(self.shims)})" if self.shims else reason)


def make_inputs(path: Path) -> None:
    """Weights with no zero among them, images and noise for a tiny MAE."""
    models_mae = importlib.import_module("models_mae")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weights = models_mae.MaskedAutoencoderViT(**mae_probe.TINY).state_dict()
    draw = generator("diff_upstream")
    inputs = {f"weights/{key}": w + 0.05 * torch.randn(w.shape, generator=draw) for key, w in weights.items()}
    inputs["imgs"] = torch.randn(4, 3, 32, 32, generator=draw)
    inputs["noise"] = torch.rand(4, 16, generator=draw)
    np.savez(path, **{name: tensor.numpy() for name, tensor in inputs.items()})


def ask(tree: Path, inputs: Path, python: str, timeout: float, shim: bool = False) -> Answer:
    """Run mae_probe.py on a tree. -B: no compiled files are left in somebody else's folder."""
    with tempfile.TemporaryDirectory() as folder:
        stem = Path(folder, "answer")
        probe = [python, "-B", mae_probe.__file__, str(tree), str(inputs), str(stem), *(["--shim"] if shim else [])]
        try:
            process = subprocess.run(probe, cwd=tree, capture_output=True, text=True, errors="replace", timeout=timeout)
        except subprocess.TimeoutExpired:
            return Answer(errors={"import": f"no answer within {timeout:g} seconds"})
        except OSError as error:
            raise UserError(f"--python {python} cannot be run: {error.strerror}") from None
        if not stem.with_suffix(".json").is_file():
            said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            return Answer(errors={"import": said[-1]})
        answer = Answer(**json.loads(stem.with_suffix(".json").read_text()))
        if stem.with_suffix(".npz").is_file():
            with np.load(stem.with_suffix(".npz")) as arrays:
                answer.arrays = {name: arrays[name] for name in arrays.files}
        return answer


def ask_upstream(tree: Path, inputs: Path, python: str, timeout: float) -> Answer:
    """As is; once more with shims, if nothing but the age of upstream's code is in the way."""
    answer = ask(tree, inputs, python, timeout)
    dated = [error for error in answer.errors.values() if any(phrase in error for phrase in OLD_CODE)]
    if not dated:
        return answer
    answer = ask(tree, inputs, python, timeout, shim=True)
    answer.as_is = dated[0]
    return answer


def how_it_ran(answer: Answer) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    if not answer.shims:
        return versions
    return f"{versions}; with a shim ({', '.join(answer.shims)}), because as is: {answer.as_is}"


def shapes_section(theirs: Answer, ours: Answer) -> Section:
    section = Section(
        "State dicts",
        "keys and shapes of the three model sizes are the same.",
        notes=[f"upstream: {how_it_ran(theirs)}", f"here: {how_it_ran(ours)}"],
    )
    rows, differing, prevented = [], [], {}
    for name in mae_probe.SIZES:
        if ours.prevented(name):
            section.broken.append(f"{name} cannot be built here: {ours.prevented(name)}")
            continue
        if theirs.prevented(name):
            prevented.setdefault(theirs.prevented(name), []).append(name)
            continue
        their, our = theirs.shapes[name], ours.shapes[name]
        same = [key for key in their if their[key] == our.get(key)]
        missing, added = [key for key in their if key not in our], [key for key in our if key not in their]
        changed = [key for key in their if key in our and their[key] != our[key]]
        rows.append([name, *(str(len(keys)) for keys in (same, changed, missing, added))])
        for status, keys in (("changed", changed), ("missing", missing), ("added", added)):
            differing += [[name, key, status, str(their.get(key, "-")), str(our.get(key, "-"))] for key in keys]
            if keys:
                section.broken.append(f"{name}: {len(keys)} keys {status}, such as {keys[0]}")
    section.unchecked = [f"{', '.join(names)}, upstream: {reason}" for reason, names in prevented.items()]
    section.tables = [
        Table(["model", "same", "changed", "missing", "added"], rows),
        Table(["model", "key", "status", "upstream", "here"], differing),
    ]
    return section


def difference(theirs: np.ndarray, ours: np.ndarray) -> tuple[float, float]:
    """The largest difference, and its share of upstream's largest value. Not a number is infinitely far off."""
    if theirs.shape != ours.shape:
        return np.inf, np.inf
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        largest = np.abs(theirs.astype(np.float64) - ours).max()
    if not np.isfinite(largest):
        return np.inf, np.inf
    return float(largest), float(largest / max(np.abs(theirs).max(), 1e-12))


def numbers_section(theirs: Answer, ours: Answer) -> Section:
    section = Section(
        "Numbers",
        "same weights, images and noise give the same loss, prediction, mask and gradients within 1e-5, "
        "relative to upstream's largest value of each.",
        notes=["A tiny MAE, float32 on one thread, with norm_pix_loss off (plain) and on (norm_pix)."],
    )
    if ours.prevented("numbers"):
        section.broken.append(f"the MAE does not run here: {ours.prevented('numbers')}")
        return section
    if theirs.prevented("numbers"):
        section.unchecked.append(f"upstream's MAE did not run: {theirs.prevented('numbers')}")
        return section
    quantities = {"positions of a new model": "fresh/"}
    for variant in ("plain", "norm_pix"):
        quantities |= {f"{variant}: {title}": f"{variant}/{name}" for title, name in QUANTITIES}
    rows = []
    for title, prefix in quantities.items():
        names = sorted(name for name in {*theirs.arrays, *ours.arrays} if name.startswith(prefix))
        absent = np.full((), np.nan)
        found = {name: difference(theirs.arrays.get(name, absent), ours.arrays.get(name, absent)) for name in names}
        worst = max(found, key=lambda name: found[name][1])
        absolute, relative = max(each[0] for each in found.values()), found[worst][1]
        where = f"in {worst.removeprefix(prefix)}" if len(names) > 1 and relative > 0 else ""
        rows.append([title, str(len(names)), f"{absolute:.1e}", f"{relative:.1e}", where])
        if not relative <= TOLERANCE:
            section.broken.append(f"{title} differs by {relative:.1e}")
    section.tables = [Table(["quantity", "tensors", "largest difference", "relative", "where"], rows)]
    return section
