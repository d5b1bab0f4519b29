"""Where crops lie: as torchvision draws them for pretraining, and as upstream does for linear probing."""

import math
import random

import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import RandomResizedCrop

from util.crop import ASPECTS, draw_crop, draw_crop_once

NUMBER = 4000


def crops(draw, width, height, number=NUMBER, **kwargs):
    rng = random.Random(0)
    return [draw(height, width, rng, **kwargs) for _ in range(number)]


def torchvision_crops(width, height, number=NUMBER, scale=(0.2, 1.0)):
    torch.manual_seed(0)
    image = Image.new("L", (width, height))
    return [RandomResizedCrop.get_params(image, scale, ASPECTS) for _ in range(number)]


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (300, 300), (600, 300)])
def test_pretraining_draws_as_torchvision(size):
    """600 x 300, where many draws do not fit and are repeated."""
    ours, theirs = crops(draw_crop, *size), torchvision_crops(*size)
    statistics = (
        lambda top, left, height, width: top,
        lambda top, left, height, width: left,
        lambda top, left, height, width: height,
        lambda top, left, height, width: width,
        lambda top, left, height, width: height * width,
        lambda top, left, height, width: width / height,
    )
    for statistic in statistics:
        a, b = ([statistic(*crop) for crop in drawn] for drawn in (ours, theirs))
        assert stats.ks_2samp(a, b).pvalue > 1e-3
    for top, left, height, width in ours:
        assert 0 <= top <= size[1] - height
        assert 0 <= left <= size[0] - width


@pytest.mark.parametrize("size", [(1000, 30), (30, 1000), (1, 1), (1, 50), (3, 2)])
def test_images_too_long_for_any_draw(size):
    """A centred crop follows when no draw fits: as often as torchvision's, and the same."""
    ours, theirs = crops(draw_crop, *size), torchvision_crops(*size)
    most_common = max(set(theirs), key=theirs.count)
    assert abs(ours.count(most_common) - theirs.count(most_common)) < 5 * math.sqrt(NUMBER) / 2
    never = (5.0, 6.0)
    assert set(crops(draw_crop, *size, 20, scale=never)) == set(torchvision_crops(*size, 20, scale=never))


def test_crops_lie_inside_and_follow_area_and_aspect():
    for top, left, height, width in crops(draw_crop_once, 100, 80):
        assert 0 <= top <= 80 - height
        assert 0 <= left <= 100 - width
    # Small crops are never cut, so their area and aspect are those asked for.
    small = crops(draw_crop_once, 1000, 1000, scale=(0.1, 0.3))
    areas = [h * w / 1e6 for _, _, h, w in small]
    aspects = [math.log(w / h) for _, _, h, w in small]
    assert 0.099 < min(areas) < 0.11
    assert 0.29 < max(areas) < 0.301
    assert abs(sum(areas) / len(areas) - 0.2) < 0.005, "uniform in area"
    assert abs(sum(aspects) / len(aspects)) < 0.01, "uniform in log aspect"


def test_one_draw_is_cut_to_the_image_and_never_drawn_again():
    """torchvision would retry with a smaller crop, which makes full height rare on a wide image."""
    flat = crops(draw_crop_once, 200, 20, scale=(0.5, 1.0))
    assert all(height == 20 for _, _, height, _ in flat)
