from argparse import Namespace

import numpy as np
import pytest
import torch

from util.lr_sched import adjust_learning_rate, learning_rate


def test_equals_upstream(golden_util):
    weight = torch.nn.Parameter(torch.zeros(1))
    other = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([{"params": [weight]}, {"params": [other], "lr_scale": 0.5}])
    args = Namespace(lr=1.5e-3, min_lr=1e-5, warmup_epochs=40, epochs=400)
    rates = []
    for epoch in golden_util["lr/epochs"]:
        assert adjust_learning_rate(optimizer, epoch, args) == optimizer.param_groups[0]["lr"]
        rates.append([group["lr"] for group in optimizer.param_groups])
    np.testing.assert_allclose(rates, golden_util["lr/values"], rtol=1e-6)


def test_constant_schedule_warms_up_alike_and_then_stays():
    settings = dict(lr=1.0, min_lr=0.0, warmup_epochs=4, epochs=20)
    for epoch in (0, 1.5, 3.99):
        constant = learning_rate(epoch, schedule="constant", **settings)
        assert constant == learning_rate(epoch, schedule="cosine", **settings) == pytest.approx(epoch / 4)
    assert learning_rate(19.9, schedule="constant", **settings) == 1.0
    assert learning_rate(20, schedule="cosine", **settings) == pytest.approx(0.0)


def test_warm_up_that_fills_the_whole_run_and_none_at_all():
    assert learning_rate(3, lr=1.0, min_lr=0.0, warmup_epochs=4, epochs=4) == pytest.approx(0.75)
    assert learning_rate(0, lr=1.0, min_lr=0.0, warmup_epochs=0, epochs=4) == 1.0
