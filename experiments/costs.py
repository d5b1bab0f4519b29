"""What an iteration costs with a masking strategy, relative to one with random masks: measured once, then kept."""

import json
import math
import statistics
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.bench_step import PER_TURN, Contender, peak_memories
from benchmarks.timing import alternate
from experiments.plan import data_folder, parse
from experiments.runner import machine_slots
from experiments.strategies import BASELINE, SCALES, STRATEGIES, identify, shared_flags, strategy_flags
from util.checkpoint import write_text
from util.cli import UserError, logger
from util.misc import pick_device

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


Costs = dict[str, Cost]  # by strategy


def settle_costs(archived: dict[str, Costs], args: Namespace) -> Costs:
    """Known costs; missing ones are measured here if runs start here or their length depends on them."""
    costs, by_time = known_costs(archived, args), "compute" in args.equal
    unknown = [name for name in args.strategies if name not in costs]
    idle = args.dry_run or args.table_only
    if not unknown or (not by_time and (idle or args.cluster == "slurm")):
        return costs
    if args.dry_run:
        logger.warning("step times of %s are not measured yet; FLOPs stand in for them", ", ".join(unknown))
        return costs | {name: counted_cost(name) for name in unknown}
    if args.table_only:
        raise UserError(f"--equal compute: the cost of {unknown[0]} is measured when it is run")
    if args.cluster == "slurm" and args.ngpus and pick_device(args.device).type == "cpu":
        raise UserError(
            "--equal compute: step times are measured on this machine, which has no GPU as the jobs do; "
            "run the same command in an interactive job on one that has"
        )
    return measure_costs(archived, args)


def known_costs(archived: dict[str, Costs], args: Namespace) -> Costs:
    """Saved costs, so that all equal-compute runs use the same numbers."""
    saved = saved_costs(archived, args)
    return {name: saved[identify(name)] for name in (*STRATEGIES, *args.strategies) if identify(name) in saved}


def saved_costs(archived: dict[str, Costs], args: Namespace) -> Costs:
    """By what `identify` makes of the name; costs from other settings are ignored."""
    file, known = costs_file(args), archived.get(cost_settings(args), {})
    if not file.exists():
        return known
    try:
        found = json.loads(file.read_text())
        own = {name: Cost(**values) for name, values in found["costs"].items()}
        return known | own if found["settings"] == cost_settings(args) else known
    except (ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{file} is damaged; delete it, and costs are measured again") from None


def cost_settings(args: Namespace) -> str:
    """What a step time depends on, besides the strategy."""
    return " ".join([*shared_flags(args), "--device", pick_device(args.device).type])


def costs_file(args: Namespace) -> Path:
    return data_folder(args) / "costs.json"


def counted_cost(name: str) -> Cost:
    flops = STRATEGIES.get(name, STRATEGIES[BASELINE]).flops
    return Cost(flops, flops, flops, math.nan, math.nan)


def measure_costs(archived: dict[str, Costs], args: Namespace) -> Costs:
    """Costs of all strategies; those not yet known are timed alternately with random masks."""
    costs = known_costs(archived, args)
    new = [name for name in args.strategies if name not in costs]
    if not new:
        return costs
    names = list(dict.fromkeys([BASELINE, *new]))
    logger.info("measuring the cost of an iteration: %s", ", ".join(names))
    use_threads_of_runs(args)
    costs = step_costs({name: bench_args(name, args) for name in names}, SCALES[args.scale].rounds) | costs
    saved = saved_costs(archived, args) | {identify(name): cost for name, cost in costs.items()}
    kept = {"settings": cost_settings(args), "costs": {name: asdict(cost) for name, cost in saved.items()}}
    costs_file(args).parent.mkdir(parents=True, exist_ok=True)
    write_text(costs_file(args), json.dumps(kept, indent=1) + "\n")
    return costs


def use_threads_of_runs(args: Namespace) -> None:
    """On CPUs, how much slower a strategy is depends on the number of threads."""
    if args.cluster == "local":
        environment, _ = machine_slots(args.ngpus, args.jobs)[0]
        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", torch.get_num_threads())))


def bench_args(name: str, args: Namespace) -> Namespace:
    """Flags of benchmarks.bench_step. A ratio that changes over the epochs counts as its mean."""
    flags = [*shared_flags(args), *strategy_flags(name), "--warmup_epochs", "0"]
    settings = parse(flags)
    if settings.mask_ratio_start is not None:
        mean = str((settings.mask_ratio_start + settings.mask_ratio) / 2)
        flags += ["--mask_ratio", mean, "--mask_ratio_start", mean]
    size = settings.input_size if isinstance(settings.input_size, int) else settings.input_size[0]
    batch = SCALES[args.scale].batch_size or settings.batch_size
    return Namespace(
        model=settings.model, input_size=size, batch_size=batch, device=str(pick_device(args.device)), pretrain=flags
    )


def step_costs(benches: dict[str, Namespace], rounds: int) -> Costs:
    """By strategy, given flags of benchmarks.bench_step for each."""
    memory = peak_memories({name: ("", bench) for name, bench in benches.items()})
    contenders = {name: Contender("", bench) for name, bench in benches.items()}
    for contender in contenders.values():
        contender.iterate(2 * PER_TURN)  # until thresholded masks are near their ratio
    times, _ = alternate({name: one.take_turn for name, one in contenders.items()}, rounds)
    costs = {}
    for name, bench in benches.items():
        ratios = [own / base for own, base in zip(times[name], times[BASELINE], strict=True)]
        gflop = contenders[name].gflop() / bench.batch_size
        costs[name] = Cost(statistics.median(ratios), min(ratios), max(ratios), gflop, memory[name])
    return costs
