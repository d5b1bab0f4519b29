"""A miniature of an upstream checkout, made of facts about it: names and flags; its models are this project's."""

from pathlib import Path

from conftest import ROOT

ACTIONS = {"_StoreAction": "store", "_StoreTrueAction": "store_true", "_StoreFalseAction": "store_false"}
RUNNABLE = ("models_mae.py", "util/pos_embed.py")

# Stands in for the code of a file: the file of the same name here, under a name of its own.
BORROWED = """
import importlib.util
spec = importlib.util.spec_from_file_location("borrowed", {path!r})
borrowed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(borrowed)
globals().update({{name: value for name, value in vars(borrowed).items() if not name.startswith("__")}})
"""


def stub(lines: list[str]) -> str:
    """Python text with the names and signatures of api.json's lines, and empty bodies."""
    text = ["import torch", "import torch.nn as nn"]
    for line in lines:
        name = line.strip()
        if line.startswith("  "):
            text.append(f"    def {name.partition('.')[2]}: ...")
        elif name.startswith("class "):
            text += [f"{name}:", "    pass"]
        else:
            text.append(name if " = " in name and "(" not in name else f"def {name}: ...")
    return "\n".join(text) + "\n"


def parser_stub(flags: dict) -> str:
    """Python text of a get_args_parser with the flags of cli.json."""
    text = ["import argparse", "def get_args_parser():", "    parser = argparse.ArgumentParser('x', add_help=False)"]
    defaults = flags.get("set_defaults", {})
    for flag, facts in flags.items():
        if flag == "set_defaults":
            continue
        action = ACTIONS[facts["action"]]
        said = [repr(flag), f"action={action!r}", f"dest={facts['dest']!r}"]
        if action == "store":
            said.append(f"default={facts['default']!r}")
        if facts["type"] is not None:
            said.append(f"type={facts['type']}")
        text.append(f"    parser.add_argument({', '.join(said)})")
    text += [f"    parser.set_defaults({dest}={value!r})" for dest, value in defaults.items()]
    return "\n".join([*text, "    return parser", ""])


def make_tree(root: Path, api: dict[str, list[str]], flags: dict) -> Path:
    """Upstream's util has no __init__.py, and neither does this one."""
    for file, lines in api.items():
        text = stub(lines)
        program = file.removesuffix(".py")
        if program in flags:
            text = stub([line for line in lines if "get_args_parser" not in line]) + parser_stub(flags[program])
        if file in RUNNABLE:
            text += BORROWED.format(path=str(ROOT / file))
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "README.md").write_text("A miniature.\n")
    (root / "FINETUNE.md").write_text("A miniature.\n")
    (root / "__pycache__").mkdir()
    (root / "__pycache__" / "models_mae.pyc").write_bytes(b"")
    return root
