"""Random crops, drawn from the image's size alone, before any pixel is decoded."""

import math
import random

Crop = tuple[int, int, int, int]  # top, left, height, width

ASPECTS = (3 / 4, 4 / 3)  # width / height


def draw_size(
    height: int, width: int, scale: tuple[float, float], aspects: tuple[float, float], rng: random.Random
) -> tuple[int, int]:
    """Height and width of a crop: uniform in area and in log aspect."""
    area = height * width * rng.uniform(*scale)
    aspect = math.exp(rng.uniform(math.log(aspects[0]), math.log(aspects[1])))
    return round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))


def place(crop_height: int, crop_width: int, height: int, width: int, rng: random.Random) -> Crop:
    top, left = (int(rng.random() * (room + 1)) for room in (height - crop_height, width - crop_width))
    return top, left, crop_height, crop_width


def draw_crop(
    height: int,
    width: int,
    rng: random.Random,
    scale: tuple[float, float] = (0.2, 1.0),
    aspects: tuple[float, float] = ASPECTS,
) -> Crop:
    """The crop of pretraining, as torchvision's RandomResizedCrop draws it.

    A crop that does not fit is redrawn up to ten times; then the largest centred crop of a permitted aspect is used.
    """
    for _ in range(10):
        crop_height, crop_width = draw_size(height, width, scale, aspects, rng)
        if 0 < crop_height <= height and 0 < crop_width <= width:
            return place(crop_height, crop_width, height, width, rng)
    crop_height = min(height, round(width / aspects[0]))
    crop_width = min(width, round(height * aspects[1]))
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def draw_crop_once(
    height: int,
    width: int,
    rng: random.Random,
    scale: tuple[float, float] = (0.08, 1.0),
    aspects: tuple[float, float] = ASPECTS,
) -> Crop:
    """The crop of linear probing: a single draw, clipped to the image, as upstream and TensorFlow's pipelines do.

    Redrawing, as torchvision does, favours small crops.
    """
    crop_height, crop_width = draw_size(height, width, scale, aspects, rng)
    return place(min(max(crop_height, 1), height), min(max(crop_width, 1), width), height, width, rng)
