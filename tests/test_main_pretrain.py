"""The program as a user runs it: flags, files, resuming, and what it says to bad input."""

import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import main_pretrain
import util.checkpoint
from main_pretrain import get_args_parser
from models_mae import mae_vit_micro_patch4
from util.misc import STOP_SIGNALS, Interrupted, TrainingDiverged
from util.resume import differences
from util.saver import Saver

ROOT = Path(__file__).parent.parent
SMALL = (
    *("--model", "mae_vit_micro_patch4", "--input_size", "16", "--norm_pix_loss", "--data_set", "shapes"),
    *("--shapes_images", "48", "--batch_size", "16", "--epochs", "2", "--warmup_epochs", "1", "--num_workers", "0"),
    *("--cmm_depth", "1", "--device", "cpu"),
)


@pytest.fixture
def cli(program):
    return partial(program, main_pretrain)


def checkpoint(folder, epoch=1):
    return torch.load(folder / f"checkpoint-{epoch}.pth", weights_only=True)


def log_lines(folder):
    return [json.loads(line) for line in (folder / "log.txt").read_text().splitlines()]


def assert_same_training(a, b):
    """Weights and optimizer states, bit for bit."""
    for part in ("model", "cmm"):
        assert a[part].keys() == b[part].keys()
        assert all(torch.equal(a[part][key], b[part][key]) for key in a[part])
    for part in ("optimizer", "optimizer_cmm"):
        for index, state in a[part]["state"].items():
            assert all(torch.equal(value, b[part]["state"][index][name]) for name, value in state.items())


def test_every_upstream_flag_with_its_default(upstream_flags):
    actions = {flag: action for action in get_args_parser()._actions for flag in action.option_strings}
    for flag, expected in upstream_flags["main_pretrain"].items():
        if flag == "set_defaults":
            continue
        action = actions[flag]
        assert action.dest == expected["dest"]
        assert type(action).__name__ == expected["action"]
        if flag not in ("--device", "--data_path", "--pin_mem", "--no_pin_mem"):
            assert action.default == expected["default"], flag
    args = get_args_parser().parse_args([])
    assert args.pin_mem
    assert args.data_path is None
    assert args.device == ("cuda" if torch.cuda.is_available() else "cpu")
    new = {
        **dict(masking="curriculum", select="threshold", lambda_gauss=10, lambda_kl=1, lambda_div=2, cmm_depth=5),
        **dict(lambda_cl_end=-0.1, no_curriculum=False, cmm_blr=None, cmm_schedule="constant", amp="auto"),
        **dict(clip_grad=None, compile=False, in_chans=3, data_set="folder", max_bad_images=100),
    }
    assert {name: getattr(args, name) for name in new} == new


def test_every_flag_has_a_help_text():
    assert all(action.help for action in get_args_parser()._actions)


def test_a_run_leaves_checkpoints_a_log_and_tensorboard(cli, tmp_path):
    code, out, err = cli(*SMALL, "--output_dir", tmp_path, "--save_every", 1, "--knn_every", 2)
    assert (code, err) == (0, "")
    assert "epoch 1 done" in out

    saved = checkpoint(tmp_path)
    parts = {"model", "optimizer", "scaler", "cmm", "optimizer_cmm", "scaler_cmm", "epoch", "step", "log", "args"}
    assert saved.keys() == parts
    assert (saved["epoch"], saved["step"], saved["args"]["mask_ratio"]) == (1, 6, 0.75)
    assert (tmp_path / "checkpoint-0.pth").exists()
    mae_vit_micro_patch4(img_size=16).load_state_dict(saved["model"])

    lines = log_lines(tmp_path)
    assert [line["epoch"] for line in lines] == [0, 1]
    losses = {"loss", "cmm_loss", "cmm_curriculum", "cmm_gauss", "cmm_kl", "cmm_div"}
    health = {
        "mask_visible",
        "mask_visible_std",
        "mask_distinct",
        "mask_hamming",
        "mask_decisive",
        "mask_removed_error",
    }
    settings = {"lr", "cmm_lr", "cmm_lambda_cl"}
    assert {f"train_{name}" for name in losses | health | settings} <= lines[0].keys()
    assert {"mask_error_vs_random", "knn_acc1", "knn_acc5"} <= lines[1].keys()
    assert (tmp_path / "classes.txt").read_text().split()[:2] == ["disc", "ring"]

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    expected = {name.replace("_", "/", 1) for name in losses | health | settings if "_" in name}
    assert {"train_loss", "lr", "images_per_second", "knn/acc1", "mask/error_vs_random", *expected} <= scalars
    assert [event.step for event in events.Scalars("train_loss")] == [1000, 2000]
    (picture,) = events.Tags()["images"]
    assert [event.step for event in events.Images(picture)] == [1000, 2000]


def test_same_seed_gives_the_same_bits_whatever_the_workers(cli, tmp_path):
    for name, workers in (("once", 0), ("again", 0), ("workers", 2)):
        assert cli(*SMALL, "--output_dir", tmp_path / name, "--num_workers", workers)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path / "seed", "--seed", 1)[0] == 0
    first = checkpoint(tmp_path / "once")
    for name in ("again", "workers"):
        assert_same_training(first, checkpoint(tmp_path / name))
        assert log_lines(tmp_path / name) == log_lines(tmp_path / "once")
    with pytest.raises(AssertionError):
        assert_same_training(first, checkpoint(tmp_path / "seed"))


def test_resumed_run_equals_an_uninterrupted_one(cli, tmp_path, monkeypatch):
    flags = (*SMALL, "--epochs", 3, "--save_every", 1, "--knn_every", 1)
    assert cli(*flags, "--output_dir", tmp_path / "whole")[0] == 0

    def stop_before_the_last_epoch(*args, **kwargs):
        if args[4] == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = main_pretrain.train_one_epoch
    with monkeypatch.context() as patch:
        patch.setattr(main_pretrain, "train_one_epoch", stop_before_the_last_epoch)
        assert cli(*flags, "--output_dir", tmp_path / "parts")[0] == 130
    code, _, err = cli(*flags, "--output_dir", tmp_path / "parts")
    assert code == 2
    assert "add --resume auto" in err
    assert cli(*flags, "--output_dir", tmp_path / "parts", "--resume", "auto")[0] == 0
    assert_same_training(checkpoint(tmp_path / "whole", 2), checkpoint(tmp_path / "parts", 2))
    assert log_lines(tmp_path / "parts") == log_lines(tmp_path / "whole")
    file = tmp_path / "whole" / "checkpoint-1.pth"
    assert cli(*flags, "--output_dir", tmp_path / "file", "--resume", file)[0] == 0
    assert_same_training(checkpoint(tmp_path / "whole", 2), checkpoint(tmp_path / "file", 2))


def test_checkpoints_in_time_and_in_number(cli, tmp_path):
    flags = (*SMALL, "--epochs", 5, "--save_every", 1, "--keep", 2, "--save_minutes", 1e-6)
    seen = []

    def spy(path, state, original=util.checkpoint.save_checkpoint):
        seen.append((path.name, state["epoch"], state["step"]))
        original(path, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util.checkpoint, "save_checkpoint", spy)
        assert cli(*flags, "--output_dir", tmp_path)[0] == 0
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-3.pth", "checkpoint-4.pth", "checkpoint-last.pth"]
    # Three updates per epoch, each saved. A finished epoch counts as such only when its end is saved.
    assert seen[:4] == [
        (f"checkpoint-{name}.pth", e, s)
        for name, e, s in (("last", -1, 1), ("last", -1, 2), ("last", -1, 3), (0, 0, 3))
    ]
    assert checkpoint(tmp_path, "last")["step"] == 15


def test_resuming_within_an_epoch(cli, tmp_path, monkeypatch):
    """A signal at every update of a run, in turn."""
    flags = (*SMALL, "--accum_iter", 2, "--batch_size", 4, "--save_every", 1)
    assert cli(*flags, "--output_dir", tmp_path / "whole")[0] == 0
    for stop_at in range(1, 12):
        folder = tmp_path / str(stop_at)

        number = STOP_SIGNALS[stop_at % 3]

        def stop(saver, step, log, original=Saver.after_update, stop_at=stop_at, number=number):
            if step == stop_at:
                os.kill(os.getpid(), number)
            original(saver, step, log)

        with monkeypatch.context() as patch:
            patch.setattr(Saver, "after_update", stop)
            code, _, err = cli(*flags, "--output_dir", folder)
        assert code == Interrupted.exit_code
        assert f"stopped by {number.name} after step {stop_at}" in err
        assert cli(*flags, "--output_dir", folder, "--resume", "auto", "--num_workers", stop_at % 2)[0] == 0
        assert_same_training(checkpoint(tmp_path / "whole"), checkpoint(folder))
        assert log_lines(folder) == log_lines(tmp_path / "whole")


def test_resuming_with_other_settings_is_refused_with_the_list(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    changes = ("--lambda_kl", 3, "--shapes_images", 64, "--batch_size", 8, "--resume", "auto")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *changes)
    assert code == 2
    for difference in (
        "--epochs 1, now 2",
        "--lambda_kl 1.0, now 3.0",
        "--shapes_images 48, now 64",
        "images per iteration 16, now 8",
        "list of images 48 images, ",
    ):
        assert difference in err
    assert "--model" not in err
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *changes, "--allow_changes")
    assert code == 0
    assert "WARNING: going on from" in err
    assert "--lambda_kl 1.0, now 3.0" in err
    assert checkpoint(tmp_path, "last")["args"]["lambda_kl"] == 3


def test_what_may_change_between_parts_of_a_run(cli, tmp_path, one_class):
    """Where data and output lie, how the work is shared out, and how often something is saved or shown."""
    flags = (*SMALL, "--data_set", "folder", "--batch_size", 1, "--num_workers", 0)
    assert cli(*flags, "--data_path", one_class, "--output_dir", tmp_path / "a")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    moved = one_class.rename(tmp_path / "elsewhere" / "data")
    also = ("--output_dir", tmp_path / "b", "--save_every", 7, "--vis_every", 0, "--num_workers", 1)
    code, _, err = cli(*flags, "--data_path", moved, *also, "--resume", tmp_path / "a" / "checkpoint-1.pth")
    assert (code, err) == (0, "")
    (moved / "train" / "only" / "a.jpg").rename(moved / "train" / "only" / "b.jpg")
    code, _, err = cli(*flags, "--data_path", moved, *also, "--resume", tmp_path / "a" / "checkpoint-1.pth")
    assert code == 2
    assert "list of images 1 images, " in err
    defaults = vars(get_args_parser().parse_args([]))
    alone = defaults | {"batch_size": 8, "world_size": 1}
    assert differences(alone, defaults | {"batch_size": 4, "world_size": 2}) == []
    assert differences(alone, defaults | {"batch_size": 8, "world_size": 2}) == ["images per iteration 8, now 16"]


def test_going_on_from_an_older_file_beside_later_ones_is_refused(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert cli(*flags)[0] == 0
    code, _, err = cli(*flags, "--resume", tmp_path / "checkpoint-0.pth")
    assert code == 2
    assert "holds checkpoint-1.pth, which is later than --resume" in err


def test_resume_auto_does_not_start_over_where_no_checkpoint_can_be_read(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path)
    assert cli(*flags)[0] == 0
    for path in tmp_path.glob("checkpoint-*.pth"):
        path.write_bytes(b"PK")
    code, _, err = cli(*flags, "--resume", "auto")
    assert code == 2
    assert f"none of the checkpoints in {tmp_path} can be read" in err
    assert len(log_lines(tmp_path)) == 2


def test_changes_that_are_allowed_take_effect(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto", "--allow_changes", "--weight_decay", 0.9)[0] == 0
    assert {group["weight_decay"] for group in checkpoint(tmp_path)["optimizer"]["param_groups"]} == {0, 0.9}


def test_resume_auto_passes_over_a_damaged_checkpoint(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert cli(*flags)[0] == 0
    whole = checkpoint(tmp_path)
    for name in ("last", "1"):
        file = tmp_path / f"checkpoint-{name}.pth"
        file.write_bytes(file.read_bytes()[:5000])
    code, out, err = cli(*flags, "--resume", "auto")
    assert code == 0
    assert "checkpoint-last.pth is damaged" in err
    assert "checkpoint-1.pth is damaged" in err
    assert "resuming from" in out
    assert "checkpoint-0.pth: epoch 1, after 0 of its updates" in out
    assert_same_training(whole, checkpoint(tmp_path))


@pytest.fixture
def full_disk(monkeypatch):
    """A set of names: checkpoints of these the system refuses to write in full."""
    names = set()

    def save(path, state, original=util.checkpoint.save_checkpoint):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if path.name in names:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            original(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(util.checkpoint, "save_checkpoint", save)
    return names


def test_full_disk_is_reported_and_the_run_goes_on(cli, tmp_path, full_disk):
    full_disk.add("checkpoint-0.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert code == 0
    assert "checkpoint-0.pth (File too large)" in err
    assert "training goes on" in err
    assert sorted(path.name for path in tmp_path.glob("*.p*")) == ["checkpoint-1.pth", "checkpoint-last.pth"]
    assert checkpoint(tmp_path)["epoch"] == checkpoint(tmp_path, "last")["epoch"] == 1


def test_full_disk_at_the_end_keeps_the_checkpoint_before(cli, tmp_path, full_disk):
    full_disk.add("checkpoint-1.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path)
    assert code == 2
    assert "cannot write the checkpoint" in err
    assert "(File too large); what was there before is untouched" in err
    assert checkpoint(tmp_path, "last")["epoch"] == 0
    full_disk.clear()
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto")[0] == 0, "when there is room again"
    assert checkpoint(tmp_path)["epoch"] == 1


def test_tensorboard_on_a_full_disk_does_not_end_the_run(cli, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    code, _, err = cli(*SMALL, "--output_dir", tmp_path)
    assert code == 0
    assert err.count("(No space left on device); they end here") == 1


def test_log_that_cannot_be_written_ends_the_run_with_a_sentence(cli, tmp_path, monkeypatch):
    (tmp_path / "full").symlink_to("/dev/full")
    original = main_pretrain.append_line
    monkeypatch.setattr(main_pretrain, "append_line", lambda _, line: original(tmp_path / "full", line))
    code, _, err = cli(*SMALL, "--output_dir", tmp_path)
    assert code == 2
    assert "full (No space left on device); --resume auto goes on when that is mended" in err


def test_architecture_of_another_checkpoint_names_the_first_mismatch(cli, tmp_path):
    torch.save({"model": mae_vit_micro_patch4(img_size=32).state_dict()}, tmp_path / "other.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "out", "--init", tmp_path / "other.pth")
    assert code == 2
    assert "other.pth has pos_embed of shape (1, 65, 64), but this model needs (1, 17, 64)" in err


def test_tensorboard_keeps_what_was_shown_before_resuming(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto", "--allow_changes")[0] == 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1000, 2000]


def test_log_line_cut_short_by_a_kill_is_dropped_and_said(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path)
    assert cli(*flags, "--epochs", 1)[0] == 0
    with open(tmp_path / "log.txt", "a") as file:
        file.write('{"train_loss": 0.1')
    code, _, err = cli(*flags, "--resume", "auto", "--allow_changes")
    assert code == 0
    assert "log.txt: dropped 1 lines" in err
    assert [line["epoch"] for line in log_lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("flag", ["--resume", "--init"])
def test_weights_alone_start_a_new_run(cli, tmp_path, flag):
    """A model as upstream publishes it: no optimizer, no epoch; and an encoder without decoder."""
    model = mae_vit_micro_patch4(img_size=16)
    torch.save({"model": model.state_dict()}, tmp_path / "mae.pth")
    code, out, _ = cli(*SMALL, "--output_dir", tmp_path / "out", flag, tmp_path / "mae.pth", "--lr", 0)
    assert code == 0
    assert "mae.pth; training starts at its beginning" in out
    trained = checkpoint(tmp_path / "out")["model"]
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())

    encoder = {key: v for key, v in model.state_dict().items() if "decoder" not in key and key != "mask_token"}
    torch.save({"model": encoder}, tmp_path / "enc.pth")
    code, out, _ = cli(*SMALL, "--output_dir", tmp_path / "enc", flag, tmp_path / "enc.pth", "--lr", 0)
    assert code == 0
    assert "enc.pth has no decoder: that is drawn anew" in out
    trained = checkpoint(tmp_path / "enc")["model"]
    assert all(torch.equal(value, trained[key]) for key, value in encoder.items())

    torch.save({"model": {**encoder, "mask_token": model.mask_token.data}}, tmp_path / "part.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "part", flag, tmp_path / "part.pth")
    assert code == 2
    assert "part.pth has no decoder_pos_embed" in err


def test_init_takes_the_weights_of_a_run_and_nothing_else(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path / "first")[0] == 0
    flags = (*SMALL, "--output_dir", tmp_path / "second", "--init", tmp_path / "first" / "checkpoint-1.pth")
    assert cli(*flags, "--lr", 0, "--resume", "auto")[0] == 0
    first, second = checkpoint(tmp_path / "first"), checkpoint(tmp_path / "second")
    for part in ("model", "cmm"):
        assert all(torch.equal(value, second[part][key]) for key, value in first[part].items())
    assert not torch.equal(first["optimizer"]["state"][0]["exp_avg"], second["optimizer"]["state"][0]["exp_avg"])
    assert [line["epoch"] for line in log_lines(tmp_path / "second")] == [0, 1]


def test_vanilla_mae_differs_in_one_flag(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path / "mae", "--masking", "random", "--lr", 0)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path / "clmae", "--lr", 0)[0] == 0
    vanilla, curriculum = checkpoint(tmp_path / "mae"), checkpoint(tmp_path / "clmae")
    assert "cmm" not in vanilla
    for key, value in vanilla["model"].items():
        assert torch.equal(value, curriculum["model"][key]), "a seed gives both the same initial MAE"
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "mae", "--resume", "auto")
    assert code == 2
    assert "--masking random, now curriculum" in err
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "mae", "--resume", "auto", "--allow_changes")
    assert code == 2
    assert "no 'cmm'" in err


@pytest.mark.parametrize(
    "flags",
    [
        ("--select", "topk"),
        ("--amp", "bf16"),
        ("--accum_iter", "2", "--batch_size", "8", "--clip_grad", "1"),
        ("--batch_size", "1", "--shapes_images", "1"),
        ("--in_chans", "1", "--input_size", "8", "16"),
        ("--output_dir", ""),
        ("--vis_every", "0", "--save_every", "5"),
    ],
    ids=" ".join,
)
def test_variants_run(cli, tmp_path, flags):
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *flags)
    assert (code, err) == (0, "")


@pytest.fixture
def one_class(tmp_path):
    for split in ("train", "val"):
        folder = tmp_path / "data" / split / "only"
        folder.mkdir(parents=True)
        Image.new("RGB", (20, 30), (200, 30, 90)).save(folder / "a.jpg")
    return tmp_path / "data"


def test_one_image_of_one_class(cli, tmp_path, one_class):
    flags = ("--data_set", "folder", "--data_path", one_class, "--batch_size", 1, "--knn_every", 1)
    code, out, err = cli(*SMALL, *flags, "--output_dir", tmp_path / "out")
    assert (code, err) == (0, "")
    assert "Acc@1 100.00" in out


def test_diverging_run_stops_and_leaves_the_last_good_checkpoint(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    before = (tmp_path / "checkpoint-0.pth").read_bytes()
    flags = (
        "--resume",
        "auto",
        "--allow_changes",
        "--epochs",
        5,
        "--save_every",
        1,
        "--warmup_epochs",
        0,
        "--lr",
        1e30,
    )
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *flags)
    assert code == TrainingDiverged.exit_code
    assert "not finite" in err
    assert "Traceback" not in err
    assert (tmp_path / "checkpoint-0.pth").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-0.pth", "checkpoint-last.pth"]
    assert checkpoint(tmp_path, "last")["epoch"] == 0


BAD = {
    "folder is required": (("--data_set", "folder"), "--data_path"),
    "missing folder": (("--data_set", "folder", "--data_path", "nowhere"), "--data_path nowhere is not a folder"),
    "empty folder": (("--data_set", "folder", "--data_path", "{tmp}"), "no images in"),
    "unknown model": (("--model", "mae_vit_gigantic"), "--model mae_vit_gigantic is unknown; known are mae_vit_base"),
    "mask ratio 0": (("--mask_ratio", "0"), "--mask_ratio 0.0"),
    "mask ratio 1": (("--mask_ratio", "1"), "--mask_ratio 1.0"),
    "mask ratio 1.5": (("--mask_ratio", "1.5"), "--mask_ratio 1.5"),
    "mask ratio that keeps nothing": (("--mask_ratio", "0.99"), "--mask_ratio 0.99 keeps 0 of 16 patches"),
    "lambda_cl_end": (("--lambda_cl_end", "-1.5"), "--lambda_cl_end -1.5 is outside [-1, 1]"),
    "indivisible size": (("--input_size", "30"), "image size 30x30 is not divisible by the patch size 4"),
    "three sizes": (("--input_size", "8", "8", "8"), "--input_size"),
    "channels": (("--in_chans", "7"), "--in_chans 7"),
    "no batch": (("--batch_size", "0"), "--batch_size 0 must be at least 1"),
    "too few images": (("--batch_size", "64"), "48 images do not fill one batch of 64"),
    "negative weight": (("--lambda_kl", "-1"), "--lambda_kl -1.0 must not be negative"),
    "not a number": (("--epochs", "many"), "argument --epochs: invalid int value: 'many'"),
    "unknown flag": (("--learning_rate", "1"), "unrecognized arguments: --learning_rate"),
    "unknown choice": (("--masking", "clever"), "argument --masking: invalid choice: 'clever'"),
    "unknown device": (("--device", "gpu9"), "--device 'gpu9'"),
    "missing checkpoint": (("--resume", "none.pth"), "none.pth: No such file or directory"),
    "two beginnings": (("--init", "a.pth", "--resume", "b.pth"), "give one of them, or --resume auto"),
    "missing weights": (("--init", "none.pth"), "none.pth: No such file or directory"),
    "indivisible batch": (("--global_batch_size", "9", "--accum_iter", "2"), "--global_batch_size 9 cannot be split"),
    "negative minutes": (("--save_minutes", "-1"), "--save_minutes -1.0 must not be negative"),
    "processes without a launcher": (("--world_size", "4"), "use torchrun for several processes"),
    "unlabelled knn": (
        ("--data_set", "folder", "--data_path", "{flat}", "--batch_size", "1", "--knn_every", "1"),
        "val",
    ),
    "output is a file": (("--output_dir", "{flat}/a.png"), "--output_dir"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(cli, tmp_path, monkeypatch, case):
    flags, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "flat" / "a.png")
    flags = [flag.format(tmp=tmp_path / "empty", flat=tmp_path / "flat") for flag in flags]
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "out", *flags)
    assert code == 2
    assert expected in err
    assert len(err.splitlines()) == 1, err


def test_as_a_process_of_its_own(tmp_path):
    """Once for real: exit code, one sentence on standard error, and a compiled run."""
    command = [sys.executable, str(ROOT / "main_pretrain.py"), *SMALL]
    bad = subprocess.run([*command, "--mask_ratio", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert bad.returncode == 2
    assert bad.stderr.startswith("ERROR: --mask_ratio 2.0")
    assert len(bad.stderr.splitlines()) == 1
    good = subprocess.run(
        [*command, "--epochs", "1", "--compile"], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert good.returncode == 0, good.stderr
    assert (tmp_path / "output_dir" / "checkpoint-0.pth").exists()
