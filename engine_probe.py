"""Linear classifiers on frozen features: upstream's probe, trained by gradient steps, and a fully converged softmax.

LinearHeads, train_one_epoch    many heads at once: one for each run (seed) and learning rate
fit_softmax                     one head, solved to convergence
predict                         the five most likely classes of every image
"""

from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn

from models_vit import VisionTransformer
from util.cli import tracked
from util.datasets import EpochBatches, ImageLoader, Values, normalise
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import top_classes
from util.lars import LARS
from util.lr_sched import learning_rate, set_learning_rate
from util.misc import autocast, gather_rows, get_world_size

Batch = tuple[torch.Tensor, torch.Tensor]  # features [R, B, D] and labels [R, B], for each of R runs


class LinearHeads(nn.Module):
    """For each of R runs and G learning rates: parameter-free batch normalisation, then a linear layer.

    The heads of a run see the same batches, so they share the statistics. Nothing else is shared: each head learns
    exactly what it would learn alone.
    """

    def __init__(self, seeds: list[int], num_rates: int, width: int, num_classes: int):
        super().__init__()
        weight = torch.empty(len(seeds), num_rates, num_classes, width)
        for of_run, seed in zip(weight, seeds, strict=True):
            of_run[:] = nn.init.trunc_normal_(of_run[0], std=0.01, generator=torch.Generator().manual_seed(seed))
        self.weight = nn.Parameter(weight)  # [R, G, C, D]
        self.bias = nn.Parameter(torch.zeros(len(seeds), num_rates, num_classes))
        self.norm = nn.BatchNorm1d(len(seeds) * width, affine=False, eps=1e-6)  # a channel per run and feature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features [R, B, D] to logits [R, G, B, C]."""
        runs, batch, width = x.shape
        x = self.norm(x.transpose(0, 1).reshape(batch, runs * width)).view(batch, runs, width)
        return torch.einsum("brd,rgcd->rgbc", x, self.weight) + self.bias[:, :, None]


def build_optimizer(heads: LinearHeads, args: Namespace) -> LARS:
    return LARS(heads.parameters(), weight_decay=args.weight_decay, batch_dims=2)


def train_one_epoch(
    heads: LinearHeads,
    batches: Iterable[Batch],
    num_batches: int,
    optimizer: LARS,
    rates: torch.Tensor,
    epoch: int,
    args: Namespace,
) -> torch.Tensor:
    """One epoch of all heads at peak learning rates `rates` [G]; returns the mean loss of each, [R, G]."""
    heads.train()
    steps = num_batches // args.accum_iter  # an incomplete last accumulation is dropped
    schedule = dict(min_lr=args.min_lr, warmup_epochs=args.warmup_epochs, epochs=args.epochs)
    total = torch.zeros(heads.bias.shape[:2], device=heads.bias.device)
    for i, (x, labels) in enumerate(islice(batches, steps * args.accum_iter)):
        if i % args.accum_iter == 0:
            set_learning_rate(optimizer, learning_rate(epoch + i / args.accum_iter / steps, lr=rates, **schedule))
        losses = head_losses(heads(x), labels)
        (losses.sum() / args.accum_iter).backward()
        total += losses.detach()
        if (i + 1) % args.accum_iter == 0:
            optimizer.step()
            optimizer.zero_grad()
    return total / (steps * args.accum_iter)


@contextmanager
def no_denormals() -> Iterator[None]:
    """Flush denormals to zero: CPUs are slow with them, some heads of `--lr_grid` produce them, and no accuracy depends
    on them."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def head_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each head [R, G], from logits [R, G, B, C] and each run's labels [R, B]."""
    runs, rates, batch, classes = logits.shape
    labels = labels[:, None].expand(-1, rates, -1)
    losses = F.cross_entropy(logits.reshape(-1, classes), labels.reshape(-1), reduction="none")
    return losses.view(runs, rates, batch).mean(dim=2)


@torch.no_grad()
def predict(heads: LinearHeads, features: torch.Tensor, block: int = 2048) -> torch.Tensor:
    """The five most likely classes of each feature vector [N, D] by each head: int64 [R, G, N, 5] on the CPU."""
    heads.eval()
    runs, device = len(heads.weight), heads.weight.device
    logits = (heads(part.to(device).expand(runs, -1, -1)) for part in features.split(block))
    return torch.cat([top_classes(part).cpu() for part in logits], dim=2)


# --- Batches ---


class CachedBatches:
    """Features extracted once, in a different order for each seed."""

    def __init__(self, train: FeatureSet, seeds: list[int], batch_size: int, device: torch.device):
        self.train, self.device = train, device
        self.num_samples = len(train)
        self.orders = [EpochBatches(len(train), batch_size, seed) for seed in seeds]

    def __len__(self) -> int:
        return len(self.orders[0])

    def epoch(self, epoch: int) -> Iterator[Batch]:
        for keys in zip(*(order.of_epoch(epoch) for order in self.orders), strict=True):
            index = torch.tensor([[i for _, i in batch] for batch in keys])  # [R, B]
            yield self.train.features[index].to(self.device), self.train.labels[index].to(self.device)


class EncodedBatches:
    """Upstream's protocol for one run: augmented images, re-encoded in every epoch.

    Each process encodes its share of a batch. The head is so small that every process then trains all of it on the
    features of the whole batch, so the result is the same for any number of processes.
    """

    def __init__(
        self,
        encoder: VisionTransformer,
        loader: ImageLoader,
        device: torch.device,
        amp: torch.dtype | None,
        statistics: tuple[Values, Values] = (None, None),
    ):
        self.encoder, self.loader, self.device, self.amp, self.statistics = encoder, loader, device, amp, statistics
        self.num_samples = loader.batches.num_samples

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        self.loader.set_epoch(epoch)
        images = self.loader.batches.batch_size * get_world_size()
        for imgs, labels, _ in tracked(self.loader, f"epoch {epoch + 1}", len(self), images, "images/s"):
            imgs = normalise(imgs.to(self.device, non_blocking=True), *self.statistics)
            with torch.no_grad(), autocast(self.device, self.amp):
                features = self.encoder.forward_features(imgs).float()
            labels = labels.to(self.device, non_blocking=True)
            yield gather_rows(features, equal=True)[None], gather_rows(labels, equal=True)[None]
        self.loader.share_bad_images()


# --- Solved to the optimum ---


def fit_softmax(
    features: torch.Tensor, labels: torch.Tensor, num_classes: int, l2: float, device: torch.device | str
) -> LinearHeads:
    """The softmax layer on features [M, D] that minimises sum of cross-entropies + l2 / 2 |W|^2.

    The features are standardised by their own mean and deviation, as in the probe's batch normalisation. The problem
    is convex: its solution is unique, independent of any learning rate, schedule or seed.
    """
    heads = LinearHeads([0], 1, features.shape[1], num_classes).double().to(device)
    x, labels = features.double().to(device), labels.to(device)
    heads.norm.running_mean, heads.norm.running_var = x.mean(dim=0), x.var(dim=0, correction=0)
    heads.eval()  # normalise with these statistics
    x = torch.cat([heads.norm(x), x.new_ones(len(x), 1)], dim=1)  # [M, D + 1]: the last is the bias
    penalty = x.new_full((x.shape[1],), l2)
    penalty[-1] = 0
    # Features are highly correlated. In coordinates where the curvature at zero is the identity, the same optimum is
    # reached in a tenth of the steps.
    factor = torch.linalg.cholesky(x.T @ x / num_classes + penalty.diag())
    z = torch.linalg.solve_triangular(factor, x.T, upper=False).T
    v = x.new_zeros(x.shape[1], num_classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [v],
        max_iter=1000,
        tolerance_grad=1e-4,  # of the sum over all samples; no prediction changes below it
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def weights() -> torch.Tensor:
        return torch.linalg.solve_triangular(factor.T, v, upper=True)  # [D + 1, C]

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(z @ v, labels, reduction="sum") + (penalty[:, None] * weights().square()).sum() / 2
        loss.backward()
        return loss

    optimizer.step(objective)
    with torch.no_grad():
        solved = weights()
        heads.weight[0, 0], heads.bias[0, 0] = solved[:-1].T, solved[-1]
    return heads.float()
