"""How a program starts and ends: flags are parsed, signals and failures become one sentence and an exit code. Nothing
here imports torch, so that --help and a mistake in a flag are answered at once."""

import argparse
import errno
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from util.cli import Interrupted, OutOfResources, TrainingDiverged, UserError, logger, plain, setup_logging

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # requests for an orderly stop
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
LAUNCHER = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None  # torchrun's process, if it started this one
INTERRUPTED_BY_HAND = 130  # the exit code of a program that Ctrl-C ends
FEW_DESCRIPTORS = "too few file descriptors: raise the limit with `ulimit -n`, or lower --num_workers"
SHM_FULL = "/dev/shm is full (loader processes pass batches through it): enlarge it, or use --num_workers 0"
OUT_OF_MEMORY = "out of memory: lower --batch_size, --input_size or --num_workers, or choose a smaller --model"
SHORTAGES = {  # known by error number, or by what torch says
    FEW_DESCRIPTORS: ((errno.EMFILE, errno.ENFILE), ("Too many open files", "items of ancdata")),
    SHM_FULL: ((), ("out of shared memory", "shared memory(shm)", "unable to write to file </torch_", "/dev/shm")),
    OUT_OF_MEMORY: (
        (errno.ENOMEM,),
        ("out of memory", "allocate memory", "enough memory", "start new thread", "size calculation overflowed"),
    ),
}


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


def answer_early(name: str, get_args_parser: Callable[[], argparse.ArgumentParser]) -> None:
    """In the program that was started (`name` is its __name__), answer --help, bad flags and signals before heavy
    imports, and signals during them."""
    if name == "__main__":
        on_signals(leave_now, *STOP_SIGNALS, signal.SIGINT)
        get_args_parser().parse_args()


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
    if isinstance(error, OSError) and code not in (None, *DISK_FULL):
        text = error.strerror or ""  # not the name of a file, which may be in /dev/shm
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
    return isinstance(error, RuntimeError) and is_echo(str(error))


def is_echo(text: str) -> bool:
    return any(echo in text for echo in ECHOES)


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
    """At the end of the program, end loaders that an error left behind. They ignore SIGTERM, which multiprocessing
    would send them at exit."""
    for child in multiprocessing.active_children():
        child.kill()
    if loaders := sys.modules.get("torch.utils.data._utils"):
        # No clean-up by torch, which may wait forever for a lock that a child held.
        vars(loaders)["python_exit_status"] = True
