"""Masked autoencoder (He et al., 2022) with upstream's names, keys and outputs, and the mask as an argument.

    mae = mae_vit_base_patch16()
    loss, pred, mask = mae(imgs, mask_ratio=0.75)       # random masks, exactly as upstream
    loss, pred, mask = mae(imgs, noise=noise)           # float [N, L], the smallest stay visible: any exact-ratio mask
    loss, pred, mask = mae(imgs, visible=visible)       # bool [N, L], True is kept: any number of visible patches
    loss, pred, mask = mae(imgs, keep_prob=keep_prob)   # float [N, L]: soft masks, differentiable in keep_prob

The autoencoder does not know where a mask comes from: masking.py chooses it, engine_pretrain.py passes it on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models.vision_transformer import Block, PatchEmbed
from torch.utils.checkpoint import checkpoint

from util.pos_embed import get_2d_sincos_pos_embed

SOFT = ("attention", "tokens")  # what keep_prob multiplies


class Autoencoder(Protocol):
    """The interface that pretraining needs besides nn.Module's; `MaskedAutoencoderViT` implements it.

    N images, L patches, P values per patch; masks: 0 is keep, 1 is remove.
    """

    patch_embed: PatchEmbed  # num_patches, grid_size, img_size and patch_size are read
    in_chans: int
    norm_pix_loss: bool
    width: int  # encoder width and heads, on which a learned masking module's are based
    num_heads: int

    def __call__(
        self,
        imgs: torch.Tensor,
        mask_ratio: float = 0.75,
        *,
        noise: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        keep_prob: torch.Tensor | None = None,
        soft: str = "tokens",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss, predicted patches [N, L, P], mask [N, L]. Only `--masking curriculum` needs `keep_prob`."""
        ...

    def patchify(self, imgs: torch.Tensor) -> torch.Tensor: ...

    def unpatchify(self, x: torch.Tensor) -> torch.Tensor: ...

    def patch_error(self, imgs: torch.Tensor, pred: torch.Tensor) -> torch.Tensor:
        """Error of each patch [N, L]."""
        ...

    def set_grad_checkpointing(self, enable: bool = True) -> None: ...


class MaskedAutoencoderViT(nn.Module):
    """ViT encoder over the visible patches, light ViT decoder over all of them.

    Shapes: N images, L patches, D encoder width, P = patch_size**2 * in_chans pixel values per patch.
    Masks: 0 is keep, 1 is remove.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 1024,
        depth: int = 24,
        num_heads: int = 16,
        decoder_embed_dim: int = 512,
        decoder_depth: int = 8,
        decoder_num_heads: int = 16,
        mlp_ratio: float = 4.0,
        norm_layer: Callable[[int], nn.Module] = nn.LayerNorm,
        norm_pix_loss: bool = False,
    ):
        super().__init__()
        check_divisible(img_size, patch_size)
        self.in_chans, self.img_size = in_chans, (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.width, self.num_heads = embed_dim, num_heads
        self.norm_pix_loss = norm_pix_loss
        self.grad_checkpointing = False
        self.pad_to = 1  # padded sequence lengths, including [CLS], are multiples of this

        # Encoder
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        num_patches = self.patch_embed.num_patches
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, num_patches + 1, embed_dim), requires_grad=False)
        self.blocks = transformer_blocks(depth, embed_dim, num_heads, mlp_ratio, norm_layer)
        self.norm = norm_layer(embed_dim)

        # Decoder
        self.decoder_embed = nn.Linear(embed_dim, decoder_embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, decoder_embed_dim))
        self.decoder_pos_embed = nn.Parameter(torch.zeros(1, num_patches + 1, decoder_embed_dim), requires_grad=False)
        self.decoder_blocks = transformer_blocks(
            decoder_depth, decoder_embed_dim, decoder_num_heads, mlp_ratio, norm_layer
        )
        self.decoder_norm = norm_layer(decoder_embed_dim)
        self.decoder_pred = nn.Linear(decoder_embed_dim, patch_size**2 * in_chans)

        self.initialize_weights()

    def initialize_weights(self) -> None:
        grid_size = self.patch_embed.grid_size
        for pos_embed in (self.pos_embed, self.decoder_pos_embed):
            sincos = get_2d_sincos_pos_embed(pos_embed.shape[-1], grid_size, cls_token=True)
            pos_embed.data.copy_(torch.from_numpy(sincos))
        init_patch_embed(self.patch_embed)
        nn.init.normal_(self.cls_token, std=0.02)
        nn.init.normal_(self.mask_token, std=0.02)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        init_linear_and_norm(m)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Store only the blocks' inputs and recompute the rest in the backward pass: less memory, a third more compute.
        Named as in timm."""
        self.grad_checkpointing = enable

    def patchify(self, imgs: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to patches [N, L, P]; within a patch, channels vary fastest."""
        p, (h, w) = int(self.patch_embed.patch_size[0]), map(int, self.patch_embed.grid_size)
        x = imgs.reshape(imgs.shape[0], self.in_chans, h, p, w, p)
        return x.permute(0, 2, 4, 3, 5, 1).reshape(imgs.shape[0], h * w, p * p * self.in_chans)

    def unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        """Patches [N, L, P] back to images [N, C, H, W]."""
        p, (h, w) = int(self.patch_embed.patch_size[0]), map(int, self.patch_embed.grid_size)
        x = x.reshape(x.shape[0], h, w, p, p, self.in_chans)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], self.in_chans, h * p, w * p)

    def random_masking(
        self, x: torch.Tensor, mask_ratio: float, noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keep, per image, the int(L * (1 - mask_ratio)) tokens of `x` [N, L, D] with the smallest noise.

        `noise` [N, L] may be any score; by default it is drawn here.
        Returns the kept tokens [N, kept, D], the mask [N, L] and ids_restore [N, L], the inverse of the shuffle.
        """
        n, num_patches, _ = x.shape
        num_keep = int(num_patches * (1 - mask_ratio))
        if noise is None:
            noise = torch.rand(n, num_patches, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)  # small is keep, large is remove
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        mask = torch.ones_like(noise)
        mask[:, :num_keep] = 0
        mask = torch.gather(mask, dim=1, index=ids_restore)
        return take_tokens(x, ids_shuffle[:, :num_keep]), mask, ids_restore

    def hard_masking(
        self, x: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keep the tokens of `x` [N, L, D] where `visible` [N, L] is true, padded to one length for the batch.

        Returns the kept tokens [N, length, D], the mask, ids_restore, and the attention mask [N, 1, 1, 1 + length]
        (true: may be attended) that hides the padding, or None if nothing is padded.
        """
        mask = (~visible).to(torch.float32)
        ids_shuffle = torch.argsort(mask, dim=1, stable=True)  # visible tokens first, in raster order
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        counts = visible.sum(dim=1)
        # The sequence length depends on the masks: this is a host-device sync, the only one in a step.
        shortest, longest = torch.stack(torch.aminmax(counts)).tolist()
        length = min(round_up(1 + longest, self.pad_to) - 1, visible.shape[1])
        attn_mask = None
        if shortest < length:
            positions = torch.arange(1 + length, device=x.device)
            attn_mask = (positions <= counts[:, None])[:, None, None, :]  # [CLS] is position 0, so never hidden
        return take_tokens(x, ids_shuffle[:, :length]), mask, ids_restore, attn_mask

    def forward_encoder(
        self,
        x: torch.Tensor,
        mask_ratio: float,
        noise: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        keep_prob: torch.Tensor | None = None,
        soft: str = "tokens",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Images to latent tokens [N, 1 + kept, D], mask [N, L] and ids_restore (None in the soft path)."""
        x = self.patch_embed(x)
        x = x + self.pos_embed[:, 1:, :]

        attn_mask = None
        if keep_prob is not None:
            mask, ids_restore = 1 - keep_prob, None
            if soft == "attention":
                attn_mask = attention_bias(keep_prob)
            else:
                x = x * keep_prob.unsqueeze(-1)
        elif visible is not None:
            x, mask, ids_restore, attn_mask = self.hard_masking(x, visible)
        else:
            x, mask, ids_restore = self.random_masking(x, mask_ratio, noise)

        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat([cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = run_blocks(self.blocks, x, attn_mask, self.grad_checkpointing)
        return self.norm(x), mask, ids_restore

    def forward_decoder(
        self, x: torch.Tensor, ids_restore: torch.Tensor | None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Latent tokens [N, 1 + kept, D] to predicted patches [N, L, P].

        Mask tokens fill the removed positions. Without `ids_restore`, the tokens are complete and in order (the soft
        paths). `mask` [N, L] blends in the mask token: over the padding of hard masks, by degree with soft attention.
        """
        x = self.decoder_embed(x)
        cls_token, tokens = x[:, :1, :], x[:, 1:, :]
        if ids_restore is not None:
            n, num_patches = ids_restore.shape
            num_removed = num_patches - tokens.shape[1]
            tokens = torch.cat([tokens, self.mask_token.expand(n, num_removed, -1)], dim=1)
            tokens = take_tokens(tokens, ids_restore)  # unshuffle
        if mask is not None:
            tokens = torch.lerp(tokens, self.mask_token.to(tokens.dtype), mask.unsqueeze(-1).to(tokens.dtype))
        x = torch.cat([cls_token, tokens], dim=1)

        x = x + self.decoder_pos_embed
        x = run_blocks(self.decoder_blocks, x, None, self.grad_checkpointing)
        x = self.decoder_pred(self.decoder_norm(x))
        return x[:, 1:, :]  # without [CLS]

    def patch_error(self, imgs: torch.Tensor, pred: torch.Tensor) -> torch.Tensor:
        """Mean squared error of each patch [N, L], in float32 under any autocast."""
        target = self.patchify(imgs).float()
        if self.norm_pix_loss:
            mean = target.mean(dim=-1, keepdim=True)
            var = target.var(dim=-1, keepdim=True)
            target = (target - mean) / (var + 1.0e-6) ** 0.5
        return ((pred.float() - target) ** 2).mean(dim=-1)

    def forward_loss(self, imgs: torch.Tensor, pred: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Mean error of the removed patches; 0 if nothing in the batch is removed."""
        removed = mask.sum()
        # Dividing by one if nothing is removed keeps 0 / 0 out of the value and the gradient.
        return (self.patch_error(imgs, pred) * mask).sum() / torch.where(removed > 0, removed, torch.ones_like(removed))

    def forward(
        self,
        imgs: torch.Tensor,
        mask_ratio: float = 0.75,
        *,
        noise: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        keep_prob: torch.Tensor | None = None,
        soft: str = "tokens",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (loss, pred [N, L, P], mask [N, L]) for one of three ways to mask.

        mask_ratio  random masks; `noise` [N, L] replaces the drawn noise (the smallest values stay visible)
        visible     bool [N, L], True is kept: any mask, with any number of visible tokens per image
        keep_prob   float [N, L] in [0, 1]: all tokens are encoded and decoded, and the loss weights each patch's error
                    by the mask, 1 - keep_prob. `soft` is what `keep_prob` multiplies: "tokens", the input tokens
                    (the paper's step 2), or "attention", the attention to each token, with the decoder's input
                    blended towards the mask token; for binary values that equals `visible`
        """
        self.check_inputs(imgs, noise=noise, visible=visible, keep_prob=keep_prob)
        if soft not in SOFT:
            raise ValueError(f"soft={soft!r} is unknown; choose from {', '.join(SOFT)}")
        latent, mask, ids_restore = self.forward_encoder(imgs, mask_ratio, noise, visible, keep_prob, soft)
        blended = visible is not None or (keep_prob is not None and soft == "attention")
        pred = self.forward_decoder(latent, ids_restore, mask if blended else None)
        return self.forward_loss(imgs, pred, mask), pred, mask

    def check_inputs(self, imgs: torch.Tensor, **masking: torch.Tensor | None) -> None:
        """Reject inputs that would otherwise fail deep inside or, worse, broadcast."""
        expected = (self.in_chans, *self.img_size)
        if imgs.ndim != 4 or imgs.shape[1:] != expected:
            raise ValueError(f"imgs has shape {tuple(imgs.shape)}, but this model takes (N, {str(expected)[1:]}")
        given = {name: value for name, value in masking.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"give one of noise, visible and keep_prob, not {' and '.join(given)}")
        for name, value in given.items():
            if value.shape != (imgs.shape[0], self.patch_embed.num_patches):
                expected = (imgs.shape[0], self.patch_embed.num_patches)
                raise ValueError(f"{name} has shape {tuple(value.shape)}, but these images need {expected}")
            if (value.dtype == torch.bool) != (name == "visible"):
                raise ValueError(f"{name} has dtype {value.dtype}: visible takes bool, noise and keep_prob take floats")


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def take_tokens(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Tokens of `x` [N, L, D] at `ids` [N, M], as [N, M, D]."""
    return torch.gather(x, dim=1, index=ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def attention_bias(keep_prob: torch.Tensor) -> torch.Tensor:
    """Logits [N, 1, 1 + L, 1 + L] that multiply the attention to token j by keep_prob [N, L] before normalisation;
    [CLS], at position 0, keeps its weight. Expanded over queries, as fused kernels require to differentiate it."""
    bias = F.pad(keep_prob.clamp(min=1e-6).log(), (1, 0))[:, None, None, :]
    return bias.expand(-1, -1, bias.shape[-1], -1)


def transformer_blocks(
    depth: int,
    dim: int,
    num_heads: int,
    mlp_ratio: float,
    norm_layer: Callable[[int], nn.Module],
    last: type[Block] = Block,
) -> nn.ModuleList:
    """timm's pre-norm ViT blocks, which use torch's fused attention."""
    settings: dict[str, Any] = dict(mlp_ratio=mlp_ratio, qkv_bias=True, norm_layer=norm_layer)
    return nn.ModuleList((last if i == depth - 1 else Block)(dim, num_heads, **settings) for i in range(depth))


def run_blocks(
    blocks: nn.ModuleList, x: torch.Tensor, attn_mask: torch.Tensor | None = None, grad_checkpointing: bool = False
) -> torch.Tensor:
    """Tokens [N, L, D] through all blocks; `attn_mask` is bool (true: may be attended to) or added to the logits."""
    for block in blocks:
        if grad_checkpointing and torch.is_grad_enabled():
            x = checkpoint(block, x, attn_mask=attn_mask, use_reentrant=False)
        else:
            x = block(x, attn_mask=attn_mask)
    return x


def init_patch_embed(patch_embed: PatchEmbed) -> None:
    """Initialise the patch projection as the linear layer it is, not as a convolution."""
    weight = patch_embed.proj.weight.data
    nn.init.xavier_uniform_(weight.view(weight.shape[0], -1))


def init_linear_and_norm(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        if m.bias is not None:
            nn.init.zeros_(m.bias)
    elif isinstance(m, nn.LayerNorm):
        nn.init.ones_(m.weight)
        nn.init.zeros_(m.bias)


def grid_size(model: Any) -> tuple[int, int]:
    """Rows and columns of patches."""
    height, width = model.patch_embed.grid_size
    return height, width


def check_divisible(img_size: int | tuple[int, int], patch_size: int) -> None:
    sides = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if any(side < patch_size or side % patch_size for side in sides):
        size = "x".join(map(str, sides))
        raise ValueError(f"image size {size} is not divisible by the patch size {patch_size}")


vit_layer_norm = partial(nn.LayerNorm, eps=1e-6)


def mae_vit_base_patch16_dec512d8b(**kwargs) -> MaskedAutoencoderViT:
    return _mae(16, encoder=(768, 12, 12), decoder=(512, 8, 16), **kwargs)


def mae_vit_large_patch16_dec512d8b(**kwargs) -> MaskedAutoencoderViT:
    return _mae(16, encoder=(1024, 24, 16), decoder=(512, 8, 16), **kwargs)


def mae_vit_huge_patch14_dec512d8b(**kwargs) -> MaskedAutoencoderViT:
    return _mae(14, encoder=(1280, 32, 16), decoder=(512, 8, 16), **kwargs)


def mae_vit_small_patch16(**kwargs) -> MaskedAutoencoderViT:
    """timm's ViT-S with a proportionally smaller decoder: for one GPU."""
    return _mae(16, encoder=(384, 12, 6), decoder=(256, 4, 8), **kwargs)


def mae_vit_tiny_patch16(**kwargs) -> MaskedAutoencoderViT:
    """timm's ViT-Ti with a proportionally smaller decoder: for one small GPU."""
    return _mae(16, encoder=(192, 12, 3), decoder=(128, 4, 4), **kwargs)


def mae_vit_micro_patch4(**kwargs) -> MaskedAutoencoderViT:
    """For CPUs and tests: 32 px images in 64 patches."""
    return _mae(4, encoder=(64, 4, 4), decoder=(48, 2, 3), **{"img_size": 32, **kwargs})


def _mae(
    patch_size: int, encoder: tuple[int, int, int], decoder: tuple[int, int, int], **kwargs
) -> MaskedAutoencoderViT:
    """`encoder` and `decoder` are (width, depth, heads)."""
    embed_dim, depth, num_heads = encoder
    decoder_embed_dim, decoder_depth, decoder_num_heads = decoder
    return MaskedAutoencoderViT(
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        decoder_embed_dim=decoder_embed_dim,
        decoder_depth=decoder_depth,
        decoder_num_heads=decoder_num_heads,
        mlp_ratio=4,
        norm_layer=vit_layer_norm,
        **kwargs,
    )


# Upstream's recommended names, and the short names of the paper's commands.
mae_vit_base_patch16 = mae_vit_base = mae_vit_base_patch16_dec512d8b
mae_vit_large_patch16 = mae_vit_large = mae_vit_large_patch16_dec512d8b
mae_vit_huge_patch14 = mae_vit_huge = mae_vit_huge_patch14_dec512d8b

MODELS: dict[str, Callable[..., MaskedAutoencoderViT]] = {
    name: value for name, value in globals().items() if name.startswith("mae_vit_")
}


def build_mae(name: str, **kwargs) -> MaskedAutoencoderViT:
    """The model called `name`; the error for an unknown name lists the known ones."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(sorted(MODELS))}")
    return MODELS[name](**kwargs)
