"""The evaluations as a user runs them: what they print, write and refuse, in one process and in two."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import DATA
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import main_compare
import main_fewshot
import main_knn
import main_linprobe
from models_mae import mae_vit_micro_patch4
from util.checkpoint import load_checkpoint, save_checkpoint
from util.data import shapes
from util.evaluation.features import file_hash

PROGRAMS = {"knn": main_knn, "linprobe": main_linprobe, "fewshot": main_fewshot}
SHAPES = (*DATA, "--shapes_images", "100")
SHORT = ("--epochs", "3", "--warmup_epochs", "1", "--batch_size", "25")
FLAGS = {
    "knn": (),
    "linprobe": SHORT,
    "linprobe-cached": (*SHORT, "--cache_features"),
    "fewshot": ("--shots", "1", "2", "4", "--runs", "2"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("run") / "checkpoint-3.pth"
    save_checkpoint(path, {"model": mae_vit_micro_patch4(img_size=16).state_dict(), "args": {"input_size": [16, 16]}})
    return path


@pytest.fixture
def evaluate(program, checkpoint, tmp_path):
    """Runs a protocol with its short flags into tmp_path / "out"."""

    def call(protocol, *flags):
        common = (*SHAPES, "--finetune", checkpoint, "--output_dir", tmp_path / "out")
        return program(PROGRAMS[protocol.split("-")[0]], *common, *FLAGS[protocol], *flags)

    return call


def lines(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def predictions(folder, line):
    with np.load(folder / line["predictions"], allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("protocol", FLAGS)
def test_an_evaluation_leaves_a_line_predictions_and_tensorboard(evaluate, tmp_path, checkpoint, protocol):
    code, out, err = evaluate(protocol)
    assert (code, err) == (0, "")
    assert "Acc@1" in out
    (line,) = lines(tmp_path / "out")
    assert line["protocol"] == protocol
    assert line["data"] == "shapes"
    assert line["checkpoint"] == str(checkpoint)
    assert line["checkpoint_sha256"] == file_hash(checkpoint)
    assert (
        line["settings"].items()
        >= {"model": "vit_micro_patch4", "pooling": "cls_token", "input_size": [16, 16]}.items()
    )
    assert line["images"] == {"train": 100, "test": 20, "unreadable": 0}
    assert line["classes"] == 10
    assert {"seed", "commit", "versions", "time"} <= line.keys()

    arrays = predictions(tmp_path / "out", line)
    assert arrays["images"].tolist() == [f"shapes/val/{i}" for i in range(20)]
    assert arrays["labels"].tolist() == [i % 10 for i in range(20)]
    top5, labels = arrays["top5"], arrays["labels"][:, None]
    assert (arrays["correct"] == (top5[..., :1] == labels)[..., 0]).all()
    assert (arrays["correct5"] == (top5 == labels).any(axis=-1)).all()
    last = arrays["correct"][-1] if protocol == "fewshot" else arrays["correct"]
    assert line["acc1"] == pytest.approx(100 * last.mean())
    if protocol == "fewshot":
        assert top5.shape == (3, 2, 20, 5)
        assert list(line["shots"]) == ["1", "2", "4"]
        for shots, correct in zip(line["shots"].values(), arrays["correct"], strict=True):
            assert shots["acc1"] == pytest.approx(100 * correct.mean())
            assert shots["acc1_std"] == pytest.approx(100 * correct.mean(axis=1).std(ddof=1))
    events = EventAccumulator(str(tmp_path / "out"))
    events.Reload()
    assert events.Scalars(f"{protocol}/shapes/acc1")[-1].value == pytest.approx(line["acc1"], rel=1e-5)


def test_results_are_appended_and_no_predictions_overwritten(evaluate, tmp_path):
    for _ in range(2):
        assert evaluate("knn")[0] == 0
    first, second = lines(tmp_path / "out")
    assert (first["predictions"], second["predictions"]) == ("knn-shapes-0.npz", "knn-shapes-1.npz")
    assert first["acc1"] == second["acc1"]


def test_nothing_is_written_without_an_output_folder(evaluate, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for protocol in FLAGS:
        code, out, err = evaluate(protocol, "--output_dir", "")
        assert (code, err) == (0, "")
        assert "Acc@1" in out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported(evaluate, monkeypatch):
    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    code, _, err = evaluate("knn")
    assert code == 2
    assert "No space left on device" in err


def test_knn_reads_as_a_brute_force_search(evaluate, tmp_path):
    code, out, _ = evaluate("knn", "--k", 1, 3, "--global_pool", "--distance", "cosine")
    assert code == 0
    (line,) = lines(tmp_path / "out")
    assert (line["protocol"], line["settings"]["distance"]) == ("knn-cosine", "cosine")
    assert list(line["votes"]) == ["1", "3"]
    assert line["votes"]["1"]["majority"] == line["acc1"], "one voter is the nearest neighbour"
    assert "weighted" in out


def test_linear_probe_reports_runs_and_the_last_epoch(evaluate, tmp_path):
    code, out, _ = evaluate("linprobe-cached", "--runs", 3)
    assert code == 0
    (line,) = lines(tmp_path / "out")
    arrays = predictions(tmp_path / "out", line)
    by_run = 100 * arrays["correct"].mean(axis=1)
    assert arrays["seeds"].tolist() == [0, 1, 2]
    assert line["acc1"] == pytest.approx(by_run.mean())
    assert line["acc1_std"] == pytest.approx(by_run.std(ddof=1))
    assert "last epoch" in out
    assert "for reference only" in out
    assert line["best_test_epoch"]["acc1"] >= line["acc1"] - 1e-6


@pytest.mark.parametrize("protocol", ["linprobe", "linprobe-cached"])
def test_learning_rates_are_chosen_without_the_test_images(evaluate, tmp_path, monkeypatch, protocol):
    """Shuffled test labels change the accuracy, but not the choice."""
    chosen = []
    for shuffled in (False, True):
        if shuffled:
            monkeypatch.setattr(
                "util.data.shapes.ShapesDataset.label", lambda self, i: (i * (3 if self.split == "val" else 1)) % 10
            )
        code, out, err = evaluate(
            protocol, "--lr_grid", 0.01, 5, "--no_cache", "--output_dir", tmp_path / str(shuffled)
        )
        assert (code, err) == (0, "")
        assert "10 held-out training images" in out
        (line,) = lines(tmp_path / str(shuffled))
        chosen.append((line["lr"], line["acc1"]))
    assert chosen[0][0] == chosen[1][0]
    assert chosen[0][0] in (0.01 * 25 / 256, 5 * 25 / 256)


def test_a_finished_head_can_be_tested_again(evaluate, tmp_path):
    for protocol in ("linprobe", "linprobe-cached"):
        assert evaluate(protocol, "--runs", 2, "--seed", 5)[0] == 0
        head = tmp_path / "out" / f"{protocol}-shapes-0.pth"
        code, _, err = evaluate("linprobe", "--eval", "--resume", head, "--epochs", 7)  # its own settings count
        assert (code, err) == (0, "")
        trained, tested = lines(tmp_path / "out")[-2:]
        for name in ("protocol", "settings", "seed", "runs", "acc1", "acc1_std", "images"):
            assert trained[name] == tested[name]
        code, _, err = evaluate("linprobe", "--eval", "--resume", head, "--global_pool")
        assert (code, "was trained with pooling cls_token, but here it is global_pool" in err) == (2, True)
    assert not list((tmp_path / "out").glob("*.unfinished"))


def test_a_head_is_not_tested_on_other_classes(evaluate, tmp_path, monkeypatch):
    assert evaluate("linprobe-cached")[0] == 0
    monkeypatch.setattr("util.data.shapes.SHAPES", dict(zip("abcdefghij", shapes.SHAPES.values(), strict=True)))
    code, _, err = evaluate("linprobe", "--eval", "--resume", tmp_path / "out" / "linprobe-cached-shapes-0.pth")
    assert code == 2
    assert "was trained on other classes than those of shapes" in err


def test_an_interrupted_probe_goes_on_where_it_was(evaluate, tmp_path, monkeypatch):
    grid = ("--lr_grid", 1, 10, "--runs", 2)
    assert evaluate("linprobe", *grid)[0] == 0
    (whole,) = lines(tmp_path / "out")
    epochs, original = [], main_linprobe.train_one_epoch

    def interrupted(*args):
        epochs.append(1)
        if len(epochs) == 8:  # 2 x 3 epochs of the grid, then the second of the first run
            raise KeyboardInterrupt
        return original(*args)

    cut = ("--output_dir", tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(main_linprobe, "train_one_epoch", interrupted)
        assert evaluate("linprobe", *grid, *cut)[0] == 130
    assert len(list((tmp_path / "cut").glob("*.unfinished"))) == 3
    code, _, err = evaluate("linprobe", *grid, *cut)
    assert code == 2
    assert "--resume auto" in err
    changes = {
        "weight_decay": ("--weight_decay", 0.1),
        "images of train, images of val": ("--shapes_images", 110),
        "nb_classes": ("--nb_classes", 12),
    }
    for name, change in changes.items():
        code, _, err = evaluate("linprobe", *grid, *cut, "--resume", "auto", *change)
        assert code == 2
        assert f"was started with another {name}" in err

    epochs.clear()
    monkeypatch.setattr(main_linprobe, "train_one_epoch", lambda *args: epochs.append(1) or original(*args))
    assert evaluate("linprobe", *grid, *cut, "--resume", "auto")[0] == 0
    assert len(epochs) == 12 - 7
    (resumed,) = lines(tmp_path / "cut")
    assert resumed["settings"] == whole["settings"]
    ours, theirs = (load_checkpoint(tmp_path / name / "linprobe-shapes-0.pth")["probe"] for name in ("out", "cut"))
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert not list((tmp_path / "cut").glob("*.unfinished"))


@pytest.mark.parametrize("upstream", ["--epochs 90", "--blr 0.1", "--warmup_epochs 10", "--batch_size 512"])
def test_upstreams_defaults(upstream):
    flag, value = upstream.split()
    assert getattr(main_linprobe.get_args_parser().parse_args([]), flag[2:]) == float(value)


def test_every_upstream_flag_of_linear_probing(upstream_flags):
    actions = {flag: action for action in main_linprobe.get_args_parser()._actions for flag in action.option_strings}
    ours = ("--model", "--device", "--data_path", "--nb_classes", "--pin_mem", "--no_pin_mem")  # inferred or local
    for flag, expected in upstream_flags["main_linprobe"].items():
        if flag != "set_defaults":
            assert actions[flag].dest == expected["dest"]
            assert type(actions[flag]).__name__ == expected["action"]
            assert flag in ours or actions[flag].default == expected["default"], flag


@pytest.mark.parametrize("module", PROGRAMS.values(), ids=PROGRAMS)
def test_every_flag_has_a_help_text(module):
    assert all(action.help for action in module.get_args_parser()._actions)


# --- Few shots ---


def draws(folder, number=0):
    return json.loads((folder / f"fewshot-shapes-{number}.draws.json").read_text())


def test_draws_are_balanced_nested_and_reproducible(evaluate, tmp_path):
    for shots in ((1, 2, 4), (4,), (2, 8)):
        assert evaluate("fewshot", "--shots", *shots)[0] == 0
    nested, four, eight = (draws(tmp_path / "out", number) for number in range(3))
    assert nested == four, "the draw depends on the seed alone"
    for seed in ("0", "1"):
        assert len(four[seed]) == 10
        for name, images in four[seed].items():
            assert len(set(images)) == 4, "balanced, without repetition"
            assert images == eight[seed][name][:4], "fewer shots are the first of more"
            labels = {int(image.rsplit("/", 1)[1]) % 10 for image in images}
            assert len(labels) == 1
    assert four["0"] != four["1"]
    first, _, third = lines(tmp_path / "out")
    assert first["shots"]["2"] == third["shots"]["2"]


@pytest.fixture
def folder(tmp_path):
    """cat: 5 training images, dog: 3, eel: 1; one test image each."""
    torch.manual_seed(0)
    for name, number in (("cat", 5), ("dog", 3), ("eel", 1)):
        for split, images in (("train", number), ("test", 1)):
            (tmp_path / "data" / split / name).mkdir(parents=True)
            for i in range(images):
                pixels = torch.randint(0, 256, (20, 20, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(tmp_path / "data" / split / name / f"{i}.png")
    return tmp_path / "data"


def test_a_class_with_too_few_images_is_named(evaluate, tmp_path, folder):
    flags = ("--data_set", "folder", "--data_path", folder, "--shots", 1, 4)
    code, _, err = evaluate("fewshot", *flags)
    assert code == 2
    assert "--shots 4: too few training images in dog (3), eel (1)" in err
    code, out, err = evaluate("fewshot", *flags, "--allow_fewer")
    assert (code, err) == (0, "")
    assert "Acc@5 counts all 3 classes" in out
    drawn = json.loads((tmp_path / "out" / "fewshot-data-0.draws.json").read_text())["0"]
    assert {name: len(images) for name, images in drawn.items()} == {"cat": 4, "dog": 3, "eel": 1}


# --- Small and broken data ---


@pytest.mark.parametrize("protocol", FLAGS)
def test_a_single_folder_is_split(evaluate, tmp_path, folder, protocol):
    flags = ("--data_set", "folder", "--data_path", folder / "train", "--split", 0.6, "--data_name", "a pets/set")
    extra = {"linprobe": ("--batch_size", 2), "fewshot": ("--shots", 1)}.get(protocol.split("-")[0], ())
    code, _, err = evaluate(protocol, *flags, *extra)
    assert (code, err) == (0, "")
    (line,) = lines(tmp_path / "out")
    assert line["data"] == "a pets/set"
    assert line["predictions"] == f"{protocol}-a_pets_set-0.npz"
    assert line["images"] == {"train": 6, "test": 3, "unreadable": 0}
    assert line["settings"].items() >= {"split": 0.6, "split_seed": 0}.items()
    assert predictions(tmp_path / "out", line)["classes"].tolist() == ["cat", "dog", "eel"]


@pytest.mark.parametrize("protocol", ["knn", "fewshot"])
def test_one_image_of_one_class(evaluate, tmp_path, protocol):
    for split in ("train", "val"):
        (tmp_path / "one" / split / "only").mkdir(parents=True)
        Image.new("RGB", (20, 30), (200, 30, 90)).save(tmp_path / "one" / split / "only" / "a.jpg")
    flags = {"knn": (), "fewshot": ("--shots", 1)}[protocol]
    code, _, err = evaluate(protocol, "--data_set", "folder", "--data_path", tmp_path / "one", *flags)
    assert (code, err) == (0, "")
    assert lines(tmp_path / "out")[0]["acc1"] == 100


def test_unreadable_test_images_are_left_out_and_counted(evaluate, tmp_path, folder):
    (folder / "test" / "dog" / "0.png").write_bytes(b"")
    code, _, err = evaluate("knn", "--data_set", "folder", "--data_path", folder)
    assert code == 0
    assert "dog/0.png" in err
    (line,) = lines(tmp_path / "out")
    assert line["images"] == {"train": 9, "test": 2, "unreadable": 1}
    assert predictions(tmp_path / "out", line)["images"].tolist() == ["test/cat/0.png", "test/eel/0.png"]


BAD = {
    "no model": ("knn", ("--finetune", ""), "--model"),
    "unknown model": ("knn", ("--model", "resnet50"), "--model resnet50 is unknown"),
    "missing checkpoint": ("knn", ("--finetune", "none.pth"), "none.pth: No such file or directory"),
    "damaged checkpoint": ("fewshot", ("--finetune", "{tmp}/bad.pth"), "bad.pth is damaged"),
    "missing data": ("knn", ("--data_set", "folder", "--data_path", "nowhere"), "--data_path nowhere is not a folder"),
    "unlabelled data": (
        "knn",
        ("--data_set", "folder", "--data_path", "{tmp}/flat", "--split", "0.5"),
        "class folders",
    ),
    "no test data": ("knn", ("--data_set", "folder", "--data_path", "{tmp}/single"), "--split 0.8"),
    "too many neighbours": ("knn", ("--k", "5", "101"), "--k 101: there are only 100 training images"),
    "no neighbours": ("knn", ("--k", "0"), "argument --k: 0 must be at least 1"),
    "no memory": ("knn", ("--block_mb", "0"), "argument --block_mb: 0 must be at least 1"),
    "size": ("knn", ("--input_size", "18"), "not divisible by the patch size 4"),
    "distance": ("knn", ("--distance", "manhattan"), "invalid choice: 'manhattan'"),
    "batch of one": ("linprobe", ("--batch_size", "1"), "--batch_size 1: batch normalisation needs at least two"),
    "batch too large": ("linprobe", ("--batch_size", "101"), "100 training images do not fill one batch of 101"),
    "batch too large for the rest": ("linprobe-cached", ("--batch_size", "95", "--lr_grid", "1"), "90 training images"),
    "eval without head": ("linprobe", ("--eval",), "--eval needs --resume FILE"),
    "head without eval": ("linprobe", ("--resume", "x.pth"), "--eval needs --resume FILE"),
    "not a head": ("linprobe", ("--eval", "--resume", "{checkpoint}"), "is not the .pth of a finished linear probe"),
    "negative rate": ("linprobe", ("--lr", "-1"), "argument --lr: -1 must be above 0"),
    "nothing to train": ("linprobe", ("--start_epoch", "3"), "--start_epoch 3 leaves none of the 3 --epochs"),
    "log is a file": ("knn", ("--log_dir", "{tmp}/bad.pth"), "--log_dir {tmp}/bad.pth cannot be written: File exists"),
    "cache is a file": ("knn", ("--cache_dir", "{tmp}/bad.pth"), "--cache_dir {tmp}/bad.pth: File exists"),
    "cache below a file": ("knn", ("--cache_dir", "{tmp}/bad.pth/x"), "bad.pth/x: Not a directory"),
    "output too long": ("knn", ("--output_dir", "x" * 300), "File name too long"),
    "checkpoint too long": ("knn", ("--finetune", "x" * 300), "File name too long"),
    "binary class list": (
        "knn",
        ("--data_set", "folder", "--data_path", "{tmp}/single", "--split", "0.5", "--class_list", "{tmp}/binary"),
        "--class_list {tmp}/binary is not a text file",
    ),
    "meta device": ("knn", ("--device", "meta"), "--device meta is not supported; use cuda or cpu"),
    "mpirun": ("knn", ("--dist_on_itp",), "use torchrun"),
    "rate 0": ("linprobe", ("--lr_grid", "0", "1"), "argument --lr_grid: 0 must be above 0"),
    "two kinds of rate": ("linprobe", ("--lr_grid", "1", "--lr", "1"), "cannot be combined with --lr"),
    "few outputs": ("linprobe", ("--nb_classes", "9"), "--nb_classes 9 is less than the 10 classes"),
    "too many shots": ("fewshot", ("--shots", "11"), "--shots 11: too few training images in disc (10)"),
    "no shots": ("fewshot", ("--shots", "0"), "argument --shots: 0 must be at least 1"),
    "no penalty": ("fewshot", ("--l2", "0"), "argument --l2: 0 must be above 0"),
    "output is a file": ("knn", ("--output_dir", "{tmp}/bad.pth"), "--output_dir"),
    "device": ("knn", ("--device", "gpu9"), "--device 'gpu9'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(evaluate, tmp_path, monkeypatch, checkpoint, case):
    protocol, flags, expected = BAD[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.pth").write_bytes(b"PK")
    (tmp_path / "binary").write_bytes(b"\xff\0\xfe")
    for path in ("flat", "single/a"):
        (tmp_path / path).mkdir(parents=True)
        Image.new("RGB", (20, 20)).save(tmp_path / path / "a.png")
    code, _, err = evaluate(protocol, *(flag.format(tmp=tmp_path, checkpoint=checkpoint) for flag in flags))
    assert code == 2
    assert expected.format(tmp=tmp_path) in err
    assert len(err.splitlines()) == 1, err


ODD_PROBES = {
    "no list": {"probe": 5},
    "empty": {"probe": []},
    "no state": {"probe": [[[0], {}]]},
    "seeds in words": {"probe": [["x", {"bias": torch.zeros(1)}]]},
    "a protocol of its own": {"protocol": "../x"},
    "settings of nothing": {"settings": None},
}


@pytest.mark.parametrize("case", ODD_PROBES)
def test_what_is_no_finished_probe_is_refused(evaluate, tmp_path, case):
    probe = {"probe": [[[0], {"bias": torch.zeros(1)}]], "protocol": "linprobe", "settings": {}, "classes": []}
    torch.save({**probe, "train_images": 1, **ODD_PROBES[case]}, tmp_path / "probe.pth")
    code, _, err = evaluate("linprobe", "--eval", "--resume", tmp_path / "probe.pth")
    assert (code, "probe.pth is not the .pth of a finished linear probe" in err) == (2, True)


def test_class_folders_may_have_any_name(program, checkpoint, tmp_path, monkeypatch):
    """Not UTF-8, with line breaks, escapes, formulas or as long as a name can be; and the data's folder, too."""
    names = [b"caf\xe9", b"=cmd", b"a\nb", b"\x1b[31m", b"x" * 255]
    place = os.fsencode(tmp_path) + b"/d\xe9ta"
    for path in [os.path.join(place, split, name) for split in (b"train", b"val") for name in names]:
        os.makedirs(path)
        for index, colour in enumerate(("red", "blue")):
            Image.new("RGB", (20, 20), colour).save(os.fsdecode(path) + f"/{index}.png")
    monkeypatch.chdir(os.fsdecode(place))
    common = ("--data_path", ".", "--num_workers", 0, "--device", "cpu", "--finetune", checkpoint)
    for flags in ((main_knn,), (main_fewshot, "--shots", 1, "--runs", 1)):
        code, out, err = program(*flags, *common, "--output_dir", tmp_path / "out")
        assert (code, err) == (0, "")
        assert "\033" not in out
    code, _, err = program(main_fewshot, *common, "--output_dir", tmp_path / "out", "--shots", 3)
    assert (code, len(err.splitlines())) == (2, 1)
    assert program(main_compare, tmp_path / "out", "--output_dir", tmp_path / "compare")[0] == 0


def test_a_head_that_explodes_ends_with_exit_code_3(evaluate):
    code, _, err = evaluate("linprobe-cached", "--lr", 1e9, "--warmup_epochs", 0)
    assert code == 3
    assert "not finite" in err


# --- Two processes, and the way from one program to the next ---


@pytest.mark.parametrize("protocol", ["knn", "linprobe", "fewshot"])
def test_two_processes_give_the_result_of_one(evaluate, two_processes, tmp_path, checkpoint, protocol):
    flags = (*FLAGS[protocol], *{"linprobe": ("--batch_size", 13)}.get(protocol, ()))  # 13 in each of two processes
    data = (*SHAPES, "--shapes_images", 105)
    common = (*data, "--finetune", checkpoint, "--output_dir", tmp_path / "two")
    codes, out, err = two_processes(f"main_{protocol}", *common, *flags)
    assert (codes, err) == ([0, 0], "")
    assert out.count("105 training and 21 test images") == 1, "one process speaks"
    one = {"linprobe": ("--batch_size", 26)}.get(protocol, ())
    assert evaluate(protocol, *data, *one)[0] == 0
    (ours,), (theirs,) = lines(tmp_path / "out"), lines(tmp_path / "two")
    ours["settings"].pop("batch_size", None), theirs["settings"].pop("batch_size", None)
    assert ours["settings"] == theirs["settings"]
    a, b = predictions(tmp_path / "out", ours), predictions(tmp_path / "two", theirs)
    assert all(np.array_equal(a[name], b[name]) for name in ("images", "labels", "top5", "correct", "correct5"))


def test_two_processes_name_unreadable_images_once(two_processes, tmp_path, checkpoint, folder):
    """Including those of the second process, which is otherwise silent."""
    for path in ("cat/0.png", "eel/0.png"):
        (folder / "test" / path).write_bytes(b"")
    data = ("--data_path", folder, "--num_workers", 0, "--device", "cpu", "--finetune", checkpoint)
    codes, _, err = two_processes("main_knn", *data, "--output_dir", tmp_path / "out")
    assert codes == [0, 0], err
    assert err.count("unreadable image, left out") == 2
    assert "cat/0.png" in err
    assert "eel/0.png" in err
    assert lines(tmp_path / "out")[0]["images"] == {"train": 9, "test": 1, "unreadable": 2}


def test_evaluations_can_be_compared(evaluate, program, tmp_path):
    random = ("--finetune", "", "--model", "vit_micro_patch4", "--input_size", 16, "--output_dir", tmp_path / "floor")
    for protocol in FLAGS:
        assert evaluate(protocol)[0] == 0
        assert evaluate(protocol, *random)[0] == 0
    folders = (tmp_path / "floor", tmp_path / "out")
    code, out, err = program(main_compare, *folders, "--names", "random", "CL-MAE", "--output_dir", tmp_path / "cmp")
    assert (code, err) == (0, "")
    for title in ("nearest neighbour", "linear probing", "linear probing (cached features)", "Few-shot accuracy"):
        assert title in out
    assert "missing" not in out
    assert (tmp_path / "cmp" / "fewshot-shapes.pdf").exists()
