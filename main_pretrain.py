"""Pretrain CL-MAE, or vanilla MAE, on a folder of images.

On ImageNet, with the eight GPUs of a machine (python instead of torchrun uses one of them):
    torchrun --nproc_per_node=8 main_pretrain.py --model mae_vit_base --norm_pix_loss --data_path /data/imagenet

The vanilla MAE baseline differs in one flag:
    torchrun --nproc_per_node=8 main_pretrain.py --model mae_vit_base --norm_pix_loss --data_path /data/imagenet \
        --masking random

Killed, preempted, out of time? The same command with --resume auto goes on, and ends with the same weights.

On a machine with no GPU and no images:
    python main_pretrain.py --model mae_vit_micro_patch4 --input_size 32 --norm_pix_loss --data_set shapes \
        --epochs 10 --warmup_epochs 1 --num_workers 2 --output_dir output_dir/shapes
"""

import datetime
import time
from argparse import Namespace

import torch
from timm.models.vision_transformer import Block
from timm.optim import param_groups_weight_decay

from engine_pretrain import train_one_epoch
from models_cmm import build_cmm
from models_mae import MODELS, build_mae
from util.arguments import (
    DEFAULT_OUTPUT_DIR,
    add_data_arguments,
    add_distributed_arguments,
    add_machine_arguments,
    add_saving_arguments,
    check_at_least,
    check_shared_args,
)
from util.cli import ArgumentParser, UserError, logger, run
from util.datasets import ImageLoader, build_pretrain_loader, count_steps
from util.misc import (
    NativeScalerWithGradNormCount,
    amp_dtype,
    derive_seed,
    get_world_size,
    git_commit,
    init_distributed_mode,
    is_main_process,
    precision,
    with_ddp,
)
from util.training.monitor import Monitor
from util.training.progress import LossGuard, prepare_output, report_epoch, write_log
from util.training.resume import Start, TrainingState, begin, data_identity
from util.training.saver import Saver, StopRequest


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_pretrain.py", description=__doc__.split("\n")[0])

    run_ = parser.add_argument_group("run length and batch")
    run_.add_argument("--batch_size", default=64, type=int, help="images per process and iteration")
    run_.add_argument(
        "--global_batch_size", default=None, type=int, help="images per update of all processes; sets --batch_size"
    )
    run_.add_argument("--epochs", default=400, type=int, help="passes over the data")
    run_.add_argument(
        "--accum_iter", default=1, type=int, help="micro-batches per update: a larger batch in less memory"
    )

    model = parser.add_argument_group("model")
    model.add_argument("--model", default="mae_vit_large_patch16", type=str, help=f"one of {', '.join(sorted(MODELS))}")
    model.add_argument(
        "--input_size", default=224, type=int, nargs="+", help="image side in pixels, or height and width"
    )
    model.add_argument("--in_chans", default=3, type=int, help="channels: 3 (RGB), 1 (grey) or 4 (RGBA)")
    model.add_argument("--mask_ratio", default=0.75, type=float, help="share of removed patches, aimed at or exact")
    model.add_argument(
        "--norm_pix_loss", action="store_true", help="reconstruct patches normalised by their own mean and deviation"
    )
    model.set_defaults(norm_pix_loss=False)

    masks = parser.add_argument_group("masking and curriculum")
    masks.add_argument(
        "--masking",
        default="curriculum",
        choices=["curriculum", "random"],
        help="masks from the learnt masking module (CL-MAE), or random ones (vanilla MAE)",
    )
    masks.add_argument(
        "--select",
        default="threshold",
        choices=["threshold", "topk"],
        help="what stays visible: Z >= 0.5, as the paper, or the (1 - mask_ratio) largest, as its authors' code",
    )
    masks.add_argument(
        "--lambda_cl_end", default=-0.1, type=float, help="curriculum weight at the end, in [-1, 1]; it starts at 1"
    )
    masks.add_argument("--no_curriculum", action="store_true", help="hold the curriculum weight at 0 (ablation)")
    masks.add_argument("--lambda_gauss", default=10.0, type=float, help="weight of the loss that makes Z decisive")
    masks.add_argument("--lambda_kl", default=1.0, type=float, help="weight of the loss that keeps the mask ratio")
    masks.add_argument("--lambda_div", default=2.0, type=float, help="weight of the loss that keeps masks diverse")
    masks.add_argument("--cmm_depth", default=5, type=int, help="transformer blocks of the masking module")

    cheap = parser.add_argument_group("cheaper curriculum (the paper has none of these; docs/speed.md)")
    cheap.add_argument("--cmm_every", default=1, type=int, help="updates of the MAE per update of the CMM")
    cheap.add_argument(
        "--cmm_fraction", default=1.0, type=float, help="share of the images whose reconstruction the CMM learns from"
    )
    cheap.add_argument("--cmm_dim", default=None, type=int, help="width of the CMM; default: the encoder's")

    optim = parser.add_argument_group("optimization")
    optim.add_argument("--weight_decay", default=0.05, type=float, help="for matrices; biases, norms, tokens have none")
    optim.add_argument("--lr", default=None, type=float, help="absolute learning rate; default: blr * batch / 256")
    optim.add_argument("--blr", default=1e-3, type=float, help="base learning rate, per 256 images of a global batch")
    optim.add_argument("--min_lr", default=0.0, type=float, help="lower bound of the cosine")
    optim.add_argument("--warmup_epochs", default=40, type=int, help="epochs of linear warm-up")
    optim.add_argument("--cmm_blr", default=None, type=float, help="base learning rate of the CMM; default: blr")
    optim.add_argument(
        "--cmm_schedule",
        default="constant",
        choices=["constant", "cosine"],
        help="CMM's rate after warm-up; a decayed one can no longer move it when the curriculum's sign flips",
    )
    optim.add_argument(
        "--clip_grad", default=None, type=float, help="largest gradient norm, of each network; default: no"
    )

    add_data_arguments(parser)

    out = parser.add_argument_group("output and resuming")
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="checkpoints and log.txt; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    add_saving_arguments(out)
    out.add_argument("--vis_every", default=1, type=int, help="epochs between pictures of masks; 0: none")
    out.add_argument("--knn_every", default=0, type=int, help="epochs between quick nearest-neighbour checks; 0: none")
    out.add_argument("--resume", default="", help="checkpoint to continue, or auto: the newest in --output_dir")
    out.add_argument("--init", default="", help="checkpoint whose weights alone start a new run, such as an MAE's")

    machine = add_machine_arguments(parser)
    machine.add_argument("--compile", action="store_true", help="compile the transformer blocks with torch.compile")
    machine.add_argument(
        "--grad_checkpointing", action="store_true", help="keep less for the backward pass, and compute it again there"
    )
    add_distributed_arguments(parser)
    return parser


def check_args(args: Namespace) -> None:
    """Refuse impossible values by name."""
    if args.model not in MODELS:
        raise UserError(f"--model {args.model} is unknown; known are {', '.join(sorted(MODELS))}")
    check_shared_args(args)
    if not 0 < args.mask_ratio < 1:
        raise UserError(
            f"--mask_ratio {args.mask_ratio} leaves nothing to see or nothing to learn; it lies between 0 and 1"
        )
    if not -1 <= args.lambda_cl_end <= 1:
        raise UserError(f"--lambda_cl_end {args.lambda_cl_end} is outside [-1, 1]")
    check_at_least(args, 1, "batch_size", "epochs", "accum_iter", "cmm_depth", "cmm_every", "save_every")
    if not 0 < args.cmm_fraction <= 1:
        raise UserError(f"--cmm_fraction {args.cmm_fraction} must lie above 0, and be at most 1")
    check_at_least(args, 0, "lambda_gauss", "lambda_kl", "lambda_div", "weight_decay", "blr", "min_lr", "warmup_epochs")
    check_at_least(args, 0, "vis_every", "knn_every", "start_epoch", "save_minutes", "keep")
    if args.clip_grad is not None and args.clip_grad <= 0:
        raise UserError(f"--clip_grad {args.clip_grad} must be above 0")
    if args.init and args.resume not in ("", "auto"):
        raise UserError("--init starts a new run and --resume FILE continues one: give one of them, or --resume auto")
    if args.warmup_epochs >= args.epochs:
        logger.warning("--warmup_epochs %d fills the whole run of %d epochs", args.warmup_epochs, args.epochs)


def settle_batch_and_rates(args: Namespace) -> None:
    """Fill in what depends on the number of processes: the batch of each, and the absolute learning rates."""
    parts = get_world_size() * args.accum_iter
    if args.global_batch_size is not None:
        if args.global_batch_size < 1 or args.global_batch_size % parts:
            raise UserError(
                f"--global_batch_size {args.global_batch_size} cannot be split evenly into {parts}: "
                f"{get_world_size()} processes with --accum_iter {args.accum_iter}"
            )
        args.batch_size = args.global_batch_size // parts
    batch = args.batch_size * parts
    cmm_blr = args.blr if args.cmm_blr is None else args.cmm_blr
    args.cmm_lr = cmm_blr * batch / 256 if args.lr is None or args.cmm_blr is not None else args.lr
    args.lr = args.blr * batch / 256 if args.lr is None else args.lr


def build_state(args: Namespace, device: torch.device) -> TrainingState:
    """The MAE is drawn first, so that a seed gives CL-MAE and vanilla MAE the same one."""
    torch.manual_seed(derive_seed("weights", args.seed))
    try:
        model = build_mae(
            args.model, img_size=tuple(args.input_size), in_chans=args.in_chans, norm_pix_loss=args.norm_pix_loss
        )
    except ValueError as error:
        raise UserError(f"--model {args.model} with --input_size {args.input_size}: {error}") from None
    kept = int(model.patch_embed.num_patches * (1 - args.mask_ratio))
    if not 0 < kept < model.patch_embed.num_patches:
        raise UserError(f"--mask_ratio {args.mask_ratio} keeps {kept} of {model.patch_embed.num_patches} patches")
    if args.compile or device.type == "cuda":
        model.pad_to = 8  # few shapes to compile and to allocate, and ones that tensor cores like
    state = TrainingState(*with_optimizer(model, args.lr, args, device))
    if args.masking == "curriculum":
        try:
            cmm = build_cmm(model, args.cmm_depth, args.cmm_dim)
        except ValueError as error:
            raise UserError(f"--cmm_dim {args.cmm_dim}: {error}") from None
        state.cmm, state.optimizer_cmm, state.scaler_cmm = with_optimizer(cmm, args.cmm_lr, args, device)
    return state


def with_optimizer(network: torch.nn.Module, lr: float, args: Namespace, device: torch.device) -> tuple:
    """The network on its device, with an AdamW and a gradient scaler of its own."""
    network.to(device)
    network.set_grad_checkpointing(args.grad_checkpointing)
    if args.compile:
        # Block by block: the first compiles in seconds and all others of its shape reuse it.
        for module in network.modules():
            if isinstance(module, Block):
                module.compile(dynamic=True)
    groups = param_groups_weight_decay(network, args.weight_decay, no_weight_decay_list=network.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    fp16 = amp_dtype(args.amp, device) == torch.float16
    return network, optimizer, NativeScalerWithGradNormCount(device.type, enabled=fp16)


def main(args: Namespace) -> None:
    check_args(args)
    device = init_distributed_mode(args)
    settle_batch_and_rates(args)
    data_loader = build_pretrain_loader(args)
    args.data_identity = data_identity(data_loader.dataset.source)
    args.precision = precision(args.amp, device)
    args.commit = git_commit() if is_main_process() else None
    steps_per_epoch = count_steps(data_loader, args)
    monitor = Monitor(args, device)
    state = build_state(args, device)
    start = begin(state, steps_per_epoch, args)
    log_writer = prepare_output(args, start, steps_per_epoch, data_loader.dataset.source.classes)
    describe_run(state, data_loader, start, device, args)

    model, cmm = (None if network is None else with_ddp(network) for network in (state.model, state.cmm))
    loss_guard = LossGuard(skip=amp_dtype(args.amp, device) == torch.float16)
    start_time = time.monotonic()
    with StopRequest() as stop:
        saver = Saver(state, stop, log_writer, args)
        for epoch in range(start.epoch, args.epochs):
            resumed = start if epoch == start.epoch else Start(epoch)
            stats = train_one_epoch(
                model,
                data_loader,
                state.optimizer,
                device,
                epoch,
                state.scaler,
                cmm=cmm,
                optimizer_cmm=state.optimizer_cmm,
                loss_scaler_cmm=state.scaler_cmm,
                loss_guard=loss_guard,
                log_writer=log_writer,
                steps_done=resumed.steps_done,
                log_state=resumed.log_state,
                after_update=saver.after_update,
                args=args,
            )
            data_loader.share_bad_images()
            figures = monitor.after_epoch(epoch, state.model, state.cmm, log_writer)
            # The log comes before the checkpoint: what is logged twice can be dropped on resuming, a gap not filled.
            write_log(stats, figures, epoch, log_writer, args)
            report_epoch(stats, figures, epoch, (time.monotonic() - start_time) / (epoch + 1 - start.epoch), args)
            saver.after_epoch(epoch, (epoch + 1) * steps_per_epoch)
    logger.info("training time %s", datetime.timedelta(seconds=int(time.monotonic() - start_time)))


def describe_run(
    state: TrainingState, data_loader: ImageLoader, start: Start, device: torch.device, args: Namespace
) -> None:
    sizes = {"MAE": state.model, "CMM": state.cmm}
    parameters = ", ".join(
        f"{name} {sum(p.numel() for p in net.parameters()) / 1e6:.1f}M"
        for name, net in sizes.items()
        if net is not None
    )
    logger.info("%s with %s masks: %s, %s on %s", args.model, args.masking, parameters, args.precision, device)
    rates = f"learning rate {args.lr:.3g}" + (f", of the CMM {args.cmm_lr:.3g}" if state.cmm is not None else "")
    batch = " x ".join(map(str, (args.batch_size, args.accum_iter)))
    if get_world_size() > 1:
        batch += f" on each of {get_world_size()} processes"
    images, iterations = len(data_loader.dataset), len(data_loader)
    logger.info("%d images, batch %s, %d iterations per epoch, %s", images, batch, iterations, rates)
    if start.epoch >= args.epochs:
        logger.info("nothing to do: all %d epochs are trained", args.epochs)


if __name__ == "__main__":
    run(main, get_args_parser())
