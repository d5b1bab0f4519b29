"""Programs in processes of their own: how tests start them, find them and wait for them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(processes: int, *command: object) -> list[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return [*launcher, *map(str, command)]


def run_to_end(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Its exit code, standard output and standard error."""
    options = {"env": ENVIRONMENT, "timeout": 300, **options}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


def processes_with(text: str) -> list[int]:
    """Numbers of the processes whose command line has `text`."""
    return [int(pid) for pid in subprocess.run(["pgrep", "-f", text], capture_output=True, text=True).stdout.split()]


def wait_until(condition: Callable[[], bool], explain: Callable[[], object] = str, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)


def wait_for(text: str, said: Path, process: subprocess.Popen) -> None:
    """Until `process`, which writes to `said`, has written `text`."""

    def has_come() -> bool:
        if text in said.read_text():
            return True
        assert process.poll() is None, said.read_text()
        return False

    wait_until(has_come, said.read_text)
