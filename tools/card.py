"""README.md of a model on the Hugging Face Hub: how it was trained, what it reached, how to load it."""

import json
import shlex
from pathlib import Path

import main_pretrain
from util.cli import plain
from util.evaluation.results import PROTOCOLS
from util.evaluation.tables import markdown
from util.hub import is_hub_name
from util.training.resume import FREE

OURS = "<!-- Written by tools.export, which replaces this file unless this line is gone. -->"


def model_card(name: str, metadata: dict[str, str], lines: list[str], figure: str | None) -> str:
    """`metadata` is the header of the weights, `lines` load them, and `figure` is a file beside the card."""
    told = {key: markdown(value) for key, value in metadata.items()}
    size = " x ".join(map(str, json.loads(metadata["input_size"])))
    parts = {
        "Method": told.get("method"),
        "Model": told["model"],
        "Data": told.get("data") and told["data"] + (f", {told['images']} images" if "images" in told else ""),
        "Epochs": told.get("epochs") and f"{told['epochs']} of {told.get('planned_epochs', 'an unknown number')}",
        "Input": f"{size} pixels, resized and normalised as preprocessor\\_config.json says",
        "Mask ratio": told.get("mask_ratio"),
        "Commit": told.get("commit"),
    }
    results = json.loads(metadata.get("accuracy", "[]"))
    text = ["---", *front_matter(name, results), "---", OURS, f"# {markdown(name)}", ""]
    text += ["| | |", "|:--|:--|", *(f"| {key} | {value} |" for key, value in parts.items() if value), ""]
    text += [f"![Masks and reconstructions]({figure})", ""] if figure else []
    if results:
        text += ["## Results", "", "| Protocol | Data | Pooling | Acc@1 | Acc@5 |", "|:--|:--|:--|--:|--:|"]
        text += [f"| {' | '.join(result_cells(result))} |" for result in results] + [""]
    text += code("Use", "\n".join(lines)) + (code("Training", metadata["command"]) if "command" in metadata else [])
    return "\n".join(text)


def front_matter(name: str, results: list[dict]) -> list[str]:
    """What the Hub reads; JSON is YAML, too."""
    entries: dict = {"library_name": "transformers", "pipeline_tag": "image-feature-extraction", "tags": ["vit", "mae"]}
    if results:
        entries["model-index"] = [{"name": plain(name), "results": [hub_result(result) for result in results]}]
    return [f"{key}: {json.dumps(value)}" for key, value in entries.items()]


def hub_result(result: dict) -> dict:
    data = {"type": plain(result["data"]), "name": plain(result["data"])}
    metric = {"type": "accuracy", "value": result["acc1"], "name": plain(f"Acc@1, {result_cells(result)[0]}")}
    return {"task": {"type": "image-classification"}, "dataset": data, "metrics": [metric]}


def result_cells(result: dict) -> list[str]:
    protocol: str = PROTOCOLS.get(result["protocol"]) or result["protocol"]
    protocol += f" ({result['shots']} per class)" if "shots" in result else ""
    accuracy = [f"{result[name]:.2f}" for name in ("acc1", "acc5")]
    return [markdown(str(value)) for value in (protocol, result["data"], result["pooling"], *accuracy)]


def code(title: str, lines: str) -> list[str]:
    """Indented: no text can end such a block, as it can a fenced one."""
    return [f"## {title}", "", *(f"    {plain(line)}" for line in lines.splitlines()), ""]


def training_command(args: dict, data: str | None, masking: str) -> str:
    """The flags of a pretraining that differ from their defaults. Files are named without their folders, which may be
    private."""
    given = {name: value for name, value in args.items() if name not in FREE} | {"masking": masking}
    for name in ("init", "class_list"):  # free to change on resuming, but part of what was trained
        if path := args.get(name):
            given[name] = path if is_hub_name(path) else Path(path).name
    if "batch_size" in args:  # however it was shared out
        given["global_batch_size"] = args["batch_size"] * args.get("world_size", 1) * args.get("accum_iter", 1)
    if data and args.get("data_set", "folder") == "folder":
        given["data_path"] = data
    if isinstance(size := given.get("input_size"), list) and size[0] == size[1]:
        given["input_size"] = size[0]
    if given.get("lr") is not None:
        given.pop("blr", None)  # which it follows from
    command = ["python", "main_pretrain.py"]
    for action in main_pretrain.get_args_parser()._actions:
        value = given.get(action.dest, action.default)
        if value == action.default or (action.nargs == 0 and value != action.const):
            continue
        values = [] if action.nargs == 0 else value if isinstance(value, list | tuple) else [value]
        command += [action.option_strings[0], *map(str, values)]
    return shlex.join(map(plain, command))
