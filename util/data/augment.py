"""Strong augmentation for fine-tuning: timm's, after this project's crops, seeded per image."""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import cast

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from torchvision.transforms import Compose

from util.cli import UserError
from util.crop import draw_crop
from util.data.decode import MODES
from util.data.sources import Source
from util.datasets import Augmentation, ImageLoader, build_train_loader, collate, pixel_statistics
from util.misc import seed_globals


@dataclass(kw_only=True)
class StrongAugmentation(Augmentation):
    """A random crop and flip, then timm's colour and geometric distortions, and random erasing.

    Erasing fills with noise on the normalised scale, so this returns the network's input: float32 [C, H, W].
    """

    distort: Callable[[Image.Image], Image.Image]
    finish: Callable[[Image.Image], torch.Tensor]

    def __call__(self, data: bytes | Image.Image, rng: random.Random) -> torch.Tensor:
        pixels = super().__call__(data, rng).permute(1, 2, 0).numpy()  # [H, W, C]
        image = Image.fromarray(pixels[:, :, 0] if self.mode == "L" else pixels)
        seed_globals("distort", rng.getrandbits(63))  # timm draws from all three global generators
        return self.finish(self.distort(image))


def finetune_augmentation(args: Namespace) -> StrongAugmentation:
    """Upstream's (timm's) augmentation for fine-tuning, except that the crop is drawn before decoding, as elsewhere."""
    if args.in_chans == 4 and args.aa:
        raise UserError(f"--aa {args.aa} is for grey and colour images; add --aa '' with --in_chans 4")
    mean, std = pixel_statistics(args.in_chans, args.mean, args.std)
    try:
        steps = create_transform(
            tuple(args.input_size),
            is_training=True,
            color_jitter=args.color_jitter,
            auto_augment=args.aa,
            interpolation="bicubic",
            mean=tuple(mean),
            std=tuple(std),
            re_prob=args.reprob,
            re_mode=args.remode,
            re_count=args.recount,
            separate=True,
        )
    except (AssertionError, ValueError, LookupError) as error:  # raised by timm's policy parser
        raise UserError(f"--aa {args.aa} is not a timm policy: {error}") from None
    _, distort, finish = cast(tuple[Compose, Compose, Compose], steps)
    for op in operations(distort):
        if op.name.startswith("Posterize"):
            op.aug_fn = partial(black_at_zero_bits, op.aug_fn)
    return StrongAugmentation(
        size=args.input_size,
        mode=MODES[args.in_chans],
        draw=partial(draw_crop, scale=(0.08, 1.0)),
        exact=args.exact_decode,
        distort=distort,
        finish=finish,
    )


def operations(distort: Compose) -> Iterator[AugmentOp]:
    """All operations of a policy, whether sampled one by one (RandAugment) or in pairs (AutoAugment)."""
    for step in distort.transforms:
        yield from getattr(step, "ops", ())
        yield from chain(*getattr(step, "policy", ()))


def black_at_zero_bits(posterize: Callable[..., Image.Image], image: Image.Image, bits: int, **kwargs) -> Image.Image:
    """At full strength timm keeps 0 bits per channel: black, but an error in newer versions of Pillow."""
    return posterize(image, bits, **kwargs) if bits > 0 else Image.new(image.mode, image.size)


def build_finetune_loader(source: Source, args: Namespace) -> ImageLoader:
    """Batches are float32 and normalised."""
    return build_train_loader(source, finetune_augmentation(args), args.seed, args, collate_fn=collate)
