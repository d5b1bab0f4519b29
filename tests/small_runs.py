"""Small runs: their flags, what they leave, and how to compare them. Flags given after these override them."""

import json
from pathlib import Path

import torch

SHAPES = ("--data_set", "shapes", "--shapes_images", "48")
DATA = (*SHAPES, "--num_workers", "0", "--device", "cpu")
SMALL = (
    *("--model", "mae_vit_micro_patch4", "--input_size", "16", "--cmm_depth", "1", *DATA),
    *("--batch_size", "16", "--epochs", "2", "--warmup_epochs", "1"),
)


def checkpoint(folder: Path, epoch: int | str = 1) -> dict:
    return torch.load(folder / f"checkpoint-{epoch}.pth", weights_only=True)


def log_lines(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "log.txt").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "crc32"} for line in lines]


def assert_same_training(a: dict, b: dict) -> None:
    """All of two checkpoints but for their flags, bit for bit."""
    assert_identical({**a, "args": None}, {**b, "args": None})


def assert_identical(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_identical(a[name], b[name])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for ours, theirs in zip(a, b, strict=True):
            assert_identical(ours, theirs)
    else:
        assert a == b
