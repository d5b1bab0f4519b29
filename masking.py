from argparse import Namespace

import torch

from util.misc import generator, get_rank, get_world_size


def choose_masking(
    imgs: torch.Tensor, keep_prob: torch.Tensor | None, num_patches: int, epoch: int, iteration: int, args: Namespace
) -> dict[str, torch.Tensor]:
    """The masking argument of the MAE in step 1: random, thresholded Z, or the largest Z."""
    if keep_prob is None:
        # The noise is a function of the iteration, not of the process's history. Drawn on the CPU: the same anywhere.
        # Drawn for the global batch, of which this process has its rows: the same for any number of processes.
        n, rank = len(imgs), get_rank()
        draw = generator("noise", args.seed, epoch, iteration)
        noise = torch.rand(n * get_world_size(), num_patches, generator=draw)[n * rank : n * (rank + 1)]
        return {"noise": noise.to(imgs.device, non_blocking=True)}
    if args.select == "topk":
        return {"noise": -keep_prob.detach()}  # the smallest values stay visible
    return {"visible": keep_prob.detach() >= 0.5}


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
