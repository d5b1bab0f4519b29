"""A folder is scanned once, by the first process, whatever links it contains; loaders share the result."""

import multiprocessing
import os
import random
import threading

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torchvision.datasets import ImageFolder

import main_knn
import main_pretrain
from util import misc
from util.cli import UserError
from util.data.listing import Names, list_images
from util.data.sources import ImageList, build_source, image_names, labels_of
from util.datasets import build_pretrain_loader
from util.evaluation.subject import open_subject
from util.training.monitor import Monitor


def parse(*flags):
    common = ("--model", "mae_vit_micro_patch4", "--input_size", "16", "--num_workers", "0", "--output_dir", "")
    args = main_pretrain.get_args_parser().parse_args([*common, *map(str, flags)])
    main_pretrain.check_args(args)
    return args


def samples(source):
    return list(zip(image_names(source), labels_of(source).tolist(), strict=True))


@pytest.fixture
def data(tmp_path):
    """train and val, with three classes of two images each, one in a folder of its own."""
    for split in ("train", "val"):
        for name in ("a", "a-b", "c"):
            for file in ("1.jpg", "sub/2.png"):
                path = tmp_path / "data" / split / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (20, 20)).save(path)
    return tmp_path / "data"


@pytest.fixture
def listed(data, monkeypatch):
    """The folders of the data that have been listed."""
    found = []

    def count(name, original):
        def counted(path="."):
            if str(path).startswith(str(data)):
                found.append(str(path))
            return original(path)

        monkeypatch.setattr(os, name, counted)

    for name in ("scandir", "listdir"):
        count(name, getattr(os, name))
    return found


def test_every_program_lists_each_folder_once(data, listed, tmp_path):
    folders = [os.path.join(data, ""), *sorted(str(path) for path in data.rglob("*") if path.is_dir())]
    listed.clear()
    args = parse("--data_path", data, "--knn_every", 1, "--batch_size", 2)
    listing = list_images(args)
    build_pretrain_loader(args, listing)
    Monitor(args, torch.device("cpu"), listing)
    assert sorted(listed) == folders
    listed.clear()
    flags = ("--model", "vit_micro_patch4", "--input_size", "16", "--data_path", str(data))
    open_subject(main_knn.get_args_parser().parse_args([*flags, "--output_dir", str(tmp_path / "out")]))
    assert sorted(listed) == folders


def test_images_come_in_the_order_of_torchvision(data):
    """So that runs started with either see the same images."""
    theirs = ImageFolder(data / "train")
    ours = samples(build_source(parse("--data_path", data), "train"))
    assert [(str(data / name), label) for name, label in ours] == theirs.samples


def test_a_saved_list_replaces_the_scan(data, listed, tmp_path, clmae_log):
    flags = ("--data_path", data, "--file_list", tmp_path / "lists" / "files.txt")
    scanned = [samples(build_source(parse(*flags), split)) for split in ("train", "val")]
    lines = (tmp_path / "lists" / "files.txt").read_text().splitlines()
    assert lines == [name for part in scanned for name, _ in part]
    Image.new("RGB", (20, 20)).save(data / "train" / "a" / "new.jpg")
    listed.clear()
    assert [samples(build_source(parse(*flags), split)) for split in ("train", "val")] == scanned
    assert listed == []
    assert "12 images listed in" in clmae_log.text
    random.Random(0).shuffle(lines)
    (tmp_path / "lists" / "files.txt").write_text("\n".join(lines))
    assert samples(build_source(parse(*flags), "train")) == scanned[0], "such as from find, in any order"


def test_a_run_leaves_the_list_of_its_images(data, tmp_path, cli):
    flags = ("--model", "mae_vit_micro_patch4", "--input_size", 16, "--data_path", data, "--num_workers", 0)
    flags += ("--epochs", 1, "--warmup_epochs", 0, "--batch_size", 4, "--masking", "random", "--output_dir", tmp_path)
    code, _, err = cli(*flags)
    assert code == 0, err
    assert (tmp_path / "files.txt").read_text().startswith("train/a/1.jpg\ntrain/a/sub/2.png\n")
    code, out, err = cli(*flags, "--resume", "auto", "--file_list", tmp_path / "files.txt")
    assert code == 0, err
    assert "is not scanned" in out


@pytest.mark.parametrize("text", ["/data/train/a/1.jpg", "n01440764\nn01443537", "train/a/1.jpg\r\n", "\0\1\xff"])
def test_a_file_that_is_no_list_of_images(data, tmp_path, text):
    (tmp_path / "files.txt").write_text(text)
    with pytest.raises(UserError, match=r"--file_list .*files.txt, line 1: .* is not an image path below --data_path"):
        build_source(parse("--data_path", data, "--file_list", tmp_path / "files.txt"), "train")


def test_held_out_images_without_training_images_in_a_list(data, tmp_path):
    (tmp_path / "files.txt").write_text("Train/a/1.jpg\nval/a/1.jpg\n")
    with pytest.raises(UserError, match="has val but no train"):
        build_source(parse("--data_path", data, "--file_list", tmp_path / "files.txt"), "train")


def test_links_change_neither_labels_nor_counts(data, clmae_log):
    expected = [samples(build_source(parse("--data_path", data), split)) for split in ("train", "val")]
    (data / "train" / "a" / "up").symlink_to(data)  # a loop, which also leads to the held-out images
    (data / "train" / "a" / "0").symlink_to(data / "train" / "c")  # another class
    (data / "val" / "c" / "self").symlink_to(".")
    (data / "train" / "z").symlink_to("z")
    assert [samples(build_source(parse("--data_path", data), split)) for split in ("train", "val")] == expected
    assert f"left out: {data}/train/a/0, {data}/train/a/up, {data}/val/c/self" in clmae_log.text
    (data / "train" / "a").rename(data / "elsewhere")
    (data / "train" / "a").symlink_to(data / "elsewhere")
    assert [samples(build_source(parse("--data_path", data), split)) for split in ("train", "val")] == expected


def test_pipes_and_devices_are_unreadable_images(data, clmae_log):
    """Reading one might never end."""
    os.mkfifo(data / "train" / "a" / "0.jpg")
    (data / "train" / "a" / "2.jpg").symlink_to("/dev/zero")
    loader = build_pretrain_loader(parse("--data_path", data, "--batch_size", 8))
    assert len(list(loader)) == 1
    assert "train/a/0.jpg (OSError: not a regular file)" in clmae_log.text
    assert "train/a/2.jpg (OSError: not a regular file); 2 so far" in clmae_log.text
    for flag in ("--file_list", "--class_list"):
        with pytest.raises(UserError, match=f"{flag} .*: not a regular file"):
            build_source(parse("--data_path", data, flag, data / "train" / "a" / "0.jpg"), "train")


def test_a_folder_that_cannot_be_listed_is_not_passed_over(data, monkeypatch):
    def locked(path, original=os.scandir):
        if str(path).endswith("c"):
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(UserError, match="train/c cannot be listed: Permission denied"):
        build_source(parse("--data_path", data), "train")


def dirty_megabytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty")) / 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="needs Linux's count of copied pages")
def test_loader_processes_share_the_list_of_images():
    """A list of 300,000 strings would be copied as it is read: about 30 MB in each process."""
    source = ImageList(Names.pack(f"train/n{i // 1281:08d}/n{i // 1281:08d}_{i:07d}.JPEG" for i in range(300_000)))

    def read_all(results):
        before = dirty_megabytes()
        for index in range(len(source)):
            source.name(index), source.label(index)
        results.put(dirty_megabytes() - before)

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=read_all, args=(results,))
    child.start()
    assert results.get() < 5
    child.join()


def test_names_that_are_not_utf8():
    strange = os.fsdecode(b"caf\xe9.png")
    names = Names.pack(["a.png", strange, ""])
    assert list(names) == ["a.png", strange, ""]


def in_two_processes(function, tmp_path):
    """What `function` returns in each of two processes that have joined."""

    def join(rank, results):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=rank, world_size=2)
        results.put((rank, function(rank)))
        dist.destroy_process_group()

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=join, args=(rank, results)) for rank in (0, 1)]
    for child in children:
        child.start()
    found = dict(results.get() for _ in children)
    for child in children:
        child.join()
    return [found[0], found[1]]


def test_only_the_first_process_scans_and_nobody_loses_patience(data, listed, tmp_path, monkeypatch):
    """The others hear from it while it scans, which may take longer than processes wait for each other."""
    expected = samples(build_source(parse("--data_path", data), "val"))
    listed.clear()
    monkeypatch.setattr(misc, "HEARTBEAT", 0.01)
    heard, several = [], threading.Event()

    def broadcast(*args, original=dist.broadcast, **kwargs):
        original(*args, **kwargs)
        heard.append(1)
        if len(heard) == 3:
            several.set()

    def slow(path, original=os.scandir):
        several.wait()
        return original(path)

    def work(rank):
        source = build_source(parse("--data_path", data), "val")
        with pytest.raises(UserError) as error:
            build_source(parse("--data_path", data / "nowhere"), "val")
        return samples(source), len(listed), len(heard) >= 4, str(error.value)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    monkeypatch.setattr(os, "scandir", slow)
    first, second = in_two_processes(work, tmp_path)
    assert first[0] == second[0] == expected
    assert (first[1], second[1]) == (15, 0)
    assert (first[2], second[2]) == (True, True)
    assert first[3] == second[3] == f"--data_path {data}/nowhere is not a folder"
