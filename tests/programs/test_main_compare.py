"""Hand-made results folders in, tables and curves out: what is bold, starred, missing, warned about and refused."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.stats import binom

import main_compare
from util.cli import LONGEST_LABEL, logger, plain
from util.evaluation.compare import Comparison, Gain, mcnemar
from util.evaluation.results import FEW_SHOT, Score, read_predictions, read_results
from util.evaluation.tables import gain_and_p, p_value, show_table, tallies
from util.plots.curves import few_shot_figure

ROOT = Path(__file__).parents[2]
N = 100
NAMES = np.array([f"val/{'cat' if i % 2 else 'dog'}/{i:04d}.jpg" for i in range(N)])
LABELS = np.arange(N) % 2


@pytest.fixture
def cli(program, monkeypatch, tmp_path):
    """The program, run in tmp_path."""
    monkeypatch.chdir(tmp_path)
    return partial(program, main_compare)


def right(start, stop):
    """Only the images from `start` to `stop` are recognised: bool [1, N], a single seed."""
    return (np.arange(N)[None] >= start) & (np.arange(N)[None] < stop)


def accuracies(correct, correct5):
    """Accuracies of bool [R, N], as the evaluations write them."""
    percents = 100 * correct.mean(axis=1), 100 * correct5.mean(axis=1)
    several = len(correct) > 1
    return {
        **{f"acc{k}": values.mean() for k, values in zip((1, 5), percents, strict=True)},
        **{f"acc{k}_std": values.std() if several else None for k, values in zip((1, 5), percents, strict=True)},
    }


def add_result(folder, correct, correct5=None, protocol="knn", data="cifar10", images=NAMES, labels=LABELS, **changed):
    """Append a line and write its predictions: bool [R, N]; for few-shot {shots: bool [R, N]}."""
    folder.mkdir(parents=True, exist_ok=True)
    correct5 = right(0, 80) if correct5 is None else correct5
    name = changed.get("predictions") or f"{protocol}-{data}-0.npz".replace("/", "_")
    if protocol == "fewshot":
        by_shots = {shots: accuracies(hits, hits) for shots, hits in correct.items()}
        line = {**by_shots[max(by_shots)], "shots": {str(shots): values for shots, values in by_shots.items()}}
        hits = np.stack(list(correct.values()))
        arrays = {"correct": hits, "correct5": hits, "shots": np.array(list(correct))}
    else:
        line, arrays = accuracies(correct, correct5), {"correct": correct, "correct5": correct5}
    seeds = np.arange(arrays["correct"].shape[-2])
    np.savez(folder / name, **{"images": images, "labels": labels, "seeds": seeds, **arrays})
    line |= {"protocol": protocol, "data": data, "predictions": name, "classes": 10, "runs": len(seeds)}
    line |= {"checkpoint": f"runs/{folder.name}/checkpoint-7.pth", "checkpoint_sha256": f"{folder.name:0<64}"}
    line |= {"settings": {"model": "vit_micro_patch4", "pooling": "cls_token", "input_size": [32, 32]}} | changed
    with open(folder / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture
def pair(tmp_path):
    """MAE recognises 40 of 100 images, CL-MAE those and 20 more; both have 80 within five, but not the same 80."""
    add_result(tmp_path / "mae", right(0, 40), right(0, 80))
    add_result(tmp_path / "clmae", right(0, 60), right(1, 81))
    return tmp_path / "mae", tmp_path / "clmae"


P_20_TO_0 = 2 * 0.5**20  # all of 20 fair coins on one side, in either direction: 1.9e-06


def line_with(text, *parts):
    (line,) = [line for line in text.splitlines() if all(part in line for part in parts)]
    return line


def read_csv(folder):
    with open(folder / "compare.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def hits_of(only_a, only_b, both=7, neither=11):
    a = [True] * only_a + [False] * only_b + [True] * both + [False] * neither
    b = [False] * only_a + [True] * only_b + [True] * both + [False] * neither
    return np.array(a), np.array(b)


@pytest.mark.parametrize(("b", "c"), [(0, 1), (0, 10), (1, 9), (5, 5), (3, 4), (12, 40), (100, 60), (300, 420)])
def test_mcnemar_is_the_two_sided_binomial_sum(b, c):
    n = b + c
    expected = min(1, 2 * sum(math.comb(n, k) for k in range(min(b, c) + 1)) / 2**n)
    assert mcnemar(*hits_of(b, c)) == pytest.approx(expected, rel=1e-9)
    assert mcnemar(*hits_of(c, b)) == pytest.approx(expected, rel=1e-9)
    assert expected == pytest.approx(min(1, 2 * binom.cdf(min(b, c), n, 0.5)), rel=1e-9)


def test_mcnemar_of_known_tables():
    assert mcnemar(*hits_of(1, 9)) == pytest.approx(22 / 1024)
    assert mcnemar(*hits_of(0, 10)) == pytest.approx(2 / 1024)
    assert mcnemar(*hits_of(0, 0)) == 1
    assert mcnemar(*hits_of(6, 6)) == 1
    assert mcnemar(*hits_of(4, 9, both=0, neither=0)) == mcnemar(*hits_of(4, 9, both=5000, neither=900))


def test_p_values_are_short_and_never_say_zero():
    shown = [p_value(p) for p in (1.0, 0.0214, 0.001, 0.00099, 1.234e-5, 0.0)]
    assert shown == ["1.000", "0.021", "0.001", "9.9e-04", "1.2e-05", "<1e-300"]


def test_a_loss_too_small_to_show_is_no_minus_zero():
    assert [cell.number for cell in gain_and_p(Gain(-0.001, 0.9, True))] == ["+0.00", "0.900"]


def test_every_flag_has_a_help_text():
    assert all(action.help for action in main_compare.get_args_parser()._actions)


def test_two_runs_in_every_format(cli, pair):
    code, out, err = cli(*pair, "--names", "MAE", "CL-MAE", "--output_dir", "out")
    assert (code, err) == (0, "")
    row = line_with(out, "nearest neighbour", "cifar10")
    assert row.split()[3:] == ["40.00", "80.00", "60.00", "80.00", "+20.00*", "1.9e-06", "+0.00", "1.000"]
    assert "CL-MAE over MAE" in out
    assert "McNemar" in out
    assert "seeds" not in out, "one seed each: nothing to say about several"
    assert Path("out/compare.txt").read_text(encoding="utf-8").strip() in out

    markdown = line_with(Path("out/compare.md").read_text(encoding="utf-8"), "cifar10")
    cells = [cell.strip() for cell in markdown.strip("|").split("|")]
    assert cells[2:] == ["40.00", "**80.00**", "**60.00**", "**80.00**", r"+20.00\*", "1.9e-06", "+0.00", "1.000"]

    tex = line_with(Path("out/compare.tex").read_text(encoding="utf-8"), "cifar10")
    cells = [cell.strip() for cell in tex.removesuffix(r"\\").split("&")]
    assert cells[2:6] == ["40.00", r"\textbf{80.00}", r"\textbf{60.00}", r"\textbf{80.00}"]
    assert cells[6:] == ["+20.00$^{*}$", r"$1.9\cdot10^{-6}$", "+0.00", "1.000"]

    baseline, other = read_csv(Path("out"))
    assert (baseline["run"], baseline["acc1"], baseline["gain1"], baseline["p1"]) == ("MAE", "40.0", "", "")
    assert (other["protocol"], other["data"], other["shots"], other["run"]) == ("knn", "cifar10", "", "CL-MAE")
    assert float(other["gain1"]) == 20
    assert float(other["p1"]) == pytest.approx(P_20_TO_0)
    assert (float(other["gain5"]), float(other["p5"]), other["acc1_std"]) == (0, 1, "")
    assert other["checkpoint"] == "runs/clmae/checkpoint-7.pth"
    assert Path(other["predictions"]).exists()


def test_tex_is_a_booktabs_tabular_with_as_many_cells_everywhere(cli, pair):
    assert cli(*pair, "--output_dir", "out")[0] == 0
    tex = Path("out/compare.tex").read_text(encoding="utf-8")
    (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", tex)
    body = [line for line in tex.splitlines() if line.endswith(r"\\")]
    assert [line.count("&") for line in body[1:]] == [len(columns) - 1] * 2
    spans = [int(span) for span in re.findall(r"\\multicolumn\{(\d)\}", body[0])]
    assert sum(spans) + columns.count("l") == len(columns)
    assert [rule in tex for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\end{tabular}")] == [True] * 4


def test_best_is_bold_on_a_terminal_and_plain_in_a_pipe(cli, pair, monkeypatch):
    assert "\033" not in cli(*pair)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = cli(*pair)[1]
    assert re.findall("\033\\[1m(.*?)\033\\[0m", out) == ["80.00", "60.00", "80.00"]
    assert "\033" not in Path("compare/compare.txt").read_text(encoding="utf-8")


def test_losses_are_shown_with_their_sign(cli, pair):
    mae, clmae = pair
    code, out, _ = cli(clmae, mae, "--output_dir", "out")
    assert code == 0
    assert "-20.00*" in line_with(out, "cifar10")
    assert "$-$20.00$^{*}$" in Path("out/compare.tex").read_text(encoding="utf-8")


def test_three_runs_are_each_tested_against_the_first(cli, pair, tmp_path):
    add_result(tmp_path / "third", right(0, 50), right(0, 80))
    code, out, _ = cli(*pair, tmp_path / "third", "--output_dir", "out")
    assert code == 0
    assert "clmae over mae" in out
    assert "third over mae" in out
    rows = {row["run"]: row for row in read_csv(Path("out"))}
    assert [float(rows[name]["gain1"]) for name in ("clmae", "third")] == [20, 10]
    assert float(rows["third"]["p1"]) == pytest.approx(2 / 1024)
    assert "+10.00  " in line_with(out, "cifar10"), "0.002 earns no star"
    markdown = line_with(Path("out/compare.md").read_text(encoding="utf-8"), "cifar10")
    assert re.findall(r"\*\*(.*?)\*\*", markdown) == ["80.00", "60.00", "80.00", "80.00"]


def test_one_run_gives_its_table_without_gains(cli, pair):
    mae, _ = pair
    (mae / "knn-cifar10-0.npz").unlink()  # not needed where nothing is paired
    code, out, err = cli(mae / "results.jsonl", "--output_dir", "out")
    assert (code, err) == (0, "")
    assert line_with(out, "cifar10").split()[2:] == ["cifar10", "40.00", "80.00"]
    assert "gain" not in out
    assert "**" not in Path("out/compare.md").read_text(encoding="utf-8")


def test_protocols_by_name_and_in_the_tables_order(cli, tmp_path):
    for protocol in ("mystery", "linprobe-cached", "linprobe", "knn-cosine", "knn"):
        add_result(tmp_path / "mae", right(0, 40), protocol=protocol)
    add_result(tmp_path / "mae", right(0, 45), protocol="knn", data="stl10")
    code, out, _ = cli(tmp_path / "mae")
    assert code == 0
    assert [line.split("  ")[0] for line in out.splitlines() if "40.00" in line] == [
        "nearest neighbour",
        "nearest neighbour (cosine)",
        "linear probing",
        "linear probing (cached features)",
        "mystery",
    ]
    assert line_with(out, "45.00").split()[0] == "stl10", "a protocol is named once for all its data sets"


SEEDS = np.concatenate([right(0, 40), right(0, 50), right(0, 60)])  # 40, 50 and 60 percent


def test_several_seeds_show_their_deviation_and_the_least_certain_counts(cli, tmp_path):
    add_result(tmp_path / "mae", SEEDS, SEEDS, protocol="linprobe")
    better = np.concatenate([right(0, 90), right(0, 55), right(0, 90)])
    add_result(tmp_path / "clmae", better, better, protocol="linprobe")
    code, out, _ = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 0
    std = 100 * math.sqrt(2 / 3) / 10
    assert f"50.00 ± {std:.2f}" in line_with(out, "cifar10")
    assert f"50.00 $\\pm$ {std:.2f}" in Path("compare/compare.tex").read_text(encoding="utf-8")
    other = read_csv(Path("compare"))[1]
    assert float(other["gain1"]) == pytest.approx((50 + 5 + 30) / 3)
    assert float(other["p1"]) == pytest.approx(2 / 2**5), "5 images of the second seed, not 85 of all"
    assert "p is the largest over seeds" in out
    assert "*" not in line_with(out, "cifar10")


def test_no_star_where_a_seed_contradicts_the_others(cli, tmp_path):
    add_result(tmp_path / "mae", SEEDS, SEEDS, protocol="linprobe")
    worse_at_first = np.concatenate([right(0, 10), right(0, 90), right(0, 90)])
    add_result(tmp_path / "clmae", worse_at_first, worse_at_first, protocol="linprobe")
    code, out, _ = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 0
    row = line_with(out, "cifar10")
    assert "1.9e-09" in row  # 30 to 0
    assert "+13.33" in row
    assert "*" not in row


def test_seeds_are_paired_by_their_number(cli, tmp_path):
    """Seed 1 is the only one that both have; in order of position, 40 would meet 55."""
    add_result(tmp_path / "mae", SEEDS, SEEDS, protocol="linprobe", seed=0)
    add_result(tmp_path / "clmae", right(0, 55), right(0, 55), protocol="linprobe", seed=1)
    path = tmp_path / "clmae" / "linprobe-cifar10-0.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "seeds": np.array([1])})
    code, _, err = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 0
    assert float(read_csv(Path("compare"))[1]["p1"]) == pytest.approx(2 / 2**5)
    assert "seed: 0 against 1" in err
    assert "runs: 3 against 1" in err


def test_few_classes_are_said(cli, tmp_path):
    add_result(tmp_path / "mae", right(0, 40), classes=2)
    assert "cifar10 has 2 classes: Acc@5 is uninformative" in cli(tmp_path / "mae")[1]


@pytest.fixture
def few_shot(tmp_path):
    shots = {1: SEEDS, 4: SEEDS | right(60, 70), 16: SEEDS | right(60, 80)}
    add_result(tmp_path / "mae", shots, protocol="fewshot")
    add_result(tmp_path / "clmae", {n: hits | right(80, 100) for n, hits in shots.items()}, protocol="fewshot")
    return tmp_path / "mae", tmp_path / "clmae"


def test_few_shot_table_has_a_row_per_number_of_shots(cli, few_shot):
    code, out, err = cli(*few_shot)
    assert (code, err) == (0, "")
    assert "Few-shot accuracy" in out
    assert "protocol" not in out, "there is no other table"
    rows = read_csv(Path("compare"))
    assert [(row["shots"], row["run"]) for row in rows] == [
        (shots, run) for shots in ("1", "4", "16") for run in ("mae", "clmae")
    ]
    assert [round(float(row["acc1"])) for row in rows] == [50, 70, 60, 80, 70, 90]
    assert [float(row["p1"]) for row in rows if row["p1"]] == pytest.approx([P_20_TO_0] * 3)
    assert line_with(out, "70.00 ± 8.16", "90.00 ± 8.16", "+20.00*").split()[0] == "16"


def test_few_shot_curves_as_png_and_pdf(cli, few_shot):
    assert cli(*few_shot)[0] == 0
    with Image.open("compare/fewshot-cifar10.png") as picture:
        assert picture.size == (1000, 700)
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 10
    pdf = Path("compare/fewshot-cifar10.pdf")
    assert pdf.read_bytes().startswith(b"%PDF")
    first = pdf.read_bytes()
    assert cli(*few_shot)[0] == 0
    assert pdf.read_bytes() == first, "equal results, equal files"


def test_curve_shows_means_deviations_and_names():
    (axes,) = few_shot_figure("a$b$", {"_mae": [(1, 20.0, 2.0), (16, 30.0, None)], "clmae": []}).axes
    (bars,) = axes.containers
    assert bars.lines[0].get_ydata().tolist() == [20, 30]
    low, high = bars.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (18, 22)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16"]
    assert [text.get_text().strip() for text in axes.get_legend().get_texts()] == ["_mae"]
    assert axes.get_xscale() == "log"


def test_what_a_run_lacks_is_a_dash_and_listed(cli, pair, tmp_path):
    mae, clmae = pair
    add_result(mae, right(0, 55), protocol="linprobe", data="stl10")
    add_result(clmae, right(0, 55), protocol="linprobe", data="shapes")
    add_result(mae, {1: SEEDS, 2: SEEDS, 4: SEEDS}, protocol="fewshot")
    add_result(clmae, {2: SEEDS}, protocol="fewshot")
    code, out, _ = cli(mae, clmae)
    assert code == 0
    assert line_with(out, "stl10", "55.00").split()[-6:] == ["-"] * 6
    assert line_with(out, "shapes", "55.00").split()[-8:] == ["-", "-", "55.00", "80.00", "-", "-", "-", "-"]
    assert "missing: clmae has no linear probing on stl10\n" in out
    assert "missing: mae has no linear probing on shapes\n" in out
    assert "missing: clmae has no few-shot on cifar10 with 1, 4 shots\n" in out
    assert "missing" in Path("compare/compare.md").read_text(encoding="utf-8")
    lone = line_with(Path("compare/compare.md").read_text(encoding="utf-8"), "stl10", "55.00")
    assert "**" not in lone, "alone is not best"
    shots = [(row["shots"], row["run"]) for row in read_csv(Path("compare")) if row["protocol"] == "fewshot"]
    assert shots == [("1", "mae"), ("2", "mae"), ("2", "clmae"), ("4", "mae")]


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        (np.where(np.arange(N) == 7, "val/cat/x.jpg", NAMES), LABELS, "image 7 is val/cat/0007.jpg (label 1)"),
        (NAMES[::-1], LABELS[::-1], "image 0 is val/dog/0000.jpg (label 0) in one and val/cat/0099.jpg (label 1)"),
        (NAMES, np.where(np.arange(N) == 9, 5, LABELS), "val/cat/0009.jpg (label 5) in the other"),
    ],
    ids=["names", "order", "labels"],
)
def test_predictions_on_other_images_are_not_paired(cli, tmp_path, images, labels, expected):
    add_result(tmp_path / "mae", right(0, 40))
    add_result(tmp_path / "clmae", right(0, 60), images=images, labels=labels)
    code, _, err = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 2
    assert len(err.splitlines()) == 1
    for part in ("mae/knn-cifar10-0.npz and ", "clmae/knn-cifar10-0.npz cover different images", expected):
        assert part in err
    assert not Path("compare").exists()


def test_fewer_images_are_not_paired(cli, tmp_path):
    add_result(tmp_path / "mae", right(0, 40))
    part = slice(0, 50)
    few = dict(images=NAMES[part], labels=LABELS[part])
    add_result(tmp_path / "clmae", right(0, 40)[:, part], right(0, 80)[:, part], **few)
    code, _, err = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 2
    assert "one has 100 images and the other 50" in err


def test_damaged_lines_are_named_and_left_out(cli, pair):
    mae, clmae = pair
    good = (mae / "results.jsonl").read_bytes()
    no_number = good.replace(b'"acc1": 40.0', b'"acc1": NaN')
    (mae / "results.jsonl").write_bytes(b"\xff\xfe\n[1, 2]\n\n" + good + no_number + b'{"protocol": "knn", "da')
    code, out, err = cli(mae, clmae)
    assert code == 0
    assert err == f"WARNING: {mae / 'results.jsonl'}: skipped damaged lines: 1, 2, 5, 6\n"
    assert "+20.00*" in out


def test_last_of_several_results_is_used_and_said(cli, pair):
    mae, clmae = pair
    add_result(mae, right(0, 50), checkpoint="runs/mae/checkpoint-9.pth")
    code, out, err = cli(mae, clmae)
    assert (code, err) == (0, "")
    assert "has 2 results of nearest neighbour on cifar10; using the last (runs/mae/checkpoint-9.pth" in out
    assert "+10.00" in line_with(out, "60.00")


def test_settings_that_differ_are_warned_of(cli, tmp_path):
    add_result(tmp_path / "mae", right(0, 40), settings={"pooling": "cls_token", "k": 1, "size": [32, 32]})
    changed = {"pooling": "global_pool", "size": [32, 32], "distance": "cosine"}
    add_result(tmp_path / "clmae", right(0, 60), settings=changed, classes=5, checkpoint=None)
    code, _, err = cli(tmp_path / "mae", tmp_path / "clmae")
    assert code == 0
    assert err == (
        "WARNING: nearest neighbour on cifar10, mae against clmae: pooling: cls_token against global_pool, "
        "k: 1 against not set, classes: 10 against 5, distance: not set against cosine; this could explain a gain\n"
    )
    for name in ("compare.txt", "compare.tex"):
        assert "caution: nearest neighbour on cifar10, mae" in Path("compare", name).read_text(encoding="utf-8")


def test_results_of_several_checkpoints_under_one_name_are_warned_of(cli, pair):
    mae, clmae = pair
    add_result(mae, right(0, 50), protocol="linprobe", checkpoint="old.pth", checkpoint_sha256="0123456789")
    code, _, err = cli(mae, clmae)
    assert code == 0
    assert "the results of mae come from several checkpoints: runs/mae/checkpoint-7.pth mae00000, old.pth 0123" in err


def test_an_earlier_result_of_another_checkpoint_is_warned_of(cli, pair):
    mae, clmae = pair
    add_result(mae, right(0, 50), checkpoint="new.pth", checkpoint_sha256="f" * 64)
    code, _, err = cli(mae, clmae)
    assert code == 0
    assert "mae has results of nearest neighbour on cifar10 from several checkpoints: the last (new.pth fff" in err
    assert "is used, not runs/mae/checkpoint-7.pth mae00000" in err
    assert "from several checkpoints" in Path("compare/compare.tex").read_text(encoding="utf-8")
    assert {row["checkpoint_sha256"] for row in read_csv(Path("compare"))} == {"f" * 64, f"{'clmae':0<64}"}


ODD_LINES = {
    "a number for a name": {"data": 5},
    "no checkpoint but a list": {"checkpoint": [1]},
    "a hash that is a number": {"checkpoint_sha256": 12345678},
    "classes in words": {"classes": "ten"},
    "settings in a list": {"settings": [1]},
    "accuracy in words": {"acc1": "40"},
    "accuracy beyond 100": {"acc5": 101},
    "deviation in words": {"acc1_std": "small"},
    "predictions of no file": {"predictions": "\ud800"},
    "predictions in a list": {"predictions": []},
    "shots in a list": {"protocol": "fewshot", "shots": [1]},
    "no shots": {"protocol": "fewshot", "shots": {}},
    "shots below one": {"protocol": "fewshot", "shots": {"0": {"acc1": 1, "acc5": 2}}},
}


@pytest.mark.parametrize("case", ODD_LINES)
def test_lines_of_odd_types_are_skipped(cli, pair, case):
    mae, clmae = pair
    good = json.loads((mae / "results.jsonl").read_text())
    with open(mae / "results.jsonl", "a") as file:
        file.write(json.dumps(good | ODD_LINES[case]) + "\n")
    code, out, err = cli(mae, clmae, "--output_dir", "")
    assert (code, err) == (0, f"WARNING: {mae / 'results.jsonl'}: skipped damaged lines: 2\n")
    assert "+20.00*" in out


def test_names_default_to_as_much_of_the_path_as_it_takes(cli, tmp_path):
    for name in ("mae", "clmae"):
        add_result(tmp_path / name / "eval", right(0, 40))
    assert cli("mae/eval", "clmae/eval/results.jsonl")[0] == 0
    assert [row["run"] for row in read_csv(Path("compare"))] == ["mae/eval", "clmae/eval"]


def test_special_characters_in_names(cli, tmp_path):
    add_result(tmp_path / "a", right(0, 40), data="cifar_10")
    add_result(tmp_path / "b", right(0, 60), data="cifar_10")
    add_result(tmp_path / "b", {1: SEEDS}, data="my/set $1$", protocol="fewshot")
    code, _, _ = cli("a", "b", "--names", "50%_a&b", r"#1 {x} ~^\ |")
    assert code == 0
    tex = Path("compare/compare.tex").read_text(encoding="utf-8")
    assert r"{50\%\_a\&b}" in tex
    assert r"{\#1 \{x\} \textasciitilde{}\textasciicircum{}\textbackslash{} \textbar{}}" in tex
    assert r"cifar\_10 &" in tex
    table = [line for line in Path("compare/compare.md").read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1, "a bar in a name opens no column"
    assert {row["run"] for row in read_csv(Path("compare"))} == {"50%_a&b", r"#1 {x} ~^\ |"}
    assert Path("compare/fewshot-my_set_1_.png").exists()


HOSTILE = {
    "line breaks": "a\nb\r\n\x85c\u2028d",
    "LaTeX": "\n\\immediate\\write18{rm x}%^^M\\input{x} $a$ &# _~",
    "Markdown": "a | b\n\n# c [d](e) `f` <b> *g* ![h](i)",
    "a formula": "=cmd|' /C calc'!A0",
    "an indented formula": "\t @SUM(1)",
    "a wide formula": "\uff1d1+1",
    "a minus": "-1+1",
    "CSV": 'a","b\n"=1',
    "a terminal": "\033[31mred\x9b2J\x07",
    "no text": "caf\udce9 \ud800",
    "a table's rows": r"\\[1em] [x] * y",
    "long": "x" * 300,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_names_break_no_format(cli, tmp_path, case):
    """Names come from flags, and from files that others wrote: of data sets, of checkpoints."""
    written = {}
    for folder, name in (("benign", "abc"), ("hostile", HOSTILE[case])):
        for run, hits in (("mae", right(0, 40)), ("clmae", right(0, 60))):
            weights = {"checkpoint": name, "checkpoint_sha256": name, "settings": {name: name + run}, "classes": 3}
            add_result(tmp_path / folder / run, hits, data=name, predictions="knn-x-0.npz", **weights)
        given = " " + HOSTILE[case].translate({0xDCE9: None, 0xD800: None}), "CL-MAE"  # flags are UTF-8, and short
        given = [text[:LONGEST_LABEL] for text in given]
        code, out, err = cli(folder + "/mae", folder + "/clmae", "--names", *(given if folder == "hostile" else "ab"))
        assert code == 0
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err)
        written[folder] = {path.suffix: path.read_text(encoding="utf-8") for path in Path("compare").iterdir()}

    for suffix in (".txt", ".md", ".tex", ".csv"):
        lines = [len(written[folder][suffix].split("\n")) for folder in ("benign", "hostile")]
        assert lines[0] == lines[1], "no name breaks a line"
        assert plain(written["hostile"][suffix].replace("\n", "")) == written["hostile"][suffix].replace("\n", "")
    rows = [line for line in written["hostile"][".md"].splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in rows} == {11}
    assert not re.search(r"(?<!\\)[`<\[]", written["hostile"][".md"])
    assert tex_skeleton(written["hostile"][".tex"]) == tex_skeleton(written["benign"][".tex"])
    with open("compare/compare.csv", newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            texts = [row[name] for name in ("data", "run", "checkpoint", "checkpoint_sha256", "predictions")]
            assert not any(text.lstrip().startswith(tuple("=+-@\uff1d")) for text in texts)
            assert float(row["acc1"]) in (40, 60)


def tex_skeleton(text: str) -> list[str]:
    """What TeX would act on: commands and special characters, without comments and what prints a character."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    body = re.sub(r"\\text(backslash|asciitilde|asciicircum|less|greater|bar)\{\}|\\[&%$#_{}]|\{[\[*]\}", "", body)
    return re.findall(r"\\[a-zA-Z]+|\\.|[&%$#_{}~^]|\\\\\s*[\[*]", body)


def test_won_tied_and_lost_cells_are_counted_as_printed(cli, pair, tmp_path):
    mae, clmae = pair
    add_result(mae, right(0, 50), right(0, 90), protocol="linprobe")
    add_result(clmae, right(0, 45), right(0, 91), protocol="linprobe")
    add_result(mae, right(0, 50), protocol="finetune")  # clmae has none: nothing to count
    code, out, _ = cli(mae, clmae, "--names", "MAE", "CL-MAE")
    assert code == 0
    sentence = "CL-MAE beats MAE in 2 of 4 cells (1 tied, 1 lost)\n"
    assert sentence in out
    for name in ("compare.txt", "compare.md", "compare.tex"):
        assert sentence in Path("compare", name).read_text(encoding="utf-8")

    scores = [Score((50.001, 80.004), (None, None)), Score((50.004, 80.006), (None, None))]
    rows = [Comparison("knn", "a", None, [], [*scores], [None, None])]
    assert tallies(rows, ["MAE", "CL-MAE"]) == ["CL-MAE beats MAE in 1 of 2 cells (1 tied, 0 lost)"]


def test_tables_without_headings_have_one_line_of_names(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO")
    show_table("votes", ["k", "majority"], [["1", "20.00"], ["10", "9.50"]])
    assert caplog.messages[-1] == "votes\n k  majority\n────────────\n 1     20.00\n10      9.50"


def test_files_of_the_previous_version_are_read_and_compared(cli, tmp_path):
    before = ROOT / "tests" / "data" / "before"
    knn, few_shot = read_results(before / "results.jsonl")
    assert (knn.title, knn.scores) == ("nearest neighbour on shapes", {None: Score((20.0, 60.0), (None, None))})
    assert knn.settings["distance"] == "euclidean"
    assert (few_shot.protocol, list(few_shot.scores), few_shot.settings["runs"]) == (FEW_SHOT, [1, 2], 3)
    assert few_shot.scores[2].acc == pytest.approx((40 / 3, 160 / 3))
    assert {n: hits.shape for n, hits in read_predictions(few_shot).hits.items()} == {1: (2, 3, 10), 2: (2, 3, 10)}
    assert len(set(read_predictions(knn).images)) == 10

    shutil.copytree(before, tmp_path / "copy")
    code, out, err = cli(before, "copy", "--names", "before", "copy")
    assert (code, err) == (0, "")
    assert "copy beats before in 0 of 6 cells (6 tied, 0 lost)" in out
    assert line_with(out, "nearest neighbour").split()[-4:] == ["+0.00", "1.000"] * 2
    assert Path("compare/fewshot-shapes.png").exists()


def test_nothing_is_written_without_an_output_dir(cli, pair, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert cli(*pair, "--output_dir", "")[0] == 0
    assert sorted(tmp_path.rglob("*")) == before


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def rewrite(path, **changed):
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files} | changed
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})


DAMAGE = {
    "missing": (Path.unlink, "No such file or directory"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or incomplete"),
    "cut short": (cut, "damaged or incomplete"),
    "a flipped byte": (flip, "damaged or incomplete"),
    "not an npz": (lambda path: path.write_text("hello"), "damaged or incomplete"),
    "pickled": (lambda path: rewrite(path, images=NAMES.astype(object)), "damaged or incomplete"),
    "array missing": (lambda path: rewrite(path, correct5=None), "damaged or incomplete"),
    "fewer labels": (lambda path: rewrite(path, labels=LABELS[:9]), "inconsistent shapes"),
    "no seed axis": (lambda path: rewrite(path, correct=right(0, 60)[0], correct5=right(1, 81)[0]), "shapes"),
    "no seeds": (lambda path: rewrite(path, correct=right(0, 60)[:0], correct5=right(0, 60)[:0]), "shapes"),
    "labels in words": (lambda path: rewrite(path, labels=NAMES), "`labels` is of type <U"),
    "no list of seeds": (lambda path: rewrite(path, seeds=np.array([[0, 1]])), "inconsistent shapes"),
    "of another run": (lambda path: rewrite(path, correct=right(0, 61)), "its accuracies are not those in results"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_predictions_ask_for_another_evaluation(cli, pair, case):
    damage, expected = DAMAGE[case]
    damage(pair[1] / "knn-cifar10-0.npz")
    code, _, err = cli(*pair)
    assert code == 2
    assert "clmae/knn-cifar10-0.npz" in err
    assert expected in err
    assert err.endswith("run the evaluation again\n")
    assert len(err.splitlines()) == 1


def test_few_shot_predictions_without_the_shots_of_the_table(cli, few_shot):
    rewrite(few_shot[1] / "fewshot-cifar10-0.npz", shots=np.array([1, 4, 8]))
    code, _, err = cli(*few_shot)
    assert code == 2
    assert "does not belong to few-shot on cifar10" in err


BAD = {
    "no folder": ((), "the following arguments are required: DIR"),
    "missing folder": (("mae", "nowhere"), "nowhere/results.jsonl: No such file or directory"),
    "no results": (("mae", "bare"), "bare/results.jsonl: No such file or directory; give a folder that an evaluation"),
    "empty results": (("mae", "empty"), "empty/results.jsonl holds no result"),
    "same folder twice": (("mae", "clmae", "mae/"), "mae is given twice"),
    "file and its folder": (("mae", "mae/results.jsonl"), "mae is given twice"),
    "too few names": (("mae", "clmae", "--names", "MAE"), "--names has 1 names for 2 folders"),
    "too many names": (("mae", "clmae", "--names", "a", "b", "c"), "--names has 3 names for 2 folders"),
    "equal names": (("mae", "clmae", "--names", "MAE", "MAE"), "--names MAE is given twice"),
    "unknown flag": (("mae", "--name", "x"), "unrecognized arguments: --name"),
    "output is a file": (("mae", "--output_dir", "mae/results.jsonl"), "--output_dir mae/results.jsonl: File exists"),
    "output below a file": (
        ("mae", "--output_dir", "mae/results.jsonl/x"),
        "--output_dir mae/results.jsonl/x: Not a directory",
    ),
}


@pytest.mark.usefixtures("pair")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(cli, tmp_path, case):
    flags, expected = BAD[case]
    for name in ("bare", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "empty" / "results.jsonl").write_text("\n")
    code, _, err = cli(*flags)
    assert code == 2
    assert expected in err
    assert len(err.splitlines()) == 1, err


def test_as_a_process_of_its_own(pair, tmp_path):
    """Once for real: the table on standard output, a sentence on standard error, and both exit codes."""
    command = [sys.executable, str(ROOT / "main_compare.py")]
    good = subprocess.run([*command, *pair], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert (good.returncode, good.stderr) == (0, "")
    assert "+20.00*" in good.stdout
    bad = subprocess.run([*command, "nowhere"], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    assert bad.returncode == 2
    assert bad.stderr.startswith("ERROR: nowhere/results.jsonl")
    assert len(bad.stderr.splitlines()) == 1


def test_answers_at_once(pair, few_shot, tmp_path):
    """torch alone takes seconds to import. Nothing here needs it, and only curves need matplotlib."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "main_compare.py")]

    def imported(*flags):
        done = subprocess.run([*command, *flags], cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
        assert done.returncode == 0, done.stderr
        return {line.split("|")[-1].strip() for line in done.stderr.splitlines()}

    assert not imported("--help") & {"torch", "matplotlib", "scipy.stats"}
    assert not imported(*pair, "--output_dir", "") & {"torch", "matplotlib"}
    drawn = imported(*few_shot)
    assert "matplotlib" in drawn
    assert "torch" not in drawn
