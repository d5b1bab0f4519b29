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


def test_models_side_by_side_learn_as_they_would_alone():
    torch.manual_seed(0)
    start = [torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4)]
    rates = torch.tensor([0.1, 1.0, 10.0])
    together = [torch.nn.Parameter(x.clone()) for x in start]
    optimizer = LARS(together, weight_decay=0.01, batch_dims=2)
    alone = {
        (run, rate): [torch.nn.Parameter(x[run, rate].clone()) for x in start] for run in range(2) for rate in range(3)
    }
    optimizers = {key: LARS(params, lr=rates[key[1]].item(), weight_decay=0.01) for key, params in alone.items()}
    for _ in range(4):
        gradients = [torch.randn_like(x) for x in start]
        for param, gradient in zip(together, gradients, strict=True):
            param.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rates
        optimizer.step()
        for (run, rate), params in alone.items():
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient[run, rate]
            optimizers[run, rate].step()
    for (run, rate), params in alone.items():
        for param, batched in zip(params, together, strict=True):
            torch.testing.assert_close(batched[run, rate], param.data)
