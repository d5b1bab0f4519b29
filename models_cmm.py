"""Curriculum masking module: images in, the probability that each token stays visible out; its losses and schedule.

    cmm = build_cmm(mae)
    keep_prob = cmm(imgs)                               # Z, float [N, L]
    visible = keep_prob >= 0.5                          # what the autoencoder may see

The module knows nothing of the autoencoder; engine_pretrain.py joins the two. Equation numbers are those of
docs/method.md, which also says where and why a loss departs from the paper's printed formula.
"""

import math
from collections.abc import Callable

import torch
import torch.nn as nn
from timm.layers import Mlp
from timm.models.vision_transformer import PatchEmbed

from models_mae import (
    MaskedAutoencoderViT,
    check_divisible,
    init_linear_and_norm,
    init_patch_embed,
    run_blocks,
    transformer_blocks,
    vit_layer_norm,
)
from util.pos_embed import get_2d_sincos_pos_embed

SIGMA = 0.12  # width of the Gaussian loss around Z = 0.5
REFERENCE_TOKENS = 196  # tokens of a 224 px image in 16 px patches, where the paper balanced the loss weights


class CurriculumMaskingModule(nn.Module):
    """A short ViT whose [CLS] token decides about every patch. N images, L patches, D width."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        depth: int = 5,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        norm_layer: Callable[[int], nn.Module] = vit_layer_norm,
    ):
        super().__init__()
        check_divisible(img_size, patch_size)
        self.grad_checkpointing = False
        # Its own embedding, not the autoencoder's: so its output cannot change while the autoencoder is updated,
        # and one forward pass serves both steps of an iteration.
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches + 1, embed_dim), requires_grad=False)
        self.blocks = transformer_blocks(depth, embed_dim, num_heads, mlp_ratio, norm_layer)
        self.norm = norm_layer(embed_dim)
        self.mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.head = nn.Linear(embed_dim, num_patches)
        self.initialize_weights()

    def initialize_weights(self) -> None:
        sincos = get_2d_sincos_pos_embed(self.pos_embed.shape[-1], self.patch_embed.grid_size, cls_token=True)
        self.pos_embed.data.copy_(torch.from_numpy(sincos))
        init_patch_embed(self.patch_embed)
        nn.init.normal_(self.cls_token, std=0.02)
        self.apply(init_linear_and_norm)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """As the autoencoder's."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizer helpers exempt from weight decay, besides biases and norms."""
        return {"cls_token", "pos_embed"}

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to Z [N, L] in [0, 1], float32 under any autocast."""
        x = self.patch_embed(imgs) + self.pos_embed[:, 1:, :]
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = run_blocks(self.blocks, x, grad_checkpointing=self.grad_checkpointing)
        x = self.norm(x[:, 0])  # [N, D]
        return self.head(self.mlp(x)).float().sigmoid()


def build_cmm(mae: MaskedAutoencoderViT, depth: int = 5, dim: int | None = None, **kwargs) -> CurriculumMaskingModule:
    """The masking module that fits `mae`: its image and patch size, channels, width and heads.

    A narrower one, of width `dim`, has fewer heads of the same width.
    """
    width, num_heads = mae.cls_token.shape[-1], mae.blocks[0].attn.num_heads
    dim = width if dim is None else dim
    if dim < 1 or dim % (width // num_heads):
        raise ValueError(f"a width of {dim} is not a multiple of {width // num_heads}, the width of the model's heads")
    fitting = dict(
        img_size=mae.patch_embed.img_size,
        patch_size=mae.patch_embed.patch_size[0],
        in_chans=mae.in_chans,
        embed_dim=dim,
        num_heads=dim * num_heads // width,
    )
    return CurriculumMaskingModule(depth=depth, **{**fitting, **kwargs})


def lambda_cl(step: int, total_steps: int, end: float = -0.1) -> float:
    """Eq. 2: its weight falls linearly from 1 at step 0 (partner) to `end` at `total_steps` (adversary)."""
    return 1.0 - (1.0 - end) * step / total_steps


def curriculum_loss(keep_prob: torch.Tensor, error: torch.Tensor, weight: float) -> torch.Tensor:
    """Eq. 3: `weight` times the mean of the patch errors [N, L], each weighed by how far its patch is removed.

    The gradient reaches Z through both factors. A batch with nothing removed gives 0.
    """
    removed = 1 - keep_prob
    # The error of a batch with nothing removed is undefined; the clamp makes it 0 and keeps its gradient finite.
    return weight * (removed * error).sum() / removed.sum().clamp(min=1e-6)


def gaussian_loss(keep_prob: torch.Tensor) -> torch.Tensor:
    """Eq. 4: a bump of height sigma * sqrt(2 pi) at Z = 0.5 pushes every Z towards 0 or 1; the mean over tokens,
    times L / 196 to keep its balance with the losses that grow with the number of tokens."""
    height = SIGMA * math.sqrt(2 * math.pi)
    bump = height * torch.exp(-((keep_prob - 0.5) ** 2) / (2 * SIGMA**2))
    return bump.mean() * keep_prob.shape[1] / REFERENCE_TOKENS


def kl_loss(keep_prob: torch.Tensor, mask_ratio: float) -> torch.Tensor:
    """Eq. 5: divergence of the tallied counts of masked and visible tokens from the wanted ones; mean over images.

    The tally is taken after the threshold, where the autoencoder sees it, and its gradient goes straight through to Z.
    """
    num_patches = keep_prob.shape[1]
    hard = (keep_prob >= 0.5).to(keep_prob.dtype)
    visible_count = (hard + keep_prob - keep_prob.detach()).sum(dim=1)  # [N]
    masked_count = num_patches - visible_count
    masked_target, visible_target = mask_ratio * num_patches, (1 - mask_ratio) * num_patches
    # Half a token stands for none: the logarithm stays finite, and so does its pull. The clamp must not cut the
    # gradient, because an image with no visible token at all is the one that needs it.
    divergence = masked_target * torch.log(masked_target / clamp_value(masked_count, 0.5)) + visible_target * torch.log(
        visible_target / clamp_value(visible_count, 0.5)
    )
    return divergence.mean()


def clamp_value(x: torch.Tensor, minimum: float) -> torch.Tensor:
    """max(x, minimum) whose gradient is 1 everywhere."""
    return x + (x.clamp(min=minimum) - x).detach()


def diversity_loss(keep_prob: torch.Tensor) -> torch.Tensor:
    """Eq. 6: mean over all pairs of different images of exp(-||Z_i - Z_j||^2); 0 for a batch of one."""
    n = keep_prob.shape[0]
    centred = keep_prob - 0.5  # shorter vectors lose less to rounding in the product below; distances are the same
    norms = centred.square().sum(dim=1)
    distances = norms[:, None] + norms[None, :] - 2 * centred @ centred.T  # [N, N], squared
    similarity = torch.exp(-distances.clamp(min=0))
    off_diagonal = ~torch.eye(n, dtype=torch.bool, device=keep_prob.device)
    return (similarity * off_diagonal).sum() / max(n * (n - 1), 1)
