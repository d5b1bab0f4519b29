"""A moment of a pretraining run: the networks of a checkpoint, and what they do to images."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch

from masking import choose_masking
from models_cmm import CurriculumMaskingModule, build_cmm, lambda_cl
from models_mae import MaskedAutoencoderViT
from models_vit import mae_of
from util import checkpoint as ckpt
from util.cli import UserError
from util.plots.style import verbatim


@dataclass
class Masked:
    """What a snapshot does to images [N, C, H, W]: Z [N, L] or None, the mask [N, L], predicted patches [N, L, P]."""

    keep_prob: torch.Tensor | None
    mask: torch.Tensor  # 0 is keep, 1 is remove
    pred: torch.Tensor


@dataclass
class Snapshot:
    """The networks of a checkpoint in evaluation mode; no CMM where masks are random."""

    name: str  # of the run
    model: MaskedAutoencoderViT
    cmm: CurriculumMaskingModule | None
    settings: dict  # the run's flags; empty where the file does not tell
    epoch: int | None  # the last complete one
    lambda_cl: float | None

    @property
    def title(self) -> str:
        parts = [verbatim(self.name)]
        if self.epoch is not None:
            epochs = self.settings.get("epochs")
            parts.append(f"after epoch {self.epoch + 1}" + (f" of {epochs}" if epochs else ""))
        parts.append("random masks" if self.lambda_cl is None else f"$\\lambda_{{CL}}$ = {self.lambda_cl:.2f}")
        return ", ".join(parts)

    @torch.no_grad()
    def mask(self, imgs: torch.Tensor, seed: int = 0) -> Masked:
        """Mask and reconstruct, as training does it; `seed` is that of random masks."""
        keep_prob = None if self.cmm is None else self.cmm(imgs)
        how = Namespace(seed=seed, select=self.settings.get("select", "threshold"))
        masking = choose_masking(imgs, keep_prob, self.model.patch_embed.num_patches, 0, 0, how)
        _, pred, mask = self.model(imgs, self.settings.get("mask_ratio", 0.75), **masking)
        return Masked(keep_prob, mask, pred)


def load_snapshot(path: Path, name: str, norm_pix_loss: bool = False, device: torch.device | str = "cpu") -> Snapshot:
    """The networks of a checkpoint of this project or of upstream MAE. `norm_pix_loss` is for files without flags."""
    checkpoint = ckpt.load_checkpoint(path)
    settings = checkpoint.get("args") or {}
    model = mae_of(checkpoint, str(path))
    model.norm_pix_loss = settings.get("norm_pix_loss", norm_pix_loss)
    cmm = None
    if "cmm" in checkpoint:
        depth = len({key.split(".")[1] for key in checkpoint["cmm"] if key.startswith("blocks.")})
        cmm = build_cmm(model, depth, dim=checkpoint["cmm"]["cls_token"].shape[-1])
        ckpt.load_weights(cmm, checkpoint["cmm"], str(path))
        cmm.to(device).eval()
    weight = None if cmm is None else curriculum_weight(checkpoint, settings)
    return Snapshot(name, model.to(device).eval(), cmm, settings, checkpoint.get("epoch"), weight)


def curriculum_weight(checkpoint: dict, settings: dict) -> float:
    """lambda_CL at the moment of a checkpoint."""
    if settings.get("no_curriculum"):
        return 0.0
    step, log = checkpoint["step"], checkpoint.get("log")
    # Within an epoch its log tells its length; between epochs the steps so far do.
    per_epoch = log["iterations"] // settings["accum_iter"] if log else step // (checkpoint["epoch"] + 1)
    return lambda_cl(step, settings["epochs"] * per_epoch, settings["lambda_cl_end"])


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
