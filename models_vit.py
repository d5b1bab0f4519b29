"""The encoder for evaluation: a ViT with upstream's names that loads any MAE or CL-MAE checkpoint.

    encoder = load_encoder("runs/clmae/checkpoint-399.pth")            # --model and --input_size are inferred
    features = encoder.forward_features(imgs)                          # [N, D]

Pooling is upstream's: the [CLS] token after the last norm or, with `global_pool`, the mean of the patch tokens followed
by a separate norm, which is not pretrained and therefore starts with scale 1 and shift 0.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm.models.vision_transformer
import torch

from models_mae import MaskedAutoencoderViT, build_mae, check_divisible, vit_layer_norm
from util.checkpoint import (
    check_heads,
    check_numbers,
    check_weights,
    load_checkpoint,
    load_weights,
    settings_of,
    weights_of,
)
from util.cli import UserError
from util.misc import derive_seed, generator
from util.pos_embed import interpolate_pos_embed


class VisionTransformer(timm.models.vision_transformer.VisionTransformer):
    """timm's ViT with upstream's pooling switch and `forward_features`."""

    def __init__(self, global_pool: bool = False, **kwargs):
        super().__init__(global_pool="avg" if global_pool else "token", **kwargs)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] to one feature vector each [N, D]."""
        return self.fc_norm(self.pool(super().forward_features(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.head_drop(self.forward_features(x)))


# (patch size, width, depth, heads); the first three are inferred from a checkpoint's weights, so they must be unique.
SIZES = {
    "vit_base_patch16": (16, 768, 12, 12),
    "vit_large_patch16": (16, 1024, 24, 16),
    "vit_huge_patch14": (14, 1280, 32, 16),
    "vit_small_patch16": (16, 384, 12, 6),
    "vit_tiny_patch16": (16, 192, 12, 3),
    "vit_micro_patch4": (4, 64, 4, 4),
}


def _vit(name: str, **kwargs) -> VisionTransformer:
    patch_size, embed_dim, depth, num_heads = SIZES[name]
    return VisionTransformer(
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=4,
        qkv_bias=True,
        norm_layer=vit_layer_norm,
        **kwargs,
    )


vit_base_patch16 = partial(_vit, "vit_base_patch16")
vit_large_patch16 = partial(_vit, "vit_large_patch16")
vit_huge_patch14 = partial(_vit, "vit_huge_patch14")
vit_small_patch16 = partial(_vit, "vit_small_patch16")
vit_tiny_patch16 = partial(_vit, "vit_tiny_patch16")
vit_micro_patch4 = partial(_vit, "vit_micro_patch4", img_size=32)
MODELS: dict[str, Callable[..., VisionTransformer]] = {name: globals()[name] for name in SIZES}


# --- From a checkpoint to an encoder ---


def load_encoder(
    path: str | Path | None,
    *,
    model: str | None = None,
    input_size: tuple[int, int] | None = None,
    in_chans: int | None = None,
    seed: int = 0,
    **options,
) -> VisionTransformer:
    """The frozen encoder of a checkpoint, in evaluation mode; None arguments are inferred from the checkpoint.

    `path` is a checkpoint of this project or of upstream MAE, with or without a decoder. None gives a random-weight
    baseline: the initial weights of a pretraining run with `seed`. `options` are `encoder_of`'s pooling and drop path.
    """
    if model is not None and model not in MODELS:
        raise UserError(f"--model {model} is unknown; choose from {', '.join(MODELS)}")
    if path is None:
        weights = random_weights(model, input_size, in_chans, seed)
        checkpoint, source = {"model": weights, "args": {"input_size": input_size}}, "random weights"
    else:
        checkpoint, source = load_checkpoint(path), str(path)
    return encoder_of(checkpoint, source, model=model, input_size=input_size, in_chans=in_chans, **options)


def encoder_of(
    checkpoint: dict,
    source: str,
    *,
    model: str | None = None,
    input_size: tuple[int, int] | None = None,
    in_chans: int | None = None,
    global_pool: bool = False,
    drop_path: float = 0.0,
) -> VisionTransformer:
    """As `load_encoder`, for a checkpoint in memory; `source` is its name in errors.

    `drop_path` is for training: the drop rate of the last block's branches, rising linearly from 0 at the first block.
    """
    weights = encoder_weights(checkpoint, source)
    check_encoder(weights, source)
    trained_size = size_of(checkpoint, weights)
    name = model or infer_model(weights, source)
    channels = weights["patch_embed.proj.weight"].shape[1]
    if in_chans not in (None, channels):
        raise UserError(f"--in_chans {in_chans}, but {source} was trained on images of {channels} channels")
    kwargs: dict = dict(in_chans=channels, global_pool=global_pool, drop_path_rate=drop_path)
    try:
        if size := input_size or trained_size:
            kwargs["img_size"] = (size[0], size[1])
            check_divisible(kwargs["img_size"], SIZES[name][0])
        encoder = MODELS[name](num_classes=0, weight_init="skip", **kwargs)
    except ValueError as error:
        raise UserError(f"--model {name} with --input_size: {error}") from None
    fit_weights(encoder, weights, trained_size, source)
    check_heads(encoder, checkpoint, source)
    return encoder.requires_grad_(False).eval()


def with_head(encoder: VisionTransformer, num_classes: int, seed: int = 0) -> VisionTransformer:
    """The encoder with a linear classifier, all of it trainable. The head starts near zero, as upstream, so that the
    first gradients do not disturb the pretrained weights."""
    encoder.reset_classifier(num_classes)
    head = encoder.get_classifier()
    torch.nn.init.trunc_normal_(head.get_parameter("weight"), std=2e-5, generator=generator("head", seed))
    torch.nn.init.zeros_(head.get_parameter("bias"))
    return encoder.requires_grad_(True)


def classifier_of(checkpoint: dict, source: str, **shape) -> VisionTransformer:
    """The fine-tuned classifier in a checkpoint of this project or of upstream; its pooling is inferred.

    `shape` holds the model, image size and channels for `encoder_of`.
    """
    weights = weights_of(checkpoint)
    if not isinstance(weights, dict) or "head.weight" not in weights:
        raise UserError(f"{source} has no head.weight: it is not the checkpoint of a fine-tuned classifier")
    encoder = encoder_of(checkpoint, source, global_pool="fc_norm.weight" in weights, **shape)
    classifier = with_head(encoder, len(weights["head.weight"]))
    head = {key.removeprefix("head."): value for key, value in weights.items() if key.startswith("head.")}
    load_weights(classifier.head, head, source)
    return classifier


def load_mae(path: str | Path, *, model: str | None = None) -> MaskedAutoencoderViT:
    """The whole autoencoder of a checkpoint, ready to train; `model`, such as mae_vit_base, is inferred if None."""
    return mae_of(load_checkpoint(path), str(path), model=model)


def mae_of(checkpoint: dict, source: str, *, model: str | None = None) -> MaskedAutoencoderViT:
    """As `load_mae`, for a checkpoint in memory."""
    encoder = encoder_weights(checkpoint, source)
    check_encoder(encoder, source)
    weights = weights_of(checkpoint)
    if "mask_token" not in weights:
        raise UserError(f"{source} has no decoder: it holds only an encoder")
    size = size_of(checkpoint, encoder)
    size = {} if size is None else {"img_size": size}
    norm_pix_loss = bool(settings_of(checkpoint).get("norm_pix_loss"))
    name, in_chans = model or f"mae_{infer_model(encoder, source)}", encoder["patch_embed.proj.weight"].shape[1]
    try:
        with torch.device("meta"):  # skips initialising weights that are replaced at once
            mae = build_mae(name, in_chans=in_chans, norm_pix_loss=norm_pix_loss, **size)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    check_weights(mae, weights, source)
    check_heads(mae, checkpoint, source)
    mae.load_state_dict({key: value.float() for key, value in weights.items()}, assign=True)
    return mae


def random_weights(
    model: str | None, input_size: tuple[int, int] | None, in_chans: int | None, seed: int
) -> dict[str, torch.Tensor]:
    if model is None:
        raise UserError("without --finetune there is nothing to infer --model from: name the model for random weights")
    torch.manual_seed(derive_seed("weights", seed))  # as in main_pretrain.py
    size = {} if input_size is None else {"img_size": input_size}
    try:
        mae = build_mae(f"mae_{model}", in_chans=in_chans or 3, **size)
    except ValueError as error:
        raise UserError(f"--model {model} with --input_size {input_size}: {error}") from None
    return encoder_weights({"model": mae.state_dict()}, "random weights")


def encoder_weights(checkpoint: dict, source: str) -> dict[str, torch.Tensor]:
    """The encoder's part of a checkpoint: no decoder, no head. The checkpoint may also be a bare state dict."""
    weights = weights_of(checkpoint)
    if not isinstance(weights, dict) or "patch_embed.proj.weight" not in weights:
        raise UserError(f"{source} holds no patch_embed.proj.weight: it is not a checkpoint of an MAE or ViT")
    return {key: value for key, value in weights.items() if not key.startswith(("decoder_", "mask_token", "head."))}


def check_encoder(weights: dict[str, torch.Tensor], source: str) -> None:
    """Reject invalid weights before the model's size is inferred from them."""
    check_numbers(weights, source)
    for key, axes in {"patch_embed.proj.weight": 4, "pos_embed": 3}.items():
        if key in weights and weights[key].ndim != axes:
            raise UserError(f"{source}: {key} has shape {tuple(weights[key].shape)}, not {axes} axes")


def infer_model(weights: dict[str, torch.Tensor], source: str) -> str:
    """The model with the weights' patch size, width and depth."""
    width, _, patch_size, _ = weights["patch_embed.proj.weight"].shape
    depth = len({key.split(".")[1] for key in weights if key.startswith("blocks.")})
    for name, size in SIZES.items():
        if size[:3] == (patch_size, width, depth):
            return name
    size = f"patch size {patch_size}, width {width} and depth {depth}"
    raise UserError(f"{source} holds a ViT of {size}, which matches none of {', '.join(MODELS)}")


def size_of(checkpoint: dict, weights: dict[str, torch.Tensor]) -> tuple[int, int] | None:
    """The image size a checkpoint was trained with: from its arguments, or the square that fits its positions."""
    if "pos_embed" not in weights:
        return None  # the missing key is reported later
    num_patches, patch_size = weights["pos_embed"].shape[1] - 1, weights["patch_embed.proj.weight"].shape[-1]
    told = settings_of(checkpoint).get("input_size")
    if told is not None:
        height, width = (told, told) if isinstance(told, int) else told
        if (height // patch_size) * (width // patch_size) == num_patches:
            return height, width
    side = round(num_patches**0.5)
    return (side * patch_size, side * patch_size) if side * side == num_patches else None


def fit_weights(
    encoder: VisionTransformer, weights: dict[str, torch.Tensor], trained_size: tuple[int, int] | None, source: str
) -> None:
    """Load strictly, except for the norm of the other pooling mode and the grid of positions."""
    own = encoder.state_dict()
    unused = "norm." if "fc_norm.weight" in own else "fc_norm."
    if "norm.weight" in own and "norm.weight" not in weights and "fc_norm.weight" in weights:
        raise UserError(f"{source} was fine-tuned with --global_pool, so it has no norm for [CLS]: add --global_pool")
    weights = {key: value for key, value in weights.items() if not key.startswith(unused)}
    if "fc_norm.weight" in own and "fc_norm.weight" not in weights:
        weights |= {key: value for key, value in own.items() if key.startswith("fc_norm.")}
    patch = encoder.patch_embed.patch_size[0]
    try:
        grid = None if trained_size is None else (trained_size[0] // patch, trained_size[1] // patch)
        interpolate_pos_embed(encoder, weights, grid)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None
    load_weights(encoder, weights, source)
