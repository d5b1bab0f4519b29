"""Export a checkpoint's weights to where others use them, and print the three lines that load them there.

    python -m tools.export runs/clmae --format timm             # for timm.create_model: the encoder
    python -m tools.export runs/clmae --format hf               # a folder for transformers' ViTMAEForPreTraining
    python -m tools.export runs/clmae --format hf --encoder_only                                  # for its ViTModel
    python -m tools.export runs/clmae --format upstream         # a .pth of facebookresearch/mae, as it publishes them
    python -m tools.export runs/clmae --format safetensors --results eval/clmae    # with a description of the training

CHECKPOINT is a file of this project or of upstream MAE, whole or encoder alone, or a run's folder.
"""

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path, PurePath

import timm

from models_mae import MaskedAutoencoderViT
from models_vit import SIZES, VisionTransformer, encoder_of, encoder_weights, infer_model, mae_of, resolve_checkpoint
from tools.huggingface import Model, hf_config, hf_weights, image_size
from util.checkpoint import (
    SAFETENSORS,
    args_in,
    load_checkpoint,
    put_in_place,
    reason_of,
    save_checkpoint,
    save_safetensors,
    write_text,
)
from util.cli import ArgumentParser, UserError, logger, run
from util.evaluation.features import file_hash
from util.evaluation.results import Result, read_results, results_file

SUFFIXES = {"timm": SAFETENSORS, "hf": "", "upstream": ".pth", "safetensors": SAFETENSORS}  # "": a folder


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("tools.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of MAE or CL-MAE, or a run's folder")
    parser.add_argument("--format", required=True, choices=SUFFIXES, help="who shall load it")
    parser.add_argument("--output", default=None, help="file or, for hf, folder; default: beside the checkpoint")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--encoder_only", action="store_true", help="without the decoder; timm takes nothing else")
    parser.add_argument("--global_pool", action="store_true", help="for timm: the mean of the patch tokens, normalised")
    parser.add_argument("--cls_token", action="store_false", dest="global_pool", help="for timm: the [CLS] token")
    parser.set_defaults(global_pool=False)
    parser.add_argument("--results", default=None, help="evaluation's folder or results.jsonl: note the accuracies")
    return parser


def main(args: Namespace) -> None:
    check_args(args)
    path = resolve_checkpoint(args.checkpoint, "CHECKPOINT")
    output = Path(args.output) if args.output else default_output(path, args)
    try:
        check_output(output, path, args)
        lines = export(path, output, args)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {reason_of(error)}") from None
    logger.info("wrote %s; this loads it:\n%s", output, "\n".join(lines))


def export(path: Path, output: Path, args: Namespace) -> list[str]:
    """Write `output`; returns the lines of Python that load it."""
    checkpoint = load_checkpoint(path)
    model = model_of(checkpoint, str(path), args)
    metadata = describe(checkpoint, model)
    if args.results:
        metadata |= noted_accuracies(results_file(Path(args.results)), path)
    output.parent.mkdir(parents=True, exist_ok=True)
    return WRITERS[args.format](output, model, metadata)


def check_args(args: Namespace) -> None:
    args.encoder_only |= args.format == "timm"
    if args.global_pool and args.format != "timm":
        raise UserError(
            f"--global_pool is for --format timm; the weights of --format {args.format} serve any pooling, "
            "which is chosen where they are loaded"
        )
    if args.results and args.format == "upstream":
        raise UserError("--results: an upstream .pth has no place for accuracies; use --format safetensors")


def default_output(path: Path, args: Namespace) -> Path:
    """Such as checkpoint-399-timm.safetensors, beside checkpoint-399.pth."""
    parts = [path.stem]
    if args.format != "safetensors":  # its suffix says it
        parts.append(args.format)
    if args.encoder_only and args.format != "timm":
        parts.append("encoder")
    if args.global_pool:
        parts.append("global_pool")
    return path.with_name("-".join(parts) + SUFFIXES[args.format])


def check_output(output: Path, path: Path, args: Namespace) -> None:
    """Before any work: a suffix that says what the file is, and nothing in the way."""
    suffix = SUFFIXES[args.format]
    if suffix and output.suffix != suffix:
        raise UserError(f"--output {output}: for --format {args.format} the name must end in {suffix}")
    if output.parent.exists() and not output.parent.is_dir():
        raise UserError(f"--output {output}: {output.parent} is not a folder")
    if output.exists() and output.is_dir() == bool(suffix):
        kinds = ("a folder", "a file") if suffix else ("a file", "a folder")
        raise UserError(f"--output {output} is {kinds[0]}, but --format {args.format} writes {kinds[1]}")
    if output.exists() and path.exists() and output.samefile(path):
        raise UserError(f"--output {output} is the checkpoint itself; name another file")
    in_the_way = any(output.iterdir()) if output.is_dir() else output.exists()
    if in_the_way and not args.overwrite:
        raise UserError(f"{output} exists; add --overwrite to replace it, or name another --output")


def model_of(checkpoint: dict, source: str, args: Namespace) -> Model:
    encoder_weights(checkpoint, source)  # refuses what is no MAE at all
    if args.encoder_only:
        return encoder_of(checkpoint, source, global_pool=args.global_pool)
    if "mask_token" not in checkpoint.get("model", checkpoint):
        raise UserError(f"{source} has no decoder, which --format {args.format} includes; add --encoder_only")
    model = mae_of(checkpoint, source)
    height, width = image_size(model)
    if args.format == "hf" and height != width:
        raise UserError(
            f"--format hf: ViTMAEForPreTraining takes square images only, and {source} was trained on {height}x{width} "
            "pixels; add --encoder_only, for ViTModel takes them"
        )
    if args.format == "hf" and "norm_pix_loss" not in (checkpoint.get("args") or {}):
        logger.warning("%s does not say whether it was trained with --norm_pix_loss; config.json says no", source)
    return model


# --- What is known of the training ---


def describe(checkpoint: dict, model: Model) -> dict[str, str]:
    """The header of a safetensors file: text, or JSON where a value is none. What is not known has no entry."""
    known = checkpoint.get("metadata") or training(checkpoint)
    whole = isinstance(model, MaskedAutoencoderViT)
    own = {
        "format": "pt",  # transformers refuses files that do not say so
        "model": ("mae_" if whole else "") + name_of(model),
        "input_size": list(image_size(model)),
    }
    return {name: as_text(value) for name, value in (known | own).items() if value is not None}


def training(checkpoint: dict) -> dict[str, object]:
    args = checkpoint.get("args") or {}
    images = re.match(r"(\d+) images", args.get("data_identity") or "")
    return {
        "method": method(args),
        "epochs": epoch + 1 if isinstance(epoch := checkpoint.get("epoch"), int) else None,  # whole ones
        "planned_epochs": args.get("epochs"),
        "data": trained_on(args),
        "images": images and int(images[1]),
        "mask_ratio": args.get("mask_ratio"),
        "norm_pix_loss": args.get("norm_pix_loss"),
        "commit": args.get("commit"),
    }


def method(args: dict) -> str | None:
    if "mask_ratio" not in args:  # no pretraining's
        return None
    masking = args.get("masking", "random")  # upstream has no flag for it
    return {"random": "MAE", "curriculum": "CL-MAE"}.get(masking, f"MAE with {masking_name(masking)} masks")


def masking_name(masking: str) -> str:
    """Of a strategy in a file of one's own: the file's folder is nobody's business, either."""
    path, _, name = masking.rpartition(":")
    return f"{PurePath(path).name}:{name}" if path else name


def trained_on(args: dict) -> str | None:
    """The set, or the folder's name; where that folder lies is nobody's business."""
    if args.get("data_set", "folder") != "folder":
        return args["data_set"]
    return PurePath(args.get("data_path") or "").name or None


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def noted_accuracies(path: Path, checkpoint: Path) -> dict[str, str]:
    """What evaluations of this very file found: the last of each protocol, data set and pooling."""
    results, digest = read_results(path), file_hash(checkpoint)
    own = [result for result in results if result.checkpoint_sha256 == digest]
    if len(own) < len(results):
        others = len(results) - len(own)
        logger.warning("%s: %d of %d results are of other weights than %s", path, others, len(results), checkpoint)
    last = {(result.protocol, result.data, result.settings.get("pooling")): result for result in own}
    found = [entry for result in last.values() for entry in accuracy_of(result)]
    return {"accuracy": json.dumps(found)} if found else {}


def accuracy_of(result: Result) -> list[dict]:
    """One entry, or one for each number of shots."""
    told = {"protocol": result.protocol, "data": result.data, "pooling": result.settings.get("pooling")}
    return [
        told
        | ({} if shots is None else {"shots": shots})
        | {"acc1": round(score.acc[0], 2), "acc5": round(score.acc[1], 2)}
        for shots, score in result.scores.items()
    ]


# --- The formats: each writes, and returns the three lines of Python that load what it wrote ---


def write_timm(output: Path, model: VisionTransformer, metadata: dict[str, str]) -> list[str]:
    save_safetensors(output, model.state_dict(), metadata)
    name, kwargs = timm_model(model)
    arguments = "".join(f", {key}={quoted(value)}" for key, value in kwargs.items())
    return [
        "import timm",
        f"encoder = timm.create_model({quoted(name)}{arguments}, checkpoint_path={quoted(output)}).eval()",
        f"features = encoder(imgs)  # {images_of(model)} to [N, {model.embed_dim}]",
    ]


def timm_model(model: VisionTransformer) -> tuple[str, dict]:
    """timm's name for it, and the keyword arguments that make up the differences."""
    own, known = name_of(model), f"{name_of(model)}_224"
    kwargs: dict[str, object] = {"num_classes": 0}
    if not timm.is_model(known):
        known = "vit_base_patch16_224"
        kwargs |= dict(zip(("patch_size", "embed_dim", "depth", "num_heads"), SIZES[own], strict=True))
    height, width = image_size(model)
    if (height, width) != (224, 224):
        kwargs["img_size"] = height if height == width else (height, width)
    if (in_chans := model.patch_embed.proj.in_channels) != 3:
        kwargs["in_chans"] = in_chans
    if model.global_pool == "avg":
        kwargs["global_pool"] = "avg"
    return known, kwargs


def write_upstream(output: Path, model: Model, metadata: dict[str, str]) -> list[str]:
    size = image_size(model)
    # Upstream knows square images only, and its released files hold weights alone. No weight tells another shape.
    args = {} if size[0] == size[1] else {"args": {"input_size": list(size)}}
    save_checkpoint(output, {"model": model.state_dict()} | args)
    whole = isinstance(model, MaskedAutoencoderViT)
    module, variable = ("models_mae", "mae") if whole else ("models_vit", "encoder")
    kwargs: dict[str, object] = {} if whole else {"num_classes": 0}
    kwargs |= {"norm_pix_loss": True} if whole and model.norm_pix_loss else {}
    kwargs["img_size"] = size[0] if size[0] == size[1] else size
    kwargs |= {} if (in_chans := model.patch_embed.proj.in_channels) == 3 else {"in_chans": in_chans}
    arguments = ", ".join(f"{key}={quoted(value)}" for key, value in kwargs.items())
    return [
        f"import torch, {module}",
        f"{variable} = {module}.{metadata['model']}({arguments})",
        f'{variable}.load_state_dict(torch.load({quoted(output)}, weights_only=True)["model"])',
    ]


def write_safetensors(output: Path, model: Model, metadata: dict[str, str]) -> list[str]:
    save_safetensors(output, model.state_dict(), metadata)
    if isinstance(model, MaskedAutoencoderViT):
        return [
            "from models_vit import load_mae",
            f"mae = load_mae({quoted(output)})",
            f"loss, pred, mask = mae(imgs)  # {images_of(model)}",
        ]
    return [
        "from models_vit import load_encoder",
        f"encoder = load_encoder({quoted(output)})",
        f"features = encoder.forward_features(imgs)  # {images_of(model)} to [N, {model.embed_dim}]",
    ]


def write_hf(output: Path, model: Model, metadata: dict[str, str]) -> list[str]:
    weights = hf_weights(model)
    config = json.dumps(hf_config(model, args_in(metadata).get("mask_ratio", 0.75)), indent=2) + "\n"
    partial = output.with_name(output.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        save_safetensors(partial / "model.safetensors", weights, metadata)
        write_text(partial / "config.json", config)
        if output.is_dir():  # its other files are not ours to remove
            for name in ("model.safetensors", "config.json"):
                put_in_place(partial / name, output / name)
        else:
            put_in_place(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if isinstance(model, MaskedAutoencoderViT):
        return [
            "from transformers import ViTMAEForPreTraining",
            f"mae = ViTMAEForPreTraining.from_pretrained({quoted(output)})",
            f"loss = mae(imgs).loss  # {images_of(model)}",
        ]
    return [
        "from transformers import ViTModel",
        f"encoder = ViTModel.from_pretrained({quoted(output)}, add_pooling_layer=False)",
        f"features = encoder(imgs).last_hidden_state[:, 0]  # {images_of(model)} to [N, {model.embed_dim}]",
    ]


WRITERS = {"timm": write_timm, "hf": write_hf, "upstream": write_upstream, "safetensors": write_safetensors}


# --- Small things ---


def name_of(model: Model) -> str:
    return infer_model(model.state_dict(), "the model")


def images_of(model: Model) -> str:
    return f"images [N, {model.patch_embed.proj.in_channels}, {', '.join(map(str, image_size(model)))}]"


def quoted(value: object) -> str:
    """A Python literal, with double quotes."""
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else repr(value)


if __name__ == "__main__":
    run(main, get_args_parser())
