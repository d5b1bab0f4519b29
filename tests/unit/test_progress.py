import logging
import math

import pytest
import torch

from util.cli import Progress, TrainingDiverged
from util.training.progress import Averages, LossGuard, MetricBuffer


def test_buffer_keeps_steps_and_names_apart():
    buffer = MetricBuffer()
    buffer.add(3, {"a": torch.tensor(1.0)})
    buffer.add(4, {"a": torch.tensor(2.0), "b": torch.tensor(5)})
    assert buffer.fetch() == [(3, {"a": 1.0}), (4, {"a": 2.0, "b": 5.0})]
    assert buffer.fetch() == []


def test_averages_count_each_name_for_itself():
    averages = Averages()
    averages.update({"a": 1.0, "b": 4.0})
    averages.update({"a": 2.0})
    assert averages.means() == {"a": 1.5, "b": 4.0}


def test_guard_stops_at_the_first_loss_that_is_not_finite():
    guard = LossGuard(skip=False)
    assert guard.check(7, {"loss": 0.5, "cmm/loss": 1.25})
    with pytest.raises(TrainingDiverged, match=r"step 8 \(loss nan\).*loss 0.5, cmm/loss 1.25.*--blr"):
        guard.check(8, {"loss": math.nan})


def test_guard_counts_skipped_steps_and_gives_up_on_a_lost_run():
    guard = LossGuard(skip=True)
    for step in range(51):
        assert guard.check(step, {"loss": math.inf if step % 2 else 1.0}) == (step % 2 == 0)
    assert guard.skipped == 25
    for step in range(LossGuard.MAX_SKIPPED_IN_A_ROW):
        guard.check(step, {"loss": math.nan})
    with pytest.raises(TrainingDiverged):
        guard.check(1000, {"loss": math.nan})


def test_plain_lines_where_output_is_not_a_terminal(caplog):
    logger = logging.getLogger("clmae")
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger="clmae"):
        progress = Progress("epoch 3", total=4, images_per_iteration=2)
        progress.advance()
        progress.report({"loss": 0.25})
    logger.propagate = False
    assert "epoch 3 [1/4]  0:00:00 left  loss: 0.25" in caplog.text
