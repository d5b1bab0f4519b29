"""Where a run can be watched: TensorBoard, wandb, trackio. A run can do without them: one that fails is dropped."""

import importlib
import json
import os
import secrets
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter

from util.checkpoint import reason_of, write_text
from util.cli import UserError, logger


class Board:
    """All trackers of a run; none before they are opened, which only the first process does."""

    def __init__(self):
        self.trackers: dict[str, SummaryWriter | Experiment] = {}

    def __enter__(self) -> "Board":
        return self

    def __exit__(self, *_) -> None:
        self._each(lambda tracker: tracker.close())
        self.trackers.clear()

    def __bool__(self) -> bool:
        return bool(self.trackers)

    def open(self, names: list[str], args: Namespace, begin: int | None = None) -> None:
        """`begin` is the step after which a run begins, and what was shown of later ones is replaced; None: nothing."""
        for name in names:
            if name != "tensorboard":
                self._attempt(name, lambda name=name: self._start(name, args, begin))
            elif args.log_dir:
                self.trackers[name] = open_tensorboard(args.log_dir, begin)

    def _start(self, name: str, args: Namespace, begin: int | None) -> None:
        self.trackers[name] = Experiment(importlib.import_module(name), args, resumed=bool(begin))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._each(lambda tracker: tracker.add_scalar(name, value, step))

    def add_image(self, name: str, picture: torch.Tensor, step: int) -> None:
        self._each(lambda tracker: tracker.add_image(name, picture, step))

    def flush(self) -> None:
        self._each(lambda tracker: tracker.flush())

    def _each(self, act: Callable[[Any], None]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._attempt(name, lambda tracker=tracker: act(tracker))

    def _attempt(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # theirs, of any kind: no tracker is worth a run
            self.trackers.pop(name, None)
            reason = reason_of(error) or type(error).__name__
            logger.warning("--track %s failed (%s); the run continues without it", name, reason)


class Experiment:
    """A run of wandb, or of trackio, which has wandb's interface: `module` is either.

    A file in the output folder keeps the experiment's id and the last step of each value that was sent: a resumed run
    continues the same experiment and sends no point twice. All values of a step are sent together.
    """

    def __init__(self, module: ModuleType, args: Namespace, resumed: bool):
        name, folder = module.__name__, Path(args.output_dir)
        self.module, self.values, self.file = module, {}, folder / f"{name}.json" if args.output_dir else None
        known = json.loads(self.file.read_text()) if resumed and self.file and self.file.exists() else {}
        self.id, self.sent = known.get("id") or secrets.token_hex(4), known.get("sent", {})
        self.step = max(self.sent.values(), default=0)
        own = {"id": self.id, "dir": os.environ.get("WANDB_DIR", args.output_dir or None)} if name == "wandb" else {}
        module.init(
            project=os.environ.get(f"{name.upper()}_PROJECT", "clmae"),
            name="-".join(filter(None, [folder.name, self.id])),  # by which trackio knows it
            config={flag: value for flag, value in vars(args).items() if flag != "classes"},
            resume="allow",
            **own,
        )

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        if step <= self.sent.get(name, -1):
            return
        if step > self.step:  # steps never fall: wandb drops what comes late
            self.flush()
            self.step = step
        self.values[name], self.sent[name] = value, step

    def add_image(self, name: str, picture: torch.Tensor, step: int) -> None:
        """`picture` is [3, H, W] in [0, 1]."""
        pixels = (picture * 255).round().byte().permute(1, 2, 0).cpu().numpy()
        self.add_scalar(name, self.module.Image(pixels), step)

    def flush(self) -> None:
        values, self.values = self.values, {}
        if values:
            if self.file:
                write_text(self.file, json.dumps({"id": self.id, "sent": self.sent}))
            self.module.log(values, step=self.step)

    def close(self) -> None:
        self.flush()
        self.module.finish()


def open_tensorboard(log_dir: str, begin: int | None) -> SummaryWriter:
    threading.excepthook = leave_to_the_caller
    try:
        return SummaryWriter(log_dir, purge_step=None if begin is None else begin + 1)
    except (OSError, ValueError) as error:  # the latter of a URL
        raise UserError(f"--log_dir {log_dir} cannot be written: {getattr(error, 'strerror', error)}") from None


def leave_to_the_caller(args: threading.ExceptHookArgs) -> None:
    """The thread that writes hands its error to the next call of the writer, which reports it: a traceback on standard
    error would only repeat that."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
