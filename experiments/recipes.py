"""All recipes as data: the paper's tables and figures, a few controls, and the two scales they run at.

A recipe is a table: each variant is one pretraining. The paper's settings and accuracies come from paper.csv, which
holds every accuracy the paper prints; none is repeated here.
"""

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml

PAPER = list(csv.DictReader((Path(__file__).parent / "paper.csv").read_text().splitlines()))
PAPER_FLAGS = ("--soft", "tokens", "--select", "threshold")  # whatever the defaults are: what the paper ran


def masks_of(config: str, base: str = "clmae_vit_base") -> tuple[str, ...]:
    """The flags in which one of configs/ differs from another, but for the length of the run."""
    folder = Path(__file__).parent.parent / "configs"
    ours, theirs = (yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in (config, base))
    changed = {
        f"--{name}": str(value) for name, value in ours.items() if theirs.get(name) != value and name != "epochs"
    }
    return tuple(word for flag in changed.items() for word in flag)


RELEASED_FLAGS = masks_of("released")
EVALUATIONS = {"knn": "main_knn", "linprobe": "main_linprobe", "fewshot": "main_fewshot"}
SPLITS = {"aid": "--split 0.5", "airbus": "--split 0.8", "ahe": "", "sea_animals": "--split 0.9", "sport_balls": ""}


@dataclass(frozen=True)
class Scale:
    pretrain: str  # flags of main_pretrain.py
    evaluate: dict[str, str]  # by the names in EVALUATIONS: flags
    data: dict[str, tuple[str, str]]  # by --data_set: flags of every program, and those of pretraining alone
    downstream: dict[str, str]  # flags by data set; {path} is --downstream_path
    clmae_over_mae: float  # time per iteration, measured (benchmarks/README.md)


SCALES = {
    # 200 ImageNet classes, drawn with --class_seed 0, with upstream's batch and rate. The paper does not state its
    # number of epochs; 400 is the default of main_pretrain.py.
    "full": Scale(
        pretrain="--config configs/clmae_vit_base.yaml",
        evaluate={"knn": "", "linprobe": "--runs 3", "fewshot": "--runs 3"},
        data={"folder": ("--num_classes 200", "")},
        downstream={name: f"--data_path {{path}}/{name} {split}" for name, split in SPLITS.items()},
        clmae_over_mae=3.09,
    ),
    # Minutes per run on one core. With so few images, upstream's rate for linear probing stops far from the optimum,
    # below few-shot probing.
    "small": Scale(
        pretrain="--config configs/laptop.yaml",
        evaluate={
            "knn": "--num_workers 0",
            "linprobe": "--num_workers 0 --cache_features --runs 3 --lr_grid 0.1 0.3 1 3 10",
            "fewshot": "--num_workers 0 --runs 3",
        },
        data={
            **dict.fromkeys(("folder", "cifar10", "cifar100", "stl10"), ("--max_images 6400", "")),
            "fashion_mnist": ("--max_images 6400", "--input_size 28 --in_chans 1"),
            "shapes": ("--shapes_images 6400", ""),
        },
        downstream={"shapes": "--data_set shapes --shapes_images 6400"},
        clmae_over_mae=4.77,
    ),
}


@dataclass(frozen=True)
class Variant:
    """A row of a table: one pretraining, repeated for every seed."""

    name: str
    flags: tuple[str, ...] = ()  # of main_pretrain.py, in addition to the scale's
    paper: dict[str, str] = field(default_factory=dict)  # its line of paper.csv; protocol and data may differ
    hours: int = 20  # of pretraining at full scale on eight A100, computed from FLOPs
    baseline: bool = False  # the variants below it are tested against it
    equal_compute: bool = False  # train MAE for as many epochs as CL-MAE's time would allow
    full_only: bool = False  # too large for the small scale

    def reported(self, protocol: str, data: str) -> list[str]:
        """The paper's Acc@1 and Acc@5 as printed, "-" where it reports none."""
        wanted = self.paper | {"protocol": protocol, "data": data}
        same = PAPER[0].keys() - {"table", "acc1", "acc5"}
        found = [line for line in PAPER if all(line[name] == wanted.get(name, "") for name in same)]
        return [found[0]["acc1"], found[0]["acc5"]] if found else ["-", "-"]


@dataclass(frozen=True)
class Recipe:
    title: str
    about: str
    variants: tuple[Variant, ...]
    evaluations: tuple[str, ...] = ("knn",)
    downstream: bool = False  # evaluate on the downstream sets, too
    pictures: str = ""  # flags of main_visualize.py, for figures of the first seed's runs


def paper_lines(table: str) -> list[dict[str, str]]:
    return [line for line in PAPER if line["table"] == table]


def sized(line: dict[str, str]) -> Variant:
    """MAE or CL-MAE with one of the three backbones. ViT-B is the default of its scale, which may be smaller."""
    backbones = {"ViT-B": ("", 6, 20), "ViT-L": ("mae_vit_large", 14, 47), "ViT-H": ("mae_vit_huge", 32, 116)}
    model, *hours = backbones[line["model"]]
    name, mae = line["method"], line["method"] == "MAE"
    flags = ("--masking", "random") if mae else PAPER_FLAGS
    if model:
        name, flags = f"{name}, {line['model']}", (*flags, "--model", model)
    return Variant(name, flags, line, hours[0 if mae else 1], baseline=mae, full_only=bool(model))


def clmae(name: str, flags: str = "", paper: dict[str, str] | None = None) -> Variant:
    return Variant(name, (*PAPER_FLAGS, *flags.split()), paper or {})


def loss_ablation(line: dict[str, str]) -> Variant:
    losses = {"kl": "--lambda_kl 0", "div": "--lambda_div 0", "curriculum": "--no_curriculum"}
    off = [flag for loss, flag in losses.items() if loss not in line["losses"].split("+")]
    return clmae(line["losses"].replace("+", " + "), " ".join(off), line)


def tuning(name: str, title: str, others: str = "", note: str = "") -> Recipe:
    """One of the paper's tuning tables: --NAME varies, `others` are settings that differ from the final ones."""
    variants = [clmae(f"{name} {line[name]}", f"{others} --{name} {line[name]}", line) for line in paper_lines(name)]
    return Recipe(title, f"CL-MAE {f'with {others}, ' if others else ''}varying --{name}. {note}".strip(), (*variants,))


def figure(title: str, about: str, *variants: Variant, blocks: int = 1) -> Recipe:
    pictures = f"--grid masks diversity positions --curve --blocks {blocks}"
    return Recipe(title, about, (CLMAE, *variants), evaluations=(), pictures=pictures)


def control(flags: str) -> Variant:
    return clmae(flags.replace("--", ""), flags)


SIZES = tuple(map(sized, paper_lines("imagenet")))
MAE, CLMAE = SIZES[:2]

RECIPES = {
    "main_results": Recipe(
        "MAE and CL-MAE on the pretraining data",
        "Three backbones (small scale: one). The paper has nearest neighbours; linear probing is extra.",
        SIZES,
        ("knn", "linprobe"),
    ),
    "downstream": Recipe(
        "Transfer to other data",
        "The encoders of main_results on the five sets below --downstream_path (docs/datasets.md) and on the "
        "pretraining data. At the small scale, the built-in shapes replace the five.",
        SIZES,
        ("knn", "linprobe"),
        downstream=True,
    ),
    "fewshot": Recipe(
        "Few-shot linear probing",
        "The encoders and data of downstream, with 1 to 16 labelled images per class, three draws each.",
        SIZES,
        ("fewshot",),
        downstream=True,
    ),
    "losses": Recipe(
        "Losses of the masking module",
        "MAE, then CL-MAE with one more loss at a time; the last row is the full method.",
        (MAE, *map(loss_ablation, paper_lines("losses"))),
    ),
    # In the paper's order of tuning: each table keeps what those before it chose, with lambda_div at 1 until its own.
    "lambda_gauss": tuning(
        "lambda_gauss", "Weight of the Gaussian loss", "--no_curriculum --lambda_kl 0 --lambda_div 1"
    ),
    "lambda_kl": tuning("lambda_kl", "Weight of the Kullback-Leibler loss", "--no_curriculum --lambda_div 1"),
    "lambda_cl_end": tuning(
        "lambda_cl_end",
        "Curriculum weight at the end of training",
        "--lambda_div 1",
        "The paper's row for 0 equals its result without a curriculum; the run here starts at 1, like the others.",
    ),
    "lambda_div": tuning("lambda_div", "Weight of the diversity loss"),
    "cmm_depth": tuning("cmm_depth", "Blocks of the masking module"),
    "masks_curriculum": figure(
        "Masks over the curriculum", "Masks and reconstructions at five moments of training, and curves.", blocks=5
    ),
    "masks_no_diversity": figure(
        "Masks without the diversity loss",
        "Masks of 64 images side by side. In the paper, different images then get nearly the same mask.",
        clmae("without diversity", "--lambda_div 0"),
    ),
    "masks_no_kl": figure(
        "Masks without the Kullback-Leibler loss",
        "Masks, and their visible share over training. In the paper, the mask ratio then misses its target.",
        clmae("without KL", "--lambda_kl 0"),
    ),
    "released": Recipe(
        "The setting of the authors' released code",
        "A control, not in the paper, compared with MAE and CL-MAE of the same length: 200 epochs at either scale.",
        (
            replace(MAE, flags=(*MAE.flags, "--epochs", "200"), paper={}, hours=3),
            replace(CLMAE, flags=(*CLMAE.flags, "--epochs", "200"), paper={}, hours=10),
            Variant("released code", (*PAPER_FLAGS, *RELEASED_FLAGS, "--epochs", "200"), hours=10),
        ),
        ("knn", "linprobe"),
    ),
    "compute": Recipe(
        "Equal epochs and equal compute",
        "Not in the paper: MAE for as many epochs as CL-MAE's time would allow, as measured in benchmarks/README.md.",
        (MAE, replace(MAE, name="MAE, equal compute", paper={}, hours=20, baseline=False, equal_compute=True), CLMAE),
        ("knn", "linprobe", "fewshot"),
    ),
    "schedule": Recipe(
        "End of the curriculum and learning rate of the masking module",
        "Can the module still turn adversary when the sign flips? Not in the paper, which is silent about this rate. "
        "See the errors over random masks' in the table of mask health.",
        (
            MAE,
            *(
                control(f"--lambda_cl_end {end} --cmm_schedule {schedule}")
                for schedule in ("constant", "cosine")
                for end in (0, -0.1, -0.2, -1)
            ),
        ),
        pictures="--curve",
    ),
    "adversary": Recipe(
        "What lets the masking module turn adversary",
        "Not in the paper: a lower end of the curriculum, a weaker Gaussian loss, a faster module. Errors over random "
        "masks' are below 1 for a partner, above 1 for an adversary.",
        (
            MAE,
            clmae("CL-MAE"),
            control("--lambda_cl_end -1"),
            control("--lambda_gauss 1"),
            control("--lambda_gauss 0"),
            control("--lambda_gauss 1 --lambda_cl_end -1"),
            control("--lambda_gauss 1 --lambda_cl_end -1 --cmm_blr 1.2e-2"),
        ),
        pictures="--grid masks positions --curve --blocks 1",
    ),
    "attention": Recipe(
        "Step 2, made consistent",
        "Not in the paper: --soft attention compared with the paper's step 2, and without each of the settings that "
        "come with it. `python main_masks.py RUN ... --judge MAE_RUN` measures their masks.",
        (
            MAE,
            clmae("CL-MAE"),
            control("--soft attention"),
            control("--soft attention --lambda_gauss 10"),
            control("--soft attention --lambda_pos 0"),
            control("--soft attention --lambda_cl_end -0.1"),
            control("--soft attention --lambda_cl_end -0.5"),
            control("--soft attention --select topk"),
        ),
        pictures="--grid masks positions --curve --blocks 1",
    ),
}
