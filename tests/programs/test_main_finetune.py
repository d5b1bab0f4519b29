"""Fine-tuning as a user runs it: what it learns, writes and refuses, interrupted or not, in one process and in two."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import DATA, assert_same_training, checkpoint, log_lines

import main_compare
import main_finetune
import main_knn
import main_pretrain
from models_mae import mae_vit_micro_patch4
from models_vit import vit_micro_patch4
from submitit_eval import TASKS
from util.checkpoint import load_checkpoint, save_checkpoint
from util.data.shapes import ShapesDataset
from util.training.launcher import ClusterJob
from util.training.saver import StopRequest

SHORT = ("--batch_size", "8", "--epochs", "3", "--warmup_epochs", "1", "--mixup", "0.8", "--cutmix", "1")
MODEL = ("--model", "vit_micro_patch4", "--input_size", "16")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "checkpoint-3.pth"
    save_checkpoint(path, {"model": mae_vit_micro_patch4(img_size=16).state_dict(), "args": {"input_size": [16, 16]}})
    return path


@pytest.fixture
def finetune(program, pretrained, tmp_path):
    """Runs it with the short flags into tmp_path / "out"."""

    def call(*flags):
        common = (*DATA, *SHORT, "--finetune", pretrained, "--output_dir", tmp_path / "out")
        return program(main_finetune, *common, *flags)

    return call


def results(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


# --- What it leaves ---


def test_a_run_leaves_results_predictions_a_log_and_checkpoints(finetune, tmp_path, pretrained):
    code, out, err = finetune()
    assert (code, err) == (0, "")
    assert "fine-tuning on shapes, last epoch, seed 0" in out
    assert "for reference only" in out

    (line,) = results(tmp_path / "out")
    assert (line["protocol"], line["data"], line["checkpoint"]) == ("finetune", "shapes", str(pretrained))
    assert line["images"] == {"train": 48, "test": 9, "unreadable": 0}
    settings = {"model": "vit_micro_patch4", "pooling": "global_pool", "input_size": [16, 16], "layer_decay": 0.75}
    assert line["settings"].items() >= {**settings, "mixup": 0.8, "lr": 1e-3 * 8 / 256}.items()
    with np.load(tmp_path / "out" / line["predictions"]) as arrays:
        assert arrays["images"].tolist() == [f"shapes/val/{i}" for i in range(9)]
        assert arrays["top5"].shape == (1, 9, 5)
        assert line["acc1"] == pytest.approx(100 * arrays["correct"].mean())

    log = log_lines(tmp_path / "out")
    upstream = {"train_loss", "train_lr", "test_acc1", "test_acc5", "test_loss", "epoch", "n_parameters"}
    assert [set(epoch) for epoch in log] == [upstream] * 3
    assert log[-1]["test_acc1"] == line["acc1"]
    assert line["best_test_epoch"]["acc1"] == max(epoch["test_acc1"] for epoch in log)

    state = checkpoint(tmp_path / "out", 2)
    assert {"model", "optimizer", "epoch", "scaler", "args"} <= state.keys()
    assert state["model"].keys() == vit_micro_patch4(num_classes=10, global_pool=True).state_dict().keys()
    assert log[0]["n_parameters"] == sum(value.numel() for value in state["model"].values())


def test_the_head_starts_near_zero_and_all_else_from_the_checkpoint(finetune, tmp_path, pretrained):
    assert finetune("--lr", 1e-30, "--min_lr", 0, "--epochs", 1, "--warmup_epochs", 0)[0] == 0
    weights, before = checkpoint(tmp_path / "out", 0)["model"], load_checkpoint(pretrained)["model"]
    for name, value in weights.items():
        if not name.startswith(("head", "fc_norm")):
            assert torch.allclose(value, before[name], atol=1e-12), name
    assert weights["head.weight"].std().item() == pytest.approx(2e-5, rel=0.2)
    assert weights["head.bias"].abs().max() < 1e-12


def test_other_sizes_pooling_and_numbers_of_outputs(finetune, tmp_path):
    code, out, err = finetune("--input_size", 24, "--cls_token", "--nb_classes", 12, "--epochs", 1, "--dist_eval")
    assert code == 0
    assert "24x24 px" in out
    weights = checkpoint(tmp_path / "out", 0)["model"]
    assert weights["pos_embed"].shape == (1, 37, 64)
    assert weights["head.weight"].shape == (12, 64)
    assert "norm.weight" in weights
    assert "fills the whole run" in err


def test_the_tested_accuracy_can_be_had_again(finetune, program, tmp_path):
    assert finetune("--seed", 3)[0] == 0
    for resume in (tmp_path / "out" / "checkpoint-2.pth", tmp_path / "out"):
        code, _, err = program(main_finetune, *DATA, "--eval", "--resume", resume, "--output_dir", tmp_path / "out")
        assert (code, err) == (0, "")
        trained, tested = results(tmp_path / "out")[0], results(tmp_path / "out")[-1]
        for name in ("protocol", "settings", "seed", "runs", "acc1", "acc5", "images", "classes"):
            assert trained[name] == tested[name]
    weights = tmp_path / "weights.pth"  # as upstream publishes fine-tuned models
    save_checkpoint(weights, {"model": checkpoint(tmp_path / "out", 2)["model"]})
    assert program(main_finetune, *DATA, "--eval", "--resume", weights, "--output_dir", tmp_path / "bare")[0] == 0
    assert results(tmp_path / "bare")[0]["acc1"] == trained["acc1"]


def test_a_fine_tuned_encoder_can_be_judged_as_any_other(finetune, program, tmp_path):
    assert finetune("--epochs", 1)[0] == 0
    knn = (*DATA, "--finetune", tmp_path / "out", "--output_dir", tmp_path / "knn", "--k", 1)
    assert program(main_knn, *knn, "--global_pool")[0] == 0
    code, _, err = program(main_knn, *knn)
    assert code == 2
    assert "was fine-tuned with --global_pool" in err


def test_runs_are_compared_image_by_image(finetune, program, tmp_path):
    for name in ("a", "b"):
        finetune("--epochs", 1, "--output_dir", tmp_path / name, *(("--finetune", "") if name == "b" else ()), *MODEL)
    code, out, _ = program(main_compare, tmp_path / "a", tmp_path / "b", "--output_dir", "")
    assert code == 0
    assert "fine-tuning" in out


def test_nothing_is_written_without_an_output_folder(finetune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = finetune("--output_dir", "", "--epochs", 1)
    assert code == 0
    assert "Acc@1" in out
    assert list(tmp_path.iterdir()) == []


def test_a_pretrained_model_learns_to_tell_images_apart(program, tmp_path):
    """Four classes, so chance is 25 %: the same shapes in four colours, as a folder."""
    tints = {"blue": (0, 0, 1), "green": (0, 1, 0), "grey": (1, 1, 1), "red": (1, 0, 0)}
    shapes = ShapesDataset((16, 16), 96)
    for index, name in enumerate(sorted(tints) * 24):
        folder = tmp_path / "data" / ("train" if index < 64 else "val") / name
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.asarray(shapes.read(index)) * np.array(tints[name])
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{index}.png")
    common = ("--data_path", tmp_path / "data", "--num_workers", 0, "--device", "cpu", "--batch_size", 16, "--lr", 3e-3)
    short = ("--epochs", 6, "--warmup_epochs", 1)
    mae = ("--model", "mae_vit_micro_patch4", "--input_size", 16, "--masking", "random", "--vis_every", 0)
    assert program(main_pretrain, *mae, *common, *short, "--output_dir", tmp_path / "mae")[0] == 0
    assert (
        program(main_finetune, "--finetune", tmp_path / "mae", *common, *short, "--output_dir", tmp_path / "out")[0]
        == 0
    )
    (line,) = results(tmp_path / "out")
    assert line["acc1"] > 60
    assert line["images"] == {"train": 64, "test": 32, "unreadable": 0}


# --- Randomness, interruptions, processes ---


@pytest.fixture
def whole(finetune, tmp_path):
    assert finetune("--output_dir", tmp_path / "whole", "--num_workers", 2)[0] == 0
    return checkpoint(tmp_path / "whole", 2)


def test_the_number_of_loaders_changes_nothing(finetune, tmp_path, whole):
    assert finetune()[0] == 0
    assert_same_training(checkpoint(tmp_path / "out", 2), whole)


def test_an_interrupted_run_ends_with_the_same_bits(finetune, tmp_path, whole, monkeypatch):
    asked = []
    with monkeypatch.context() as patch:  # in the middle of the second epoch of six updates
        patch.setattr(StopRequest, "agreed", lambda self: asked.append(1) or len(asked) == 10)
        code, _, err = finetune()
    assert code == 75
    assert "resume with --resume auto" in err
    code, _, err = finetune()
    assert code == 2
    assert "holds another run's checkpoints; add --resume auto" in err
    code, _, err = finetune("--resume", "auto", "--layer_decay", 0.5)
    assert code == 2
    assert "--layer_decay 0.75, now 0.5" in err
    other = tmp_path / "other.pth"
    save_checkpoint(other, {"model": mae_vit_micro_patch4(img_size=16).state_dict()})
    code, _, err = finetune("--resume", "auto", "--finetune", other)
    assert code == 2
    assert "pretrained weights" in err

    code, out, err = finetune("--resume", "auto")
    assert code == 0, err
    assert "epoch 2, after 3 of its updates" in out
    assert_same_training(checkpoint(tmp_path / "out", 2), whole)
    assert log_lines(tmp_path / "out") == log_lines(tmp_path / "whole")
    ours, theirs = (results(tmp_path / name)[0] for name in ("out", "whole"))
    assert (ours["acc1"], ours["best_test_epoch"]) == (theirs["acc1"], theirs["best_test_epoch"])


def test_a_finished_run_that_is_resumed_is_only_tested(finetune, tmp_path):
    assert finetune("--epochs", 1)[0] == 0
    before = checkpoint(tmp_path / "out", 0)
    code, out, _ = finetune("--epochs", 1, "--resume", "auto")
    assert code == 0
    assert "only the test is left" in out
    assert_same_training(checkpoint(tmp_path / "out", 0), before)
    first, second = results(tmp_path / "out")
    assert first["acc1"] == second["acc1"]


def test_a_job_that_is_restarted_goes_on(tmp_path):
    assert "finetune" in TASKS
    args = main_finetune.get_args_parser().parse_args(["--output_dir", str(tmp_path / "%j")])
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "checkpoint-last.pth").touch()
    own = ClusterJob("main_finetune", args).own_args("7")
    assert (own.output_dir, own.resume) == (str(tmp_path / "7"), "auto")


def test_two_processes_give_the_result_of_one(finetune, two_processes, pretrained, tmp_path):
    """Up to rounding, as long as nothing is drawn per process: no mixup, no drop path."""
    same = ("--mixup", 0, "--cutmix", 0, "--drop_path", 0, "--epochs", 1, "--warmup_epochs", 0, "--lr", 1e-3)
    flags = (*DATA, *SHORT, *same, "--finetune", pretrained, "--output_dir", tmp_path / "two", "--batch_size", 4)
    codes, out, err = two_processes("main_finetune", *flags)
    assert codes == [0, 0], err
    assert out.count("48 training and 9 test images") == 1, "one process speaks"
    assert finetune(*same)[0] == 0
    one, two = (log_lines(tmp_path / name)[0] for name in ("out", "two"))
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-5)
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-4)
    assert results(tmp_path / "two")[0]["images"] == {"train": 48, "test": 9, "unreadable": 0}


# --- Flags and mistakes ---


def test_every_upstream_flag(upstream_flags):
    actions = {flag: action for action in main_finetune.get_args_parser()._actions for flag in action.option_strings}
    ours = ("--model", "--device", "--data_path", "--nb_classes", "--input_size")  # inferred, or local
    for flag, expected in upstream_flags["main_finetune"].items():
        if flag != "set_defaults":
            assert actions[flag].dest == expected["dest"]
            assert type(actions[flag]).__name__ == expected["action"]
            assert flag in ours or actions[flag].default == expected["default"], flag
    assert all(action.help for action in actions.values())


BAD = {
    "no model": (("--finetune", ""), "name the model for random weights"),
    "unknown model": (("--model", "resnet50"), "--model resnet50 is unknown"),
    "missing checkpoint": (("--finetune", "none.pth"), "none.pth: No such file or directory"),
    "damaged checkpoint": (("--finetune", "{tmp}/bad.pth"), "bad.pth is damaged"),
    "odd batch": (("--batch_size", "7"), "--batch_size 7: mixup and cutmix pair images"),
    "batch of one": (("--batch_size", "1"), "--batch_size 1: mixup and cutmix pair images"),
    "batch too large": (("--batch_size", "50"), "48 images do not fill one batch of 50"),
    "one class": (("--data_set", "folder", "--data_path", "{data}"), "has only one class"),
    "few outputs": (("--nb_classes", "9"), "--nb_classes 9 is less than the 10 classes"),
    "policy": (("--aa", "rand-q3"), "--aa rand-q3 is not a timm policy"),
    "alpha": (("--finetune", "", *MODEL, "--in_chans", "4"), "--aa rand-m9-mstd0.5-inc1 is for grey and colour"),
    "erasing": (("--remode", "blur"), "argument --remode: invalid choice: 'blur'"),
    "mixing": (("--mixup_mode", "row"), "argument --mixup_mode: invalid choice: 'row'"),
    "box": (("--cutmix_minmax", "0.8", "0.2"), "--cutmix_minmax takes two fractions"),
    "no box": (("--cutmix_minmax", "0.50", "0.51"), "allows no box"),
    "probability": (("--reprob", "2"), "argument --reprob: 2 must be at least 0 and at most 1"),
    "drop path": (("--drop_path", "1"), "argument --drop_path: 1 must be at least 0 and below 1"),
    "layer decay": (("--layer_decay", "0"), "argument --layer_decay: 0 must be above 0"),
    "eval of nothing": (("--eval",), "--eval needs --resume FILE"),
    "eval of an encoder": (("--eval", "--resume", "{pretrained}"), "has no head.weight"),
    "resume an encoder": (("--resume", "{pretrained}"), "to start from its weights, use --finetune"),
    "nothing to train": (("--start_epoch", "3"), "--start_epoch 3 leaves none of the 3 --epochs"),
    "size": (("--input_size", "18"), "not divisible by the patch size 4"),
    "log is a file": (("--log_dir", "{tmp}/bad.pth"), "--log_dir {tmp}/bad.pth cannot be written"),
    "output is a file": (("--output_dir", "{tmp}/bad.pth"), "--output_dir {tmp}/bad.pth cannot be written"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(finetune, tmp_path, monkeypatch, pretrained, one_class, case):
    flags, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pth").write_bytes(b"PK")
    places = dict(tmp=tmp_path, pretrained=pretrained, data=one_class)
    code, _, err = finetune(*(flag.format(**places) for flag in flags))
    assert code == 2
    assert expected.format(**places) in err
    assert len(err.splitlines()) == 1, err


def test_other_classes_are_not_tested(finetune, program, tmp_path):
    assert finetune("--epochs", 1)[0] == 0
    for name in ("cat", "dog"):
        for split in ("train", "val"):
            (tmp_path / "pets" / split / name).mkdir(parents=True)
            Image.new("RGB", (20, 20)).save(tmp_path / "pets" / split / name / "a.png")
    pets = ("--data_path", tmp_path / "pets", "--num_workers", 0, "--device", "cpu", "--output_dir", "")
    code, _, err = program(main_finetune, *pets, "--eval", "--resume", tmp_path / "out")
    assert code == 2
    assert "was trained on other classes than those of pets" in err


def test_a_loss_that_explodes_ends_with_exit_code_3(finetune, tmp_path):
    code, _, err = finetune("--lr", 1e9, "--warmup_epochs", 0)
    assert code == 3
    assert "not finite" in err
    assert not list((tmp_path / "out").glob("checkpoint-*"))
