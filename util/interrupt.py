"""An orderly end on SIGTERM, SIGUSR1 and SIGUSR2, which is what schedulers send before they kill."""

import signal

import torch

from util.misc import STOP_SIGNALS, all_reduce_max, orphaned


class StopRequest:
    """While entered, a signal ends nothing but is remembered, until the program asks at a moment of its own."""

    def __init__(self):
        self.received: set[signal.Signals] = set()

    def __enter__(self) -> "StopRequest":
        self._handlers = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, _frame) -> None:
        self.received.add(signal.Signals(number))

    def agreed(self) -> bool:
        """Whether any process is to stop: the same answer on all, which must all ask. Waits for no device.

        Processes whose torchrun is gone must not train on, either: a new one may be writing to the same folder.
        """
        return bool(all_reduce_max(torch.tensor(bool(self.received) or orphaned(), dtype=torch.uint8)))

    def names(self) -> str:
        if self.received:
            return ", ".join(sorted(number.name for number in self.received))
        return "the end of torchrun" if orphaned() else "a signal to another process"


def outlive_signals(_worker: int = 0) -> None:
    """For loader processes: schedulers signal all processes of a job, but the main one still needs its loaders.

    They end when the main process tells them to, or is gone.
    """
    for number in (*STOP_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
