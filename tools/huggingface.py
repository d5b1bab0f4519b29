"""Our weights and sizes in the terms of Hugging Face transformers, which is not needed here.

Both 4.57.6 and 5.22.2 load them without a missing or unexpected key; the tests repeat that with the installed version.
"""

from typing import Any

import torch

from models_mae import MaskedAutoencoderViT
from models_vit import VisionTransformer
from util.datasets import pixel_statistics, resized_side
from util.hub import hf_names

Model = MaskedAutoencoderViT | VisionTransformer


def image_size(model: Model) -> tuple[int, int]:
    height, width = model.patch_embed.img_size  # pyright: ignore[reportGeneralTypeIssues] (timm's type allows one number)
    return height, width


def hf_weights(model: Model) -> dict[str, torch.Tensor]:
    """model.safetensors of ViTMAEForPreTraining or, of an encoder alone, of ViTModel."""
    encoder = "vit." if isinstance(model, MaskedAutoencoderViT) else ""
    weights = {}
    for key, value in model.state_dict().items():
        names = hf_names(key, encoder)
        parts = value.chunk(len(names))  # query, key and value are rows of one matrix here, three matrices there
        weights |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    return weights


def hf_config(model: Model, mask_ratio: float) -> dict:
    """config.json. It tells the two models apart, and the numbers of heads, which no weight does."""
    height, width = image_size(model)
    patch_size = model.patch_embed.patch_size[0]
    config = {
        "architectures": ["ViTModel"],
        "model_type": "vit",
        **hf_sizes(model.blocks),
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "layer_norm_eps": 1e-6,
        "image_size": height if height == width else [height, width],
        "patch_size": patch_size,
        "num_channels": model.patch_embed.proj.in_channels,
        "qkv_bias": True,
    }
    if not isinstance(model, MaskedAutoencoderViT):
        return config | {"encoder_stride": patch_size}
    return config | {
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **{f"decoder_{name}": value for name, value in hf_sizes(model.decoder_blocks).items()},
        "mask_ratio": mask_ratio,
        "norm_pix_loss": model.norm_pix_loss,
    }


def hf_preprocessor(model: Model, mean: list[float] | None, std: list[float] | None) -> dict:
    """preprocessor_config.json: the transform of our evaluations; without own statistics, ImageNet's."""
    (height, width), default = image_size(model), pixel_statistics(model.patch_embed.proj.in_channels)
    return {
        "image_processor_type": "BitImageProcessor",  # of those with a centre crop, the plainest
        "do_resize": True,
        "size": {"shortest_edge": resized_side((height, width))},
        "resample": 3,  # bicubic
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean or default[0],
        "image_std": std or default[1],
        "do_convert_rgb": model.patch_embed.proj.in_channels == 3,
    }


def hf_sizes(blocks: Any) -> dict[str, int]:
    return {
        "hidden_size": blocks[0].mlp.fc1.in_features,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": blocks[0].attn.num_heads,
        "intermediate_size": blocks[0].mlp.fc1.out_features,
    }
