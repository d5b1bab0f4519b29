"""The checks between epochs describe the encoder, cost little, and do not affect training."""

import random

import pytest
import torch
from PIL import Image
from small_runs import SMALL

from main_pretrain import get_args_parser
from masking import Masking, MaskSettings
from models_mae import mae_vit_micro_patch4
from util.arguments import settle_shared_args
from util.cli import logger
from util.training.monitor import Monitor, effective_rank


def monitor(*flags):
    args = get_args_parser().parse_args([*SMALL, "--output_dir", "", *map(str, flags)])
    settle_shared_args(args)
    return Monitor(args, torch.device("cpu"))


def after_epoch(checks, model, epoch=0):
    return checks.after_epoch(epoch, model, Masking(MaskSettings(), (4, 4)), None)


def test_the_effective_rank_is_that_of_rankme():
    drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    directions = torch.linalg.qr(drawn).Q
    assert effective_rank(directions[:, :5] @ directions[:5]) == pytest.approx(5), "five equal singular values"
    assert effective_rank(torch.ones(64, 8)) == pytest.approx(1), "one feature for all"
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(4 / 3**0.75), "exp of the entropy"
    assert effective_rank(torch.zeros(4, 8)) == pytest.approx(1), "nothing at all"


def test_a_collapse_is_warned_of_once(monkeypatch):
    warnings = []
    monkeypatch.setattr(logger, "warning", lambda message, *_: warnings.append(message))
    checks, model = monitor("--vis_every", 0), mae_vit_micro_patch4(img_size=16)
    healthy = after_epoch(checks, model)
    assert healthy.keys() == {"encoder/rank", "encoder/norm"}, "without --vis_every, too"
    assert not warnings
    torch.nn.init.zeros_(model.norm.weight)  # all features become the bias
    torch.nn.init.ones_(model.norm.bias)
    collapsed = [after_epoch(checks, model, epoch) for epoch in (1, 2)]
    assert collapsed[0]["encoder/rank"] == pytest.approx(1, abs=1e-3)
    assert [message.partition(":")[0] for message in warnings] == ["the encoder is collapsing"]
    model.norm.bias.data *= float("nan")
    assert after_epoch(checks, model) == {}, "the saver refuses such weights"


def test_checks_leave_the_training_as_it_is():
    checks, model = monitor("--knn_every", 1), mae_vit_micro_patch4(img_size=16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    first = after_epoch(checks, model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert after_epoch(checks, model) == first


@pytest.mark.parametrize(
    ("epochs", "every"),
    [
        (2, 0),  # a single check would cost more than an epoch
        (100, 100),  # one of 57 images: 2 % of 4,800 trained on are 96
        (250, 63),  # four
        (2000, 200),  # no more than ten
    ],
)
def test_neighbours_are_checked_by_default_where_it_costs_little(epochs, every):
    checks = monitor("--epochs", epochs)
    assert checks.knn_every == every
    due = sum(checks.due(epoch, every) for epoch in range(epochs))
    checked = sum(len(indices) for _, indices in checks.knn_data)
    assert due <= min(10, 0.02 * epochs * 48 / checked)
    assert monitor("--epochs", epochs, "--knn_every", 0).knn_every == 0


def test_without_labels_neighbours_are_not_checked(tmp_path):
    for name in "abcd":
        Image.new("RGB", (20, 20)).save(tmp_path / f"{name}.png")
    assert monitor("--data_set", "folder", "--data_path", tmp_path, "--epochs", 10**6).knn_every == 0
