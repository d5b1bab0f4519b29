"""Where images come from, that a sample is a function of (seed, epoch, index), and what happens to damaged files."""

import errno
import hashlib
import os
import re
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from own_source import Greys
from PIL import Image
from processes import wait_until

from main_pretrain import check_args, get_args_parser
from util.cli import UserError
from util.data.sources import DEFAULT_DATA_PATH, Subset, build_source, image_names, labels_of
from util.datasets import (
    AugmentedDataset,
    EpochBatches,
    Fetcher,
    ImageLoader,
    build_eval_dataset,
    build_pretrain_loader,
    collate,
    normalise,
    pixel_statistics,
    pretrain_augmentation,
)
from util.program import end_children, shortage
from util.training.resume import data_identity


def parse(*flags):
    args = get_args_parser().parse_args(
        [
            "--model",
            "mae_vit_micro_patch4",
            "--input_size",
            "32",
            "--num_workers",
            "0",
            "--device",
            "cpu",
            *map(str, flags),
        ]
    )
    check_args(args)
    return args


def write_image(path, value=128, mode="RGB", size=(40, 40)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "1") else (value,) * len(mode)).save(path)


@pytest.fixture
def class_folders(tmp_path):
    """train/{a..f} with 4 images each, val/{a..f} with 2."""
    for split, number in (("train", 4), ("val", 2)):
        for name in "abcdef":
            for i in range(number):
                write_image(tmp_path / split / name / f"{i}.png", value=10 * i)
    return tmp_path


def batches(args, epochs=(0,)):
    loader = build_pretrain_loader(args)
    for epoch in epochs:
        loader.set_epoch(epoch)
        yield from loader


def test_number_of_workers_changes_nothing():
    flags = ("--data_set", "shapes", "--shapes_images", 40, "--batch_size", 8)
    none = list(batches(parse(*flags), epochs=(0, 1)))
    two = list(batches(parse(*flags, "--num_workers", 2), epochs=(0, 1)))
    assert len(none) == len(two) == 10
    for (imgs, labels, _), (imgs2, labels2, _) in zip(none, two, strict=True):
        assert torch.equal(imgs, imgs2)
        assert torch.equal(labels, labels2)


def test_a_sample_depends_on_seed_epoch_and_index_alone():
    flags = ("--data_set", "shapes", "--shapes_images", 20)
    dataset = build_pretrain_loader(parse(*flags, "--batch_size", 1)).dataset
    first = dataset[3, 7][0]
    torch.rand(100)
    dataset[0, 1]
    assert torch.equal(dataset[3, 7][0], first)
    assert not torch.equal(dataset[4, 7][0], first)
    other_seed = build_pretrain_loader(parse(*flags, "--batch_size", 1, "--seed", 1)).dataset
    assert not torch.equal(other_seed[3, 7][0], first)


def test_more_workers_than_cpus_are_not_started(monkeypatch, recwarn):
    """The default of 10 must not draw torch's warning on a small machine."""
    cpus = len(os.sched_getaffinity(0))
    dataset = build_eval_dataset(parse("--data_set", "shapes"), "val")
    assert Fetcher(dataset, [], collate, num_workers=cpus + 8).num_workers == cpus
    assert not recwarn.list
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert Fetcher(dataset, [], collate, num_workers=2).num_workers == 2


def test_a_killed_loader_process_changes_no_batch_and_is_told(clmae_log):
    flags = ("--data_set", "shapes", "--shapes_images", 32, "--batch_size", 4)
    expected = list(build_pretrain_loader(parse(*flags, "--num_workers", 0)))
    loader = build_pretrain_loader(parse(*flags, "--num_workers", 1))
    found = []
    for batch in loader:
        if not found:
            loader.fetcher._processes[0].kill()
        found.append(batch)
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(found, expected, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    assert loader.fetcher.fault in clmae_log.text
    assert "was killed, probably for lack of memory: lower --num_workers" in loader.fetcher.fault


@pytest.mark.parametrize("when", ["while the run continues", "at its end"])
def test_a_lock_that_a_killed_loader_process_held_blocks_nothing(when, monkeypatch):
    monkeypatch.setattr(torch.utils.data._utils, "python_exit_status", False)
    loader = build_pretrain_loader(parse("--data_set", "shapes", "--shapes_images", 32, "--batch_size", 4))
    loader.fetcher = Fetcher(loader.dataset, loader.batches, loader.fetcher.collate_fn, num_workers=1)
    batches = iter(loader)
    next(batches)
    stream = loader.fetcher._stream
    held = stream._workers_done_event._event._cond
    held.acquire()  # as if by the worker
    if when == "at its end":
        end_children()
    else:
        loader.fetcher._processes[0].kill()
        assert len(list(batches)) == 7
    ending = threading.Thread(target=stream._shutdown_workers, daemon=True)  # what the garbage collector would call
    ending.start()
    ending.join(10)
    blocked = ending.is_alive()
    held.release()
    assert not blocked


FAULTS = {
    "descriptors": (
        OSError(errno.EMFILE, "Too many open files"),
        "too few file descriptors: .*ulimit -n.*--num_workers",
    ),
    "descriptors, as a message": (RuntimeError("received 0 items of ancdata"), "too few file descriptors"),
    "shared memory": (
        RuntimeError("unable to write to file </torch_12_3_0>: No space left on device (28)"),
        "/dev/shm is full.*--num_workers 0",
    ),
    "memory": (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: .*--num_workers"),
    "something else": (
        EOFError("line 1\nline 2"),
        r"loader processes failed \(EOFError: line 1\); .*--num_workers 0",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_loader_processes_lack_is_told(monkeypatch, case):
    error, sentence = FAULTS[case]
    loader = build_pretrain_loader(parse("--data_set", "shapes", "--batch_size", 4, "--num_workers", 1))

    def fail():
        raise error

    monkeypatch.setattr(loader.fetcher, "_start", fail)
    imgs, _, _ = next(iter(loader))
    assert len(imgs) == 4
    assert re.search(sentence, loader.fetcher.fault)


def test_the_name_of_a_file_is_no_shortage():
    assert shortage(PermissionError(errno.EACCES, "Permission denied", "/dev/shm/run/out of memory")) is None
    assert "/dev/shm is full" in str(shortage(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1")))


def test_a_fault_of_ones_own_keeps_its_traceback(monkeypatch):
    """Even if it occurs first in a loader process."""
    dataset = build_pretrain_loader(parse("--data_set", "shapes")).dataset
    fetcher = Fetcher(dataset, [[(0, "index")]], collate, num_workers=1)
    fetcher.restart()
    with pytest.raises(TypeError) as found:
        fetcher.fetch([(0, "index")])
    assert "worker" not in str(found.value)
    end_children()


def test_a_source_of_ones_own_pretrains():
    values = list(range(0, 240, 6))
    dataset = AugmentedDataset(Greys(values), pretrain_augmentation(parse("--data_set", "shapes")), seed=0)
    ((imgs, labels, _),) = ImageLoader(dataset, EpochBatches(40, 40, seed=0))
    assert imgs.shape == (40, 3, 32, 32)
    assert sorted(imgs[:, 0, 0, 0].tolist()) == values
    assert torch.equal(labels, (imgs[:, 0, 0, 0] > 127).long())


def test_a_subset_of_any_source():
    source = Subset(Subset(Greys([10, 20, 200]), [2, 1]), [1, 0])
    assert image_names(source) == ["grey/20", "grey/200"]
    assert labels_of(source).tolist() == [0, 1]
    assert source.read(1).getpixel((0, 0)) == (200, 200, 200)
    assert len({each.fingerprint() for each in (source, source.source, Subset(source, [1]), Greys([10, 20, 200]))}) == 4


class Whoami(Greys):
    """Labels tell which process read an image."""

    def label(self, index):
        return os.getpid()


def test_workers_start_once():
    dataset = AugmentedDataset(Whoami([0] * 40), pretrain_augmentation(parse("--data_set", "shapes")), seed=0)
    loader = ImageLoader(dataset, EpochBatches(40, 4, seed=0, epochs=3), num_workers=2)
    processes = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        processes.append({pid for _, labels, _ in loader for pid in labels.tolist()})
    assert processes[0] == processes[1] == processes[2]
    assert len(processes[0] - {os.getpid()}) == min(2, len(os.sched_getaffinity(0)))


class Noted(AugmentedDataset):
    """Notes each (epoch, index) that is loaded, in whatever process."""

    def view(self, data, key):
        with open(self.notes, "a") as file:
            file.write("{} {}\n".format(*key))
        return super().view(data, key)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_is_loaded_while_the_one_before_it_ends(tmp_path, workers):
    dataset = Noted(Greys([0] * 23), pretrain_augmentation(parse("--data_set", "shapes")), seed=0)
    dataset.notes = tmp_path / "notes"
    # Four of five batches: the last would begin an accumulation that the epoch does not complete.
    loader = ImageLoader(dataset, EpochBatches(23, 4, seed=0, epochs=3, accum_iter=2), num_workers=workers)

    def indices(epoch, first_batch=0):
        loader.set_epoch(epoch, first_batch)
        return [index.tolist() for _, _, index in loader]

    whole = [indices(0)]
    if workers:
        wait_until(lambda: "\n1 " in dataset.notes.read_text(), seconds=60)
    whole += [indices(1), indices(2)]
    assert [len(epoch) for epoch in whole] == [4, 4, 4]
    once = [f"{epoch} {index}" for epoch, batches in enumerate(whole) for batch in batches for index in batch]
    assert dataset.notes.read_text().split("\n") == [*once, ""], "nothing twice, nothing after the last epoch"
    for epoch, first_batch in ((2, 1), (0, 3), (1, 0)):
        assert indices(epoch, first_batch) == whole[epoch][first_batch:], "resuming starts anywhere"


@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_batches_are_bytes_until_the_device(tmp_path, in_chans):
    write_image(tmp_path / "a.jpg", value=200)
    args = parse("--data_path", tmp_path, "--in_chans", in_chans, "--batch_size", 1)
    imgs, _, _ = next(iter(batches(args)))
    assert (imgs.shape, imgs.dtype) == ((1, in_chans, 32, 32), torch.uint8)
    normalised = normalise(imgs)
    assert (normalised.dtype, normalised.is_contiguous()) == (torch.float32, True)
    image, _, _ = build_eval_dataset(args, "train")[0, 0]  # of one colour, so the crop does not matter
    assert torch.allclose(normalised[0], image, atol=0.02)


@pytest.mark.parametrize("flags", [(), ("--exact_decode",)])
def test_jpeg_samples_do_not_depend_on_workers_or_history(tmp_path, flags):
    rng = np.random.default_rng(0)
    for i in range(8):
        pixels = rng.integers(0, 256, (60 + i, 90 - i, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((200, 150 + i)).save(tmp_path / f"{i}.jpg")
    args = [parse("--data_path", tmp_path, "--batch_size", 4, "--num_workers", n, *flags) for n in (0, 2)]
    none, two = (torch.cat([imgs for imgs, _, _ in batches(a, epochs=(0, 1))]) for a in args)
    assert torch.equal(none, two)
    loader = build_pretrain_loader(args[0])
    loader.set_epoch(1, first_batch=1)
    assert torch.equal(next(iter(loader))[0], none[12:])


def test_loading_draws_nothing_from_the_global_generator():
    torch.manual_seed(0)
    state = torch.get_rng_state()
    list(batches(parse("--data_set", "shapes", "--shapes_images", 8, "--batch_size", 4)))
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_share_the_global_batches_of_one_process():
    whole = list(EpochBatches(103, 8, seed=3))
    halves = [list(EpochBatches(103, 4, seed=3, rank=rank, world_size=2)) for rank in range(2)]
    assert len(whole) == len(halves[0]) == 12
    assert [a + b for a, b in zip(*halves, strict=True)] == whole
    sampler = EpochBatches(103, 8, seed=3)
    seen = {index for batch in sampler for _, index in batch}
    assert len(seen) == 96, "no image twice in an epoch"
    assert list(sampler.of_epoch(1)) != whole


def test_class_folders(class_folders):
    args = parse("--data_path", class_folders)
    train, val = build_source(args, "train"), build_source(args, "val")
    assert (len(train), len(val), train.classes) == (24, 12, list("abcdef"))
    assert labels_of(train).tolist() == sorted(list(range(6)) * 4)
    # The classes may also lie directly in the folder.
    assert len(build_source(parse("--data_path", class_folders / "train"), "train")) == 24


def test_flat_folder_needs_no_classes(tmp_path):
    for i in range(3):
        write_image(tmp_path / f"{i}.JPG")
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "empty").mkdir()
    source = build_source(parse("--data_path", tmp_path), "train")
    assert (len(source), source.classes) == (3, [])


def test_random_choice_of_classes(class_folders):
    def chosen(*flags):
        return build_source(parse("--data_path", class_folders, *flags), "train").classes

    three = chosen("--num_classes", 3)
    assert len(three) == 3
    assert three == sorted(three) == chosen("--num_classes", 3)
    assert len({tuple(chosen("--num_classes", 3, "--class_seed", seed)) for seed in range(10)}) > 1
    assert build_source(parse("--data_path", class_folders, "--num_classes", 3), "val").classes == three
    with pytest.raises(UserError, match="--num_classes 7: choose from 1 to 6"):
        chosen("--num_classes", 7)


def test_class_list(class_folders, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("e\n\nb\n")
    args = parse("--data_path", class_folders, "--class_list", names)
    assert build_source(args, "train").classes == ["b", "e"]
    names.write_text("e\nzebra\n")
    with pytest.raises(UserError, match="zebra"):
        build_source(args, "train")
    with pytest.raises(UserError, match=r"--class_list .*No such file"):
        build_source(parse("--data_path", class_folders, "--class_list", tmp_path / "none"), "train")


def test_training_needs_a_folder_called_train_beside_val(class_folders):
    """Otherwise, Train and val would be class folders, and both would be trained on."""
    (class_folders / "train").rename(class_folders / "Train")
    for split in ("pretrain", "train", "val"):
        with pytest.raises(UserError, match=r"has val but no train; rename its training folder to train"):
            build_source(parse("--data_path", class_folders), split)
    (class_folders / "val").rename(class_folders / "Test")
    with pytest.raises(UserError, match="has Test but no train"):
        build_source(parse("--data_path", class_folders), "pretrain")


def test_the_default_folder_says_how_to_fill_it(tmp_path, monkeypatch, class_folders):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        build_source(parse("--data_path", DEFAULT_DATA_PATH), "train")
    assert str(error.value) == (
        "--data_path data/imagenet is not a folder; "
        "link your data there (ln -s /data/imagenet data/imagenet) or pass --data_path"
    )
    with pytest.raises(UserError, match=r"nowhere is not a folder$"):
        build_source(parse("--data_path", "nowhere"), "train")
    with pytest.raises(UserError, match="--data_set cifar10 needs --data_path"):
        build_source(parse("--data_set", "cifar10", "--data_path", DEFAULT_DATA_PATH), "train")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "imagenet").symlink_to(class_folders)
    assert len(build_source(parse("--data_path", DEFAULT_DATA_PATH), "train")) == 24


@pytest.fixture
def one_folder(tmp_path):
    """A single folder of classes: a with 10 images, b with 5, c with 2, d with 1."""
    for name, number in (("a", 10), ("b", 5), ("c", 2), ("d", 1)):
        for i in range(number):
            write_image(tmp_path / name / f"{i}.png")
    return tmp_path


def test_split_divides_every_class(one_folder):
    def samples(source):
        return list(zip(image_names(source), labels_of(source).tolist(), strict=True))

    def part(split, *flags):
        return samples(build_source(parse("--data_path", one_folder, "--split", 0.8, *flags), split))

    train, test = part("train"), part("val")
    assert sorted(train + test) == sorted(samples(build_source(parse("--data_path", one_folder), "train")))
    counts = [[sum(label == c for _, label in each) for c in range(4)] for each in (train, test)]
    assert counts == [[8, 4, 1, 1], [2, 1, 1, 0]], "80 % each, and both parts get an image where there are two"
    assert part("train") == train == part("pretrain")
    assert len({tuple(part("train", "--split_seed", seed)) for seed in range(5)}) > 1


def as_pixels(data):
    return data if isinstance(data, bytes) else data.tobytes()


@pytest.mark.parametrize("data", ["folder", "shapes"])
def test_so_many_images_are_drawn_from_each_split(class_folders, data):
    flags = ("--data_path", class_folders) if data == "folder" else ("--data_set", "shapes", "--shapes_images", 60)

    def names(split, *more):
        return image_names(build_source(parse(*flags, *more), split))

    for split in ("train", "val"):
        few = names(split, "--max_images", 9)
        assert len(few) == 9 == len(set(few))
        assert set(few) < set(names(split))
        assert few == sorted(few, key=names(split).index)
        assert names(split, "--max_images", 1000) == names(split)
        assert len({tuple(names(split, "--max_images", 9, "--split_seed", seed)) for seed in range(4)}) > 1
    pretrain, train = (build_source(parse(*flags, "--max_images", 9), split) for split in ("pretrain", "train"))
    assert [as_pixels(pretrain.read(i)) for i in range(9)] == [as_pixels(train.read(i)) for i in range(9)]
    assert data_identity(pretrain) == data_identity(train)
    with pytest.raises(SystemExit):
        parse(*flags, "--max_images", 0)


def test_split_is_for_a_single_folder(class_folders, one_folder):
    with pytest.raises(UserError, match=r"--split divides a single folder of classes, but .*/val"):
        build_source(parse("--data_path", class_folders, "--split", 0.5), "train")
    with pytest.raises(UserError, match=r"no folder val or test.*--split 0\.8"):
        build_source(parse("--data_path", one_folder / "a"), "val")
    for share in (0, 1, 80):
        with pytest.raises(SystemExit):
            parse("--data_path", one_folder, "--split", share)


def test_training_and_held_out_images_have_the_same_classes(class_folders, tmp_path):
    """Otherwise, a class could not be tested, or could never be correct. Only selected classes must agree."""
    for path in (class_folders / "val" / "b").iterdir():
        path.unlink()
    write_image(class_folders / "val" / "zebra" / "0.png")
    args = parse("--data_path", class_folders)
    with pytest.raises(UserError, match=r"differ: only train has b and only val has zebra; .*--class_list"):
        build_source(args, "val")
    assert len(build_source(args, "train")) == 24
    (tmp_path / "names.txt").write_text("a\nd\n")
    chosen = ("--data_path", class_folders, "--class_list", tmp_path / "names.txt")
    assert labels_of(build_source(parse(*chosen), "val")).tolist() == [0, 0, 1, 1]
    (tmp_path / "names.txt").write_text("a\nb\n")
    with pytest.raises(UserError, match="differ: only train has b; "):
        build_source(parse(*chosen), "val")


def test_names_do_not_depend_on_where_the_data_lies(class_folders, monkeypatch):
    monkeypatch.chdir(class_folders)
    for data_path in (class_folders, f"{class_folders}/", ".", f"../{class_folders.name}"):
        source = build_source(parse("--data_path", data_path), "val")
        assert image_names(source)[:3] == ["val/a/0.png", "val/a/1.png", "val/b/0.png"]
        assert source.read(0) == (class_folders / "val" / "a" / "0.png").read_bytes()
    shapes = parse("--data_set", "shapes", "--shapes_images", 10)
    assert image_names(build_source(shapes, "val")) == ["shapes/val/0", "shapes/val/1"]
    assert build_source(shapes, "pretrain").name(3) == "shapes/pretrain/3"


def test_the_identity_of_data_in_existing_checkpoints():
    """Otherwise, earlier runs could not be resumed."""
    flags = ("--data_set", "shapes", "--shapes_images", 3)
    digest = hashlib.sha256(b"shapes/pretrain/0\nshapes/pretrain/1\nshapes/pretrain/2").hexdigest()
    for split in ("pretrain", "train"):  # pretraining, fine-tuning
        assert data_identity(build_source(parse(*flags), split)) == f"3 images, {digest[:16]}"


@pytest.mark.parametrize(
    ("flags", "unused"),
    [
        *((f"--data_set {name} --{flag}", f"--{flag.split()[0]} has no effect with --data_set {name}")
          for name in ("shapes", "cifar10")
          for flag in ("split 0.5", "num_classes 3", "class_list names.txt", "file_list files.txt")),
        ("--data_set shapes --data_path data", "--data_path has no effect with --data_set shapes"),
        ("--data_set shapes --download", "--download has no effect with --data_set shapes"),
        ("--data_path data --download", "--download has no effect with --data_set folder"),
        ("--data_path data --class_seed 1", "--class_seed has no effect without --num_classes"),
        ("--data_path data --split_seed 1", "--split_seed has no effect without --split or --max_images"),
        ("--data_path data --num_classes 3 --class_list names.txt", "--num_classes has no effect with --class_list"),
    ],
)  # fmt: skip
def test_a_flag_without_effect_is_refused(flags, unused):
    """It would be recorded with the run as if it had had one."""
    with pytest.raises(UserError, match=f"^{unused}; leave it out"):
        parse(*flags.split())


def test_no_classes_means_all(class_folders):
    for flags in (("--data_path", class_folders, "--num_classes", 0), ("--data_set", "shapes", "--num_classes", 0)):
        assert len(build_source(parse(*flags), "train").classes) == (6 if "--data_path" in flags else 10)


def test_fashion_mnist_files(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for name, number in (("train", 5), ("t10k", 3)):
        images = np.arange(number * 784, dtype=np.int64).astype(np.uint8)
        header = struct.pack(">4B3i", 0, 0, 8, 3, number, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">4Bi", 0, 0, 8, 1, number) + bytes(range(number)))
    flags = ("--data_set", "fashion_mnist", "--data_path", tmp_path)
    assert len(build_eval_dataset(parse(*flags), "val")) == 3
    source = build_source(parse(*flags), "train")
    assert labels_of(source).tolist() == list(range(5))
    assert (source.name(4), len(source.classes)) == ("fashion_mnist/train/4", 10)
    colour, label, _ = build_eval_dataset(parse(*flags), "train")[0, 4]
    grey, _, _ = build_eval_dataset(parse(*flags, "--in_chans", 1), "train")[0, 4]
    assert (colour.shape, grey.shape, label) == ((3, 32, 32), (1, 32, 32), 4)


def test_pretraining_on_stl10_uses_its_unlabelled_images_too(tmp_path, monkeypatch):
    def stl10(root, split, download):
        return SimpleNamespace(labels=np.array([0, 1]), classes=split)

    monkeypatch.setattr("torchvision.datasets.STL10", stl10)
    args = parse("--data_set", "stl10", "--data_path", tmp_path)
    parts = [build_source(args, split).classes for split in ("pretrain", "train", "val")]
    assert parts == ["train+unlabeled", "train", "test"]


def test_processes_download_one_after_the_other(tmp_path, monkeypatch):
    """torchvision neither expects nor survives another process that writes the same files."""
    busy, overlaps = threading.Lock(), []

    def stl10(root, split, download):
        overlaps.append(not busy.acquire(blocking=False))
        time.sleep(0.2)
        if not overlaps[-1]:
            busy.release()
        return SimpleNamespace(labels=np.array([0]), classes=[])

    monkeypatch.setattr("torchvision.datasets.STL10", stl10)
    args = parse("--data_set", "stl10", "--data_path", tmp_path / "new", "--download")
    both = [threading.Thread(target=build_source, args=(args, "train")) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join()
    assert overlaps == [False, False]
    (tmp_path / "no_lock" / ".download.lock").mkdir(parents=True)  # such as in a folder of somebody else's
    args.data_path = str(tmp_path / "no_lock")
    assert build_source(args, "train").label(0) == 0


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "stl10", "fashion_mnist"])
def test_absent_torchvision_set_says_how_to_get_it(tmp_path, name):
    with pytest.raises(UserError, match=f"--data_set {name} is not in .*--download"):
        build_source(parse("--data_set", name, "--data_path", tmp_path), "train")


def test_images_are_normalised_as_upstream(tmp_path):
    write_image(tmp_path / "a.png", value=255)
    image, _, _ = build_eval_dataset(parse("--data_path", tmp_path), "train")[0, 0]
    expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(image, expected.view(3, 1, 1).expand(3, 32, 32), atol=1e-6)
    assert [len(values) for values in pixel_statistics(4)] == [4, 4]


@pytest.mark.parametrize(("size", "expected"), [(224, (256, 224)), (384, (384, 384)), (32, (36, 32))])
def test_evaluation_crops_the_centre_as_upstream(size, expected):
    transform = build_eval_dataset(parse("--data_set", "shapes", "--input_size", size), "train").transform
    resize, crop = transform.transforms[:2]
    assert (resize.size, tuple(crop.size)) == ([expected[0]], (expected[1], expected[1]))


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "CMYK", "1"])
@pytest.mark.parametrize("in_chans", [1, 3, 4])
def test_any_kind_of_image_gets_the_asked_channels(tmp_path, mode, in_chans):
    write_image(tmp_path / ("a.tif" if mode == "CMYK" else "a.png"), mode=mode, value=1)
    image, _, bad = build_eval_dataset(parse("--data_path", tmp_path, "--in_chans", in_chans), "train")[0, 0]
    assert image.shape == (in_chans, 32, 32)
    assert not bad


def test_non_square_input(tmp_path):
    write_image(tmp_path / "a.png", size=(50, 20))
    args = parse("--data_path", tmp_path, "--input_size", 16, 32, "--batch_size", 1)
    assert build_eval_dataset(args, "train")[0, 0][0].shape == (3, 16, 32)
    assert next(iter(batches(args)))[0].shape == (1, 3, 16, 32)


def test_unreadable_images_are_named_replaced_and_counted(class_folders, clmae_log):
    (class_folders / "train" / "a" / "0.png").write_bytes(b"not a picture")
    jpeg = class_folders / "train" / "b" / "cut.jpg"
    write_image(jpeg, size=(200, 200))
    jpeg.write_bytes(jpeg.read_bytes()[:600])
    args = parse("--data_path", class_folders, "--batch_size", 25)
    loader = build_pretrain_loader(args)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for imgs, _, _ in loader:
            assert imgs.shape == (25, 3, 32, 32)
    assert len(loader.bad_images.names) == 2
    assert clmae_log.text.count("unreadable image") == 2, "each is named once"
    assert "a/0.png" in clmae_log.text
    assert "b/cut.jpg" in clmae_log.text


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_images_end_the_run(class_folders, workers):
    for path in (class_folders / "train").glob("[abc]/*.png"):
        path.write_bytes(b"")
    flags = ("--data_path", class_folders, "--batch_size", 24, "--num_workers", workers)
    assert len(list(batches(parse(*flags, "--max_bad_images", 12)))) == 1
    with pytest.raises(UserError, match="more than --max_bad_images 3 allows"):
        list(batches(parse(*flags, "--max_bad_images", 3)))
    with pytest.raises(UserError, match="more than --max_bad_images 0 allows"):
        list(batches(parse(*flags, "--max_bad_images", 0)))


def test_no_readable_image_at_all(tmp_path):
    (tmp_path / "only.jpg").write_bytes(b"")
    with pytest.raises(UserError, match="none of the 1 images can be read"):
        list(batches(parse("--data_path", tmp_path, "--batch_size", 1)))
