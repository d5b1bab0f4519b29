"""What an iteration launches, moves and waits for on a GPU, and how long it would take at least: all without a GPU.

    python -m benchmarks.bench_launches                                  # ViT-B/16 in bf16, minutes
    python -m benchmarks.bench_launches --model mae_vit_micro_patch4 --batch_size 64 --pretrain --amp fp16

The iterations are engine_pretrain.py's own, on fake tensors (benchmarks/fake_cuda.py). Launches, casts, syncs and bytes
are counted. Times are computed, as a roofline: each launch takes as long as an A100 needs for its FLOPs, or for reading
its inputs and writing its outputs once, whichever is longer. Real kernels reach neither limit, some launches are
several kernels, and caches spare bytes. No line of the log is included: that is a sync in every 20 iterations.
"""

import json
import sys
from argparse import REMAINDER, Namespace

import torch

from benchmarks import bench_step
from benchmarks.fake_cuda import Launch, Recorder, fake_cuda, obstacle, run_on_fake_cuda
from models_mae import MODELS, grid_size
from util.cli import LOG_INTERVAL, ArgumentParser, UserError, count, logger
from util.evaluation.tables import show_table
from util.program import run

METHODS = ("MAE", "CL-MAE", "preset", "predictive")
STEPS = 2  # the preset's masking module learns in every second
HALF, SINGLE = 312e12, 19.5e12  # an A100's FLOP/s with bf16 or fp16 inputs, and with float32 ones without TF32
BANDWIDTHS = {"40 GB": 1.55e12, "80 GB": 2.0e12}  # bytes/s, by model of A100
HOST = 5e-6  # seconds in which the host launches a kernel; an assumption


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.bench_launches", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="mae_vit_base", choices=sorted(MODELS), help="its size")
    parser.add_argument("--input_size", default=None, type=count, help="default: 32 for micro, else 224")
    parser.add_argument("--batch_size", default=[64, 512], nargs="+", type=count, help="images per iteration")
    parser.add_argument("--methods", default=METHODS, nargs="+", choices=bench_step.METHODS, help="the first is 1")
    parser.add_argument("--inside", action="store_true", help="(internal) this process sees the fake GPU")
    parser.add_argument("--pretrain", default=[], nargs=REMAINDER, metavar="FLAG", help="comes last: pretraining flags")
    return parser


def seconds(launch: Launch, bandwidth: float) -> float:
    """The roofline: computing or moving, whichever takes longer."""
    return max(launch.flops / (SINGLE if launch.dtype == torch.float32 else HALF), launch.moved / bandwidth)


def measure(method: str, batch_size: int, args: Namespace) -> dict:
    """An iteration of `method`, as the mean over STEPS without a line of the log."""
    own = Namespace(**{**vars(args), "batch_size": batch_size, "device": "cuda"})
    contender = bench_step.Contender(bench_step.METHODS[method], own)
    height, width = grid_size(contender.state.model)
    visible = height * width // 4  # of each image, as trained masks leave
    for batches in (1, STEPS):  # the first warms up: AdamW's state, cached constants
        contender.loader.batches = batches
        with Recorder(visible) as recorder:
            contender.iterate(LOG_INTERVAL)
    launches = recorder.launches
    times = {name: [seconds(launch, speed) / STEPS for launch in launches] for name, speed in BANDWIDTHS.items()}
    products = [launch.kind in ("matrix", "attention") for launch in launches]
    return {
        "method": method,
        "batch_size": batch_size,
        "launches": len(launches) / STEPS,
        "casts": sum(launch.kind == "cast" for launch in launches) / STEPS,
        "syncs": recorder.syncs.total() / STEPS,
        "copies": recorder.copies.total() / STEPS,
        "bytes": sum(launch.moved for launch in launches) / STEPS,
        "flops": sum(launch.flops for launch in launches) / STEPS,
        "attention": dict(recorder.attention),
        "seconds": {name: sum(each) for name, each in times.items()},
        "products": sum(t for t, product in zip(times["80 GB"], products, strict=True) if product),
    }


def report(found: list[dict]) -> None:
    """Counts first, then what is computed from them."""
    counts, limits = [], []
    first = {one["batch_size"]: one["seconds"]["80 GB"] for one in reversed(found)}
    for one in found:
        name, fastest = [one["method"], str(one["batch_size"])], one["seconds"]["80 GB"]
        numbers = [f"{one['launches']:.0f}", f"{one['casts']:.0f}", f"{one['syncs']:g}", f"{one['copies']:g}"]
        counts.append([*name, *numbers, f"{one['bytes'] / 1e9:.1f}", f"{one['flops'] / 1e12:.3g}"])
        ms = [f"{1000 * value:.1f}" for value in (*one["seconds"].values(), HOST * one["launches"])]
        limits.append([*name, *ms, f"{fastest / first[one['batch_size']]:.2f}", f"{one['products'] / fastest:.0%}"])
    header = ["method", "batch", "launches", "casts", "syncs", "copies to it", "GB moved", "TFLOP"]
    show_table("an iteration on a GPU, counted", header, counts)
    times = [f"ms, A100 {name}" for name in BANDWIDTHS]
    header = ["method", "batch", *times, "ms to launch", f"/ {found[0]['method']}", "of it products"]
    show_table("the least time it takes, computed", header, limits)


def main(args: Namespace) -> None:
    if args.inside:
        with fake_cuda():
            found = [measure(method, batch, args) for batch in args.batch_size for method in args.methods]
        logger.info(json.dumps(found))
        return
    if reason := obstacle():
        raise UserError(reason)
    inside = [sys.executable, "-m", "benchmarks.bench_launches", "--inside", *sys.argv[1:]]
    found = json.loads(run_on_fake_cuda(inside).splitlines()[-1])
    logger.info("%s on a fake A100, torch %s", args.model, torch.__version__)
    report(found)


if __name__ == "__main__":
    run(main, get_args_parser())
