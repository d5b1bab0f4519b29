"""From a recipe to runs: which programs are called with which flags, where their files lie, and what is done already.

OUTPUT_DIR/SCALE/DATA/RUN/seed0/            a pretraining; RUN is named by what it changes, as in clmae-lambda_div=5.0
OUTPUT_DIR/SCALE/DATA/RUN/seed0/cls_token/  its evaluations, one folder for each kind of features

Recipes share runs: a pretraining that two of them need is done once.
"""

import importlib
from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import main_pretrain
from experiments.recipe import Recipe, Variant
from experiments.scale import EVALUATIONS, SCALES, Scale, data_name, source_flags
from util.checkpoint import load_checkpoint
from util.cli import UserError
from util.evaluation.features import file_hash
from util.evaluation.results import Result, read_results, results_file
from util.training.resume import differences


@dataclass(frozen=True)
class Step:
    """A call of one of the main programs."""

    program: str
    flags: tuple[str, ...]
    data: str  # the name of the data
    protocol: str | None = None  # of an evaluation

    @property
    def title(self) -> str:
        return self.program if self.protocol is None else f"{self.program} on {self.data}"

    def args(self) -> Namespace:
        return importlib.import_module(self.program).get_args_parser().parse_args(list(self.flags))


@dataclass(frozen=True)
class Run:
    """A pretraining with one seed, and its evaluations."""

    variant: Variant
    seed: int
    folder: Path
    pretrain: Step
    evaluations: tuple[Step, ...]

    @property
    def title(self) -> str:
        return f"{self.folder.parent.name} seed {self.seed}"

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.pretrain, *self.evaluations)

    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.pretrain.args().epochs - 1}.pth"

    def settings(self) -> dict:
        """The flags that it was trained with."""
        return load_checkpoint(self.checkpoint(), lazily=True)["args"]

    def is_done(self, step: Step) -> bool:
        if not self.checkpoint().exists():
            return False
        return True if step.protocol is None else self.result(step) is not None

    def result(self, step: Step) -> Result | None:
        """The newest result of an evaluation with these very flags, of these very weights."""
        args = step.args()
        file = results_file(Path(args.output_dir))
        if not file.exists() or not file.stat().st_size:
            return None
        weights = hash_of(self.checkpoint(), self.checkpoint().stat().st_mtime_ns)
        fitting = [
            result
            for result in read_results(file)
            if (result.protocol, result.data) == (step.protocol, step.data)
            and result.checkpoint_sha256 == weights
            and agrees(result.settings, args)
        ]
        return fitting[-1] if fitting else None


@cache
def hash_of(checkpoint: Path, _modified: int) -> str:
    return file_hash(checkpoint)


def agrees(settings: dict, args: Namespace) -> bool:
    """Whether an evaluation was made with the same flags, as far as both know them. Given values only: what is None is
    read off the checkpoint."""
    given = {name: value for name, value in vars(args).items() if value is not None and name in settings}
    return all(settings[name] == value for name, value in given.items())


def check_settings(run: Run) -> None:
    """Refuse a folder whose finished run was trained with other flags than it would be now."""
    try:
        theirs = run.settings()
    except UserError:
        return  # not finished, then main_pretrain.py itself refuses other flags; or damaged, then evaluations say so
    ours = run.pretrain.args()
    main_pretrain.check_args(ours)
    known = {name: value for name, value in vars(ours).items() if value is not None}
    if ours.global_batch_size:
        del known["batch_size"]  # it follows from the number of processes
    if changed := differences(theirs, known):
        raise UserError(
            f"{run.folder} was trained with other settings: {'; '.join(changed)}. "
            "Give the same, or another --output_dir"
        )


def expand(recipe: Recipe, args: Namespace) -> list[Run]:
    """All runs of a recipe, seed by seed, so that a first table is there early."""
    return [plan_run(variant, seed, recipe, args) for seed in args.seeds for variant in recipe.variants_at(args.scale)]


def plan_run(variant: Variant, seed: int, recipe: Recipe, args: Namespace) -> Run:
    scale = SCALES[args.scale]
    base = [*scale.pretrain.split(), *source_flags(args), *scale.size_flags.get(args.data_set, "").split()]
    base += args.pretrain
    own = variant.flags.split()
    if variant.equal_compute:
        own += ["--epochs", str(round(parse(base).epochs * scale.clmae_over_mae))]
    folder = data_folder(args) / run_name(base, own) / f"seed{seed}"
    flags = (*base, *own, "--seed", str(seed), *machine_flags(args), "--output_dir", str(folder), "--resume", "auto")
    pretrain = Step("main_pretrain", flags, data_name(args))
    return Run(variant, seed, folder, pretrain, tuple(plan_evaluations(folder, pretrain, recipe, scale, args)))


def plan_evaluations(folder: Path, pretrain: Step, recipe: Recipe, scale: Scale, args: Namespace) -> list[Step]:
    checkpoint = folder / f"checkpoint-{pretrain.args().epochs - 1}.pth"
    sets = {data_name(args): source_flags(args)}
    if recipe.downstream:
        sets |= downstream_sets(scale, args)
    steps = []
    for name in recipe.evaluations:
        for data, flags in sets.items():
            common = ["--finetune", str(checkpoint), f"--{args.features}", *flags, *scale.evaluate[name].split()]
            common += [*machine_flags(args), "--output_dir", str(folder / args.features)]
            steps.append(Step(EVALUATIONS[name], tuple(common), data, protocol_of(name, common)))
    return steps


def protocol_of(evaluation: str, flags: list[str]) -> str:
    return f"{evaluation}-cached" if "--cache_features" in flags else evaluation


def downstream_sets(scale: Scale, args: Namespace) -> dict[str, list[str]]:
    """Labelled data beside the pretraining's: flags by name."""
    sets = {name: flags for name, flags in scale.downstream.items() if name != data_name(args)}
    if any("{path}" in flags for flags in sets.values()) and not args.downstream_path:
        raise UserError(f"--downstream_path: where are {', '.join(sets)}? docs/datasets.md tells how to get them")
    return {name: flags.format(path=args.downstream_path).split() for name, flags in sets.items()}


def data_folder(args: Namespace) -> Path:
    return Path(args.output_dir) / args.scale / data_name(args)


def machine_flags(args: Namespace) -> list[str]:
    return ["--device", args.device] if args.device else []


def parse(flags: list[str]) -> Namespace:
    return main_pretrain.get_args_parser().parse_args(flags)


def run_name(base: list[str], own: list[str]) -> str:
    """What a run changes: "mae" or "clmae", and the flags in which it differs from its scale's others."""
    before, after = vars(parse(base)), vars(parse([*base, *own]))
    method = {"random": "mae", "curriculum": "clmae"}[after["masking"]]
    changed = [name for name in after if after[name] != before[name] and name != "masking"]
    return "-".join([method, *(name if after[name] is True else f"{name}={after[name]}" for name in changed)])
