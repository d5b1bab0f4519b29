import math

import torch
from PIL import Image

from util.crop import RandomResizedCrop


def crops(size, number=2000, **kwargs):
    torch.manual_seed(0)
    crop, image = RandomResizedCrop(32, **kwargs), Image.new("RGB", size)
    return [crop.get_params(image, crop.scale, crop.ratio) for _ in range(number)]


def test_crops_lie_inside_and_follow_area_and_aspect():
    for top, left, height, width in crops((100, 80)):
        assert 0 <= top <= 80 - height
        assert 0 <= left <= 100 - width
    # Small crops are never cut, so their area and aspect are those asked for.
    small = crops((1000, 1000), scale=(0.1, 0.3))
    areas = [h * w / 1e6 for _, _, h, w in small]
    aspects = [math.log(w / h) for _, _, h, w in small]
    assert 0.099 < min(areas) < 0.11
    assert 0.29 < max(areas) < 0.301
    assert abs(sum(areas) / len(areas) - 0.2) < 0.005, "uniform in area"
    assert abs(sum(aspects) / len(aspects)) < 0.01, "uniform in log aspect"


def test_one_draw_is_cut_to_the_image_and_never_drawn_again():
    """torchvision would look for a smaller crop, so that full height would be rare on a flat image."""
    flat = crops((200, 20), scale=(0.5, 1.0))
    assert all(height == 20 for _, _, height, _ in flat)


def test_output_size():
    assert RandomResizedCrop((16, 24))(Image.new("RGB", (50, 3))).size == (24, 16)
    assert RandomResizedCrop(8)(Image.new("RGB", (1, 1))).size == (8, 8)
