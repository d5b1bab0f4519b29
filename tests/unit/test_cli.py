"""The front door: names and paths as users give them, and what the system says of them."""

import errno
import io
import os
import sys

import pytest

from util.cli import ArgumentParser, UserError, file_name, flags_named, logger, plain, setup_logging


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
