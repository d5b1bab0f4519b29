"""MaskBench: which masks help? Every strategy through the same training, evaluation and statistics.

    python -m experiments.maskbench --data_path data/cifar10 --seeds 0 1 2 3 4
    python -m experiments.maskbench --data_path data/cifar10 --strategies random grid path/to/mine.py:stripes
    python -m experiments.maskbench --scale full --data_path /data/imagenet --cluster slurm --partition NAME
    python -m experiments.maskbench --data_path data/cifar10 --archive FILE --table_only     # of published results

Runs of a seed share initial weights, order of images and crops, whatever the strategy. Each is measured by
experiments.probe, and compared to random masks by experiments.paired. The same command skips what is done and resumes
what was interrupted.
"""

import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

import main_visualize as visualize
from experiments.archive import Archive, read_archive
from experiments.costs import Cost, step_costs
from experiments.leaderboard import (
    Entry,
    Probes,
    features_table,
    leaderboard_table,
    measures_beside,
    noise_table,
    standings,
    write_leaderboard,
)
from experiments.paired import DRAWS, FEWEST_SEEDS
from experiments.plan import Run, Step, data_folder, data_name, parse
from experiments.probe import AVERAGE, FEATURES, PARTS, PROTOCOL, read_probe
from experiments.recipes import RELEASED_FLAGS, Variant
from experiments.run import add_run_arguments, fetch, settle_run_args, typed_command
from experiments.runner import work
from masking import find_strategy
from models_mae import build_mae
from util.checkpoint import write_text
from util.cli import ArgumentParser, UserError, file_name, logger, positive
from util.evaluation.tables import Table, as_markdown, as_text
from util.program import run

BASELINE = "random"
TIMING_ERROR = 0.05  # closer step times count as equal


@dataclass(frozen=True)
class MaskStrategy:
    flags: str  # of main_pretrain.py
    flops: float = 1.0  # of an iteration beside random masks', counted at ViT-S: what a benchmark will cost


CURRICULUM = "--masking curriculum --cmm_fraction 0.5 --soft"
PREDICTIVE = "--masking predictive --cmm_strength"
CONTROL = "--masking curriculum --soft tokens"
STRATEGIES = {
    BASELINE: MaskStrategy("--masking random"),
    "random-0.6": MaskStrategy("--masking random --mask_ratio 0.6", 1.35),
    "random-0.85": MaskStrategy("--masking random --mask_ratio 0.85", 0.76),
    "ratio": MaskStrategy("--masking random --mask_ratio_start 0.5", 1.29),  # a curriculum of the ratio alone
    "block": MaskStrategy("--masking block"),
    "grid": MaskStrategy("--masking grid"),
    "green": MaskStrategy("--masking noise --mask_noise green"),
    # Blue to red, from neighbours that are visible to whole regions that are hidden; the reverse; and either end.
    "noise": MaskStrategy("--masking noise"),
    "noise-reversed": MaskStrategy("--masking noise --lambda_cl_start -1 --lambda_cl_end 1"),
    "noise-blue": MaskStrategy("--masking noise --mask_noise blue"),
    "noise-red": MaskStrategy("--masking noise --mask_noise red"),
    "tokens": MaskStrategy(f"{CURRICULUM} tokens", 3.03),
    "attention": MaskStrategy(f"{CURRICULUM} attention", 3.01),
    "predictive-mild": MaskStrategy(f"{PREDICTIVE} 0.5", 1.02),
    "predictive": MaskStrategy(f"{PREDICTIVE} 1", 1.02),
    "predictive-reversed": MaskStrategy(f"{PREDICTIVE} 1 --lambda_cl_start -1 --lambda_cl_end 1", 1.02),
    # The mild curriculum with geometry besides content, as partner alone, as adversary alone, with a rising ratio.
    "predictive-noise": MaskStrategy(f"{PREDICTIVE} 0.5 --mask_noise curriculum", 1.02),
    "predictive-partner": MaskStrategy(f"{PREDICTIVE} 0.5 --lambda_cl_end 0", 1.02),
    "predictive-adversary": MaskStrategy(f"{PREDICTIVE} 0.5 --lambda_cl_start 0", 1.02),
    "predictive-ratio": MaskStrategy(f"{PREDICTIVE} 0.5 --mask_ratio_start 0.65 --mask_ratio 0.85", 1.02),
    "released": MaskStrategy(f"{CONTROL} {' '.join(RELEASED_FLAGS)}", 4.02),  # the authors' code
}


@dataclass(frozen=True)
class BenchScale:
    pretrain: str  # flags of main_pretrain.py
    probe: str  # flags of experiments.probe
    data: dict[str, str]  # by --data_set: further flags of main_pretrain.py
    hours: float  # of a run with random masks
    device: str  # that these hours are of
    rounds: int  # of the measurement of costs
    batch_size: int | None = None  # of that measurement; None: the training's


MICRO = "--model mae_vit_micro_patch4"
SCALES = {
    # Seconds per run: a test of the benchmark itself.
    "tiny": BenchScale(
        f"{MICRO} --input_size 16 --max_images 32 --batch_size 16 --lr 1e-3 --epochs 2 --warmup_epochs 0 --cmm_depth 1 "
        "--num_workers 0 --save_every 1",
        probe="--last 2 --folds 2 --num_workers 0",
        data={"shapes": "--shapes_images 96"},
        hours=0.002,
        device="core",
        rounds=1,
    ),
    # 12,200 images of CIFAR-10's 25,000 are held out.
    "small": BenchScale(
        f"{MICRO} --max_images 12800 --batch_size 128 --lr 2e-3 --epochs 16 --warmup_epochs 2 --num_workers 0 "
        "--save_every 1",
        probe="--last 1 --num_workers 0",
        data={
            **dict.fromkeys(("folder", "cifar10", "cifar100", "stl10"), "--input_size 32"),
            "fashion_mnist": "--input_size 28 --in_chans 1",
            "shapes": "--input_size 32 --shapes_images 25000",
        },
        hours=0.1,
        device="core",
        rounds=5,
    ),
    # ImageNet-100, a fifth of it held out, with ViT-S. ImageNet-200 with ViT-B: --pretrain --model mae_vit_base
    # --num_classes 200 --max_images 200000.
    # 11.2 GFLOP per image, 100,000 images, 400 epochs, at 33 TFLOP/s, a tenth of an A100's peak.
    "full": BenchScale(
        "--model mae_vit_small_patch16 --num_classes 100 --max_images 100000 --global_batch_size 1024 --blr 1.5e-4 "
        "--epochs 400 --warmup_epochs 40 --save_every 1 --keep 4",
        probe="--last 4 --num_workers 10",
        data={"folder": ""},
        hours=3.8,
        device="A100",
        rounds=3,
        batch_size=8,
    ),
}


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.maskbench", description=(__doc__ or "").split("\n")[0])
    what = add_run_arguments(parser, list(SCALES), "./output_dir/maskbench")
    what.add_argument(
        "--strategies",
        default=list(STRATEGIES),
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(STRATEGIES)}, or your own: file.py:name; random is always there, to compare to",
    )
    what.add_argument(
        "--epochs_factor", default=[1.0], type=positive, nargs="+", help="lengths of training, over the scale's"
    )
    what.add_argument(
        "--equal",
        default=["epochs"],
        nargs="+",
        choices=["epochs", "compute"],
        help="what strategies have in common; compute: as many epochs as fit into the time of random masks",
    )
    what.add_argument(
        "--archive",
        default=None,
        metavar="FILE",
        help="results of finished runs: what is in it counts as done, what is finished is added to it",
    )
    shown = parser.add_argument_group("what to show")
    measures = [f"{encoder}-{feature}" for encoder in ("final", "last", AVERAGE) for feature in FEATURES]
    shown.add_argument("--measure", default="final-both", choices=measures, help="encoder and features (probe.py)")
    shown.add_argument("--part", default="all", choices=PARTS, help="images; choose settings on held_out alone")
    shown.add_argument("--html", action="store_true", help="also in the HTML report, beside every strategy's masks")
    parser.set_defaults(seeds=[0, 1, 2, 3, 4])
    return parser


def check_args(args: Namespace) -> None:
    settle_run_args(args)
    args.strategies = list(dict.fromkeys([BASELINE, *args.strategies]))
    for name in args.strategies:
        if name not in STRATEGIES and ":" not in name:
            choices = f"choose from {', '.join(STRATEGIES)}, or give your own as path/to/file.py:name"
            raise UserError(f"--strategies {name} is unknown; {choices}")
        find_strategy(parse(strategy_flags(name)).masking)
    labels = {name: label_of(name) for name in args.strategies}
    if twice := [name for name in labels if list(labels.values()).count(labels[name]) > 1]:
        raise UserError(f"--strategies {' and '.join(twice)} would both be called {labels[twice[0]]}; rename one")
    if args.data_set not in SCALES[args.scale].data:
        takes = ", ".join(SCALES[args.scale].data)
        raise UserError(f"--data_set {args.data_set}: --scale {args.scale} takes {takes}")


def strategy_flags(name: str) -> list[str]:
    return STRATEGIES[name].flags.split() if name in STRATEGIES else ["--masking", name]


def shared_flags(args: Namespace) -> list[str]:
    """Of all pretrainings, without the places of files."""
    scale = SCALES[args.scale]
    return [*scale.pretrain.split(), "--data_set", args.data_set, *scale.data[args.data_set].split(), *args.pretrain]


# --- What to run ---


def plan_entries(args: Namespace, costs: dict[str, Cost]) -> list[Entry]:
    """Each strategy at each length, for equal epochs, and at the length that takes as long, for equal compute."""
    standard, entries = parse(shared_flags(args)).epochs, {}
    for factor in args.epochs_factor:
        whole = max(round(standard * factor), 1)
        baseline = label_of(BASELINE, whole, standard)
        for name in args.strategies:
            time = costs[name].time if "compute" in args.equal else 1
            same_speed = abs(time - 1) <= TIMING_ERROR
            lengths = [whole] if same_speed or "epochs" in args.equal else []
            lengths += [] if same_speed else [max(int(standard * factor / time), 1)]
            for epochs in lengths:
                label = label_of(name, epochs, standard)
                entries.setdefault(label, Entry(label, name, epochs, baseline))
    return list(entries.values())


def label_of(name: str, epochs: int = 0, standard: int = 0) -> str:
    name = name.rpartition(":")[2] if name not in STRATEGIES else name
    return name if epochs == standard else f"{name}-{epochs}epochs"


def own_flags(entry: Entry, args: Namespace) -> list[str]:
    own, usual = strategy_flags(entry.strategy), parse(shared_flags(args))
    if entry.epochs != usual.epochs:  # the same schedule, stretched
        warmup = math.ceil(usual.warmup_epochs * entry.epochs / usual.epochs)
        own += ["--epochs", str(entry.epochs), "--warmup_epochs", str(warmup)]
    return own


def archived_flags(entry: Entry, args: Namespace) -> str:
    """What an archived run has to share with one that would be made now."""
    return " ".join([*shared_flags(args), *own_flags(entry, args), "| probe", SCALES[args.scale].probe])


def plan_bench(entry: Entry, seed: int, args: Namespace) -> Run:
    own = own_flags(entry, args)
    folder = data_folder(args) / file_name(entry.label) / f"seed{seed}"
    machine = ["--device", args.device] if args.device else []
    place = ["--data_path", args.data_path] if args.data_path else []
    flags = (*shared_flags(args), *own, *place, "--seed", str(seed), *machine)
    flags = (*flags, "--output_dir", str(folder), "--resume", "auto")
    probe = (str(folder), *SCALES[args.scale].probe.split(), *place, *machine, "--output_dir", str(folder / "probe"))
    steps = Step("main_pretrain", flags, data_name(args)), Step("experiments.probe", probe, data_name(args), PROTOCOL)
    return Run(Variant(entry.label, tuple(own)), seed, folder, steps)


def estimated_hours(planned: list[Entry], args: Namespace) -> float:
    """By FLOPs, from the hours of the scale's own run; --pretrain may change its model, images and epochs."""
    ours, usual = (parse(shared_flags(Namespace(**{**vars(args), "pretrain": own}))) for own in (args.pretrain, []))
    lengths = (STRATEGIES.get(entry.strategy, STRATEGIES[BASELINE]).flops * entry.epochs for entry in planned)
    return SCALES[args.scale].hours * epoch_flops(ours) / epoch_flops(usual) * sum(lengths) / usual.epochs


def epoch_flops(settings: Namespace) -> float:
    """With random masks; counted from shapes, on one image."""
    sides = [settings.input_size] if isinstance(settings.input_size, int) else settings.input_size
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        mae = build_mae(settings.model, img_size=(sides[0], sides[-1]), in_chans=settings.in_chans)
        mae(torch.empty(1, settings.in_chans, sides[0], sides[-1]), settings.mask_ratio)[0].backward()
    return counter.get_total_flops() * settings.max_images


# --- What a step costs ---


def known_costs(archive: Archive, args: Namespace) -> dict[str, Cost]:
    file = costs_file(args)
    own = {name: Cost(**values) for name, values in json.loads(file.read_text()).items()} if file.exists() else {}
    return archive.costs | own


def costs_file(args: Namespace) -> Path:
    """Measured once, so that all runs of equal compute rest on the same numbers; delete it to measure again."""
    return data_folder(args) / "costs.json"


def measure_costs(archive: Archive, args: Namespace) -> dict[str, Cost]:
    """Of all strategies that have none yet, beside random masks, in one alternating measurement."""
    costs = known_costs(archive, args)
    new = [name for name in args.strategies if name not in costs]
    if not new:
        return costs
    names = list(dict.fromkeys([BASELINE, *new]))
    logger.info("measuring the cost of an iteration: %s", ", ".join(names))
    measured = step_costs({name: bench_args(name, args) for name in names}, BASELINE, SCALES[args.scale].rounds)
    costs = measured | costs
    costs_file(args).parent.mkdir(parents=True, exist_ok=True)
    write_text(costs_file(args), json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1) + "\n")
    return costs


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
        model=settings.model, input_size=size, batch_size=batch, device=args.device or "cpu", pretrain=flags
    )


# --- What came out ---


def collect_probes(runs: dict[Entry, list[Run]], archive: Archive, args: Namespace) -> Probes:
    """Of what is finished, which is added to the archive, and of what the archive has."""
    found: Probes = {}
    for entry, of_entry in runs.items():
        for each in of_entry:
            if result := each.result(each.steps[1]):
                probe = read_probe(result)
                archive.add(entry.label, each.seed, archived_flags(entry, args), probe, each.settings().get("commit"))
            else:
                probe = archive.probes.get((entry.label, each.seed))
            if probe:
                found.setdefault(entry.label, {})[each.seed] = probe
    return found


def report(
    runs: dict[Entry, list[Run]], costs: dict[str, Cost], archive: Archive, failed: dict[Run, str], args: Namespace
) -> None:
    entries, probes = list(runs), collect_probes(runs, archive, args)
    archive.add_costs({name: cost for name, cost in costs.items() if name in STRATEGIES})
    missing = [
        each.title
        for entry, of_entry in runs.items()
        for each in of_entry
        if each not in failed and each.seed not in probes.get(entry.label, {})
    ]
    notes = [f"failed: {each.title}: {problem}" for each, problem in failed.items()]
    notes += [f"not finished: {', '.join(missing)}"] if missing else []
    if not probes:
        logger.info("%s", "\n".join(["there is no result yet", *notes]))
        return
    draws = {m: DRAWS if m == args.measure else DRAWS // 5 for m in measures_beside(args.measure)}
    found = {m: standings(entries, probes, costs, m, args.part, draws[m]) for m in draws}
    rows = found[args.measure]
    tables = [leaderboard_table(rows), features_table(found), noise_table(entries, probes)]
    tables = [table for table in tables if table]
    notes = [*explanations(args), *notes]
    logger.info("\n%s", "\n\n".join(map(as_text, tables)))
    settings = parse(shared_flags(args))
    head = f"Scale {args.scale}, data {data_name(args)}; {settings.model}, {settings.epochs} epochs."
    parts = ["# MaskBench", head, *map(as_markdown, tables), "\n".join(f"- {note}" for note in notes)]
    name = f"leaderboard-{args.measure}-{args.part}"
    files = write_leaderboard(data_folder(args), name, "\n\n".join(parts) + "\n", rows)
    if args.html and any(finished(each) for of_entry in runs.values() for each in of_entry):
        files.append(write_html(data_folder(args) / f"{name}.html", runs, tables, notes, args))
    elif args.html:
        notes.append(f"--html: no report, because it shows masks, and no finished run is below {data_folder(args)}")
    logger.info("\n%s", "\n".join([*notes, f"written to {', '.join(map(str, files))}"]))


def write_html(
    path: Path, runs: dict[Entry, list[Run]], tables: list[Table], notes: list[str], args: Namespace
) -> Path:
    """The tables, below the masks of each strategy's first finished run."""
    first = {entry.label: each for entry, of_entry in runs.items() for each in reversed(of_entry) if finished(each)}
    place = ["--data_path", args.data_path] if args.data_path else []
    folders = [str(each.folder) for each in first.values()]
    shown = visualize.get_args_parser().parse_args([*folders, "--names", *first, "--html", str(path), *place])
    return visualize.write_report(visualize.checkpoints_by_run(shown), shown, visualize.tables_section(tables, notes))


def finished(each: Run) -> bool:
    return all(map(each.is_done, each.steps))


def explanations(args: Namespace) -> list[str]:
    return [
        "gain: points over random masks of the same seeds and images; 95 %: interval of a bootstrap over seeds and "
        f"images, from {FEWEST_SEEDS} seeds on; all together: the intervals hold simultaneously, and decide",
        "p (Holm): of the same bootstrap, corrected for the number of strategies",
        "step / random: median ratio of measured times; compute: that times the epochs, over the baseline's; GFLOP per "
        "image, forward and backward; GB: peak memory of an iteration",
        "seeds to tell 0.5 points: two-sided t-test, power 80 %, level 5 %; shared by strategies in the last column",
    ]


def main(args: Namespace) -> None:
    check_args(args)
    idle = args.dry_run or args.table_only
    archive = read_archive(args.archive)
    by_time = "compute" in args.equal
    elsewhere = args.cluster == "slurm" and not by_time  # this machine is not the one that runs will use
    costs = (known_costs if idle or elsewhere else measure_costs)(archive, args)
    if by_time and (unknown := [name for name in args.strategies if name not in costs]):
        raise UserError(f"--equal compute: the cost of {unknown[0]} is not measured yet; run without --dry_run")
    entries = plan_entries(args, costs)
    runs = {entry: [plan_bench(entry, seed, args) for seed in args.seeds] for entry in entries}
    for entry in entries:
        for each in runs[entry]:
            archive.check(entry.label, each.seed, archived_flags(entry, args))
            each.check_settings()
    in_order = [  # seed by seed: a first table is there early
        runs[entry][at]
        for at, seed in enumerate(args.seeds)
        for entry in entries
        if (entry.label, seed) not in archive.probes
    ]
    if args.dry_run:
        logger.info("\n%s", "\n".join(typed_command(each, step, args) for each in in_order for step in each.steps))
        planned = [entry for entry in entries for seed in args.seeds if (entry.label, seed) not in archive.probes]
        hours, device = estimated_hours(planned, args), SCALES[args.scale].device
        logger.info("\n%d pretrainings, about %.3g %s hours (computed)", len(in_order), hours, device)
        return
    if args.download and in_order:
        fetch(in_order[0])
    failed = {} if args.table_only else work(in_order, args)
    report(runs, costs, archive, failed, args)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run(main, get_args_parser())
