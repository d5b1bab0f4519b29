"""Learning-rate schedules, in fractions of an epoch."""

import math
from argparse import Namespace
from typing import TypeVar

import torch
from torch.optim import Optimizer

Rate = TypeVar("Rate", float, torch.Tensor)  # one, or several at once


def learning_rate(
    epoch: float, *, lr: Rate, min_lr: float, warmup_epochs: float, epochs: float, schedule: str = "cosine"
) -> Rate:
    """The rate at a (fractional) epoch: linear warm-up to `lr`, then a half-cosine decay to `min_lr`, or constant."""
    if epoch < warmup_epochs:
        return lr * epoch / warmup_epochs
    if schedule == "constant":
        return lr
    progress = (epoch - warmup_epochs) / (epochs - warmup_epochs)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, lr: float | torch.Tensor) -> None:
    """Set the rate of every parameter group to `lr`, times its `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def adjust_learning_rate(optimizer: Optimizer, epoch: float, args: Namespace) -> float:
    """Set and return the rate that `args` (lr, min_lr, warmup_epochs, epochs) gives at a fractional epoch."""
    lr = learning_rate(epoch, lr=args.lr, min_lr=args.min_lr, warmup_epochs=args.warmup_epochs, epochs=args.epochs)
    set_learning_rate(optimizer, lr)
    return lr
