"""The comparison with upstream reports what is kept, what is broken, and what could not be checked."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT
from upstream_tree import make_tree

from tools import diff_upstream
from tools.diff_upstream import ask, difference, flags_section, models_section, names_section

PATIENCE = 300
SCALED = """
class MaskedAutoencoderViT(borrowed.MaskedAutoencoderViT):
    def forward_decoder(self, *args):
        return 1.001 * super().forward_decoder(*args)

def mae_vit_base_patch16():
    model = borrowed.mae_vit_base_patch16()
    model.bonus = nn.Parameter(torch.zeros(7))
    return model
"""
OLD_NUMPY = "import numpy\nnumpy.zeros(1, dtype=numpy.float)\n"
OLD_TIMM = """
from timm.models.vision_transformer import Block

class MaskedAutoencoderViT(borrowed.MaskedAutoencoderViT):
    def __init__(self, **kwargs):
        Block(8, 2, qk_scale=None)
        super().__init__(**kwargs)
"""


@pytest.fixture
def tree(tmp_path, upstream_flags) -> Path:
    return make_tree(tmp_path / "mae", json.loads((DATA / "api.json").read_text()), upstream_flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, golden) -> Path:
    """The weights, images and noise with which upstream's numbers were made."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    given = {name: value.numpy() for name, value in golden.items() if name.startswith(("weights/", "imgs", "noise"))}
    np.savez(path, **given)
    return path


@pytest.fixture(scope="module")
def here(inputs) -> dict:
    return ask(ROOT, inputs, sys.executable, PATIENCE)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


@pytest.mark.slow
def test_report_on_this_project(tree, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    command = [sys.executable, "-m", "tools.diff_upstream", str(tree), "--markdown", str(tmp_path / "report.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert before == {path: path.stat().st_mtime_ns for path in tree.rglob("*")}, "nothing is written there"
    assert (done.returncode, done.stderr) == (0, "")
    report = (tmp_path / "report.md").read_text()
    assert report in done.stdout
    lines = [" ".join(line.split()) for line in report.splitlines()]
    assert sum(line.startswith("## ") and line.endswith(": kept") for line in lines) == 3
    assert "| `models_mae.py` | `MaskedAutoencoderViT.random_masking` | extended | noise=None only here |" in lines
    expected = "intended | default 1000 upstream, None here: as many as the data has"
    assert f"| `main_linprobe.py` | `--nb_classes` | {expected} |" in lines
    assert "- numbers: 10 of 10 are the same" in lines


def test_what_cannot_be_run_is_not_checked_and_a_broken_promise_is_exit_code_1(program, tree, monkeypatch):
    monkeypatch.setattr(diff_upstream, "ask", lambda tree, *_: {} if tree == ROOT else {"error": "no container_abcs"})
    code, out, err = program(diff_upstream, tree)
    assert (code, err) == (0, "")
    assert "not checked: the models do not run upstream: no container_abcs" in out
    assert out.endswith("everything upstream promises is kept, as far as it could be checked\n")
    models = tree / "models_vit.py"
    models.write_text(models.read_text().replace("global_pool=False", "global_pool=True"))
    code, out, err = program(diff_upstream, tree)
    breach = "VisionTransformer.__init__ is changed: global_pool=True only upstream; global_pool=False only here"
    assert (code, err) == (1, f"ERROR: upstream's promises are broken: models_vit.py: {breach}\n")
    assert f"broken: models_vit.py: {breach}" in out


BAD = {
    "no models": (["{tmp}"], "{tmp} has no models_mae.py"),
    "no interpreter": (["{tmp}/mae", "--python", "pyhton3"], "--python pyhton3 is not a program"),
    "no place": (["{tmp}/mae", "--markdown", "{tmp}/a/b.md"], "--markdown {tmp}/a/b.md: {tmp}/a is not a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(program, tmp_path, tree, case):
    flags, expected = BAD[case]
    code, _, err = program(diff_upstream, *(flag.format(tmp=tmp_path) for flag in flags))
    assert code == 2
    assert err.startswith(f"ERROR: {expected.format(tmp=tmp_path)}")
    assert len(err.splitlines()) == 1


def test_files_that_are_missing_or_cannot_be_read(tree):
    (tree / "main_segment.py").write_text("")
    for name in ("models_vit.py", "util/lars.py", "main_pretrain.py"):
        (tree / name).write_text("def f(:\n")
    names = names_section(tree)
    assert names.broken == ["main_segment.py is missing"]
    assert [phrase.split(": ")[0] for phrase in names.unchecked] == ["models_vit.py could not be read"]
    assert any(note.startswith("util/lars.py could not be read") for note in names.notes)
    assert "models_mae.py: 13 of 17 are the same" in names.notes
    assert flags_section(tree).unchecked[0].startswith("main_pretrain.py could not be read: SyntaxError")


def test_defaults_of_this_projects_programs(tree):
    """Against upstream's, as they are, and against others."""
    section = flags_section(tree)
    assert (section.broken, section.unchecked) == ([], [])
    text = (tree / "main_pretrain.py").read_text()
    text = text.replace("default=0.75", "default=0.5").replace("'--dist_url'", "'--address'")
    (tree / "main_pretrain.py").write_text(text.replace("default=400", "default=EPOCHS"))
    section = flags_section(tree)
    assert section.broken == [
        "main_pretrain.py: --mask_ratio is changed: default 0.5 upstream, 0.75 here",
        "main_pretrain.py: --address is missing",
    ]
    assert section.unchecked == ["main_pretrain.py: the default of --epochs is no literal: EPOCHS"]


def test_an_intended_departure_is_one_default_of_one_program():
    assert diff_upstream.intended("main_linprobe.py", "--nb_classes", None) == "as many as the data has"
    assert diff_upstream.intended("main_pretrain.py", "--nb_classes", None) is None
    assert diff_upstream.intended("main_linprobe.py", "--nb_classes", 10) is None


def test_the_probe_finds_upstreams_numbers(here, golden, upstream_shapes):
    """Run on this project, with upstream's weights."""
    assert "error" not in here
    arrays = {name: value.numpy() for name, value in golden.items() if name.startswith(("plain/", "norm_pix/"))}
    arrays = {name: value for name, value in arrays.items() if not name.endswith(("latent", "ids_restore"))}
    assert arrays.keys() == {name for name in here["arrays"] if not name.startswith("fresh/")}
    shapes = {name: upstream_shapes[name] for name in here["shapes"]}
    section = models_section({"shapes": shapes, "arrays": arrays}, here)
    assert section.verdict == "kept"
    assert section.notes[2:] == ["state dict: 3 of 3 are the same", "numbers: 8 of 8 are the same"]


def test_a_difference_and_a_key_of_their_own_are_found(tree, inputs, here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this project's util must not take the place of theirs
    append(tree / "models_mae.py", SCALED)
    append(tree / "util" / "pos_embed.py", "import torch\ntorch.theirs = True\n")
    append(tree / "models_mae.py", "assert torch.theirs\n")
    section = models_section(ask(tree, inputs, sys.executable, PATIENCE), here)
    broken = {phrase.split(" is changed")[0] for phrase in section.broken}
    numbers = {f"numbers: {variant} {name}" for variant in ("plain", "norm_pix") for name in ("loss", "pred", "grad")}
    assert broken == numbers | {"state dict: mae_vit_base_patch16"}
    assert any("1 of 255 keys differ, bonus [7] and None" in phrase for phrase in section.broken)
    assert any("plain pred is changed: by 1.0e-03 in plain/pred" in phrase for phrase in section.broken)


def test_code_for_an_old_timm_runs_with_a_shim_and_that_is_said(tree, inputs, here):
    models = tree / "models_mae.py"
    models.write_text(OLD_NUMPY + models.read_text() + OLD_TIMM)
    section = models_section(ask(tree, inputs, sys.executable, PATIENCE), here)
    assert section.verdict == "kept"
    assert section.notes[0].endswith("numpy.float is float, timm's Block takes qk_scale=None")


def test_interpreters_that_do_not_answer(tree, inputs, here):
    assert ask(tree, inputs, shutil.which("false"), PATIENCE) == {"error": "exit code 1"}
    append(tree / "models_mae.py", "import time\ntime.sleep(100)\n")
    silent = ask(tree, inputs, sys.executable, 0.5)
    assert silent == {"error": "no answer within 0.5 seconds"}
    assert models_section(silent, here).verdict == "not checked"
    assert models_section(here, silent).verdict == "BROKEN"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_equal(value):
    bad = np.array([1.0, value])
    assert difference(bad, bad) == difference(np.zeros(2), np.zeros(3)) == difference(bad, None) == np.inf
    assert difference(np.array([1.0, -4.0]), np.array([1.0, -4.1])) == pytest.approx(0.025)
