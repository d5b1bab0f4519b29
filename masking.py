"""Masking strategies: how to choose what the autoencoder sees, in one registry that is easy to extend.

A strategy is a function of an `Ask` (images, patch grid, ratio, curriculum weight, seeded randomness). It returns
    float [N, L]    noise: the int(L * (1 - ratio)) smallest values of each image stay visible, an exact ratio
    bool [N, L]     True stays visible: any number of patches per image
and is registered with a decorator. Your own needs no changes to this repository:

    # mine.py, for main_pretrain.py --masking mine.py:stripes
    def stripes(ask):
        columns = torch.arange(ask.num_patches, device=ask.imgs.device) % ask.grid[1]
        return ask.uniform(ask.grid[1])[:, columns]  # hides whole columns

A learned strategy is a class with its own module, which engine_pretrain.py trains after the MAE's step.
Masks: 0 is keep, 1 is remove.
"""

import importlib.util
import itertools
import json
import sys
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models_cmm import (
    build_cmm,
    build_predictor,
    curriculum_loss,
    distance_diversity_loss,
    diversity_loss,
    gaussian_loss,
    hidden_curriculum_loss,
    kl_loss,
    lambda_cl,
    position_loss,
    prediction_loss,
    soft_kl_loss,
    with_balanced_gradient,
)
from models_mae import Autoencoder, build_mae, grid_size
from models_vit import mae_of
from util.checkpoint import FLAGS, check_form, load_checkpoint, load_weights, settings_of
from util.cli import UserError
from util.misc import derive_seed, gather_batch, get_world_size, share_of_rank, without_ddp

RED, GREEN, BLUE = 1.0, 0.7, 0.5  # widths of the filters, in patches


@dataclass(frozen=True)
class MaskSettings:
    """The flags that masks depend on. Defaults are for checkpoints that predate a flag."""

    masking: str = "random"
    mask_ratio: float = 0.75
    mask_ratio_start: float | None = None
    mask_noise: str | None = None
    epochs: int = 1
    seed: int = 0
    select: str = "threshold"
    soft: str = "tokens"
    kl: str = "tallied"
    diversity: str = "squared"
    lambda_cl_start: float = 1.0
    lambda_cl_end: float = -0.1
    no_curriculum: bool = False
    lambda_gauss: float = 10.0
    lambda_kl: float = 1.0
    lambda_div: float = 2.0
    lambda_pos: float = 0.0
    cmm_depth: int | None = None
    cmm_dim: int | None = None
    cmm_strength: float = 1.0
    cmm_every: int = 1
    cmm_fraction: float = 1.0

    @classmethod
    def of(cls, settings: Mapping | Namespace) -> "MaskSettings":
        """From a run's flags or a checkpoint's; flags unrelated to masks are ignored."""
        given = vars(settings) if isinstance(settings, Namespace) else settings
        return cls(**{entry.name: given[entry.name] for entry in fields(cls) if entry.name in given})

    def lambda_cl(self, progress: float) -> float:
        return 0.0 if self.no_curriculum else lambda_cl(progress, self.lambda_cl_start, self.lambda_cl_end)

    def ratio(self, epoch: int) -> float:
        """The mask ratio in an epoch: linear from `mask_ratio_start`, if given, to `mask_ratio`."""
        if self.mask_ratio_start is None or self.epochs < 2:
            return self.mask_ratio
        passed = epoch / (self.epochs - 1)
        return (1 - passed) * self.mask_ratio_start + passed * self.mask_ratio  # exact at both ends


@dataclass
class Ask:
    """The input of a strategy: N images [N, C, H, W] in `grid` = (h, w) patches, and the state of the curriculum."""

    imgs: torch.Tensor
    grid: tuple[int, int]
    mask_ratio: float
    lambda_cl: float
    keys: torch.Tensor  # int64 [N]: one per image, a function of (seed, epoch, index)
    settings: MaskSettings = field(default_factory=MaskSettings)
    draws: itertools.count = field(default_factory=itertools.count)

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def uniform(self, size: int | None = None) -> torch.Tensor:
        """Values in (0, 1), [N, size] or [N, L]: new at each call, but reproducible for an image in an epoch."""
        size = self.num_patches if size is None else size
        return hashed_uniform(self.keys, next(self.draws), size)

    def normal(self) -> torch.Tensor:
        """Standard normal values [N, L]."""
        return torch.erfinv(2 * self.uniform() - 1) * 2**0.5

    def gumbel(self) -> torch.Tensor:
        """Standard Gumbel values [N, L]."""
        return -torch.log(-torch.log(self.uniform()))


def image_keys(seed: int, epoch: int, index: torch.Tensor) -> torch.Tensor:
    """A key per image, from its index in the data set [N]."""
    return index + derive_seed("masks", seed, epoch)


def hashed_uniform(keys: torch.Tensor, draw: int, size: int) -> torch.Tensor:
    """Uniform values [N, size] in (0, 1), a hash of (key, draw, position): computed on any device, stored nowhere and,
    unlike a generator's stream, independent of batches and processes. The mixer is SplitMix64's."""
    places = torch.arange(size, device=keys.device) + (draw << 32)
    x = mix_bits(keys)[:, None] + places * -7046029254386353131  # 2**64 / golden ratio, as int64
    return (((mix_bits(x) >> 40 & 0xFFFFFF).float() + 0.5) / 2**24).clamp(max=1 - 2**-24)  # float32 would round up to 1


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    return x ^ (x >> 31 & (1 << 33) - 1)


# --- Strategies without learning ---

Strategy = Callable[[Ask], torch.Tensor]
STRATEGIES: dict[str, "Strategy | type[LearnedMasking]"] = {}


def register(entry: Callable) -> Callable:
    """Register a function under its own name, a class under its `name`."""
    STRATEGIES[getattr(entry, "name", entry.__name__)] = entry
    return entry


def constant(strategy: Strategy) -> Strategy:
    """Mark a strategy that ignores lambda_CL, which is then not reported."""
    strategy.constant = True  # type: ignore[attr-defined]
    return strategy


@register
@constant
def random(ask: Ask) -> torch.Tensor:
    """Every patch equally likely: vanilla MAE (He et al., CVPR 2022)."""
    return ask.uniform()


@register
@constant
def block(ask: Ask) -> torch.Tensor:
    """Hidden patches form rectangles, as in BEiT (Bao et al., ICLR 2022), here at an exact ratio.

    Rectangles are drawn one after another; patches under earlier ones are hidden first.
    """
    (height, width), number, device = ask.grid, 32, ask.imgs.device
    area, aspect, top, left = (ask.uniform(number) for _ in range(4))  # [N, K] each
    area = 0.08 + 0.24 * area  # as a fraction of the image
    aspect = torch.exp((2 * aspect - 1) * 1.2)  # between 0.3 and 3.3
    tall, wide = (area * aspect).sqrt().clamp(max=1) * height, (area / aspect).sqrt().clamp(max=1) * width
    rows = torch.arange(height, device=device) + 0.5 - (top * (height - tall)).unsqueeze(-1)  # [N, K, h]
    columns = torch.arange(width, device=device) + 0.5 - (left * (width - wide)).unsqueeze(-1)  # [N, K, w]
    in_rows, in_columns = (rows > 0) & (rows < tall[..., None]), (columns > 0) & (columns < wide[..., None])
    covered = (in_rows[..., :, None] & in_columns[..., None, :]).flatten(2)  # [N, K, L]
    first = torch.where(covered.any(dim=1), covered.float().argmax(dim=1), number)
    # Within the last rectangle, of which only part is needed, patches are hidden row by row.
    return number - first + torch.linspace(0, 0.9, ask.num_patches, device=device)


@register
@constant
def grid(ask: Ask) -> torch.Tensor:
    """Visible patches spread as evenly as the ratio allows: every second one in both directions at 0.75 (He et al.'s
    grid-wise sampling), shifted at random. An ordered dither (Bayer, 1973) ranks the patches, so any ratio works."""
    height, width = ask.grid
    shift = (ask.uniform(2) * 16).long()  # [N, 2]
    rows = (torch.arange(height, device=ask.imgs.device) + shift[:, :1]) % 16  # [N, h]
    columns = (torch.arange(width, device=ask.imgs.device) + shift[:, 1:]) % 16
    rank = torch.zeros(len(shift), height, width, device=ask.imgs.device)
    for bit in range(4):  # the lowest bit of the position carries the most weight
        row, column = rows[:, :, None] >> bit & 1, columns[:, None, :] >> bit & 1
        rank = rank + ((row ^ column) * 2 + row) * 4.0 ** (3 - bit)
    return rank.flatten(1)


@register
def noise(ask: Ask) -> torch.Tensor:
    """Filtered noise on the patch grid, as in ColorMAE (Hinojosa et al., ECCV 2024): hidden patches are clumped (red),
    clumped at one scale (green) or evenly spread (blue). By default the colour follows the curriculum."""
    return coloured_noise(ask, ask.settings.mask_noise or "curriculum")


def coloured_noise(ask: Ask, colour: str) -> torch.Tensor:
    """Noise [N, L] of one colour; "curriculum" goes from blue at lambda_CL = 1 through white at 0 to red at -1."""
    white = ask.normal()
    if colour == "white":
        return white
    if colour == "curriculum":
        weight = abs(ask.lambda_cl)
        end = coloured_noise(ask, "blue" if ask.lambda_cl > 0 else "red")
        return weight * end + (1 - weight) * white
    filtered = {
        "red": lambda z: blur(z, RED),
        "green": lambda z: blur(z, GREEN) - blur(z, 2 * GREEN),
        "blue": lambda z: z - blur(z, BLUE),
    }[colour]
    return standardise(filtered(white.unflatten(1, ask.grid)).flatten(1))


def blur(z: torch.Tensor, sigma: float) -> torch.Tensor:
    """Gaussian blur of [N, h, w] that wraps around at the borders, so that no position is special."""
    rows, columns = (circular_gaussian(side, sigma, z.device) for side in z.shape[1:])
    return rows @ z @ columns


@cache
def circular_gaussian(side: int, sigma: float, device: torch.device) -> torch.Tensor:
    """The symmetric matrix [side, side] of a circular Gaussian filter."""
    distance = (torch.arange(side)[:, None] - torch.arange(side)[None, :]).abs()
    distance = torch.minimum(distance, side - distance)
    kernel = torch.exp(-(distance**2) / (2 * sigma**2))
    return (kernel / kernel.sum(dim=1, keepdim=True)).to(device)


def standardise(x: torch.Tensor) -> torch.Tensor:
    """Shift and scale each row to mean 0 and standard deviation 1."""
    return (x - x.mean(dim=1, keepdim=True)) / (x.std(dim=1, keepdim=True) + 1e-5)


# --- Learned strategies ---


class LearnedMasking(ABC):
    """A strategy with a module that is trained alongside the autoencoder. The module outputs a value per patch, from
    which the mask is chosen, and learns from the autoencoder's errors."""

    name: str
    value: str  # name of the module's values in figures
    probability: bool  # whether they are probabilities
    depth: int  # blocks of the module; default of --cmm_depth

    def __init__(self, settings: MaskSettings):
        self.settings = settings

    @abstractmethod
    def build(self, mae: Autoencoder) -> nn.Module:
        """A new module that fits `mae`."""

    @abstractmethod
    def choose(self, ask: Ask, values: torch.Tensor) -> torch.Tensor:
        """Noise or visible patches, as from any strategy, given the module's values [N, L]."""

    @abstractmethod
    def errors(
        self, mae: Autoencoder, imgs: torch.Tensor, values: torch.Tensor, pred: torch.Tensor
    ) -> tuple[torch.Tensor, "Rows"]:
        """Patch errors [M, L] that the module learns from, as a function of its `values`, and which rows of the batch
        they belong to. `pred` is step 1's prediction."""

    @abstractmethod
    def losses(
        self, values: torch.Tensor, error: torch.Tensor, mask: torch.Tensor, rows: "Rows", ask: Ask
    ) -> dict[str, torch.Tensor]:
        """The module's loss on the global batch as "cmm/loss", and its terms. A process may compute only its share, as
        for diversity: the value is the mean over processes."""


Rows = slice | torch.Tensor


@register
class CurriculumMasking(LearnedMasking):
    """CL-MAE (Madan et al., WACV 2024): the module outputs Z, the probability that a patch stays visible."""

    name, value, probability, depth = "curriculum", "Z", True, 5

    def __init__(self, settings: MaskSettings):
        super().__init__(settings)
        kl = {"tallied": kl_loss, "soft": soft_kl_loss}[settings.kl]
        diversity = {"squared": diversity_loss, "distance": distance_diversity_loss}[settings.diversity]
        # Functions of Z [N, L] and the mask ratio. A new loss takes a function, an entry here and a flag.
        self.terms: dict[str, tuple[Callable[..., torch.Tensor], float]] = {
            "gauss": (lambda z, ratio: gaussian_loss(z), settings.lambda_gauss),
            "kl": (kl, settings.lambda_kl),
            "div": (lambda z, ratio: diversity(z, share_of_rank(len(z))), settings.lambda_div),
            "pos": (position_loss, settings.lambda_pos),
        }

    def build(self, mae: Autoencoder) -> nn.Module:
        return build_cmm(mae, self.settings.cmm_depth or self.depth, self.settings.cmm_dim)

    def choose(self, ask: Ask, values: torch.Tensor) -> torch.Tensor:
        return -values if self.settings.select == "topk" else values >= 0.5

    def errors(self, mae, imgs, values, pred):
        """Step 2: no threshold and no selection; the autoencoder sees every patch to the degree given by Z."""
        rows, here = self.rows(len(imgs), imgs.device)
        if self.settings.soft == "attention":
            values = with_balanced_gradient(values)
        _, pred, _ = mae(imgs[here], keep_prob=values[here], soft=self.settings.soft)
        return mae.patch_error(imgs[here], pred), rows

    def rows(self, n: int, device: torch.device) -> tuple[Rows, Rows]:
        """The images to learn from, as rows of the global batch and of this process's n.

        Batches are already shuffled, so evenly spaced rows are as good as random ones. They are also the same images
        for any number of processes, provided `cmm_fraction` of each process's batch is a whole number.
        """
        if self.settings.cmm_fraction == 1:
            return slice(None), slice(None)
        number, processes = max(round(self.settings.cmm_fraction * n), 1), get_world_size()
        return evenly_spread_rows(number * processes, n * processes, device), evenly_spread_rows(number, n, device)

    def losses(self, values, error, mask, rows, ask):
        """Eq. 1: lambda_CL(t) times the curriculum loss, plus the other weighted terms."""
        if self.settings.soft == "attention":
            curriculum = hidden_curriculum_loss(with_balanced_gradient(values)[rows], error)
        else:
            curriculum = curriculum_loss(values[rows], error)
        parts = {"curriculum": ask.lambda_cl * curriculum}
        weighted = [parts["curriculum"]]
        for name, (function, weight) in self.terms.items():
            if weight:
                parts[name] = function(values, ask.mask_ratio)
                weighted.append(weight * parts[name])
        return {"cmm/loss": sum(weighted), **{f"cmm/{name}": value for name, value in parts.items()}}


@cache
def evenly_spread_rows(number: int, n: int, device: torch.device) -> torch.Tensor:
    """Indices of `number` of n rows, kept on the device: a list would be copied there in each step."""
    return torch.arange(number, device=device) * n // number


@register
class PredictiveMasking(LearnedMasking):
    """The predictive curriculum: the module predicts each patch's error, and masks are sampled accordingly. A partner
    hides patches predicted to be easy, an adversary those predicted to be hard; at lambda_CL = 0 masks are random."""

    name, value, probability, depth = "predictive", "predicted error", False, 2

    def build(self, mae: Autoencoder) -> nn.Module:
        return build_predictor(mae, self.settings.cmm_depth or self.depth, self.settings.cmm_dim)

    def choose(self, ask: Ask, values: torch.Tensor) -> torch.Tensor:
        colour = self.settings.mask_noise or "white"
        noise = -ask.gumbel() if colour == "white" else coloured_noise(ask, colour)
        return noise - ask.lambda_cl * self.settings.cmm_strength * standardise(values)

    def errors(self, mae, imgs, values, pred):
        """Already computed in step 1."""
        return mae.patch_error(imgs, pred.detach()), slice(None)

    def losses(self, values, error, mask, rows, ask):
        return {"cmm/loss": prediction_loss(values, error, mask)}


# --- From flags to masks ---


def find_strategy(name: str, flag: str = "--masking") -> "Strategy | type[LearnedMasking]":
    """A registered strategy, or the function or class NAME in a user's file, given as path/to/file.py:NAME."""
    if name in STRATEGIES:
        return STRATEGIES[name]
    path, colon, entry = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        known = ", ".join(STRATEGIES)
        raise UserError(f"{flag} {name} is unknown; choose from {known}, or give your own as path/to/file.py:name")
    if not Path(path).is_file():
        raise UserError(f"{flag} {name}: there is no file {path}")
    # Not named by its stem, which may be that of another module.
    spec = importlib.util.spec_from_file_location(str(Path(path).resolve()), path)
    if spec is None or spec.loader is None:
        raise UserError(f"{flag} {name}: {path} cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{flag} {name}: {path} cannot be imported: {error}") from error
    if not callable(getattr(module, entry, None)):
        raise UserError(f"{flag} {name}: {path} has no function or class {entry}")
    return getattr(module, entry)


class Masking:
    """The masks of a run, as the engine, the monitor and the figures use them.

    `module` is the network of a learned strategy, possibly wrapped in DistributedDataParallel; otherwise None.
    """

    def __init__(self, settings: MaskSettings, grid: tuple[int, int], module: nn.Module | None = None):
        self.settings, self.grid, self.module = settings, grid, module
        strategy = find_strategy(settings.masking)
        self.learned = strategy(settings) if isinstance(strategy, type) else None
        self.function: Strategy = (
            random if isinstance(strategy, type) else strategy
        )  # random: before a module has values

    @property
    def follows_curriculum(self) -> bool:
        if self.learned is not None:
            return True
        fixed_colour = self.function is noise and self.settings.mask_noise not in (None, "curriculum")
        return not (fixed_colour or getattr(self.function, "constant", False))

    def moment(self, epoch: int, progress: float) -> dict[str, float]:
        """The state of the curriculum: logged, and stored in checkpoints."""
        moment = {"mask_ratio": self.settings.ratio(epoch)}
        return moment | ({"lambda_cl": self.settings.lambda_cl(progress)} if self.follows_curriculum else {})

    def learns_at(self, step: int) -> bool:
        return self.learned is not None and step % self.settings.cmm_every == 0

    def values(self, imgs: torch.Tensor) -> torch.Tensor | None:
        """The module's value for each patch [N, L]."""
        return None if self.module is None else self.module(imgs)

    def unwrapped_values(self, imgs: torch.Tensor) -> torch.Tensor | None:
        """The same without DistributedDataParallel, for a single process."""
        return None if self.module is None else without_ddp(self.module)(imgs)

    def keep_prob(self, values: torch.Tensor | None) -> torch.Tensor | None:
        """The module's values if they are probabilities, like Z; otherwise None."""
        return values if self.learned is not None and self.learned.probability else None

    def health(self, mask: torch.Tensor, values: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """`mask_health` of all processes' masks [N, L]: each returns its share, and their mean is the value."""
        keep_prob = self.keep_prob(values)
        gathered = gather_batch(mask) if keep_prob is None else gather_batch(mask, keep_prob.detach())
        return mask_health(*gathered, own=share_of_rank(len(gathered[0])))

    def ask(self, imgs: torch.Tensor, index: torch.Tensor, epoch: int, progress: float) -> Ask:
        """`index` [N] is that of the images in their data set; the run's `progress` goes from 0 to 1."""
        settings = self.settings
        keys = image_keys(settings.seed, epoch, index.to(imgs.device, non_blocking=True))
        return Ask(imgs, self.grid, settings.ratio(epoch), settings.lambda_cl(progress), keys, settings)

    @torch.no_grad()
    def choose(self, ask: Ask, values: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The autoencoder's masking argument: `noise` or `visible`."""
        if self.learned is not None and values is not None:
            chosen = self.learned.choose(ask, values)
        else:
            chosen = self.function(ask)
        expected = (len(ask.imgs), ask.num_patches)
        if not isinstance(chosen, torch.Tensor) or chosen.shape != expected:
            shape = tuple(chosen.shape) if isinstance(chosen, torch.Tensor) else type(chosen).__name__
            raise UserError(f"--masking {self.settings.masking} returned {shape}; a strategy returns {expected}")
        if chosen.dtype == torch.bool and self.settings.mask_ratio_start is not None:
            raise UserError(f"--mask_ratio_start needs noise; --masking {self.settings.masking} returned bool values")
        return {"visible": chosen} if chosen.dtype == torch.bool else {"noise": chosen.float()}


def as_noise(masks: dict[str, torch.Tensor]) -> torch.Tensor:
    """The result of `Masking.choose` as noise [N, L], for third-party autoencoders: visible patches have the smallest
    values. Such autoencoders keep a fixed number of patches, so only masks that show as many are reproduced exactly."""
    return masks["noise"] if "noise" in masks else (~masks["visible"]).float()


def masking_of(checkpoint: dict, model: Autoencoder, source: str) -> Masking:
    """The masks of a checkpoint's run, with the trained module if the strategy is learned."""
    settings = MaskSettings.of(settings_of(checkpoint))
    masking = Masking(settings, grid_size(model))
    if masking.learned is not None:
        if "cmm" not in checkpoint:
            raise UserError(f"{source} has no masking module, though it was trained with --masking {settings.masking}")
        masking.module = masking.learned.build(model)
        load_weights(masking.module, checkpoint["cmm"], source)
    return masking


def from_text(text: str) -> Any:
    """An entry of a safetensors header: JSON, or plain text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def load_module(path: str | Path) -> nn.Module:
    """The trained module of a learned strategy, in evaluation mode, from a run or an export of the module alone."""
    checkpoint = load_checkpoint(path)
    if "metadata" not in checkpoint:
        model = mae_of(checkpoint, str(path))
    else:
        told = checkpoint["metadata"]
        if "masking" not in told:
            raise UserError(f"{path} has no masking module; name the training's .pth, or an export of --format masking")
        read = {entry.name for entry in fields(MaskSettings)} | {"input_size", "in_chans"}
        settings = {name: from_text(text) for name, text in told.items() if name in read}
        check_form(settings, FLAGS, str(path))
        try:
            with torch.device("meta"):  # only its sizes matter
                model = build_mae(told["model"], img_size=tuple(settings["input_size"]), in_chans=settings["in_chans"])
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"{path}: its header describes no autoencoder ({error})") from None
        checkpoint = {"cmm": checkpoint["model"], "args": settings}
    module = masking_of(checkpoint, model, str(path)).module
    if module is None:
        raise UserError(f"{path} has no masking module: its masks were not learned")
    return module.eval()


def mask_health(
    mask: torch.Tensor, keep_prob: torch.Tensor | None = None, own: slice = slice(None)
) -> dict[str, torch.Tensor]:
    """Metrics of a batch of masks [N, L] (0 is keep, 1 is remove), and of the Z they came from, as scalar tensors.

    With several processes, each compares its `own` rows with all; the mean over processes is the batch's value.

    visible      share of visible tokens, mean over images         visible_std   its standard deviation over images
    distinct     share of masks in the batch that differ from all earlier ones (1/N: mode collapse)
    hamming      share of tokens in which two masks differ, mean over pairs of images
    unseen       share of positions visible in no image of the batch
    place        share of the masks' variance explained by position alone (0: none, 1: one mask for all), adjusted for
                 chance
    decisive     share of Z within 0.1 of 0 or 1
    """
    n, num_patches = mask.shape
    visible = 1 - mask.mean(dim=1)  # [N]
    # Masks as +-1 vectors: their products count agreements minus disagreements.
    signs = 2 * mask.float() - 1
    differing = (num_patches - signs[own] @ signs.T) / 2  # [own, N]
    repeats = torch.tril(differing < 0.5, diagonal=(own.start or 0) - 1).any(dim=1).sum()
    health = {
        "visible": visible.mean(),
        "visible_std": visible.std(correction=0),
        "distinct": 1 - repeats / len(differing),
        "hamming": differing.sum() / (num_patches * max(len(differing) * (n - 1), 1)),
        "unseen": mask.all(dim=0).float().mean(),
        "place": explained_by_position(mask),
    }
    if keep_prob is not None:
        health["decisive"] = ((keep_prob - 0.5).abs() >= 0.4).float().mean()
    return health


def explained_by_position(mask: torch.Tensor) -> torch.Tensor:
    """Adjusted R^2 of masks [N, L] on the position."""
    explained = mask.mean(dim=0).var(correction=0) / mask.var(correction=0).clamp(min=1e-6)
    return (1 - (1 - explained) * len(mask) / max(len(mask) - 1, 1)).clamp(min=0)
