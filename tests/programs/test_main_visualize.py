"""Pictures: what is in them, what they are called, and what they refuse."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import SHAPES, SMALL, checkpoint

import main_pretrain
import main_visualize
from masking import Masking, MaskSettings
from models_mae import mae_vit_micro_patch4
from util.cli import UserError
from util.plots.curves import PANELS, curve_figure
from util.plots.masks import (
    HIDDEN,
    as_rgb,
    diversity_figure,
    draw_block,
    masks_figure,
    positions_figure,
    reconstruction,
    side_by_side,
    wall,
)
from util.plots.snapshot import Snapshot, evenly, load_snapshot
from util.training.progress import drop_log_lines, read_log


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A CL-MAE of three epochs from 1 to -0.5, and an MAE, each with all of its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    for masking in ("curriculum", "random"):
        flags = (*SMALL, "--epochs", "3", "--save_every", "1", "--lambda_cl_end", "-0.5", "--masking", masking)
        args = main_pretrain.get_args_parser().parse_args([*flags, "--output_dir", str(folder / masking)])
        main_pretrain.main(args)
    return folder


@pytest.fixture
def draw(program, tmp_path):
    """main_visualize.py with the given flags, into a folder of its own; returns (exit code, outputs, folder)."""

    def call(*flags):
        code, out, err = program(main_visualize, "--output_dir", tmp_path / "pictures", *flags)
        return code, out, err, tmp_path / "pictures"

    return call


@pytest.mark.slow
def test_everything_at_once(draw, runs):
    what = ("--grid", "masks", "diversity", "positions", "--curve", "--animate", "--format", "png", "pdf")
    code, out, err, folder = draw(runs / "curriculum", *SHAPES, *what)
    assert (code, err) == (0, "")
    expected = {
        "masks.png",
        "masks.pdf",
        "diversity.png",
        "diversity.pdf",
        "positions.png",
        "positions.pdf",
        "curves.png",
        "curves.pdf",
        "curriculum.gif",
    }
    assert {path.name for path in folder.iterdir()} == expected
    assert {line.rsplit("/", 1)[-1] for line in out.splitlines()} == expected
    with Image.open(folder / "curriculum.gif") as gif:
        assert gif.n_frames == 3
    for name in ("masks.png", "diversity.png", "positions.png", "curves.png"):
        colours = Image.open(folder / name).convert("RGB").getcolors(1 << 24)
        assert colours is not None
        assert len(colours) > 50


def test_masks_are_drawn_by_default_and_repeat(draw, runs):
    _, _, _, folder = draw(runs / "curriculum", *SHAPES, "--num_images", 2)
    first = (folder / "masks.png").read_bytes()
    draw(runs / "curriculum", *SHAPES, "--num_images", 2)
    assert (folder / "masks.png").read_bytes() == first
    draw(runs / "curriculum", *SHAPES, "--num_images", 2, "--seed", 1)
    assert (folder / "masks.png").read_bytes() != first


def test_titles_tell_epoch_and_curriculum(runs):
    titles = [load_snapshot(runs / "curriculum" / f"checkpoint-{n}.pth", "run").title for n in range(3)]
    assert titles == [f"run, after epoch {n + 1} of 3, $\\lambda_{{CL}}$ = {0.5 - 0.5 * n:.2f}" for n in range(3)]
    assert load_snapshot(runs / "random" / "checkpoint-2.pth", "a$b").title == r"a\$b, after epoch 3 of 3, random masks"


def test_lambda_within_an_epoch_and_without_a_curriculum(runs, tmp_path):
    checkpoint = torch.load(runs / "curriculum" / "checkpoint-1.pth", weights_only=True)
    # Three updates an epoch: after two of the third epoch's, 8 of 9 are done.
    del checkpoint["moment"]  # which older checkpoints do not hold
    log = {"iterations": 3, "interval": {}, "averages": {"loss": (2.0, 2)}}
    torch.save({**checkpoint, "step": 8, "log": log}, tmp_path / "within.pth")
    assert load_snapshot(tmp_path / "within.pth", "").lambda_cl == pytest.approx(1 - 1.5 * 8 / 9)
    torch.save({**checkpoint, "args": {**checkpoint["args"], "no_curriculum": True}}, tmp_path / "none.pth")
    assert load_snapshot(tmp_path / "none.pth", "").lambda_cl == 0


def test_the_ratio_within_an_epoch_is_that_of_its_masks(runs, tmp_path):
    checkpoint = torch.load(runs / "random" / "checkpoint-1.pth", weights_only=True)
    checkpoint["args"] |= {"mask_ratio_start": 0.9}
    torch.save({**checkpoint, "epoch": -1, "moment": {"mask_ratio": 0.9}}, tmp_path / "within.pth")
    del checkpoint["moment"]
    torch.save({**checkpoint, "epoch": -1}, tmp_path / "older.pth")
    for name in ("within", "older"):
        mask = load_snapshot(tmp_path / f"{name}.pth", "").mask(torch.zeros(2, 3, 16, 16)).mask
        assert mask.sum(dim=1).tolist() == [15, 15]  # of 16


def test_a_block_shows_what_training_does(runs):
    snapshot = load_snapshot(runs / "curriculum" / "checkpoint-2.pth", "run")
    imgs = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    block = draw_block(snapshot, imgs)
    with torch.no_grad():
        visible = snapshot.masking.module(imgs).reshape(5, 4, 4) >= 0.5
    assert np.array_equal(block.visible > 0.5, visible.numpy())
    rows = block.rows()
    assert list(rows) == ["image", "Z", "mask", "reconstruction"]
    pixels = block.per_pixel(block.visible) > 0.5
    assert (rows["mask"][~pixels] == HIDDEN).all()
    for row in ("mask", "reconstruction"):  # visible patches are the image's own
        assert np.allclose(rows[row][pixels], rows["image"][pixels], atol=1e-6)
    assert not np.allclose(rows["reconstruction"][~pixels], rows["image"][~pixels], atol=0.05)


def test_random_masks_have_no_heat_map(runs):
    snapshot = load_snapshot(runs / "random" / "checkpoint-2.pth", "run")
    block = draw_block(snapshot, torch.randn(3, 3, 16, 16))
    assert list(block.rows()) == ["image", "mask", "reconstruction"]
    assert (block.visible.sum(axis=(1, 2)) == 4).all()  # a quarter of 16


def untold(model):
    """A snapshot of a weights-only file, as upstream publishes them."""
    return Snapshot("run", model.eval(), Masking(MaskSettings(), model.patch_embed.grid_size), {}, None, None, 0.75)


def perfect_prediction(model, imgs):
    patches = model.patchify(imgs)
    return (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5


def test_true_statistics_only_if_asked_and_then_said():
    model = mae_vit_micro_patch4(img_size=16, norm_pix_loss=True)
    imgs = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    pred, mask = perfect_prediction(model, imgs), torch.ones(2, 16)
    mask[:, 0] = 0
    # With the removed patches' own statistics a perfect prediction is the image itself; without, it cannot be.
    assert torch.allclose(reconstruction(model, imgs, pred, mask, true_stats=True), imgs, atol=1e-5)
    assert not torch.allclose(reconstruction(model, imgs, pred, mask), imgs, atol=1e-2)
    snapshot = untold(model)
    assert "visible pixels" in draw_block(snapshot, imgs).note
    leaky = draw_block(snapshot, imgs, true_stats=True)
    assert "cannot know" in leaky.note
    assert leaky.note in [text.get_text().replace("\n", " ") for text in masks_figure([leaky]).texts]
    model.norm_pix_loss = False
    assert draw_block(snapshot, imgs, true_stats=True).note == ""


def test_moments_of_a_few_images_stand_side_by_side_and_those_of_many_below_each_other(runs):
    for number, abreast in ((3, True), (4, False)):
        imgs = torch.randn(number, 3, 16, 16)
        paths = [runs / "curriculum" / f"checkpoint-{epoch}.pth" for epoch in range(3)]
        blocks = [draw_block(load_snapshot(path, "run"), imgs) for path in paths]
        figure = masks_figure(blocks)
        width, height = figure.get_size_inches()
        assert (width > height) == abreast
        words = [text.get_text() for text in figure.texts]
        assert [words.count(block.title) for block in blocks] == [1, 1, 1]
        assert (words.count("image"), words.count("mask")) == (1, 1 if abreast else 3)
        strips = [np.array(at.images[0].get_array()) for at in figure.axes if at.images]
        assert sum(np.array_equal(strip, strips[0]) for strip in strips) == (3 if abreast else 1), (
            "each with its images"
        )


def test_diversity_counts_distinct_masks(runs):
    snapshot = load_snapshot(runs / "curriculum" / "checkpoint-2.pth", "run")
    imgs = torch.randn(1, 3, 16, 16).expand(9, -1, -1, -1)
    figure = diversity_figure([draw_block(snapshot, imgs)])
    assert "1 of 9 masks differ, distance 0.00" in figure.axes[0].get_title()


def test_positions_counts_places_that_are_never_or_always_visible(runs):
    block = draw_block(load_snapshot(runs / "curriculum" / "checkpoint-2.pth", "run"), torch.randn(2, 3, 16, 16))
    block.visible = np.zeros((2, 4, 4))
    block.visible[:, 0] = 1  # a row that both images show
    block.visible[0, 1] = 1  # and one that only the first shows
    figure = positions_figure([block])
    assert "50% of the positions never visible, 25% always" in figure.axes[0].get_title()
    assert np.array_equal(figure.axes[0].images[0].get_array()[:, 0], [1, 0.5, 0, 0])


def test_tiles():
    tiles = np.arange(3 * 2 * 2).reshape(3, 2, 2).astype(float)
    row = side_by_side(tiles, gap=1)
    assert row.shape == (2, 8)
    assert np.isnan(row[:, [2, 5]]).all()
    assert np.array_equal(row[:, 3:5], tiles[1])
    square = wall(tiles, 2)
    assert square.shape == (5, 5)
    assert np.array_equal(square[3:, :2], tiles[2])
    assert np.isnan(square[3:, 3:]).all()  # the place of a fourth


def test_checkpoints_are_evenly_spread():
    assert evenly(list(range(100)), 4) == [0, 33, 66, 99]
    assert evenly([1, 2, 3], 4) == [1, 2, 3]
    assert evenly([1, 2, 3], 1) == [3]


def test_several_runs_and_names(draw, runs, monkeypatch):
    seen = []
    monkeypatch.setitem(main_visualize.GRIDS, "masks", (8, lambda blocks: seen.extend(blocks) or masks_figure(blocks)))
    code, _, _, _ = draw(runs / "random", runs / "curriculum", *SHAPES, "--blocks", 2, "--num_images", 3)
    assert code == 0
    assert [block.title.split(",")[0] for block in seen] == ["random", "random", "curriculum", "curriculum"]
    assert np.array_equal(seen[0].images, seen[3].images)
    seen.clear()
    files = [runs / "curriculum" / f"checkpoint-{n}.pth" for n in (0, 2)]
    draw(*files, *SHAPES, "--names", "early", "late")
    assert [block.title.split(",")[0] for block in seen] == ["early", "late"]


def test_images_of_the_users_own(draw, runs, tmp_path):
    folder = tmp_path / "own"
    (folder / "below").mkdir(parents=True)
    Image.new("L", (30, 20), 90).save(folder / "grey.png")
    Image.new("RGBA", (200, 300), (5, 60, 90, 128)).save(folder / "below" / "clear.png")
    (folder / "broken.jpg").write_bytes(b"not an image")
    code, _, err, pictures = draw(runs / "curriculum", "--images", folder)
    assert code == 0
    assert err.count("unreadable image, left out") == 1
    assert "broken.jpg" in err
    assert (pictures / "masks.png").exists()
    code, _, err, _ = draw(runs / "curriculum", "--images", folder / "broken.jpg")
    assert code == 2
    assert "none of the images can be read" in err


def test_folder_of_data_shows_images_that_were_not_trained_on(runs, tmp_path):
    for split, colour in (("train", 0), ("val", 255)):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.new("RGB", (16, 16), (colour,) * 3).save(tmp_path / split / "a" / "x.png")
    snapshot = load_snapshot(runs / "random" / "checkpoint-0.pth", "run")

    def brightness(path, *flags):
        args = main_visualize.get_args_parser().parse_args(["run", "--data_path", str(path), *flags])
        return main_visualize.read_images(main_visualize.open_source(args, snapshot), 8, 0)[0].getpixel((0, 0))[0]

    assert brightness(tmp_path) == 255
    assert brightness(tmp_path / "train") == 0  # there is no other
    assert brightness(tmp_path / "train" / "a") == 0


def test_official_weights_without_flags(draw, tmp_path):
    """As upstream publishes them for its demo: only the model, or only the encoder."""
    model = mae_vit_micro_patch4()
    torch.save({"model": model.state_dict()}, tmp_path / "full.pth")
    assert draw(tmp_path / "full.pth", *SHAPES, "--norm_pix_loss")[0] == 0
    encoder = {key: value for key, value in model.state_dict().items() if not key.startswith(("decoder", "mask_"))}
    torch.save({"model": encoder}, tmp_path / "encoder.pth")
    code, _, err, _ = draw(tmp_path / "encoder.pth", *SHAPES)
    assert code == 2
    assert "encoder.pth has no decoder" in err


def test_topk_masks_are_drawn_as_trained(runs, tmp_path):
    checkpoint = torch.load(runs / "curriculum" / "checkpoint-2.pth", weights_only=True)
    torch.save({**checkpoint, "args": {**checkpoint["args"], "select": "topk"}}, tmp_path / "topk.pth")
    block = draw_block(load_snapshot(tmp_path / "topk.pth", ""), torch.randn(6, 3, 16, 16))
    assert (block.visible.sum(axis=(1, 2)) == 4).all()
    for visible, keep_prob in zip(block.visible, block.heat, strict=True):
        assert keep_prob[visible > 0.5].min() >= keep_prob[visible < 0.5].max()


def test_curves_show_the_log(runs):
    logs = {name: read_log(runs / name) for name in ("random", "curriculum")}
    figure = curve_figure(logs)
    for axes, (_, key, *_) in zip(figure.axes, PANELS, strict=True):
        for line, log in zip(axes.lines, logs.values(), strict=False):
            assert list(line.get_ydata()) == [entry[key] for entry in log if key in entry]
        assert list(axes.lines[1].get_xdata()) == [1, 2, 3]
    assert not len(figure.axes[0].lines[0].get_xdata())  # random masks have no lambda
    assert read_log(runs / "random" / "checkpoint-0.pth") == logs["random"]


@pytest.mark.parametrize("content", ["", "{", "[1]\n", None])
def test_logs_that_are_none(tmp_path, content):
    if content is not None:
        (tmp_path / "log.txt").write_text(content)
    with pytest.raises(UserError, match=r"log\.txt"):
        read_log(tmp_path)


def test_odd_lines_of_a_log_are_skipped(tmp_path, clmae_log):
    odd = [
        '{"epoch": "a"}',
        '{"epoch": 1, "train_loss": "x"}',
        '{"epoch": 1, "train_loss": 1e308}',
        '{"epoch": 1' + "0" * 400 + "}",
    ]
    good = '{"epoch": 0, "train_loss": NaN}', '{"epoch": 2, "train_loss": 1}'
    (tmp_path / "log.txt").write_text("\n".join([good[0], *odd, good[1]]))
    log = read_log(tmp_path)
    assert [line["epoch"] for line in log] == [0, 2]
    assert f"{tmp_path / 'log.txt'}: skipped damaged lines: 2, 3, 4, 5" in clmae_log.text
    curve_figure({"x": log}).savefig(tmp_path / "curves.png")
    drop_log_lines(tmp_path / "log.txt", 1)
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    assert line.startswith(good[0][:-1])


def test_one_checkpoint_does_not_move(draw, runs):
    code, _, err, _ = draw(runs / "curriculum" / "checkpoint-0.pth", *SHAPES, "--animate")
    assert code == 2
    assert "--save_every 1" in err


BAD = {
    "no such run": (["nowhere"], "there is no checkpoint or folder nowhere"),
    "folder without checkpoints": (["EMPTY"], "without checkpoint-N.pth"),
    "no images named": (["WEIGHTS"], "which images?"),
    "missing image": (["RUN", "--images", "nothing.jpg"], "--images nothing.jpg: no such file or folder"),
    "empty folder": (["RUN", "--images", "EMPTY"], "no image files in this folder"),
    "no number": (["RUN", *SHAPES, "--num_images", "0"], "argument --num_images: 0 must be at least 1"),
    "no blocks": (["RUN", *SHAPES, "--blocks", "0"], "argument --blocks: 0 must be at least 1"),
    "names": (["RUN", *SHAPES, "--names", "a", "b"], "--names has 2 names for 1 runs"),
    "no data": (["RUN", "--data_path", "nowhere"], "--data_path nowhere is not a folder"),
    "device": (["RUN", *SHAPES, "--device", "abacus"], "--device 'abacus'"),
    "no folder": (["RUN", *SHAPES, "--output_dir="], "--output_dir is empty"),
    "split": (["RUN", *SHAPES, "--split", "2"], "argument --split: 2 must be above 0 and below 1"),
    "no loader": (["RUN", *SHAPES, "--num_workers", "0"], "unrecognized arguments: --num_workers 0"),
    "format": (["RUN", *SHAPES, "--format", "bmp"], "--format: invalid choice: 'bmp'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_clear_sentence(draw, runs, tmp_path, case):
    flags, expected = BAD[case]
    (tmp_path / "empty").mkdir()
    torch.save({"model": checkpoint(runs / "random")["model"]}, tmp_path / "weights.pth")
    places = {"RUN": runs / "curriculum", "EMPTY": tmp_path / "empty", "WEIGHTS": tmp_path / "weights.pth"}
    code, _, err, _ = draw(*(places.get(flag, flag) for flag in flags))
    assert code == 2
    assert expected in err
    assert "Traceback" not in err


def test_unwritable_output(program, runs, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = program(main_visualize, runs / "random", *SHAPES, "--output_dir", tmp_path / "file" / "below")
    assert code == 2
    assert "--output_dir" in err


def test_every_flag_has_a_help_text():
    assert all(action.help for action in main_visualize.get_args_parser()._actions)


def test_grey_models_are_shown_in_grey():
    assert as_rgb(torch.zeros(1, 1, 4, 4)).shape == (1, 3, 4, 4)
    model = mae_vit_micro_patch4(img_size=16, in_chans=1).eval()
    block = draw_block(untold(model), torch.randn(2, 1, 16, 16))
    assert block.images.shape == (2, 16, 16, 3)


def test_log_keys_are_those_that_training_writes(runs):
    written = json.loads((runs / "curriculum" / "log.txt").read_text().splitlines()[-1])
    assert {key for _, key, *_ in PANELS} <= set(written)


def test_non_square_models():
    model = mae_vit_micro_patch4(img_size=(16, 32)).eval()
    snapshot = untold(model)
    imgs = main_visualize.as_input([Image.new("RGB", (64, 64))], snapshot, torch.device("cpu"))
    assert imgs.shape == (1, 3, 16, 32)
    figure = masks_figure([draw_block(snapshot, imgs)])
    place, (width, height) = figure.axes[0].get_position(), figure.get_size_inches()
    assert place.width * width == pytest.approx(2 * place.height * height)
