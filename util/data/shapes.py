"""A built-in data set: striped shapes on faintly striped backgrounds, generated from a seed, with object masks.

A class is a shape and a stripe width. Colours, contrast, position, size, tilt, and stripe direction and phase are
random: no single pixel or colour reveals the class, only structure that spans patches.
"""

import hashlib
import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from util.misc import derive_seed

SUPERSAMPLING = 2  # antialiased outlines


def _triangle(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (v <= 0.5) & (math.sqrt(3) * np.abs(u) - v <= 1.0)


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Five-pointed, with tips at radius 1 and notches at radius 0.42."""
    sector, notch = 2 * math.pi / 5, 0.42
    angle = np.abs((np.arctan2(v, u) % sector) - sector / 2)  # 0 at a notch, sector / 2 at a tip
    r = np.hypot(u, v)
    tip_x, tip_y = math.cos(sector / 2), math.sin(sector / 2)
    return (tip_x - notch) * r * np.sin(angle) - tip_y * (r * np.cos(angle) - notch) >= 0


# Each class as an indicator function; an object's radius is about 1.
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


@dataclass(frozen=True)
class Style:
    """Sampling ranges; the image's shorter side spans [-1, 1]."""

    background_amplitude: tuple[float, float]  # of the waves, in grey levels
    object_amplitude: tuple[float, float]
    waves: int  # in the background, and as many in the object
    periods: tuple[float, float] | None  # of a wave, across the image; None: the class's own
    radius: tuple[float, float]
    angle: tuple[float, float]


CLEAR = Style((4, 10), (25, 40), 1, None, radius=(0.75, 0.95), angle=(-0.1 * math.pi, 0.1 * math.pi))
# Object and background equally textured, any angle: only the outline reveals the class.
CAMOUFLAGED = Style((10, 25), (10, 25), 2, (1, 3), radius=(0.5, 0.8), angle=(0, 2 * math.pi))


class ShapesDataset:
    """`num_images` labelled images of `size` (height, width); image i depends only on (seed, split, i).

    Splits "pretrain" and "train" have the same images.
    """

    def __init__(
        self, size: tuple[int, int], num_images: int, split: str = "train", seed: int = 0, style: Style = CLEAR
    ):
        self.classes = list(SHAPES)
        self.size, self.num_images, self.split, self.seed, self.style = size, num_images, split, seed, style
        self.coordinates = _pixel_centres(size)
        self.fine_coordinates = _pixel_centres((SUPERSAMPLING * size[0], SUPERSAMPLING * size[1]))

    def __len__(self) -> int:
        return self.num_images

    def read(self, index: int) -> Image.Image:
        return Image.fromarray(self.render(index)[0])

    def label(self, index: int) -> int:
        return index % len(SHAPES)

    def name(self, index: int) -> str:
        return f"shapes/{self.split}/{index}"

    def fingerprint(self) -> str:
        settings = repr((tuple(self.size), len(self), self.split, self.seed)).encode()
        return hashlib.sha256(settings + self.render(0)[0].tobytes()).hexdigest()  # one image represents this code

    def render(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The image, uint8 [H, W, 3], and the object's mask, bool [H, W]."""
        part = "train" if self.split == "pretrain" else self.split
        rng, style = np.random.default_rng(derive_seed("shapes", self.seed, part, index)), self.style
        x, y = self.coordinates

        background = rng.uniform(95, 150, size=3)
        contrast = rng.uniform(80, 120, size=3) * rng.choice([-1, 1], size=3)
        colour = np.where(np.abs(background + contrast - 128) < 120, background + contrast, background - contrast)
        stripes = 1 + 0.5 * self.label(index)
        periods = style.periods or (0.95 * stripes, 1.05 * stripes)
        behind, inside = (
            base + sum(_wave(rng, x, y, periods, amplitude) for _ in range(style.waves))
            for base, amplitude in ((background, style.background_amplitude), (colour, style.object_amplitude))
        )

        radius = rng.uniform(*style.radius)
        centre_x, centre_y = rng.uniform(-0.9 + radius * 0.9, 0.9 - radius * 0.9, size=2)
        angle = rng.uniform(*style.angle)
        cos, sin = math.cos(angle) / radius, math.sin(angle) / radius
        x, y = self.fine_coordinates[0] - centre_x, self.fine_coordinates[1] - centre_y
        covered = SHAPES[self.classes[self.label(index)]](cos * x + sin * y, cos * y - sin * x)

        (height, width), s = self.size, SUPERSAMPLING
        coverage = covered.reshape(height, s, width, s).mean(axis=(1, 3))
        image = behind + coverage[..., None] * (inside - behind)
        return np.clip(np.floor(image + 0.5), 0, 255).astype(np.uint8), coverage >= 0.5


def _pixel_centres(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """x and y of each pixel; the image's shorter side spans [-1, 1]."""
    height, width = size
    short = min(size)
    return np.meshgrid((2 * np.arange(width) + 1 - width) / short, (2 * np.arange(height) + 1 - height) / short)


def _wave(
    rng: np.random.Generator,
    x: np.ndarray,
    y: np.ndarray,
    periods: tuple[float, float],
    amplitude: tuple[float, float],
) -> np.ndarray:
    """A coloured plane wave [H, W, 3] of random direction and phase, with `periods` across the image."""
    direction, phase = rng.uniform(0, 2 * math.pi, size=2)
    frequency = math.pi * rng.uniform(*periods)
    wave = np.sin(frequency * (math.cos(direction) * x + math.sin(direction) * y) + phase)
    return wave[..., None] * rng.uniform(*amplitude) * rng.choice([-1, 1], size=3)
