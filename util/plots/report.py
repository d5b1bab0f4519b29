"""The HTML report: one self-contained file with masks over training, curves, settings and results of runs.

report.html beside this file is the template; data is inserted as JSON, and pictures as data URIs.
"""

import base64
import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from util.cli import UserError, plain
from util.plots.masks import HEAT_ENDS, draw_block, reconstruction_note
from util.plots.snapshot import Snapshot, as_input, evenly
from util.plots.style import COLOURS

PAGE = Path(__file__).with_name("report.html")
LIMIT, MARGIN = 5_000_000, 10_000  # bytes: of the file, small enough to mail, and for what is not counted
SHOWN_IMAGES, POSITION_IMAGES, CHECKPOINTS, POINTS = 6, 256, 24, 400  # POINTS: per curve
SCALES, QUALITIES = (1, 2, 4), (90, 75, 50)  # tried in turn until the pictures fit
BLACK = "#000000"  # invisible on a dark page

# Key in log.txt, title, the value of a reference line, and a sentence for newcomers.
CURVES = (
    (
        "train_lambda_cl",
        "Curriculum weight λ_CL",
        0.0,
        "What the curriculum asks for: easy masks above 0, hard ones below.",
    ),
    (
        "mask_error_vs_random",
        "Difficulty of the masks",
        1.0,
        "Error on hidden patches relative to random masks, for the run's own autoencoder: above 1 is harder.",
    ),
    ("mask_edge", "Hidden detail", 0.0, "Edge energy of hidden minus visible patches: above 0, detail is hidden."),
    (
        "train_loss",
        "Reconstruction error",
        None,
        "The training loss. Harder masks raise it, so a higher loss does not mean a worse encoder.",
    ),
    ("train_mask_visible", "Visible share", None, "How much of an image the autoencoder sees."),
    ("train_mask_hamming", "Distance between masks", None, "Share of patches in which two images' masks differ."),
    ("train_mask_place", "Explained by position", None, "0: independent of position; 1: one mask for all images."),
    ("mask_mirror", "Mirrored image, mirrored scores", None, "1: the module's scores are mirrored with the image."),
    ("train_mask_decisive", "Decisive share of Z", None, "Share of the module's outputs within 0.1 of 0 or 1."),
)


@dataclass
class ReportedRun:
    """What the page shows of a run; images [N, H, W, 3] stay as pixels until their share of the file is known."""

    name: str
    entry: dict[str, Any]
    settings: dict[str, Any]
    pictures: list[np.ndarray] = field(default_factory=list)


def report_run(
    name: str,
    snapshots: Iterable[Snapshot],
    images: list[Image.Image],
    more: list[Image.Image],
    log: list[dict],
    device: torch.device,
    seed: int = 0,
    true_stats: bool = False,
) -> ReportedRun:
    """A run's checkpoints, oldest first: what each does to `images`, and the positions its masks of `more` show."""
    inputs, run, moments = None, ReportedRun(name, {}, {}), []
    for snapshot in snapshots:
        if inputs is None:
            inputs = as_input(images, snapshot, device), as_input(more, snapshot, device)
        moments.append(moment_entry(run, snapshot, *inputs, seed, true_stats))
        run.settings, learned = snapshot.settings, snapshot.masking.learned
        label = None if learned is None else learned.value
        run.entry = {
            "name": plain(name),
            "masking": plain(snapshot.masking.settings.masking),
            "epochs": snapshot.settings.get("epochs"),
            "grid": snapshot.model.patch_embed.grid_size,
            "label": label,
            "ends": HEAT_ENDS.get(label or "", ("low", "high")),
            "probability": learned is not None and learned.probability,
            "note": reconstruction_note(snapshot.model.norm_pix_loss, true_stats),
            "moments": moments,
            "log": evenly(log, POINTS),
        }
    return run


@torch.no_grad()
def moment_entry(
    run: ReportedRun, snapshot: Snapshot, imgs: torch.Tensor, more: torch.Tensor, seed: int, true_stats: bool
) -> dict[str, Any]:
    block = draw_block(snapshot, imgs, seed, true_stats)
    mask = snapshot.mask_alone(more, snapshot.masking.values(more), seed)
    if not run.pictures:
        run.pictures.append(block.images)
    run.pictures.append(block.reconstructed)
    return {
        "epoch": None if snapshot.epoch is None else snapshot.epoch + 1,
        "lambda_cl": snapshot.lambda_cl,
        "values": per_patch(block.values),
        "hidden": per_patch(block.hidden),
        "visible": per_patch(block.visible.astype(int)),
        "error": per_patch(block.error),
        "positions": (1 - mask).mean(dim=0).tolist(),
    }


def per_patch(values: np.ndarray | None) -> list[list[float]] | None:
    return None if values is None else values.reshape(len(values), -1).tolist()


def report_page(runs: list[ReportedRun], sections: dict[str, str], images: int) -> str:
    """The whole file. `sections` maps marks in the page to HTML; `images` is the number behind the position maps."""
    for at, run in enumerate(runs):
        colour = COLOURS[at % len(COLOURS)]
        run.entry["colour"] = "currentColor" if colour == BLACK else colour
    data = {
        "runs": [run.entry for run in runs],
        "curves": CURVES,
        "images": len(runs[0].pictures[0]),
        "position_images": images,
    }
    page = PAGE.read_text(encoding="utf-8")
    taken = len(page.encode()) + len(as_json(data)) + sum(len(section.encode()) for section in sections.values())
    uris = iter(as_data_uris([sheet(pixels) for run in runs for pixels in run.pictures], LIMIT - taken - MARGIN))
    for run in runs:
        run.entry["pictures"] = [next(uris) for _ in run.pictures]
    content = {**sections, "DATA": as_json(data)}
    return re.sub("@@([A-Z]+)@@", lambda mark: content[mark[1]], page)  # at once: marks within names stay


def as_json(data: Any) -> str:
    """For a <script> element, which ends at the first "</script"."""
    return json.dumps(rounded(data), separators=(",", ":"), allow_nan=False).replace("<", r"\u003c")


def rounded(value: Any) -> Any:
    """Floats rounded to three significant digits, or None if not finite, as JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.3g}") if math.isfinite(value) else None
    return value


def sheet(pixels: np.ndarray) -> Image.Image:
    """Images [N, H, W, 3] in [0, 1], stacked vertically."""
    return Image.fromarray((pixels * 255).round().astype(np.uint8).reshape(-1, *pixels.shape[2:]))


def as_data_uris(sheets: list[Image.Image], room: int) -> list[str]:
    """PNG if even raw pixels fit into `room` characters; otherwise JPEG, at the best quality that fits."""
    if sum(sheet.width * sheet.height * 4 for sheet in sheets) <= room:
        return [data_uri(sheet, "png") for sheet in sheets]
    for scale in SCALES:
        smaller = [sheet.reduce(scale) for sheet in sheets]
        for quality in QUALITIES:
            uris = [data_uri(sheet, "jpeg", quality=quality) for sheet in smaller]
            if sum(map(len, uris)) <= room:
                return uris
    raise UserError(f"--html: the pictures do not fit {LIMIT / 1e6:g} MB; lower --blocks or --num_images")


def data_uri(image: Image.Image, kind: str, **options: int) -> str:
    image.save(buffer := io.BytesIO(), kind, optimize=True, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
