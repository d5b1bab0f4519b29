"""Fine-tuning: one epoch of training a whole classifier, and its predictions on the test images.

Per-step randomness (mixup, drop path) is a function of (seed, epoch, iteration, rank); per-image randomness (crop,
RandAugment, erasing) is a function of (seed, epoch, index). A resumed run therefore draws the same values.
"""

from argparse import Namespace
from collections.abc import Callable
from itertools import islice

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

from util.datasets import ImageDataset, ImageLoader
from util.evaluation.features import FeatureSet, extract_features
from util.evaluation.metrics import accuracies, top_classes
from util.lr_sched import adjust_learning_rate
from util.misc import (
    amp_dtype,
    autocast,
    exchange_gradients,
    get_rank,
    seed_globals,
    without_ddp,
)
from util.training.progress import EpochLog
from util.training.resume import TrainingState


class Objective:
    """The loss of a batch: cross-entropy with smoothed labels, after timm's mixup and cutmix if enabled."""

    def __init__(self, args: Namespace):
        self.mixup = None
        if args.mixup > 0 or args.cutmix > 0 or args.cutmix_minmax is not None:
            self.mixup = Mixup(
                mixup_alpha=args.mixup,
                cutmix_alpha=args.cutmix,
                cutmix_minmax=args.cutmix_minmax,
                prob=args.mixup_prob,
                switch_prob=args.mixup_switch_prob,
                mode=args.mixup_mode,
                label_smoothing=args.smoothing,
                num_classes=args.nb_classes,
            )
        self.criterion = self.build_criterion(args.smoothing)

    def build_criterion(self, smoothing: float) -> nn.Module:
        """The cross-entropy that fits the labels; mixed ones are already smoothed."""
        if self.mixup is not None:
            return SoftTargetCrossEntropy()
        return LabelSmoothingCrossEntropy(smoothing) if smoothing > 0 else nn.CrossEntropyLoss()

    def mix(self, imgs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mixed images, with labels [B] turned into soft labels [B, classes]; unchanged without mixup."""
        return (imgs, labels) if self.mixup is None else self.mixup(imgs, labels)


def train_one_epoch(
    model: nn.Module,
    objective: Objective,
    data_loader: ImageLoader,
    state: TrainingState,
    epoch: int,
    log: EpochLog,
    args: Namespace,
    after_update: Callable[[int, EpochLog], None] | None = None,
) -> dict[str, float]:
    """Train for one epoch; returns the means of the loss and of the head's learning rate.

    An interrupted epoch resumes at iteration `log.first`. `after_update` is called with the total number of updates so
    far.
    """
    model.train()
    device = next(model.parameters()).device
    amp = amp_dtype(args.amp, device)
    steps_per_epoch = log.iterations // args.accum_iter
    data_loader.set_epoch(epoch, first_batch=log.first)

    batches = islice(data_loader, log.iterations - log.first)
    for i, (imgs, labels, _) in enumerate(batches, start=log.first):
        step = epoch * steps_per_epoch + i // args.accum_iter
        update = (i + 1) % args.accum_iter == 0
        exchange_gradients(update, model)
        lr = adjust_learning_rate(state.optimizer, step / steps_per_epoch, args)
        imgs, labels = imgs.to(device, non_blocking=True), labels.to(device, non_blocking=True)

        seed_globals("step", args.seed, epoch, i, get_rank())  # mixup and drop path draw from the global generators
        imgs, labels = objective.mix(imgs, labels)
        with autocast(device, amp):
            loss = objective.criterion(model(imgs), labels)
        state.scaler(loss / args.accum_iter, state.optimizer, args.clip_grad, model.parameters(), update_grad=update)

        log.add(i, {"loss": loss} | state.loss_scales(), {"lr": lr})
        if update and after_update is not None:
            after_update(step + 1, log)
    return log.close()


def evaluate(
    dataset: ImageDataset,
    model: nn.Module,
    device: torch.device,
    args: Namespace,
    header: str | None = None,
) -> FeatureSet:
    """Logits [N, classes], as the features of all readable test images; each image exactly once, for any number of
    processes. `header` is the title of a progress bar, if wanted."""
    classifier = without_ddp(model).eval()
    return extract_features(
        classifier,
        dataset,
        list(range(len(dataset))),
        width=classifier.num_classes,
        device=device,
        amp=amp_dtype(args.amp, device),
        batch_size=args.batch_size,
        num_workers=args.num_workers,
        pin_mem=args.pin_mem and device.type == "cuda",
        header=header,
    )


def test_metrics(test: FeatureSet) -> dict[str, float]:
    """Accuracies in percent, and the plain cross-entropy."""
    acc1, acc5 = accuracies(top_classes(test.features), test.labels)
    loss = F.cross_entropy(test.features, test.labels)
    return {"test/acc1": acc1.item(), "test/acc5": acc5.item(), "test/loss": loss.item()}
