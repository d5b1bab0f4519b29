"""A masking strategy in a user's own file, through every program that meets masks."""

import pytest
import torch
from small_runs import SHAPES, SMALL, checkpoint, log_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main_visualize
import masking
from tools import export
from util.plots.snapshot import load_snapshot

FILE = '''
import torch
from masking import constant, register


@register
@constant
def checkerboard(ask):
    """The squares of one colour stay visible; which one is drawn for each image."""
    rows, columns = torch.meshgrid(*map(torch.arange, ask.grid), indexing="ij")
    return (rows + columns).flatten() % 2 == (ask.uniform(1) < 0.5).long()
'''


@pytest.fixture
def run(cli, tmp_path, monkeypatch):
    """The folder of a run with such masks."""
    monkeypatch.setattr(masking, "STRATEGIES", dict(masking.STRATEGIES))
    (tmp_path / "mine.py").write_text(FILE)
    own = ("--masking", tmp_path / "mine.py:checkerboard", "--mask_ratio", 0.5)
    code, out, err = cli(*SMALL, *own, "--output_dir", tmp_path / "run")
    assert (code, err) == (0, "")
    assert f"with {tmp_path}/mine.py:checkerboard masks" in out
    return tmp_path / "run"


def test_a_strategy_of_ones_own_works_everywhere(run, program, tmp_path):
    saved, line = checkpoint(run), log_lines(run)[-1]
    assert saved["moment"] == {"mask_ratio": 0.5}, "it does not follow the curriculum"
    assert "cmm" not in saved
    assert (line["train_mask_visible"], line["train_mask_hamming"]) == (0.5, pytest.approx(0.5, abs=0.1))
    assert line["mask_error_vs_random"] > 0
    events = EventAccumulator(str(run))
    events.Reload()
    assert events.Tags()["images"], "pictures of its masks"

    snapshot = load_snapshot(run / "checkpoint-1.pth", "mine")
    assert "mine.py:checkerboard masks" in snapshot.title
    mask = snapshot.mask(torch.randn(12, 3, 16, 16)).mask.view(12, 4, 4)
    white = torch.tensor([[1, 0] * 2, [0, 1] * 2] * 2).float()
    assert all(torch.equal(each, white) or torch.equal(each, 1 - white) for each in mask)
    assert 0 < mask[:, 0, 0].sum() < 12

    code, _, err = program(main_visualize, run, *SHAPES, "--output_dir", tmp_path / "pictures")
    assert (code, err) == (0, "")
    assert (tmp_path / "pictures" / "masks.png").exists()
    code, _, err = program(export, run, "--format", "safetensors", "--output", tmp_path / "mine.safetensors")
    assert (code, err) == (0, "")
