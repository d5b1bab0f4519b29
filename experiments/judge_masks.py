"""Judge the masks of finished runs by a stranger: an autoencoder that was trained with random masks.

    python -m experiments.judge_masks runs/clmae --judge runs/mae --data_path /data/imagenet

An autoencoder gets used to its own module's masks, so their error under it falls below random masks', whatever they
hide. A vanilla MAE has no such habit. For each run:

judge       its error on what the run's masks hide, over that on random masks: below 1 they are easy, above 1 hard
own         the same by the run's own autoencoder (mask/error_vs_random, here on more images)
edges       mean squared gradient of the hidden patches over that of the visible ones: do they hide detail?
unseen      share of positions that no image shows
by place    share of the masks' variance that the position alone explains: 0 for random masks, 1 for one mask for all
mirrored    share of patches in which the mask of a mirrored image is not the mirrored mask; of two random masks: 0.375
"""

from argparse import Namespace
from pathlib import Path

import torch

from main_visualize import as_input, open_source, read_images
from models_mae import MaskedAutoencoderViT
from util.arguments import add_data_arguments
from util.cli import ArgumentParser, UserError, count, run, seed_number
from util.evaluation.tables import show_table
from util.misc import generator
from util.plots.snapshot import Snapshot, evenly, load_snapshot, snapshots_of
from util.plots.style import short_names

COLUMNS = ("judge", "own", "edges", "visible", "unseen", "by place", "mirrored")
BLOCK = 250  # images at once


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("python -m experiments.judge_masks", description=__doc__.split("\n")[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", help="runs' folders, or checkpoints")
    parser.add_argument("--judge", required=True, help="checkpoint or folder of a vanilla MAE of the same data")
    parser.add_argument("--moments", default=1, type=count, help="checkpoints of each run, evenly spread; 1: the last")
    parser.add_argument("--num_images", default=1000, type=count, help="validation images")
    parser.add_argument("--seed", default=0, type=seed_number, help="of the choice of images, and of random masks")
    add_data_arguments(parser)
    parser.set_defaults(images=[])
    return parser


def random_visible(shape: torch.Size, mask_ratio: float, seed: int) -> torch.Tensor:
    """Random masks [N, L] as upstream draws them: exactly the ratio in every image."""
    noise = torch.rand(shape, generator=generator("judge", seed))
    kept = int(shape[1] * (1 - mask_ratio))
    return noise.argsort(dim=1).argsort(dim=1) < kept


@torch.no_grad()
def hidden_error(model: MaskedAutoencoderViT, imgs: torch.Tensor, visible: torch.Tensor) -> float:
    """Mean error over all patches [N, L] that are not visible."""
    total = hidden = 0.0
    for part, shown in zip(imgs.split(BLOCK), visible.split(BLOCK), strict=True):
        _, pred, mask = model(part, visible=shown)
        total += (model.patch_error(part, pred) * mask).sum().item()
        hidden += mask.sum().item()
    return total / max(hidden, 1)


def edge_energy(imgs: torch.Tensor, model: MaskedAutoencoderViT) -> torch.Tensor:
    """Mean squared difference of neighbouring pixels in each patch [N, L]."""
    energy = torch.zeros_like(imgs)
    energy[..., 1:, :] += imgs.diff(dim=-2).square()
    energy[..., :, 1:] += imgs.diff(dim=-1).square()
    return model.patchify(energy).mean(dim=-1)


@torch.no_grad()
def masks_of(snapshot: Snapshot, imgs: torch.Tensor, seed: int) -> torch.Tensor:
    """Which patches [N, L] a run leaves visible."""
    return torch.cat([snapshot.mask(part, seed).mask for part in imgs.split(BLOCK)]) == 0


def judge(snapshot: Snapshot, stranger: MaskedAutoencoderViT, imgs: torch.Tensor, seed: int) -> list[float]:
    """The figures of COLUMNS."""
    visible = masks_of(snapshot, imgs, seed)
    random = random_visible(visible.shape, snapshot.settings.get("mask_ratio", 0.75), seed)
    by_stranger, by_own = (
        hidden_error(model, imgs, visible) / hidden_error(model, imgs, random) for model in (stranger, snapshot.model)
    )
    edges = edge_energy(imgs, snapshot.model)
    share = visible.float().mean(dim=0)  # [L]
    grid = snapshot.model.patch_embed.grid_size
    mirrored = masks_of(snapshot, imgs.flip(-1), seed).unflatten(1, grid).flip(-1).flatten(1)
    return [
        by_stranger,
        by_own,
        (edges[~visible].mean() / edges[visible].mean()).item(),
        share.mean().item(),
        (share == 0).float().mean().item(),
        (share.var(correction=0) / visible.float().var(correction=0)).item(),
        (visible != mirrored).float().mean().item(),
    ]


def main(args: Namespace) -> None:
    stranger = load_snapshot(snapshots_of(Path(args.judge))[-1], "judge")
    if stranger.masking.learned is not None:
        raise UserError(f"--judge {args.judge} was trained with a masking module; give a run of --masking random")
    imgs = as_input(read_images(open_source(args, stranger), args.num_images, args.seed), stranger, torch.device("cpu"))
    folders = [Path(path).absolute() for path in args.runs]
    names = dict(zip(args.runs, short_names(folders) if len(set(folders)) > 1 else args.runs, strict=True))
    rows = []
    for path in args.runs:
        for checkpoint in evenly(snapshots_of(Path(path)), args.moments):
            snapshot = load_snapshot(checkpoint, names[path])
            if snapshot.model.patch_embed.img_size != stranger.model.patch_embed.img_size:
                raise UserError(f"{path} and --judge {args.judge} were trained on images of different sizes")
            figures = judge(snapshot, stranger.model, imgs, args.seed)
            weight = "random" if snapshot.lambda_cl is None else f"{snapshot.lambda_cl:+.2f}"
            rows.append([names[path], str(snapshot.epoch + 1), weight, *(f"{figure:.3f}" for figure in figures)])
    show_table(f"masks on {len(imgs)} images", ["run", "epochs", "lambda_CL", *COLUMNS], rows)


if __name__ == "__main__":
    run(main, get_args_parser())
