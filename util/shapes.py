"""A built-in data set: textured shapes on textured backgrounds, drawn from a seed, with the object's pixels known."""

import math
from typing import ClassVar

import numpy as np
from PIL import Image

from util.misc import derive_seed

SUPERSAMPLING = 2  # objects are drawn at twice the size and averaged, so that outlines are smooth


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (v <= 0.5) & (math.sqrt(3) * np.abs(u) - v <= 1.0)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Five points: inside the line from a tip at radius 1 to the neighbouring notch at radius 0.42."""
    sector, notch = 2 * math.pi / 5, 0.42
    angle = np.abs((np.arctan2(v, u) % sector) - sector / 2)  # 0 at a notch, sector / 2 at a tip
    r = np.hypot(u, v)
    tip_x, tip_y = math.cos(sector / 2), math.sin(sector / 2)
    return (tip_x - notch) * r * np.sin(angle) - tip_y * (r * np.cos(angle) - notch) >= 0


# Each class as an indicator function over coordinates in which the object has about radius 1.
SHAPES = {
    "disc": lambda u, v: u**2 + v**2 <= 0.72,
    "ring": lambda u, v: (u**2 + v**2 <= 0.9) & (u**2 + v**2 >= 0.3),
    "triangle": _triangle,
    "square": lambda u, v: np.maximum(np.abs(u), np.abs(v)) <= 0.72,
    "cross": lambda u, v: (np.minimum(np.abs(u), np.abs(v)) <= 0.28) & (np.maximum(np.abs(u), np.abs(v)) <= 0.95),
    "star": _star,
    "crescent": lambda u, v: (u**2 + v**2 <= 0.9) & ((u - 0.45) ** 2 + v**2 >= 0.5),
    "bar": lambda u, v: (np.abs(u) <= 1.0) & (np.abs(v) <= 0.32),
    "hourglass": lambda u, v: (np.abs(u) <= np.abs(v) + 0.08) & (np.abs(v) <= 0.85),
    "dome": lambda u, v: (u**2 + (v + 0.45) ** 2 <= 0.95) & (v >= -0.45),
}


class ShapesDataset:
    """`num_images` labelled images of `size` (height, width); image i is a function of (seed, split, i) alone."""

    classes: ClassVar[list[str]] = list(SHAPES)

    def __init__(self, size: tuple[int, int], num_images: int, split: str = "train", seed: int = 0):
        self.size, self.num_images, self.split, self.seed = size, num_images, split, seed
        self.coordinates = _pixel_centres(size)
        self.fine_coordinates = _pixel_centres((SUPERSAMPLING * size[0], SUPERSAMPLING * size[1]))

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        pixels, _ = self.render(index)
        return Image.fromarray(pixels), self.label(index)

    def label(self, index: int) -> int:
        return index % len(SHAPES)

    def render(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The image, uint8 [H, W, 3], and the object's pixels, bool [H, W]."""
        rng = np.random.default_rng(derive_seed("shapes", self.seed, self.split, index))
        x, y = self.coordinates

        background = rng.uniform(95, 150, size=3)
        contrast = rng.uniform(80, 120, size=3) * rng.choice([-1, 1], size=3)
        colour = np.where(np.abs(background + contrast - 128) < 120, background + contrast, background - contrast)
        behind, inside = background + _waves(rng, x, y), colour + _waves(rng, x, y)

        radius = rng.uniform(0.5, 0.8)
        centre_x, centre_y = rng.uniform(-0.9 + radius * 0.9, 0.9 - radius * 0.9, size=2)
        angle = rng.uniform(0, 2 * math.pi)
        cos, sin = math.cos(angle) / radius, math.sin(angle) / radius
        x, y = self.fine_coordinates[0] - centre_x, self.fine_coordinates[1] - centre_y
        covered = SHAPES[self.classes[self.label(index)]](cos * x + sin * y, cos * y - sin * x)

        (height, width), s = self.size, SUPERSAMPLING
        coverage = covered.reshape(height, s, width, s).mean(axis=(1, 3))
        image = behind + coverage[..., None] * (inside - behind)
        return np.clip(np.floor(image + 0.5), 0, 255).astype(np.uint8), coverage >= 0.5


def _pixel_centres(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """x and y of each pixel; the shorter side of the image spans [-1, 1]."""
    height, width = size
    short = min(size)
    return np.meshgrid((2 * np.arange(width) + 1 - width) / short, (2 * np.arange(height) + 1 - height) / short)


def _waves(rng: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A coloured texture [H, W, 3] of two plane waves, one to three periods across the image."""
    texture = np.zeros([*x.shape, 3])
    for _ in range(2):
        direction, phase = rng.uniform(0, 2 * math.pi, size=2)
        frequency = math.pi * rng.uniform(1, 3)
        wave = np.sin(frequency * (math.cos(direction) * x + math.sin(direction) * y) + phase)
        texture += wave[..., None] * rng.uniform(10, 25) * rng.choice([-1, 1], size=3)
    return texture
