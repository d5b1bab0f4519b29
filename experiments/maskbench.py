"""MaskBench: which masks help? Every strategy through the same training, evaluation and statistics.

    python -m experiments.maskbench --data_set cifar10 --data_path data --seeds 0 1 2 3 4
    python -m experiments.maskbench --data_set cifar10 --data_path data --strategies random grid path/to/mine.py:stripes
    python -m experiments.maskbench --scale full --data_path /data/imagenet --cluster slurm --partition NAME
    python -m experiments.maskbench --data_path cifar10 --archive FILE --table_only     # of published results

Runs of a seed share initial weights, order of images and crops, whatever the strategy. Each is measured by
experiments.probe, and compared to random masks by experiments.paired. The same command skips what is done and resumes
what was interrupted.
"""

import base64
import math
import shlex
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import main_pretrain
import main_visualize as visualize
from experiments.archive import Archive, read_archive
from experiments.costs import Costs, cost_settings, settle_costs
from experiments.leaderboard import (
    EFFECT,
    Entry,
    Probes,
    features_table,
    leaderboard_table,
    measures_beside,
    noise_table,
    standings,
    write_leaderboard,
)
from experiments.paired import FEWEST_SEEDS
from experiments.plan import Run, Step, data_folder, data_name, parse
from experiments.probe import AVERAGE, FEATURES, PARTS, PROTOCOL, hash_of_names, read_probe, unseen_by
from experiments.probe import get_args_parser as probe_parser
from experiments.recipes import Variant
from experiments.run import add_run_arguments, fetch, settle_run_args, typed_command
from experiments.runner import work
from experiments.strategies import BASELINE, SCALES, STRATEGIES, identify, shared_flags, strategy_flags
from masking import find_strategy
from models_mae import build_mae
from util.cli import ArgumentParser, UserError, file_name, logger, positive
from util.evaluation.tables import Table, as_markdown, as_text
from util.program import run

DEFAULT_SEEDS = [0, 1, 2, 3, 4]


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.maskbench", description=(__doc__ or "").split("\n")[0])
    what = add_run_arguments(parser, list(SCALES), "./output_dir/maskbench")
    what.add_argument(
        "--strategies",
        default=[name for name, strategy in STRATEGIES.items() if not strategy.on_request],
        nargs="+",
        metavar="NAME",
        help=f"of {', '.join(STRATEGIES)}, or your own: file.py:name; random is always included, as the baseline",
    )
    what.add_argument(
        "--epochs_factor", default=[1.0], type=positive, nargs="+", help="multiples of the scale's epochs to train for"
    )
    what.add_argument(
        "--equal",
        default=["epochs"],
        nargs="+",
        choices=["epochs", "compute"],
        help="what is held equal; compute: as many epochs as fit into the time of random masks",
    )
    what.add_argument(
        "--archive",
        default=None,
        metavar="FILE",
        help="results of finished runs: shown, not repeated; newly finished runs are added",
    )
    shown = parser.add_argument_group("what to show")
    measures = [f"{encoder}-{feature}" for encoder in ("final", "last", AVERAGE) for feature in FEATURES]
    shown.add_argument("--measure", default="final-both", choices=measures, help="encoder and features (probe.py)")
    shown.add_argument("--part", default="all", choices=PARTS, help="images; choose settings on held_out alone")
    shown.add_argument("--html", action="store_true", help="also write an HTML report with every strategy's masks")
    parser.set_defaults(seeds=DEFAULT_SEEDS)
    return parser


def check_args(args: Namespace) -> None:
    settle_run_args(args)
    args.strategies = list(dict.fromkeys([BASELINE, *args.strategies]))
    for name in (name for name in args.strategies if name not in STRATEGIES):
        if ":" not in name:
            choices = f"choose from {', '.join(STRATEGIES)}, or give your own as path/to/file.py:name"
            raise UserError(f"--strategies {name} is unknown; {choices}")
        find_strategy(name, "--strategies")
    labels = {name: label_of(name) for name in args.strategies}
    if twice := [name for name in labels if list(labels.values()).count(labels[name]) > 1]:
        raise UserError(f"--strategies {' and '.join(twice)} would both be called {labels[twice[0]]}; rename one")
    if args.data_set not in SCALES[args.scale].data:
        takes = ", ".join(SCALES[args.scale].data)
        raise UserError(f"--data_set {args.data_set}: --scale {args.scale} takes {takes}")
    if not args.measure.startswith("final"):
        if args.archive:
            raise UserError(f"--measure {args.measure}: an --archive holds results of final checkpoints only")
        if probe_parser().parse_args(["RUN", *SCALES[args.scale].probe.split()]).last == 1:
            raise UserError(f"--measure {args.measure}: --scale {args.scale} probes the final checkpoint only")


# --- What to run ---


def plan_entries(args: Namespace, costs: Costs) -> list[Entry]:
    """Each strategy at each length, for equal epochs, and at the length that takes as long, for equal compute."""
    standard, entries = parse(shared_flags(args)).epochs, []
    for whole in (max(round(standard * factor), 1) for factor in args.epochs_factor):
        baseline = label_of(BASELINE, whole, standard)
        for name in args.strategies:
            lengths = [whole] if "epochs" in args.equal else []
            if "compute" in args.equal:
                lengths.append(whole if costs[name].like_random else int(whole / costs[name].time))
            entries += [Entry(label_of(name, epochs, standard), name, epochs, baseline) for epochs in lengths]
    return list(dict.fromkeys(entries))


def check_lengths(asked: list[Entry], costs: Costs) -> None:
    for entry in asked:
        if not entry.epochs:
            raise UserError(
                f"--equal compute: an epoch of {entry.strategy} takes as long as {costs[entry.strategy].time:.1f} of "
                "random masks, more than they are trained for; train for longer with --epochs_factor"
            )


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
    """Flags that an archived run must match."""
    own = [identify(flag) if flag == entry.strategy else flag for flag in own_flags(entry, args)]
    return " ".join([*shared_flags(args), *own, "| probe", SCALES[args.scale].probe])


def archived_entries(archive: Archive, costs: Costs, args: Namespace) -> list[Entry]:
    """Entries for archived results of any strategy, with the same lengths and seeds; those on request must be named."""
    known = [name for name, strategy in STRATEGIES.items() if not strategy.on_request]
    known = [name for name in known if name in costs or args.equal == ["epochs"]]
    everything = plan_entries(Namespace(**{**vars(args), "strategies": known}), costs)
    return [entry for entry in everything if any((entry.label, seed) in archive.probes for seed in args.seeds)]


def plan_bench(entry: Entry, seed: int, args: Namespace) -> Run:
    """In a folder that depends on the content of your own strategy: an edited one is another."""
    own, content = own_flags(entry, args), identify(entry.strategy).partition("@")[2]
    name = f"{entry.label}-{content[:8]}" if content else entry.label
    folder = data_folder(args) / file_name(name) / f"seed{seed}"
    machine = ["--device", args.device] if args.device else []
    place = ["--data_path", args.data_path] if args.data_path else []
    flags = (*shared_flags(args), *own, *place, "--seed", str(seed), *machine)
    flags = (*flags, "--output_dir", str(folder), "--resume", "auto")
    probe = (str(folder), *SCALES[args.scale].probe.split(), *place, *machine, "--output_dir", str(folder / "probe"))
    steps = Step("main_pretrain", flags, data_name(args)), Step("experiments.probe", probe, data_name(args), PROTOCOL)
    return Run(Variant(entry.label, tuple(own)), seed, folder, steps)


def estimated_hours(planned: list[Entry], args: Namespace) -> float:
    """Scaled by FLOPs from the hours of the scale's own run; --pretrain may change model, images and epochs."""
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


# --- What came out ---


def collect_probes(runs: dict[Entry, list[Run]], archive: Archive, failed: dict[Run, str], args: Namespace) -> Probes:
    """Results of finished runs, which are added to the archive, and archived results; those of runs whose results are
    damaged are added to `failed`."""
    found: Probes = {}
    for entry, of_entry in runs.items():
        for each in of_entry:
            probe = archive.probes.get((entry.label, each.seed))
            if result := each.result(each.steps[1]):
                try:
                    probe = read_probe(result)
                except UserError as error:
                    failed[each] = str(error)
                    continue
                archive.add(entry.label, each.seed, archived_flags(entry, args), probe, each.settings().get("commit"))
            if probe:
                found.setdefault(entry.label, {})[each.seed] = probe
    return found


def report(
    runs: dict[Entry, list[Run]], costs: Costs, archive: Archive, failed: dict[Run, str], args: Namespace
) -> None:
    probes = collect_probes(runs, archive, failed, args)
    archive.add_costs(cost_settings(args), {name: cost for name, cost in costs.items() if name in STRATEGIES})
    missing = [
        each.title
        for entry, of_entry in runs.items()
        for each in of_entry
        if each not in failed and each.seed not in probes.get(entry.label, {}) and entry.strategy in args.strategies
    ]
    notes = [f"failed: {each.title}: {problem}" for each, problem in failed.items()]
    if missing:
        notes.append(f"not finished, so verdicts are preliminary: {', '.join(dict.fromkeys(missing))}")
    hidden = {label for label, _ in archive.probes} - {entry.label for entry in runs}
    notes += [f"archived, but not asked for: {', '.join(sorted(hidden))}"] if hidden else []
    if not probes:
        logger.info("%s", "\n".join(["there is no result yet", *notes]))
        return
    entries = list(runs)
    found = {m: standings(entries, probes, costs, m, args.part) for m in measures_beside(args.measure)}
    rows = found[args.measure]
    tables = [leaderboard_table(rows), features_table(found), noise_table(entries, probes)]
    tables = [table for table in tables if table]
    notes = [*EXPLANATIONS, *notes]
    with_masks = any(each.is_finished() for of_entry in runs.values() for each in of_entry)
    if args.html and not with_masks:
        notes.append(f"--html: no report, because it shows masks, and no finished run is below {data_folder(args)}")
    logger.info("\n%s", "\n\n".join(map(as_text, tables)))
    settings = parse(shared_flags(args))
    head = f"Scale {args.scale}, data {data_name(args)}; {settings.model}; seeds {' '.join(map(str, args.seeds))}."
    head += f" Flags of all pretrainings: {shlex.join(args.pretrain)}." if args.pretrain else ""
    name = file_name("-".join(["leaderboard", args.measure, args.part, *view_of(args)]))
    figure = f"![Gains over random masks, and accuracy against compute]({name}.png)"
    parts = ["# MaskBench", head, figure, *map(as_markdown, tables), "\n".join(f"- {note}" for note in notes)]
    files = write_leaderboard(data_folder(args), name, "\n\n".join(parts) + "\n", rows)
    if args.html and with_masks:
        files.append(write_html(data_folder(args) / name, runs, tables, notes, args))
    logger.info("\n%s", "\n".join([*notes, f"written to {', '.join(map(str, files))}"]))


def view_of(args: Namespace) -> list[str]:
    """What distinguishes the files of this comparison from those of the default one."""
    lengths = [f"x{factor:g}" for factor in args.epochs_factor] if args.epochs_factor != [1.0] else []
    seeds = ["seeds", *map(str, args.seeds)] if args.seeds != DEFAULT_SEEDS else []
    return [*(f"equal_{what}" for what in args.equal if args.equal != ["epochs"]), *lengths, *seeds]


def write_html(
    stem: Path, runs: dict[Entry, list[Run]], tables: list[Table], notes: list[str], args: Namespace
) -> Path:
    """STEM.html: the masks of each strategy's first finished run, and below them the tables and STEM.png."""
    first = {entry.label: each for entry, of_entry in runs.items() for each in reversed(of_entry) if each.is_finished()}
    place = ["--data_set", args.data_set, "--data_path", args.data_path] if args.data_path else []
    folders = [str(each.folder) for each in first.values()]
    page, picture = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("html", "png"))
    shown = visualize.get_args_parser().parse_args([*folders, "--names", *first, "--html", str(page), *place])
    source = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    figure = f'<img src="{source}" style="max-width: 100%" alt="Gains over random masks, and accuracy against compute">'
    section = visualize.tables_section(tables, notes) + figure
    runs_shown = visualize.checkpoints_by_run(zip(shown.names, shown.runs, strict=True))
    return visualize.write_report(runs_shown, shown, section)


EXPLANATIONS = [
    "gain: points over random masks of the same seeds and images; 95 %: interval over seeds and images, from "
    f"{FEWEST_SEEDS} seeds on; simultaneous 95 %: these intervals hold for all strategies at once; they decide, not p",
    "p (Holm): corrected, as are the intervals, for the number of strategies at the same epochs or the same compute",
    "step / random: median ratio of measured times; compute: that times the epochs, over the baseline's; GFLOP per "
    "image, forward and backward; GB: peak memory of an iteration",
    f"seeds to detect {EFFECT} points: two-sided t-test, power 80 %, level 5 %, which the last column divides by the "
    "number of strategies",
]


def check_images(archive: Archive, example: Run, args: Namespace) -> None:
    """Fail before any run whose results could not be shown, or not be paired with the archive's."""
    if args.cluster == "local" and (archive.probes or args.part == "held_out"):
        trained = example.pretrain.args()
        main_pretrain.check_args(trained)
        unseen = unseen_by(example.steps[1].args(), vars(trained))
        if args.part == "held_out" and not unseen.held_out:
            raise UserError("--part held_out: there are no such images; runs use all training images")
        if archive.probes:
            archive.check_images(hash_of_names(np.array(unseen.names())), data_name(args))


def main(args: Namespace) -> None:
    check_args(args)
    archive = read_archive(args.archive)
    costs = settle_costs(archive.costs, args)
    asked = plan_entries(args, costs)
    check_lengths(asked, costs)
    entries = list(dict.fromkeys([*asked, *archived_entries(archive, costs, args)]))
    planned = {(entry.label, seed): plan_bench(entry, seed, args) for entry in entries for seed in args.seeds}
    runs = {entry: [planned[entry.label, seed] for seed in args.seeds] for entry in entries}
    for entry in entries:
        for each in runs[entry]:
            archive.check(entry.label, each.seed, archived_flags(entry, args))
            each.check_settings()
    # Seed by seed: a first table is there early.
    new = {
        planned[entry.label, seed]: entry
        for seed in args.seeds
        for entry in asked
        if (entry.label, seed) not in archive.probes
    }
    if args.dry_run:
        logger.info("\n%s", "\n".join(typed_command(each, step, args) for each in new for step in each.steps))
        left = [entry for each, entry in new.items() if not each.is_finished()]
        hours, device = estimated_hours(left, args), SCALES[args.scale].device
        logger.info("\n%d pretrainings, about %.3g %s hours (computed)", len(left), hours, device)
        return
    failed = {}
    if new and not args.table_only:
        example, *_ = new
        if args.download:
            fetch(example)
        check_images(archive, example, args)
        failed = work(list(new), args)
    report(runs, costs, archive, failed, args)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run(main, get_args_parser())
