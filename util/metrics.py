"""Figures that say how healthy masks are."""

import torch


def mask_health(mask: torch.Tensor, keep_prob: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Health of a batch of masks [N, L] (0 is keep, 1 is remove), and of the Z they came from, as scalar tensors.

    visible      share of visible tokens, mean over images         visible_std   its standard deviation over images
    distinct     share of masks in the batch that differ from all before them (1/N: mode collapse)
    hamming      share of tokens in which two masks differ, mean over pairs of images
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
    }
    if keep_prob is not None:
        health["decisive"] = ((keep_prob - 0.5).abs() >= 0.4).float().mean()
    return health
