"""Fine-tune a pretrained encoder end to end as a classifier.

With upstream's recipe for ViT-B (docs/finetune.md has those for ViT-L and ViT-H), on eight GPUs:
    torchrun --nproc_per_node=8 main_finetune.py --finetune runs/clmae --data_path /data/imagenet --batch_size 32 \
        --accum_iter 4 --epochs 100 --blr 5e-4 --layer_decay 0.65 --drop_path 0.1 --mixup 0.8 --cutmix 1.0 \
        --output_dir runs/clmae-finetuned

Killed, preempted, out of time? Rerun the same command with --resume auto. To evaluate the result again:
    python main_finetune.py --eval --resume runs/clmae-finetuned --data_path /data/imagenet

On a machine with no GPU and no images, from scratch:
    python main_finetune.py --model vit_micro_patch4 --data_set shapes --epochs 10 \
        --output_dir output_dir/finetuned
"""

from argparse import Namespace

from util.arguments import (
    DEFAULT_OUTPUT_DIR,
    add_data_arguments,
    add_distributed_arguments,
    add_encoder_arguments,
    add_machine_arguments,
    add_saving_arguments,
    check_epochs,
    settle_shared_args,
)
from util.cli import (
    ArgumentParser,
    UserError,
    count,
    count_or_zero,
    label,
    logger,
    non_negative,
    number,
    positive,
    probability,
)
from util.program import answer_early, run

PROTOCOL = "finetune"
SETTINGS = (  # what a result depends on, besides the encoder and the data
    *("epochs", "warmup_epochs", "batch_size", "accum_iter", "lr", "min_lr", "layer_decay", "weight_decay"),
    *("drop_path", "clip_grad", "aa", "color_jitter", "smoothing", "reprob", "remode", "recount"),
    *("mixup", "cutmix", "cutmix_minmax", "mixup_prob", "mixup_switch_prob", "mixup_mode"),
)
ERASING = ("pixel", "rand", "const")
MIXING = ("batch", "pair", "elem")


def get_args_parser() -> ArgumentParser:
    parser = ArgumentParser("main_finetune.py", description=str(__doc__).split("\n")[0])

    run_ = parser.add_argument_group("run length and batch")
    run_.add_argument("--batch_size", default=64, type=count, help="images per process per iteration")
    run_.add_argument("--epochs", default=50, type=count, help="passes over the data")
    run_.add_argument(
        "--accum_iter", default=1, type=count, help="micro-batches per update: a larger batch in less memory"
    )

    add_encoder_arguments(parser)
    parser.set_defaults(global_pool=True)
    model = parser.add_argument_group("classifier")
    model.add_argument("--nb_classes", type=count, help="outputs of the head; default: number of classes")
    model.add_argument(
        "--drop_path",
        default=0.1,
        type=number(at_least=0, below=1),
        help="drop rate of the last block's branches, rising linearly from 0 at the first block",
    )

    optim = parser.add_argument_group("optimization")
    optim.add_argument("--clip_grad", type=positive, help="maximum gradient norm; default: no clipping")
    optim.add_argument(
        "--weight_decay", default=0.05, type=non_negative, help="for matrices, not for biases, norms or tokens"
    )
    optim.add_argument("--lr", type=positive, help="absolute learning rate; default: blr * batch / 256")
    optim.add_argument(
        "--blr", default=1e-3, type=non_negative, help="base learning rate, per 256 images of the global batch"
    )
    optim.add_argument(
        "--layer_decay", default=0.75, type=positive, help="ratio of a layer's learning rate to the next's"
    )
    optim.add_argument("--min_lr", default=1e-6, type=non_negative, help="lower bound of the cosine schedule")
    optim.add_argument("--warmup_epochs", default=5, type=count_or_zero, help="epochs of linear warm-up")

    images = parser.add_argument_group("augmentation")
    images.add_argument("--color_jitter", type=non_negative, help="strength of colour jitter; only with --aa ''")
    images.add_argument("--aa", default="rand-m9-mstd0.5-inc1", help="timm augmentation policy; '' for none")
    images.add_argument(
        "--smoothing",
        default=0.1,
        type=number(at_least=0, below=1),
        help="label smoothing: share spread over all classes",
    )
    images.add_argument("--reprob", default=0.25, type=probability, help="probability of random erasing")
    images.add_argument("--remode", default="pixel", choices=ERASING, help="what fills the erased regions")
    images.add_argument(
        "--recount", default=1, type=number(int, at_least=1, at_most=1000), help="maximum number of erased regions"
    )
    images.add_argument("--resplit", action="store_true", help="upstream's; no effect: all views are augmented")

    mixes = parser.add_argument_group("mixup and cutmix")
    mixes.add_argument("--mixup", default=0, type=non_negative, help="alpha of mixup, which blends two images; 0: none")
    mixes.add_argument(
        "--cutmix", default=0, type=non_negative, help="alpha of cutmix, which pastes a box of another image; 0: none"
    )
    mixes.add_argument("--cutmix_minmax", type=probability, nargs="+", help="range of the box's side, as two fractions")
    mixes.add_argument("--mixup_prob", default=1.0, type=probability, help="probability of mixing images at all")
    mixes.add_argument(
        "--mixup_switch_prob", default=0.5, type=probability, help="probability of cutmix when both are enabled"
    )
    mixes.add_argument("--mixup_mode", default="batch", choices=MIXING, help="what each draw applies to")

    add_data_arguments(parser)

    out = parser.add_argument_group("output and resuming")
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="checkpoints and results; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    out.add_argument("--data_name", type=label, help="name of the data in tables; default: its folder or set")
    out.add_argument("--resume", default="", help="checkpoint to resume from; auto: the newest in --output_dir")
    out.add_argument("--eval", action="store_true", help="only evaluate the fine-tuned checkpoint given by --resume")
    out.add_argument("--dist_eval", action="store_true", help="upstream's; no effect: evaluation is always distributed")
    add_saving_arguments(out)
    add_machine_arguments(parser)
    add_distributed_arguments(parser)
    return parser


answer_early(__name__, get_args_parser)

import datetime
import gc
import time
from pathlib import Path

import torch

from engine_finetune import Objective, evaluate, test_metrics, train_one_epoch
from models_vit import classifier_of, with_head
from util import checkpoint as ckpt
from util.board import Board
from util.data.augment import build_finetune_loader
from util.data.listing import save_beside
from util.datasets import ImageLoader, count_steps
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import summary, top_classes
from util.evaluation.results import Outcome, Report, best_epoch, say_if_few_classes
from util.evaluation.subject import Subject, open_subject, subject_of
from util.evaluation.tables import show_accuracies
from util.lock import sole_run
from util.lr_decay import param_groups_lrd
from util.misc import (
    NativeScalerWithGradNormCount,
    amp_dtype,
    get_world_size,
    git_commit,
    init_distributed_mode,
    is_main_process,
    manual_garbage_collection,
    precision,
    with_ddp,
)
from util.training import resume
from util.training.progress import EpochLog, LossGuard, has_epochs, prepare_output, read_log, report_epoch, write_log
from util.training.resume import Start, TrainingState
from util.training.saver import Saver, StopRequest


def check_args(args: Namespace) -> None:
    """Reject invalid combinations of flags."""
    box = args.cutmix_minmax
    if box is not None and not (len(box) == 2 and box[0] < box[1]):
        raise UserError(f"--cutmix_minmax takes two fractions of the side, the smaller first; not {box}")
    if (args.mixup or args.cutmix or box) and args.batch_size % 2:
        raise UserError(f"--batch_size {args.batch_size}: mixup and cutmix pair images, so it must be even")
    if args.eval and args.resume in ("", "auto"):
        raise UserError("--eval needs --resume FILE, a fine-tuned checkpoint, or its run's folder")
    check_epochs(args)


def check_data(subject: Subject, args: Namespace) -> None:
    if len(subject.classes) < 2:
        raise UserError(f"{subject.data_name} has only one class: there is nothing to classify")
    subject.check_outputs(args.nb_classes)
    if args.cutmix_minmax is not None:
        least, most = args.cutmix_minmax
        if any(int(side * least) == int(side * most) for side in args.input_size):
            raise UserError(f"--cutmix_minmax {least} {most} allows no box in images of {args.input_size} px")


def settle(subject: Subject, args: Namespace) -> None:
    """Fill in what depends on data, weights and the number of processes; checkpoints store it with the flags."""
    args.nb_classes = args.nb_classes or len(subject.classes)
    if args.lr is None:
        args.lr = args.blr * args.batch_size * args.accum_iter * get_world_size() / 256
    args.classes = subject.classes
    args.data_identity = resume.data_identity(subject.datasets["train"].source)
    args.pretrained_sha256 = subject.checkpoint_sha256
    args.precision = precision(args.amp, subject.device)
    args.commit = git_commit() if is_main_process() else None


def build_classifier(subject: Subject, args: Namespace) -> TrainingState:
    """The classifier, with an AdamW whose learning rates decay from the head to the embeddings."""
    model = with_head(subject.encoder, args.nb_classes, args.seed).to(subject.device)
    groups = param_groups_lrd(model, args.weight_decay, model.no_weight_decay(), args.layer_decay)
    fp16 = amp_dtype(args.amp, subject.device) == torch.float16
    scaler = NativeScalerWithGradNormCount(subject.device.type, enabled=fp16)
    return TrainingState(model, torch.optim.AdamW(groups, lr=args.lr, fused=True), scaler)


def start_finetuning(state: TrainingState, steps_per_epoch: int, args: Namespace) -> Start:
    """Load the checkpoint given by `--resume`, if any."""
    found = resume.checkpoint_to_resume(args)
    if found is None:
        return resume.agreed(Start(args.start_epoch))
    checkpoint, source = found
    if "optimizer" not in checkpoint or "head.weight" not in ckpt.weights_of(checkpoint):
        raise UserError(
            f"{source} is not from a fine-tuning run that can be resumed; to start from its weights, use --finetune"
        )
    return resume.agreed(resume.continue_from(state, checkpoint, source, steps_per_epoch, args))


def main(args: Namespace) -> None:
    config = get_args_parser().config_text(args)
    check_args(args)
    if args.eval:
        test_again(args)
        return
    subject = open_subject(args, drop_path=args.drop_path)
    check_data(subject, args)
    settle(subject, args)
    with sole_run(args.output_dir), Board() as log_writer:
        train(subject, config, log_writer, args)


def train(subject: Subject, config: str, log_writer: Board, args: Namespace) -> None:
    """From the first epoch, or where a checkpoint left off, to the result."""
    device, test_images = subject.device, subject.datasets["val"]
    data_loader = build_finetune_loader(subject.datasets["train"].source, args)
    steps_per_epoch = count_steps(data_loader, args)
    state = build_classifier(subject, args)
    start = start_finetuning(state, steps_per_epoch, args)
    prepare_output(log_writer, config, start, steps_per_epoch, subject.classes, args)
    save_beside(subject.listing, args)
    report = Report(subject, PROTOCOL, log_writer)
    parameters = sum(p.numel() for p in state.model.parameters())
    describe_run(parameters, data_loader, start, args)

    model, objective = with_ddp(state.model), Objective(args)
    loss_guard = LossGuard(state.loss_scales())
    test, by_epoch = None, accuracy_by_epoch(args)
    start_time = time.monotonic()
    with StopRequest(data_loader) as stop, manual_garbage_collection(), Saver(state, stop, log_writer, args) as saver:
        for epoch in range(start.epoch, args.epochs):
            resumed = start if epoch == start.epoch else Start(epoch)
            iterations = steps_per_epoch * args.accum_iter
            log = EpochLog(resumed, iterations, loss_guard, log_writer, args, stop.mean_of_processes)
            stats = train_one_epoch(model, objective, data_loader, state, epoch, log, args, saver.after_update)
            data_loader.share_bad_images()
            saver.check_finite(epoch, (epoch + 1) * steps_per_epoch)
            test = evaluate(test_images, model, device, args)
            metrics = test_metrics(test)
            by_epoch[epoch] = metrics["test/acc1"]
            # Log before saving: on resuming, a duplicate line can be dropped, but a missing one cannot be recovered.
            write_log(stats, metrics, epoch, log_writer, args, n_parameters=parameters)
            report_epoch(stats, metrics, epoch, (time.monotonic() - start_time) / (epoch + 1 - start.epoch), args)
            saver.after_epoch(epoch, (epoch + 1) * steps_per_epoch)
            gc.collect()
    logger.info("training time %s", datetime.timedelta(seconds=int(time.monotonic() - start_time)))
    if test is None:  # the run was interrupted after its last epoch
        test = evaluate(test_images, model, device, args, "test images")
    write_results(report, test, {name: getattr(args, name) for name in SETTINGS}, by_epoch)


def describe_run(parameters: int, data_loader: ImageLoader, start: Start, args: Namespace) -> None:
    logger.info("%.1fM trainable parameters, %s on %s", parameters / 1e6, args.precision, args.device)
    batch = f"{args.batch_size} x {args.accum_iter}"
    if get_world_size() > 1:
        batch += f" on each of {get_world_size()} processes"
    rates = f"learning rate {args.lr:.3g}, times {args.layer_decay:g} for each layer below the head"
    logger.info("batch %s, %d iterations per epoch, %s", batch, len(data_loader), rates)
    if start.epoch >= args.epochs:
        logger.info("all %d epochs are done: only the test is left", args.epochs)


def accuracy_by_epoch(args: Namespace) -> dict[int, float]:
    """Test Acc@1 of the epochs already trained, from the log."""
    folder = Path(args.output_dir)
    if not args.output_dir or not has_epochs(folder):
        return {}
    return {line["epoch"]: line["test_acc1"] for line in read_log(folder) if "test_acc1" in line}


def test_again(args: Namespace) -> None:
    """Evaluate a fine-tuned checkpoint with its own settings."""
    settle_shared_args(args)
    device = init_distributed_mode(args)
    path = ckpt.resolve_checkpoint(args.resume, "--resume")
    checkpoint = ckpt.load_checkpoint(path)
    shape = dict(model=args.model, input_size=args.input_size, in_chans=args.in_chans)
    classifier = classifier_of(checkpoint, str(path), **shape)
    trained = ckpt.settings_of(checkpoint)
    args.global_pool, args.seed = "fc_norm.weight" in classifier.state_dict(), trained.get("seed", args.seed)
    subject = subject_of(classifier, path, device, args)
    if trained.get("classes", subject.classes) != subject.classes:
        raise UserError(f"--resume {path} was trained on other classes than those of {subject.data_name}")
    if classifier.num_classes < len(subject.classes):
        outputs, classes = classifier.num_classes, len(subject.classes)
        raise UserError(f"--resume {path} has {outputs} classes, but {subject.data_name} has {classes}")
    report = Report(subject, PROTOCOL)
    test = evaluate(subject.datasets["val"], classifier, device, args, "test images")
    write_results(report, test, {name: trained[name] for name in SETTINGS if name in trained}, {})


def write_results(report: Report, test: FeatureSet, settings: dict, by_epoch: dict[int, float]) -> None:
    """The last epoch is the result; the best epoch on the test images is for reference only."""
    subject, seed = report.subject, report.subject.args.seed
    top5 = top_classes(test.features)[None]  # [1, N, 5]: one run
    found = summary(top5, test.labels)
    say_if_few_classes(test.features.shape[1])
    show_accuracies(f"fine-tuning on {subject.data_name}, last epoch, seed {seed}", found)
    report.accuracies(found, settings.get("epochs", subject.args.epochs))
    report.write(Outcome(test, top5, [seed], settings, len(subject.datasets["train"]), best_epoch(by_epoch)))


if __name__ == "__main__":
    run(main, get_args_parser(), timestamps=True)
