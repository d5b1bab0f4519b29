"""A user's own autoencoder: removed patches become a mask token before the encoder,
and one linear layer predicts the pixels (after SimMIM, Xie et al., CVPR 2022)."""

import torch
from timm.models.vision_transformer import Block, PatchEmbed
from torch import nn


class OwnAutoencoder(nn.Module):
    norm_pix_loss, in_chans, width, num_heads = False, 3, 32, 2

    def __init__(self, img_size: int = 16, patch_size: int = 4):
        super().__init__()
        self.patch_embed = PatchEmbed(img_size, patch_size, self.in_chans, self.width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, self.width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, self.patch_embed.num_patches, self.width))
        self.blocks = nn.Sequential(*(Block(self.width, self.num_heads) for _ in range(2)))
        self.head = nn.Linear(self.width, self.in_chans * patch_size**2)

    def forward(self, imgs, mask_ratio=0.75, *, noise=None, visible=None, keep_prob=None, soft="tokens"):
        if keep_prob is None and visible is None:
            noise = torch.rand(len(imgs), self.patch_embed.num_patches, device=imgs.device) if noise is None else noise
            visible = noise.argsort(dim=1).argsort(dim=1) < int(noise.shape[1] * (1 - mask_ratio))
        mask = 1 - (visible.float() if keep_prob is None else keep_prob)
        x = torch.lerp(self.patch_embed(imgs), self.mask_token, mask.unsqueeze(-1)) + self.pos_embed
        pred = self.head(self.blocks(x))
        return (self.patch_error(imgs, pred) * mask).sum() / mask.sum().clamp(min=1e-6), pred, mask

    def patchify(self, imgs):
        return nn.functional.unfold(imgs, 4, stride=4).transpose(1, 2)

    def unpatchify(self, x):
        return nn.functional.fold(x.transpose(1, 2), self.patch_embed.img_size, 4, stride=4)

    def patch_error(self, imgs, pred):
        return (pred.float() - self.patchify(imgs)).square().mean(dim=-1)

    def set_grad_checkpointing(self, enable=True):
        pass
