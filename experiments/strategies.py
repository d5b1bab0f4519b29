"""What MaskBench compares, and at which scales: one line for each strategy."""

from argparse import Namespace
from dataclasses import dataclass

from experiments.recipes import RELEASED_FLAGS
from util.evaluation.features import file_hash

BASELINE = "random"


@dataclass(frozen=True)
class MaskStrategy:
    flags: str  # of main_pretrain.py
    flops: float = 1.0  # of an iteration over random masks', counted at ViT-S: what a benchmark will cost
    on_request: bool = False  # not among the defaults, so that the correction is for the strategies of interest


CURRICULUM = "--masking curriculum --cmm_fraction 0.5 --soft"
PREDICTIVE = "--masking predictive --cmm_strength"
MILD = f"{PREDICTIVE} 0.5"
RELEASED = " ".join(["--masking curriculum --soft tokens", *RELEASED_FLAGS])

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
    "predictive-mild": MaskStrategy(MILD, 1.02),
    "predictive": MaskStrategy(f"{PREDICTIVE} 1", 1.02),
    "predictive-reversed": MaskStrategy(f"{PREDICTIVE} 1 --lambda_cl_start -1 --lambda_cl_end 1", 1.02),
    # The mild curriculum with geometry besides content, as partner alone, as adversary alone, with a rising ratio.
    "predictive-noise": MaskStrategy(f"{MILD} --mask_noise curriculum", 1.02, on_request=True),
    "predictive-partner": MaskStrategy(f"{MILD} --lambda_cl_end 0", 1.02, on_request=True),
    "predictive-adversary": MaskStrategy(f"{MILD} --lambda_cl_start 0", 1.02, on_request=True),
    "predictive-ratio": MaskStrategy(f"{MILD} --mask_ratio_start 0.65 --mask_ratio 0.85", 1.02, on_request=True),
    "released": MaskStrategy(RELEASED, 4.02, on_request=True),  # the authors' code
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


def strategy_flags(name: str) -> list[str]:
    return STRATEGIES[name].flags.split() if name in STRATEGIES else ["--masking", name]


def identify(name: str) -> str:
    """Distinguishes a strategy from all others; your own is known by the content of its file, wherever that is."""
    if name in STRATEGIES:
        return name
    path, _, function = name.rpartition(":")
    return f"{function}@{file_hash(path)[:16]}"


def shared_flags(args: Namespace) -> list[str]:
    """Flags that all pretrainings share, without file locations."""
    scale = SCALES[args.scale]
    return [*scale.pretrain.split(), "--data_set", args.data_set, *scale.data[args.data_set].split(), *args.pretrain]
