"""The HTML report: it is complete, names cannot inject code, and it works in a browser."""

import base64
import io
import itertools
import json
import re
import shutil

import numpy as np
import pytest
import torch
from browser import browser_fixture  # noqa: F401
from PIL import Image
from small_runs import DATA, SHAPES, SMALL, checkpoint, log_lines

import main_knn
import main_pretrain
import main_visualize
from util.cli import UserError
from util.plots.report import CURVES, LIMIT, as_data_uris, rounded
from util.plots.snapshot import as_input, load_snapshot, open_source, read_images

pytestmark = pytest.mark.xdist_group("browser")  # one browser for all of them
HOSTILE = "</script><img src=x onerror=boom()>@@RESULTS@@ & \"'"
NAMES = {"random": "MAE", "predictive": HOSTILE, "curriculum": "CL-MAE"}


def parse(module, *flags):
    return module.get_args_parser().parse_args(list(map(str, flags)))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three epochs with each kind of masks, and evaluations of two of them."""
    folder = tmp_path_factory.mktemp("runs")
    for masking in NAMES:
        flags = (*SMALL, "--epochs", 3, "--save_every", 1, "--lambda_cl_end", -0.5, "--masking", masking)
        flags += ("--cmm_strength", 1)  # masks of 16 patches then differ from epoch to epoch
        main_pretrain.main(parse(main_pretrain, *flags, "--output_dir", folder / masking))
    for masking in ("random", "predictive"):
        flags = (*DATA, "--finetune", folder / masking, "--no_cache", "--output_dir", folder / "eval" / masking)
        main_knn.main(parse(main_knn, *flags))
    return folder


@pytest.fixture(scope="module")
def report(runs):
    """Without naming any images: those of the runs."""
    paths, path = [runs / masking for masking in NAMES], runs / "below" / "report.html"
    main_visualize.main(parse(main_visualize, *paths, "--names", *NAMES.values(), "--html", path))
    return path


@pytest.fixture(scope="module")
def bare_report(runs):
    """Of a file with weights alone, as upstream publishes them, on an image."""
    torch.save({"model": checkpoint(runs / "random", 2)["model"]}, runs / "bare.pth")
    Image.new("RGB", (20, 30), (200, 30, 90)).save(runs / "plain.png")
    path = runs / "bare.html"
    main_visualize.main(parse(main_visualize, runs / "bare.pth", "--images", runs / "plain.png", "--html", path))
    return path


def data_of(path):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text("utf-8"))[1]
    )


def test_every_run_and_checkpoint_is_in_it_as_computed(report, runs):
    data = data_of(report)
    assert [run["name"] for run in data["runs"]] == list(NAMES.values())
    assert [run["label"] for run in data["runs"]] == [None, "predicted error", "Z"]
    args = parse(main_visualize, runs, *SHAPES)
    for masking, run in zip(NAMES, data["runs"], strict=True):
        assert [moment["epoch"] for moment in run["moments"]] == [1, 2, 3]
        assert run["log"] == rounded(log_lines(runs / masking))
        assert len(run["pictures"]) == 1 + 3
        for epoch, moment in enumerate(run["moments"]):
            snapshot = load_snapshot(runs / masking / f"checkpoint-{epoch}.pth", "")
            imgs = as_input(read_images(open_source(args, snapshot), 6, 0), snapshot, torch.device("cpu"))
            done = snapshot.mask(imgs)
            assert moment["lambda_cl"] == rounded(snapshot.lambda_cl)
            assert moment["visible"] == (1 - done.mask).int().tolist()
            assert moment["values"] == (None if done.values is None else rounded(done.values.tolist()))
            assert np.allclose(moment["error"], snapshot.model.patch_error(imgs, done.pred).detach(), rtol=0.01)
            assert 0 <= min(moment["positions"]) <= max(moment["positions"]) <= 1
        with Image.open(io.BytesIO(base64.b64decode(run["pictures"][0].split(",")[1]))) as sheet:
            assert sheet.size == (16, 6 * 16)
    shown = {curve[0] for curve in CURVES}
    assert shown <= {name for run in data["runs"] for line in run["log"] for name in line}


def test_masks_of_all_checkpoints_share_their_random_draw(report):
    """So what changes from one checkpoint to the next is due to training."""
    masks = [moment["visible"] for moment in data_of(report)["runs"][0]["moments"]]
    assert masks[0] == masks[1] == masks[2]


def test_it_is_one_small_file_that_asks_for_nothing(report):
    page = report.read_text("utf-8")
    assert len(page.encode()) < LIMIT
    assert not re.search("https?:", page)
    assert not re.search(r"<(link|iframe|object|embed)|\bsrc=[^x]|\bhref=|url\(|@import|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page


def test_a_run_in_its_first_epoch_has_no_curves_yet(program, runs, tmp_path):
    shutil.copy(runs / "random" / "checkpoint-0.pth", tmp_path / "checkpoint-last.pth")
    (tmp_path / "log.txt").touch()
    code, _, err = program(main_visualize, tmp_path, *SHAPES, "--num_images", 1, "--html", tmp_path / "report.html")
    assert (code, err) == (0, "")
    assert data_of(tmp_path / "report.html")["runs"][0]["log"] == []


def test_names_are_text(report):
    page = report.read_text("utf-8")
    assert "<img" not in page
    assert page.count("</script>") == 2
    assert "&lt;/script&gt;&lt;img src=x onerror=boom()&gt;@@RESULTS@@ &amp; &quot;&#x27;" in page


def test_results_and_settings_are_in_it(report, bare_report):
    page = report.read_text("utf-8")
    assert "nearest neighbour" in page
    assert "CL-MAE has no nearest neighbour on shapes" in page
    differing = page[page.index("Where the runs differ") : page.index("All settings")]
    assert "<td>random</td><td>predictive</td><td>curriculum</td>" in differing
    assert "output_dir" not in differing
    assert "<table" not in bare_report.read_text("utf-8")


def test_numbers_that_json_cannot_say_are_left_out():
    assert rounded({"a": [float("nan"), float("inf"), 1.23456, 7, "x"]}) == {"a": [None, None, 1.23, 7, "x"]}


def test_large_pictures_are_made_to_fit():
    noise = np.random.default_rng(0).integers(0, 256, (448, 224, 3), dtype=np.uint8)
    sheets = [Image.fromarray(noise)] * 4
    assert all(uri.startswith("data:image/png") for uri in as_data_uris(sheets, 10_000_000))
    for room in (600_000, 60_000):
        uris = as_data_uris(sheets, room)
        assert all(uri.startswith("data:image/jpeg") for uri in uris)
        assert room / 4 < sum(map(len, uris)) <= room
    with pytest.raises(UserError, match="--blocks or --num_images"):
        as_data_uris(sheets, 1_000)


BAD = {
    "results": (["--html", "a.html", "--results", "x"], "--results has 1 folders for 2 runs"),
    "no results": (["--html", "a.html", "--results", "x", "y"], "results.jsonl"),
    "unwritable": (["--html", "FILE/a.html"], "--html"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flags_end_with_one_clear_sentence(program, runs, tmp_path, case):
    flags, expected = BAD[case]
    (tmp_path / "file").touch()
    flags = [str(flag).replace("FILE", str(tmp_path / "file")) for flag in flags]
    paths = (runs / "random", runs / "predictive")
    code, _, err = program(main_visualize, *paths, *SHAPES, "--num_images", 1, "--blocks", 1, *flags)
    assert code == 2
    assert expected in err
    assert "Traceback" not in err


# --- In a browser ---

PICTURES = "[...document.querySelectorAll('#stage .%s canvas')].map((canvas) => canvas.toDataURL())"
WEIGHTS = "[...document.querySelectorAll('[data-lambda]')].map((shown) => shown.textContent)"


def test_the_slider_shows_the_curriculum_by_keyboard(browser, report):
    browser.open(report)
    browser.run("document.getElementById('slider').focus()")
    seen = []
    for _ in range(3):
        kinds = ("hidden", "values", "mask", "reconstruction", "error")
        seen.append([browser.run(PICTURES % kind)[0] for kind in kinds] + [browser.run(WEIGHTS)])
        browser.press("ArrowRight")
    for before, after in itertools.pairwise(seen):
        assert all(a != b for a, b in zip(before, after, strict=True)), "each picture, and lambda_CL"
    assert [text[-5:] for text in (weights[0] for *_, weights in seen)] == ["+0.50", " 0.00", "\N{MINUS SIGN}0.50"]
    assert browser.run("document.getElementById('slider').getAttribute('aria-valuetext')").startswith("Epoch 3 of 3")
    assert browser.problems == []


def test_everything_else_works_by_keyboard_and_pointer(browser, report):
    browser.open(report)
    told = "document.querySelector('#stage .told').textContent"
    browser.point("#stage .picture.values")
    assert re.match(r"Patch in row 3, column 3: predicted error .*, rank \d+ of 16 · .*of masks", browser.run(told))
    browser.run("document.querySelector('#stage .tiles').focus()")
    browser.press("ArrowRight")
    assert "row 3, column 4" in browser.run(told)
    first = browser.run(PICTURES % "image")
    browser.run("document.querySelector('#pick input').focus()")
    browser.press("ArrowRight")
    assert browser.run(PICTURES % "image") != first
    paper = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(paper)
    browser.run("document.getElementById('theme').click()")
    assert browser.run(paper) != light
    browser.open(report, scheme="dark")
    assert browser.run(paper) != light
    browser.press("Tab")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is visible"
    assert browser.run("document.querySelectorAll('#charts svg').length") == len(CURVES)
    assert HOSTILE in browser.run("document.title")
    assert browser.problems == []


@pytest.mark.parametrize("page", ["report", "bare_report"])
def test_a_phone_shows_it_without_scrolling_sideways(browser, page, request):
    browser.open(request.getfixturevalue(page), width=390, height=844)
    browser.run("document.querySelectorAll('details').forEach((folded) => { folded.open = true })")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    edges = "[...document.querySelectorAll('#stage canvas, #charts svg')].map((e) => e.getBoundingClientRect().right)"
    assert max(browser.run(edges)) <= 390
    assert browser.run("document.querySelectorAll('#stage canvas').length") >= 4
    assert browser.problems == []
