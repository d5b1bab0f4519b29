"""Fixed 2D sine-cosine position embeddings, and their interpolation to another grid."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F


def get_2d_sincos_pos_embed(embed_dim: int, grid_size: int | tuple[int, int], cls_token: bool = False) -> np.ndarray:
    """Embeddings of a grid in raster order, [h*w, embed_dim]; with `cls_token` a zero row comes first.

    `grid_size` is the side of a square grid or (height, width).
    """
    height, width = (grid_size, grid_size) if isinstance(grid_size, int) else grid_size
    # The column comes first: the first half of the channels encodes x, the second half y.
    columns, rows = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32))
    pos_embed = get_2d_sincos_pos_embed_from_grid(embed_dim, np.stack([columns, rows]))
    if cls_token:
        pos_embed = np.concatenate([np.zeros([1, embed_dim]), pos_embed])
    return pos_embed


def get_2d_sincos_pos_embed_from_grid(embed_dim: int, grid: np.ndarray) -> np.ndarray:
    """Each of the two coordinates of `grid` [2, ...] gets half of the channels; returns [M, embed_dim]."""
    if embed_dim % 4:
        raise ValueError(f"a 2D sine-cosine embedding needs a width divisible by 4, not {embed_dim}")
    return np.concatenate([get_1d_sincos_pos_embed_from_grid(embed_dim // 2, axis) for axis in grid], axis=1)


def get_1d_sincos_pos_embed_from_grid(embed_dim: int, pos: np.ndarray) -> np.ndarray:
    """Sines, then cosines, of `pos` (M values) at embed_dim/2 frequencies from 1 down to 1/10000; [M, embed_dim]."""
    frequencies = 10000.0 ** -(np.arange(embed_dim // 2, dtype=np.float64) / (embed_dim / 2))
    angles = np.outer(pos.reshape(-1), frequencies)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def interpolate_pos_embed(
    model: Any, checkpoint_model: dict[str, torch.Tensor], grid_size: tuple[int, int] | None = None
) -> None:
    """Resize `checkpoint_model["pos_embed"]` in place to the grid of `model`, bicubically; extra tokens are kept.

    `grid_size` is the checkpoint's (height, width) in patches. A state dict does not record it: unless given, a grid of
    as many patches as the model's is taken to be the model's, any other to be square.
    """
    if "pos_embed" not in checkpoint_model:
        return
    pos_embed = checkpoint_model["pos_embed"]  # [1, extra + old_h*old_w, D]
    own_grid = tuple(model.patch_embed.grid_size)
    num_extra = model.pos_embed.shape[1] - model.patch_embed.num_patches
    extra, grid = pos_embed[:, :num_extra], pos_embed[:, num_extra:]
    if grid_size is None:
        side = round(grid.shape[1] ** 0.5)
        fits = grid.shape[1] == model.patch_embed.num_patches
        grid_size = own_grid if fits else (side, side)
    if tuple(grid_size) == own_grid:
        return
    height, width = grid_size
    if height * width != grid.shape[1]:
        raise ValueError(f"cannot interpolate a position embedding of {grid.shape[1]} patches: its grid is not square")
    grid = grid.reshape(1, height, width, -1).permute(0, 3, 1, 2)  # [1, D, old_h, old_w]
    grid = F.interpolate(grid, size=own_grid, mode="bicubic", align_corners=False)
    checkpoint_model["pos_embed"] = torch.cat([extra, grid.flatten(2).transpose(1, 2)], dim=1)
