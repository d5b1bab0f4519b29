"""The method works: masks stay healthy, the module is a partner first and an adversary last, and what a loss is for
shows when it is switched off. Small networks on the built-in shapes, a few hundred iterations each."""

from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from engine_pretrain import cmm_losses, soft_error
from masking import mask_health
from models_cmm import build_cmm, lambda_cl
from models_mae import MaskedAutoencoderViT, vit_layer_norm

BATCH, HELD_OUT = 64, 256
WEIGHTS = dict(lambda_gauss=10.0, lambda_kl=1.0, lambda_div=2.0, mask_ratio=0.75)  # the method's own


class Duel:
    """An MAE and a CMM on shapes in 64 patches, trained by the engine's own functions; figures from held-out images."""

    def __init__(self, shapes, norm_pix_loss: bool, cmm_lr: float, **weights):
        imgs, outline = shapes
        self.train_imgs, self.imgs = imgs[:-HELD_OUT], imgs[-HELD_OUT:]
        self.outline = outline[-HELD_OUT:].float()
        self.args = Namespace(**{**WEIGHTS, **weights})
        torch.manual_seed(0)
        self.mae = MaskedAutoencoderViT(32, 4, 3, 32, 2, 2, 32, 1, 2, 4, vit_layer_norm, norm_pix_loss)
        self.cmm = build_cmm(self.mae, depth=2)
        settings = dict(betas=(0.9, 0.95), weight_decay=0.05, fused=True)
        self.optimizer = torch.optim.AdamW(self.mae.parameters(), lr=1e-3, **settings)
        self.optimizer_cmm = torch.optim.AdamW(self.cmm.parameters(), lr=cmm_lr, **settings)

    def train(self, weights):
        """One iteration for each curriculum weight."""
        for weight in weights:
            imgs = self.train_imgs[torch.randint(len(self.train_imgs), (BATCH,))]
            keep_prob = self.cmm(imgs)
            loss, _, _ = self.mae(imgs, visible=keep_prob.detach() >= 0.5)
            self.step(loss, self.optimizer)
            losses = cmm_losses(keep_prob, soft_error(self.mae, imgs, keep_prob), weight, self.args)
            self.step(losses["cmm/loss"], self.optimizer_cmm)
        return self

    @staticmethod
    def step(loss, optimizer):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def figures(self) -> SimpleNamespace:
        """Health of a batch's masks; the hidden patches' error over random masks' (`error`), and how much more often an
        outline crosses a hidden patch than any patch (`outline`)."""
        keep_prob = self.cmm(self.imgs)
        loss, _, mask = self.mae(self.imgs, visible=keep_prob >= 0.5)
        random_loss, _, _ = self.mae(self.imgs, self.args.mask_ratio)
        health = mask_health(mask[:BATCH], keep_prob[:BATCH])
        outline = (self.outline * mask).sum() / mask.sum() / self.outline.mean()
        return SimpleNamespace(
            error=(loss / random_loss).item(),
            outline=outline.item(),
            **{name: value.item() for name, value in health.items()},
        )


def schedule(steps, end):
    return [lambda_cl(step, steps, end) for step in range(steps)]


@pytest.mark.parametrize("mask_ratio", [0.75, 0.5])
def test_masks_are_on_ratio_diverse_and_decisive(shapes, mask_ratio):
    duel = Duel(shapes, norm_pix_loss=True, cmm_lr=1e-3, mask_ratio=mask_ratio)
    figures = duel.train(schedule(300, end=-0.1)).figures()
    assert figures.visible == pytest.approx(1 - mask_ratio, abs=0.03)
    assert figures.distinct >= 0.5
    assert figures.decisive >= 0.8


# Settings in which the curriculum shows within minutes, found by trial (docs/method.md). At the method's Gaussian
# weight of 10, or at a lower rate, decided masks hardly move in as many iterations as a test has.
LOOSE = dict(norm_pix_loss=False, cmm_lr=1e-3, lambda_gauss=1.0)


def test_held_as_a_partner_it_hides_what_is_easy(shapes):
    figures = Duel(shapes, **LOOSE).train([1.0] * 300).figures()
    assert figures.error < 0.9
    assert figures.outline < 0.95


def test_held_as_an_adversary_it_hides_what_is_hard(shapes):
    figures = Duel(shapes, **LOOSE).train([-1.0] * 300).figures()
    assert figures.error > 1.1
    assert figures.outline > 1.05


def test_over_a_run_the_partner_turns_adversary(shapes):
    duel = Duel(shapes, **LOOSE)
    weights = schedule(1000, end=-1.0)
    neutral = duel.train(weights[:500]).figures()
    end = duel.train(weights[500:]).figures()
    assert neutral.error < 0.9, "a partner until the weight passes zero"
    assert end.error > neutral.error + 0.08
    assert end.outline > neutral.outline + 0.05


@pytest.mark.parametrize(("weight", "direction"), [(1.0, 1), (-1.0, -1)], ids=["partner", "adversary"])
def test_without_kl_the_ratio_leaves_its_target(shapes, weight, direction):
    """From masks that are on ratio, with patches normalised as in the paper: a partner shows more, an adversary less.
    (Where a few patches have far larger errors than all others, an adversary may show more, to hide those alone.)"""
    duel = Duel(shapes, norm_pix_loss=True, cmm_lr=1e-3).train([0.0] * 200)
    assert duel.figures().visible == pytest.approx(0.25, abs=0.03)
    duel.args.lambda_kl = 0.0
    visible = duel.train([weight] * 200).figures().visible
    assert direction * (visible - 0.25) > 0.04


def test_without_diversity_masks_become_alike(shapes):
    weights = schedule(200, end=-0.1)
    diverse = Duel(shapes, norm_pix_loss=True, cmm_lr=1e-3).train(weights).figures()
    alike = Duel(shapes, norm_pix_loss=True, cmm_lr=1e-3, lambda_div=0.0).train(weights).figures()
    assert alike.hamming < diverse.hamming / 4
    assert alike.distinct < diverse.distinct / 4
