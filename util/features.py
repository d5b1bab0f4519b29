"""Features of a frozen encoder."""

import torch

from models_mae import MaskedAutoencoderViT
from util.datasets import SeededDataset, collate
from util.misc import autocast


@torch.no_grad()
def encode(model: MaskedAutoencoderViT, imgs: torch.Tensor) -> torch.Tensor:
    """Mean of the encoded patch tokens of whole images, float32 [N, D]."""
    visible = torch.ones(imgs.shape[0], model.patch_embed.num_patches, dtype=torch.bool, device=imgs.device)
    latent, _, _ = model.forward_encoder(imgs, 0.0, visible=visible)
    return latent[:, 1:].float().mean(dim=1)


def extract_features(
    model: MaskedAutoencoderViT,
    dataset: SeededDataset,
    indices: list[int],
    *,
    device: torch.device,
    amp: torch.dtype | None = None,
    batch_size: int = 256,
    num_workers: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [M, D] and labels [M] of the images at `indices`, on `device`."""
    loader = torch.utils.data.DataLoader(
        dataset,
        sampler=[(0, index) for index in indices],
        batch_size=batch_size,
        collate_fn=collate,
        num_workers=num_workers,
        generator=torch.Generator(),
    )
    was_training = model.training
    model.eval()
    features, labels = [], []
    for imgs, targets, _ in loader:
        with autocast(device, amp):
            features.append(encode(model, imgs.to(device, non_blocking=True)))
        labels.append(targets.to(device))
    model.train(was_training)
    return torch.cat(features), torch.cat(labels)
