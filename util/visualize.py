"""Pictures of masks and reconstructions."""

import torch
import torch.nn.functional as F
from torchvision.utils import make_grid

from models_mae import MaskedAutoencoderViT
from util.datasets import pixel_statistics


def reconstruction(
    model: MaskedAutoencoderViT,
    imgs: torch.Tensor,
    pred: torch.Tensor,
    mask: torch.Tensor,
    true_stats: bool = False,
) -> torch.Tensor:
    """Images [N, C, H, W] with the removed patches replaced by their prediction [N, L, P].

    A model of normalised patches predicts no brightness or contrast. Here each image's predictions get the mean and
    spread of its visible pixels, which the model has seen. `true_stats` gives them the removed patches' own instead,
    which leaks what the model cannot know.
    """
    patches = model.patchify(imgs)
    removed = mask.unsqueeze(-1)  # [N, L, 1], 0 is keep, 1 is remove
    if model.norm_pix_loss and true_stats:
        pred = pred * (patches.var(dim=-1, keepdim=True) + 1.0e-6) ** 0.5 + patches.mean(dim=-1, keepdim=True)
    elif model.norm_pix_loss:
        visible = (1 - removed) * torch.ones_like(patches)
        count = visible.sum(dim=(1, 2), keepdim=True).clamp(min=1)
        mean = (patches * visible).sum(dim=(1, 2), keepdim=True) / count
        std = (((patches - mean) * visible).square().sum(dim=(1, 2), keepdim=True) / count).sqrt()
        pred = pred * std + mean
    return model.unpatchify(torch.where(removed > 0.5, pred.float(), patches))


def mask_picture(
    model: MaskedAutoencoderViT,
    imgs: torch.Tensor,
    pred: torch.Tensor,
    mask: torch.Tensor,
    keep_prob: torch.Tensor | None = None,
    min_side: int = 64,
) -> torch.Tensor:
    """A picture [3, height, width] in [0, 1] with a column per image. From the top: the image, Z (white stays visible),
    the image with its removed patches in grey, and the reconstruction. Without Z that row is left out."""
    imgs = imgs.float()
    patches = model.patchify(imgs)
    masked = model.unpatchify(patches * (1 - mask.unsqueeze(-1)))  # 0 is the mean colour: grey
    rows = [as_rgb(imgs), as_rgb(masked), as_rgb(reconstruction(model, imgs, pred, mask))]
    if keep_prob is not None:
        heat = keep_prob.reshape(-1, 1, *model.patch_embed.grid_size)
        rows.insert(1, F.interpolate(heat, imgs.shape[-2:], mode="nearest").expand(-1, 3, -1, -1))
    columns = imgs.shape[0]
    tiles = torch.cat(rows)
    scale = max(1, -(-min_side // min(tiles.shape[-2:])))
    tiles = F.interpolate(tiles, scale_factor=scale, mode="nearest")
    return make_grid(tiles, nrow=columns, padding=2, pad_value=1.0)


def as_rgb(imgs: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of [N, C, H, W], clip to [0, 1], and show grey images as RGB; alpha is not shown."""
    mean, std = (imgs.new_tensor(values).view(-1, 1, 1) for values in pixel_statistics(imgs.shape[1]))
    return (imgs * std + mean).clamp(0, 1)[:, :3].expand(-1, 3, -1, -1)
