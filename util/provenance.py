"""Which code makes a result: the commit, and the versions of what it builds on."""

import os
import platform
import subprocess

import numpy as np
import timm
import torch
import torchvision


def git_commit() -> str | None:
    """Of this code, with "-dirty" where files differ from it; None outside a repository."""
    command = ["git", "-C", os.path.dirname(__file__), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "numpy": np.__version__,
    }
