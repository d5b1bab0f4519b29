"""The two-step iteration of CL-MAE. Only here do the two networks meet.

    Forward     Z = CMM(images), once
    Step 1      the MAE learns to reconstruct what the CMM's masks remove        (the CMM is not touched)
    Step 2      the CMM learns from the MAE's error on softly masked images      (the MAE is not touched)

Without a CMM (`--masking random`), step 1 with random masks is all there is: vanilla MAE through the same code.

Every loss is that of the global batch, so that its value and its gradient do not depend on how many processes share it.
DistributedDataParallel averages gradients over processes; what each process backpropagates is therefore scaled so that
the average is the gradient of the global loss.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.tensorboard import SummaryWriter

from masking import choose_masking
from models_cmm import CurriculumMaskingModule, curriculum_loss, diversity_loss, gaussian_loss, kl_loss, lambda_cl
from models_mae import MaskedAutoencoderViT
from util.datasets import ImageLoader, normalise
from util.lr_sched import adjust_learning_rate, learning_rate, set_learning_rate
from util.misc import (
    NativeScalerWithGradNormCount,
    all_reduce_sum,
    amp_dtype,
    autocast,
    exchange_gradients,
    gather_rows,
    get_world_size,
    without_ddp,
)
from util.training.progress import EpochLog, LossGuard


def train_one_epoch(
    model: MaskedAutoencoderViT | DistributedDataParallel,
    data_loader: ImageLoader,
    optimizer: Optimizer,
    device: torch.device,
    epoch: int,
    loss_scaler: NativeScalerWithGradNormCount,
    *,
    cmm: CurriculumMaskingModule | DistributedDataParallel | None = None,
    optimizer_cmm: Optimizer | None = None,
    loss_scaler_cmm: NativeScalerWithGradNormCount | None = None,
    loss_guard: LossGuard,
    log_writer: SummaryWriter | None = None,
    steps_done: int = 0,
    log_state: dict | None = None,
    after_update: Callable[[int, EpochLog], None] | None = None,
    args: Namespace,
) -> dict[str, float]:
    """Train for one epoch; returns the epoch's mean of every logged value.

    An epoch that was interrupted after `steps_done` updates goes on there, with the `log_state` of that moment.
    `after_update` is called with the number of updates of the whole run so far.
    """
    model.train()
    mae = without_ddp(model)
    steps_per_epoch = len(data_loader) // args.accum_iter  # a last, incomplete accumulation is left out
    first, iterations = steps_done * args.accum_iter, steps_per_epoch * args.accum_iter
    data_loader.set_epoch(epoch, first_batch=first)
    amp = amp_dtype(args.amp, device)
    log = EpochLog(epoch, first, iterations, loss_guard, log_writer, args.batch_size * get_world_size())
    if log_state is not None:
        log.load_state_dict(log_state)

    for i, (imgs, _) in enumerate(islice(data_loader, iterations - first), start=first):
        step = epoch * steps_per_epoch + i // args.accum_iter
        update = (i + 1) % args.accum_iter == 0
        exchange_gradients(update, model, cmm)
        epochs_passed = step / steps_per_epoch
        lr = adjust_learning_rate(optimizer, epochs_passed, args)
        imgs = normalise(imgs.to(device, non_blocking=True))

        # Forward of the CMM. Its weights do not change before step 2 ends, so this one pass serves both steps.
        keep_prob, learn_masks = None, cmm is not None and step % args.cmm_every == 0
        if cmm is not None:
            with autocast(device, amp), torch.set_grad_enabled(learn_masks):
                keep_prob = cmm(imgs)  # Z [N, L]

        # Step 1: the MAE, on what the masks leave visible.
        masking = choose_masking(imgs, keep_prob, mae.patch_embed.num_patches, epoch, i, args)
        with autocast(device, amp):
            local_loss, _, mask = model(imgs, args.mask_ratio, **masking)
        loss, share = global_loss(local_loss, mask)
        loss_scaler(share / args.accum_iter, optimizer, args.clip_grad, model.parameters(), update_grad=update)
        losses, settings = {"loss": loss}, {"lr": lr}

        # Step 2: the CMM, on the error of the MAE just updated. (When gradients accumulate, the MAE is updated only
        # at the last micro-batch: waiting for it would hold every micro-batch's graph of the CMM in memory.)
        if cmm is not None:
            weight = 0.0 if args.no_curriculum else lambda_cl(step, args.epochs * steps_per_epoch, args.lambda_cl_end)
            lr_cmm = cmm_learning_rate(epochs_passed, args)
            settings |= {"cmm/lambda_cl": weight, "cmm/lr": lr_cmm}
        if learn_masks:
            set_learning_rate(optimizer_cmm, lr_cmm)
            judged, judged_here = images_to_judge(len(imgs), args.cmm_fraction)
            with frozen(mae):  # until the backward pass is over: --grad_checkpointing repeats the forward pass there
                with autocast(device, amp):
                    error = soft_error(mae, imgs[judged_here], keep_prob[judged_here])
                # Z and errors of the global batch: every pair of its images counts, whichever process has them.
                # Gradients flow to this process's rows alone, so the processes' gradients add up to that of the loss.
                keep_prob_of_all, error = gather_rows(keep_prob, equal=True), gather_rows(error, equal=True)
                losses |= cmm_losses(keep_prob_of_all, error, weight, args, judged)
                loss_cmm = losses["cmm/loss"] * get_world_size() / args.accum_iter
                loss_scaler_cmm(loss_cmm, optimizer_cmm, args.clip_grad, cmm.parameters(), update_grad=update)

        log.add(i, losses, settings, mask, keep_prob)
        if update and after_update is not None:
            after_update(step + 1, log)
    return log.close()


def global_loss(local_loss: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean error of the removed patches of the global batch, and this process's share of it.

    Processes remove different numbers of patches, so the mean of their means is not the global one. The mean of their
    shares is, and only shares carry a gradient.
    """
    if get_world_size() == 1:
        return local_loss, local_loss
    removed = mask.sum()
    total_error, total_removed = all_reduce_sum(torch.stack([local_loss.detach() * removed, removed]))
    total_removed = total_removed.clamp(min=1)  # nothing removed anywhere: the loss is 0, not 0 / 0
    return total_error / total_removed, local_loss * (removed * get_world_size() / total_removed)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Inside, no gradient is computed for the weights of `model`; gradients still pass through it to its inputs."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


def soft_error(model: MaskedAutoencoderViT, imgs: torch.Tensor, keep_prob: torch.Tensor) -> torch.Tensor:
    """Error of each patch [N, L] when every token is scaled by its Z, as a function of Z alone."""
    with frozen(model):
        latent, _, _ = model.forward_encoder(imgs, 0.0, keep_prob=keep_prob)
        pred = model.forward_decoder(latent, ids_restore=None)
        return model.patch_error(imgs, pred)


Rows = slice | list[int]


def images_to_judge(n: int, fraction: float) -> tuple[Rows, Rows]:
    """The share of the images whose error the CMM learns from: rows of the global batch, and of this process's n.

    They are evenly spread. The order of images is random already, so these are as good as drawn; and they are the same
    images for any number of processes, if the share of each process's batch is a whole number.
    """
    if fraction == 1:
        return slice(None), slice(None)
    number = max(round(fraction * n), 1)
    here = [i * n // number for i in range(number)]
    return [n * rank + row for rank in range(get_world_size()) for row in here], here


def cmm_losses(
    keep_prob: torch.Tensor, error: torch.Tensor, curriculum_weight: float, args: Namespace, judged: Rows = slice(None)
) -> dict[str, torch.Tensor]:
    """The joint loss of the CMM (Eq. 1) under "cmm/loss", and its parts, unweighted but for the curriculum's.

    `keep_prob` [N, L] is Z of all images, `error` [M, L] the patch errors of the `judged` ones.
    """
    curriculum = curriculum_loss(keep_prob[judged], error, curriculum_weight)
    gauss = gaussian_loss(keep_prob)
    kl = kl_loss(keep_prob, args.mask_ratio)
    div = diversity_loss(keep_prob)
    total = curriculum + args.lambda_gauss * gauss + args.lambda_kl * kl + args.lambda_div * div
    return {
        "cmm/loss": total,
        "cmm/curriculum": curriculum,
        "cmm/gauss": gauss,
        "cmm/kl": kl,
        "cmm/div": div,
    }


def cmm_learning_rate(epoch: float, args: Namespace) -> float:
    """The CMM warms up as the MAE does. Then it stays constant by default: the curriculum's sign flips late, when a
    decayed rate could no longer move it."""
    return learning_rate(
        epoch,
        lr=args.cmm_lr,
        min_lr=args.min_lr,
        warmup_epochs=args.warmup_epochs,
        epochs=args.epochs,
        schedule=args.cmm_schedule,
    )
