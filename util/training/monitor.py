"""What is checked between epochs: pictures of the masks, how hard they are, and a quick nearest-neighbour check."""

from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING

import torch

from util.board import Board
from util.cli import UserError, logger
from util.datasets import ImageDataset, build_eval_dataset, collate
from util.evaluation.features import extract_features
from util.evaluation.forensics import edge_contrast, edge_scores, mirror_correlation
from util.evaluation.neighbours import nearest_neighbours
from util.misc import amp_dtype, is_main_process
from util.plots.masks import mask_picture

if TYPE_CHECKING:
    from masking import Masking
    from models_mae import MaskedAutoencoderViT
    from util.data.listing import Listing

PICTURED_IMAGES, INSPECTED_IMAGES = 8, 64  # columns of the picture; images behind mask/error_vs_random
KNN_TRAIN_IMAGES, KNN_VAL_IMAGES = 10_000, 2_000  # at most, because --knn_every is only a quick check


class Monitor:
    """Checks the networks after an epoch, on images chosen once for the whole run.

    The first process looks at the masks; all share the work of the nearest-neighbour check.
    """

    def __init__(self, args: Namespace, device: torch.device, listing: "Listing | None" = None):
        self.args, self.device = args, device
        self.watched = watched_images(args, listing).to(device) if args.vis_every and is_main_process() else None
        self.knn_data = knn_data(args, listing) if args.knn_every else []

    def after_epoch(
        self, epoch: int, model: "MaskedAutoencoderViT", masking: "Masking", log_writer: Board | None
    ) -> dict[str, float]:
        """The metrics that are due after `epoch`; the picture goes to the trackers."""
        metrics = {}
        if self.due(epoch, self.args.vis_every) and self.watched is not None:
            metrics |= self.look_at_masks(self.watched, epoch, model, masking, log_writer)
        if self.due(epoch, self.args.knn_every):
            metrics |= self.neighbour_accuracies(model)
        return metrics

    def due(self, epoch: int, every: int) -> bool:
        return every > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self.args.epochs)

    @torch.no_grad()
    def look_at_masks(
        self,
        imgs: torch.Tensor,
        epoch: int,
        model: "MaskedAutoencoderViT",
        masking: "Masking",
        log_writer: Board | None,
    ) -> dict[str, float]:
        """Draw the masks in use and take the cheap measures of util/evaluation/forensics.py; "mask/error_vs_random" is
        called "own" there."""
        values = masking.unwrapped_values(imgs)
        index = torch.arange(len(imgs))
        ask = masking.ask(imgs, index, epoch, (epoch + 1) / self.args.epochs)
        loss, pred, mask = model(imgs, ask.mask_ratio, **masking.choose(ask, values))
        if log_writer:
            n = PICTURED_IMAGES
            shown = None if values is None else values[:n]
            statistics = self.args.mean, self.args.std
            picture = mask_picture(model, imgs[:n], pred[:n], mask[:n], shown, statistics)
            log_writer.add_image("image, score, mask, reconstruction", picture, (epoch + 1) * 1000)
        random_loss, _, _ = model(imgs, ask.mask_ratio, noise=ask.uniform())
        edges = edge_contrast(edge_scores(imgs, imgs.shape[-1] // masking.grid[1]), mask)
        metrics = {"mask/error_vs_random": (loss / random_loss).item(), "mask/edge": edges.item()}
        if values is not None and (mirrored := masking.unwrapped_values(imgs.flip(-1))) is not None:
            metrics["mask/mirror"] = mirror_correlation(values, mirrored, masking.grid).item()
        return metrics

    def neighbour_accuracies(self, model: "MaskedAutoencoderViT") -> dict[str, float]:
        """Acc@1 and Acc@5 of the mean patch token; main_knn.py is the full evaluation."""
        model.eval()
        train, val = (
            extract_features(
                partial(mean_patch_token, model),
                dataset,
                indices,
                width=model.width,
                device=self.device,
                amp=amp_dtype(self.args.amp, self.device),
                num_workers=self.args.num_workers,
                header=None,
            )
            for dataset, indices in self.knn_data
        )
        model.train()
        nearest = nearest_neighbours(train.features, val.features, min(5, len(train)), device=self.device)[1]
        right = (train.labels[nearest] == val.labels[:, None]).double()
        acc1, acc5 = 100 * right[:, 0].mean().item(), 100 * right.amax(dim=1).mean().item()
        logger.info("nearest neighbour (quick check): Acc@1 %.2f  Acc@5 %.2f", acc1, acc5)
        return {"knn/acc1": acc1, "knn/acc5": acc5}


def mean_patch_token(model: "MaskedAutoencoderViT", imgs: torch.Tensor) -> torch.Tensor:
    """Mean of the encoded patch tokens of whole images, float32 [N, D]."""
    visible = torch.ones(imgs.shape[0], model.patch_embed.num_patches, dtype=torch.bool, device=imgs.device)
    latent, _, _ = model.forward_encoder(imgs, 0.0, visible=visible)
    return latent[:, 1:].float().mean(dim=1)


def watched_images(args: Namespace, listing: "Listing | None") -> torch.Tensor:
    dataset = build_eval_dataset(args, "train", listing=listing)
    imgs, _, _ = collate([dataset[0, index] for index in spread(len(dataset), INSPECTED_IMAGES)])
    return imgs


def knn_data(args: Namespace, listing: "Listing | None") -> list[tuple[ImageDataset, list[int]]]:
    """Data sets and indices of the training and of the validation images."""
    train, val = (build_eval_dataset(args, split, listing=listing) for split in ("train", "val"))
    if not train.source.classes or not val.source.classes:
        raise UserError("--knn_every needs labelled data: class folders below train and val")
    return [(train, spread(len(train), KNN_TRAIN_IMAGES)), (val, spread(len(val), KNN_VAL_IMAGES))]


def spread(length: int, most: int) -> list[int]:
    """At most `most` indices, evenly spread over `length`."""
    number = min(length, most)
    return [i * length // number for i in range(number)]
