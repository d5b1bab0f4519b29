"""What a run reports while it runs: values kept on the device until they are wanted, averages, a bar or plain lines."""

import datetime
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from util.metrics import mask_health
from util.misc import TrainingDiverged, gather_rows, is_main_process, logger

Item = TypeVar("Item")
LOG_INTERVAL = 20  # iterations between reports; in between nothing waits for the device


SHOWN = (
    *("loss", "cmm/loss", "cmm/lambda_cl", "mask/visible", "mask/distinct", "mask/decisive", "mask/error_vs_random"),
    *("knn/acc1", "knn/acc5", "test/acc1", "test/acc5", "test/loss", "skipped_steps"),
)


def brief(values: Mapping[str, float]) -> dict[str, float]:
    """The few figures that fit a line; all of them are in log.txt and TensorBoard."""
    return {name: values[name] for name in SHOWN if name in values}


class MetricBuffer:
    """Scalars of several steps, kept on the device so that no step waits for them."""

    def __init__(self):
        self._steps: list[tuple[int, list[str]]] = []
        self._values: list[torch.Tensor] = []

    def add(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        self._steps.append((step, list(values)))
        self._values.extend(value.detach().float() for value in values.values())

    def fetch(self) -> list[tuple[int, dict[str, float]]]:
        """All that was added since the last call, as (step, values). One host-device sync."""
        values = iter(torch.stack(self._values).tolist() if self._values else [])
        fetched = [(step, {name: next(values) for name in names}) for step, names in self._steps]
        self._steps, self._values = [], []
        return fetched


class Averages:
    """Running means by name, in double precision."""

    def __init__(self):
        self._sums: dict[str, tuple[float, int]] = {}

    def update(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = (total + value, count + 1)

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items()}

    def state_dict(self) -> dict[str, tuple[float, int]]:
        return dict(self._sums)

    def load_state_dict(self, state: dict[str, tuple[float, int]]) -> None:
        self._sums = dict(state)


class LossGuard:
    """Watches the losses of a run: stops it at the first that is not finite or, under fp16, counts the skipped steps.

    Under fp16 the gradient scaler has already left such a step out, and lowers its scale until the steps fit again.
    Only a long unbroken series of them means that the weights themselves are lost.
    """

    MAX_SKIPPED_IN_A_ROW = 100

    def __init__(self, skip: bool):
        self.skip = skip
        self.skipped = self._in_a_row = 0
        self._last_finite = "none yet"

    def check(self, step: int, losses: Mapping[str, float]) -> bool:
        """Whether the losses of `step` are all finite."""
        text = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        if all(math.isfinite(value) for value in losses.values()):
            self._last_finite, self._in_a_row = text, 0
            return True
        self.skipped += 1
        self._in_a_row += 1
        if not self.skip or self._in_a_row > self.MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"the loss is not finite at step {step} ({text}); the last finite losses were: {self._last_finite}. "
                "Checkpoints written before are untouched. Try a lower --blr, --clip_grad 1, or --amp off"
            )
        return False


class Board(SummaryWriter):
    """TensorBoard files that a run can do without: a full disk ends them, and not the run."""

    broken = False

    def add_scalar(self, *args, **kwargs) -> None:
        self._attempt(super().add_scalar, *args, **kwargs)

    def add_image(self, *args, **kwargs) -> None:
        self._attempt(super().add_image, *args, **kwargs)

    def flush(self) -> None:
        self._attempt(super().flush)

    def _attempt(self, write: Callable[..., None], *args, **kwargs) -> None:
        if self.broken:
            return
        try:
            write(*args, **kwargs)
        except OSError as error:
            self.broken = True
            logger.error("cannot write to TensorBoard's files in %s (%s); they end here", self.log_dir, error.strerror)


class Progress:
    """A tqdm bar on a terminal; where output goes to a file, a plain line for each report. Both tell the time left."""

    def __init__(self, header: str, total: int, images_per_iteration: int, done: int = 0):
        self.header, self.total, self.images = header, total, images_per_iteration
        self.done = self._done_before = self._reported = done
        self._start = self._last = time.monotonic()
        hidden = not (sys.stdout.isatty() and sys.stderr.isatty() and is_main_process())
        self.bar = tqdm(total=total, initial=done, desc=header, unit="it", leave=False, disable=hidden)

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
        shown = {name: f"{value:.4g}" for name, value in values.items()}
        if not self.bar.disable:
            self.bar.set_postfix(shown)
            return
        seconds_each = (time.monotonic() - self._start) / (self.done - self._done_before)
        left = seconds_each * (self.total - self.done)
        eta = datetime.timedelta(seconds=int(left))
        text = "  ".join(f"{name}: {value}" for name, value in shown.items())
        logger.info("%s [%d/%d]  eta: %s  %s", self.header, self.done, self.total, eta, text)

    def close(self) -> None:
        self.bar.close()


def tracked(items: Iterable[Item], header: str | None, total: int, size: int, rate_name: str) -> Iterator[Item]:
    """`total` items of `size` things each, with a bar or lines that tell how fast they go; without, if no header."""
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


class EpochLog:
    """Collects the values of an epoch's iterations and reports them every LOG_INTERVAL, with one sync each time.

    Losses come in as those of the global batch, so every process has the same log. `done` iterations of the epoch were
    logged before, by a run that was interrupted.
    """

    def __init__(
        self,
        epoch: int,
        done: int,
        iterations: int,
        loss_guard: LossGuard,
        log_writer: SummaryWriter | None,
        global_batch: int,
    ):
        self.epoch, self.iterations = epoch, iterations
        self.loss_guard, self.log_writer = loss_guard, log_writer
        self.buffer, self.interval, self.averages = MetricBuffer(), Averages(), Averages()
        self.settings: dict[int, dict[str, float]] = {}
        self.progress = Progress(f"epoch {epoch}", iterations, global_batch, done)

    def add(
        self,
        iteration: int,
        losses: dict[str, torch.Tensor],
        settings: dict[str, float],
        mask: torch.Tensor | None = None,
        keep_prob: torch.Tensor | None = None,
    ) -> None:
        self.progress.advance()
        due = (iteration + 1) % LOG_INTERVAL == 0 or iteration + 1 == self.iterations
        values = dict(losses)
        if due and mask is not None:  # the masks' health is sampled from one global batch of each interval
            masks = gather_rows(mask, equal=True)
            health = mask_health(masks, None if keep_prob is None else gather_rows(keep_prob.detach(), equal=True))
            values |= {f"mask/{name}": value for name, value in health.items()}
            values["mask/removed_error"] = losses["loss"]
        self.buffer.add(iteration, values)
        self.settings[iteration] = settings
        if due:
            self.report()

    def collect(self) -> None:
        """Bring the values of all iterations so far from the device, check and add them up."""
        for iteration, values in self.buffer.fetch():
            step = self.epoch * self.iterations + iteration
            losses = {name: value for name, value in values.items() if not name.startswith("mask/")}
            if self.loss_guard.check(step, losses):
                values |= self.settings[iteration]
                self.interval.update(values)
                self.averages.update(values)
        self.settings.clear()

    def report(self) -> None:
        self.collect()
        means, self.interval = self.interval.means(), Averages()
        if self.loss_guard.skipped:
            means["skipped_steps"] = self.loss_guard.skipped
        rate = self.progress.images_per_second()
        if self.log_writer is not None:
            # Upstream's axis: thousandths of an epoch, so that curves of different batch sizes lie over each other.
            at = int((self.epoch + self.progress.done / self.iterations) * 1000)
            for name, value in {**means, "images_per_second": rate}.items():
                self.log_writer.add_scalar({"loss": "train_loss"}.get(name, name), value, at)
        self.progress.report({**brief(means), "images/s": rate})

    def state_dict(self) -> dict:
        """All that the rest of the epoch needs to end with the same log."""
        self.collect()
        parts = {"interval": self.interval.state_dict(), "averages": self.averages.state_dict()}
        return {"iterations": self.iterations, **parts}

    def load_state_dict(self, state: dict) -> None:
        self.interval.load_state_dict(state["interval"])
        self.averages.load_state_dict(state["averages"])

    def close(self) -> dict[str, float]:
        self.progress.close()
        return self.averages.means()
