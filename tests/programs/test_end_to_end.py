"""From images to a verdict, with the programs a user would call: a minute of CL-MAE on the built-in shapes."""

import csv

import pytest

import main_compare
import main_fewshot
import main_knn
import main_linprobe
import main_pretrain

PRETRAIN = (
    *("--model", "mae_vit_micro_patch4", "--input_size", "16", "--mask_ratio", "0.5"),
    *("--data_set", "shapes", "--shapes_images", "2000", "--num_workers", "1"),
    *("--epochs", "20", "--warmup_epochs", "1", "--batch_size", "32", "--blr", "16e-3", "--cmm_depth", "1"),
)
EVALUATE = (
    *("--model", "vit_micro_patch4", "--input_size", "16", "--global_pool"),
    *("--data_set", "shapes", "--shapes_images", "5000", "--num_workers", "0"),
)


@pytest.mark.slow
def test_a_minute_of_pretraining_beats_random_weights_in_every_protocol(program, tmp_path):
    code, _, err = program(main_pretrain, *PRETRAIN, "--output_dir", tmp_path / "run")
    assert (code, err) == (0, "")
    for name, checkpoint in (("random", ""), ("clmae", tmp_path / "run")):
        common = (*EVALUATE, "--finetune", checkpoint, "--output_dir", tmp_path / name)
        assert program(main_knn, *common)[0] == 0
        grid = ("--cache_features", "--lr_grid", 3, 10, 30, "--batch_size", 250, "--runs", 3)
        assert program(main_linprobe, *common, *grid)[0] == 0
        assert program(main_fewshot, *common, "--shots", 16, "--runs", 3)[0] == 0
    code, out, _ = program(main_compare, tmp_path / "random", tmp_path / "clmae", "--output_dir", tmp_path / "compare")
    assert code == 0
    with open(tmp_path / "compare" / "compare.csv", newline="", encoding="utf-8") as file:
        rows = {row["protocol"]: row for row in csv.DictReader(file) if row["run"] == "clmae"}
    assert rows.keys() == {"knn", "linprobe-cached", "fewshot"}
    for row in rows.values():
        assert float(row["gain1"]) > 5, out
        assert float(row["p1"]) < 0.001, out
