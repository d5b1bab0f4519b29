"""What the tests share: upstream's numbers, a tiny model, and a small tensor of shapes."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from processes import ENVIRONMENT, ROOT, Ranks, processes_with
from slurm import slurm_fixture  # noqa: F401
from torch import nn

import main_pretrain
from models_mae import MaskedAutoencoderViT
from util.cli import logger
from util.data.shapes import CAMOUFLAGED, ShapesDataset
from util.datasets import pixel_statistics
from util.program import STOP_SIGNALS, run

DATA = ROOT / "tests" / "data"
MARKERS = ("cluster", "slow")

torch.set_num_threads(1)  # small models: two test processes with a thread each beat one with two
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it, and all below


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that share something expensive, such as a cluster, go to the same one of several test processes. Slow ones
    start first, so that at the end no process waits for another."""
    for item in items:
        if "slurm" in item.fixturenames:
            item.add_marker(pytest.mark.cluster)
        # One group each: two clusters at once would give their first jobs the same port to meet at.
        if group := next((name for name in ("slurm", "worlds", "two_processes") if name in item.fixturenames), None):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: next((at for at, name in enumerate(MARKERS) if item.get_closest_marker(name)), 2))


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    """Golden values of a tiny upstream MAE: weights, images, noise, and its outputs."""
    with np.load(DATA / "mae_tiny.npz") as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


@pytest.fixture(scope="session")
def golden_util() -> dict[str, np.ndarray]:
    """Golden values of upstream's schedules, optimizer and position embeddings."""
    with np.load(DATA / "util.npz") as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="session")
def upstream_flags() -> dict:
    return json.loads((DATA / "cli.json").read_text())


@pytest.fixture(scope="session")
def upstream_shapes() -> dict[str, dict[str, list[int]]]:
    return json.loads((DATA / "state_dict_shapes.json").read_text())


@pytest.fixture
def golden_mae(golden):
    """Builds the tiny MAE with upstream's weights: 16 patches of 8 px."""

    def build(norm_pix_loss: bool = False) -> MaskedAutoencoderViT:
        norm_layer = partial(nn.LayerNorm, eps=1e-6)
        model = MaskedAutoencoderViT(32, 8, 3, 32, 2, 4, 16, 1, 4, 4, norm_layer, norm_pix_loss)
        model.load_state_dict({name[8:]: value for name, value in golden.items() if name.startswith("weights/")})
        return model

    return build


@pytest.fixture(scope="session")
def shapes() -> tuple[torch.Tensor, torch.Tensor]:
    """2,000 normalised images [N, 3, 32, 32], and which of their 4 px patches [N, 64] an object's outline crosses.

    Camouflaged, so that outlines alone are hard to guess."""
    pixels, objects = zip(*map(ShapesDataset((32, 32), 2000, style=CAMOUFLAGED).render, range(2000)), strict=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in pixel_statistics(3))
    imgs = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255 - mean) / std
    covered = torch.from_numpy(np.stack(objects)).float().view(-1, 8, 4, 8, 4).mean(dim=(2, 4)).flatten(1)
    return imgs, (covered > 0) & (covered < 1)


@pytest.fixture
def program(monkeypatch, capsys):
    """Runs a main_*.py module in this process; returns (exit code, standard output, standard error)."""

    def call(module: ModuleType, *flags, timestamps: bool = False):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, flags)])
        code = 0
        try:
            run(module.main, module.get_args_parser(), timestamps)
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGALRM)}
    yield call
    for number, handler in handlers.items():  # a program that is about to end ignores them
        signal.signal(number, handler)
    logger.handlers.clear()  # they hold this test's captured streams


@pytest.fixture(scope="session")
def two_processes():
    """Runs a main program in two processes together; returns (exit codes, standard output, standard error)."""
    ranks = Ranks(2)
    yield ranks.run
    ranks.end()


@pytest.fixture
def cli(program):
    """main_pretrain.py with the given flags."""
    return partial(program, main_pretrain)


@pytest.fixture
def one_class(tmp_path):
    for split in ("train", "val"):
        folder = tmp_path / "data" / split / "only"
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 30), (200, 30, 90)).save(folder / "a.jpg")
    return tmp_path / "data"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """The project's files as a fresh clone would have them, with what is not committed yet."""
    folder = tmp_path_factory.mktemp("clone")
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture
def clmae_log(caplog):
    """What the programs log, for tests that call their parts."""
    logger.propagate = True
    logger.setLevel(logging.INFO)
    yield caplog
    logger.propagate = False


@pytest.fixture
def background(tmp_path):
    """Starts a command in a session of its own; returns the process and the file with all that it says.

    Nothing that has this test's folder in its command line outlives the test.
    """

    def start(command: list[str], **environment: str) -> tuple[subprocess.Popen, Path]:
        said = tmp_path / "said.txt"
        env = {**ENVIRONMENT, **environment}
        with open(said, "w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=env, cwd=tmp_path, start_new_session=True)
        started.append(process)
        return process, said

    started: list[subprocess.Popen] = []
    yield start
    for pid in {*processes_with(str(tmp_path)), *(process.pid for process in started if process.poll() is None)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
