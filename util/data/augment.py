"""The strong augmentation of fine-tuning: timm's, behind this project's crops, and seeded for each image."""

import random
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from PIL import Image
from timm.data import create_transform
from timm.data.auto_augment import AugmentOp
from torchvision.transforms import Compose

from util.cli import UserError
from util.crop import draw_crop
from util.data.decode import MODES
from util.datasets import Augmentation, AugmentedDataset, EpochBatches, ImageLoader, collate, pixel_statistics
from util.misc import get_rank, get_world_size, seed_globals


@dataclass(kw_only=True)
class StrongAugmentation(Augmentation):
    """A random crop and flip, then timm's changes of colour and shape, and random erasing.

    Erasing fills with noise of the normalised scale, so this gives what the network takes: float32 [C, H, W].
    """

    distort: Callable[[Image.Image], Image.Image]
    finish: Callable[[Image.Image], torch.Tensor]

    def __call__(self, data: bytes | Image.Image, rng: random.Random) -> torch.Tensor:
        pixels = super().__call__(data, rng).permute(1, 2, 0).numpy()  # [H, W, C]
        image = Image.fromarray(pixels[:, :, 0] if self.mode == "L" else pixels)
        seed_globals("distort", rng.getrandbits(63))  # timm draws from all three of the global generators
        return self.finish(self.distort(image))


def finetune_augmentation(args: Namespace) -> StrongAugmentation:
    """Upstream's for fine-tuning, which is timm's; but the crop is drawn before anything is decoded, as elsewhere."""
    if args.in_chans == 4 and args.aa:
        raise UserError(f"--aa {args.aa} is for grey and colour images; add --aa '' with --in_chans 4")
    size, (mean, std) = tuple(args.input_size), pixel_statistics(args.in_chans)
    try:
        _, distort, finish = create_transform(
            size,
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
    except (AssertionError, ValueError, LookupError) as error:  # what timm's parser of policies raises
        raise UserError(f"--aa {args.aa} is not a policy of timm's: {error}") from None
    for op in operations(distort):
        if op.name.startswith("Posterize"):
            op.aug_fn = partial(black_at_zero_bits, op.aug_fn)
    return StrongAugmentation(
        size=size,
        mode=MODES[args.in_chans],
        draw=partial(draw_crop, scale=(0.08, 1.0)),
        exact=args.exact_decode,
        distort=distort,
        finish=finish,
    )


def operations(distort: Compose) -> Iterator[AugmentOp]:
    """All operations of a policy, whether they are drawn one by one (RandAugment) or in pairs (AutoAugment)."""
    for step in distort.transforms:
        yield from getattr(step, "ops", ())
        yield from chain(*getattr(step, "policy", ()))


def black_at_zero_bits(posterize: Callable[..., Image.Image], image: Image.Image, bits: int, **kwargs) -> Image.Image:
    """At full strength timm keeps 0 bits of a colour. That was black, until Pillow began to refuse it."""
    return posterize(image, bits, **kwargs) if bits > 0 else Image.new(image.mode, image.size)


def build_finetune_loader(source, args: Namespace) -> ImageLoader:
    """Its batches are float32 and normalised."""
    dataset = AugmentedDataset(source, finetune_augmentation(args), args.seed, args.max_bad_images)
    return ImageLoader(
        dataset,
        EpochBatches(len(dataset), args.batch_size, args.seed, get_rank(), get_world_size()),
        num_workers=args.num_workers,
        pin_mem=args.pin_mem and args.device.startswith("cuda"),
        collate_fn=collate,
    )
