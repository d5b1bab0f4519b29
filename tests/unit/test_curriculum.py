"""The method works: masks stay healthy, the module is a partner first and an adversary last, and what a loss is for
shows when it is switched off. Tiny networks on the built-in shapes, with the method's own weights."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine_pretrain import frozen
from masking import Masking, MaskSettings, mask_health
from models_mae import MaskedAutoencoderViT, vit_layer_norm

BATCH, HELD_OUT = 32, 256
SETTINGS = MaskSettings(masking="curriculum", soft="attention", cmm_depth=1)  # weights: the method's


class Duel:
    """An MAE and a CMM on shapes in 64 patches, trained as the engine does; measured on held-out images."""

    def __init__(self, imgs, **changed):
        self.train_imgs, self.imgs = imgs[:-HELD_OUT], imgs[-HELD_OUT:]
        torch.manual_seed(0)
        self.mae = MaskedAutoencoderViT(32, 4, 3, 32, 1, 2, 32, 1, 2, 4, vit_layer_norm, norm_pix_loss=True)
        self.masking = Masking(replace(SETTINGS, **changed), self.mae.patch_embed.grid_size)
        self.masking.module = self.masking.learned.build(self.mae)
        self.optimizers = [
            torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
            for network in (self.mae, self.masking.module)
        ]

    def but(self, **changed):
        """A copy that trains with other settings from here."""
        copy = deepcopy(self)
        module, settings = copy.masking.module, replace(copy.masking.settings, **changed)
        copy.masking = Masking(settings, copy.masking.grid, module)
        return copy

    def train(self, weights):
        """One iteration for each curriculum weight."""
        for weight in weights:
            index = torch.randint(len(self.train_imgs), (BATCH,))
            imgs = self.train_imgs[index]
            ask = self.masking.ask(imgs, index, 0, 0.0)
            ask.lambda_cl = weight
            keep_prob = self.masking.values(imgs)
            loss, pred, mask = self.mae(imgs, **self.masking.choose(ask, keep_prob))
            self.step(loss, self.optimizers[0])
            with frozen(self.mae):
                error, rows = self.masking.learned.errors(self.mae, imgs, keep_prob, pred)
                losses = self.masking.learned.losses(keep_prob, error, mask, rows, ask)
                self.step(losses["cmm/loss"], self.optimizers[1])
        return self

    @staticmethod
    def step(loss, optimizer):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def metrics(self) -> SimpleNamespace:
        """Health of the masks, and the hidden patches' error over random masks' (`error`)."""
        keep_prob = self.masking.values(self.imgs)
        ask = self.masking.ask(self.imgs, torch.arange(HELD_OUT), 0, 0.0)
        loss, _, mask = self.mae(self.imgs, **self.masking.choose(ask, keep_prob))
        random_loss, _, _ = self.mae(self.imgs, noise=ask.uniform())
        health = {name: value.item() for name, value in mask_health(mask, keep_prob).items()}
        return SimpleNamespace(error=(loss / random_loss).item(), **health)


@pytest.fixture(scope="module")
def neutral(shapes):
    """After training with the curriculum held at 0."""
    return Duel(shapes[0]).train([0.0] * 100)
