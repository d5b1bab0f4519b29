"""The command line as a user meets it: answers without delay, what is shown on a terminal and in a file."""

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
from contextlib import suppress

import pytest
from processes import ROOT, run_to_end, wait_until

from util.cli import Progress, logger

ANSWER = """
import runpy, sys
program, *flags = sys.argv[1:]
sys.argv = [program, *flags]
try:
    runpy.run_path(program, run_name="__main__")
except SystemExit as stop:
    code = stop.code
sys.exit("torch was imported" if "torch" in sys.modules else code)
"""


@pytest.mark.parametrize("program", sorted(path.name for path in ROOT.glob("main_*.py")))
def test_help_and_mistakes_are_answered_without_importing_torch(program):
    help = run_to_end([sys.executable, "-c", ANSWER, ROOT / program, "--help"], cwd=ROOT)
    assert (help.returncode, help.stderr) == (0, "")
    assert help.stdout.startswith(f"usage: {program}")
    wrong = run_to_end([sys.executable, "-c", ANSWER, ROOT / program, "--no_such_flag", "1"], cwd=ROOT)
    assert wrong.returncode == 2
    assert re.fullmatch(rf"{program}: .*\(see --help\)\n", wrong.stderr), wrong.stderr


LINES = "from util.cli import logger, setup_logging; setup_logging(); [logger.info('%d', n) for n in range(20_000)]"


def test_a_reader_that_leaves_early_is_no_error():
    done = run_to_end(["bash", "-o", "pipefail", "-c", '"$0" -c "$1" | head -n 1', sys.executable, LINES], cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_bar_of_100_columns_shows_rate_loss_and_time_left(monkeypatch):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    os.set_blocking(ours, False)
    written = bytearray()

    def read() -> str:
        with suppress(BlockingIOError):
            written.extend(os.read(ours, 1 << 16))
        return written.decode(errors="ignore")

    logger.setLevel(logging.INFO)
    with open(theirs, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        progress = Progress("epoch 137/400", total=5004, images_per_iteration=4096)
        for _ in range(2502):
            progress.advance()
        values = {"loss": 0.43210, "cmm/loss": 12.345, "lambda_cl": 0.62, "mask/visible": 0.25, "images/s": 1234.5}
        progress.report(values)
        wait_until(lambda: "images/s=1234" in read(), seconds=10)  # the kernel hands it over in its own time
        shown = written.decode().rsplit("\r", 1)[-1]
        progress.close()
    os.close(ours)
    assert re.match(r"epoch 137/400  50%\|.{20}\| 2502/5004  \d\d:\d\d left, loss=0.4321, images/s=1234$", shown), shown
    assert len(shown) <= 100
