"""A moment of a pretraining run: the networks of a checkpoint, and what they do to images."""

from dataclasses import dataclass
from pathlib import Path

import torch

from masking import Masking, MaskSettings
from models_mae import MaskedAutoencoderViT
from models_vit import mae_of
from util import checkpoint as ckpt
from util.cli import UserError
from util.plots.style import verbatim


@dataclass
class Masked:
    """What a snapshot does to images [N, C, H, W]: the masking module's values [N, L] or None, the mask [N, L],
    predicted patches [N, L, P]."""

    values: torch.Tensor | None
    mask: torch.Tensor  # 0 is keep, 1 is remove
    pred: torch.Tensor


@dataclass
class Snapshot:
    """The networks of a checkpoint in evaluation mode, and the masks of its run."""

    name: str  # of the run
    model: MaskedAutoencoderViT
    masking: Masking
    settings: dict  # the run's flags; empty where the file does not tell
    epoch: int | None  # the last complete one, from 0
    lambda_cl: float | None  # None where masks do not follow it

    @property
    def title(self) -> str:
        parts = [verbatim(self.name)]
        if self.epoch is not None:
            epochs = self.settings.get("epochs")
            parts.append(f"after epoch {self.epoch + 1}" + (f" of {epochs}" if epochs else ""))
        masks = f"{self.masking.settings.masking} masks"
        parts.append(masks if self.lambda_cl is None else f"$\\lambda_{{CL}}$ = {self.lambda_cl:.2f}")
        return ", ".join(parts)

    @torch.no_grad()
    def mask(self, imgs: torch.Tensor, seed: int = 0) -> Masked:
        """Mask and reconstruct as training does; `seed` is that of random masks."""
        values = self.masking.values(imgs)
        ask = self.masking.ask(imgs, torch.arange(len(imgs)) + seed * len(imgs), self.epoch or 0, 0.0)
        ask.lambda_cl = 0.0 if self.lambda_cl is None else self.lambda_cl
        _, pred, mask = self.model(imgs, ask.mask_ratio, **self.masking.choose(ask, values))
        return Masked(values, mask, pred)


def load_snapshot(path: Path, name: str, norm_pix_loss: bool = False, device: torch.device | str = "cpu") -> Snapshot:
    """The networks of a checkpoint of this project or of upstream MAE. `norm_pix_loss` is for files without flags."""
    checkpoint = ckpt.load_checkpoint(path)
    settings = ckpt.settings_of(checkpoint)
    model = mae_of(checkpoint, str(path))
    model.norm_pix_loss = settings.get("norm_pix_loss", norm_pix_loss)
    masking = masking_of(checkpoint, model, str(path))
    if masking.module is not None:
        masking.module.to(device).eval()
    epoch, weight = checkpoint.get("epoch"), ckpt.lambda_cl_of(checkpoint)
    return Snapshot(name, model.to(device).eval(), masking, settings, epoch, weight)


def masking_of(checkpoint: dict, model: MaskedAutoencoderViT, source: str) -> Masking:
    """The masks of a checkpoint's run, with the trained module of a learned strategy."""
    settings = MaskSettings.of(ckpt.settings_of(checkpoint))
    masking = Masking(settings, tuple(model.patch_embed.grid_size))
    if masking.learned is not None:
        if "cmm" not in checkpoint:
            raise UserError(f"{source} has no masking module, though it was trained with --masking {settings.masking}")
        masking.module = masking.learned.build(model)
        ckpt.load_weights(masking.module, checkpoint["cmm"], source)
    return masking


def snapshots_of(path: Path) -> list[Path]:
    """A run's checkpoints from the oldest to the newest, or the file itself."""
    if not path.is_dir():
        return [path]
    found = ckpt.numbered_checkpoints(path)[::-1] or list(path.glob(ckpt.LAST))
    if not found:
        raise UserError(f"{path} is a folder without checkpoint-N.pth")
    return found


def evenly(items: list, most: int) -> list:
    """At most `most` of the items, evenly spread; the last always, and the first if there is room."""
    if len(items) <= most:
        return items
    if most == 1:
        return items[-1:]
    return [items[(len(items) - 1) * i // (most - 1)] for i in range(most)]
