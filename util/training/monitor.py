"""Checks between epochs: the masks and their difficulty, collapse of the encoder's features, and a quick
nearest-neighbour evaluation."""

from argparse import Namespace
from functools import partial
from typing import TYPE_CHECKING

import torch

from util.board import Board
from util.cli import UserError, logger
from util.datasets import ImageDataset, build_eval_dataset, collate
from util.evaluation.features import extract_features
from util.evaluation.forensics import edge_contrast, edge_scores, mirror_correlation
from util.evaluation.metrics import accuracies
from util.evaluation.neighbours import nearest_neighbours
from util.misc import amp_dtype, autocast, is_main_process
from util.plots.masks import mask_picture

if TYPE_CHECKING:
    from masking import Masking
    from models_mae import MaskedAutoencoderViT
    from util.data.listing import Listing

WATCHED_IMAGES = 256  # for encoder/rank; kept in memory
PICTURED_IMAGES, INSPECTED_IMAGES = 8, 64  # of these: columns of the picture; for mask/error_vs_random
KNN_TRAIN_IMAGES, KNN_VAL_IMAGES = 10_000, 2_000  # at most, because --knn_every is only a quick check
KNN_CHECKS, KNN_SHARE = 10, 0.02  # defaults: maximum checks per run, and images checked per image trained on
COLLAPSED_RANK, VANISHED_NORM = 3, 1e-3  # of near-constant features; random weights have a rank of about 15


class Monitor:
    """Checks the networks after an epoch, on images chosen once for the whole run.

    The first process examines masks and features; all share the work of the nearest-neighbour check.
    """

    def __init__(self, args: Namespace, device: torch.device, listing: "Listing | None" = None):
        self.args, self.device, self.collapsed = args, device, False
        self.watched = watched_images(args, listing) if is_main_process() else None
        self.knn_data = [] if args.knn_every == 0 else knn_data(args, listing)
        self.knn_every = default_knn_every(self.knn_data, args) if args.knn_every is None else args.knn_every

    def after_epoch(
        self, epoch: int, model: "MaskedAutoencoderViT", masking: "Masking", log_writer: Board | None
    ) -> dict[str, float]:
        """The metrics that are due after `epoch`; the picture goes to the trackers."""
        metrics = {}
        encodes = hasattr(model, "forward_encoder")  # custom autoencoders need not have it
        if self.watched is not None and encodes:
            metrics |= self.look_at_features(self.watched, model)
        if self.watched is not None and self.due(epoch, self.args.vis_every):
            inspected = self.watched[spread(len(self.watched), INSPECTED_IMAGES)].to(self.device)
            metrics |= self.look_at_masks(inspected, epoch, model, masking, log_writer)
        if encodes and self.due(epoch, self.knn_every):
            metrics |= self.neighbour_accuracies(model)
        return metrics

    def due(self, epoch: int, every: int) -> bool:
        return every > 0 and ((epoch + 1) % every == 0 or epoch + 1 == self.args.epochs)

    @torch.no_grad()
    def look_at_features(self, imgs: torch.Tensor, model: "MaskedAutoencoderViT") -> dict[str, float]:
        """Effective rank and mean norm of the mean patch token, which reveal a collapse without labels."""
        with autocast(self.device, amp_dtype(self.args.amp, self.device)):
            parts = [mean_patch_token(model, part.to(self.device)) for part in imgs.split(64)]
        features = torch.cat(parts).cpu()
        if not features.isfinite().all():  # the saver rejects such weights next
            return {}
        rank, norm = effective_rank(features), features.norm(dim=1).mean().item()
        collapsed = norm < VANISHED_NORM or rank < min(COLLAPSED_RANK, 0.1 * len(features))
        if collapsed and not self.collapsed:
            self.collapsed = True
            logger.warning(
                "the encoder is collapsing: features of %d images have rank %.2f, norm %.2g", len(imgs), rank, norm
            )
        return {"encoder/rank": rank, "encoder/norm": norm}

    @torch.no_grad()
    def look_at_masks(
        self,
        imgs: torch.Tensor,
        epoch: int,
        model: "MaskedAutoencoderViT",
        masking: "Masking",
        log_writer: Board | None,
    ) -> dict[str, float]:
        """Draw the current masks and compute the cheap metrics of util/evaluation/forensics.py, where
        "mask/error_vs_random" is called "own"."""
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
        acc1, acc5 = (accuracy.item() for accuracy in accuracies(train.labels[nearest], val.labels))
        logger.info("nearest neighbour (quick check): Acc@1 %.2f  Acc@5 %.2f", acc1, acc5)
        return {"knn/acc1": acc1, "knn/acc5": acc5}


def mean_patch_token(model: "MaskedAutoencoderViT", imgs: torch.Tensor) -> torch.Tensor:
    """Mean of the encoded patch tokens of whole images, float32 [N, D]."""
    visible = torch.ones(imgs.shape[0], model.patch_embed.num_patches, dtype=torch.bool, device=imgs.device)
    latent, _, _ = model.forward_encoder(imgs, 0.0, visible=visible)
    return latent[:, 1:].float().mean(dim=1)


def effective_rank(features: torch.Tensor) -> float:
    """RankMe (Garrido et al., ICML 2023) of features [N, D]: exp of the entropy of their normalised singular values, at
    most min(N, D)."""
    values = torch.linalg.svdvals(features.double())
    shares = values / values.sum().clamp(min=1e-12)
    return torch.special.entr(shares).sum().exp().item()


def watched_images(args: Namespace, listing: "Listing | None") -> torch.Tensor:
    dataset = build_eval_dataset(args, "train", listing=listing)
    imgs, _, _ = collate([dataset[0, index] for index in spread(len(dataset), WATCHED_IMAGES)])
    return imgs


def knn_data(args: Namespace, listing: "Listing | None") -> list[tuple[ImageDataset, list[int]]]:
    """Data sets and indices of the training and validation images; without labels none, or an error if requested."""
    try:
        train, val = (build_eval_dataset(args, split, listing=listing) for split in ("train", "val"))
        if not train.source.classes or not val.source.classes:
            raise UserError("--knn_every needs labelled data: class folders below train and val")
    except UserError:
        if args.knn_every is None:
            return []
        raise
    return [(train, spread(len(train), KNN_TRAIN_IMAGES)), (val, spread(len(val), KNN_VAL_IMAGES))]


def default_knn_every(data: list[tuple[ImageDataset, list[int]]], args: Namespace) -> int:
    """Every tenth of the run, or less often to cost at most 2% of it (an image checked costs less than one trained on);
    0 without labels, or if a run is too short for a single check."""
    if not data or len(data[0][0].source.classes) < 2:
        return 0
    trained, checked = args.epochs * len(data[0][0]), sum(len(indices) for _, indices in data)
    checks = min(KNN_CHECKS, int(KNN_SHARE * trained / checked))
    return -(-args.epochs // checks) if checks else 0


def spread(length: int, most: int) -> list[int]:
    """At most `most` indices, evenly spaced over `length`."""
    number = min(length, most)
    return [i * length // number for i in range(number)]
