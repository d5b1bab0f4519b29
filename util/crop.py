"""The crop of linear probing: one draw, cut to fit."""

import math

import torch
from torchvision import transforms
from torchvision.transforms.functional import get_dimensions


class RandomResizedCrop(transforms.RandomResizedCrop):
    """Draws area and aspect once, and cuts to the image what is too large for it.

    torchvision draws up to ten times until a crop fits, which favours small crops. Upstream probes with a single draw,
    as TensorFlow's pipelines do.
    """

    @staticmethod
    def get_params(img, scale: tuple[float, float], ratio: tuple[float, float]) -> tuple[int, int, int, int]:
        """(top, left, height, width) of the crop."""
        _, height, width = get_dimensions(img)
        area = height * width * torch.empty(1).uniform_(*scale).item()
        aspect = math.exp(torch.empty(1).uniform_(math.log(ratio[0]), math.log(ratio[1])).item())
        crop_height = min(max(round(math.sqrt(area / aspect)), 1), height)
        crop_width = min(max(round(math.sqrt(area * aspect)), 1), width)
        top = torch.randint(height - crop_height + 1, ()).item()
        left = torch.randint(width - crop_width + 1, ()).item()
        return top, left, crop_height, crop_width
