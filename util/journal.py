"""What a training run writes down: a JSON line per epoch in log.txt, the same on TensorBoard, and a line to read."""

import datetime
import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from util.checkpoint import write_text
from util.misc import UserError, is_main_process, logger
from util.progress import Board, brief
from util.resume import Start

LOG = "log.txt"


def prepare_output(args: Namespace, start: Start, steps_per_epoch: int, classes: list[str]) -> SummaryWriter | None:
    """Make the folders, note the classes in use, and drop log lines of epochs that will be trained again."""
    if not is_main_process():
        return None
    if args.output_dir:
        output_dir = Path(args.output_dir)
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            if classes:
                write_text(output_dir / "classes.txt", "\n".join(classes) + "\n")
            drop_log_lines(output_dir / LOG, start.epoch)
        except OSError as error:
            raise UserError(f"--output_dir {output_dir} cannot be written: {error.strerror}") from None
    if not args.log_dir:
        return None
    shown_up_to = int((start.epoch + start.steps_done / steps_per_epoch) * 1000)  # on TensorBoard's axis
    try:
        return Board(args.log_dir, purge_step=shown_up_to + 1)
    except OSError as error:
        raise UserError(f"--log_dir {args.log_dir} cannot be written: {error.strerror}") from None


def drop_log_lines(log: Path, start_epoch: int) -> None:
    """Keep the lines of epochs before `start_epoch`; a line that a kill cut short goes with the others."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    kept = [line for line in lines if line.endswith("}\n") and json.loads(line)["epoch"] < start_epoch]
    if len(kept) < len(lines):
        logger.warning("%s: dropped %d lines of epochs that are trained again", log, len(lines) - len(kept))
    write_text(log, "".join(kept))


def write_log(
    stats: Mapping[str, float],
    figures: Mapping[str, float],
    epoch: int,
    log_writer: SummaryWriter | None,
    args: Namespace,
    **constants: float,
) -> None:
    """One JSON line per epoch, with upstream's keys. Nothing in it depends on the clock: equal runs, equal logs."""
    if log_writer is not None:
        for name, value in figures.items():
            log_writer.add_scalar(name, value, (epoch + 1) * 1000)
        log_writer.flush()
    if args.output_dir and is_main_process():
        values = {f"train_{name}": value for name, value in stats.items()} | dict(figures)
        line = {name.replace("/", "_"): value for name, value in values.items()} | {"epoch": epoch} | constants
        append_line(Path(args.output_dir) / LOG, json.dumps(line))


def append_line(path: Path, line: str) -> None:
    """Onto the disk: the checkpoint that follows must not outlive its log."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}); --resume auto goes on when that is mended") from None


def report_epoch(
    stats: Mapping[str, float], figures: Mapping[str, float], epoch: int, seconds: float, args: Namespace
) -> None:
    """`seconds` is what an epoch takes."""
    left = datetime.timedelta(seconds=int(seconds * (args.epochs - epoch - 1)))
    text = "  ".join(f"{name}: {value:.4g}" for name, value in brief({**stats, **figures}).items())
    logger.info("epoch %d done, %s left  %s", epoch, left, text)
