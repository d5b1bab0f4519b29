"""Mask metrics: do masks depend on content or position, do they hide detail, do they make the task easier or harder?

Masks: 0 is keep, 1 is remove. N images, L patches.

visible     share of visible patches; the target is 1 minus the run's mask ratio
distinct    share of masks that differ from all earlier ones; 1 / N is mode collapse
hamming     share of patches in which two masks differ, mean over pairs of images
place       share of the masks' variance explained by position alone: 0 for random masks, 1 for one mask for all
unseen      share of positions visible in no image
mirror      correlation of a masking module's values with those of the mirrored image, mirrored back: 1 if they move
            with the content, 0 if not
edge        mean edge energy (z-score within the image) of hidden minus visible patches: detail is shown below 0, hidden
            above 0
own, judge  error on hidden patches relative to random masks of the same ratio, for the run's own autoencoder and for
            one that never saw these masks: below 1 for a partner, above 1 for an adversary
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from models_mae import Autoencoder

BLOCK = 250  # images at once


def edge_scores(imgs: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Logarithm of each patch's mean absolute gradient, standardised within the image: [N, L]."""
    across = F.pad(imgs.diff(dim=-1).abs().mean(dim=1), (0, 1))
    down = F.pad(imgs.diff(dim=-2).abs().mean(dim=1), (0, 0, 0, 1))
    energy = F.avg_pool2d((across + down)[:, None], patch_size).flatten(1)
    energy = (energy + 1e-3).log()
    return (energy - energy.mean(dim=1, keepdim=True)) / (energy.std(dim=1, keepdim=True) + 1e-5)


def edge_contrast(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean score of hidden minus that of visible patches, all [N, L]."""
    hidden, shown = mask.sum().clamp(min=1), (1 - mask).sum().clamp(min=1)
    return (scores * mask).sum() / hidden - (scores * (1 - mask)).sum() / shown


def mirror_correlation(values: torch.Tensor, mirrored: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Correlation of values [N, L] with those of the mirrored images, mirrored back."""
    turned = mirrored.unflatten(1, grid).flip(-1).flatten()
    return torch.corrcoef(torch.stack([values.flatten(), turned]))[0, 1].nan_to_num()


@torch.no_grad()
def hidden_error(model: Autoencoder, imgs: torch.Tensor, visible: torch.Tensor) -> float:
    """Mean error over all patches [N, L] that are not `visible`."""
    total = hidden = 0.0
    for part, shown in zip(imgs.split(BLOCK), visible.split(BLOCK), strict=True):
        _, pred, mask = model(part, visible=shown)
        total += (model.patch_error(part, pred) * mask).sum().item()
        hidden += mask.sum().item()
    return total / max(hidden, 1)


def difficulty(model: Autoencoder, imgs: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor) -> float:
    """Error on what `mask` [N, L] hides, relative to random masks of the same mean ratio, drawn by `noise` [N, L].

    These hide at least a patch, so that masks that hide nothing count as infinitely easy."""
    kept = min(round((1 - mask).sum(dim=1).mean().item()), mask.shape[1] - 1)
    random = noise.argsort(dim=1).argsort(dim=1) < kept
    return hidden_error(model, imgs, mask == 0) / hidden_error(model, imgs, random)


ADVICE = {  # what a learned curriculum can do about it
    "visible": "raise --lambda_kl",
    "distinct": "raise --lambda_div",
    "place": "raise --lambda_pos",
    "unseen": "raise --lambda_pos",
    "partner": "train the module longer",
    "adversary": "lower --lambda_cl_end",
}


def verdicts(
    metrics: Mapping[str, float], number: int, weight: float | None = None, end: float | None = None, learned: str = ""
) -> list[str]:
    """What to look into, one sentence each; none if all is well. Masks are of `number` images.

    `weight` is lambda_CL, if masks follow it, and `end` its value at the end of the run. Flags are suggested only for
    masks `learned` by --masking curriculum; no flag changes those of the other strategies.
    """
    found = {}
    visible, target = metrics["visible"], metrics.get("target")
    if target is not None and abs(visible - target) > 0.03:
        found["visible"] = f"{visible:.2f} misses the target of {target:.2f}"
    if metrics["distinct"] < 0.5:
        found["distinct"] = f"{metrics['distinct']:.2f}: images share masks"
    if metrics["place"] > 0.1:
        found["place"] = f"{metrics['place']:.2f}: masks depend on position"
    if metrics["unseen"] > 0.1 + 2 * (1 - visible) ** number:  # twice what chance leaves unseen
        found["unseen"] = f"{metrics['unseen']:.2f}: positions that are never shown"
    judge = next((name for name in ("judge", "own") if name in metrics), None)
    if judge and weight is not None:
        hard = f"{judge} {metrics[judge]:.2f} at lambda_CL {weight:.2f}"
        if weight >= 0.5 and metrics[judge] > 0.97:
            found["partner"] = f"{hard}: hardly easier than random masks"
        if weight < 0 and weight == end and metrics[judge] < 1.03:
            found["adversary"] = f"{hard}: hardly harder than random masks"
    advice = ADVICE if learned == "curriculum" else {}
    return [f"{name} {what}" + (f"; {advice[name]}" if name in advice else "") for name, what in found.items()]
