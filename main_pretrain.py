"""Pretrain CL-MAE, vanilla MAE, or MAE with any other masking strategy on a folder of images.

On ImageNet, with eight GPUs (with one: plain python and --accum_iter 16, for the same batch of 4,096):
    torchrun --nproc_per_node=8 main_pretrain.py --config configs/clmae_vit_base.yaml --data_path /data/imagenet

The vanilla MAE baseline differs in one flag:
    torchrun --nproc_per_node=8 main_pretrain.py --config configs/clmae_vit_base.yaml --masking random ...

Killed, preempted, out of time? Rerun the same command with --resume auto; on CPUs the final weights are bit-identical.

On a machine with no GPU and no images:
    python main_pretrain.py --model mae_vit_micro_patch4 --input_size 32 --data_set shapes --blr 4e-3 \
        --epochs 10 --warmup_epochs 1 --output_dir output_dir/shapes
"""

from argparse import Namespace

from util.arguments import (
    CHANNELS,
    DEFAULT_OUTPUT_DIR,
    add_data_arguments,
    add_distributed_arguments,
    add_machine_arguments,
    add_saving_arguments,
    add_statistics_arguments,
    check_epochs,
    settle_shared_args,
)
from util.cli import ArgumentParser, UserError, count, count_or_zero, fraction, logger, non_negative, number, positive
from util.program import answer_early, run

# The paper's setup, as far as it is stated: He et al.'s recipe on 200 classes of ImageNet. The number of epochs is not
# given; 400 is upstream's default.
PAPER = {"norm_pix_loss": True, "num_classes": 200, "lr": 0.0024, "epochs": 400, "input_size": [224, 224]}
PAPER_MASKS = {
    "masking": "curriculum",
    "mask_ratio": 0.75,
    "mask_ratio_start": None,
    "select": "threshold",
    "soft": "tokens",
    "kl": "tallied",
    "diversity": "squared",
    "lambda_cl_start": 1.0,
    "lambda_cl_end": -0.1,
    "no_curriculum": False,
    "lambda_gauss": 10.0,
    "lambda_kl": 1.0,
    "lambda_div": 2.0,
    "lambda_pos": 0.0,
    "cmm_depth": 5,
    "cmm_dim": None,
    "cmm_every": 1,
    "cmm_fraction": 1.0,
}
ratio = number(above=0, below=1)
weight = number(at_least=-1, at_most=1)


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_pretrain.py", description=str(__doc__).split("\n")[0])

    length = parser.add_argument_group("run length and batch")
    length.add_argument("--batch_size", default=64, type=count, help="images per process per iteration")
    length.add_argument(
        "--global_batch_size", type=count, help="images per update over all processes; sets --batch_size"
    )
    length.add_argument("--epochs", default=400, type=count, help="passes over the data")
    length.add_argument(
        "--accum_iter", default=1, type=count, help="micro-batches per update: a larger batch in less memory"
    )

    model = parser.add_argument_group("model")
    model.add_argument(
        "--model", default="mae_vit_large_patch16", help="mae_vit_base, _large, _huge or a smaller one (README.md)"
    )
    model.add_argument(
        "--input_size", default=224, type=count, nargs="+", help="image side in pixels, or height and width"
    )
    model.add_argument("--in_chans", default=3, type=count, choices=CHANNELS, help="channels: grey, RGB or RGBA")
    add_statistics_arguments(model, "ImageNet's")
    model.add_argument(
        "--norm_pix_loss", action="store_true", help="reconstruct patches normalised by mean and deviation (default)"
    )
    model.add_argument("--no_norm_pix_loss", action="store_false", dest="norm_pix_loss", help="reconstruct raw pixels")
    model.set_defaults(norm_pix_loss=True)

    masks = parser.add_argument_group("masks (docs/masking.md)")
    masks.add_argument(
        "--masking",
        default="curriculum",
        help="curriculum (CL-MAE), predictive, random (vanilla MAE), block, grid, noise, or your own: file.py:name",
    )
    masks.add_argument("--mask_ratio", default=0.75, type=ratio, help="fraction of patches to remove (target or exact)")
    masks.add_argument(
        "--mask_ratio_start", type=ratio, help="start at this ratio and move linearly to --mask_ratio over the epochs"
    )
    masks.add_argument(
        "--mask_noise",
        choices=["white", "red", "green", "blue", "curriculum"],
        help="noise colour of --masking noise (default: curriculum) and predictive (default: white)",
    )
    masks.add_argument("--lambda_cl_start", default=1.0, type=weight, help="curriculum weight at the start, in [-1, 1]")
    masks.add_argument(
        "--lambda_cl_end",
        type=weight,
        help="curriculum weight at the end; default: -0.1; -0.25 with --soft attention; -1 for other strategies",
    )
    masks.add_argument("--no_curriculum", action="store_true", help="hold the curriculum weight at 0 (ablation)")

    learned = parser.add_argument_group("learned masks (Z: the probability that a patch stays visible)")
    learned.add_argument(
        "--soft",
        choices=["attention", "tokens"],
        help="what Z multiplies when the module learns: the input tokens (the paper) or the attention to them; "
        "default: tokens",
    )
    learned.add_argument(
        "--select",
        choices=["threshold", "topk"],
        help="what stays visible: Z >= 0.5 (the paper) or the (1 - mask_ratio) largest (the authors' code); "
        "default: threshold",
    )
    learned.add_argument(
        "--lambda_gauss", type=non_negative, help="weight for Z near 0 or 1; default: 10, or 20 with --soft attention"
    )
    learned.add_argument("--lambda_kl", default=1.0, type=non_negative, help="weight for hitting the target ratio")
    learned.add_argument(
        "--lambda_div", default=2.0, type=non_negative, help="weight for masks that differ between images"
    )
    learned.add_argument(
        "--lambda_pos",
        type=non_negative,
        help="weight for showing every position; default: 1 with --soft attention, else 0",
    )
    learned.add_argument(
        "--kl",
        default="tallied",
        choices=["tallied", "soft"],
        help="visible share: of patches after the threshold, or the mean of Z (the authors' code)",
    )
    learned.add_argument(
        "--diversity",
        default="squared",
        choices=["squared", "distance"],
        help="loss of two masks at distance d: exp(-d^2), or exp(-0.1 d) (the authors' code)",
    )
    learned.add_argument(
        "--cmm_strength", default=0.5, type=non_negative, help="how strongly predictive masks follow predicted errors"
    )
    learned.add_argument("--cmm_depth", type=count, help="blocks of the module; default: 5, or 2 for predictive")
    learned.add_argument(
        "--cmm_dim", type=count, help="width of the module; default: the encoder's, or a quarter of it for predictive"
    )
    learned.add_argument("--cmm_every", default=1, type=count, help="MAE updates per module update")
    learned.add_argument(
        "--cmm_fraction",
        default=1.0,
        type=fraction,
        help="fraction of the images that the module learns from (curriculum only)",
    )

    optim = parser.add_argument_group("optimization")
    optim.add_argument("--weight_decay", default=0.05, type=non_negative, help="applied to matrices and tokens")
    optim.add_argument("--lr", type=non_negative, help="absolute learning rate; default: blr * batch / 256")
    optim.add_argument(
        "--blr", default=1.5e-4, type=non_negative, help="base learning rate, per 256 images of the global batch"
    )
    optim.add_argument("--min_lr", default=0.0, type=non_negative, help="lower bound of the cosine schedule")
    optim.add_argument("--warmup_epochs", default=40, type=count_or_zero, help="epochs of linear warm-up")
    optim.add_argument("--cmm_blr", type=non_negative, help="base learning rate of the masking module; default: blr")
    optim.add_argument(
        "--cmm_schedule",
        default="constant",
        choices=["constant", "cosine"],
        help="the module's learning rate after warm-up; a decayed one is too low once the curriculum changes sign",
    )
    optim.add_argument("--clip_grad", type=positive, help="maximum gradient norm of each network; default: no clipping")

    add_data_arguments(parser)

    out = parser.add_argument_group("output and resuming")
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="checkpoints and log.txt; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    add_saving_arguments(out)
    out.add_argument("--vis_every", default=1, type=count_or_zero, help="epochs between pictures of masks; 0: none")
    out.add_argument(
        "--knn_every",
        type=count_or_zero,
        help="epochs between quick kNN checks; 0: none; default with labels: ten per run, or fewer to cost at most 2%%",
    )
    out.add_argument("--resume", default="", help="checkpoint to resume from; auto: the newest in --output_dir")
    out.add_argument("--init", default="", help="start a new run from these weights; takes what --finetune takes")

    machine = add_machine_arguments(parser)
    machine.add_argument("--compile", action="store_true", help="compile the transformer blocks with torch.compile")
    machine.add_argument(
        "--grad_checkpointing", action="store_true", help="save memory by recomputing activations in the backward pass"
    )
    add_distributed_arguments(parser)
    return parser


answer_early(__name__, get_args_parser)

import datetime
import gc
import time
from typing import Any

import torch
from timm.models.vision_transformer import Block
from timm.optim import param_groups_weight_decay
from torch import nn

from engine_pretrain import train_one_epoch
from masking import LearnedMasking, Masking, MaskSettings, find_strategy
from models_mae import MODELS, Autoencoder, build_mae, grid_size
from util.board import Board
from util.data.listing import list_images, save_beside
from util.datasets import ImageLoader, build_pretrain_loader, count_steps, pixel_statistics
from util.lock import sole_run
from util.misc import (
    NativeScalerWithGradNormCount,
    amp_dtype,
    derive_seed,
    get_world_size,
    git_commit,
    init_distributed_mode,
    is_main_process,
    manual_garbage_collection,
    precision,
    with_ddp,
    without_ddp,
)
from util.training.monitor import Monitor
from util.training.progress import EpochLog, LossGuard, prepare_output, report_epoch, write_log
from util.training.resume import Start, TrainingState, data_identity, start_pretraining
from util.training.saver import Saver, StopRequest


def check_args(args: Namespace) -> None:
    """Reject invalid combinations of flags, and fill in defaults that depend on other flags."""
    if args.model not in MODELS:
        raise UserError(f"--model {args.model} is unknown; choose from {', '.join(sorted(MODELS))}")
    settle_shared_args(args)
    settle_mask_args(args)
    args.mean, args.std = pixel_statistics(args.in_chans, args.mean, args.std)
    if args.init and args.resume not in ("", "auto"):
        raise UserError("--init starts a new run and --resume FILE continues one: use one of them, or --resume auto")
    check_epochs(args)


def settle_mask_args(args: Namespace) -> None:
    """Fill in defaults that depend on the masking strategy."""
    strategy = find_strategy(args.masking)
    if args.cmm_depth is None:
        args.cmm_depth = getattr(strategy, "depth", None)
    curriculum = args.masking == "curriculum"
    args.soft = args.soft or "tokens"
    consistent = curriculum and args.soft == "attention"
    args.select = args.select or "threshold"
    if args.lambda_gauss is None:
        args.lambda_gauss = 20.0 if consistent else 10.0
    if args.lambda_pos is None:
        args.lambda_pos = 1.0 if consistent else 0.0
    if args.lambda_cl_end is None:
        args.lambda_cl_end = (-0.25 if consistent else -0.1) if curriculum else -1.0
    if args.mask_ratio_start is not None and curriculum and args.select == "threshold":
        raise UserError("--mask_ratio_start needs masks of an exact ratio: add --select topk, or another --masking")


def settle(data_loader: ImageLoader, device: torch.device, args: Namespace) -> None:
    """Fill in what depends on the data and the machine; checkpoints store it with the flags."""
    args.classes = data_loader.dataset.source.classes
    args.data_identity = data_identity(data_loader.dataset.source)
    args.precision = precision(args.amp, device)
    args.commit = git_commit() if is_main_process() else None


def settle_batch_and_rates(args: Namespace) -> None:
    """Fill in what depends on the number of processes: the batch size of each, and the absolute learning rates."""
    parts = get_world_size() * args.accum_iter
    if args.global_batch_size is not None:
        if args.global_batch_size % parts:
            raise UserError(
                f"--global_batch_size {args.global_batch_size} cannot be split evenly into {parts}: "
                f"{get_world_size()} processes with --accum_iter {args.accum_iter}"
            )
        args.batch_size = args.global_batch_size // parts
    batch = args.batch_size * parts
    cmm_blr = args.blr if args.cmm_blr is None else args.cmm_blr
    args.cmm_lr = cmm_blr * batch / 256 if args.lr is None or args.cmm_blr is not None else args.lr
    args.lr = args.blr * batch / 256 if args.lr is None else args.lr


def build_networks(args: Namespace, device: torch.device) -> TrainingState:
    """The MAE is initialised first, so a seed gives it the same weights whatever the masking strategy."""
    torch.manual_seed(derive_seed("weights", args.seed))
    try:
        model = build_mae(
            args.model, img_size=tuple(args.input_size), in_chans=args.in_chans, norm_pix_loss=args.norm_pix_loss
        )
    except ValueError as error:
        raise UserError(f"--model {args.model} with --input_size {args.input_size}: {error}") from None
    for name in ("mask_ratio", "mask_ratio_start"):
        share, patches = getattr(args, name), model.patch_embed.num_patches
        if share is not None and not 0 < int(patches * (1 - share)) < patches:
            raise UserError(f"--{name} {share} keeps {int(patches * (1 - share))} of {patches} patches")
    if args.compile or device.type == "cuda":
        model.pad_to = 8  # fewer shapes to compile and allocate, and a good fit for tensor cores
    state = TrainingState(*with_optimizer(model, args.lr, args, device))
    strategy = find_strategy(args.masking)
    if isinstance(strategy, type):
        module = build_module(strategy(MaskSettings.of(args)), model, args)
        state.cmm, state.optimizer_cmm, state.scaler_cmm = with_optimizer(module, args.cmm_lr, args, device)
    return state


def build_module(strategy: LearnedMasking, model: Autoencoder, args: Namespace) -> nn.Module:
    try:
        return strategy.build(model)
    except ValueError as error:
        raise UserError(f"--cmm_dim {args.cmm_dim}: {error}") from None


def with_optimizer(network: Any, lr: float, args: Namespace, device: torch.device) -> tuple:
    """The network on its device, with its own AdamW and gradient scaler."""
    network.to(device)
    network.set_grad_checkpointing(args.grad_checkpointing)
    if args.compile:
        # Block by block: the first compiles in seconds, and others of the same shape reuse it. All share one function,
        # and torch's limit of 8 variants is too low for three widths, each with a mask or bias, frozen, or in no_grad.
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.optimize_ddp = False  # between blocks, gradients are exchanged anyway: split none of them
        for module in network.modules():
            if isinstance(module, Block):
                module.compile(dynamic=True)
    groups = param_groups_weight_decay(network, args.weight_decay)  # no decay of biases and norms, as upstream
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    fp16 = amp_dtype(args.amp, device) == torch.float16
    return network, optimizer, NativeScalerWithGradNormCount(device.type, enabled=fp16)


def build_masking(state: TrainingState, args: Namespace) -> Masking:
    module = None if state.cmm is None else with_ddp(state.cmm)
    return Masking(MaskSettings.of(args), grid_size(state.model), module)


def main(args: Namespace) -> None:
    config = get_args_parser().config_text(args)
    check_args(args)
    device = init_distributed_mode(args)
    settle_batch_and_rates(args)
    listing = list_images(args)
    data_loader = build_pretrain_loader(args, listing)
    settle(data_loader, device, args)
    steps_per_epoch = count_steps(data_loader, args)  # raises if the batch is too large
    monitor = Monitor(args, device, listing)
    state = build_networks(args, device)
    with sole_run(args.output_dir), Board() as log_writer:
        start = start_pretraining(state, steps_per_epoch, args)
        prepare_output(log_writer, config, start, steps_per_epoch, args.classes, args)
        save_beside(listing, args)
        describe_run(state, data_loader, start, device, args)
        train(state, data_loader, start, monitor, log_writer, args)


def train(
    state: TrainingState, data_loader: ImageLoader, start: Start, monitor: Monitor, log_writer: Board, args: Namespace
) -> None:
    """From `start` to the last epoch."""
    steps_per_epoch = count_steps(data_loader, args)
    model, masking = with_ddp(state.model), build_masking(state, args)
    loss_guard = LossGuard(state.loss_scales())
    start_time = time.monotonic()
    total_steps = args.epochs * steps_per_epoch

    def moment(epoch: int, step: int) -> dict:
        return masking.moment(epoch, step / total_steps)

    with (
        StopRequest(data_loader) as stop,
        manual_garbage_collection(),
        Saver(state, stop, log_writer, args, moment) as saver,
    ):
        for epoch in range(start.epoch, args.epochs):
            resumed = start if epoch == start.epoch else Start(epoch)
            iterations = steps_per_epoch * args.accum_iter
            log = EpochLog(resumed, iterations, loss_guard, log_writer, args, stop.mean_of_processes)
            stats = train_one_epoch(model, data_loader, masking, state, epoch, log, args, saver.after_update)
            data_loader.share_bad_images()
            metrics = monitor.after_epoch(epoch, without_ddp(model), masking, log_writer)
            # Log before saving: on resuming, a duplicate line can be dropped, but a missing one cannot be recovered.
            write_log(stats, metrics, epoch, log_writer, args)
            report_epoch(stats, metrics, epoch, (time.monotonic() - start_time) / (epoch + 1 - start.epoch), args)
            saver.after_epoch(epoch, (epoch + 1) * steps_per_epoch)
            gc.collect()
    logger.info("training time %s", datetime.timedelta(seconds=int(time.monotonic() - start_time)))


def describe_run(
    state: TrainingState, data_loader: ImageLoader, start: Start, device: torch.device, args: Namespace
) -> None:
    networks = {"MAE": state.model, "masking module": state.cmm}
    sizes = ", ".join(
        f"{name} {sum(p.numel() for p in network.parameters()) / 1e6:.1f}M"
        for name, network in networks.items()
        if network is not None
    )
    logger.info("%s with %s masks: %s, %s on %s", args.model, args.masking, sizes, args.precision, device)
    rates = f"learning rate {args.lr:.3g}" + (f", of the module {args.cmm_lr:.3g}" if state.cmm is not None else "")
    batch = " x ".join(map(str, (args.batch_size, args.accum_iter)))
    if get_world_size() > 1:
        batch += f" on each of {get_world_size()} processes"
    images, iterations = len(data_loader.dataset), len(data_loader)
    logger.info("%d images, batch %s, %d iterations per epoch, %s", images, batch, iterations, rates)
    departures = departures_from_paper(args)
    logger.info("departs from the paper's setting: %s", ", ".join(departures) if departures else "no")
    if start.epoch >= args.epochs:
        logger.info("nothing to do: all %d epochs are trained", args.epochs)


def departures_from_paper(args: Namespace) -> list[str]:
    """As "flag value (the paper's)". The learning rate stands for batch size and base rate; classes are counted."""
    settings = vars(args) | {"num_classes": len(args.classes), "lr": round(args.lr, 6)}
    reference = PAPER | (PAPER_MASKS if args.masking == "curriculum" else {"masking": "curriculum"})
    return [f"{name} {settings[name]} ({value})" for name, value in reference.items() if settings[name] != value]


if __name__ == "__main__":
    run(main, get_args_parser(), timestamps=True)
