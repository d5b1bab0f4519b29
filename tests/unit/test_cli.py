"""The command line: names and paths as users give them, and what the system reports about them."""

import argparse
import errno
import importlib
import io
import os
import sys

import pytest
from processes import ROOT

from util.cli import ArgumentParser, UserError, file_name, label, logger, plain, setup_logging
from util.program import flags_named
from util.training.launcher import add_job_arguments

FOLDERS = ("tools", "experiments", "benchmarks")
PROGRAMS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (*ROOT.glob("main_*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")))
    if "def get_args_parser" in path.read_text()
)


def parsed(*flags):
    parser = ArgumentParser("program")
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--cache_dir")
    parser.add_argument("--epochs", type=int, default=3)
    return parser, parser.parse_args(flags)


PATHS = {
    "the value itself": (("--cache_dir", "file"), "file", "--cache_dir file: File exists"),
    "below it": ((), "out/results.jsonl", "--output_dir out: out/results.jsonl: File exists"),
    "the innermost": (("--cache_dir", "out/x"), "out/x/y", "--cache_dir out/x: out/x/y: File exists"),
    "on the way to it": (("--cache_dir", "file/a/b"), "file", "--cache_dir file/a/b: file: File exists"),
    "on its way to it": (
        ("--cache_dir", "file.pth"),
        "file.pth.9.part",
        "--cache_dir file.pth: file.pth.9.part: File exists",
    ),
    "a positional argument": (("runs/a", "runs/b"), "runs/b/log.txt", "runs/b: runs/b/log.txt: File exists"),
}


@pytest.mark.parametrize("case", PATHS)
def test_what_the_system_says_of_a_path_names_its_flag(case):
    flags, path, expected = PATHS[case]
    with pytest.raises(UserError) as found, flags_named(*parsed(*flags)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    assert str(found.value) == expected


def test_a_full_disk_names_the_output_folder():
    with pytest.raises(UserError, match="--output_dir out: No space left"), flags_named(*parsed()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [OSError(errno.ENOENT, "none", "elsewhere/x"), ConnectionResetError(104, "reset")])
def test_other_errors_of_the_system_keep_their_traceback(error):
    with pytest.raises(type(error)) as found, flags_named(*parsed()):
        raise error
    assert found.value is error


@pytest.mark.parametrize("word", [os.fsdecode(b"caf\xe9"), "\ud800", "a\0b"])
def test_what_no_file_could_hold_is_refused_at_once(capsys, word):
    with pytest.raises(SystemExit) as stop:
        parsed("--output_dir", word)
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_long_names_fit_a_file_and_stay_apart(tmp_path):
    names = {file_name("é" * 400), file_name("é" * 401), file_name("x" * 5000), file_name("x")}
    assert len(names) == 4
    for name in names:
        (tmp_path / f"linprobe-cached-{name}-lr_grid-seed0.unfinished.partial").touch()


def test_messages_hold_no_terminal_commands_and_no_bytes_that_fail(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    setup_logging()
    logger.info("%s", "caf\udce9 \033[31mred \033[1mbold\033[0m\r\n\x9btwo\ud800 ±")
    stream.flush()
    logger.handlers.clear()
    assert stream.buffer.getvalue() == b"caf\\udce9  [31mred \033[1mbold\033[0m \n two\\ud800 \\xb1\n"


def test_plain_is_one_line():
    assert plain("a\nb\r\x1b[0m\u2028c\ud800\u202e") == "a b  [0m c  "


@pytest.mark.parametrize("program", [*PROGRAMS, "a job"])
def test_every_number_is_finite_and_bounded(program):
    if program == "a job":
        add_job_arguments(parser := ArgumentParser("job"))
    else:
        parser = importlib.import_module(program).get_args_parser()
    for action in parser._actions:
        if action.type in (None, label):
            defaults = action.default if isinstance(action.default, list | tuple) else [action.default]
            assert action.nargs == 0 or not any(isinstance(each, int | float) for each in defaults), action.dest
            continue
        assert action.type not in (int, float), f"{action.dest}: use a type of util.cli"
        for text in ("nan", "-nan", "inf", "-inf", "1e400", "-1e400", "1e10", "9" * 400, "-" + "9" * 400, "", "x"):
            with pytest.raises(argparse.ArgumentTypeError):
                action.type(text)
