"""When a run is saved (checkpoint-last.pth to resume from, checkpoint-N.pth to keep), and how a signal stops it."""

import signal
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from util import checkpoint as ckpt
from util.board import Board
from util.cli import Interrupted, OutOfResources, TrainingDiverged, UserError, logger
from util.datasets import ImageLoader
from util.misc import gather_objects, get_world_size, is_main_process, mean_of_processes
from util.program import STOP_SIGNALS, orphaned
from util.training.progress import EpochLog
from util.training.resume import TrainingState


class StopRequest:
    """A context in which a stop signal is only recorded, until the run checks for it at a suitable point. The same
    holds for a failure of loader processes.

    Processes agree on that point through a flag that is reduced with each step's losses and read a step later: it costs
    no reduction of its own, and no step waits for it.
    """

    def __init__(self, data_loader: ImageLoader | None = None):
        self.data_loader = data_loader
        self.received: set[signal.Signals] = set()
        self._flags: list[tuple[torch.Tensor, Any]] = []  # of the last two steps, oldest first

    def __enter__(self) -> "StopRequest":
        self._handlers = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, _frame) -> None:
        self.received.add(signal.Signals(number))

    def wanted(self) -> bool:
        """Whether this process has to stop, also if torchrun is gone: a new one may be writing to the same folder."""
        return bool(self.received) or self.fault() is not None or orphaned()

    def fault(self) -> str | None:
        """Why this process's loader processes failed, if they did."""
        return None if self.data_loader is None else self.data_loader.fetcher.fault

    def mean_of_processes(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A step's scalars, averaged over processes together with the flag."""
        if get_world_size() == 1:
            return values
        mine = next(iter(values.values())).new_full((), self.wanted())  # filled on the device: no copy
        *means, flag = mean_of_processes({**values, "": mine}).values()
        copy = flag.to("cpu", non_blocking=True)  # to pinned memory
        self._flags = [*self._flags[-1:], (copy, torch.cuda.current_stream().record_event() if flag.is_cuda else None)]
        return dict(zip(values, means, strict=True))

    def agreed(self) -> bool:
        """Whether any process had to stop one step ago: the same answer on all."""
        if get_world_size() == 1:
            return self.wanted()
        if len(self._flags) < 2:
            return False
        flag, copied = self._flags[0]
        if copied is not None:
            copied.synchronize()  # the device does not idle: it still has this step's work
        return bool(flag)

    def names(self) -> str:
        if self.received:
            return ", ".join(sorted(number.name for number in self.received))
        return "the end of torchrun" if orphaned() else "a signal to another process"


class Saver:
    """Saves every few minutes, every few epochs, at the end, and when a signal asks the run to stop. Only the first
    process writes.

    Training waits only for a copy of its state in host memory, not for the disk: a thread writes the copy. The next
    save and leaving the context wait for the thread. Loaders may be forked meanwhile: they use nothing that it holds.

    `moment` maps (epoch, step) to the state of the curriculum, stored alongside the flags.
    """

    def __init__(
        self,
        state: TrainingState,
        stop: StopRequest,
        log_writer: Board | None,
        args: Namespace,
        moment: Callable[[int, int], dict] = lambda epoch, step: {},
    ):
        self.state, self.stop, self.log_writer, self.args, self.moment = state, stop, log_writer, args, moment
        self.folder = Path(args.output_dir) if args.output_dir else None
        self._saved_at = time.monotonic()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written: Future | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_) -> None:
        self.join()

    def after_update(self, step: int, log: EpochLog) -> None:
        """Save if it is due; after a signal, save and stop the run."""
        stopping = self.stop.agreed()
        if stopping or self.due():
            self.save(ckpt.LAST, log.epoch - 1, step, log, insist=stopping)
        if stopping:
            self.end(step)

    def after_epoch(self, epoch: int, step: int) -> None:
        """Save if it is due; under the epoch's number every `save_every` epochs and after the last."""
        finished = epoch + 1 == self.args.epochs
        stopping = not finished and self.stop.agreed()
        if finished or (epoch + 1) % self.args.save_every == 0:
            self.save(f"checkpoint-{epoch}.pth", epoch, step, insist=finished or stopping)
        elif stopping or self.args.save_minutes == 0 or self.due():
            self.save(ckpt.LAST, epoch, step, insist=stopping)
        if finished:
            wait_for_the_writer()
        elif stopping:
            self.end(step)

    def due(self) -> bool:
        """By the first process's clock: the others write nothing, and wait for it at their next synchronisation."""
        minutes = self.args.save_minutes
        return is_main_process() and minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes

    def save(self, name: str, epoch: int, step: int, log: EpochLog | None = None, insist: bool = False) -> None:
        """Write a checkpoint in the background. A disk that is full now may have space in a quarter of an hour, so only
        the last checkpoints before an exit `insist`: they are waited for, and errors are raised."""
        if self.folder is None or not is_main_process():
            return
        self.join()  # before the next copy, so that there is at most one
        self.check_finite(epoch, step)
        if self.log_writer is not None:
            self.log_writer.flush()  # points up to here are not repeated after resuming
        checkpoint = ckpt.training_checkpoint(
            self.state.state_dict(),
            epoch=epoch,
            step=step,
            log=None if log is None else log.state_dict(),
            moment=self.moment(epoch if log is None else log.epoch, step),
            args=self.args,
        )
        self._saved_at = time.monotonic()
        self._written = self._thread.submit(self.write, self.folder / name, ckpt.on_host(checkpoint), insist)
        if insist:
            self.join()

    def write(self, path: Path, checkpoint: dict, insist: bool) -> None:
        """Runs in the thread. A numbered checkpoint also becomes checkpoint-last.pth."""
        try:
            ckpt.save_checkpoint(path, checkpoint)
        except UserError as error:
            if insist:
                raise
            logger.error("%s; training continues, and saving will be retried", error)
            return
        if path.name != ckpt.LAST:
            # The numbered file comes first: a run killed between the two loses nothing.
            self.link_last(path)
            self.drop_old(path.parent)

    def join(self) -> None:
        """Wait for the thread."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def link_last(self, numbered: Path) -> None:
        last = numbered.with_name(ckpt.LAST)
        try:
            ckpt.link_checkpoint(numbered, last)
        except OSError as error:
            logger.error("cannot write %s: %s", last, error.strerror)

    def drop_old(self, folder: Path) -> None:
        if self.args.keep:
            for path in ckpt.numbered_checkpoints(folder)[self.args.keep :]:
                path.unlink(missing_ok=True)

    def check_finite(self, epoch: int, step: int) -> None:
        """Catch non-finite weights before the next loss exposes them."""
        for network in (self.state.model, self.state.cmm):
            if network is not None and not all(p.isfinite().all() for p in network.parameters()):
                raise TrainingDiverged(
                    f"weights are not finite in epoch {epoch + 1}, step {step}; checkpoints written before are "
                    "untouched. Try a lower --blr, --clip_grad 1, or --amp off"
                )

    def end(self, step: int) -> None:
        faults = list(filter(None, wait_for_the_writer(self.stop.fault())))
        saved = f"saved as {self.folder / ckpt.LAST}; resume with --resume auto" if self.folder else "nothing is saved"
        if faults:
            raise OutOfResources(f"{faults[0]}. Stopped after step {step}: {saved}")
        raise Interrupted(f"stopped by {self.stop.names()} after step {step}: {saved}", self.stop.received)


def wait_for_the_writer(word: str | None = None) -> list[str | None]:
    """Wait until the checkpoint is written: the first process to exit may end the others. Returns each process's
    `word`."""
    return gather_objects(word)  # a barrier that needs no GPU
