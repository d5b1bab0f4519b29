"""Mask metrics, on masks whose values are known by construction, and the program that reports them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import SMALL

import main_masks
import main_pretrain
from masking import mask_health
from models_mae import mae_vit_micro_patch4
from util.evaluation.features import file_hash
from util.evaluation.forensics import difficulty, edge_contrast, edge_scores, hidden_error, mirror_correlation, verdicts

GOOD = {"target": 0.25, "visible": 0.25, "distinct": 1.0, "place": 0.01, "unseen": 0.0}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return mae_vit_micro_patch4(img_size=16).eval()


@pytest.fixture(scope="module")
def imgs():
    return torch.randn(300, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def random_mask(n: int, seed: int = 0) -> torch.Tensor:
    noise = torch.rand(n, 16, generator=torch.Generator().manual_seed(seed))
    return (noise.argsort(dim=1).argsort(dim=1) >= 4).float()


def test_hidden_error_is_the_models_own_loss(model, imgs):
    mask = random_mask(300)
    with torch.no_grad():
        loss, _, _ = model(imgs, visible=mask == 0)
    assert hidden_error(model, imgs, mask == 0) == pytest.approx(loss.item(), rel=1e-5)


def test_random_masks_are_as_hard_as_random_masks(model, imgs):
    noise = torch.rand(300, 16, generator=torch.Generator().manual_seed(7))
    assert difficulty(model, imgs, random_mask(300), noise) == pytest.approx(1, abs=0.02)
    assert difficulty(model, imgs, torch.zeros(300, 16), noise) == 0, "nothing is hidden"


def test_edges_are_found_where_they_are():
    img = torch.zeros(1, 3, 16, 16)
    img[..., 9:] = 2.0  # a vertical edge inside the third column of patches
    scores = edge_scores(img, 4).view(4, 4)
    assert (scores[:, 2] > 1).all()
    assert (scores[:, [0, 1, 3]] < 0).all()
    mask = torch.zeros(1, 16).view(4, 4)
    mask[:, 2] = 1
    assert edge_contrast(scores.view(1, 16), mask.view(1, 16)) > 1
    assert edge_contrast(scores.view(1, 16), 1 - mask.view(1, 16)) < -1


def test_mirror_correlation_tells_content_from_position():
    values = torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    turned = values.view(-1, 4, 4).flip(-1).flatten(1)
    assert mirror_correlation(values, turned, (4, 4)) == pytest.approx(1)  # the mirrored image got the mirrored values
    assert mirror_correlation(values, values, (4, 4)).abs() < 0.15  # it got the same values


def test_one_mask_for_all_is_all_position():
    mask = torch.ones(100, 16)
    mask[:, :4] = 0
    health = mask_health(mask)
    assert health["place"] == pytest.approx(1)
    assert health["unseen"] == 0.75
    assert mask_health(random_mask(2000))["place"] < 0.01


@pytest.mark.parametrize(
    ("change", "weight", "word", "flag"),
    [
        ({"visible": 0.31}, None, "misses the target of 0.25", "--lambda_kl"),
        ({"distinct": 0.1}, None, "share masks", "--lambda_div"),
        ({"place": 0.4}, None, "depend on position", "--lambda_pos"),
        ({"unseen": 0.4}, None, "never shown", "--lambda_pos"),
        ({"judge": 0.98}, 0.8, "hardly easier", "longer"),
        ({"judge": 1.02}, -0.25, "hardly harder", "--lambda_cl_end"),
    ],
)
def test_verdicts_name_what_is_wrong_and_flags_only_where_there_are_any(change, weight, word, flag):
    assert verdicts(GOOD, 100, weight, -0.25, "curriculum") == []
    (sentence,) = verdicts(GOOD | change, 100, weight, -0.25, "curriculum")
    assert word in sentence
    assert flag in sentence
    (sentence,) = verdicts(GOOD | change, 100, weight, -0.25, "block")
    assert word in sentence
    assert flag not in sentence


def test_an_adversary_is_expected_at_the_end_alone():
    assert verdicts(GOOD | {"judge": 1.0}, 100, -0.1, -1.0, "predictive") == []
    assert verdicts(GOOD | {"judge": 1.0}, 100, -0.1, -0.1, "curriculum")


@pytest.mark.parametrize("number", [3, 4, 8, 1000])
def test_random_masks_are_well_however_few(number):
    health = {name: value.item() for name, value in mask_health(random_mask(number)).items()}
    assert not [each for each in verdicts(health | {"target": 0.25}, number) if "unseen" in each]
    many = [mask_health(random_mask(number, seed))["place"].item() for seed in range(200)]
    assert np.mean(many) < 0.4 / number  # unadjusted, 1 / number; clamped at 0, so not quite 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for masking in ("random", "predictive"):
        flags = ("--masking", masking, "--save_every", "1", "--output_dir", str(folder / masking))
        main_pretrain.main(main_pretrain.get_args_parser().parse_args([*SMALL, *flags]))
    return folder


def test_runs_are_measured_over_their_checkpoints(runs, program, tmp_path):
    data = ("--data_set", "shapes", "--shapes_images", 48, "--num_images", 9)
    where = (runs / "predictive", runs / "random", "--judge", runs / "random", "--output_dir", tmp_path)
    code, out, err = program(main_masks, *where, *data)
    assert (code, err) == (0, "")
    found = json.loads((tmp_path / "masks.json").read_text())
    assert [(each["run"], each["epoch"]) for each in found] == [
        ("predictive", 1),
        ("predictive", 2),
        ("random", 1),
        ("random", 2),
    ]
    assert found[1]["lambda_cl"] == pytest.approx(-1)
    assert found[2]["lambda_cl"] is None
    assert all(each["metrics"]["visible"] == 0.25 for each in found)
    assert found[3]["metrics"]["own"] == pytest.approx(found[3]["metrics"]["judge"])  # the judge is the run itself
    assert Image.open(tmp_path / "masks.png").size[0] > 500
    assert "verdict" in out


def test_each_run_is_measured_on_its_own_images(runs, program, tmp_path):
    """Unless flags name others; a flag alone changes only its part of the run's data."""
    flags = ("--data_set", "shapes", "--shapes_images", "24", "--epochs", "1", "--output_dir", str(tmp_path / "few"))
    main_pretrain.main(main_pretrain.get_args_parser().parse_args([*SMALL, *flags, "--masking", "random"]))

    def own(*words):
        assert program(main_masks, *words, "--moments", 1, "--output_dir", tmp_path / "out")[0] == 0
        return [each["metrics"]["own"] for each in json.loads((tmp_path / "out" / "masks.json").read_text())]

    first, second = own(runs / "random"), own(tmp_path / "few")
    assert own(runs / "random", tmp_path / "few") == [*first, *second]
    assert own(runs / "random", "--shapes_images", 24) != first


def test_masks_from_elsewhere(runs, program, tmp_path):
    for index in range(4):
        Image.fromarray(np.full((20, 20, 3), 60 * index, np.uint8)).save(tmp_path / f"{index}.png")
    mask = random_mask(4).numpy().reshape(4, 4, 4)
    np.savez(tmp_path / "mine.npz", images=np.array([f"{index}.png" for index in range(4)]), mask=mask)
    where = ("--judge", runs / "random", "--output_dir", tmp_path / "out")
    code, _, err = program(main_masks, tmp_path / "mine.npz", *where)
    assert (code, err) == (0, "")
    (found,) = json.loads((tmp_path / "out" / "masks.json").read_text())
    assert found["metrics"]["visible"] == 0.25
    assert found["metrics"]["judge"] > 0
    np.savez(tmp_path / "inverse.npz", images=np.array([f"{index}.png" for index in range(4)]), mask=1 - mask)
    assert program(main_masks, tmp_path / "mine.npz", tmp_path / "inverse.npz", *where)[0] == 0
    both = json.loads((tmp_path / "out" / "masks.json").read_text())
    assert [(each["run"], each["metrics"]["visible"]) for each in both] == [("mine", 0.25), ("inverse", 0.75)]

    np.savez(tmp_path / "bad.npz", images=np.array(["0.png"]), mask=mask)
    code, _, err = program(main_masks, tmp_path / "bad.npz", *where)
    assert (code, "bad.npz" in err) == (2, True)
    assert found["sha256"] == file_hash(tmp_path / "mine.npz")
    for changed in ({"images": np.arange(4)}, {"mask": np.array(1.0)}, {"mask": mask.astype(complex)}, {"mask": None}):
        arrays = {"images": np.array(["0.png"] * 4), "mask": mask} | changed
        np.savez(tmp_path / "odd.npz", **{name: value for name, value in arrays.items() if value is not None})
        code, _, err = program(main_masks, tmp_path / "odd.npz", *where)
        assert (code, "odd.npz" in err, len(err.splitlines())) == (2, True, 1)
    np.savez(tmp_path / "coarse.npz", images=np.array(["0.png"] * 4), mask=mask[:, :2, :2])
    code, _, err = program(main_masks, tmp_path / "coarse.npz", *where)
    assert (code, f"has masks of 4 patches, but images of --judge {runs / 'random'} have 16" in err) == (2, True)
    np.savez(tmp_path / "lost.npz", images=np.array(["x.png"] * 4), mask=mask)
    code, _, err = program(main_masks, tmp_path / "lost.npz", *where)
    assert (code, "x.png" in err) == (2, True)


def test_the_judge_must_know_random_masks_alone(runs, program, tmp_path):
    code, _, err = program(main_masks, runs / "random", "--judge", runs / "predictive", "--data_set", "shapes")
    assert (code, "--masking random" in err) == (2, True)
    code, _, err = program(main_masks, tmp_path / "nowhere", "--judge", runs / "random")
    assert (code, "nowhere" in err) == (2, True)
