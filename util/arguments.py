"""Groups of flags that several programs share, with the same names, defaults and help texts. No torch here, so that
--help is quick."""

import importlib.util
import os
from argparse import Namespace, _ArgumentGroup
from pathlib import Path

from util.cli import ArgumentParser, UserError, count, count_or_zero, label, logger, non_negative, number, seed_number

DEFAULT_OUTPUT_DIR = "./output_dir"
DEFAULT_DATA_PATH = "data/imagenet"
DATA_SETS = ("folder", "cifar10", "cifar100", "stl10", "fashion_mnist", "shapes")
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
TRACKERS = ("tensorboard", "wandb", "trackio")


def add_data_arguments(parser: ArgumentParser, of_run: bool = False) -> None:
    """`of_run`: images to look at, by default a run's, which no data loader reads."""
    data = parser.add_argument_group("data set" if of_run else "data")
    data.add_argument("--data_set", default="folder", choices=DATA_SETS, help="shapes is built in and needs no files")
    data.add_argument(
        "--data_path",
        default=None if of_run else DEFAULT_DATA_PATH,
        help="folder with train/CLASS/*.jpg, or with images directly; or tables: hf:NAME or hf:NAME:CONFIG on the "
        "Hugging Face Hub, a folder of Parquet files or from save_to_disk, or WebDataset shards such as 'shards/*.tar'"
        + ("; default: the run's data" if of_run else ""),
    )
    data.add_argument("--image_column", help="image column of tables; default: the only one with images")
    data.add_argument("--label_column", help="label column of tables; default: the only one with classes")
    data.add_argument(
        "--cache_dir",
        help="folder for tables converted to Arrow (default: next to their files; hf: the library's cache) and for "
        "extracted features (default: features in --output_dir)",
    )
    data.add_argument("--download", action="store_true", help="let torchvision download the data set to --data_path")
    data.add_argument(
        "--file_list",
        metavar="FILE",
        help="list of the folder's images, one path per line: read instead of scanning the folder; written if missing",
    )
    data.add_argument(
        "--num_classes",
        type=count_or_zero,
        help="use this many randomly chosen class folders; 0: all; default: all, or the checkpoint's in evaluations",
    )
    data.add_argument("--class_seed", default=0, type=seed_number, help="seed for that choice")
    data.add_argument("--class_list", help="file with the name of one class folder per line")
    data.add_argument(
        "--split",
        type=number(above=0, below=1),
        help="train on this fraction of each class, and test on the rest, if there is no val or test",
    )
    data.add_argument("--split_seed", default=0, type=seed_number, help="seed for that split and for --max_images")
    data.add_argument("--max_images", type=count, help="use at most this many randomly chosen images of each split")
    data.add_argument("--shapes_images", default=10_000, type=count, help="training images of --data_set shapes")
    if of_run:
        return
    data.add_argument(
        "--max_bad_images", default=100, type=count_or_zero, help="unreadable images tolerated before the run fails"
    )
    data.add_argument(
        "--exact_decode",
        action="store_true",
        help="decode and resize training images exactly as upstream; slower, with the same crops",
    )
    data.add_argument(
        "--num_workers",
        default=10,
        type=count_or_zero,
        help="loader processes, at most one per CPU; does not affect results",
    )
    data.add_argument(
        "--pin_mem", action="store_true", help="page-locked batches, for faster copies to a GPU (default)"
    )
    data.add_argument("--no_pin_mem", action="store_false", dest="pin_mem", help="do not use page-locked batches")
    data.set_defaults(pin_mem=True)


def add_config_argument(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--config", metavar="FILE", help="YAML file of flags, as written by a run; the command line wins"
    )


def named_folder(data_path: str) -> Path:
    """The path that names the data: its folder, that of its shards, or its name on the Hub."""
    path = Path(data_path.removeprefix("hf:"))
    return path.parent if path.suffix in (".tar", ".parquet") else path


def add_statistics_arguments(group: _ArgumentGroup, default: str) -> None:
    text = "of the pixels, in [0, 1]; one number, or one per channel; default: " + default
    group.add_argument("--mean", type=number(at_least=0, at_most=1), nargs="+", help=f"mean {text}")
    group.add_argument("--std", type=number(above=0, at_most=1), nargs="+", help=f"standard deviation {text}")


def add_saving_arguments(group: _ArgumentGroup) -> None:
    """A training run's config file, trackers and checkpoints, and how it resumes."""
    add_config_argument(group)
    group.add_argument(
        "--track",
        nargs="*",
        default=["tensorboard"],
        choices=TRACKERS,
        metavar="NAME",
        help=f"trackers: any of {', '.join(TRACKERS)}; without a name: none",
    )
    group.add_argument(
        "--save_minutes",
        default=15,
        type=non_negative,
        help="minutes between updates of checkpoint-last.pth; 0: after every epoch",
    )
    group.add_argument(
        "--save_every", default=20, type=count, help="epochs between checkpoint-N.pth; the last is always saved"
    )
    group.add_argument("--keep", default=0, type=count_or_zero, help="number of checkpoint-N.pth to keep; 0: all")
    group.add_argument("--allow_changes", action="store_true", help="resume with different settings")
    group.add_argument(
        "--start_epoch", default=0, type=count_or_zero, help="first epoch, counted from 0; ignored on resuming"
    )


def add_machine_arguments(parser: ArgumentParser) -> _ArgumentGroup:
    machine = parser.add_argument_group("machine and precision")
    machine.add_argument("--device", help="cuda or cpu; default: cuda if there is a GPU")
    machine.add_argument(
        "--amp",
        default="auto",
        choices=["auto", "bf16", "fp16", "tf32", "off"],
        help="mixed precision; auto: bf16 if the GPU has it, fp16 on older GPUs, off on a CPU; off: float32; tf32: "
        "float32 with faster, less precise matrix products",
    )
    machine.add_argument(
        "--attention",
        default="auto",
        choices=["auto", "flash", "efficient", "cudnn", "math"],
        help="attention kernel on a GPU; auto: flash, or efficient with a mask, never cuDNN's",
    )
    machine.add_argument("--seed", default=0, type=seed_number, help="seed from which all randomness derives")
    return machine


def add_distributed_arguments(parser: ArgumentParser) -> None:
    dist = parser.add_argument_group("distributed (set by launchers)")
    dist.add_argument("--world_size", default=1, type=count, help="number of processes")
    dist.add_argument(
        "--local_rank", default=-1, type=number(int, at_least=-1), help="rank of the process on this machine"
    )
    dist.add_argument("--dist_on_itp", action="store_true", help="not supported: use torchrun")
    dist.add_argument("--dist_url", default="env://", help="rendezvous address of the processes")


def add_encoder_arguments(parser: ArgumentParser) -> None:
    """The encoder, and how it turns an image into a feature vector."""
    encoder = parser.add_argument_group("encoder")
    encoder.add_argument(
        "--finetune",
        "--checkpoint",
        default="",
        metavar="CHECKPOINT",
        help="MAE or CL-MAE checkpoint, a run's or transformers' folder, hf-hub:facebook/vit-mae-base, or "
        "timm/vit_base_patch16_224.mae; '': a random-weight baseline",
    )
    encoder.add_argument("--model", help="such as vit_base_patch16; default: the checkpoint's")
    encoder.add_argument(
        "--input_size", type=count, nargs="+", help="side, or height and width, in pixels; default: the checkpoint's"
    )
    encoder.add_argument("--in_chans", type=count, choices=CHANNELS, help="channels; default: the checkpoint's")
    add_statistics_arguments(encoder, "the checkpoint's")
    encoder.add_argument("--global_pool", action="store_true", help="feature: mean of the patch tokens, normalised")
    encoder.add_argument("--cls_token", action="store_false", dest="global_pool", help="feature: the [CLS] token")
    encoder.set_defaults(global_pool=False)


def add_result_arguments(parser: ArgumentParser) -> None:
    """Where an evaluation writes its results and the features it extracts."""
    out = parser.add_argument_group("output and cache")
    add_config_argument(out)
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="results.jsonl, predictions; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    out.add_argument("--data_name", type=label, help="name of the data in tables; default: its folder or set")
    out.add_argument("--no_cache", action="store_true", help="neither read nor write cached features")
    out.add_argument(
        "--verify_cache",
        action="store_true",
        help="identify images by content, not by size and modification time; reads every file",
    )


def add_evaluation_arguments(parser: ArgumentParser) -> None:
    """The flags shared by all evaluations of a frozen encoder."""
    add_encoder_arguments(parser)
    add_data_arguments(parser)
    add_result_arguments(parser)
    add_machine_arguments(parser)
    add_distributed_arguments(parser)


def add_image_arguments(parser: ArgumentParser, number: str) -> None:
    """Which images to look at: files, or a data set."""
    images = parser.add_argument_group("images (or a data set, below)")
    images.add_argument("--images", nargs="+", default=[], help="image files, or folders of images")
    images.add_argument("--num_images", type=count, help=f"number of images; default: {number}")
    add_data_arguments(parser, of_run=True)


def name_of_data(args: Namespace) -> str:
    """The data's name in results, unless --data_name is given."""
    folder = args.data_set == "folder"
    return os.path.basename(os.path.realpath(named_folder(args.data_path))) if folder else args.data_set


def refuse_unused_data_flags(args: Namespace) -> None:
    """Reject flags without effect: they would be recorded as if they had one."""
    parser = ArgumentParser()
    add_data_arguments(parser)
    of_folders = ("file_list", "num_classes", "class_list", "split", "image_column", "label_column")
    unused = {"folder": ("download",), "shapes": ("data_path", "download", *of_folders)}.get(args.data_set, of_folders)
    conditions = [
        (True, f"with --data_set {args.data_set}", unused),
        (not args.num_classes, "without --num_classes", ("class_seed",)),
        (not (args.split or args.max_images), "without --split or --max_images", ("split_seed",)),
        (args.class_list, "with --class_list", ("num_classes",)),
    ]
    for holds, when, names in conditions:
        given = [name for name in names if getattr(args, name) not in (parser.get_default(name), None, 0)]
        if holds and given:
            raise UserError(f"--{given[0]} has no effect {when}; leave it out")


def check_epochs(args: Namespace) -> None:
    if args.start_epoch >= args.epochs:
        raise UserError(f"--start_epoch {args.start_epoch} leaves none of the {args.epochs} --epochs to train")
    if args.warmup_epochs >= args.epochs and not getattr(args, "eval", False):
        logger.warning("--warmup_epochs %d fills the whole run of %d epochs", args.warmup_epochs, args.epochs)


def settle_shared_args(args: Namespace) -> None:
    """Reject invalid combinations of flags, and fill in what follows from other flags."""
    refuse_unused_data_flags(args)
    if args.input_size is not None:
        sides = [args.input_size] if isinstance(args.input_size, int) else list(args.input_size)
        if len(sides) > 2:
            raise UserError(f"--input_size takes a side, or height and width, in pixels; not {sides}")
        args.input_size = [sides[0], sides[-1]]
    if args.dist_on_itp or (args.world_size > 1 and "WORLD_SIZE" not in os.environ):
        raise UserError("--dist_on_itp and --world_size do not start processes; use torchrun")
    for name in getattr(args, "track", []):
        if (
            spec := importlib.util.find_spec(name)
        ) is None or spec.origin is None:  # a folder of that name has no origin
            raise UserError(f"--track {name} needs a package that is not installed: pip install {name}")
    if args.log_dir == DEFAULT_OUTPUT_DIR:
        args.log_dir = args.output_dir
