"""One epoch of pretraining: the two-step iteration of CL-MAE.

    Forward     one pass of the masking module over the images
    Step 1      the MAE learns to reconstruct what the masks remove              (the masking module is fixed)
    Step 2      the masking module learns from the MAE's errors                  (the MAE is fixed)

The two networks interact only here. Without a learned strategy, as with `--masking random`, only step 1 runs: vanilla
MAE through the same code.

Every loss is that of the global batch: its value and gradient do not depend on the number of processes. Each process
computes a share. The mean of the shares is the loss, which is logged; the mean of their gradients, computed by
DistributedDataParallel, is its gradient.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from torch import nn

from masking import Masking
from util.datasets import ImageLoader, normalise
from util.lr_sched import adjust_learning_rate, learning_rate, set_learning_rate
from util.misc import (
    amp_dtype,
    autocast,
    exchange_gradients,
    gather_batch,
    get_world_size,
    sum_of_processes,
    without_ddp,
)
from util.training.progress import EpochLog
from util.training.resume import TrainingState


def train_one_epoch(
    model: nn.Module,
    data_loader: ImageLoader,
    masking: Masking,
    state: TrainingState,
    epoch: int,
    log: EpochLog,
    args: Namespace,
    after_update: Callable[[int, EpochLog], None] | None = None,
) -> dict[str, float]:
    """Train for one epoch; returns the epoch's mean of every logged value.

    `model` is the autoencoder, possibly wrapped in DistributedDataParallel. An interrupted epoch resumes at iteration
    `log.first`. `after_update` is called with the total number of updates so far.
    """
    model.train()
    mae = without_ddp(model)
    device = next(model.parameters()).device
    amp = amp_dtype(args.amp, device)
    steps_per_epoch = log.iterations // args.accum_iter
    data_loader.set_epoch(epoch, first_batch=log.first)

    batches = islice(data_loader, log.iterations - log.first)
    for i, (imgs, _, index) in enumerate(batches, start=log.first):
        step = epoch * steps_per_epoch + i // args.accum_iter
        update = (i + 1) % args.accum_iter == 0
        exchange_gradients(update, model, masking.module)
        epochs_passed = step / steps_per_epoch
        lr = adjust_learning_rate(state.optimizer, epochs_passed, args)
        imgs = normalise(imgs.to(device, non_blocking=True), args.mean, args.std)
        ask = masking.ask(imgs, index, epoch, epochs_passed / args.epochs)
        learn = masking.learns_at(step)

        # Forward pass of the masking module. Its weights change only at the end of step 2, so one pass serves both.
        with autocast(device, amp), torch.set_grad_enabled(learn):
            values = masking.values(imgs)  # [N, L], such as Z; None without a learned strategy

        # Step 1: train the MAE on the visible patches.
        masks = masking.choose(ask, values)
        share = share_of_process(masks)
        with autocast(device, amp):
            local_loss, pred, mask = model(imgs, ask.mask_ratio, **masks)
        loss = local_loss * share()
        state.scaler(loss / args.accum_iter, state.optimizer, args.clip_grad, model.parameters(), update_grad=update)
        losses, settings = {"loss": loss}, {"lr": lr} | masking.moment(epoch, epochs_passed / args.epochs)

        # Step 2: train the masking module on the errors of the updated MAE. (With gradient accumulation, the MAE is
        # updated only at the last micro-batch; waiting for it would keep every micro-batch's graph in memory.)
        if learn and masking.learned is not None and values is not None:
            module, optimizer, scaler = state.masking_parts()
            settings["cmm/lr"] = module_learning_rate(epochs_passed, args)
            set_learning_rate(optimizer, settings["cmm/lr"])
            with frozen(mae):  # until after the backward pass, where --grad_checkpointing repeats the forward pass
                with autocast(device, amp):
                    error, rows = masking.learned.errors(mae, imgs, values, pred)
                # On the global batch: pairs of images may span processes.
                all_values, all_errors, all_masks = gather_batch(values, error, mask)
                losses |= masking.learned.losses(all_values, all_errors, all_masks, rows, ask)
                loss_cmm = losses["cmm/loss"] / args.accum_iter
                scaler(loss_cmm, optimizer, args.clip_grad, module.parameters(), update_grad=update)

        log.add(i, losses | state.loss_scales(), settings, partial(masking.health, mask, values))
        if update and after_update is not None:
            after_update(step + 1, log)
    return log.close()


def share_of_process(masks: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor | float]:
    """Returns a function that gives the weight of this process's loss in the mean over processes.

    The loss is a mean over removed patches, so the weight is 1 for masks of an exact ratio; otherwise processes may
    remove different numbers of patches. Counts are exchanged during the forward pass: call the function after it.
    """
    if "visible" not in masks or get_world_size() == 1:
        return lambda: 1.0
    removed = (~masks["visible"]).sum()
    total = sum_of_processes(removed.clone())
    return lambda: removed * get_world_size() / total().clamp(min=1)  # losses are 0 if nothing is removed


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Compute no gradients for the weights of `model`; gradients still flow through it to its inputs."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


def module_learning_rate(epoch: float, args: Namespace) -> float:
    """The masking module warms up like the MAE; its rate then stays constant by default, because the curriculum changes
    sign late, when a decayed rate could no longer move it."""
    return learning_rate(
        epoch,
        lr=args.cmm_lr,
        min_lr=args.min_lr,
        warmup_epochs=args.warmup_epochs,
        epochs=args.epochs,
        schedule=args.cmm_schedule,
    )
