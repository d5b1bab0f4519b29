"""Masking modules, which map images to a value per patch; their losses, and the curriculum schedule.

    cmm = build_cmm(mae)
    keep_prob = cmm(imgs)                               # Z, float [N, L]: the probability that a patch stays visible
    visible = keep_prob >= 0.5                          # what the autoencoder may see

The modules do not depend on the autoencoder; engine_pretrain.py connects the two. Equation numbers refer to
docs/method.md, which also explains where and why a loss departs from the paper's formula.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import Mlp
from timm.models.vision_transformer import Block, PatchEmbed

from models_mae import (
    Autoencoder,
    check_divisible,
    init_linear_and_norm,
    init_patch_embed,
    run_blocks,
    transformer_blocks,
    vit_layer_norm,
)
from util.pos_embed import get_2d_sincos_pos_embed

SIGMA = 0.12  # width of the Gaussian loss around Z = 0.5
PAPER_TOKENS = (196, 256)  # tokens of the paper's backbones at 224 px; all three share its loss weights


class FirstTokenBlock(Block):
    """A block that outputs only its first token: the same values, without the other tokens' queries and MLP.

    Tokens [N, L, D] to the first one [N, 1, D]. For blocks built by `transformer_blocks`.
    """

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        attn: Any = self.attn
        tokens, width, heads = self.norm1(x), x.shape[-1], (attn.num_heads, -1)
        weight, bias = attn.qkv.weight, attn.qkv.bias  # of query, key and value, in this order
        q = F.linear(tokens[:, :1], weight[:width], bias[:width]).unflatten(-1, heads).transpose(1, 2)  # [N, h, 1, d]
        kv = F.linear(tokens, weight[width:], bias[width:])
        k, v = kv.unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)  # [N, h, L, d]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal)
        x = x[:, :1] + attn.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class MaskingViT(nn.Module):
    """The trunk of a masking module: a shallow ViT with its own patch embedding. N images, L patches, D width."""

    last_block: type[Block] = Block

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
        outputs: int | None = None,
    ):
        super().__init__()
        check_divisible(img_size, patch_size)
        self.grad_checkpointing = False
        # Its own embedding, not the autoencoder's: updating the autoencoder then does not change the module's output,
        # so one forward pass serves both steps of an iteration.
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches + 1, embed_dim), requires_grad=False)
        self.blocks = transformer_blocks(depth, embed_dim, num_heads, mlp_ratio, norm_layer, self.last_block)
        self.norm = norm_layer(embed_dim)
        self.mlp = Mlp(embed_dim, int(embed_dim * mlp_ratio))
        self.head = nn.Linear(embed_dim, outputs or num_patches)
        self.initialize_weights()

    def initialize_weights(self) -> None:
        sincos = get_2d_sincos_pos_embed(self.pos_embed.shape[-1], self.patch_embed.grid_size, cls_token=True)
        self.pos_embed.data.copy_(torch.from_numpy(sincos))
        init_patch_embed(self.patch_embed)
        nn.init.normal_(self.cls_token, std=0.02)
        self.apply(init_linear_and_norm)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """See `MaskedAutoencoderViT.set_grad_checkpointing`."""
        self.grad_checkpointing = enable

    def forward_trunk(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to tokens [N, 1 + L, D], [CLS] first; only [CLS] if `last_block` drops the others."""
        x = self.patch_embed(imgs) + self.pos_embed[:, 1:, :]
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return run_blocks(self.blocks, x, grad_checkpointing=self.grad_checkpointing)


class CurriculumMaskingModule(MaskingViT):
    """The paper's module (CMM): the [CLS] token predicts Z for every patch."""

    last_block = FirstTokenBlock

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to Z [N, L] in [0, 1], float32 under any autocast."""
        x = self.norm(self.forward_trunk(imgs)[:, 0])  # [N, D]
        return self.head(self.mlp(x)).float().sigmoid()


class ErrorPredictor(MaskingViT):
    """The predictive curriculum's module: each patch token predicts the relative error of its own patch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, outputs=1, **kwargs)
        nn.init.normal_(self.head.weight, std=0.02)  # with one output, Xavier would start with large, arbitrary scores

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to scores [N, L], float32 under any autocast."""
        x = self.norm(self.forward_trunk(imgs)[:, 1:])  # [N, L, D]
        return self.head(self.mlp(x)).squeeze(-1).float()


def build_cmm(mae: Autoencoder, depth: int = 5, dim: int | None = None) -> CurriculumMaskingModule:
    """The paper's module for `mae`, with the same image size, patch size, channels and, by default, width."""
    return CurriculumMaskingModule(**fitting(mae, depth, mae.width if dim is None else dim))


def build_predictor(mae: Autoencoder, depth: int = 2, dim: int | None = None) -> ErrorPredictor:
    """The predictive module for `mae`; narrow by default, because it is all the method adds to the cost of a step."""
    head_width = mae.width // mae.num_heads
    return ErrorPredictor(
        **fitting(mae, depth, max(mae.width // 4 // head_width, 1) * head_width if dim is None else dim)
    )


def fitting(mae: Autoencoder, depth: int, dim: int) -> dict:
    """Arguments for a module of width `dim` that fits `mae`, with heads as wide as the encoder's."""
    head_width = mae.width // mae.num_heads
    if dim < 1 or dim % head_width:
        raise ValueError(f"a width of {dim} is not a multiple of {head_width}, the width of the model's heads")
    return dict(
        img_size=mae.patch_embed.img_size,
        patch_size=mae.patch_embed.patch_size[0],
        in_chans=mae.in_chans,
        embed_dim=dim,
        depth=depth,
        num_heads=dim // head_width,
    )


def lambda_cl(progress: float, start: float = 1.0, end: float = -0.1) -> float:
    """Eq. 2: the weight falls linearly from `start` (partner) at progress 0 to `end` (adversary) at progress 1."""
    return start + (end - start) * progress


def curriculum_loss(keep_prob: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Eq. 3 without lambda_CL: mean of the patch errors [N, L], weighted by the degree to which a patch is removed.

    The gradient reaches Z through both factors. A batch with nothing removed gives 0.
    """
    removed = 1 - keep_prob
    # The mean is undefined if nothing is removed; the clamp makes it 0 and keeps its gradient finite.
    return (removed * error).sum() / removed.sum().clamp(min=1e-6)


def hidden_curriculum_loss(keep_prob: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Eq. 3 over hidden patches (Z < 0.5) only, scaled to tokens: L times their weighted mean error.

    Predictions of visible patches are not trained, so their errors must not count. Without the factor L, the gradient
    would be far too small to cross the Gaussian's barrier.
    """
    removed = (1 - keep_prob) * (keep_prob < 0.5)
    return keep_prob.shape[1] * (removed * error).sum() / removed.sum().clamp(min=1e-6)


def with_balanced_gradient(keep_prob: torch.Tensor) -> torch.Tensor:
    """Z [N, L] itself, but with a gradient that sums to zero over each image's patches.

    The number of visible patches is left to the KL loss. Otherwise an adversary would gain most by lowering every Z at
    once, towards 0.5, where masks are no longer decisive and miss the target ratio.
    """
    mean = keep_prob.mean(dim=1, keepdim=True)
    return keep_prob - (mean - mean.detach())


def gaussian_loss(keep_prob: torch.Tensor) -> torch.Tensor:
    """Eq. 4: a bump of height sigma * sqrt(2 pi) at Z = 0.5 pushes every Z towards 0 or 1; mean over tokens.

    At sizes other than the paper's it is scaled by L / 196, to stay balanced with the losses that count tokens.
    """
    height = SIGMA * math.sqrt(2 * math.pi)
    bump = height * torch.exp(-((keep_prob - 0.5) ** 2) / (2 * SIGMA**2))
    num_patches = keep_prob.shape[1]
    return bump.mean() * (1 if num_patches in PAPER_TOKENS else num_patches / PAPER_TOKENS[0])


def kl_loss(keep_prob: torch.Tensor, mask_ratio: float) -> torch.Tensor:
    """Eq. 5: divergence of the counts of masked and visible tokens from the target; mean over images.

    Tokens are counted after the threshold, as the autoencoder sees them; the gradient passes straight through to Z.
    """
    num_patches = keep_prob.shape[1]
    visible_count = straight_through(keep_prob).sum(dim=1)  # [N]
    masked_count = num_patches - visible_count
    masked_target, visible_target = mask_ratio * num_patches, (1 - mask_ratio) * num_patches
    # A count of zero becomes half a token, so that the logarithm stays finite.
    divergence = masked_target * torch.log(masked_target / clamp_value(masked_count, 0.5)) + visible_target * torch.log(
        visible_target / clamp_value(visible_count, 0.5)
    )
    return divergence.mean()


def soft_kl_loss(keep_prob: torch.Tensor, mask_ratio: float) -> torch.Tensor:
    """The released code's ratio loss, as a control: divergence of the soft visible fraction, summed over the batch."""
    visible, target = clamp_value(keep_prob.mean(dim=1), 1e-6, 1 - 1e-6), 1 - mask_ratio  # finite if all are 0 or 1
    return (visible * torch.log(visible / target) + (1 - visible) * torch.log((1 - visible) / mask_ratio)).sum()


def position_loss(keep_prob: torch.Tensor, mask_ratio: float) -> torch.Tensor:
    """Eq. 7: divergence of each position's visible rate over the batch from 1 - mask_ratio; sum over positions.

    The diversity loss saturates once masks differ in a few tokens; this one ensures that every position is shown in
    some images. Counted after the threshold, as in the KL loss.
    """
    n, target = keep_prob.shape[0], 1 - mask_ratio
    visible = clamp_value(straight_through(keep_prob).mean(dim=0), 0.5 / n, 1 - 0.5 / n)  # [L]
    return (target * torch.log(target / visible) + mask_ratio * torch.log(mask_ratio / (1 - visible))).sum()


def straight_through(keep_prob: torch.Tensor) -> torch.Tensor:
    """1 where Z >= 0.5, else 0, with the gradient of Z."""
    hard = (keep_prob >= 0.5).to(keep_prob.dtype)
    return hard + keep_prob - keep_prob.detach()


def clamp_value(x: torch.Tensor, minimum: float, maximum: float | None = None) -> torch.Tensor:
    """clamp with a gradient of 1 everywhere: values outside the bounds need it most."""
    return x + (x.clamp(min=minimum, max=maximum) - x).detach()


def diversity_loss(keep_prob: torch.Tensor, own: slice = slice(None)) -> torch.Tensor:
    """Eq. 6: mean over all pairs of different images of exp(-||Z_i - Z_j||^2); 0 for a batch of one."""
    return mean_over_pairs(lambda squares: torch.exp(-squares), keep_prob, own)


def distance_diversity_loss(keep_prob: torch.Tensor, own: slice = slice(None)) -> torch.Tensor:
    """The released code's diversity, as a control: exp(-0.1 ||Z_i - Z_j||), which does not saturate."""
    return mean_over_pairs(lambda squares: torch.exp(-0.1 * (squares + 1e-12).sqrt()), keep_prob, own)


def mean_over_pairs(
    similarity: Callable[[torch.Tensor], torch.Tensor], keep_prob: torch.Tensor, own: slice
) -> torch.Tensor:
    """Mean, over all pairs of different rows of Z [N, L], of a function of their squared distances.

    With several processes, each compares its `own` rows with all. The mean over processes is that over all pairs, and
    each process has its gradient with respect to its own rows.
    """
    everyone = keep_prob - 0.5  # shorter vectors lose less to rounding in the product; distances are unchanged
    mine, everyone = everyone[own], everyone.detach()
    squares = mine.square().sum(dim=1)[:, None] + everyone.square().sum(dim=1) - 2 * mine @ everyone.T  # [own, N]
    squares = squares.clamp(min=0)
    squares.diagonal(own.start or 0).fill_(torch.inf)  # a row is not paired with itself
    mean = similarity(squares).sum() / max(len(mine) * (len(everyone) - 1), 1)
    # Among all pairs, each row is on both sides, here only on one; and these pairs are a share of all.
    scale = 2 * len(mine) / len(everyone)
    return mean.detach() + scale * (mean - mean.detach())


def prediction_loss(score: torch.Tensor, error: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Eq. 8: squared error of the scores against the patch errors, standardised within each image's removed patches.

    All are [N, L]; mask: 0 is keep, 1 is remove. Step 1 computes the errors of removed patches anyway.
    """
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    centred = (error - (error * mask).sum(dim=1, keepdim=True) / count) * mask
    deviation = (centred.square().sum(dim=1, keepdim=True) / count).sqrt()
    target = centred / deviation.clamp(min=1e-6)
    return ((score - target).square() * mask).sum() / mask.sum().clamp(min=1)
