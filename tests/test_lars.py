import numpy as np
import torch

from util.lars import LARS


def test_equals_upstream(golden_util):
    w, b = (torch.nn.Parameter(torch.from_numpy(golden_util[f"lars/{name}0"].copy())) for name in "wb")
    optimizer = LARS([w, b], lr=0.1, weight_decay=0.01)
    for step in range(4):
        w.grad, b.grad = (torch.from_numpy(golden_util[f"lars/g{name}{step}"]) for name in "wb")
        optimizer.step()
        np.testing.assert_allclose(w.detach(), golden_util[f"lars/w{step + 1}"], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(b.detach(), golden_util[f"lars/b{step + 1}"], rtol=1e-6, atol=1e-7)


def test_zero_weights_and_zero_gradients_stay_finite():
    w = torch.nn.Parameter(torch.zeros(3, 3))
    w.grad = torch.ones(3, 3)
    LARS([w], lr=0.1).step()
    assert torch.allclose(w, torch.full((3, 3), -0.1)), "a zero weight takes the plain step"
    before = w.detach().clone()
    w.grad = torch.zeros(3, 3)
    LARS([w], lr=0.1).step()
    assert torch.equal(w, before)
