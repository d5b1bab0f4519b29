"""Figures that say how healthy masks are, and how often predictions are right."""

import torch

TOP = 5  # predictions kept for each image


def mask_health(mask: torch.Tensor, keep_prob: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Health of a batch of masks [N, L] (0 is keep, 1 is remove), and of the Z they came from, as scalar tensors.

    visible      share of visible tokens, mean over images         visible_std   its standard deviation over images
    distinct     share of masks in the batch that differ from all before them (1/N: mode collapse)
    hamming      share of tokens in which two masks differ, mean over pairs of images
    unseen       share of positions that no image of the batch shows: masks may differ, and yet be made for the place
    decisive     share of Z within 0.1 of 0 or 1
    """
    n, num_patches = mask.shape
    visible = 1 - mask.mean(dim=1)  # [N]
    # Masks as +-1 vectors: their products count agreements minus disagreements.
    signs = 2 * mask.float() - 1
    differing = (num_patches - signs @ signs.T) / 2  # [N, N]
    repeats = torch.tril(differing < 0.5, diagonal=-1).any(dim=1).sum()
    health = {
        "visible": visible.mean(),
        "visible_std": visible.std(correction=0),
        "distinct": 1 - repeats / n,
        "hamming": differing.sum() / (num_patches * max(n * (n - 1), 1)),
        "unseen": mask.all(dim=0).float().mean(),
    }
    if keep_prob is not None:
        health["decisive"] = ((keep_prob - 0.5).abs() >= 0.4).float().mean()
    return health


def top_classes(logits: torch.Tensor) -> torch.Tensor:
    """The five classes with the highest scores [..., C], best first: int64 [..., 5], filled up with -1."""
    best = logits.topk(min(TOP, logits.shape[-1]), dim=-1).indices
    return torch.nn.functional.pad(best, (0, TOP - best.shape[-1]), value=-1)


def accuracies(top5: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Acc@1 and Acc@5 in percent of predictions [..., N, 5] for labels [N]: two tensors [...]."""
    right = top5 == labels[:, None]
    return 100 * right[..., 0].double().mean(dim=-1), 100 * right.any(dim=-1).double().mean(dim=-1)


def summary(top5: torch.Tensor, labels: torch.Tensor) -> dict[str, float | None]:
    """Mean accuracies over runs, and their sample standard deviations (None for one run), of predictions [R, N, 5]."""
    figures = {}
    for name, values in zip(("acc1", "acc5"), accuracies(top5, labels), strict=True):
        figures[name] = values.mean().item()
        figures[f"{name}_std"] = values.std().item() if len(values) > 1 else None
    return figures
