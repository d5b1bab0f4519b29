"""What 800 epochs on ImageNet would take, computed and not measured: hours and memory of MAE, CL-MAE and its preset.

    python -m benchmarks.projection                     # writes benchmarks/projection.md, from the counts that are kept
    python -m benchmarks.projection --overhead 0.95     # with another measured factor of benchmarks.bench_step
    python -m benchmarks.projection --recount           # counts FLOPs and bytes again: 5 minutes and 7 GB on one core

FLOPs and bytes are counted by benchmarks/footprint.py and kept in benchmarks/projection.json. One reported time
calibrates the rate of a V100: upstream's, of ViT-L MAE.
"""

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.footprint import (
    BYTES_PER_PARAMETER,
    IMAGENET_IMAGES,
    IMG_SIZE,
    MASK_RATIO,
    USABLE,
    build,
    draw_inputs,
    measure_gflop,
    saved_storages,
    soft_loss,
    with_memory,
)
from engine_pretrain import frozen
from models_cmm import CurriculumMaskingModule, build_cmm
from models_mae import MaskedAutoencoderViT
from util.cli import ArgumentParser, UserError, logger, run

COUNTS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).with_suffix(".md")
MODELS = {"ViT-B/16": "mae_vit_base", "ViT-L/16": "mae_vit_large", "ViT-H/14": "mae_vit_huge"}
EPOCHS = 800
GLOBAL_BATCH = 4096
UPSTREAM_MODEL, UPSTREAM_HOURS, UPSTREAM_GPUS = "ViT-L/16", 42, 64  # upstream's PRETRAIN.md: 800 epochs, V100
V100_PEAK, A100_PEAK = 125, 312  # TFLOP/s of tensor cores: fp16 and bf16
MEASURED_OVERHEADS = """`benchmarks/bench_step.py` gave 0.92 and 0.98 with ViT-B on two
  threads of a CPU, and in several runs 0.9 to 0.98 and 0.81 to 1.06 with mae_vit_micro_patch4 on one."""
OPTIMISTIC = 100.0  # TFLOP/s of an A100, the rate of benchmarks/footprint.py


@dataclass(frozen=True)
class Gpus:
    name: str
    number: int
    gb: int
    tflops: float  # sustained, each

    @property
    def batch(self) -> int:
        return GLOBAL_BATCH // self.number


@dataclass(frozen=True)
class Method:
    """How often, and on what share of the images, a CMM learns; `cmm` is None for vanilla MAE."""

    name: str
    cmm: str | None = None  # which of the counted ones
    every: int = 1
    fraction: float = 1.0
    overhead: float = 1.0  # time per FLOP, relative to MAE's


@dataclass(frozen=True)
class Counts:
    """Of one model, by part: "MAE", "CMM", "half" (the CMM of half the width) and "soft" (the pass of step 2)."""

    parameters: dict[str, int]
    gflop: dict[str, tuple[float, float]]  # forward and backward of an image
    copies: dict[str, int]  # bytes of bf16 weights
    activations: dict[str, int]  # bytes kept for each image
    checkpointed: dict[str, int]  # the same with --grad_checkpointing
    block: dict[str, int]  # bytes for each image of the largest block, which its backward pass computes again


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.projection", description=__doc__.split("\n")[0])
    parser.add_argument("--overhead", default=0.92, type=float, help="bench_step's time / FLOPs of CL-MAE")
    parser.add_argument("--overhead_preset", default=0.98, type=float, help="bench_step's time / FLOPs of the preset")
    parser.add_argument("--a100_tflops", default=None, type=float, help="default: the V100's share of the peak")
    parser.add_argument("--recount", action="store_true", help="count FLOPs and bytes again")
    return parser


def build_methods(overhead: float, overhead_preset: float) -> list[Method]:
    preset = Method("CL-MAE, preset", "half", every=2, fraction=0.25, overhead=overhead_preset)
    return [Method("MAE"), Method("CL-MAE", "CMM", overhead=overhead), preset]


# --- The arithmetic ---


def iteration_gflop(counts: Counts, method: Method) -> float:
    """GFLOP of an image, mean over iterations: the CMM makes masks in all of them, and learns in some."""
    gflop = sum(counts.gflop["MAE"])
    if method.cmm:
        forward, backward = counts.gflop[method.cmm]
        gflop += forward + (backward + method.fraction * sum(counts.gflop["soft"])) / method.every
    return gflop


def sustained_tflops(gflop: float, hours: float, gpus: int, epochs: int = EPOCHS) -> float:
    """The rate of each GPU that makes `epochs` of ImageNet take so many hours, at so many GFLOP per image."""
    return gflop * IMAGENET_IMAGES * epochs / (hours * 3600 * gpus) / 1e3


def hours(gflop: float, gpus: Gpus, overhead: float = 1.0, epochs: int = EPOCHS) -> float:
    return overhead * gflop * IMAGENET_IMAGES * epochs / (gpus.tflops * 1e3 * gpus.number) / 3600


def memory_gb(counts: Counts, method: Method, batch: int, grad_checkpointing: bool) -> float:
    """GB of one GPU: weights, gradients, AdamW's moments, bf16 weights, and activations of the larger of the steps."""
    networks = ("MAE", method.cmm) if method.cmm else ("MAE",)
    kept = counts.checkpointed if grad_checkpointing else counts.activations
    again = counts.block if grad_checkpointing else dict.fromkeys(counts.block, 0)
    of_image = kept["MAE"] + again["MAE"]
    if method.cmm:  # its graph lives from its forward pass to the end of step 2
        soft = method.fraction * (kept["soft"] + again["soft"])
        of_image = kept[method.cmm] + max(of_image, soft, again[method.cmm])
    fixed = sum(BYTES_PER_PARAMETER * counts.parameters[network] + counts.copies[network] for network in networks)
    return (fixed + batch * of_image) / 1e9


def accumulation(counts: Counts, method: Method, gpus: Gpus, grad_checkpointing: bool) -> int | None:
    """The smallest --accum_iter, a power of two, with which a global batch fits; None if not even single images do."""
    accum_iter = 1
    while accum_iter <= gpus.batch:
        if memory_gb(counts, method, gpus.batch // accum_iter, grad_checkpointing) <= USABLE * gpus.gb:
            return accum_iter
        accum_iter *= 2
    return None


# --- Counting ---


def graph_bytes(forward: Callable[[int], torch.Tensor], networks: list[torch.nn.Module]) -> tuple[int, int]:
    """Bytes that the graph of `forward` (of so many images) keeps whatever their number, and for each of them."""
    weights = {p.untyped_storage().data_ptr() for network in networks for p in network.parameters()}
    one, two = (sum(saved_storages(lambda n=n: forward(n), weights)[1].values()) for n in (1, 2))
    return 2 * one - two, two - one


def block_bytes(block: torch.nn.Module, length: int) -> int:
    """Bytes that one transformer block keeps for each image of `length` tokens."""
    width = block.norm1.weight.shape[0]
    return graph_bytes(lambda n: block(torch.zeros(n, length, width, requires_grad=True)), [block])[1]


def largest_blocks(
    mae: MaskedAutoencoderViT, cmm: CurriculumMaskingModule, half: CurriculumMaskingModule
) -> dict[str, int]:
    patches = mae.patch_embed.num_patches
    visible = round(patches * (1 - MASK_RATIO))
    of_mae = block_bytes(mae.blocks[0], 1 + visible), block_bytes(mae.decoder_blocks[0], 1 + patches)
    with frozen(mae):
        soft = max(block_bytes(blocks[0], 1 + patches) for blocks in (mae.blocks, mae.decoder_blocks))
    of_cmm, of_half = (block_bytes(network.blocks[0], 1 + patches) for network in (cmm, half))
    return {"MAE": max(of_mae), "CMM": of_cmm, "half": of_half, "soft": soft}


def count(name: str) -> Counts:
    with torch.device("meta"):
        mae, cmm = build(name)
        gflop = measure_gflop(mae, cmm)
        gflop["half"] = measure_gflop(*build(name, cmm_scale=0.5))["CMM"]
        half = build_cmm(mae, dim=mae.cls_token.shape[-1] // 2)
    networks = {"MAE": mae, "CMM": cmm, "half": half}
    with_memory(*networks.values())

    def soft(number: int) -> torch.Tensor:
        keep_prob = torch.full((number, mae.patch_embed.num_patches), 1 - MASK_RATIO, requires_grad=True)
        return soft_loss(mae, draw_inputs(mae, number)[0], keep_prob)

    def hard(number: int) -> torch.Tensor:
        imgs, noise = draw_inputs(mae, number)
        return mae(imgs, MASK_RATIO, noise=noise)[0]

    forwards = {"MAE": hard, "soft": soft}
    forwards |= {key: lambda n, key=key: networks[key](draw_inputs(mae, n)[0]) for key in ("CMM", "half")}
    found = {}
    for checkpointing in (False, True):
        for network in networks.values():
            network.set_grad_checkpointing(checkpointing)
        found[checkpointing] = {key: graph_bytes(f, list(networks.values())) for key, f in forwards.items()}
    return Counts(
        parameters={key: sum(p.numel() for p in net.parameters() if p.requires_grad) for key, net in networks.items()},
        gflop=gflop,
        copies={key: fixed for key, (fixed, _) in found[False].items()},
        activations={key: each for key, (_, each) in found[False].items()},
        checkpointed={key: each for key, (_, each) in found[True].items()},
        block=largest_blocks(mae, cmm, half),
    )


def read_counts() -> dict[str, Counts]:
    try:
        return {name: Counts(**values) for name, values in json.loads(COUNTS.read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        raise UserError(f"{COUNTS.name} is missing; --recount makes it") from None


def write_counts() -> None:
    counts = {}
    for name, model in MODELS.items():
        logger.info("counting %s", name)
        counts[name] = vars(count(model))
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")


# --- The page ---


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def time_table(found: dict[str, Counts], methods: list[Method], machines: list[Gpus]) -> str:
    rows = []
    for name, counts in found.items():
        plain = iteration_gflop(counts, methods[0])
        for method in methods:
            gflop = iteration_gflop(counts, method)
            times = [f"{hours(gflop, gpus, method.overhead):,.0f}" for gpus in machines]
            ratio = f"{gflop / plain:.2f}", f"{method.overhead * gflop / plain:.2f}"
            rows.append([name, method.name, f"{gflop:,.1f}", *ratio, *times])
    titles = [f"{gpus.number} x {gpus.name} at {gpus.tflops:.3g} TFLOP/s (h)" for gpus in machines]
    return table(["model", "method", "GFLOP per image", "FLOPs / MAE", "time / MAE", *titles], rows)


def memory_cell(counts: Counts, method: Method, gpus: Gpus, grad_checkpointing: bool) -> str:
    gb = memory_gb(counts, method, gpus.batch, grad_checkpointing)
    accum_iter = accumulation(counts, method, gpus, grad_checkpointing)
    if accum_iter == 1:
        return f"{gb:.0f}"
    return f"{gb:.0f} (" + ("never fits" if accum_iter is None else f"`--accum_iter {accum_iter}`") + ")"


def memory_table(found: dict[str, Counts], methods: list[Method], machines: list[Gpus]) -> str:
    rows = [
        [name, method.name, *(memory_cell(counts, method, gpus, again) for gpus in machines for again in (False, True))]
        for name, counts in found.items()
        for method in methods
    ]
    titles = [f"{gpus.batch} images, {gpus.gb} GB {gpus.name}{c}" for gpus in machines for c in ("", ", checkpointing")]
    return table(["model", "method", *titles], rows)


def page(found: dict[str, Counts], overhead: float, overhead_preset: float, a100_tflops: float | None) -> str:
    methods = build_methods(overhead, overhead_preset)
    v100 = sustained_tflops(iteration_gflop(found[UPSTREAM_MODEL], methods[0]), UPSTREAM_HOURS, UPSTREAM_GPUS)
    share = v100 / V100_PEAK
    a100 = share * A100_PEAK if a100_tflops is None else a100_tflops
    v100s, a100s = Gpus("V100", UPSTREAM_GPUS, 32, v100), Gpus("A100", 8, 80, a100)
    machines = [v100s, a100s, Gpus("A100", 8, 80, OPTIMISTIC)]
    reason = (
        f"the same share of its {A100_PEAK} (bf16), which is an assumption" if a100_tflops is None else "an assumption"
    )
    return f"""<!-- Written by `python -m benchmarks.projection`: change that, not this. -->
# {EPOCHS} epochs on ImageNet: computed, not measured

No GPU was at hand. Every figure here is arithmetic on counted FLOPs and bytes (`benchmarks/footprint.py`), one
reported time, and factors measured on a CPU (`benchmarks/bench_step.py`). {IMG_SIZE} px, mask ratio {MASK_RATIO},
global batch {GLOBAL_BATCH:,}, {IMAGENET_IMAGES:,} images.
The preset is `--cmm_every 2 --cmm_fraction 0.25 --cmm_dim HALF`, HALF being half of the encoder's width.

## Time

{time_table(found, methods, machines)}

- **V100**: upstream reports about {UPSTREAM_HOURS} h for {EPOCHS} epochs of {UPSTREAM_MODEL} MAE on {UPSTREAM_GPUS}.
  That means {v100:.1f} TFLOP/s each, {share:.1%} of the {V100_PEAK} of its tensor cores (fp16): a rate that includes
  all else a run does, such as reading images. It is taken to be the same for all sizes and methods.
- **A100**: {a100:.1f} TFLOP/s is {reason}. The last column is for {OPTIMISTIC:g} TFLOP/s,
  a third of the peak, where nothing waits for images or the network, so a lower bound.
- **FLOPs** of an iteration: MAE and CMM forward, always; CMM backward and the soft pass, when the CMM learns: with
  the preset in every second iteration, and the soft pass on a quarter of the images. The smaller CMM is counted, too.
- **time / MAE** is FLOPs / MAE times the time per FLOP, relative to MAE's, taken to be {overhead:g} for CL-MAE and
  {overhead_preset:g} for the preset. {MEASURED_OVERHEADS}
  On a GPU the factors are not known; with 1, time / MAE is FLOPs / MAE.

## Memory of a GPU (GB, 10^9 bytes)

{memory_table(found, methods, [v100s, a100s])}

- Weights, gradients, AdamW's moments ({BYTES_PER_PARAMETER} bytes per parameter), 16-bit copies of the weights, and
  the activations kept for the backward pass, of the images that each GPU gets. Temporary tensors are not included.
- "checkpointing" is `--grad_checkpointing`: the blocks' inputs, and all of the largest block while it is computed
  again. The hours above are without it; repeating the forward passes adds about a third to them.
- In brackets: the smallest `--accum_iter` with which {USABLE:.0%} of the GPU's memory is enough.
- Masks have exactly their ratio (`--select topk`). Thresholded ones are padded to the batch's longest and cost more.
"""


def main(args: Namespace) -> None:
    for name in ("overhead", "overhead_preset", "a100_tflops"):
        if (value := getattr(args, name)) is not None and value <= 0:
            raise UserError(f"--{name} {value} must be above 0")
    if args.recount:
        write_counts()
    text = page(read_counts(), args.overhead, args.overhead_preset, args.a100_tflops)
    PAGE.write_text(text, encoding="utf-8")
    logger.info("%s", text)


if __name__ == "__main__":
    run(main, get_args_parser())
