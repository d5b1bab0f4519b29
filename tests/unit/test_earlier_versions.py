"""What earlier versions wrote still loads: a checkpoint from the middle of an epoch, and its log."""

from argparse import Namespace

import pytest
import torch
from conftest import DATA
from small_runs import assert_identical

from main_pretrain import get_args_parser, with_optimizer
from masking import Masking, MaskSettings
from models_mae import _mae
from util.checkpoint import lambda_cl_of, load_checkpoint
from util.training.progress import read_log
from util.training.resume import TrainingState, continue_from, differences

CHECKPOINT = DATA / "before" / "checkpoint.pth"  # within the third of three epochs of four updates, after the tenth


@pytest.fixture
def checkpoint():
    return load_checkpoint(CHECKPOINT)


@pytest.fixture
def state(checkpoint):
    """Fresh networks that fit the checkpoint, with today's optimizers."""
    args = Namespace(**checkpoint["args"])
    model = _mae(4, (16, 1, 2), (8, 1, 1), img_size=8)
    module = Masking(MaskSettings.of(args), model.patch_embed.grid_size).learned.build(model)
    cpu = torch.device("cpu")
    return TrainingState(*with_optimizer(model, args.lr, args, cpu), *with_optimizer(module, args.cmm_lr, args, cpu))


def test_weights_load(checkpoint, state):
    state.load(checkpoint, "checkpoint.pth")
    assert_identical(dict(state.model.state_dict()), dict(checkpoint["model"]))
    assert_identical(dict(state.cmm.state_dict()), dict(checkpoint["cmm"]))


@pytest.mark.parametrize(("network", "optimizer"), [("model", "optimizer"), ("cmm", "optimizer_cmm")])
def test_optimizer_state_finds_its_parameters(checkpoint, state, network, optimizer):
    """They were numbered otherwise when [CLS] and mask tokens had no weight decay."""
    state.load(checkpoint, "checkpoint.pth")
    named = [(name, p) for name, p in getattr(state, network).named_parameters() if p.requires_grad]
    theirs = sorted(named, key=lambda entry: entry[1].ndim > 1 and entry[0] not in ("cls_token", "mask_token"))
    before, now = checkpoint[optimizer]["state"], getattr(state, optimizer)
    assert len(before) == len(theirs)
    for number, (name, p) in enumerate(theirs):
        assert now.state[p]["exp_avg"].shape == p.shape, name
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(now.state[p][moment], before[number][moment]), name
        assert now.state[p]["step"] == 10
    decaying = {id(p) for group in now.param_groups if group["weight_decay"] for p in group["params"]}
    assert {name for name, p in named if id(p) in decaying} == {name for name, p in named if p.ndim > 1}


def test_the_next_update_moves_each_parameter_by_its_own_moments(checkpoint, state):
    """A wrong order of equally shaped parameters would not show in shapes."""
    state.load(checkpoint, "checkpoint.pth")
    named = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    for p in named.values():
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in named.items()}
    state.optimizer.step()
    settings = state.optimizer.param_groups[0]
    for name, p in named.items():
        moments = state.optimizer.state[p]
        first, second = moments["exp_avg"] / (1 - 0.9**11), moments["exp_avg_sq"] / (1 - 0.95**11)
        decay = 0.05 if p.ndim > 1 else 0.0
        expected = before[name] * (1 - settings["lr"] * decay) - settings["lr"] * first / (second.sqrt() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-7)


def test_the_run_resumes_in_the_middle_of_its_epoch(checkpoint, state, tmp_path):
    args = Namespace(**{**checkpoint["args"], "output_dir": str(tmp_path), "resume": "auto"})
    start = continue_from(state, checkpoint, "checkpoint.pth", 4, args)
    assert (start.epoch, start.steps_done) == (2, 2)
    assert start.log_state == checkpoint["log"]


def test_flags_that_it_does_not_know_are_no_difference(checkpoint):
    today = vars(get_args_parser().parse_args([]))
    known = {name: value for name, value in checkpoint["args"].items() if name in today}
    assert not differences(checkpoint["args"], {**today, **known})
    settings = MaskSettings.of(checkpoint["args"])
    assert (settings.masking, settings.soft, settings.lambda_pos) == ("curriculum", "tokens", 0.0)


def test_lambda_cl_is_that_of_the_schedule(checkpoint):
    assert lambda_cl_of(checkpoint) == pytest.approx(1 - 1.1 * 10 / 12)
    assert lambda_cl_of({**checkpoint, "log": None, "epoch": 1, "step": 8}) == pytest.approx(1 - 1.1 * 8 / 12)
    checkpoint["args"]["no_curriculum"] = True
    assert lambda_cl_of(checkpoint) == 0
    del checkpoint["cmm"]
    assert lambda_cl_of(checkpoint) is None, "random masks follow no curriculum"


def test_the_log_reads():
    lines = read_log(DATA / "before" / "log.txt")
    assert lines == read_log(CHECKPOINT) == read_log(DATA / "before")
    assert [line["epoch"] for line in lines] == [0, 1]
    # The mean over four updates of twelve, each
    expected = [sum(1 - 1.1 * step / 12 for step in steps) / 4 for steps in (range(4), range(4, 8))]
    assert [line["train_lambda_cl"] for line in lines] == pytest.approx(expected)
