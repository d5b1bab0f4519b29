"""Images in tables: the same files in any format give the same batches, labels, names and errors."""

import io
import json
import os
import pickle
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from test_datasets import batches, parse

import main_knn
from util.cli import UserError
from util.data.listing import list_images
from util.data.sources import build_source, image_names, labels_of
from util.datasets import build_eval_dataset, build_pretrain_loader
from util.evaluation.features import content_hash
from util.training.resume import data_identity

datasets = pytest.importorskip("datasets")
CLASSES = ["zebra", "ant", "bee"]  # labels need not be in the order of names
BROKEN = b"\xff\xd8\xff no image"


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets.disable_progress_bars()


def photo(seed: int) -> bytes:
    pixels, file = np.random.default_rng(seed).integers(0, 256, (12, 15, 3), dtype=np.uint8), io.BytesIO()
    Image.fromarray(pixels).resize((60, 48)).save(file, "JPEG", quality=90)
    return file.getvalue()


def rows_of(split: str, per_class: int) -> list[dict]:
    """Classes alternate, so that rows are not grouped by class as files in folders are."""
    first = 0 if split == "train" else 100
    return [
        {"image": {"bytes": photo(first + 10 * label + i), "path": f"{i}.jpg"}, "label": label}
        for i in range(per_class)
        for label in range(len(CLASSES))
    ]


SPLITS = {"train": rows_of("train", 4), "validation": rows_of("validation", 2)}
FEATURES = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=CLASSES)})


def tables(splits: dict = SPLITS):
    return datasets.DatasetDict(
        {split: datasets.Dataset.from_list(rows, features=FEATURES) for split, rows in splits.items()}
    )


def write_tar(path, rows: list[dict], label_file=lambda label: ("cls", str(label))) -> None:
    with tarfile.open(path, "w") as tar:
        for number, row in enumerate(rows):
            suffix, text = label_file(row["label"])
            for end, content in (("jpg", row["image"]["bytes"]), (suffix, text.encode())):
                entry = tarfile.TarInfo(f"{number:04}.{end}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))


@pytest.fixture
def places(tmp_path) -> dict[str, str]:
    """The same images as folders, with classes in the order of their labels, and in all kinds of tables."""
    for split, rows in SPLITS.items():
        for row in rows:
            file = tmp_path / "folder" / split[:5].replace("valid", "val") / str(row["label"]) / row["image"]["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(row["image"]["bytes"])
    for folder in ("parquet", "shards"):
        (tmp_path / folder).mkdir()
    for split, table in tables().items():
        table.to_parquet(tmp_path / "parquet" / f"{split}-00000-of-00001.parquet")
    tables().save_to_disk(tmp_path / "saved")
    half = len(SPLITS["train"]) // 2
    write_tar(tmp_path / "shards" / "photos-train-000.tar", SPLITS["train"][:half])
    write_tar(tmp_path / "shards" / "photos-train-001.tar", SPLITS["train"][half:])
    write_tar(tmp_path / "shards" / "photos-val-000.tar", SPLITS["validation"])
    named = {name: str(tmp_path / name) for name in ("folder", "parquet", "saved", "shards")}
    return named | {"shards": str(tmp_path / "shards" / "*.tar"), "hub": f"hf:{tmp_path / 'parquet'}"}


def test_the_same_photographs_give_the_same_batches(places):
    def of(place, *flags):
        args = parse("--data_path", places[place], "--batch_size", 4, *flags)
        val = build_eval_dataset(args, "val")
        return list(batches(args, epochs=(0, 1))), [val[0, index][:2] for index in range(len(val))]

    expected, expected_val = of("folder")
    assert len(expected) == 6
    for place in ("parquet", "saved", "shards", "hub"):
        found, found_val = of(place, *(["--num_workers", 2] if place == "shards" else []))
        for (imgs, labels, index), (other, other_labels, other_index) in zip(expected, found, strict=True):
            assert torch.equal(imgs, other)
            assert torch.equal(labels, other_labels)
            assert torch.equal(index, other_index)
        for (image, label), (other, other_label) in zip(expected_val, found_val, strict=True):
            assert torch.equal(image, other)
            assert label == other_label


def test_labels_classes_and_names(places, tmp_path):
    listing = list_images(parse("--data_path", places["parquet"]))
    train, val = (build_source(parse(), split, listing=listing) for split in ("train", "val"))
    assert train.classes == val.classes == CLASSES
    assert labels_of(val).tolist() == [0, 0, 1, 1, 2, 2]
    assert image_names(val)[:3] == ["validation/0:0.jpg", "validation/3:1.jpg", "validation/1:0.jpg"]
    assert train.read(4) == SPLITS["train"][1]["image"]["bytes"]

    def chosen(*flags, split="train"):
        return build_source(parse(*flags), split, listing=listing)

    (tmp_path / "list").write_text("bee\nzebra\n")
    assert chosen("--class_list", tmp_path / "list").classes == ["zebra", "bee"]
    two = chosen("--num_classes", 2)
    assert len(two) == 8
    assert two.classes == chosen("--num_classes", 2, split="val").classes
    assert len(chosen("--max_images", 5)) == 5
    with pytest.raises(UserError, match="--split divides a single folder"):
        chosen("--split", 0.5)

    flags = ("--data_path", tmp_path / "shards" / "photos-train-*.tar", "--split", 0.75)
    train, val = (build_source(parse(*flags), split) for split in ("train", "val"))
    assert (len(train), len(val), train.classes) == (9, 3, ["0", "1", "2"])
    assert not set(image_names(train)) & set(image_names(val))


def test_loader_processes_map_tables_instead_of_copying_them(places):
    source = build_source(parse("--data_path", places["parquet"]), "train")
    size = sum(len(row["image"]["bytes"]) for row in SPLITS["train"])
    sent = pickle.dumps(source)
    assert len(sent) < size / 2
    assert pickle.loads(sent).read(3) == source.read(3)


def test_conversion_happens_once_beside_the_files_or_in_cache_dir(places, tmp_path):
    def converted(folder):
        return {path: path.stat().st_mtime_ns for path in folder.rglob("*-*.arrow")}

    build_source(parse("--data_path", places["shards"]), "train")
    first = converted(tmp_path / "shards")
    assert len(first) == 2
    build_source(parse("--data_path", places["shards"]), "val")
    assert converted(tmp_path / "shards") == first
    build_source(parse("--data_path", places["parquet"], "--cache_dir", tmp_path / "elsewhere"), "train")
    assert converted(tmp_path / "elsewhere")
    assert not converted(tmp_path / "parquet")


def test_fingerprint_and_identity_follow_the_content(places, tmp_path):
    def source(*flags):
        return build_source(parse("--data_path", places["parquet"], *flags), "train")

    before, found = source(), source()
    assert before.fingerprint() == found.fingerprint() != source("--num_classes", 2).fingerprint()
    other = {**SPLITS, "train": [SPLITS["train"][0] | {"image": {"bytes": photo(99), "path": "0.jpg"}}]}
    other["train"] += SPLITS["train"][1:]
    file = tmp_path / "parquet" / "train-00000-of-00001.parquet"
    tables(other)["train"].to_parquet(file)
    os.utime(file, (1, 1))
    changed = source()
    assert changed.fingerprint() != before.fingerprint()
    assert content_hash(changed) != content_hash(before)
    assert data_identity(changed) == data_identity(before) != data_identity(source("--num_classes", 2))


def test_unreadable_rows_are_replaced_and_named(tmp_path):
    rows = [dict(row) for row in SPLITS["train"]]
    rows[3] = {"image": {"bytes": BROKEN, "path": "1.jpg"}, "label": 0}
    rows[4] = {"image": None, "label": 1}
    tables({"train": rows}).save_to_disk(tmp_path / "saved")
    args = parse("--data_path", tmp_path / "saved", "--batch_size", 4)
    loader = build_pretrain_loader(args)
    assert len(list(loader)) == 3
    assert len(loader.bad_images.names) == 2
    assert any(name.startswith("train/3:1.jpg (OSError: ") for name in loader.bad_images.names)
    assert "train/4 (OSError: the row has no image)" in loader.bad_images.names
    with pytest.raises(UserError, match="more than --max_bad_images 1 allows"):
        list(
            build_pretrain_loader(parse(*("--data_path", tmp_path / "saved", "--max_bad_images", 1, "--batch_size", 4)))
        )


def test_columns_are_found_or_named(tmp_path):
    write_tar(
        tmp_path / "a.tar", SPLITS["train"], lambda label: ("json", json.dumps({"label": CLASSES[label], "w": 1}))
    )
    assert build_source(parse("--data_path", tmp_path / "a.tar"), "train").classes == sorted(CLASSES)

    plain = datasets.Dataset.from_dict(
        {
            "photo": [row["image"]["bytes"] for row in SPLITS["train"]],  # as others write it: bytes, without a type
            "thumb": [BROKEN] * 12,
            "kind": [row["label"] for row in SPLITS["train"]],
        }
    )
    (tmp_path / "plain").mkdir()
    plain.to_parquet(tmp_path / "plain" / "0.parquet")
    with pytest.raises(UserError, match="--image_column must name one of photo, thumb"):
        build_source(parse("--data_path", tmp_path / "plain"), "train")
    flags = ("--data_path", tmp_path / "plain", "--image_column", "photo")
    assert build_source(parse(*flags), "pretrain").classes == []
    labelled = build_source(parse(*flags, "--label_column", "kind"), "train")
    assert labelled.classes == ["0", "1", "2"]
    assert labelled.read(1) == SPLITS["train"][3]["image"]["bytes"]
    with pytest.raises(UserError, match="--label_column nothing is not among photo, thumb, kind"):
        build_source(parse(*flags, "--label_column", "nothing"), "train")


def test_what_holds_no_image_files_is_refused(tmp_path, monkeypatch, places):
    def refusal(path, *flags):
        with pytest.raises(UserError) as error:
            build_source(parse("--data_path", path, *flags), "train")
        return str(error.value)

    for name, column in {"text": ["a.jpg"], "pixels": [[[1, 2], [3, 4]]]}.items():
        datasets.Dataset.from_dict({name: column}).save_to_disk(tmp_path / name)
        assert "no column with the content of image files; there are " + name in refusal(tmp_path / name)
    assert "matches no file" in refusal(tmp_path / "*.tar")
    assert "are for tables" in refusal(places["folder"], "--image_column", "image")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "train.parquet").write_bytes(b"PAR1 not at all")
    assert "bad cannot be opened: " in refusal(tmp_path / "bad")
    datasets.DatasetDict({"test": tables()["train"]}).save_to_disk(tmp_path / "test_only")
    assert "has test but no train split" in refusal(tmp_path / "test_only")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "hf:someone/photos:small cannot be opened: Couldn't reach 'someone/photos'" in refusal(
        "hf:someone/photos:small"
    )
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("hf:someone/photos").endswith("pip install datasets")


MODEL = ("--model", "mae_vit_micro_patch4", "--input_size", 16, "--batch_size", 4)
MICRO = (*MODEL, "--num_workers", 0, "--device", "cpu")


def losses(folder) -> list[float]:
    return [json.loads(line)["train_loss"] for line in (folder / "log.txt").read_text().splitlines()]


@pytest.fixture
def evaluated(program, places, tmp_path):
    """The accuracy that main_knn.py finds, and its settings."""

    def call(place: str, *flags) -> dict:
        out = tmp_path / f"eval-{place}"
        flags = ("--finetune", tmp_path / "run-folder", "--data_path", places[place], "--output_dir", out, *flags)
        code, _, err = program(main_knn, *flags, "--k", 3, "--num_workers", 0, "--device", "cpu")
        assert code == 0, err
        assert len(list((out / "features").glob("*.safetensors"))) == 2
        line = json.loads((out / "results.jsonl").read_text())
        return {name: line[name] for name in ("acc1", "acc5", "settings")}

    return call


def test_runs_on_the_same_photographs_learn_the_same_and_resume(cli, evaluated, places, tmp_path):
    flags = (*MICRO, "--epochs", 2, "--warmup_epochs", 0, "--save_every", 1, "--knn_every", 1)
    for place in ("folder", "parquet", "shards"):
        code, _, err = cli(*flags, "--data_path", places[place], "--output_dir", tmp_path / f"run-{place}")
        assert code == 0, err
    expected = losses(tmp_path / "run-folder")
    assert losses(tmp_path / "run-parquet") == losses(tmp_path / "run-shards") == expected
    assert not (tmp_path / "run-parquet" / "files.txt").exists()
    first = tmp_path / "run-parquet" / "checkpoint-0.pth"
    code, _, err = cli(*flags, "--data_path", places["saved"], "--output_dir", tmp_path / "resumed", "--resume", first)
    assert (code, losses(tmp_path / "resumed")) == (0, expected[1:]), err
    assert evaluated("folder") == evaluated("parquet")


def test_two_processes_open_what_the_first_converts(places, two_processes):
    flags = ("--model", "vit_micro_patch4", "--num_workers", 0, "--device", "cpu", "--k", 3, "--output_dir", "")
    codes, out, err = two_processes("main_knn", *flags, "--data_path", places["shards"])
    assert codes == [0, 0], err
    assert "shards: 12 training and 6 test images of 3 classes" in out
