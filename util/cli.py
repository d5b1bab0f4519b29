"""The command line: flags, errors, logging and progress. Nothing here imports torch, so that --help and a mistake in a
flag are answered at once."""

import argparse
import datetime
import hashlib
import logging
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

logger = logging.getLogger("clmae")

ROOT = Path(__file__).resolve().parent.parent
LOG_INTERVAL = 20  # iterations between reports
LARGEST_NUMBER = 10**9  # of any flag
LONGEST_LABEL = 255  # characters; that much may be the name of a folder, which labels are by default
LONGEST_NAME = 150  # bytes; file systems take 255, and a file's name holds more than this one
CONTROLS = re.compile(r"\033(?!\[[01]m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")  # all but \n, \t and our bold print
# Flags that say where a run lives, not what it is: a copy of its config must neither write to nor resume the original.
PLACES = {
    *("config", "output_dir", "log_dir", "resume", "allow_changes", "device"),
    *("world_size", "local_rank", "dist_on_itp", "dist_url"),
}
Item = TypeVar("Item")


class UserError(ValueError):
    """A mistake in a flag or file. The message names the flag or file and says what to do."""

    exit_code = 2


class TrainingDiverged(RuntimeError):
    """The loss or the weights are no longer finite; training on would only produce useless checkpoints."""

    exit_code = 3


class OutOfResources(RuntimeError):
    """The machine has too little memory, shared memory or file descriptors for what the flags ask for."""

    exit_code = 3


class Interrupted(BaseException):
    """A signal asked the run to stop. All processes leave `together` if they agreed on it, with their state saved.

    It is no Exception, because a signal may come while one is handled that says something else of an image or a file.
    """

    exit_code = 75  # EX_TEMPFAIL in sysexits.h: try again

    def __init__(self, message: str, received: set[signal.Signals], together: bool = True):
        super().__init__(message)
        self.received, self.together = received, together


# --- Flags ---


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults that say something; an unset flag's help text explains what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, "", argparse.SUPPRESS) or isinstance(action.default, bool)
        return text if silent or "default" in text else f"{text} (default: %(default)s)"


class ArgumentParser(argparse.ArgumentParser):
    """argparse that answers a bad flag in one sentence and takes --some-flag for --some_flag."""

    def __init__(self, *args, **kwargs):
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        """A file that `--config` names, where a program has this flag, changes defaults."""
        argv = [self.with_underscores(word) for word in self.valid(sys.argv[1:] if args is None else args)]
        found, rest = super().parse_known_args(argv, namespace)
        if path := vars(found).pop("config", None):
            vars(found).clear()
            vars(found).update(self.read_config(path))  # argparse does not touch what is there, unless a flag does
            found, rest = super().parse_known_args(argv, found)
            delattr(found, "config")
        return found, rest

    def valid(self, words: list[str], where: str = "") -> list[str]:
        for word in words:
            if "\0" in word or word.encode(errors="ignore").decode() != word:
                self.error(f"{where}{word!a}: names and paths must be valid UTF-8")
            if word.startswith("--") and word.endswith("=--"):  # argparse would make an empty list of it
                self.error(f"{word} has no value")
        return words

    def with_underscores(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        underscored = "--" + flag[2:].replace("-", "_")
        known = flag.startswith("--") and underscored in self._option_string_actions
        return underscored + equals + value if known else word

    def read_config(self, path: str) -> dict[str, Any]:
        """The settings in a YAML file, by name. A relative path may lead from here or from the project's folder."""
        import yaml

        try:
            place = Path(path) if os.path.exists(path) else ROOT / path
            if place.exists() and not place.is_file():  # a pipe would be waited for
                self.error(f"--config {path}: not a file")
            entries = yaml.safe_load(place.read_text("utf-8")) or {}
        except OSError as error:
            self.error(f"--config {path}: {error.strerror}")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            self.error(f"--config {path} is not valid YAML: {error}")
        if not isinstance(entries, dict):
            self.error(f"--config {path}: every line must be a flag and its value, as in epochs: 400")
        flags = (action for action in self._actions if action.option_strings)
        known = {action.dest: action for action in flags if action.dest not in ("help", "config")}
        for name in entries:
            if name not in known:
                nearest = "".join(f"; did you mean {near}?" for near in get_close_matches(str(name), known, 1))
                self.error(f"--config {path}: {name} is unknown{nearest}")
        return {name: self.as_given(known[name], value, f"--config {path}: {name}") for name, value in entries.items()}

    def as_given(self, action: argparse.Action, value: Any, where: str) -> Any:
        """A value of a file, converted and checked as if it came from the command line."""
        if action.nargs == 0:
            return value if isinstance(value, bool) else self.error(f"{where} must be true or false")
        values = value if isinstance(value, list) and action.nargs else [value]
        if not all(type(part) in (str, int, float) for part in values) or not (values or action.nargs == "*"):
            several = ", or a list of them" if action.nargs else ""
            self.error(f"{where} must be a number or text{several}; quote what YAML reads otherwise, as in 'off'")
        try:
            return self._get_values(action, self.valid([str(part) for part in values], f"{where}: "))
        except (argparse.ArgumentError, ValueError) as error:
            self.error(f"{where}: {getattr(error, 'message', error)}")

    def config_text(self, args: argparse.Namespace) -> str:
        """What `--config` takes to repeat a run, from its flags before anything is filled in: what was left to be
        derived, such as a learning rate from the batch, is left out."""
        import yaml

        parts = [f"# Repeats this run: python {self.prog} --config FILE. Flags on the command line win.\n"]
        for group in self._action_groups:
            names = dict.fromkeys(action.dest for action in group._group_actions if action.dest not in PLACES)
            flags = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
            if flags:
                parts.append(f"# {group.title}\n{yaml.safe_dump(flags, sort_keys=False, allow_unicode=True)}")
        return "\n".join(parts)

    def error(self, message: str) -> NoReturn:
        self.exit(UserError.exit_code, f"{self.prog}: {plain(message)} (see --help)\n")


def number(
    kind: type = float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Callable[[str], float]:
    """A type for argparse: an int or float within bounds, finite, and no larger than any flag needs (larger numbers
    overflow somewhere). The message of a bad value states the bounds."""
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    demand = " and ".join(f"{name} {bound:.10g}" for name, bound in bounds.items() if bound is not None)
    noun = "a whole number" if kind is int else "a number"

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {noun}") from None
        within = (  # which nan never is
            (above is None or value > above)
            and (at_least is None or value >= at_least)
            and (below is None or value < below)
            and (at_most is None or value <= at_most)
        )
        if not within:
            raise argparse.ArgumentTypeError(f"{text} must be {demand}")
        if not abs(value) <= max(at_most or 0, LARGEST_NUMBER):
            raise argparse.ArgumentTypeError(f"{text} must be finite, and at most {LARGEST_NUMBER:g}")
        return value

    return parse


positive = number(above=0)
non_negative = number(at_least=0)
fraction = number(above=0, at_most=1)
probability = number(at_least=0, at_most=1)
count = number(int, at_least=1)
count_or_zero = number(int, at_least=0)
seed_number = number(int, at_least=0, at_most=2**32 - 1)


def label(text: str) -> str:
    """A type for argparse: a name for tables and plots, which take very long to draw with very long ones."""
    if len(text) > LONGEST_LABEL:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}... is longer than {LONGEST_LABEL} characters")
    return text


def file_name(name: str) -> str:
    """A name, such as a data set's, as part of a file name. One that is too long for a file ends in its hash."""
    safe = re.sub(r"[^\w.-]+", "_", name)
    if len(safe.encode()) <= LONGEST_NAME:
        return safe
    return (
        safe.encode()[: LONGEST_NAME - 9].decode(errors="ignore") + "-" + hashlib.sha256(safe.encode()).hexdigest()[:8]
    )


def plain(text: str) -> str:
    """One line without control characters, or bytes that UTF-8 cannot hold."""
    return "".join(character if character.isprintable() else " " for character in text)


# --- Logging ---


class LineHandler(logging.StreamHandler):
    """Writes above a progress bar, if there is one. (tqdm's own redirection would merge the two streams below.)"""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            text = CONTROLS.sub(" ", self.format(record)).encode(encoding, "backslashreplace").decode(encoding)
            tqdm.write(text, file=self.stream)
            self.flush()
        except BrokenPipeError:  # the reader is gone, as after `| head`: carry on without one
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
        except Exception:  # as logging's own handlers do: a closed terminal must not end a run
            self.handleError(record)


def setup_logging(timestamps: bool = False) -> None:
    """Progress to standard output, problems to standard error; `timestamps` are for log files, not for a terminal."""
    stamp = "%(asctime)s  " if timestamps and not sys.stdout.isatty() else ""
    progress = LineHandler(sys.stdout)
    progress.addFilter(lambda record: record.levelno < logging.WARNING)
    progress.setFormatter(logging.Formatter(stamp + "%(message)s", "%Y-%m-%d %H:%M:%S"))
    problems = LineHandler(sys.stderr)
    problems.setLevel(logging.WARNING)
    problems.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger.handlers[:] = [progress, problems]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def silence() -> None:
    """For all processes but the first, which speaks for them."""
    logger.setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


class Progress:
    """A bar on a terminal; in a log file, a line per report. Both show the time left."""

    BAR = "{desc} {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt}  {remaining} left{postfix}"
    ON_BAR = ("loss", "images/s")  # what fits beside the bar in 100 columns

    def __init__(self, header: str, total: int, images_per_iteration: int, done: int = 0):
        self.header, self.total, self.images = header, total, images_per_iteration
        self.done = self._done_before = self._reported = done
        self._start = self._last = time.monotonic()
        hidden = not (sys.stdout.isatty() and sys.stderr.isatty() and logger.isEnabledFor(logging.INFO))
        self.bar = tqdm(
            total=total, initial=done, desc=header, leave=False, disable=hidden, bar_format=self.BAR, dynamic_ncols=True
        )

    def advance(self) -> None:
        self.done += 1
        self.bar.update()

    def images_per_second(self) -> float:
        """Since the last call."""
        now = time.monotonic()
        rate = self.images * (self.done - self._reported) / max(now - self._last, 1e-9)
        self._last, self._reported = now, self.done
        return rate

    def report(self, values: Mapping[str, float]) -> None:
        """Update the bar, or log a line; the end of the loop is left to whoever sums it up."""
        if not self.bar.disable:
            few = values if len(values) == 1 else {name: values[name] for name in self.ON_BAR if name in values}
            self.bar.set_postfix({name: f"{value:.4g}" for name, value in few.items()})
        elif self.done < self.total:
            seconds_each = (time.monotonic() - self._start) / (self.done - self._done_before)
            left = datetime.timedelta(seconds=int(seconds_each * (self.total - self.done)))
            text = "  ".join(f"{name}: {value:.4g}" for name, value in values.items())
            logger.info("%s [%d/%d]  %s left  %s", self.header, self.done, self.total, left, text)

    def close(self) -> None:
        self.bar.close()


def tracked(items: Iterable[Item], header: str | None, total: int, size: int, rate_name: str) -> Iterator[Item]:
    """Yields `total` items of `size` things each and reports how fast they go, under `header` if there is one."""
    if header is None:
        yield from items
        return
    progress = Progress(header, total, size)
    try:
        for item in items:
            yield item
            progress.advance()
            if progress.done % LOG_INTERVAL == 0:
                progress.report({rate_name: progress.images_per_second()})
    finally:
        progress.close()
