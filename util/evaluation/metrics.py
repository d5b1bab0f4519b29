"""Accuracies of predictions."""

from typing import Any

import torch

from util.evaluation.results import TOP


def top_classes(logits: torch.Tensor) -> torch.Tensor:
    """The five classes with the highest scores [..., C], best first: int64 [..., 5], padded with -1."""
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
    return torch.nn.functional.pad(best, (0, TOP - best.shape[-1]), value=-1)


def accuracies(top5: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Acc@1 and Acc@5 in percent of predictions [..., N, 5] for labels [N]: two tensors [...]."""
    right = top5 == labels[:, None]
    return 100 * right[..., 0].double().mean(dim=-1), 100 * right.any(dim=-1).double().mean(dim=-1)


def summary(top5: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Mean accuracies over runs, and their sample standard deviations (None for one run), of predictions [R, N, 5]."""
    metrics = {}
    for name, values in zip(("acc1", "acc5"), accuracies(top5, labels), strict=True):
        metrics[name] = values.mean().item()
        metrics[f"{name}_std"] = values.std().item() if len(values) > 1 else None
    return metrics
