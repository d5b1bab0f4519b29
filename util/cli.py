"""The command line: flags, errors, logging, progress, and how a program starts and ends. Nothing here imports torch,
so that --help and a mistake in a flag are answered at once."""

import argparse
import datetime
import errno
import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tqdm import tqdm

logger = logging.getLogger("clmae")

ROOT = Path(__file__).resolve().parent.parent
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # requests for an orderly stop
LOG_INTERVAL = 20  # iterations between reports
LARGEST_NUMBER = 10**9  # of any flag
LONGEST_LABEL = 255  # characters; that much may be the name of a folder, which labels are by default
LONGEST_NAME = 150  # bytes; file systems take 255, and a file's name holds more than this one
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
CONTROLS = re.compile(r"\033(?!\[[01]m)|[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")  # all but \n, \t and our bold print
# Flags that say where a run lives, not what it is: a copy of its config must neither write to nor resume the original.
PLACES = {
    *("config", "output_dir", "log_dir", "resume", "allow_changes", "device"),
    *("world_size", "local_rank", "dist_on_itp", "dist_url"),
}
LAUNCHER = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's process, if it started this one
INTERRUPTED_BY_HAND = 130  # the exit code of a program that Ctrl-C ends
FEW_DESCRIPTORS = "too few file descriptors: raise the limit with `ulimit -n`, or lower --num_workers"
SHM_FULL = "/dev/shm is full, through which loader processes hand over batches: enlarge it, or use --num_workers 0"
OUT_OF_MEMORY = "out of memory: lower --batch_size, --input_size or --num_workers, or take a smaller --model"
SHORTAGES = {  # known by error number, or by what torch says
    FEW_DESCRIPTORS: ((errno.EMFILE, errno.ENFILE), ("Too many open files", "items of ancdata")),
    SHM_FULL: ((), ("out of shared memory", "shared memory(shm)", "unable to write to file </torch_", "/dev/shm")),
    OUT_OF_MEMORY: (
        (errno.ENOMEM,),
        ("out of memory", "allocate memory", "enough memory", "start new thread", "size calculation overflowed"),
    ),
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


def answer_early(name: str, get_args_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """In the program that was started (`name` is its __name__), answer --help, bad flags and signals before heavy
    imports, and signals during them."""
    if name == "__main__":
        on_signals(leave_now, *STOP_SIGNALS, signal.SIGINT)
        get_args_parser().parse_args()


# --- Start and end of a program ---


def run(main: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, timestamps: bool = False) -> None:
    """Parse the flags and call `main`. A user's mistake ends in one sentence, an internal fault in a traceback."""
    on_signals(leave_now, *STOP_SIGNALS, signal.SIGINT)
    args = parser.parse_args()
    setup_logging(timestamps)
    try:
        with interruptible(), flags_named(parser, args):
            main(args)
    except (UserError, TrainingDiverged, OutOfResources) as error:
        if os.environ.get("RANK", "0") != "0":
            # Every process makes the same mistake. The launcher ends the others once the first has reported it.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(2)
        logger.error("%s", plain(str(error)))
        tell_torchrun(str(error))
        leave(error.exit_code)
    except Interrupted as error:
        logger.warning("%s", error if error.together else f"{error}; {how_to_continue(args)}")
        leave(error.exit_code, error.together)
    except KeyboardInterrupt:
        logger.error("interrupted")
        leave(INTERRUPTED_BY_HAND)
    except Exception as error:
        if process_group() is None:
            end_children()
            raise
        report_failure(error)
        leave(1)
    leave(0, together=True)


def on_signals(react: Callable[[signal.Signals], object], *numbers: signal.Signals) -> None:
    """Call `react` when a signal comes to this process. Its forks treat signals as if nothing had been set, until they
    say otherwise. A shell that starts a program in the background may want it to ignore Ctrl-C: that stays so."""
    process = os.getpid()

    def handle(number: int, _frame) -> None:
        if os.getpid() != process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        react(signal.Signals(number))

    for number in numbers:
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handle)


@contextmanager
def interruptible() -> Iterator[None]:
    """Signals end what is done meanwhile, with an exception, wherever it may get lost on its way. Training takes stop
    signals itself, to save its state first (util/training/saver.py)."""
    received: list[signal.Signals] = []
    report = sys.unraisablehook

    def interrupt(number: signal.Signals) -> NoReturn:
        if number != signal.SIGALRM:
            received.append(number)
        raise interruption(received[-1])

    def try_again(lost: "sys.UnraisableHookArgs") -> None:
        if isinstance(lost.exc_value, Interrupted | KeyboardInterrupt):  # in a destructor, it ends nothing
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        else:
            report(lost)

    on_signals(interrupt, *STOP_SIGNALS, signal.SIGINT, signal.SIGALRM)
    sys.unraisablehook = try_again
    try:
        yield
    except Exception:
        if received:  # C++ libraries may raise an error of their own instead
            raise interruption(received[-1]) from None
        raise
    finally:
        expect_the_end()
        sys.unraisablehook = report


def interruption(number: signal.Signals) -> BaseException:
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    return Interrupted(f"stopped by {number.name}", {number}, together=False)


def expect_the_end() -> None:
    """Let the program save and clean up: further stop signals are ignored. Schedulers send one to all processes, and
    torchrun then another. Ctrl-C does not wait."""
    for number in (*STOP_SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    on_signals(leave_now, signal.SIGINT)


def leave_now(number: signal.Signals) -> NoReturn:
    """Where nothing would catch an exception: before a program begins, and when it is about to end."""
    os.write(2, f"stopped by {number.name}\n".encode())
    os._exit(INTERRUPTED_BY_HAND if number == signal.SIGINT else Interrupted.exit_code)


def how_to_continue(args: argparse.Namespace) -> str:
    resumes = "resume" in args and not getattr(args, "eval", False)
    return "rerun with --resume auto to continue" if resumes else "rerun the same command to continue"


@contextmanager
def flags_named(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[None]:
    """Turn what the system says of a path into a UserError that names the flag, if the path comes from one, and what
    it says of too little memory and the like into OutOfResources."""
    try:
        yield
    except (TrainingDiverged, OutOfResources):
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if lacking := shortage(error):
            traceback.clear_frames(error.__traceback__)  # frees what was being built: reporting takes memory, too
            raise OutOfResources(f"{lacking} ({plain(str(error))[:200].strip()})") from None
        if not isinstance(error, OSError):
            raise
        path = error.filename
        if path is None and error.errno in DISK_FULL:  # writing does not say where; what programs write goes here
            path = getattr(args, "output_dir", None)
        flag = flag_of(os.fsdecode(path), parser, args) if isinstance(path, str | bytes | os.PathLike) else None
        if flag is None:
            raise
        raise UserError(f"{flag}: {error.strerror}") from None


def flag_of(path: str, parser: argparse.ArgumentParser, args: argparse.Namespace) -> str | None:
    """The flag and value that `path` comes from: the value itself, a path below it, or a folder on the way to it."""
    found, most, place = None, 0, os.path.abspath(path)
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        for given in value if isinstance(value, list) else [value]:
            if not isinstance(given, str) or not given:
                continue
            whole = os.path.abspath(given)
            # A file on its way to that name has a longer one.
            common = whole if place.startswith(f"{whole}.") else os.path.commonpath([place, whole])
            if common in (place, whole) and len(common) > most:
                names = [*action.option_strings[:1], given]  # a positional argument has no flag
                found, most = " ".join(names) + ("" if place == whole else f": {path}"), len(common)
    return found


def shortage(error: BaseException) -> str | None:
    """What the machine has too little of, and what to do, if that is the cause of `error`."""
    code, text = getattr(error, "errno", None), str(error)
    for cause, (codes, words) in SHORTAGES.items():
        if code in codes or any(word in text for word in words):
            return cause
    return OUT_OF_MEMORY if isinstance(error, MemoryError) else None


def place_in_world() -> tuple[int, int]:
    """This process's rank, and how many processes there are, as launchers tell by the environment."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return 0, 1
    numbers = {name: os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    numbers["LOCAL_RANK"] = numbers["LOCAL_RANK"] or "0"
    if wrong := [f"{name}={value}" for name, value in numbers.items() if not re.fullmatch("[0-9]{1,9}", value)]:
        raise UserError(f"the environment has {', '.join(wrong)}: start several processes with torchrun")
    rank, world_size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    if rank >= world_size:
        raise UserError(f"RANK={rank} must be below WORLD_SIZE={world_size}: start several processes with torchrun")
    return rank, world_size


def orphaned() -> bool:
    """Whether torchrun started this process, and is gone."""
    return LAUNCHER is not None and os.getppid() != LAUNCHER


def process_group():
    """torch.distributed where several processes have joined, else None; without importing torch."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None


def report_failure(error: Exception) -> None:
    """Say which of several processes failed, and why, or that it lost another one."""
    rank = os.environ.get("RANK", "?")
    if lost_another(error):
        logger.error("process %s: another process is gone (%s)", rank, str(error).splitlines()[0])
        return
    logger.error("process %s failed:\n%s", rank, traceback.format_exc())
    tell_torchrun(traceback.format_exc())


def tell_torchrun(text: str) -> None:
    """Put `text` into the summary that torchrun prints, which otherwise buries it under a traceback of its own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": message}, file)


# What gloo, NCCL and torch's store say of a process that is gone. NCCL's "unhandled system error" is not among them: a
# full /dev/shm causes it, too.
ECHOES = (
    *("by peer", "by remote peer", "remote process exited", "NCCL communicator was aborted"),
    *("Watchdog caught collective operation timeout", "Connection was likely closed"),
)


def lost_another(error: Exception) -> bool:
    """Whether this error only echoes the end of another process."""
    return isinstance(error, RuntimeError) and any(echo in str(error) for echo in ECHOES)


def leave(code: int, together: bool = False) -> None:
    """End the program. Unless all processes do so `together`, the others may be waiting for this one and its own
    clean-up for them, so nothing is cleaned up and the launcher learns of it at once."""
    end_children()
    distributed = process_group()
    if distributed is not None:
        if not together:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        distributed.destroy_process_group()
    if code:
        sys.exit(code)


def end_children() -> None:
    """End loaders that an error left behind. They ignore SIGTERM, which multiprocessing would send them at exit."""
    for child in multiprocessing.active_children():
        child.kill()


# --- Logging ---


class LineHandler(logging.StreamHandler):
    """Writes above a progress bar, if there is one. (tqdm's own redirection would merge the two streams below.)"""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            encoding = getattr(self.stream, "encoding", None) or "utf-8"
            text = CONTROLS.sub(" ", self.format(record)).encode(encoding, "backslashreplace").decode(encoding)
            tqdm.write(text, file=self.stream)
            self.flush()
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
