"""Measurements that alternate within each round, so that whatever else the machine does affects all of them alike."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Times = dict[str, list[float]]


def alternate(
    tasks: dict[str, Callable[[int], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[Times, dict[str, Any]]:
    """Seconds by task and round, and what each task returned last. Tasks are given the round; round -1 warms up."""
    times: Times = {name: [] for name in tasks}
    results = {}
    for turn in range(-1, rounds):
        for name, task in tasks.items():
            gc.collect()
            start = clock()
            results[name] = task(turn)
            if turn >= 0:
                times[name].append(clock() - start)
    return times, results


def median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3g}"


def ratio(some: Sequence[float], others: Sequence[float]) -> str:
    """The median of the rounds' ratios, and their range."""
    ratios = [a / b for a, b in zip(some, others, strict=True)]
    return f"{statistics.median(ratios):.3g} ({min(ratios):.3g} to {max(ratios):.3g})"
