"""The program as a user runs it: flags, files, and errors for bad input."""

import re
import sys

import pytest
import torch
from PIL import Image
from processes import ROOT, run_to_end
from small_runs import SMALL, assert_same_training, checkpoint, log_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from main_pretrain import check_args, departures_from_paper, get_args_parser, settle_batch_and_rates
from models_mae import mae_vit_micro_patch4
from util.cli import TrainingDiverged


def test_every_upstream_flag_with_its_default(upstream_flags):
    actions = {flag: action for action in get_args_parser()._actions for flag in action.option_strings}
    for flag, expected in upstream_flags["main_pretrain"].items():
        if flag == "set_defaults":
            continue
        action = actions[flag]
        assert action.dest == expected["dest"]
        assert type(action).__name__ == expected["action"]
        if flag not in ("--device", "--data_path", "--pin_mem", "--no_pin_mem", "--blr", "--norm_pix_loss"):
            assert action.default == expected["default"], flag
    args = get_args_parser().parse_args([])
    assert (args.pin_mem, args.data_path, args.device) == (True, "data/imagenet", None)
    assert (args.blr, args.norm_pix_loss) == (1.5e-4, True), "the published command's, not the code's"
    assert not get_args_parser().parse_args(["--no_norm_pix_loss"]).norm_pix_loss
    new = {
        **dict(masking="curriculum", select="threshold", lambda_gauss=10, lambda_kl=1, lambda_div=2, cmm_depth=5),
        **dict(lambda_cl_start=1, lambda_cl_end=-0.1, no_curriculum=False, soft="tokens", lambda_pos=0),
        **dict(cmm_blr=None, cmm_schedule="constant", amp="auto"),
        **dict(clip_grad=None, compile=False, in_chans=3, data_set="folder", max_bad_images=100),
    }
    check_args(args)
    assert {name: getattr(args, name) for name in new} == new


def test_every_flag_has_a_help_text():
    assert all(action.help for action in get_args_parser()._actions)


def test_a_run_leaves_checkpoints_a_log_and_tensorboard(cli, tmp_path):
    code, out, err = cli(*SMALL, "--output_dir", tmp_path, "--save_every", 1, "--knn_every", 2)
    assert (code, err) == (0, "")
    assert "epoch 2/2 done" in out

    saved = checkpoint(tmp_path)
    parts = {
        "model",
        "optimizer",
        "scaler",
        "cmm",
        "optimizer_cmm",
        "scaler_cmm",
        "epoch",
        "step",
        "log",
        "moment",
        "args",
    }
    assert saved.keys() == parts
    assert (saved["epoch"], saved["step"], saved["args"]["mask_ratio"]) == (1, 6, 0.75)
    assert saved["moment"] == {"mask_ratio": 0.75, "lambda_cl": pytest.approx(-0.1)}
    assert checkpoint(tmp_path, 0)["moment"]["lambda_cl"] == pytest.approx(0.45)
    mae_vit_micro_patch4(img_size=16).load_state_dict(saved["model"])

    lines = log_lines(tmp_path)
    assert [line["epoch"] for line in lines] == [0, 1]
    losses = {"loss", "cmm_loss", "cmm_curriculum", "cmm_gauss", "cmm_kl", "cmm_div"}
    health = {
        "mask_visible",
        "mask_visible_std",
        "mask_distinct",
        "mask_hamming",
        "mask_unseen",
        "mask_decisive",
        "mask_place",
    }
    settings = {"lr", "cmm_lr", "lambda_cl", "mask_ratio"}
    assert {f"train_{name}" for name in losses | health | settings} <= lines[0].keys()
    assert {"mask_error_vs_random", "knn_acc1", "knn_acc5"} <= lines[1].keys()
    assert all(3 < line["encoder_rank"] <= 48 and line["encoder_norm"] > 1 for line in lines)
    assert (tmp_path / "classes.txt").read_text().split()[:2] == ["disc", "ring"]

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = set(events.Tags()["scalars"])
    expected = {name.replace("_", "/", 1) for name in losses | health | {"cmm_lr"} if "_" in name}
    assert {
        "train_loss",
        "lr",
        "lambda_cl",
        "mask_ratio",
        "images_per_second",
        "knn/acc1",
        "encoder/rank",
        "encoder/norm",
        "mask/error_vs_random",
        *expected,
    } <= scalars
    assert [event.step for event in events.Scalars("train_loss")] == [1000, 2000]
    (picture,) = events.Tags()["images"]
    assert [event.step for event in events.Images(picture)] == [1000, 2000]


def test_a_log_file_has_the_time_and_a_line_for_each_epoch(cli, tmp_path):
    code, out, _ = cli(*SMALL, "--output_dir", tmp_path, "--shapes_images", 21, "--batch_size", 1, timestamps=True)
    assert code == 0
    lines = out.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines), out
    for epoch in (1, 2):
        assert sum(f"  epoch {epoch}/2 done, 0:00:" in line for line in lines) == 1
        assert sum(f"  epoch {epoch}/2 [20/21]  0:00:" in line for line in lines) == 1
    assert sum("  departs from the paper's setting: " in line for line in lines) == 1


def departures(*flags):
    """Of a run on 200 classes with a batch of 4096."""
    args = get_args_parser().parse_args(["--batch_size", "4096", *flags])
    check_args(args)
    settle_batch_and_rates(args)
    args.classes = [f"n{i:08}" for i in range(200)]
    return departures_from_paper(args)


def test_the_bare_command_is_the_papers_setting():
    assert departures() == []
    assert departures("--batch_size", "512", "--blr", "1.2e-3") == [], "the rate counts, not how it comes about"
    assert departures("--no_norm_pix_loss", "--lambda_kl", "3", "--cmm_depth", "2") == [
        "norm_pix_loss False (True)",
        "lambda_kl 3.0 (1.0)",
        "cmm_depth 2 (5)",
    ]
    found = departures("--blr", "3e-4", "--input_size", "96")
    assert found == ["lr 0.0048 (0.0024)", "input_size [96, 96] ([224, 224])"]
    assert departures("--masking", "random", "--lambda_kl", "3") == ["masking random (curriculum)"]
    found = departures("--select", "topk", "--mask_ratio_start", "0.5")
    assert found == ["mask_ratio_start 0.5 (None)", "select topk (threshold)"]


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
        ("--cmm_every", "2", "--cmm_fraction", "0.25", "--cmm_dim", "32"),
        ("--grad_checkpointing", "--amp", "bf16"),
    ],
    ids=" ".join,
)
def test_variants_run(cli, tmp_path, flags):
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *flags)
    assert (code, err) == (0, "")


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
        1e9,
    )
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *flags)
    assert code == TrainingDiverged.exit_code
    assert "not finite" in err
    assert "Traceback" not in err
    assert (tmp_path / "checkpoint-0.pth").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-0.pth", "checkpoint-last.pth"]
    assert checkpoint(tmp_path, "last")["epoch"] == 0


BAD = {
    "no default folder": (("--data_set", "folder"), "--data_path data/imagenet is not a folder"),
    "missing folder": (("--data_set", "folder", "--data_path", "nowhere"), "--data_path nowhere is not a folder"),
    "empty folder": (("--data_set", "folder", "--data_path", "{tmp}"), "no images in"),
    "unknown model": (("--model", "mae_vit_gigantic"), "--model mae_vit_gigantic is unknown; choose from mae_vit_base"),
    "mask ratio 0": (("--mask_ratio", "0"), "argument --mask_ratio: 0 must be above 0 and below 1"),
    "mask ratio 1": (("--mask_ratio", "1"), "argument --mask_ratio: 1 must be above 0 and below 1"),
    "mask ratio 1.5": (("--mask-ratio=1.5",), "argument --mask_ratio: 1.5 must be above 0 and below 1"),
    "mask ratio that keeps nothing": (("--mask_ratio", "0.99"), "--mask_ratio 0.99 keeps 0 of 16 patches"),
    "no share of images": (("--cmm_fraction", "0"), "argument --cmm_fraction: 0 must be above 0 and at most 1"),
    "no update of the CMM": (("--cmm_every", "0"), "argument --cmm_every: 0 must be at least 1"),
    "width of the CMM": (("--cmm_dim", "10"), "--cmm_dim 10: a width of 10 is not a multiple of 16"),
    "lambda_cl_end": (("--lambda_cl_end", "-1.5"), "argument --lambda_cl_end: -1.5 must be at least -1 and at most 1"),
    "indivisible size": (("--input_size", "30"), "image size 30x30 is not divisible by the patch size 4"),
    "three sizes": (("--input_size", "8", "8", "8"), "--input_size"),
    "channels": (("--in_chans", "7"), "argument --in_chans: invalid choice: 7"),
    "no batch": (("--batch_size", "0"), "argument --batch_size: 0 must be at least 1"),
    "too few images": (("--batch_size", "64"), "48 images do not fill one batch of 64"),
    "negative weight": (("--lambda_kl", "-1"), "argument --lambda_kl: -1 must be at least 0"),
    "not a number": (
        ("--epochs", "many"),
        "main_pretrain.py: argument --epochs: 'many' is not a whole number (see --help)",
    ),
    "unknown flag": (("--learning_rate", "1"), "unrecognized arguments: --learning_rate"),
    "unknown choice": (
        ("--masking", "clever"),
        "--masking clever is unknown; choose from random, block, grid, noise, curriculum, predictive, or give your own",
    ),
    "masks of no file": (("--masking", "none.py:stripes"), "--masking none.py:stripes: there is no file none.py"),
    "a ratio that moves": (("--mask_ratio_start", "0.5"), "--mask_ratio_start needs masks of an exact ratio"),
    "unknown device": (("--device", "gpu9"), "--device 'gpu9'"),
    "missing checkpoint": (("--resume", "none.pth"), "none.pth: No such file or directory"),
    "two beginnings": (("--init", "a.pth", "--resume", "b.pth"), "use one of them, or --resume auto"),
    "missing weights": (("--init", "none.pth"), "none.pth: No such file or directory"),
    "indivisible batch": (("--global_batch_size", "9", "--accum_iter", "2"), "--global_batch_size 9 cannot be split"),
    "nothing to train": (("--epochs", "3", "--start_epoch", "3"), "--start_epoch 3 leaves none of the 3 --epochs"),
    "negative minutes": (("--save_minutes", "-1"), "argument --save_minutes: -1 must be at least 0"),
    "processes without a launcher": (("--world_size", "4"), "do not start processes; use torchrun"),
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


@pytest.mark.slow
def test_a_compiled_run_learns_the_same(cli, tmp_path):
    """In a process of its own, with the real compiler."""
    flags = [*SMALL, "--masking", "predictive", "--vis_every", "0"]
    compiled = run_to_end([sys.executable, str(ROOT / "main_pretrain.py"), *flags, "--compile"], cwd=tmp_path)
    assert compiled.returncode == 0, compiled.stderr
    assert cli(*flags, "--output_dir", tmp_path / "eager")[0] == 0
    for name in ("train_loss", "train_cmm_loss"):
        theirs, ours = (log_lines(tmp_path / folder)[-1][name] for folder in ("output_dir", "eager"))
        assert theirs == pytest.approx(ours, rel=1e-4)
