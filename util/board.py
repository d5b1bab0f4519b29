"""TensorBoard files, which a program can do without: a full disk or a removed folder ends them, not the program."""

import threading
from collections.abc import Callable

from torch.utils.tensorboard import SummaryWriter

from util.cli import UserError, logger


class Board(SummaryWriter):
    broken = False

    def __init__(self, log_dir: str, **kwargs):
        threading.excepthook = leave_to_the_caller
        try:
            super().__init__(log_dir, **kwargs)
        except OSError as error:
            raise UserError(f"--log_dir {log_dir} cannot be written: {error.strerror}") from None

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
            logger.error("cannot write TensorBoard files to %s (%s); they end here", self.log_dir, error.strerror)


def leave_to_the_caller(args: threading.ExceptHookArgs) -> None:
    """The thread that writes hands its error to the next call of the writer, which reports it: a traceback on standard
    error would only repeat that."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(args)
