"""Count what a training iteration needs, without a GPU: parameters, FLOPs and memory per image.

    python -m benchmarks.footprint                                    # ViT-B, -L and -H: 5 minutes and 7 GB on one core
    python -m benchmarks.footprint --models mae_vit_small_patch16

The project's own passes run on one or two images. FLOPs are counted from shapes, without computing; tensors kept for
the backward pass are measured on the CPU under bf16 autocast, as on a GPU. Images have 224 px, and the MAE sees exactly
a quarter of the patches.
"""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine_pretrain import frozen
from models_cmm import build_cmm
from models_mae import MODELS, MaskedAutoencoderViT, build_mae
from util.cli import ArgumentParser, run
from util.evaluation.tables import show_table
from util.misc import autocast, generator

BYTES_PER_PARAMETER = 16  # float32: the weight, its gradient and AdamW's two moments


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("benchmarks.footprint", description=(__doc__ or "").split("\n")[0])
    default = ["mae_vit_base", "mae_vit_large", "mae_vit_huge"]
    parser.add_argument("--models", default=default, nargs="+", choices=sorted(MODELS), help="one row each")
    return parser


def passes(mae: MaskedAutoencoderViT, cmm: nn.Module, batch: int) -> dict[str, Callable[[], torch.Tensor]]:
    """The forward passes of an iteration, up to losses that cost nothing."""
    draw = generator("footprint", batch)
    size = (batch, 3, 224, 224)
    imgs, noise = torch.rand(size, generator=draw), torch.rand(batch, mae.patch_embed.num_patches, generator=draw)
    imgs, noise = imgs.to(mae.cls_token.device), noise.to(mae.cls_token.device)

    def soft() -> torch.Tensor:  # from Z on
        with frozen(mae):
            return mae(imgs, keep_prob=noise.clone().requires_grad_())[0]

    return {"CMM": lambda: cmm(imgs).mean(), "MAE": lambda: mae(imgs, 0.75, noise=noise)[0], "soft pass": soft}


def count_gflop(forward: Callable[[], torch.Tensor]) -> float:
    """Forward and backward, 2 per multiply-add.

    Fused attention would be counted with what its backward pass recomputes; the math backend is plain products."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward().backward()
    return counter.get_total_flops() / 1e9


def saved_bytes(forward: Callable[[], torch.Tensor], weights: set[int]) -> int:
    """Of the storages that the graph of `forward` keeps, each once and without `weights`."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # with its history, an output would keep its own graph alive forever

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with hooks, autocast(torch.device("cpu"), torch.bfloat16):
        _graph = forward()  # addresses are unique only while the graph exists
    return sum(kept.values())


def footprint(name: str) -> list[str]:
    """A row of the table."""
    with torch.device("meta"):
        mae = build_mae(name, img_size=224)
        cmm = build_cmm(mae)
        gflop = {part: count_gflop(forward) for part, forward in passes(mae, cmm, batch=1).items()}
    for network in (mae, cmm):
        network.to_empty(device="cpu").zero_grad()
        for parameter in network.parameters():
            parameter.data.zero_()
    weights = {p.untyped_storage().data_ptr() for network in (mae, cmm) for p in network.parameters()}
    one, two = ({k: saved_bytes(f, weights) for k, f in passes(mae, cmm, n).items()} for n in (1, 2))
    image = {part: two[part] - one[part] for part in one}  # the rest are bf16 copies of weights
    fixed = {part: one[part] - image[part] for part in one}
    size = {
        part: sum(p.numel() for p in net.parameters() if p.requires_grad) for part, net in (("MAE", mae), ("CMM", cmm))
    }
    # The CMM's graph lives until the end of step 2, beside the MAE's in step 1 and the soft pass's in step 2.
    states = [BYTES_PER_PARAMETER * size["MAE"] + fixed["MAE"]]
    states.append(states[0] + BYTES_PER_PARAMETER * size["CMM"] + fixed["CMM"])
    activations = [image["MAE"], image["CMM"] + max(image["MAE"], image["soft pass"])]
    return [
        name,
        f"{size['MAE'] / 1e6:.0f} + {size['CMM'] / 1e6:.0f}",
        f"{gflop['MAE']:.1f} / {sum(gflop.values()):.1f}",
        " / ".join(f"{each / 1e9:.1f}" for each in states),
        " / ".join(f"{each / 1e6:.0f}" for each in activations),
    ]


def main(args: Namespace) -> None:
    header = ["model", "million parameters, MAE + CMM", "GFLOP per image", "GB of weights, gradients, AdamW, copies"]
    show_table("MAE / CL-MAE", [*header, "MB of activations per image"], [footprint(name) for name in args.models])


if __name__ == "__main__":
    run(main, get_args_parser())
