"""Judging masks by a stranger: figures that follow from how the masks were made."""

import re

import pytest
import torch
from small_runs import SMALL

from experiments import judge_masks
from masking import Masking, MaskSettings
from models_mae import mae_vit_micro_patch4
from util.plots.snapshot import Masked, Snapshot


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mae_vit_micro_patch4(img_size=16).eval()


@pytest.fixture(scope="module")
def imgs():
    return torch.randn(300, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Fixed(Snapshot):
    """A run that gives every image the same mask."""

    def mask(self, imgs, seed=0):
        mask = torch.ones(len(imgs), 16)
        mask[:, :4] = 0  # the first row of patches is visible
        return Masked(None, mask, None)


def test_random_masks_have_their_ratio_and_no_place():
    visible = judge_masks.random_visible((2000, 16), 0.75, seed=0)
    assert (visible.sum(dim=1) == 4).all()
    assert visible.float().mean(dim=0).sub(0.25).abs().max() < 0.05
    assert torch.equal(visible, judge_masks.random_visible((2000, 16), 0.75, seed=0))


def test_hidden_error_is_the_models_own_loss(model, imgs):
    visible = judge_masks.random_visible((300, 16), 0.75, seed=1)
    with torch.no_grad():
        loss, _, _ = model(imgs, visible=visible)
    assert judge_masks.hidden_error(model, imgs, visible) == pytest.approx(loss.item(), rel=1e-5)


def test_edge_energy_of_a_step(model):
    img = torch.zeros(1, 3, 16, 16)
    img[..., 8:] = 2.0  # a vertical edge at the left border of the third column of patches
    energy = judge_masks.edge_energy(img, model).view(4, 4)
    assert torch.allclose(energy[:, 2], torch.tensor(2.0**2 / 4))  # one of four columns of pixels
    assert energy.sum() == energy[:, 2].sum()


def test_figures_of_random_masks_and_of_one_mask_for_all(model, imgs):
    settings = {"mask_ratio": 0.75}
    masking = Masking(MaskSettings(**settings), model.patch_embed.grid_size)
    random = Snapshot("random", model, masking, settings, 0, None)
    figures = dict(zip(judge_masks.COLUMNS, judge_masks.judge(random, model, imgs, 0), strict=True))
    assert figures["judge"] == figures["own"] == pytest.approx(1, abs=0.02)  # noise looks the same anywhere
    assert figures["visible"] == 0.25
    assert figures["by place"] < 0.02
    fixed = Fixed("fixed", model, masking, settings, 0, None)
    figures = dict(zip(judge_masks.COLUMNS, judge_masks.judge(fixed, model, imgs, 0), strict=True))
    assert (figures["visible"], figures["unseen"], figures["by place"]) == (0.25, 0.75, pytest.approx(1))
    assert figures["mirrored"] == 0  # a whole row is its own mirror image


def test_runs_are_judged_side_by_side(cli, program, tmp_path):
    for masking in ("random", "curriculum"):
        code, out, err = cli(*SMALL, "--masking", masking, "--save_every", 1, "--output_dir", tmp_path / masking)
        assert code == 0, out + err
    data = ("--data_set", "shapes", "--shapes_images", 48, "--num_images", 9)
    runs = (tmp_path / "curriculum", tmp_path / "random")
    code, out, err = program(judge_masks, *runs, "--judge", tmp_path / "random", "--moments", 2, *data)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[2:]]
    assert [row[:3] for row in rows] == [
        ["curriculum", "1", "+0.45"],
        ["curriculum", "2", "-0.10"],
        ["random", "1", "random"],
        ["random", "2", "random"],
    ]
    assert all(re.fullmatch(r"-?\d+\.\d{3}", cell) for row in rows for cell in row[3:])

    code, _, err = program(judge_masks, *runs, "--judge", tmp_path / "curriculum", *data)
    assert (code, "trained with a masking module" in err) == (2, True)
    code, _, err = program(judge_masks, tmp_path / "nowhere", "--judge", tmp_path / "random", *data)
    assert code == 2
