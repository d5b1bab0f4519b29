"""What a training iteration costs, found without a GPU: parameters, FLOPs, memory, batch size, time of an epoch.

    python -m benchmarks.footprint                                    # ViT-B, -L and -H: 5 minutes and 7 GB on one core
    python -m benchmarks.footprint --models mae_vit_small_patch16 --tflops 60

The project's own passes run with one or two images. FLOPs are counted from their shapes, without computing; tensors
kept for the backward pass are measured on the CPU under bf16 autocast, as on a GPU. The rest is arithmetic.
Images have 224 px, and the MAE sees exactly a quarter of the patches: random masks, or the CMM's with --select topk.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine_pretrain import cmm_losses, soft_error
from models_cmm import CurriculumMaskingModule, build_cmm
from models_mae import MODELS, MaskedAutoencoderViT, build_mae
from util.cli import ArgumentParser, logger, run
from util.misc import autocast, generator

IMG_SIZE = 224
MASK_RATIO = 0.75
IMAGENET_IMAGES = 1_281_167
GPUS = 8
GPU_GB = (40, 80)
USABLE = 0.85  # of a GPU's memory; the rest is for the CUDA context, NCCL, temporary tensors and fragmentation
BYTES_PER_PARAMETER = 16  # float32: the weight, its gradient and AdamW's two moments
METHODS = ("MAE", "CL-MAE")


@dataclass(frozen=True)
class Footprint:
    """One model's. `gflop` is of "MAE", "CMM" and "soft"; `copies` and `activations` also of what exists together."""

    name: str
    parameters: dict[str, int]  # trainable ones of "MAE" and "CMM"
    gflop: dict[str, tuple[float, float]]  # forward and backward of an image
    copies: dict[str, int]  # bytes of bf16 weights that a graph keeps, whatever the batch
    activations: dict[str, int]  # bytes that a graph keeps for each image

    def iteration_gflop(self, method: str) -> float:
        return sum(sum(self.gflop[part]) for part in (("MAE",) if method == "MAE" else ("CMM", "MAE", "soft")))

    def memory(self, method: str) -> tuple[int, int, int]:
        """Bytes of weights and their states, of bf16 copies of weights, and of activations per image."""
        networks, graphs = ("MAE",), ("MAE",)
        if method == "CL-MAE":  # the CMM's graph lives from its forward pass to the end of step 2
            networks, graphs = ("MAE", "CMM"), ("CMM + MAE", "CMM + soft")
        states = BYTES_PER_PARAMETER * sum(self.parameters[network] for network in networks)
        return states, max(self.copies[graph] for graph in graphs), max(self.activations[graph] for graph in graphs)

    def largest_batch(self, method: str, gpu_gb: int) -> int:
        """The largest multiple of 8 that fits; 0 if none does."""
        states, copies, per_image = self.memory(method)
        return max(int((USABLE * gpu_gb * 1e9 - states - copies) // per_image) // 8 * 8, 0)


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.footprint", description=__doc__.split("\n")[0])
    default = ["mae_vit_base", "mae_vit_large", "mae_vit_huge"]
    parser.add_argument("--models", default=default, nargs="+", choices=sorted(MODELS), help="one row each")
    parser.add_argument("--tflops", default=100.0, type=float, help="assumed sustained rate per GPU; A100's peak: 312")
    return parser


def build(name: str, cmm_scale: float = 1.0) -> tuple[MaskedAutoencoderViT, CurriculumMaskingModule]:
    """Both networks; the CMM has `cmm_scale` times the MAE's width."""
    mae = build_mae(name, img_size=IMG_SIZE)
    return mae, build_cmm(mae, dim=round(cmm_scale * mae.cls_token.shape[-1]))


def with_memory(*networks: torch.nn.Module) -> None:
    """Networks without memory get some. The weights are zero: what is kept for the backward pass is the same."""
    for network in networks:
        network.to_empty(device="cpu")
        for parameter in network.parameters():
            parameter.data.zero_()


def draw_inputs(mae: MaskedAutoencoderViT, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, C, H, W] and noise [N, L]."""
    draw = generator("footprint", batch)
    imgs = torch.rand(batch, mae.in_chans, *mae.patch_embed.img_size, generator=draw)
    noise = torch.rand(batch, mae.patch_embed.num_patches, generator=draw)
    device = mae.cls_token.device
    return imgs.to(device), noise.to(device)


def soft_loss(mae: MaskedAutoencoderViT, imgs: torch.Tensor, keep_prob: torch.Tensor) -> torch.Tensor:
    """The loss of step 2, up to weights that change no cost."""
    args = Namespace(mask_ratio=MASK_RATIO, lambda_gauss=1.0, lambda_kl=1.0, lambda_div=1.0)
    return cmm_losses(keep_prob, soft_error(mae, imgs, keep_prob), 1.0, args)["cmm/loss"]


def count_gflop(step: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor | None, float]:
    """The result of `step` and its GFLOP, 2 per multiply-add.

    Fused attention would count with what its backward pass computes a second time. The math backend writes attention as
    plain products, each of which is counted once.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        result = step()
    return result, counter.get_total_flops() / 1e9


def measure_gflop(mae: MaskedAutoencoderViT, cmm: CurriculumMaskingModule) -> dict[str, tuple[float, float]]:
    """Forward and backward of each pass for one image. The soft pass ends at Z, where the CMM's backward begins."""
    imgs, noise = draw_inputs(mae, batch=1)
    keep_prob, cmm_forward = count_gflop(lambda: cmm(imgs))
    loss, mae_forward = count_gflop(lambda: mae(imgs, MASK_RATIO, noise=noise)[0])
    _, mae_backward = count_gflop(loss.backward)
    mae.zero_grad()
    leaf = keep_prob.detach().requires_grad_()
    loss_cmm, soft_forward = count_gflop(lambda: soft_loss(mae, imgs, leaf))
    _, soft_backward = count_gflop(loss_cmm.backward)
    _, cmm_backward = count_gflop(lambda: keep_prob.backward(leaf.grad))
    cmm.zero_grad()
    cmm_gflop, soft_gflop = (cmm_forward, cmm_backward), (soft_forward, soft_backward)
    return {"MAE": (mae_forward, mae_backward), "CMM": cmm_gflop, "soft": soft_gflop}


def saved_storages(forward: Callable[[], torch.Tensor], weights: set[int]) -> tuple[torch.Tensor, dict[int, int]]:
    """The result of `forward` under bf16 autocast, and {address: bytes} of the storages its graph keeps, but `weights`.

    An address means one storage only while the graph, and so the result, exists.
    """
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the same storage; with its history, an output would keep its own graph alive for ever

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, autocast(torch.device("cpu"), torch.bfloat16):
        return forward(), kept


def saved_bytes(mae: MaskedAutoencoderViT, cmm: CurriculumMaskingModule, batch: int) -> dict[str, int]:
    """What each graph keeps for a batch, and the graphs of both networks that exist together."""
    imgs, noise = draw_inputs(mae, batch)
    weights = {p.untyped_storage().data_ptr() for network in (mae, cmm) for p in network.parameters()}
    keep_prob, of_cmm = saved_storages(lambda: cmm(imgs), weights)
    of_mae = saved_storages(lambda: mae(imgs, MASK_RATIO, noise=noise)[0], weights)[1]
    of_soft = saved_storages(lambda: soft_loss(mae, imgs, keep_prob), weights)[1]
    graphs = {"MAE": of_mae, "CMM": of_cmm, "soft": of_soft}
    graphs |= {"CMM + MAE": of_cmm | of_mae, "CMM + soft": of_cmm | of_soft}
    return {name: sum(storages.values()) for name, storages in graphs.items()}


def measure(name: str) -> Footprint:
    with torch.device("meta"):  # FLOPs follow from shapes, so nothing need be computed
        mae, cmm = build(name)
        gflop = measure_gflop(mae, cmm)
    with_memory(mae, cmm)
    networks = {"MAE": mae, "CMM": cmm}
    parameters = {key: sum(p.numel() for p in net.parameters() if p.requires_grad) for key, net in networks.items()}
    # What a second image adds is activations. What it does not is autocast's copies of weights, which graphs keep too.
    one, two = (saved_bytes(mae, cmm, batch) for batch in (1, 2))
    activations = {graph: two[graph] - one[graph] for graph in one}
    return Footprint(name, parameters, gflop, {graph: one[graph] - activations[graph] for graph in one}, activations)


def table(title: str, note: str, columns: tuple[str, ...], rows: dict[str, tuple], number: str = ".1f") -> None:
    """Cells that are not text get the format `number`."""
    cells = [[name, *(c if isinstance(c, str) else format(c, number) for c in row)] for name, row in rows.items()]
    lines = [["model", *columns], ["---"] * (1 + len(columns)), *cells]
    logger.info("### %s\n\n%s\n\n%s\n", title, note, "\n".join(f"| {' | '.join(line)} |" for line in lines))


def report(found: list[Footprint], tflops: float) -> None:
    rows = {f.name: [n / 1e6 for n in (*f.parameters.values(), sum(f.parameters.values()))] for f in found}
    note = "Trainable ones; position embeddings are fixed."
    table("Parameters (millions)", note, ("MAE", "CMM", "MAE + CMM"), rows)

    rows = {}
    for f in found:
        passes = ("{:.1f} + {:.1f}".format(*f.gflop[part]) for part in ("MAE", "CMM", "soft"))
        mae, clmae = (f.iteration_gflop(method) for method in METHODS)
        rows[f.name] = (*passes, mae, clmae, f"{clmae / mae:.2f}")
    note = f"""{IMG_SIZE} px, mask ratio {MASK_RATIO}, 2 per multiply-add; matrix products and convolutions.
Vanilla MAE is the MAE step alone, CL-MAE all three passes. The soft pass computes no gradients of weights."""
    columns = ("MAE step", "CMM", "soft pass", *METHODS, "CL-MAE / MAE")
    table("GFLOP per image, forward + backward", note, columns, rows)

    rows = {f.name: [n / 1e9 for m in METHODS for n in (*f.memory(m)[:2], sum(f.memory(m)[:2]))] for f in found}
    note = f"""States (computed): weights, gradients and AdamW's two moments, {BYTES_PER_PARAMETER} bytes per parameter.
DDP adds nothing, because gradients are views of its buckets.
Copies (measured): autocast's bf16 weights, which a graph keeps until its backward pass."""
    columns = tuple(f"{method}: {part}" for method in METHODS for part in ("states", "copies", "sum"))
    table("Memory that does not depend on the batch (GB, 10^9 bytes)", note, columns, rows, ".2f")

    graphs = ("MAE", "CMM", "soft", "CMM + MAE", "CMM + soft")
    rows = {}
    for f in found:
        ratio = f.memory("CL-MAE")[2] / f.memory("MAE")[2]
        rows[f.name] = (*(f.activations[graph] / 1e6 for graph in graphs), f"{ratio:.2f}")
    note = """Measured on a CPU under bf16 autocast: what a second image adds to the saved tensors, each storage once.
CMM + MAE exist together in step 1, CMM + soft pass in step 2; the larger is the peak of CL-MAE.
CPU attention may keep other tensors than CUDA's flash attention. Temporary tensors of the backward pass are left out.
Thresholded masks (--select threshold) are padded to the batch's largest number of visible tokens and so cost more."""
    columns = ("MAE step", "CMM", "soft pass", "CMM + MAE step", "CMM + soft pass", "CL-MAE / MAE")
    table("Activations kept for the backward pass (MB per image)", note, columns, rows)

    rows = {f.name: [f.largest_batch(method, gb) for method in METHODS for gb in GPU_GB] for f in found}
    note = f"Computed from the two tables above, not tried: multiples of 8 that fit {USABLE:.0%} of the memory."
    columns = tuple(f"{method}, {gb} GB" for method in METHODS for gb in GPU_GB)
    table("Largest --batch_size per GPU", note, columns, rows, "d")

    hours = IMAGENET_IMAGES / (GPUS * tflops * 1e3) / 3600  # per GFLOP of an image
    rows = {f.name: [hours * f.iteration_gflop(method) for method in METHODS] for f in found}
    note = f"""Computed from FLOPs, not measured: {IMAGENET_IMAGES:,} images, an assumed {tflops:g} TFLOP/s per GPU.
Reading images, communication and the optimizer's steps are not included."""
    table(f"Hours per ImageNet epoch on {GPUS} GPUs", note, METHODS, rows, ".3f")


def main(args: Namespace) -> None:
    report([measure(name) for name in args.models], args.tflops)


if __name__ == "__main__":
    run(main, get_args_parser())
