"""LARS (You et al., 2017), as used for linear probing: matrices get a trust ratio and weight decay, vectors neither."""

from collections.abc import Iterable

import torch


class LARS(torch.optim.Optimizer):
    def __init__(
        self,
        params: Iterable,
        lr: float = 0,
        weight_decay: float = 0,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
    ):
        defaults = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                update = param.grad
                if param.ndim > 1:
                    update = update.add(param, alpha=group["weight_decay"])
                    update = update * trust_ratio(param, update, group["trust_coefficient"])
                momentum = self.state[param].setdefault("mu", torch.zeros_like(param))
                momentum.mul_(group["momentum"]).add_(update)
                param.sub_(momentum, alpha=group["lr"])


def trust_ratio(param: torch.Tensor, update: torch.Tensor, coefficient: float) -> torch.Tensor:
    """coefficient * |param| / |update|, and 1 where either norm is zero."""
    param_norm, update_norm = param.norm(), update.norm()
    ratio = coefficient * param_norm / update_norm
    return torch.where((param_norm > 0) & (update_norm > 0), ratio, torch.ones_like(ratio))
