"""The two scales of an experiment: the paper's on a cluster, and a laptop's. Same code, other flags."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from util.cli import UserError

# Programs by the names that recipes use.
EVALUATIONS = {"knn": "main_knn", "linprobe": "main_linprobe", "fewshot": "main_fewshot"}


@dataclass(frozen=True)
class Scale:
    pretrain: str  # flags of main_pretrain.py
    evaluate: dict[str, str]  # flags of the evaluations, by their names
    image_flags: dict[str, str]  # by --data_set: what is read of the images, in pretraining and in evaluation
    size_flags: dict[str, str]  # by --data_set: what the pretraining has to be told of them
    downstream: dict[str, str]  # other labelled data, by name: flags; {path} is --downstream_path
    clmae_over_mae: float  # time of an iteration, measured (benchmarks/README.md)


SCALES = {
    # 200 classes of ImageNet, drawn with --class_seed 0. Rates and batch are upstream's for pretraining. How long the
    # paper trained is not in its tables; 400 epochs are main_pretrain.py's default.
    "full": Scale(
        pretrain="--model mae_vit_base --norm_pix_loss --global_batch_size 4096 --epochs 400 --warmup_epochs 40 "
        "--blr 1.5e-4",
        evaluate={"knn": "", "linprobe": "--runs 3", "fewshot": "--runs 3"},
        image_flags={"folder": "--num_classes 200"},
        size_flags={},
        downstream={
            "aid": "--data_path {path}/aid --split 0.5",
            "airbus": "--data_path {path}/airbus --split 0.8",
            "ahe": "--data_path {path}/ahe",
            "sea_animals": "--data_path {path}/sea_animals --split 0.9",
            "sport_balls": "--data_path {path}/sport_balls",
        },
        clmae_over_mae=3.09,
    ),
    # Minutes per run on one core. The images are so small that all of an epoch's time is the networks'.
    "small": Scale(
        pretrain="--model mae_vit_micro_patch4 --norm_pix_loss --batch_size 64 --epochs 8 --warmup_epochs 1 "
        "--blr 4e-3 --save_every 1 --num_workers 0",
        evaluate={
            "knn": "--num_workers 0",
            # With so few images, upstream's rate ends far from the optimum, below few-shot probing.
            "linprobe": "--num_workers 0 --cache_features --runs 3 --lr_grid 0.1 0.3 1 3 10",
            "fewshot": "--num_workers 0 --runs 3",
        },
        image_flags={
            **dict.fromkeys(("folder", "cifar10", "cifar100", "stl10", "fashion_mnist"), "--max_images 6400"),
            "shapes": "--shapes_images 6400",
        },
        size_flags={
            **dict.fromkeys(("folder", "cifar10", "cifar100", "stl10", "shapes"), "--input_size 32"),
            "fashion_mnist": "--input_size 28 --in_chans 1",
        },
        downstream={"shapes": "--data_set shapes --shapes_images 6400"},
        clmae_over_mae=4.77,
    ),
}


def data_name(args: Namespace) -> str:
    """As the evaluations name it in their results."""
    if args.data_set != "folder":
        return args.data_set
    if not args.data_path:
        raise UserError("--data_path: which images? Or --data_set shapes, which is built in")
    return Path(args.data_path).resolve().name


def source_flags(args: Namespace) -> list[str]:
    """Where the images of `--data_set` lie, and how many of them the scale uses."""
    scale = SCALES[args.scale]
    if args.data_set not in scale.image_flags:
        raise UserError(f"--data_set {args.data_set}: --scale {args.scale} takes {', '.join(scale.image_flags)}")
    place = ["--data_path", args.data_path] if args.data_path else []
    return ["--data_set", args.data_set, *place, *scale.image_flags[args.data_set].split()]
