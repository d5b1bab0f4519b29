"""Flags that several programs share, as groups: the same names, defaults and help texts everywhere. No torch here, so
that --help is quick."""

import importlib.util
import os
from argparse import Namespace, _ArgumentGroup
from pathlib import Path

from util.cli import ArgumentParser, UserError, count, count_or_zero, label, non_negative, number, seed_number

DEFAULT_OUTPUT_DIR = "./output_dir"
DEFAULT_DATA_PATH = "data/imagenet"
DATA_SETS = ("folder", "cifar10", "cifar100", "stl10", "fashion_mnist", "shapes")
CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
TRACKERS = ("tensorboard", "wandb", "trackio")


def add_data_arguments(parser: ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--data_set", default="folder", choices=DATA_SETS, help="shapes is built in and needs no files")
    data.add_argument(
        "--data_path",
        default=DEFAULT_DATA_PATH,
        help="folder with train/CLASS/*.jpg, or images directly; or tables: hf:NAME or hf:NAME:CONFIG on the Hugging "
        "Face Hub, a folder of Parquet files or of save_to_disk, or WebDataset shards such as 'shards/*.tar'",
    )
    data.add_argument("--image_column", help="of tables; default: the only one with images")
    data.add_argument("--label_column", help="of tables; default: the only one with classes")
    data.add_argument(
        "--cache_dir",
        help="tables converted to Arrow, by default beside their files (hf: the library's place), and features "
        "extracted in evaluations, by default features below --output_dir",
    )
    data.add_argument("--download", action="store_true", help="let torchvision fetch the data set to --data_path")
    data.add_argument(
        "--file_list",
        metavar="FILE",
        help="the folder's images, a path per line: read instead of scanning the folder; written if it does not exist",
    )
    data.add_argument(
        "--num_classes",
        type=count_or_zero,
        help="use this many randomly chosen class folders; 0: all; default: all, in evaluations the checkpoint's",
    )
    data.add_argument("--class_seed", default=0, type=seed_number, help="seed of that choice")
    data.add_argument("--class_list", help="file with a class folder's name per line")
    data.add_argument(
        "--split",
        type=number(above=0, below=1),
        help="train on this share of each class, where there is no val or test",
    )
    data.add_argument("--split_seed", default=0, type=seed_number, help="seed of that split, and of --max_images")
    data.add_argument("--max_images", type=count, help="use this many randomly chosen images of each split")
    data.add_argument(
        "--max_bad_images", default=100, type=count_or_zero, help="unreadable images tolerated before the run fails"
    )
    data.add_argument(
        "--exact_decode",
        action="store_true",
        help="decode and resize training images as upstream, to the bit; slower, with the same crops",
    )
    data.add_argument("--shapes_images", default=10_000, type=count, help="training images of --data_set shapes")
    data.add_argument(
        "--num_workers",
        default=10,
        type=count_or_zero,
        help="loader processes, at most one per CPU; their number changes no result",
    )
    data.add_argument("--pin_mem", action="store_true", help="page-locked batches, for faster copies to a GPU; on")
    data.add_argument("--no_pin_mem", action="store_false", dest="pin_mem", help="turn that off")
    data.set_defaults(pin_mem=True)


def add_config_argument(group: _ArgumentGroup) -> None:
    group.add_argument("--config", metavar="FILE", help="YAML file of flags, as a run writes it; given flags win")


def named_folder(data_path: str) -> Path:
    """What names the data: the folder, that of its shards, or the hub's name."""
    path = Path(data_path.removeprefix("hf:"))
    return path.parent if path.suffix in (".tar", ".parquet") else path


def add_statistics_arguments(group: _ArgumentGroup, default: str) -> None:
    text = "of the pixels, which go from 0 to 1; a number, or one for each channel; default: " + default
    group.add_argument("--mean", type=number(at_least=0, at_most=1), nargs="+", help=f"mean {text}")
    group.add_argument("--std", type=number(above=0, at_most=1), nargs="+", help=f"standard deviation {text}")


def add_saving_arguments(group: _ArgumentGroup) -> None:
    """What a training run reads its settings from, where it is tracked, when it is saved, and how it resumes."""
    add_config_argument(group)
    group.add_argument(
        "--track",
        nargs="*",
        default=["tensorboard"],
        choices=TRACKERS,
        metavar="NAME",
        help=f"any of {', '.join(TRACKERS)}; without a name: none",
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
    group.add_argument("--allow_changes", action="store_true", help="resume with other settings than before")
    group.add_argument(
        "--start_epoch", default=0, type=count_or_zero, help="first epoch, from 0; a resumed run knows its own"
    )


def add_machine_arguments(parser: ArgumentParser) -> _ArgumentGroup:
    machine = parser.add_argument_group("machine and precision")
    machine.add_argument("--device", help="cuda or cpu; default: cuda where there is a GPU")
    machine.add_argument(
        "--amp",
        default="auto",
        choices=["auto", "bf16", "fp16", "tf32", "off"],
        help="mixed precision; auto: bf16 where the GPU has it, fp16 on older GPUs, off on a CPU; off: float32; tf32: "
        "float32 with faster, coarser matrix products",
    )
    machine.add_argument(
        "--attention",
        default="auto",
        choices=["auto", "flash", "efficient", "cudnn", "math"],
        help="attention kernel on a GPU; auto: flash, or efficient with a mask, but not cuDNN's",
    )
    machine.add_argument("--seed", default=0, type=seed_number, help="all randomness derives from it")
    return machine


def add_distributed_arguments(parser: ArgumentParser) -> None:
    dist = parser.add_argument_group("distributed (set by launchers)")
    dist.add_argument("--world_size", default=1, type=count, help="number of processes")
    dist.add_argument("--local_rank", default=-1, type=number(int, at_least=-1), help="process number on this machine")
    dist.add_argument("--dist_on_itp", action="store_true", help="not supported: use torchrun")
    dist.add_argument("--dist_url", default="env://", help="where processes meet")


def add_encoder_arguments(parser: ArgumentParser) -> None:
    """What is evaluated: an encoder, and how an image becomes one feature vector."""
    encoder = parser.add_argument_group("encoder")
    encoder.add_argument(
        "--finetune",
        "--checkpoint",
        default="",
        metavar="CHECKPOINT",
        help="checkpoint of MAE or CL-MAE, a run's or transformers' folder, hf-hub:facebook/vit-mae-base, or "
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
    """Where an evaluation leaves its results, and the features it extracts."""
    out = parser.add_argument_group("output and cache")
    add_config_argument(out)
    out.add_argument("--output_dir", default=DEFAULT_OUTPUT_DIR, help="results.jsonl, predictions; '' writes nothing")
    out.add_argument("--log_dir", default=DEFAULT_OUTPUT_DIR, help="TensorBoard; follows --output_dir unless given")
    out.add_argument("--data_name", type=label, help="the data's name in tables; default: its folder or set")
    out.add_argument("--no_cache", action="store_true", help="neither read nor write extracted features")
    out.add_argument(
        "--verify_cache",
        action="store_true",
        help="recognise images by their content, not by size and time of change; reads every file",
    )


def add_evaluation_arguments(parser: ArgumentParser) -> None:
    """All that an evaluation of a frozen encoder takes beside its own flags."""
    add_encoder_arguments(parser)
    add_data_arguments(parser)
    add_result_arguments(parser)
    add_machine_arguments(parser)
    add_distributed_arguments(parser)


def add_image_arguments(parser: ArgumentParser, number: str) -> None:
    """Which images to look at: files, or a data set."""
    images = parser.add_argument_group("images (or a data set, below)")
    images.add_argument("--images", nargs="+", default=[], help="image files, or folders with some")
    images.add_argument("--num_images", type=count, help=f"default: {number}")
    add_data_arguments(parser)


def name_of_data(args: Namespace) -> str:
    """In results, unless --data_name says otherwise."""
    folder = args.data_set == "folder"
    return os.path.basename(os.path.realpath(named_folder(args.data_path))) if folder else args.data_set


def refuse_unused_data_flags(args: Namespace) -> None:
    """What has no effect would be recorded as if it had one."""
    parser = ArgumentParser()
    add_data_arguments(parser)
    of_folders = ("file_list", "num_classes", "class_list", "split", "image_column", "label_column")
    unused = {"folder": ("download",), "shapes": ("data_path", "download", *of_folders)}.get(args.data_set, of_folders)
    conditions = [
        (True, f"with --data_set {args.data_set}", unused),
        (not args.num_classes, "without --num_classes", ("class_seed",)),
        (not (args.split or args.max_images), "without --split or --max_images", ("split_seed",)),
        (args.class_list, "beside --class_list", ("num_classes",)),
    ]
    for holds, when, names in conditions:
        given = [name for name in names if getattr(args, name) not in (parser.get_default(name), 0)]
        if holds and given:
            raise UserError(f"--{given[0]} has no effect {when}; leave it out")


def settle_shared_args(args: Namespace) -> None:
    """Refuse what no single flag can tell, and fill in what follows from other flags."""
    refuse_unused_data_flags(args)
    if args.input_size is not None:
        sides = [args.input_size] if isinstance(args.input_size, int) else list(args.input_size)
        if len(sides) > 2:
            raise UserError(f"--input_size takes a side, or height and width, in pixels; not {sides}")
        args.input_size = [sides[0], sides[-1]]
    if args.dist_on_itp or (args.world_size > 1 and "WORLD_SIZE" not in os.environ):
        raise UserError("--dist_on_itp and --world_size start nothing; use torchrun for several processes")
    for name in getattr(args, "track", []):
        if (spec := importlib.util.find_spec(name)) is None or spec.origin is None:  # a folder of that name has none
            raise UserError(f"--track {name} needs a package that is not installed: pip install {name}")
    if args.log_dir == DEFAULT_OUTPUT_DIR:
        args.log_dir = args.output_dir
