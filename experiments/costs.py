"""What an iteration costs with a masking strategy, relative to one with random masks."""

import statistics
from argparse import Namespace
from dataclasses import dataclass

from benchmarks.bench_step import PER_TURN, Contender, peak_memories
from benchmarks.timing import alternate

TIMING_ERROR = 0.05  # closer step times count as equal


@dataclass(frozen=True)
class Cost:
    """Cost of an iteration relative to random masks. Times alternate in one process: median ratio and its range."""

    time: float
    fastest: float
    slowest: float
    gflop: float  # per image
    memory: float  # peak, in GB

    @property
    def like_random(self) -> bool:
        return abs(self.time - 1) <= TIMING_ERROR


def step_costs(benches: dict[str, Namespace], baseline: str, rounds: int) -> dict[str, Cost]:
    """By strategy, given flags of benchmarks.bench_step for each."""
    memory = peak_memories({name: ("", bench) for name, bench in benches.items()})
    contenders = {name: Contender("", bench) for name, bench in benches.items()}
    for contender in contenders.values():
        contender.iterate(2 * PER_TURN)  # until thresholded masks are near their ratio
    times, _ = alternate({name: one.take_turn for name, one in contenders.items()}, rounds)
    costs = {}
    for name, bench in benches.items():
        ratios = [own / base for own, base in zip(times[name], times[baseline], strict=True)]
        gflop = contenders[name].gflop() / bench.batch_size
        costs[name] = Cost(statistics.median(ratios), min(ratios), max(ratios), gflop, memory[name])
    return costs
