"""Features are extracted once, and only while checkpoint, images and transform stay as they were."""

import os

import pytest
import torch
from own_source import Greys
from PIL import Image
from safetensors import safe_open

import main_knn
from models_mae import mae_vit_micro_patch4
from util.arguments import DEFAULT_DATA_PATH
from util.checkpoint import save_checkpoint
from util.cli import UserError
from util.evaluation import features
from util.evaluation.subject import open_subject


@pytest.fixture
def data(tmp_path):
    """Two classes, 6 + 4 training and 3 + 2 test images of random pixels."""
    torch.manual_seed(0)
    for split, numbers in (("train", (6, 4)), ("val", (3, 2))):
        for name, number in zip("ab", numbers, strict=True):
            folder = tmp_path / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                pixels = torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "data"


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "checkpoint-0.pth"
    save_checkpoint(path, {"model": mae_vit_micro_patch4(img_size=16).state_dict()})
    return path


@pytest.fixture
def subject(data, checkpoint, tmp_path):
    def build(*flags):
        flags = ("--finetune", checkpoint, "--data_path", data, "--output_dir", tmp_path / "out", *flags)
        return open_subject(main_knn.get_args_parser().parse_args(["--num_workers", "0", *map(str, flags)]))

    return build


@pytest.fixture
def extractions(monkeypatch):
    """Counts how often images are encoded."""
    counted = []
    original = features.Fetcher
    monkeypatch.setattr(features, "Fetcher", lambda *a, **kwargs: counted.append(1) or original(*a, **kwargs))
    return counted


def cache_files(tmp_path):
    return sorted((tmp_path / "out" / "features").glob("*"))


def test_features_are_those_of_the_images_in_order(subject):
    found = subject("--batch_size", 4)
    encoded = [found.encoder.forward_features(found.datasets["train"][0, i][0][None]) for i in range(10)]
    train = found.features("train")
    torch.testing.assert_close(train.features, torch.cat(encoded), rtol=1e-4, atol=1e-5)
    assert train.labels.tolist() == [0] * 6 + [1] * 4
    assert train.indices.tolist() == list(range(10))
    assert found.names["train"][0] == "train/a/0.png"


def test_extracted_once_then_read(subject, extractions, tmp_path):
    first = subject().features("train")
    second = subject().features("train")
    assert len(extractions) == 1
    assert len(cache_files(tmp_path)) == 1
    for name, value in vars(first).items():
        assert torch.equal(value, getattr(second, name))


def test_splits_and_pooling_have_files_of_their_own(subject, extractions, tmp_path):
    for flags in ((), ("--global_pool",), ("--input_size", 24), ("--amp", "bf16")):
        subject(*flags).features("train")
        subject(*flags).features("val")
    assert len(extractions) == len(cache_files(tmp_path)) == 8


CHANGES = {
    "a new image": lambda data, _: Image.new("RGB", (9, 9)).save(data / "train" / "b" / "new.png"),
    "an image gone": lambda data, _: (data / "train" / "a" / "3.png").unlink(),
    "an image replaced": lambda data, _: Image.new("RGB", (9, 9)).save(data / "train" / "a" / "3.png"),
    "an image renamed": lambda data, _: (data / "train" / "a" / "3.png").rename(data / "train" / "a" / "x.png"),
    "an image in another class": lambda data, _: (data / "train" / "a" / "3.png").rename(
        data / "train" / "b" / "3x.png"
    ),
    "other weights": lambda _, path: save_checkpoint(path, {"model": mae_vit_micro_patch4(img_size=16).state_dict()}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_features_changes_the_key(subject, extractions, data, checkpoint, change):
    subject().features("train")
    CHANGES[change](data, checkpoint)
    subject().features("train")
    assert len(extractions) == 2


def test_two_images_of_equal_size_and_time_exchanged(subject, extractions, data):
    one, two, aside = (data / "train" / "a" / name for name in ("0.png", "1.png", "aside"))
    size = max(path.stat().st_size for path in (one, two))
    for path in (one, two):
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
        os.utime(path, ns=(0, 0))
    before = subject().features("train").features
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    torch.testing.assert_close(subject().features("train").features[[1, 0]], before[:2])
    assert len(extractions) == 2


def test_moving_the_data_changes_nothing(subject, extractions, data, tmp_path):
    subject("--data_name", "x").features("train")
    data.rename(tmp_path / "elsewhere")
    subject("--data_name", "x", "--data_path", tmp_path / "elsewhere").features("train")
    assert len(extractions) == 1


def test_a_source_of_ones_own_is_extracted_and_cached(subject, extractions):
    for values, number in (([0, 90, 200], 1), ([0, 90, 200], 1), ([0, 91, 200], 2)):
        own = subject()
        own.datasets["train"].source = Greys(values)
        train = own.features("train")
        assert train.labels.tolist() == [0, 0, 1]
        encoded = own.encoder.forward_features(own.datasets["train"][0, 1][0][None])
        torch.testing.assert_close(train.features[1:2], encoded, rtol=1e-4, atol=1e-5)
        assert len(extractions) == number


def test_a_subset_is_cached_apart_from_the_whole(subject, extractions, data):
    for flags in ((), ("--max_images", 4), ("--max_images", 4, "--split_seed", 1)):
        for _ in range(2):
            subject(*flags).features("train")
    assert len(extractions) == 3
    Image.new("RGB", (9, 9)).save(data / "train" / "a" / "3.png")
    subject("--max_images", 4).features("train")
    assert len(extractions) == 4


def trained_on(checkpoint, classes):
    save_checkpoint(checkpoint, {"model": mae_vit_micro_patch4(img_size=16).state_dict(), "args": {"classes": classes}})


def test_an_encoder_is_evaluated_on_the_classes_it_was_trained_on(subject, data, checkpoint, clmae_log):
    for split in ("train", "val"):
        (data / split / "c").mkdir()
        Image.new("RGB", (20, 24)).save(data / split / "c" / "0.png")
    trained_on(checkpoint, ["c", "a"])
    restricted = subject()
    assert restricted.classes == ["a", "c"]
    assert restricted.names["val"] == ["val/a/0.png", "val/a/1.png", "val/a/2.png", "val/c/0.png"]
    assert clmae_log.text.count(f"only the 2 of 3 classes that {checkpoint} was trained on; --num_classes 0") == 1
    assert restricted.features("train").labels.tolist() == [0] * 6 + [1]
    clmae_log.clear()
    assert subject("--num_classes", 0).classes == ["a", "b", "c"]
    assert f"all 3 classes; {checkpoint} was trained on 2 of them" in clmae_log.text


def test_flags_choose_classes_before_the_checkpoint_does(subject, data, checkpoint, tmp_path, clmae_log):
    trained_on(checkpoint, ["a"])
    (tmp_path / "names.txt").write_text("b")
    assert subject("--class_list", tmp_path / "names.txt").classes == ["b"]
    assert subject("--num_classes", 2).classes == ["a", "b"]
    assert "trained on" not in clmae_log.text


@pytest.mark.parametrize("classes", [["a", "b"], ["a", "zebra"], [], None], ids=["all", "other data", "none", "untold"])
def test_classes_of_other_data_do_not_restrict(subject, checkpoint, classes, clmae_log):
    trained_on(checkpoint, classes)
    assert subject().classes == ["a", "b"]
    assert "trained on" not in clmae_log.text


def test_classes_of_training_matter_for_folders_only(subject, checkpoint):
    trained_on(checkpoint, ["disc"])
    shapes = ("--data_set", "shapes", "--data_path", DEFAULT_DATA_PATH, "--shapes_images", 20)
    assert len(subject(*shapes).classes) == 10


def test_random_weights_of_another_seed_are_another_encoder(subject, extractions):
    for seed in (0, 1, 1):
        subject("--finetune", "", "--model", "vit_micro_patch4", "--input_size", 16, "--seed", seed).features("train")
    assert len(extractions) == 2


def test_no_cache(subject, extractions, tmp_path):
    for _ in range(2):
        subject("--no_cache").features("train")
    assert len(extractions) == 2
    assert not (tmp_path / "out" / "features").exists()


def test_cache_dir(subject, extractions, tmp_path):
    for output_dir in ("out1", "out2"):
        subject("--output_dir", tmp_path / output_dir, "--cache_dir", tmp_path / "shared").features("train")
    assert len(extractions) == 1


def rewritten(**changed):
    """Writes the file again, checksum included, with tensors that no extraction would give."""

    def damage(path):
        with safe_open(path, "pt") as file:
            key, old = file.metadata()["key"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        new = {name: change(old[name]) for name, change in changed.items()}
        features.write(path, features.FeatureSet(**old | new), {"key": new.get("key", key)})

    return damage


def flip(path):
    """One bit of the features, which are written last or before two small tensors."""
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "garbage": lambda path: path.write_bytes(bytes(5000)),
    "zeros at the end": lambda path: path.write_bytes(path.read_bytes()[:-100] + bytes(100)),
    "a flipped bit": flip,
    "not finite": rewritten(features=lambda x: x.index_fill(0, torch.tensor([3]), torch.nan)),
    "another width": rewritten(features=lambda x: x[:, 1:].contiguous()),
    "another type": rewritten(features=lambda x: x.double()),
    "fewer rows": rewritten(features=lambda x: x[1:].contiguous()),
    "other labels": rewritten(labels=lambda x: 1 - x),
    "images beyond the last": rewritten(indices=lambda x: x + 1),
    "an image twice": rewritten(indices=lambda x: x.clamp(max=8)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_extracted_again(subject, extractions, tmp_path, clmae_log, damage):
    expected = subject().features("train")
    (path,) = cache_files(tmp_path)
    DAMAGE[damage](path)
    again = subject().features("train")
    assert torch.equal(again.features, expected.features)
    assert len(extractions) == 2
    assert f"cannot use the cached features {path}" in clmae_log.text
    subject().features("train")
    assert len(extractions) == 2, "the file was written again"


def test_a_file_of_another_encoder_is_not_used(subject, extractions, tmp_path, clmae_log):
    expected = subject().features("train")
    (path,) = cache_files(tmp_path)
    features.write(path, expected, {"key": "0" * 64})
    subject().features("train")
    assert len(extractions) == 2
    assert "belongs to another encoder" in clmae_log.text


def test_verify_cache_sees_what_file_sizes_and_times_do_not_tell(subject, extractions, data):
    files = data / "train" / "a" / "0.png", data / "train" / "b" / "0.png"
    size = max(file.stat().st_size for file in files)
    contents = [file.read_bytes().ljust(size, b" ") for file in files]

    def put(order):
        for file, content in zip(files, order, strict=True):
            file.write_bytes(content)
            os.utime(file, ns=(0, 0))

    put(contents)
    first = subject("--verify_cache").features("train")
    subject("--verify_cache").features("train")
    assert len(extractions) == 1
    put(contents[::-1])
    second = subject("--verify_cache").features("train")
    assert len(extractions) == 2
    assert torch.equal(first.features[0], second.features[6])


def test_a_half_written_file_is_never_read(subject, extractions, tmp_path, monkeypatch):
    """Killed between writing and renaming: what is left has another name."""

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            subject().features("train")
    assert all(path.suffix == ".partial" for path in cache_files(tmp_path))
    subject().features("train")
    assert len(extractions) == 2


def test_a_full_disk_costs_the_cache_but_not_the_result(subject, tmp_path, monkeypatch, clmae_log):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    assert len(subject().features("train")) == 10
    assert "No space left on device" in clmae_log.text
    assert cache_files(tmp_path) == []


def test_unreadable_images_are_named_and_left_out(subject, data, clmae_log):
    (data / "train" / "a" / "2.png").write_bytes(b"not a picture")
    train = subject("--batch_size", 4).features("train")
    assert train.indices.tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    assert train.labels.tolist() == [0] * 5 + [1] * 4
    assert "unreadable image, left out" in clmae_log.text
    assert "a/2.png" in clmae_log.text
    with pytest.raises(UserError, match="--max_bad_images 0"):
        subject("--max_bad_images", 0, "--no_cache").features("train")
    for path in (data / "train").rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match="none of the 10 images can be read"):
        subject().features("train")


def test_links_to_nowhere_and_odd_names_are_no_obstacle(subject, data, clmae_log):
    (data / "train" / "a" / "gone.png").symlink_to("nowhere.png")
    os.rename(data / "train" / "b" / "0.png", os.fsencode(data / "train" / "b") + b"/caf\xe9.png")
    assert len(subject().features("train")) == 10
    assert "gone.png" in clmae_log.text
    assert "1 unreadable images of train are left out" in clmae_log.text


def test_a_cached_file_does_not_lift_the_limit(subject, data):
    (data / "train" / "a" / "2.png").write_bytes(b"")
    assert len(subject().features("train")) == 9
    with pytest.raises(UserError, match="1 images of train cannot be read, more than --max_bad_images"):
        subject("--max_bad_images", 0).features("train")


def test_features_that_are_not_finite_are_refused(subject, checkpoint):
    state = mae_vit_micro_patch4(img_size=16).state_dict()
    state["blocks.0.attn.qkv.weight"][:] = 1e30
    save_checkpoint(checkpoint, {"model": state})
    with pytest.raises(UserError, match="features are not finite"):
        subject().features("train")


def test_sha256(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert features.file_hash(tmp_path / "abc").startswith("ba7816bf8f01cfea")  # the standard's own example
