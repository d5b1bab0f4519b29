"""Programs in processes of their own: how tests start them, find them and wait for them."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def torchrun(processes: int, *command: object) -> list[str]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}")
    return [*launcher, *map(str, command)]


def run_to_end(command: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Its exit code, standard output and standard error."""
    options = {"env": ENVIRONMENT, "timeout": 300, **options}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)


class Ranks:
    """Processes that run main programs together, as torchrun's do, but stay for the next one: torch is imported once.

    For programs that end well; one that fails may end its processes.
    """

    def __init__(self, number: int):
        command = [sys.executable, str(ROOT / "tests" / "rank_worker.py")]
        common = {**ENVIRONMENT, "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1"}
        self.processes = [
            subprocess.Popen(
                command,
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(number)
        ]

    def run(self, program: str, *flags: object) -> tuple[list[int], str, str]:
        """The exit codes, and all that was written to standard output and to standard error."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        for process in self.processes:
            process.stdin.write(json.dumps([program, port, [str(flag) for flag in flags]]) + "\n")
            process.stdin.flush()
        codes, outputs, errors = zip(
            *(json.loads(process.stdout.readline()) for process in self.processes), strict=True
        )
        return list(codes), "".join(outputs), "".join(errors)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


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
