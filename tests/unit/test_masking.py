"""Every way to mask: exact ratios, randomness that depends on the image and the epoch alone, and each strategy's own
promise. Strategies in a user's file must meet the same contract."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from main_pretrain import check_args, get_args_parser
from masking import (
    STRATEGIES,
    CurriculumMasking,
    Masking,
    MaskSettings,
    as_noise,
    hashed_uniform,
    image_keys,
    mask_health,
)
from models_mae import mae_vit_micro_patch4
from util.cli import UserError

GRID = (8, 8)
IMGS = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))
VARIANTS = {
    **{name: {"masking": name} for name in STRATEGIES},
    **{f"noise {colour}": {"masking": "noise", "mask_noise": colour} for colour in ("white", "red", "green", "blue")},
    "curriculum topk": {"masking": "curriculum", "select": "topk"},
    "predictive red": {"masking": "predictive", "mask_noise": "red"},
}


@pytest.fixture(scope="module")
def mae():
    torch.manual_seed(0)
    return mae_vit_micro_patch4()


@pytest.fixture(scope="module")
def maskings(mae):
    """One of each variant, with a module where it learns."""
    made = {}
    for name, flags in VARIANTS.items():
        masking = Masking(MaskSettings(**flags, epochs=10, cmm_depth=1), GRID)
        if masking.learned is not None:
            masking.module = masking.learned.build(mae)
        made[name] = masking
    return made


def choose(masking, index=None, epoch=0, progress=0.3, imgs=None):
    """What the strategy returns for images by their index."""
    index = torch.arange(len(IMGS)) if index is None else torch.as_tensor(index)
    imgs = IMGS[index % len(IMGS)] if imgs is None else imgs
    with torch.no_grad():
        return masking.choose(masking.ask(imgs, index, epoch, progress), masking.values(imgs))


def visible_of(chosen, mask_ratio=0.75):
    """bool [N, L], as the autoencoder reads it."""
    if "visible" in chosen:
        return chosen["visible"]
    num_patches = chosen["noise"].shape[1]
    return chosen["noise"].argsort(dim=1, stable=True).argsort(dim=1) < int(num_patches * (1 - mask_ratio))


def distinct(visible):
    return len(set(map(tuple, visible.tolist())))


def many(n, grid=GRID, epoch=0, progress=0.0, **flags):
    """Visible patches [n, h, w] of a strategy without a module; the images do not matter."""
    masking = Masking(MaskSettings(**flags), grid)
    ask = masking.ask(torch.zeros(n, 3, 4, 4), torch.arange(n), epoch, progress)
    return visible_of(masking.choose(ask), ask.mask_ratio).unflatten(1, grid)


# --- What all strategies promise ---


@pytest.mark.parametrize("mask_ratio", [0.75, 0.6, 0.33])
@pytest.mark.parametrize("name", VARIANTS)
def test_the_ratio_is_exact_or_the_masks_are_bool(mae, maskings, name, mask_ratio):
    masking = maskings[name]
    ask = masking.ask(IMGS, torch.arange(16), 0, 0.3)
    ask.mask_ratio = mask_ratio
    chosen = masking.choose(ask, masking.values(IMGS))
    _, _, mask = mae(IMGS, mask_ratio, **chosen)
    if "noise" in chosen:
        assert chosen["noise"].dtype == torch.float32
        assert (mask == 0).sum(dim=1).tolist() == [int(64 * (1 - mask_ratio))] * 16
    else:
        assert chosen["visible"].dtype == torch.bool
        assert torch.equal(mask == 0, chosen["visible"])
    assert ("visible" in chosen) == (name == "curriculum"), "the threshold alone gives any number of patches"
    assert not any(value.requires_grad for value in chosen.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_mask_depends_on_seed_epoch_and_image_alone(maskings, name):
    masking = maskings[name]
    expected = visible_of(choose(masking))
    torch.rand(10)  # what was drawn elsewhere plays no part
    for batch in ([3], [7, 3, 11], list(range(15, -1, -1))):
        assert torch.equal(visible_of(choose(masking, batch)), expected[batch])
    if name.startswith("curriculum"):  # chosen by Z, without randomness
        return
    fewest = 3 if name == "grid" else 8  # there are four regular grids
    assert distinct(expected) > fewest, "images have masks of their own"
    assert not torch.equal(visible_of(choose(masking, epoch=1)), expected)
    other_seed = Masking(replace(masking.settings, seed=1), GRID, masking.module)
    assert not torch.equal(visible_of(choose(other_seed)), expected)
    same_picture = IMGS[:1].expand(16, -1, -1, -1)
    assert distinct(visible_of(choose(masking, imgs=same_picture))) > fewest


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.split()[0] not in ("curriculum", "predictive")])
def test_every_position_is_equally_likely(name):
    n = 2000
    rate = many(n, **VARIANTS[name]).float().mean(dim=0)
    if name == "block":  # rectangles that stay inside cover the middle more often than the corners
        assert 0 < rate.min() < rate.max() < 1
    else:
        assert (rate - 0.25).abs().max() < 5 * (0.25 * 0.75 / n) ** 0.5


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in ("curriculum", "predictive")])
@pytest.mark.parametrize("grid", [(4, 4), (2, 7), (14, 14), (16, 3)])
def test_any_grid(name, grid):
    visible = many(32, grid, masking=name, mask_ratio=0.6)
    assert visible.sum(dim=(1, 2)).tolist() == [int(grid[0] * grid[1] * 0.4)] * 32


# --- Seeded randomness ---


def test_hashed_values_are_uniform_and_within_the_open_interval():
    n, size = 2000, 64
    values = hashed_uniform(image_keys(0, 0, torch.arange(n)), 0, size).double()
    assert values.min() > 0
    assert values.max() < 1
    counts = torch.histc(values, 100, 0, 1)
    expected = n * size / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 5 * (2 * 99) ** 0.5, "chi-squared of 100 bins"
    correlation = np.corrcoef(values.T.numpy())  # between places; consecutive keys are consecutive images
    assert np.abs(correlation - np.eye(size)).max() < 6 / n**0.5
    assert np.abs(np.corrcoef(values[:-1].flatten().numpy(), values[1:].flatten().numpy())[0, 1]) < 0.02


def test_no_hashed_value_rounds_up_to_one():
    """The largest hash of this image did; the noise of the whole image was then not a number."""
    values = hashed_uniform(image_keys(0, 0, torch.tensor([83988])), 0, 196)
    assert values.max() == 1 - 2**-24


@pytest.mark.parametrize(("start", "end"), [(0.21, 0.75), (0.9, 0.6), (0.5, 0.75)])
def test_the_ratio_begins_and_ends_as_told(start, end):
    settings = MaskSettings(mask_ratio_start=start, mask_ratio=end, epochs=7)
    assert (settings.ratio(0), settings.ratio(6)) == (start, end)


def test_a_ratio_curriculum_needs_an_exact_ratio(tmp_path):
    (tmp_path / "mine.py").write_text("def half(ask):\n    return ask.uniform() < 0.5\n")
    masking = Masking(MaskSettings(masking=f"{tmp_path}/mine.py:half", mask_ratio_start=0.5, epochs=2), GRID)
    with pytest.raises(UserError, match="--mask_ratio_start needs noise"):
        masking.choose(masking.ask(torch.zeros(2, 3, 4, 4), torch.arange(2), 0, 0.0))


def test_hashed_values_are_the_same_however_they_are_batched():
    keys = image_keys(3, 7, torch.arange(100))
    whole = hashed_uniform(keys, 2, 32)
    assert torch.equal(torch.cat([hashed_uniform(part, 2, 32) for part in keys.split(7)]), whole)
    assert torch.equal(hashed_uniform(keys.flip(0), 2, 32).flip(0), whole)
    assert torch.equal(hashed_uniform(keys, 2, 10), whole[:, :10])
    others = [
        hashed_uniform(keys, 3, 32),
        hashed_uniform(image_keys(4, 7, torch.arange(100)), 2, 32),
        hashed_uniform(image_keys(3, 8, torch.arange(100)), 2, 32),
        hashed_uniform(image_keys(3, 7, torch.arange(100, 200)), 2, 32),
    ]
    for a, b in itertools.combinations([whole, *others], 2):
        assert (a == b).float().mean() < 0.01


def test_an_ask_draws_anew_at_every_call_and_the_same_for_an_equal_ask():
    masking = Masking(MaskSettings(), GRID)
    first, second = (masking.ask(IMGS, torch.arange(16), 0, 0.0) for _ in range(2))
    draws = [first.uniform(), first.uniform(), first.uniform(5)]
    assert draws[2].shape == (16, 5)
    assert not torch.equal(draws[0], draws[1])
    assert all(
        torch.equal(a, b) for a, b in zip(draws, [second.uniform(), second.uniform(), second.uniform(5)], strict=True)
    )


def test_normal_and_gumbel_values_have_their_distributions():
    masking = Masking(MaskSettings(), GRID)
    ask = masking.ask(torch.zeros(2000, 3, 4, 4), torch.arange(2000), 0, 0.0)
    normal, gumbel = ask.normal(), ask.gumbel()
    tolerance = 5 / normal.numel() ** 0.5
    assert normal.mean().item() == pytest.approx(0, abs=tolerance)
    assert normal.std().item() == pytest.approx(1, abs=tolerance)
    assert gumbel.mean().item() == pytest.approx(np.euler_gamma, abs=1.3 * tolerance)
    assert gumbel.std().item() == pytest.approx(np.pi / 6**0.5, abs=3 * tolerance)
    assert torch.isfinite(normal).all()
    assert torch.isfinite(gumbel).all()


# --- Each strategy's own ---


def boundary(visible):
    """Mean number of edges between a visible and a hidden patch."""
    vertical, horizontal = visible[:, 1:] != visible[:, :-1], visible[:, :, 1:] != visible[:, :, :-1]
    return (vertical.sum(dim=(1, 2)) + horizontal.sum(dim=(1, 2))).float().mean().item()


def visible_neighbours(visible):
    """Mean number of visible ones among the four neighbours of a visible patch, wrapping around."""
    v = visible.float()
    neighbours = sum(v.roll(shift, dim) for shift in (1, -1) for dim in (1, 2))
    return ((neighbours * v).sum() / v.sum()).item()


def test_grid_at_three_quarters_shows_every_second_patch_in_both_directions():
    visible = many(64, masking="grid")
    shifts = set()
    for one in visible:
        rows, columns = one.nonzero().unbind(dim=1)
        top, left = rows.min().item(), columns.min().item()
        expected = torch.zeros(8, 8, dtype=torch.bool)
        expected[top::2, left::2] = True
        assert torch.equal(one, expected)
        shifts.add((top, left))
    assert shifts == set(itertools.product((0, 1), repeat=2))
    assert visible_neighbours(many(200, masking="grid", mask_ratio=0.5)) == 0, "a checkerboard at one half"


def test_blocks_are_contiguous():
    blocks, scattered = many(300, (14, 14), masking="block"), many(300, (14, 14), masking="random")
    assert boundary(blocks) < 0.4 * boundary(scattered)
    # Of a few rectangles: hidden patches have hidden neighbours.
    assert visible_neighbours(~blocks) > 3.3 > visible_neighbours(~scattered) - 0.3


def test_blue_noise_spreads_and_red_noise_clumps():
    found = {
        colour: visible_neighbours(many(300, (14, 14), masking="noise", mask_noise=colour))
        for colour in ("blue", "white", "green", "red")
    }
    assert found["white"] == pytest.approx(4 * 0.25, abs=0.05)
    assert found["blue"] < 0.6 * found["white"]
    assert found["white"] + 0.3 < found["green"] < found["red"]


def test_the_noise_curriculum_follows_lambda_cl_from_blue_to_red():
    run = dict(masking="noise", lambda_cl_start=1.0, lambda_cl_end=-1.0)
    found = [visible_neighbours(many(300, (14, 14), progress=p, **run)) for p in (0, 0.25, 0.5, 0.75, 1)]
    assert found == sorted(found)
    assert found[-1] - found[0] > 1
    colours = ("blue", "white", "red")
    ends = [visible_neighbours(many(300, (14, 14), masking="noise", mask_noise=colour)) for colour in colours]
    assert [found[0], found[2], found[4]] == pytest.approx(ends, abs=0.05)
    held = many(8, progress=0.0, no_curriculum=True, **run)
    assert torch.equal(held, many(8, masking="noise", mask_noise="white")), "lambda_CL held at 0 is white noise"


def predictive_noise(lambda_cl, scores, **flags):
    masking = Masking(MaskSettings(masking="predictive", **flags), GRID)
    ask = masking.ask(torch.zeros(len(scores), 3, 32, 32), torch.arange(len(scores)), 0, 0.0)
    ask.lambda_cl = lambda_cl
    return masking.choose(ask, scores)["noise"]


def test_predictive_masks_hide_low_scores_as_partner_and_high_ones_as_adversary():
    scores = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    standardised = (scores - scores.mean(dim=1, keepdim=True)) / scores.std(dim=1, keepdim=True)
    neutral = predictive_noise(0.0, scores)
    assert torch.equal(neutral, predictive_noise(0.0, torch.zeros_like(scores))), "scores play no part"
    hidden = {
        weight: standardised[~visible_of({"noise": predictive_noise(weight, scores)})].mean().item()
        for weight in (1.0, 0.5, 0.0, -0.5, -1.0)
    }
    assert list(hidden.values()) == sorted(hidden.values())
    assert hidden[1.0] < -0.15
    assert hidden[0.0] == pytest.approx(0, abs=0.03)
    assert hidden[-1.0] > 0.15
    torch.testing.assert_close(predictive_noise(-1.0, scores) - neutral, standardised, rtol=0, atol=1e-4)
    torch.testing.assert_close(
        predictive_noise(-0.5, scores, cmm_strength=3.0) - neutral, 1.5 * standardised, rtol=0, atol=1e-4
    )
    # The scale of the scores is the module's own affair.
    torch.testing.assert_close(
        predictive_noise(1.0, 100 * scores + 7), predictive_noise(1.0, scores), rtol=0, atol=1e-3
    )


def test_neutral_predictive_masks_are_random_masks():
    noise = predictive_noise(0.0, torch.randn(2000, 64))
    rate = visible_of({"noise": noise}).float().mean(dim=0)
    assert (rate - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5
    assert visible_neighbours(visible_of({"noise": noise}).unflatten(1, GRID)) == pytest.approx(4 * 15 / 63, abs=0.03)


def test_without_its_module_a_learned_strategy_draws_random_masks():
    masking = Masking(MaskSettings(masking="curriculum"), GRID)
    ask = masking.ask(IMGS, torch.arange(16), 0, 0.0)
    assert torch.equal(masking.choose(ask)["noise"], choose(Masking(MaskSettings(), GRID))["noise"])


# --- Schedules and what is reported ---


def test_the_ratio_goes_linearly_from_its_start_to_its_end():
    settings = MaskSettings(mask_ratio=0.8, mask_ratio_start=0.4, epochs=5)
    assert [settings.ratio(epoch) for epoch in range(5)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8])
    assert [MaskSettings(mask_ratio=0.8, epochs=5).ratio(epoch) for epoch in range(5)] == [0.8] * 5
    assert MaskSettings(mask_ratio=0.8, mask_ratio_start=0.4, epochs=1).ratio(0) == 0.8
    counts = [
        many(4, epoch=epoch, masking="random", mask_ratio=0.75, mask_ratio_start=0.25, epochs=3).sum(dim=(1, 2))
        for epoch in range(3)
    ]
    assert [set(count.tolist()) for count in counts] == [{48}, {32}, {16}]


def flags(*extra):
    args = get_args_parser().parse_args(["--model", "mae_vit_micro_patch4", "--input_size", "32", *extra])
    check_args(args)
    return args


def test_a_ratio_that_changes_needs_masks_of_an_exact_ratio():
    with pytest.raises(UserError, match="--mask_ratio_start needs masks of an exact ratio: add --select topk"):
        flags("--mask_ratio_start", "0.5")
    for strategy in (["--select", "topk"], ["--masking", "predictive"], ["--masking", "noise"]):
        assert MaskSettings.of(flags("--mask_ratio_start", "0.5", *strategy)).mask_ratio_start == 0.5


def test_settings_come_from_flags_and_from_checkpoints_older_than_a_flag():
    args = flags("--masking", "noise", "--mask_ratio", "0.6", "--seed", "3")
    settings = MaskSettings.of(args)
    assert (settings.masking, settings.mask_ratio, settings.seed, settings.lambda_cl_end) == ("noise", 0.6, 3, -1.0)
    assert MaskSettings.of(vars(args)) == settings
    older = MaskSettings.of({"masking": "curriculum", "lambda_cl_end": -0.2, "model": "mae_vit_base"})
    assert older == MaskSettings(masking="curriculum", lambda_cl_end=-0.2)
    assert (older.soft, older.lambda_pos, older.lambda_cl_start) == ("tokens", 0.0, 1.0)


def test_the_moment_tells_lambda_cl_where_masks_follow_it():
    def moment(**flags):
        return Masking(MaskSettings(epochs=4, **flags), GRID).moment(1, 0.5)

    for masking in ("random", "block", "grid"):
        assert moment(masking=masking) == {"mask_ratio": 0.75}
    assert moment(masking="noise", mask_noise="red") == {"mask_ratio": 0.75}
    for masking in ("noise", "predictive", "curriculum"):
        assert moment(masking=masking) == {"mask_ratio": 0.75, "lambda_cl": pytest.approx(1 - 1.1 / 2)}
    assert moment(masking="noise", no_curriculum=True)["lambda_cl"] == 0
    assert moment(masking="random", mask_ratio_start=0.45) == {"mask_ratio": pytest.approx(0.55)}


def test_the_module_learns_every_so_many_steps():
    masking = Masking(MaskSettings(masking="curriculum", cmm_every=3), GRID)
    assert [step for step in range(8) if masking.learns_at(step)] == [0, 3, 6]
    assert not any(Masking(MaskSettings(), GRID).learns_at(step) for step in range(8))


def test_health_of_masks_by_hand():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1.0]])
    health = {name: value.item() for name, value in mask_health(mask, torch.tensor([[0.0, 0.05, 0.5, 0.95]])).items()}
    rates = np.array([0.25, 0.75, 0.75, 1.0])
    assert health == pytest.approx(
        {
            "visible": (0.25 * 3 + 0.5) / 4,
            "visible_std": np.std([0.25, 0.25, 0.5, 0.25]),
            "distinct": 2 / 4,
            "hamming": 3 * 3 / 6 / 4,  # three of six pairs differ, in three of four tokens
            "unseen": 1 / 4,
            "place": 1 - (1 - rates.var() / (rates.mean() * (1 - rates.mean()))) * 4 / 3,  # adjusted R^2
            "decisive": 3 / 4,
        },
        rel=1e-5,
    )
    alike = mask_health(torch.tensor([[0, 1, 1, 1.0]] * 3))
    assert alike["place"].item() == pytest.approx(1)
    assert alike["distinct"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("masking", ["curriculum", "predictive"])
def test_values_are_a_probability_where_they_are_called_one(mae, masking):
    masking = Masking(MaskSettings(masking=masking, cmm_depth=1), GRID)
    masking.module = masking.learned.build(mae)
    values = masking.values(IMGS)
    assert values.shape == (16, 64)
    assert (masking.keep_prob(values) is values) == masking.learned.probability
    assert ("decisive" in masking.health(torch.ones(16, 64), values)) == masking.learned.probability


def test_rows_of_a_share_are_the_same_for_any_number_of_processes(monkeypatch):
    strategy, cpu = CurriculumMasking(MaskSettings(cmm_fraction=0.25)), torch.device("cpu")
    whole = strategy.rows(16, cpu)[0].tolist()
    monkeypatch.setattr("masking.get_world_size", lambda: 2)
    assert [rows.tolist() for rows in strategy.rows(8, cpu)] == [whole, [0, 4]]
    assert strategy.rows(8, cpu)[0] is strategy.rows(8, cpu)[0], "no step makes the indices anew"


# --- A user's own ---


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import torch\n"
        "from masking import LearnedMasking\n"
        "def stripes(ask):\n"
        "    columns = torch.arange(ask.num_patches, device=ask.imgs.device) % ask.grid[1]\n"
        "    return (columns % 4 != 0) + ask.uniform()\n"
        "def bright(ask):\n"
        "    patches = torch.nn.functional.adaptive_avg_pool2d(ask.imgs.mean(dim=1, keepdim=True), ask.grid)\n"
        "    return patches.flatten(1) > 0\n"
        "def flat(ask):\n"
        "    return ask.uniform()[0]\n"
        "def nothing(ask):\n"
        "    pass\n"
        "number = 3\n"
    )
    return path


def test_a_users_file_needs_no_change_elsewhere(mine, mae):
    assert flags("--masking", f"{mine}:stripes").masking == f"{mine}:stripes"
    masking = Masking(MaskSettings(masking=f"{mine}:stripes"), GRID)
    visible = visible_of(choose(masking)).unflatten(1, GRID)
    assert visible[:, :, 0::4].all()
    assert visible.sum(dim=(1, 2)).tolist() == [16] * 16
    assert "lambda_cl" in masking.moment(0, 0.0), "it may follow the curriculum"
    chosen = choose(Masking(MaskSettings(masking=f"{mine}:bright"), GRID))
    assert chosen["visible"].dtype == torch.bool
    assert torch.equal(mae(IMGS, **chosen)[2] == 0, chosen["visible"])


def test_a_users_file_may_hold_anything_that_a_module_may(tmp_path):
    path = tmp_path / "random.py"  # nor does its name matter
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Width:\n    columns: int = 4\n"
        "def stripes(ask):\n    return ask.uniform(Width().columns).repeat_interleave(16, dim=1)\n"
    )
    assert visible_of(choose(Masking(MaskSettings(masking=f"{path}:stripes"), GRID))).sum(dim=1).tolist() == [16] * 16


def test_what_is_wrong_with_a_users_strategy_is_named(mine, tmp_path):
    for name, words in {
        "curriclum": r"--masking curriclum is unknown; choose from random, block, grid, noise, curriculum, predictive",
        "mine:stripes": r"--masking mine:stripes is unknown",
        f"{tmp_path}/other.py:stripes": r"there is no file .*other\.py",
        f"{mine}:dots": r"mine\.py has no function or class dots",
        f"{mine}:number": r"mine\.py has no function or class number",
    }.items():
        with pytest.raises(UserError, match=words):
            flags("--masking", name)
    for name, words in {"flat": r"\(64,\)", "nothing": "NoneType"}.items():
        with pytest.raises(UserError, match=rf"mine\.py:{name} returned {words}; a strategy returns \(16, 64\)"):
            choose(Masking(MaskSettings(masking=f"{mine}:{name}"), GRID))


def test_a_users_file_that_does_not_load_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("def stripes(ask:\n")
    with pytest.raises(UserError, match=r"--masking .*broken\.py:stripes: .*broken\.py"):
        flags("--masking", f"{tmp_path / 'broken.py'}:stripes")


def test_mask_health_of_hand_made_masks():
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])  # 0 is keep, 1 is remove
    keep_prob = torch.tensor([[0.05, 0.08, 0.95, 0.6], [0.0, 0.3, 0.2, 1.0], [0.5, 0.4, 0.91, 0.92]])
    health = {name: value.item() for name, value in mask_health(mask, keep_prob).items()}
    assert health["visible"] == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert health["visible_std"] == pytest.approx(torch.tensor([0.5, 0.25, 0.5]).std(correction=0).item())
    assert health["distinct"] == pytest.approx(2 / 3)
    assert health["hamming"] == pytest.approx((0.25 + 0.0 + 0.25) / 3)
    assert health["unseen"] == pytest.approx(2 / 4)
    assert health["decisive"] == pytest.approx(7 / 12)


def test_mask_health_counts_distinct_masks_as_unique_does():
    mask = (torch.rand(64, 4) < 0.5).float()
    assert mask_health(mask)["distinct"].item() == pytest.approx(len(mask.unique(dim=0)) / 64)
    assert mask_health(torch.ones(64, 9))["distinct"].item() == pytest.approx(1 / 64)


def test_mask_health_of_each_process_is_a_share_of_all():
    mask = (torch.rand(60, 5, generator=torch.Generator().manual_seed(0)) < 0.75).float()
    whole = mask_health(mask, mask)
    shares = [mask_health(mask, mask, slice(start, start + 15)) for start in range(0, 60, 15)]
    assert 0 < whole["distinct"] < 1
    for name, value in whole.items():
        assert sum(share[name] for share in shares).item() / 4 == pytest.approx(value.item(), rel=1e-5), name


def test_mask_health_of_a_batch_of_one():
    health = mask_health(torch.tensor([[1.0, 0.0]]))
    assert health["distinct"] == 1
    assert health["hamming"] == 0
    assert "decisive" not in health


def test_masks_of_any_number_become_noise():
    """For other autoencoders: visible patches come first."""
    visible = torch.rand(8, 16, generator=torch.Generator().manual_seed(0)) < 0.5
    order = as_noise({"visible": visible}).argsort(dim=1)
    first = torch.arange(16) < visible.sum(dim=1, keepdim=True)
    assert torch.equal(torch.zeros(8, 16, dtype=torch.bool).scatter_(1, order, first), visible)
    assert as_noise({"noise": order}) is order
