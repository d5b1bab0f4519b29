"""Convert a checkpoint for other libraries and print the code that loads it.

    python -m tools.export runs/clmae --format timm             # for timm.create_model: the encoder
    python -m tools.export runs/clmae --format hf               # a folder for transformers' ViTMAEForPreTraining
    python -m tools.export runs/clmae --format hf --encoder_only                                  # for its ViTModel
    python -m tools.export runs/clmae --format hf --push_to_hub me/clmae         # and on the Hugging Face Hub
    python -m tools.export runs/clmae --format upstream         # a .pth of facebookresearch/mae, as it publishes them
    python -m tools.export runs/clmae --format safetensors --results eval/clmae    # with a description of the training
    python -m tools.export runs/clmae --format masking          # the trained masking module alone

CHECKPOINT is a file of this project or of upstream MAE, whole or encoder alone, or a run's folder.
"""

import json
import re
import shutil
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path, PurePath

import timm

from masking import masking_of
from models_cmm import MaskingViT
from models_mae import MaskedAutoencoderViT
from models_vit import SIZES, VisionTransformer, encoder_of, encoder_weights, infer_model, mae_of
from tools.card import OURS, model_card, training_command
from tools.huggingface import Model, hf_config, hf_preprocessor, hf_weights, image_size
from util import checkpoint as ckpt
from util import hub
from util.arguments import named_folder
from util.cli import ArgumentParser, UserError, logger
from util.evaluation.features import file_hash
from util.evaluation.results import read_results, results_file
from util.program import run

SUFFIXES = {"timm": ".safetensors", "hf": "", "upstream": ".pth", "safetensors": ".safetensors"}  # "": a folder
SUFFIXES["masking"] = ".safetensors"
CARD, FIGURE = "README.md", "figure.png"


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("tools.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of MAE or CL-MAE, or a run's folder")
    parser.add_argument(
        "--format", required=True, choices=SUFFIXES, help="target library; masking: the masking module alone"
    )
    parser.add_argument(
        "--output",
        default=None,
        help="file or, for hf, folder; default: next to the checkpoint, or here if it is the Hub's",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--encoder_only", action="store_true", help="without the decoder; timm takes nothing else")
    parser.add_argument("--global_pool", action="store_true", help="for timm: the mean of the patch tokens, normalised")
    parser.add_argument("--cls_token", action="store_false", dest="global_pool", help="for timm: the [CLS] token")
    parser.set_defaults(global_pool=False)
    parser.add_argument(
        "--results", default=None, help="evaluation's folder or results.jsonl: note the accuracies; default: the run's"
    )
    parser.add_argument("--push_to_hub", metavar="NAME", help="with --format hf: upload it to the Hugging Face Hub")
    return parser


def main(args: Namespace) -> None:
    check_args(args)
    path = ckpt.resolve_checkpoint(args.checkpoint, "CHECKPOINT")
    output = Path(args.output) if args.output else default_output(path, args)
    check_output(output, path, args)
    lines = export(path, output, args)
    logger.info("wrote %s; this loads it:\n%s", output, "\n".join(lines))
    if args.push_to_hub:
        push(output, args.push_to_hub)


def export(path: Path, output: Path, args: Namespace) -> list[str]:
    """Write `output`; returns the three lines of Python that load it."""
    checkpoint = ckpt.load_checkpoint(path)
    model = model_of(checkpoint, str(path), args)
    metadata = describe(checkpoint, model)
    results = results_file(Path(args.results or path.parent))
    if args.results or (results.is_file() and results.stat().st_size):
        metadata |= noted_accuracies(results, path)
    output.parent.mkdir(parents=True, exist_ok=True)
    if args.format == "masking" and isinstance(model, MaskedAutoencoderViT):
        return write_masking(output, checkpoint, str(path), model, metadata)
    if args.format == "hf":
        return write_hf(output, model, metadata, args.push_to_hub or output.name, figure_of(path.parent))
    return WRITERS[args.format](output, model, metadata)


def check_args(args: Namespace) -> None:
    args.encoder_only |= args.format == "timm"
    if args.global_pool and args.format != "timm":
        raise UserError("--global_pool is for --format timm; elsewhere, pooling is chosen where weights are loaded")
    if args.encoder_only and args.format == "masking":
        raise UserError("--encoder_only: --format masking writes the masking module; leave one of them out")
    if args.results and args.format == "upstream":
        raise UserError("--results: an upstream .pth has no place for accuracies; use --format safetensors")
    if args.push_to_hub:
        if args.format != "hf":
            raise UserError("--push_to_hub uploads what --format hf writes; use that")
        hub.library("--push_to_hub")  # if it is missing, say so before any work


def default_output(path: Path, args: Namespace) -> Path:
    """Such as checkpoint-399-timm.safetensors, beside checkpoint-399.pth."""
    parts = [path.stem, "" if args.format == "safetensors" else args.format]  # a suffix that says it is enough
    parts += ["encoder" if args.encoder_only and args.format != "timm" else "", "global_pool" * args.global_pool]
    folder = Path() if hub.is_hub_name(args.checkpoint) else path.parent  # not among the cached files of the Hub
    return folder / ("-".join(filter(None, parts)) + SUFFIXES[args.format])


def check_output(output: Path, path: Path, args: Namespace) -> None:
    """Before any work: a suffix that says what the file is, and nothing in the way."""
    suffix = SUFFIXES[args.format]
    if suffix and output.suffix != suffix:
        raise UserError(f"--output {output}: for --format {args.format} the name must end in {suffix}")
    if output.parent.exists() and not output.parent.is_dir():
        raise UserError(f"--output {output}: {output.parent} is not a folder")
    if not output.exists():
        return
    if output.is_dir() == bool(suffix):
        there, written = ("a folder", "a file") if suffix else ("a file", "a folder")
        raise UserError(f"--output {output} is {there}, but --format {args.format} writes {written}")
    if path.exists() and output.samefile(path):
        raise UserError(f"--output {output} is the checkpoint itself; name another file")
    if not args.overwrite and (output.is_file() or any(output.iterdir())):
        raise UserError(f"{output} exists; add --overwrite to replace it, or name another --output")


def model_of(checkpoint: dict, source: str, args: Namespace) -> Model:
    encoder_weights(checkpoint, source)  # refuses what is no MAE at all
    if args.encoder_only:
        return encoder_of(checkpoint, source, global_pool=args.global_pool)
    if "mask_token" not in ckpt.weights_of(checkpoint) and args.format != "masking":
        raise UserError(f"{source} has no decoder, which --format {args.format} includes; add --encoder_only")
    model = mae_of(checkpoint, source)
    height, width = image_size(model)
    if args.format == "hf" and height != width:
        raise UserError(
            f"--format hf: ViTMAEForPreTraining takes square images only, and {source} was trained on {height}x{width} "
            "pixels; add --encoder_only, for ViTModel takes them"
        )
    if args.format == "hf" and "norm_pix_loss" not in ckpt.settings_of(checkpoint):
        logger.warning("%s does not say whether it was trained with --norm_pix_loss; config.json says no", source)
    return model


# --- What is known of the training ---


def describe(checkpoint: dict, model: Model) -> dict[str, str]:
    """The header of a safetensors file. What is not known has no entry. transformers needs its "format"."""
    whole = isinstance(model, MaskedAutoencoderViT)
    own = {"format": "pt", "model": ("mae_" if whole else "") + name_of(model), "input_size": list(image_size(model))}
    args = ckpt.settings_of(checkpoint)  # of another library's snapshot: read from the files next to the weights
    known = {name: args.get(name) for name in ("mask_ratio", "norm_pix_loss", "mean", "std")}
    return header(known | (checkpoint.get("metadata") or training(checkpoint)) | own)


def header(entries: dict) -> dict[str, str]:
    """Strings as they are, other values as JSON."""
    known = {name: value for name, value in entries.items() if value is not None}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()}


def training(checkpoint: dict) -> dict[str, object]:
    args, epoch = ckpt.settings_of(checkpoint), checkpoint.get("epoch")
    images = re.match(r"(\d+) images", args.get("data_identity") or "")
    masks = masking_name(args.get("masking", "random"))
    return {
        "method": method(args),
        "epochs": epoch + 1 if isinstance(epoch, int) else None,  # whole ones
        "planned_epochs": args.get("epochs"),
        "data": trained_on(args),
        "images": images and int(images[1]),
        "command": training_command(args, trained_on(args), masks) if method(args) and "epochs" in args else None,
        "commit": args.get("commit"),
    }


def method(args: dict) -> str | None:
    if "mask_ratio" not in args:  # no pretraining's
        return None
    masking = args.get("masking", "random")  # upstream has no flag for it
    return {"random": "MAE", "curriculum": "CL-MAE"}.get(masking, f"MAE with {masking_name(masking)} masks")


def masking_name(masking: str) -> str:
    """The name of a strategy; a user's file without its folder, which may be private."""
    path, _, name = masking.rpartition(":")
    return f"{PurePath(path).name}:{name}" if path else name


def trained_on(args: dict) -> str | None:
    """The data set, or the folder's name without its location."""
    if args.get("data_set", "folder") != "folder":
        return args["data_set"]
    return named_folder(args.get("data_path") or "").name or None


def noted_accuracies(path: Path, checkpoint: Path) -> dict[str, str]:
    """What evaluations of this very file found: the last of each protocol, data set and pooling."""
    results, digest = read_results(path), file_hash(checkpoint)
    own = [result for result in results if result.checkpoint_sha256 == digest]
    if others := len(results) - len(own):
        logger.warning("%s: %d of %d results are of other weights than %s", path, others, len(results), checkpoint)
    last = {(result.protocol, result.data, result.settings.get("pooling")): result for result in own}
    found = [
        dict(zip(("protocol", "data", "pooling"), key, strict=True))
        | ({} if shots is None else {"shots": shots})
        | {"acc1": round(score.acc[0], 2), "acc5": round(score.acc[1], 2)}
        for key, result in last.items()
        for shots, score in result.scores.items()
    ]
    return {"accuracy": json.dumps(found)} if found else {}


# --- The formats: each writes, and returns the three lines of Python that load what it wrote ---


def write_timm(output: Path, model: VisionTransformer, metadata: dict[str, str]) -> list[str]:
    ckpt.save_safetensors(output, model.state_dict(), metadata)
    name, kwargs = timm_model(model)
    return [
        "import timm",
        f"encoder = timm.create_model({quoted(name)}, {arguments(kwargs | {'checkpoint_path': output})}).eval()",
        f"features = encoder(imgs)  # {shapes(model)}",
    ]


def timm_model(model: VisionTransformer) -> tuple[str, dict]:
    """timm's name for it, and the keyword arguments that make up the differences."""
    own, known = name_of(model), f"{name_of(model)}_224"
    kwargs: dict[str, object] = {"num_classes": 0}
    if not timm.is_model(known):
        known = "vit_base_patch16_224"
        kwargs |= dict(zip(("patch_size", "embed_dim", "depth", "num_heads"), SIZES[own], strict=True))
    kwargs |= {} if image_size(model) == (224, 224) else {"img_size": sides(model)}
    return known, kwargs | channels(model) | ({"global_pool": "avg"} if model.global_pool == "avg" else {})


def write_upstream(output: Path, model: Model, metadata: dict[str, str]) -> list[str]:
    size = image_size(model)
    # Upstream knows square images only, and its released files hold weights alone. No weight tells another shape.
    args = {} if size[0] == size[1] else {"args": {"input_size": list(size)}}
    ckpt.save_checkpoint(output, {"model": model.state_dict()} | args)
    module, variable, kwargs = "models_vit", "encoder", {"num_classes": 0}
    if isinstance(model, MaskedAutoencoderViT):
        module, variable, kwargs = "models_mae", "mae", {"norm_pix_loss": True} if model.norm_pix_loss else {}
    kwargs = kwargs | {"img_size": sides(model)} | channels(model)
    return [
        f"import torch, {module}",
        f"{variable} = {module}.{metadata['model']}({arguments(kwargs)})",
        f'{variable}.load_state_dict(torch.load({quoted(output)}, weights_only=True)["model"])',
    ]


def write_safetensors(output: Path, model: Model, metadata: dict[str, str]) -> list[str]:
    ckpt.save_safetensors(output, model.state_dict(), metadata)
    if isinstance(model, MaskedAutoencoderViT):
        load, use = "mae = load_mae", "loss, pred, mask = mae(imgs)"
    else:
        load, use = "encoder = load_encoder", "features = encoder.forward_features(imgs)"
    return [f"from models_vit import {load.split()[-1]}", f"{load}({quoted(output)})", f"{use}  # {shapes(model)}"]


def write_hf(output: Path, model: Model, metadata: dict[str, str], name: str, figure: Path | None) -> list[str]:
    """A folder for transformers; `name` is the model's in its card, and `figure` goes into it."""
    told = ckpt.args_in(metadata)
    texts = {
        hub.CONFIG: json.dumps(hf_config(model, told.get("mask_ratio", 0.75)), indent=2) + "\n",
        hub.PREPROCESSOR: json.dumps(hf_preprocessor(model, told.get("mean"), told.get("std")), indent=2) + "\n",
        CARD: model_card(name, metadata, hf_lines(model, name), figure and FIGURE),
    }
    if (output / CARD).exists() and OURS not in (output / CARD).read_text(encoding="utf-8", errors="replace"):
        logger.info("%s is your own and is kept", output / CARD)
        del texts[CARD]
    partial = ckpt.partial_of(output)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        ckpt.save_safetensors(partial / hub.WEIGHTS[0], hf_weights(model), metadata)
        for file, text in texts.items():
            ckpt.write_text(partial / file, text)
        if figure:
            shutil.copyfile(figure, partial / FIGURE)
        if output.is_dir():  # its other files are not ours to remove
            for file in partial.iterdir():
                ckpt.put_in_place(file, output / file.name)
        else:
            ckpt.put_in_place(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return hf_lines(model, output)


def hf_lines(model: Model, name: str | Path) -> list[str]:
    if isinstance(model, MaskedAutoencoderViT):
        load, more, use = "mae = ViTMAEForPreTraining", "", "loss = mae(imgs).loss"
    else:
        load, more = "encoder = ViTModel", ", add_pooling_layer=False"
        use = "features = encoder(imgs).last_hidden_state[:, 0]"
    return [
        f"from transformers import {load.split()[-1]}",
        f"{load}.from_pretrained({quoted(name)}{more})",
        f"{use}  # {shapes(model)}",
    ]


def figure_of(run: Path) -> Path | None:
    """A picture that main_visualize.py left in the run's folder: of the masks, if there is a choice."""
    return min(run.glob("*.png"), key=lambda path: (path.stem != "masks", path.name), default=None)


def push(folder: Path, name: str) -> None:
    """Only our files: a folder may hold others."""
    files = [hub.WEIGHTS[0], hub.CONFIG, hub.PREPROCESSOR, CARD, FIGURE]
    try:
        api = hub.library("--push_to_hub").HfApi()
        repository = api.create_repo(name, exist_ok=True).repo_id
        api.upload_folder(repo_id=repository, folder_path=folder, allow_patterns=files)
    except Exception as error:  # of the network, of the Hub, of the token
        raise UserError(f"--push_to_hub {name}: {hub.reason(error)}; the export stays in {folder}") from None
    logger.info("uploaded to https://huggingface.co/%s", repository)


WRITERS = {"timm": write_timm, "upstream": write_upstream, "safetensors": write_safetensors}


def write_masking(
    output: Path, checkpoint: dict, source: str, model: MaskedAutoencoderViT, metadata: dict[str, str]
) -> list[str]:
    """The module of a learned strategy; the header has all that its masks depend on."""
    masking = masking_of(checkpoint, model, source)
    if masking.module is None:
        raise UserError(f"--format masking: {source} has no masking module; its masks were not learned")
    own = asdict(masking.settings) | {"masking": masking_name(masking.settings.masking)}
    own |= {"patch_size": model.patch_embed.patch_size[0], "in_chans": model.in_chans}
    own |= {"lambda_cl": ckpt.lambda_cl_of(checkpoint)}
    if isinstance(masking.module, MaskingViT):  # the defaults are the strategy's
        own |= {"cmm_depth": len(masking.module.blocks), "cmm_dim": masking.module.cls_token.shape[-1]}
    del own["epochs"]  # in the header: those that are complete, and `planned_epochs`
    ckpt.save_safetensors(output, masking.module.state_dict(), metadata | header(own))
    return [
        "from masking import load_module",
        f"module = load_module({quoted(output)})",
        f"values = module(imgs)  # {shapes(model)} to [N, {model.patch_embed.num_patches}]",
    ]


# --- Parts of the lines ---


def name_of(model: Model) -> str:
    return infer_model(model.state_dict(), "the model")


def sides(model: Model) -> int | tuple[int, int]:
    height, width = image_size(model)
    return height if height == width else (height, width)


def channels(model: Model) -> dict[str, object]:
    return {} if (in_chans := model.patch_embed.proj.in_channels) == 3 else {"in_chans": in_chans}


def shapes(model: Model) -> str:
    """Of images and, from an encoder, features."""
    images = f"images [N, {model.patch_embed.proj.in_channels}, {', '.join(map(str, image_size(model)))}]"
    return images if isinstance(model, MaskedAutoencoderViT) else f"{images} to [N, {model.embed_dim}]"


def arguments(kwargs: dict) -> str:
    return ", ".join(f"{name}={quoted(value)}" for name, value in kwargs.items())


def quoted(value: object) -> str:
    """A Python literal, with double quotes."""
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else repr(value)


if __name__ == "__main__":
    run(main, get_args_parser())
