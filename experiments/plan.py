"""From a recipe to runs: which programs are called with which flags, where their files are, and what is done already.

OUTPUT_DIR/SCALE/DATA/RUN/seed0/            a pretraining; RUN is what it changes, as in curriculum-lambda_div=5.0
OUTPUT_DIR/SCALE/DATA/RUN/seed0/cls_token/  its evaluations, one folder for each kind of features

Recipes share runs: a pretraining that two of them need is done once.
"""

import importlib
import re
from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import main_pretrain
from experiments.recipes import EVALUATIONS, SCALES, Recipe, Variant
from util.arguments import name_of_data
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
    protocol: str | None = None  # None: pretraining

    @property
    def title(self) -> str:
        return self.program if self.protocol is None else f"{self.program} on {self.data}"

    def args(self) -> Namespace:
        return importlib.import_module(self.program).get_args_parser().parse_args(list(self.flags))


@dataclass(frozen=True, eq=False)
class Run:
    """A pretraining with one seed, and its evaluations."""

    variant: Variant
    seed: int
    folder: Path
    steps: tuple[Step, ...]

    @property
    def title(self) -> str:
        return f"{self.variant.name} (seed {self.seed})"

    @property
    def pretrain(self) -> Step:
        return self.steps[0]

    def checkpoint(self) -> Path:
        return self.folder / f"checkpoint-{self.pretrain.args().epochs - 1}.pth"

    def settings(self) -> dict:
        """The flags that it was trained with."""
        return load_checkpoint(self.checkpoint(), check=False, mapped=True)["args"]

    def is_done(self, step: Step) -> bool:
        return self.checkpoint().exists() and (step.protocol is None or self.result(step) is not None)

    def is_finished(self) -> bool:
        return all(map(self.is_done, self.steps))

    def result(self, step: Step) -> Result | None:
        """The newest result of an evaluation with these very flags, of these very weights."""
        args = step.args()
        file = results_file(Path(args.output_dir))
        if not self.checkpoint().exists() or not file.exists():
            return None
        weights = hash_of(self.checkpoint(), self.checkpoint().stat().st_mtime_ns)
        given = {name: value for name, value in vars(args).items() if value is not None}  # None: as the checkpoint
        try:
            results = read_results(file)
        except UserError:
            return None  # empty or damaged: evaluated again
        for result in reversed(results):
            same = all(given[name] == value for name, value in result.settings.items() if name in given)
            if (result.protocol, result.data, result.checkpoint_sha256) == (step.protocol, step.data, weights) and same:
                return result
        return None

    def check_settings(self) -> None:
        """Refuse a folder whose finished run was trained with other flags than it would be now."""
        try:
            theirs = self.settings()
        except UserError:
            return  # unfinished: main_pretrain.py itself refuses other flags; damaged: evaluations report it
        ours = self.pretrain.args()
        main_pretrain.check_args(ours)
        known = {name: value for name, value in vars(ours).items() if value is not None}
        if ours.global_batch_size:
            del known["batch_size"]  # it follows from the number of processes
        known["world_size"] = theirs.get("world_size", 1)  # runs of several GPUs are also shown where there are none
        if changed := differences(theirs, known):
            raise UserError(
                f"{self.folder} was trained with other settings: {'; '.join(changed)}. "
                "Give the same, or another --output_dir"
            )


@cache
def hash_of(checkpoint: Path, _modified: int) -> str:
    return file_hash(checkpoint)


def expand(recipe: Recipe, args: Namespace) -> list[Run]:
    """All runs of a recipe, seed by seed, so that a first table is there early."""
    variants = [variant for variant in recipe.variants if args.scale == "full" or not variant.full_only]
    return [plan_run(variant, seed, recipe, args) for seed in args.seeds for variant in variants]


def plan_run(variant: Variant, seed: int, recipe: Recipe, args: Namespace) -> Run:
    scale = SCALES[args.scale]
    source, own = source_flags(args), list(variant.flags)
    base = [*scale.pretrain.split(), *source, *scale.data[args.data_set][1].split(), *args.pretrain]
    if variant.equal_compute:
        own += ["--epochs", str(round(parse(base).epochs * scale.clmae_over_mae))]
    folder = data_folder(args) / run_name(base, own) / f"seed{seed}"
    machine = ["--device", args.device] if args.device else []
    flags = (*base, *own, "--seed", str(seed), *machine, "--output_dir", str(folder), "--resume", "auto")
    checkpoint = folder / f"checkpoint-{parse([*base, *own]).epochs - 1}.pth"
    steps = [Step("main_pretrain", flags, data_name(args))]
    for name in recipe.evaluations:
        cached = "-cached" if "--cache_features" in scale.evaluate[name] else ""
        for data, where in {data_name(args): source, **(downstream_sets(args) if recipe.downstream else {})}.items():
            common = ("--finetune", str(checkpoint), f"--{args.features}", *where, *scale.evaluate[name].split())
            common = (*common, *machine, "--output_dir", str(folder / args.features))
            steps.append(Step(EVALUATIONS[name], common, data, name + cached))
    return Run(variant, seed, folder, tuple(steps))


def run_name(base: list[str], own: list[str]) -> str:
    """The masking strategy, and the flags in which a run differs from its scale's others."""
    after = vars(parse([*base, *own]))
    before = vars(parse([*base, "--masking", after["masking"]]))
    changed = [name for name in after if after[name] != before[name] and name != "masking"]
    parts = [after["masking"], *(name if after[name] is True else f"{name}={after[name]}" for name in changed)]
    return re.sub(r"[^\w.=+-]+", "_", "-".join(parts))


def parse(flags: list[str]) -> Namespace:
    """With the defaults that depend on other flags."""
    args = main_pretrain.get_args_parser().parse_args(flags)
    main_pretrain.settle_mask_args(args)
    return args


def data_name(args: Namespace) -> str:
    """As the evaluations name it in their results."""
    if args.data_set == "folder" and not args.data_path:
        raise UserError("--data_path is missing: give a folder of images, or use --data_set shapes, which is built in")
    return name_of_data(args)


def data_folder(args: Namespace) -> Path:
    return Path(args.output_dir) / args.scale / data_name(args)


def source_flags(args: Namespace) -> list[str]:
    """Where the images of `--data_set` are, and how many of them the scale uses."""
    data = SCALES[args.scale].data
    if args.data_set not in data:
        raise UserError(f"--data_set {args.data_set}: --scale {args.scale} takes {', '.join(data)}")
    place = ["--data_path", args.data_path] if args.data_path else []
    return ["--data_set", args.data_set, *place, *data[args.data_set][0].split()]


def downstream_sets(args: Namespace) -> dict[str, list[str]]:
    """Labelled data other than the pretraining's: flags by name."""
    sets = {name: flags for name, flags in SCALES[args.scale].downstream.items() if name != data_name(args)}
    if any("{path}" in flags for flags in sets.values()) and not args.downstream_path:
        raise UserError(f"--downstream_path is missing: the folder with {', '.join(sets)} (see docs/datasets.md)")
    return {name: [word.format(path=args.downstream_path) for word in flags.split()] for name, flags in sets.items()}
