"""LARS (You et al., 2017), as used for linear probing: matrices get a trust ratio and weight decay, vectors neither."""

from collections.abc import Iterable

import torch


class LARS(torch.optim.Optimizer):
    """With `batch_dims`, the first so many dimensions of every parameter only count independent models that are trained
    side by side: each has its own trust ratio, and `lr` may be a tensor that broadcasts over these dimensions."""

    def __init__(
        self,
        params: Iterable,
        lr: float | torch.Tensor = 0,
        weight_decay: float = 0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        batch_dims: int = 0,
    ):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient)
        super().__init__(params, defaults)
        self.batch_dims = batch_dims

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                own_dims = param.ndim - self.batch_dims
                update = param.grad
                if own_dims > 1:
                    update = update.add(param, alpha=group["weight_decay"])
                    ratio = trust_ratio(param, update, group["trust_coefficient"], self.batch_dims)
                    update = update * expand_right(ratio, own_dims)
                momentum = self.state[param].setdefault("mu", torch.zeros_like(param))
                momentum.mul_(group["momentum"]).add_(update)
                lr = torch.as_tensor(group["lr"], dtype=param.dtype, device=param.device)
                param.sub_(momentum * expand_right(lr, own_dims))


def trust_ratio(param: torch.Tensor, update: torch.Tensor, coefficient: float, batch_dims: int) -> torch.Tensor:
    """coefficient * |param| / |update| for each model, and 1 where either norm is zero."""
    param_norm, update_norm = (x.flatten(batch_dims).norm(dim=-1) for x in (param, update))
    ratio = coefficient * param_norm / update_norm
    return torch.where((param_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))


def expand_right(x: torch.Tensor, dims: int) -> torch.Tensor:
    return x[(..., *[None] * dims)]
