"""Flags that several programs share, as groups: the same names, defaults and help texts everywhere."""

import os
from argparse import Namespace, _ArgumentGroup

import torch

from util.cli import ArgumentParser, UserError
from util.data.decode import MODES
from util.data.sources import DATA_SETS

DEFAULT_OUTPUT_DIR = "./output_dir"


def add_data_arguments(parser: ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data_set", default="folder", choices=DATA_SETS, help="shapes is built in and needs no files")
    data.add_argument("--data_path", default=None, type=str, help="folder with train/CLASS/*.jpg, or images directly")
    data.add_argument("--download", action="store_true", help="let torchvision fetch the data set to --data_path")
    data.add_argument("--num_classes", default=None, type=int, help="use so many randomly chosen class folders")
    data.add_argument("--class_seed", default=0, type=int, help="seed of that choice")
    data.add_argument("--class_list", default=None, type=str, help="file with a class folder's name per line")
    data.add_argument(
        "--split", default=None, type=float, help="train on this share of each class, where there is no val or test"
    )
    data.add_argument("--split_seed", default=0, type=int, help="seed of that split, and of --max_images")
    data.add_argument(
        "--max_images",
        default=None,
        type=int,
        help="use so many randomly chosen images of each split, for quick trials",
    )
    data.add_argument("--max_bad_images", default=100, type=int, help="unreadable images met before the run fails")
    data.add_argument(
        "--exact_decode",
        action="store_true",
        help="decode and resize training images as upstream, to the bit; slower, with the same crops",
    )
    data.add_argument("--shapes_images", default=10_000, type=int, help="training images of --data_set shapes")
    data.add_argument("--num_workers", default=10, type=int, help="loader processes; their number changes no result")
    data.add_argument("--pin_mem", action="store_true", help="page-locked batches, for faster copies to a GPU")
    data.add_argument("--no_pin_mem", action="store_false", dest="pin_mem", help="switch that off")
    data.set_defaults(pin_mem=True)


def add_saving_arguments(group: _ArgumentGroup) -> None:
    """When a training run is saved, and how it goes on."""
    group.add_argument(
        "--save_minutes", default=15, type=float, help="minutes between updates of checkpoint-last.pth; 0: epochs only"
    )
    group.add_argument("--save_every", default=20, type=int, help="epochs between checkpoint-N.pth; the last is always")
    group.add_argument("--keep", default=0, type=int, help="keep so many of the newest checkpoint-N.pth; 0: all")
    group.add_argument("--allow_changes", action="store_true", help="continue with other settings than before")
    group.add_argument(
        "--start_epoch", default=0, type=int, help="number of the first epoch; a resumed run knows its own"
    )


def add_machine_arguments(parser: ArgumentParser) -> _ArgumentGroup:
    machine = parser.add_argument_group("machine and precision")
    machine.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda if there is one, else cpu"
    )
    machine.add_argument(
        "--amp",
        default="auto",
        choices=["auto", "bf16", "fp16", "off"],
        help="mixed precision; auto: bf16 where the GPU has it, fp16 on older GPUs, off on a CPU",
    )
    machine.add_argument("--seed", default=0, type=int, help="all randomness derives from it")
    return machine


def add_distributed_arguments(parser: ArgumentParser) -> None:
    dist = parser.add_argument_group("distributed (set by launchers)")
    dist.add_argument("--world_size", default=1, type=int, help="number of processes")
    dist.add_argument("--local_rank", default=-1, type=int, help="process number on this machine")
    dist.add_argument("--dist_on_itp", action="store_true", help="not supported: use torchrun")
    dist.add_argument("--dist_url", default="env://", help="where processes meet")


def add_encoder_arguments(parser: ArgumentParser) -> None:
    """What is judged: a frozen encoder, and how an image becomes one feature vector."""
    encoder = parser.add_argument_group("encoder")
    encoder.add_argument(
        "--finetune",
        "--checkpoint",
        default="",
        metavar="CHECKPOINT",
        help="checkpoint of MAE or CL-MAE, or a run's folder; '': random weights, the floor",
    )
    encoder.add_argument("--model", default=None, type=str, help="such as vit_base_patch16; default: the checkpoint's")
    encoder.add_argument(
        "--input_size", default=None, type=int, nargs="+", help="side, or height and width; default: the checkpoint's"
    )
    encoder.add_argument("--in_chans", default=None, type=int, help="channels; default: the checkpoint's")
    encoder.add_argument("--global_pool", action="store_true", help="feature: mean of the patch tokens, normalised")
    encoder.add_argument("--cls_token", action="store_false", dest="global_pool", help="feature: the [CLS] token")
    encoder.set_defaults(global_pool=False)


def add_result_arguments(parser: ArgumentParser) -> None:
    """Where an evaluation leaves its results, and the features it extracts."""
    out = parser.add_argument_group("output and cache")
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="results.jsonl, predictions; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    out.add_argument("--data_name", default=None, help="the data's name in tables; default: its folder or set")
    out.add_argument("--cache_dir", default=None, help="extracted features; default: features below --output_dir")
    out.add_argument("--no_cache", action="store_true", help="neither read nor write extracted features")


def check_at_least(args: Namespace, minimum: float, *names: str) -> None:
    for name in names:
        if getattr(args, name) < minimum:
            demand = "must not be negative" if minimum == 0 else f"must be at least {minimum}"
            raise UserError(f"--{name} {getattr(args, name)} {demand}")


def check_data_args(args: Namespace) -> None:
    if args.split is not None and not 0 < args.split < 1:
        raise UserError(f"--split {args.split}: the share of training images lies between 0 and 1")
    if args.max_images is not None:
        check_at_least(args, 1, "max_images")
    check_at_least(args, 1, "shapes_images")
    check_at_least(args, 0, "max_bad_images", "num_workers")


def check_shared_args(args: Namespace) -> None:
    """Refuse impossible values of the flags above by name, and settle what follows from other flags."""
    if args.input_size is not None:
        sides = [args.input_size] if isinstance(args.input_size, int) else list(args.input_size)
        if len(sides) > 2 or min(sides) < 1:
            raise UserError(f"--input_size takes a side, or height and width, in pixels; not {sides}")
        args.input_size = [sides[0], sides[-1]]
    if args.in_chans is not None and args.in_chans not in MODES:
        raise UserError(f"--in_chans {args.in_chans}: image files have 1 (grey), 3 (RGB) or 4 (RGBA) channels")
    if args.dist_on_itp or (args.world_size > 1 and "WORLD_SIZE" not in os.environ):
        raise UserError("--dist_on_itp and --world_size start nothing; use torchrun for several processes")
    check_data_args(args)
    if args.log_dir == DEFAULT_OUTPUT_DIR:
        args.log_dir = args.output_dir
