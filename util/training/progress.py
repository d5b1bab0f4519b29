"""What a run reports: values kept on the device until needed, the log of an epoch, log.txt, TensorBoard."""

import datetime
import gc
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from util.board import Board
from util.checkpoint import write_text
from util.cli import LOG_INTERVAL, Progress, TrainingDiverged, UserError, logger
from util.jsonl import append_record, as_line, read_records
from util.misc import get_world_size, is_main_process, mean_of_processes
from util.training.resume import Start

LOG = "log.txt"
LARGEST = 1e100  # largest finite number in a log line; larger ones cannot be plotted
SHOWN = (
    *("loss", "cmm/loss", "lambda_cl", "mask/visible", "mask/distinct", "mask/decisive", "mask/error_vs_random"),
    *("encoder/rank", "knn/acc1", "knn/acc5", "test/acc1", "test/acc5", "test/loss"),
    *("loss_scale", "cmm/loss_scale", "skipped"),
)


def brief(values: Mapping[str, float]) -> dict[str, float]:
    """The few values that fit on a line; all are in log.txt and TensorBoard."""
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
    """Stops a run at the first non-finite loss and, under fp16, watches the loss scales instead.

    Under fp16 the scaler skips a step whose gradients overflow, whether or not its losses are finite, and halves the
    scale. So a lower scale means a skipped step. Some are normal; a scale below 1 means that no scale helps.

    `scales` are the run's initial loss scales; empty unless it scales its losses.
    """

    def __init__(self, scales: Mapping[str, torch.Tensor]):
        self.scales = {name: scale.item() for name, scale in scales.items()}
        self.skipped = 0
        self._last_finite = "none yet"

    def check(self, step: int, losses: Mapping[str, float], scales: Mapping[str, float]) -> bool:
        """Whether the losses of `step` are all finite. `scales` are the loss scales after it."""
        text = ", ".join(f"{name} {value:.4g}" for name, value in losses.items())
        finite = all(math.isfinite(value) for value in losses.values())
        if not finite and not scales:
            self.stop(f"the loss is not finite at step {step} ({text})")
        # Scales are powers of two, up to rounding of their mean over processes.
        self.skipped += any(scale < 0.9 * self.scales[name] for name, scale in scales.items())
        self.scales = dict(scales)
        if any(scale < 0.9 for scale in scales.values()):
            fallen = ", ".join(f"{name} {scale:.4g}" for name, scale in scales.items())
            self.stop(f"gradients overflow fp16 at step {step} ({fallen}) after {self.skipped} skipped steps")
        if finite:
            self._last_finite = text
        return finite

    def stop(self, reason: str) -> NoReturn:
        raise TrainingDiverged(
            f"{reason}; the last finite losses were: {self._last_finite}. Checkpoints written before are untouched. "
            "Try a lower --blr, --clip_grad 1, or --amp off"
        )


class EpochLog:
    """Collects the values of an epoch's iterations and reports them every LOG_INTERVAL, with one sync each time.

    Losses are added as each process's share of the global batch's loss, which is their `mean`: every process has the
    same log. `start` holds what an interrupted run has already done and logged of its epoch.
    """

    def __init__(
        self,
        start: Start,
        iterations: int,
        loss_guard: LossGuard,
        log_writer: Board | None,
        args: Namespace,
        mean: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = mean_of_processes,
    ):
        self.epoch, self.iterations, self.accum_iter = start.epoch, iterations, args.accum_iter
        self.first = start.steps_done * args.accum_iter
        self.loss_guard, self.log_writer, self.mean = loss_guard, log_writer, mean
        self.buffer, self.interval, self.averages = MetricBuffer(), Averages(), Averages()
        self.settings: dict[int, dict[str, float]] = {}
        if start.log_state is not None:
            self.interval.load_state_dict(start.log_state["interval"])
            self.averages.load_state_dict(start.log_state["averages"])
        header = f"epoch {start.epoch + 1}/{args.epochs}"
        self.progress = Progress(header, iterations, args.batch_size * get_world_size(), self.first)

    def add(
        self,
        iteration: int,
        losses: dict[str, torch.Tensor],
        settings: dict[str, float],
        health: Callable[[], dict[str, torch.Tensor]] | None = None,
    ) -> None:
        """`health` measures the masks of the global batch; it is called for one batch of each interval."""
        self.progress.advance()
        due = (iteration + 1) % LOG_INTERVAL == 0 or iteration + 1 == self.iterations
        values = dict(losses)
        if due and health is not None:
            values |= {f"mask/{name}": value for name, value in health().items()}
        self.buffer.add(iteration, self.mean(values))
        self.settings[iteration] = settings
        if due:
            self.report()

    def collect(self) -> None:
        """Fetch the values of all iterations so far from the device, check them and add them up."""
        for iteration, values in self.buffer.fetch():
            step = (self.epoch * self.iterations + iteration) // self.accum_iter
            scales = {name: value for name, value in values.items() if name.endswith("loss_scale")}
            losses = {name: values[name] for name in values if not name.startswith("mask/") and name not in scales}
            before = self.loss_guard.skipped
            if self.loss_guard.check(step, losses, scales):
                values |= self.settings[iteration]
            else:
                values = {}  # they would ruin the means
            if scales:
                values["skipped"] = self.loss_guard.skipped - before  # its mean is the share of skipped steps
            self.interval.update(values)
            self.averages.update(values)
        self.settings.clear()

    def report(self) -> None:
        self.collect()
        gc.collect(1)  # here, because the host has just waited for the device anyway
        means, self.interval = self.interval.means(), Averages()
        rate = self.progress.images_per_second()
        if self.log_writer is not None:
            # Upstream's axis: thousandths of an epoch, so that curves of different batch sizes align.
            at = int((self.epoch + self.progress.done / self.iterations) * 1000)
            for name, value in {**means, "images_per_second": rate}.items():
                self.log_writer.add_scalar({"loss": "train_loss"}.get(name, name), value, at)
        self.progress.report({**brief(means), "images/s": rate})

    def state_dict(self) -> dict:
        """The state from which the rest of the epoch ends with the same log."""
        self.collect()
        parts = {"interval": self.interval.state_dict(), "averages": self.averages.state_dict()}
        return {"iterations": self.iterations, **parts}

    def close(self) -> dict[str, float]:
        self.progress.close()
        return self.averages.means()


# --- log.txt: a JSON line per epoch, with upstream's keys ---


def prepare_output(
    log_writer: Board, config: str, start: Start, steps_per_epoch: int, classes: list[str], args: Namespace
) -> None:
    """Create the folder, save config and classes, drop log lines of epochs that will be trained again, and open the
    trackers."""
    if not is_main_process():
        return
    if args.output_dir:
        output_dir = Path(args.output_dir)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            write_text(output_dir / "config.yaml", config)
            if classes:
                write_text(output_dir / "classes.txt", "".join(name.replace("\n", " ") + "\n" for name in classes))
            drop_log_lines(output_dir / LOG, start.epoch)
        except OSError as error:
            raise UserError(f"--output_dir {output_dir} cannot be written: {error.strerror}") from None
    shown_up_to = int((start.epoch + start.steps_done / steps_per_epoch) * 1000)  # on the trackers' axis
    log_writer.open(args.track, args, shown_up_to)


def drop_log_lines(log: Path, start_epoch: int) -> None:
    """Keep the lines of epochs before `start_epoch`, and drop damaged ones, such as a killed run leaves."""
    lines = read_records(log, parse_log_line) if log.exists() else []
    kept = [line for line in lines if line["epoch"] < start_epoch]
    if len(kept) < len(lines):
        logger.warning("%s: dropped %d lines of epochs that are trained again", log, len(lines) - len(kept))
    write_text(log, "".join(map(as_line, kept)))


def has_epochs(folder: Path) -> bool:
    """Whether its log.txt has a line: it is empty during a run's first epoch."""
    log = folder / LOG
    return log.is_file() and log.stat().st_size > 0


def read_log(path: Path) -> list[dict]:
    """The lines of a run's log.txt, given its folder, a checkpoint in it, or the file; oldest epoch first."""
    folder = path if path.is_dir() else path.parent
    log = path if path.name == LOG else folder / LOG
    try:
        lines = read_records(log, parse_log_line)
    except OSError as error:
        raise UserError(f"{log} cannot be read: {error.strerror}; a run writes it to its --output_dir") from None
    if not lines:
        raise UserError(f"{log} has no epochs yet")
    for line in lines:  # its name before strategies without a module logged it
        if "train_cmm_lambda_cl" in line:
            line.setdefault("train_lambda_cl", line["train_cmm_lambda_cl"])
    return lines


def parse_log_line(line: dict) -> dict:
    if not isinstance(line["epoch"], int) or not all(isinstance(value, int | float) for value in line.values()):
        raise TypeError("a value is not a number")
    if any(math.isfinite(value) and abs(value) > LARGEST for value in line.values()):
        raise ValueError("a number is too large")
    return line


def write_log(
    stats: Mapping[str, float],
    metrics: Mapping[str, float],
    epoch: int,
    log_writer: Board | None,
    args: Namespace,
    **constants: float,
) -> None:
    """One line of log.txt. Nothing in it depends on the clock: equal runs give equal logs."""
    if log_writer is not None:
        for name, value in metrics.items():
            log_writer.add_scalar(name, value, (epoch + 1) * 1000)
        log_writer.flush()
    if args.output_dir and is_main_process():
        values = {f"train_{name}": value for name, value in stats.items()} | dict(metrics)
        line = {name.replace("/", "_"): value for name, value in values.items()} | {"epoch": epoch} | constants
        append_line(Path(args.output_dir) / LOG, line)


def append_line(path: Path, line: dict) -> None:
    """Append and sync to disk: the checkpoint that follows must not outlive its log."""
    try:
        append_record(path, line)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); rerun with --resume auto after fixing this") from None


def report_epoch(
    stats: Mapping[str, float], metrics: Mapping[str, float], epoch: int, seconds: float, args: Namespace
) -> None:
    """`seconds` is the time per epoch."""
    left = datetime.timedelta(seconds=int(seconds * (args.epochs - epoch - 1)))
    text = "  ".join(f"{name}: {value:.4g}" for name, value in brief({**stats, **metrics}).items())
    if torch.cuda.is_initialized():  # not in log.txt, where equal runs give equal logs
        text += f"  peak memory: {torch.cuda.max_memory_allocated() / 1e9:.1f} GB"
    logger.info("epoch %d/%d done, %s left  %s", epoch + 1, args.epochs, left, text)
