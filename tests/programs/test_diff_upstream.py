"""The comparison with upstream tells what is kept, what is broken, and what it could not find out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA, ROOT
from timm.models.vision_transformer import Block
from upstream_tree import make_tree

from tools import diff_upstream, upstream_models
from tools.report import Section, Table, as_markdown, as_text
from tools.upstream_models import Answer, ask, ask_upstream, numbers_section, shapes_section
from tools.upstream_source import read_flags

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


@pytest.fixture(scope="module")
def api() -> dict[str, list[str]]:
    return json.loads((DATA / "api.json").read_text())


@pytest.fixture
def tree(tmp_path, api, upstream_flags) -> Path:
    return make_tree(tmp_path / "mae", api, upstream_flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, golden) -> Path:
    """The weights, images and noise with which upstream's figures were made."""
    path = tmp_path_factory.mktemp("inputs") / "inputs.npz"
    given = {name: value.numpy() for name, value in golden.items() if name.startswith(("weights/", "imgs", "noise"))}
    np.savez(path, **given)
    return path


@pytest.fixture(scope="module")
def here(inputs) -> Answer:
    return ask(ROOT, inputs, sys.executable, PATIENCE)


@pytest.fixture
def diff(program, monkeypatch, here):
    """The program, with what is known of this project's models."""
    monkeypatch.setattr(diff_upstream, "ask", lambda *_: here)
    return lambda *flags: program(diff_upstream, *flags)


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


# --- As a whole ---


def test_report_on_this_project(tree, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in tree.rglob("*")}
    command = [sys.executable, "-m", "tools.diff_upstream", str(tree), "--markdown", str(tmp_path / "report.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert before == {path: path.stat().st_mtime_ns for path in tree.rglob("*")}, "nothing is written there"

    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for promise in ("Files", "Names and signatures", "Flags", "State dicts", "Numbers"):
        assert f"{promise} kept" in lines
    assert not [line for line in lines if line.startswith(("not checked", "broken:"))]
    assert "MaskedAutoencoderViT.random_masking extended noise=None added" in " ".join(lines)
    assert "main_linprobe.py --nb_classes exception default 1000 upstream, None here: as many as the data has" in lines
    (gradients,) = (line.split() for line in lines if line.startswith("norm_pix: gradients"))
    assert float(gradients[4]) <= 1e-5
    markdown = (tmp_path / "report.md").read_text()
    assert "| main\\_linprobe.py | --nb\\_classes | exception |" in markdown
    assert "| Numbers | kept |" in markdown


def test_what_cannot_be_run_is_not_checked_and_breaks_nothing(diff, tree):
    models = tree / "models_mae.py"
    models.write_text("raise ImportError('no container_abcs')\n" + models.read_text())
    code, out, err = diff(tree)
    assert (code, err) == (0, "")
    assert "not checked: upstream's MAE did not run: ImportError: no container_abcs" in out
    assert "mae_vit_large_patch16, mae_vit_huge_patch14, upstream: ImportError: no container_abcs" in " ".join(
        out.split()
    )
    assert out.endswith("everything upstream promises is kept, as far as it could be checked\n")


def test_a_broken_promise_is_exit_code_1(diff, tree, monkeypatch):
    monkeypatch.setattr(diff_upstream, "ask_upstream", lambda *_: Answer(errors={"import": "no time"}))
    models = tree / "models_vit.py"
    models.write_text(models.read_text().replace("global_pool=False", "global_pool=True"))
    code, out, err = diff(tree)
    assert code == 1
    breach = "models_vit.py: VisionTransformer.__init__ is changed: global_pool=True upstream, global_pool=False here"
    assert err == f"ERROR: upstream's promises are broken: {breach}\n"
    assert breach in " ".join(out.split())


BAD = {
    "no folder": (["{tmp}/nowhere"], "{tmp}/nowhere is not a folder"),
    "no models": (["{tmp}"], "{tmp} has no models_mae.py"),
    "no interpreter": (["{tmp}/mae", "--python", "pyhton3"], "--python pyhton3 is not a program"),
    "no time": (["{tmp}/mae", "--timeout", "0"], "--timeout 0 must be above 0"),
    "no place": (["{tmp}/mae", "--markdown", "{tmp}/a/b.md"], "--markdown {tmp}/a/b.md: {tmp}/a is not a folder"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(program, tmp_path, tree, case):
    flags, expected = BAD[case]
    code, _, err = program(diff_upstream, *(flag.format(tmp=tmp_path) for flag in flags))
    assert code == 2
    assert err.startswith(f"ERROR: {expected.format(tmp=tmp_path)}")
    assert len(err.splitlines()) == 1


def test_text_and_markdown_say_the_same():
    section = Section("Title", "all is well.", ["A note."], [Table(["a", "b"], [["x_y", "1|2"]])], {"more": ["p", "q"]})
    section.broken.append("it is not")
    text, markdown = as_text("Top", [section]), as_markdown("Top", [section])
    assert text.splitlines()[-1] == "Title    BROKEN"
    for words in ("Promised: all is well.", "A note.", "broken: it is not", "more (2)", "p, q"):
        assert words in text
        assert words in markdown
    assert "x_y  1|2" in text
    assert "| x\\_y | 1\\|2 |" in markdown


# --- Files ---


def test_files_in_both_only_here_and_only_there(tree):
    shutil.copy(ROOT / "util" / "crop.py", tree / "util" / "crop.py")
    section = diff_upstream.files_section(tree)
    assert {"models_mae.py", "util/pos_embed.py", "main_pretrain.py"} <= set(section.lists["same"])
    assert {"main_finetune.py", "engine_finetune.py", "util/lr_decay.py"} <= set(section.lists["same"])
    assert "FINETUNE.md" in section.lists["only there"]
    assert "models_cmm.py" in section.lists["only here"]
    assert section.lists["byte for byte the same"] == ["util/crop.py"]
    assert section.broken == []
    (tree / "main_segment.py").write_text("")
    assert "main_segment.py is missing here" in diff_upstream.files_section(tree).broken


# --- Names and signatures ---


def test_a_file_that_python_cannot_read_is_reported(tree):
    for name in ("models_vit.py", "util/lars.py", "main_pretrain.py"):
        (tree / name).write_text("def f(:\n")
    names = diff_upstream.names_section(tree, ["models_mae.py", "models_vit.py", "util/lars.py"])
    assert [phrase.split(":")[0] for phrase in names.unchecked] == ["models_vit.py could not be read"]
    assert "util/lars.py could not be read: SyntaxError" in names.notes[-1]
    assert names.tables[0].rows[0][:3] == ["models_mae.py", "yes", "13"]
    flags = diff_upstream.flags_section(tree, ["main_pretrain.py"], ["main_pretrain.py"])
    assert [phrase.split(": ")[:2] for phrase in flags.unchecked] == [
        ["main_pretrain.py could not be read", "SyntaxError"]
    ]


# --- Flags ---


def test_defaults_of_this_projects_programs(tree):
    """Against upstream's, as they are, and against others."""
    programs = ["main_finetune.py", "main_linprobe.py", "main_pretrain.py"]
    section = diff_upstream.flags_section(tree, programs, programs)
    assert (section.broken, section.unchecked) == ([], [])
    differing = {(row[0], row[1]): row[2] for row in section.tables[1].rows}
    expected = {("main_pretrain.py", "--input_size"): "extended"}
    expected |= {(program, "--data_path"): "exception" for program in programs}
    expected |= {(program, flag): "exception" for program in programs[:2] for flag in ("--model", "--nb_classes")}
    expected |= {("main_finetune.py", "--input_size"): "exception", ("main_finetune.py", "--cutmix_minmax"): "extended"}
    assert {key: status for key, status in differing.items() if key[1] != "--device"} == expected

    text = (tree / "main_pretrain.py").read_text()
    text = text.replace("default=0.75", "default=0.5").replace("'--dist_url'", "'--address'")
    text = text.replace("default=400", "default=EPOCHS")
    (tree / "main_pretrain.py").write_text(text)
    section = diff_upstream.flags_section(tree, programs, programs)
    assert section.broken == [
        "main_pretrain.py: --address is missing here",
        "main_pretrain.py: --mask_ratio is changed: default 0.5 upstream, 0.75 here",
    ]
    assert section.unchecked == ["main_pretrain.py: the default of --epochs upstream is no literal: EPOCHS"]


def test_an_exception_covers_one_default_and_no_other(tmp_path):
    (tmp_path / "main.py").write_text("def get_args_parser():\n    parser.add_argument('--nb_classes', type=int)\n")
    (flag,) = read_flags(tmp_path / "main.py").values()
    assert diff_upstream.excepted("main_linprobe.py", flag) == "as many as the data has"
    assert diff_upstream.excepted("main_pretrain.py", flag) is None
    (tmp_path / "main.py").write_text("def get_args_parser():\n    parser.add_argument('--nb_classes', default=10)\n")
    (flag,) = read_flags(tmp_path / "main.py").values()
    assert diff_upstream.excepted("main_linprobe.py", flag) is None


# --- State dicts and numbers ---


def test_the_probe_finds_upstreams_figures(here, golden, upstream_shapes):
    """Run on this project, with upstream's weights."""
    assert here.errors == {}
    assert here.shapes == {name: upstream_shapes[name] for name in here.shapes}
    assert len(here.shapes) == 3
    upstream = {name: value.numpy() for name, value in golden.items() if name.startswith(("plain/", "norm_pix/"))}
    upstream = {name: value for name, value in upstream.items() if not name.endswith(("latent", "ids_restore"))}
    assert upstream.keys() == {name for name in here.arrays if not name.startswith("fresh/")}
    positions = {name: value for name, value in here.arrays.items() if name.startswith("fresh/")}
    section = numbers_section(Answer(arrays=upstream | positions), here)
    assert section.verdict == "kept"
    assert [float(row[3]) > 0 for row in section.tables[0].rows if "gradients" in row[0]] == [True, True]


def test_a_difference_and_a_key_of_their_own_are_found(tree, inputs, here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this project's util must not take the place of theirs
    append(tree / "models_mae.py", SCALED)
    append(tree / "util" / "pos_embed.py", "import torch\ntorch.theirs = True\n")
    append(tree / "models_mae.py", "assert torch.theirs\n")
    theirs = ask_upstream(tree, inputs, sys.executable, PATIENCE)
    assert (theirs.errors, theirs.shims) == ({}, [])
    section = numbers_section(theirs, here)
    relative = {row[0]: float(row[3]) for row in section.tables[0].rows}
    assert relative["plain: prediction"] == pytest.approx(1e-3, rel=0.05)
    assert relative["plain: mask"] == relative["positions of a new model"] == 0
    assert {phrase.split(" differs")[0] for phrase in section.broken} == {
        f"{variant}: {quantity}"
        for variant in ("plain", "norm_pix")
        for quantity in ("loss", "prediction", "gradients")
    }
    section = shapes_section(theirs, here)
    assert section.broken == ["mae_vit_base_patch16: 1 keys missing, such as bonus"]
    assert section.tables[1].rows == [["mae_vit_base_patch16", "bonus", "missing", "[7]", "-"]]


def test_code_for_an_old_timm_runs_with_a_shim_and_that_is_said(tree, inputs, here):
    models = tree / "models_mae.py"
    models.write_text(OLD_NUMPY + models.read_text() + OLD_TIMM)
    theirs = ask_upstream(tree, inputs, sys.executable, PATIENCE)
    assert theirs.errors == {}
    section = shapes_section(theirs, here)
    shims = "with a shim (numpy.float is float, timm's Block is not given qk_scale=None)"
    assert f"{shims}, because as is: AttributeError: module 'numpy' has no attribute 'float'" in section.notes[0]
    assert section.verdict == numbers_section(theirs, here).verdict == "kept"


def test_a_new_timms_answer_to_old_code_is_known():
    with pytest.raises(TypeError) as refusal:
        Block(8, 2, qk_scale=None)
    assert any(phrase in str(refusal.value) for phrase in upstream_models.OLD_CODE)


def test_interpreters_that_do_not_answer(tree, inputs):
    silent = ask(tree, inputs, shutil.which("false"), PATIENCE)
    assert silent.prevented("numbers") == "exit code 1"
    append(tree / "models_mae.py", "import time\ntime.sleep(100)\n")
    assert ask(tree, inputs, sys.executable, 0.5).prevented("numbers") == "no answer within 0.5 seconds"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_equal(value):
    bad = np.array([1.0, value])
    assert upstream_models.difference(bad, bad) == (np.inf, np.inf)
    assert upstream_models.difference(np.zeros(2), np.zeros(3)) == (np.inf, np.inf)
    assert upstream_models.difference(np.array([1.0, -4.0]), np.array([1.0, -4.1])) == pytest.approx((0.1, 0.025))


def test_models_that_do_not_run_here_break_the_promise():
    failed = Answer(errors={"import": "ImportError: no timm"})
    assert numbers_section(Answer(), failed).broken == ["the MAE does not run here: ImportError: no timm"]
    assert len(shapes_section(Answer(), failed).broken) == 3
