"""--mean and --std: stored in the checkpoint and used by every program that loads it."""

import json
from argparse import Namespace

import pytest
import torch
from PIL import Image
from safetensors import safe_open

import main_finetune
import main_knn
import main_linprobe
import tools.export
from models_vit import load_mae
from util.checkpoint import load_checkpoint
from util.cli import UserError
from util.datasets import build_eval_transform, normalise, pixel_statistics
from util.evaluation.subject import open_subject
from util.plots.masks import as_rgb, draw_block
from util.plots.snapshot import as_input, load_snapshot

SMALL = ("--data_set", "shapes", "--shapes_images", 20, "--num_workers", 0, "--device", "cpu")
OWN = ("--mean", 0.2, 0.3, 0.4, "--std", 0.25)
MEAN, STD = [0.2, 0.3, 0.4], [0.25, 0.25, 0.25]


@pytest.fixture
def pretrained(cli, tmp_path):
    flags = ("--model", "mae_vit_micro_patch4", "--input_size", 16, "--batch_size", 10, "--epochs", 1)
    code, _, err = cli(*SMALL, *flags, *OWN, "--warmup_epochs", 0, "--output_dir", tmp_path / "run", "--vis_every", 1)
    assert code == 0, err
    return tmp_path / "run"


def kept(path) -> tuple[list[float], list[float]]:
    args = load_checkpoint(path)["args"]
    return args["mean"], args["std"]


def test_what_opens_a_checkpoint_follows_it(pretrained, program, tmp_path):
    path = pretrained / "checkpoint-0.pth"
    assert kept(path) == (MEAN, STD)
    flags = [*map(str, SMALL), "--finetune", str(path), "--output_dir", str(tmp_path / "out")]
    subject = open_subject(main_knn.get_args_parser().parse_args(flags))
    assert (subject.args.mean, subject.args.std) == (MEAN, STD)
    given = open_subject(main_knn.get_args_parser().parse_args([*flags, "--mean", "0.5"]))
    assert (given.args.mean, given.args.std) == ([0.5] * 3, STD)
    assert given.settings() != subject.settings()

    black = Image.new("RGB", (16, 16))
    snapshot = load_snapshot(path, "run")
    imgs = as_input([black], snapshot, torch.device("cpu"))
    assert imgs[0, :, 0, 0].tolist() == pytest.approx([-0.8, -1.2, -1.6])
    assert draw_block(snapshot, imgs).images.max() == pytest.approx(0, abs=1e-6)

    tuned = tmp_path / "tuned"
    flags = (*SMALL, "--finetune", path, "--epochs", 1, "--warmup_epochs", 0, "--batch_size", 4, "--output_dir", tuned)
    assert program(main_finetune, *flags, "--global_pool")[0] == 0
    assert kept(tuned / "checkpoint-0.pth") == (MEAN, STD)

    exported = tmp_path / "weights.safetensors"
    assert program(tools.export, path, "--format", "safetensors", "--output", exported)[0] == 0
    with safe_open(exported, "pt") as file:
        assert json.loads(file.metadata()["mean"]) == MEAN
    assert kept(exported) == (MEAN, STD)
    assert load_mae(exported) is not None


def test_training_and_probing_use_them(pretrained, program, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("engine_probe.normalise", lambda imgs, *given: seen.append(given) or normalise(imgs, *given))
    flags = (*SMALL, "--finetune", pretrained, "--epochs", 1, "--warmup_epochs", 0, "--batch_size", 10)
    assert program(main_linprobe, *flags, "--output_dir", tmp_path / "probe")[0] == 0
    assert set(map(repr, seen)) == {repr((MEAN, STD))}


def test_pixels_come_back():
    grey = torch.full((1, 3, 4, 4), 51, dtype=torch.uint8)
    own = pixel_statistics(3, MEAN, STD[:1])
    assert normalise(grey, *own)[0, :, 0, 0].tolist() == pytest.approx([0, -0.4, -0.8], abs=1e-6)
    assert torch.allclose(as_rgb(normalise(grey, *own), *own), torch.tensor(0.2))
    args = Namespace(input_size=[4, 4], in_chans=3, mean=own[0], std=own[1])
    image = build_eval_transform(args)(Image.new("RGB", (4, 4), (51, 51, 51)))
    assert torch.allclose(image, normalise(grey, *own)[0], atol=1e-6)
    assert pixel_statistics(4)[0][3] == 0.5


@pytest.mark.parametrize("flags", ["--mean 123.7", "--std 0", "--std nan", "--mean 0.1 0.2"])
def test_what_is_no_statistic_of_pixels_is_refused(cli, flags):
    code, _, err = cli(*SMALL, *flags.split(), "--output_dir", "")
    assert code == 2
    assert flags.split()[0] in err


def test_a_wrong_number_of_channels_is_named():
    with pytest.raises(UserError, match="--std takes one number, or one for each of 1 channels, not 3"):
        pixel_statistics(1, None, STD)
