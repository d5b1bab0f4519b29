"""What a checkpoint holds is compared with the run before any of it is taken: torch's fused AdamW, for one, reads
moments of a wrong shape beyond their end."""

import math
from argparse import Namespace

import pytest
import torch
from torch import nn

from util.checkpoint import load_checkpoint, save_checkpoint, training_checkpoint
from util.cli import UserError
from util.misc import NativeScalerWithGradNormCount
from util.training.resume import TrainingState, continue_from

ARGS = Namespace(epochs=6, accum_iter=1, allow_changes=False, output_dir="", resume="x.pth")
STEPS = 4  # of an epoch
LOG = {"iterations": STEPS, "interval": {}, "averages": {"loss": (2.0, 2)}}


@pytest.fixture
def state():
    """After a step."""
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    groups = [{"params": [p for p in network.parameters() if p.ndim == axes]} for axes in (1, 2)]
    optimizer = torch.optim.AdamW(groups, lr=0.1, fused=True)
    network(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return TrainingState(network, optimizer, NativeScalerWithGradNormCount("cpu", enabled=False))


@pytest.fixture
def resumed(state, tmp_path):
    """Resumes a checkpoint of `state` with some of its entries changed, through a file."""

    def run(**changes):
        whole = training_checkpoint(state.state_dict(), epoch=1, step=9, log=LOG, moment={}, args=ARGS)
        save_checkpoint(tmp_path / "x.pth", {**whole, **changes})
        return continue_from(state, load_checkpoint(tmp_path / "x.pth", mapped=True), "x.pth", STEPS, ARGS)

    return run


def test_a_whole_one_resumes(resumed):
    start = resumed()
    assert (start.epoch, start.steps_done) == (2, 1)


MOMENTS = {
    "longer": ("exp_avg", torch.ones(10_000)),
    "empty": ("exp_avg_sq", torch.ones(0)),
    "of another shape": ("exp_avg", torch.ones(2, 2)),
    "whole numbers": ("exp_avg", torch.ones(5, dtype=torch.int64)),
    "no tensor": ("exp_avg_sq", [1.0] * 5),
    "not a number": ("exp_avg", torch.full((5,), math.nan)),
    "negative": ("exp_avg_sq", -torch.ones(5)),
    "sparse": ("exp_avg", torch.ones(5).to_sparse()),
    "steps of a wrong shape": ("step", torch.ones(3)),
    "no steps": ("step", "x"),
    "negative steps": ("step", torch.tensor(-1.0)),
    "complex steps": ("step", torch.tensor(1j)),
    "unknown": ("max_exp_avg_sq", torch.ones(5)),
}


@pytest.mark.parametrize("case", MOMENTS)
def test_moments_that_do_not_fit_their_parameter_are_refused(state, resumed, case):
    name, value = MOMENTS[case]
    whole, before = state.optimizer.state_dict(), {p: dict(kept) for p, kept in state.optimizer.state.items()}
    with pytest.raises(
        UserError, match=r"x.pth is damaged: its optimizer state of parameter 0, \(5,\), does not fit it"
    ):
        resumed(optimizer={**whole, "state": {**whole["state"], 0: {**whole["state"][0], name: value}}})
    assert all(state.optimizer.state[p] == kept for p, kept in before.items())


def test_what_else_of_an_optimizer_is_refused(state, resumed):
    whole = state.optimizer.state_dict()
    lacking = {name: value for name, value in whole["state"][0].items() if name != "exp_avg"}
    with pytest.raises(UserError, match="does not fit"):
        resumed(optimizer={**whole, "state": {**whole["state"], 0: lacking}})
    with pytest.raises(UserError, match="lost its optimizer state"):
        resumed(optimizer={**whole, "state": {}})
    skipped = vars(ARGS) | {"start_epoch": 1}  # steps that nobody made
    assert resumed(optimizer={**whole, "state": {}}, args=skipped).epoch == 2
    with pytest.raises(UserError, match="other parameters than this model's"):
        resumed(optimizer={"state": {}, "param_groups": [{"params": [0]}]}, step=0, epoch=-1, log=None)


def test_the_settings_of_parameter_groups_are_the_runs_own(state, resumed):
    whole = state.optimizer.state_dict()
    junk = [{**group, "lr": "x", "betas": None, "fused": "x"} for group in whole["param_groups"]]
    resumed(optimizer={**whole, "param_groups": junk})
    assert state.optimizer.state_dict()["param_groups"] == whole["param_groups"]


def test_under_fp16_all_steps_so_far_may_have_been_left_out(state, resumed):
    scaler = {"scale": 2.0**13, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    nothing = {**state.optimizer.state_dict(), "state": {}}
    beginning = dict(epoch=-1, step=3, log=LOG)
    assert resumed(optimizer=nothing, scaler={**scaler, "_growth_tracker": 0}, **beginning).steps_done == 3


@pytest.mark.parametrize("step", [7, 13, 10**6])
def test_a_step_outside_its_epoch_is_refused(resumed, step):
    with pytest.raises(UserError, match=f"x.pth is damaged: step {step} is not in epoch 3"):
        resumed(step=step)


def test_an_entry_that_is_not_there_is_named(state):
    whole = training_checkpoint(state.state_dict(), epoch=1, step=9, log=LOG, moment={}, args=ARGS)
    for name, expected in {"epoch": "to resume from", "step": "to resume from", "scaler": "another --masking"}.items():
        with pytest.raises(UserError, match=f"x.pth has no '{name}'.*{expected}"):
            continue_from(state, {key: whole[key] for key in whole if key != name}, "x.pth", STEPS, ARGS)
