"""Weights of transformers and timm: on the Hugging Face Hub, in its cache or in a folder, and their names in our terms.

A snapshot is a folder with config.json and model.safetensors or pytorch_model.bin, as both libraries save models.
The names are those of the files on the Hub and of transformers 4.x; 5.x renames them on loading and, on saving, back.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch

from util.cli import UserError

PREFIX = "hf-hub:"
CONFIG, PREPROCESSOR, WEIGHTS = "config.json", "preprocessor_config.json", ("model.safetensors", "pytorch_model.bin")
HF_BLOCK = {
    "norm1": ("layernorm_before",),
    "attn.qkv": ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    "attn.proj": ("attention.output.dense",),
    "norm2": ("layernorm_after",),
    "mlp.fc1": ("intermediate.dense",),
    "mlp.fc2": ("output.dense",),
}
HF_ENCODER = {
    "cls_token": "embeddings.cls_token",
    "pos_embed": "embeddings.position_embeddings",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
    "norm.weight": "layernorm.weight",
    "norm.bias": "layernorm.bias",
}
OUR_BLOCK = {theirs: (ours, at) for ours, parts in HF_BLOCK.items() for at, theirs in enumerate(parts)}
OUR_NAME = {theirs: ours for ours, theirs in HF_ENCODER.items()}


# --- Where they are ---


def is_hub_name(path: str) -> bool:
    return path.startswith(PREFIX) or (path.startswith("timm/") and not Path(path).exists())


def weights_in(folder: Path) -> list[Path]:
    """The weights of a snapshot, the preferred file first."""
    return [folder / name for name in WEIGHTS if (folder / CONFIG).is_file() and (folder / name).is_file()]


def fetch_snapshot(name: str, flag: str) -> Path:
    """The folder of a snapshot on the Hub. A cached one is taken as it is: a run resumes from the same weights, and
    nodes without network find what was fetched before."""
    huggingface_hub, repository = library(flag), name.removeprefix(PREFIX)
    try:
        folder = Path(huggingface_hub.snapshot_download(repository, local_files_only=True))
        if weights_in(folder):
            return folder
    except (OSError, ValueError):
        pass  # not cached; a wrong name is reported below
    try:  # the list of files first: where there is no network, it fails at once, and downloads only after retries
        listed = {file.rfilename for file in huggingface_hub.HfApi().model_info(repository, timeout=10).siblings or ()}
        wanted = [CONFIG, PREPROCESSOR, *[file for file in WEIGHTS if file in listed][:1]]
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # of the network, of the Hub, of the disk
        raise UserError(
            f"{flag} {name} is not cached and cannot be downloaded ({reason(error)}); check the name and the network, "
            "or name a folder with its config.json and weights"
        ) from None


def library(flag: str) -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"{flag} needs huggingface_hub: pip install huggingface_hub") from None
    return huggingface_hub


def reason(error: Exception) -> str:
    """The first line of an error, without a final full stop."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". ")


# --- Their names and ours ---


def hf_names(key: str, encoder: str) -> list[str]:
    """What transformers calls the weight `key`, or its parts; the encoder's begin with `encoder`."""
    if block := re.fullmatch(r"(decoder_)?blocks\.(\d+)\.(.+)\.(weight|bias)", key):
        decoder, number, module, kind = block.groups()
        layer = f"decoder.decoder_layers.{number}" if decoder else f"{encoder}encoder.layer.{number}"
        return [f"{layer}.{name}.{kind}" for name in HF_BLOCK[module]]
    return [encoder + HF_ENCODER[key] if key in HF_ENCODER else f"decoder.{key}"]


def our_name(name: str) -> tuple[str, int]:
    """What we call transformers' weight `name`, and which part of it that is; an unknown one keeps its name."""
    name = name.removeprefix("vit.")
    layer = r"(decoder\.decoder_)?(?:encoder\.layer|layers)\.(\d+)\.(.+)\.(weight|bias)"  # transformers 5 saves either
    if (block := re.fullmatch(layer, name)) and block[3] in OUR_BLOCK:
        module, part = OUR_BLOCK[block[3]]
        return f"{'decoder_' if block[1] else ''}blocks.{block[2]}.{module}.{block[4]}", part
    return OUR_NAME.get(name) or re.sub(r"^classifier\.", "head.", name.removeprefix("decoder.")), 0


def our_weights(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of ViTMAEForPreTraining, ViTMAEModel, ViTModel and the like, without the pooler, which we have no use for."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in theirs.items():
        if not name.startswith("pooler."):
            key, part = our_name(name)
            parts.setdefault(key, {})[part] = value
    return {key: torch.cat([of[at] for at in sorted(of)]) if len(of) > 1 else of[0] for key, of in parts.items()}


def in_our_terms(checkpoint: Any, path: Path) -> Any:
    """What a file at `path` holds, with our names and settings if it is transformers' or timm's, else as it is."""
    if not isinstance(checkpoint, dict):
        return checkpoint
    weights = checkpoint.get("model", checkpoint)
    theirs = isinstance(weights, dict) and any(
        str(name).endswith("patch_embeddings.projection.weight") for name in weights
    )
    told = settings_beside(path)
    if not theirs and not told:
        return checkpoint
    weights = our_weights(weights) if theirs else weights
    return {
        **(checkpoint if "model" in checkpoint else {}),
        "model": weights,
        "args": told | (checkpoint.get("args") or {}),
    }


def settings_beside(path: Path) -> dict[str, Any]:
    """The flags that a snapshot's files amount to; none for a file that lies in no snapshot."""
    if path not in weights_in(path.parent):
        return {}
    config, preprocessor = (read_settings(path.with_name(name)) for name in (CONFIG, PREPROCESSOR))
    timm = config.get("pretrained_cfg") or {}
    told = {
        "input_size": config.get("image_size") or timm.get("input_size", [])[1:] or None,
        "mean": preprocessor.get("image_mean") or timm.get("mean"),
        "std": preprocessor.get("image_std") or timm.get("std"),
        "num_heads": config.get("num_attention_heads"),
        "decoder_num_heads": config.get("decoder_num_attention_heads"),
        "mask_ratio": config.get("mask_ratio"),
        "norm_pix_loss": config.get("norm_pix_loss"),
    }
    return {name: value for name, value in told.items() if value is not None}


def read_settings(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
