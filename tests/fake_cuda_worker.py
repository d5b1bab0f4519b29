"""Iterations of every variant on fake GPUs, as one JSON object on standard output: see programs/test_fake_cuda.py."""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import main_finetune
from benchmarks import bench_launches, bench_step
from benchmarks.fake_cuda import CAPABILITIES, Recorder, fake_cuda, fake_world, path_in_project
from engine_finetune import Objective, train_one_epoch
from models_vit import load_encoder
from util.datasets import build_eval_dataset
from util.evaluation.features import extract_features
from util.training.progress import EpochLog, LossGuard
from util.training.resume import Start

VARIANTS = {
    "curriculum": "",
    "fp16, clipped": "--amp fp16 --clip_grad 1",
    "accumulating": "--accum_iter 2",
    "checkpointing": "--grad_checkpointing",
    "topk": "--select topk",
    "soft attention": "--soft attention",
    "cheaper": "--cmm_every 2 --cmm_fraction 0.25 --cmm_dim 32",
    **{name: f"--masking {name}" for name in ("predictive", "random", "block", "grid", "noise")},
}
ENCODER = (
    "--model vit_micro_patch4 --data_set shapes --shapes_images 16 --nb_classes 10 --amp bf16 --mixup 0.8 --lr 1e-3"
)


class ReadyPairs(bench_step.ReadyImages):
    """With labels."""

    def __iter__(self):
        for imgs, _, index in super().__iter__():
            yield imgs, index, index


def contender(flags: str, device: str = "cuda") -> bench_step.Contender:
    """Small networks: what happens in a block does not depend on its width, nor on the number of blocks."""
    args = bench_step.get_args_parser().parse_args(["--batch_size", "8", "--device", device])
    return bench_step.Contender(f"--amp bf16 --cmm_depth 2 {flags}", args)


def summary(recorder: Recorder) -> dict[str, Any]:
    counters = {name: getattr(recorder, name) for name in ("syncs", "copies", "attention", "collectives")}
    return {"launches": len(recorder.launches), "largest": recorder.largest, **counters}


def recorded(iterate: Callable[[], object]) -> dict[str, Any]:
    """The second of two calls: the first makes AdamW's state and what is cached."""
    with Recorder():
        iterate()
    with Recorder() as recorder:
        iterate()
    return summary(recorder)


def finetuned() -> dict[str, Any]:
    args = main_finetune.get_args_parser().parse_args(ENCODER.split())
    with Recorder():  # the host's tensors are real: weights are drawn
        encoder = load_encoder(None, model=args.model, input_size=(32, 32), drop_path=0.1)
        state = main_finetune.build_classifier(Namespace(encoder=encoder, device=torch.device("cuda")), args)
        loader, objective = ReadyPairs(torch.rand(8, 3, 32, 32)), Objective(args)

    def iterate() -> None:
        log = EpochLog(Start(0), 1, LossGuard({}), None, args)
        train_one_epoch(state.model, objective, loader, state, 0, log, args)

    return recorded(iterate)


def extracted() -> dict[str, Any]:
    """Two batches."""
    args = main_finetune.get_args_parser().parse_args(ENCODER.split())
    args.input_size, args.in_chans = [32, 32], 3
    device, amp = torch.device("cuda"), torch.bfloat16
    with Recorder():
        encoder = load_encoder(None, model=args.model, input_size=(32, 32)).to(device)
    with Recorder() as recorder:
        dataset = build_eval_dataset(args, "train")
        extract_features(encoder, dataset, list(range(16)), width=64, device=device, amp=amp, batch_size=8)
    return summary(recorder)


def lines_run(function: Callable[[], object]) -> Counter[str]:
    """How many lines of each of this project's functions run; every turn of a loop counts."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Callable | None:
        path = path_in_project(frame.f_code.co_filename)
        if path is None or "fake_cuda" in path.name:
            return None
        if event == "line":
            lines[frame.f_code.co_name] += 1
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


def in_a_world_of(size: int, flags: str) -> dict[str, Any]:
    """The second iteration, as above."""
    with fake_world(size):
        one = contender(flags)
        with Recorder():
            one.iterate(1)
        with Recorder() as recorder:
            lines = lines_run(lambda: one.iterate(1))
    return {**summary(recorder), "lines": lines}


def attention_kernels(gpu: str) -> Counter[str]:
    at = list(CAPABILITIES).index(gpu)
    with torch.cuda.device(at), Recorder() as recorder:
        contender("--amp auto", f"cuda:{at}").iterate(1)
    return recorder.attention


def faults() -> dict[str, Any]:
    """What must not go unseen: how many syncs each is recorded as, or the name of the exception."""
    gpu, host = torch.zeros(4, device="cuda"), torch.arange(4)
    attempts: dict[str, Callable[[], Any]] = {
        "item": lambda: gpu[0].item(),
        "tolist": lambda: gpu.tolist(),
        "condition": lambda: bool(gpu.sum() > 0),
        "to the host": lambda: gpu.cpu(),
        "to the GPU": lambda: host.to("cuda"),
        "constant": lambda: torch.tensor([1.0, 2.0], device="cuda"),
        "list as index": lambda: gpu[[0, 2]],
        "index on the host": lambda: gpu[torch.tensor([0, 2])],
        "copy into": lambda: gpu.copy_(torch.zeros(4)),
        "synchronize": lambda: torch.cuda.synchronize(),
        "mask as index": lambda: gpu[gpu > 0],
        "mixed devices": lambda: gpu + host,
    }
    found: dict[str, Any] = {}
    for name, attempt in attempts.items():
        with Recorder() as recorder:
            try:
                attempt()
                found[name] = recorder.syncs.total()
            except Exception as error:
                found[name] = type(error).__name__
    return found


def main() -> None:
    found: dict[str, Any] = {}
    with fake_cuda():
        # The H100 first: by the first GPU that attends, torch decides for all whether it prefers cuDNN's kernels.
        found["kernels"] = {gpu: attention_kernels(gpu) for gpu in ("H100", "A100", "T4")}
        found["faults"] = faults()
        found["variants"] = {}
        for name, flags in VARIANTS.items():
            one, iterations = contender(flags), 2 if name == "accumulating" else 1
            found["variants"][name] = recorded(lambda one=one, iterations=iterations: one.iterate(iterations))
        found["variants"] |= {"fine-tuning": finetuned(), "features": extracted()}
        worlds = ("curriculum", "cheaper", "predictive")
        found["worlds"] = {name: {size: in_a_world_of(size, VARIANTS[name]) for size in (8, 512)} for name in worlds}
        args = bench_launches.get_args_parser().parse_args(["--model", "mae_vit_micro_patch4"])
        found["bench"] = [bench_launches.measure(method, 8, args) for method in ("MAE", "CL-MAE")]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
