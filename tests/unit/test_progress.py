import json
import logging
import math
from argparse import Namespace

import pytest
import torch

from util.cli import Progress, TrainingDiverged
from util.training.progress import Averages, LossGuard, MetricBuffer, report_epoch, write_log


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
    guard = LossGuard({})
    assert guard.check(7, {"loss": 0.5, "cmm/loss": 1.25}, {})
    with pytest.raises(TrainingDiverged, match=r"step 8 \(loss nan\).*loss 0.5, cmm/loss 1.25.*--blr"):
        guard.check(8, {"loss": math.nan}, {})


def test_under_fp16_a_lower_scale_is_a_skipped_step_and_one_below_1_the_end():
    guard = LossGuard({"loss_scale": torch.tensor(4.0), "cmm/loss_scale": torch.tensor(4.0)})
    for loss, *scales, skipped in (
        (math.inf, 2.0, 2.0, 1),  # one step, whichever networks skip it
        (0.5, 4.0, 2.0, 1),
        (0.5, 4.0, 1.0, 2),  # finite losses hide the overflow of a gradient
        (0.5, 4.0, 0.9999999, 2),  # a mean over processes is rounded
    ):
        assert guard.check(7, {"loss": loss}, dict(zip(guard.scales, scales, strict=True))) == math.isfinite(loss)
        assert guard.skipped == skipped
    with pytest.raises(
        TrainingDiverged, match=r"step 8 \(loss_scale 4, cmm/loss_scale 0.5\) after 3 skipped.*loss 0.5"
    ):
        guard.check(8, {"loss": 0.5}, {"loss_scale": 4.0, "cmm/loss_scale": 0.5})


def test_peak_memory_is_shown_and_not_logged(monkeypatch, clmae_log, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 31.25e9)
    args = Namespace(epochs=3, output_dir=str(tmp_path))
    report_epoch({"loss": 0.5}, {}, 0, 60.0, args)
    write_log({"loss": 0.5}, {}, 0, None, args)
    assert "epoch 1/3 done, 0:02:00 left  loss: 0.5  peak memory: 31.2 GB" in clmae_log.text
    assert set(json.loads((tmp_path / "log.txt").read_text())) == {"train_loss", "epoch", "crc32"}


def test_plain_lines_where_output_is_not_a_terminal(caplog):
    logger = logging.getLogger("clmae")
    logger.propagate = True
    with caplog.at_level(logging.INFO, logger="clmae"):
        progress = Progress("epoch 3", total=4, images_per_iteration=2)
        progress.advance()
        progress.report({"loss": 0.25})
    logger.propagate = False
    assert "epoch 3 [1/4]  0:00:00 left  loss: 0.25" in caplog.text
