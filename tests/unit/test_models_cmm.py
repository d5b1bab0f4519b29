"""The masking module's output and losses, against values and gradients computed by hand."""

import math

import pytest
import torch

from models_cmm import (
    CurriculumMaskingModule,
    build_cmm,
    curriculum_loss,
    diversity_loss,
    gaussian_loss,
    kl_loss,
    lambda_cl,
)
from models_mae import MaskedAutoencoderViT, build_mae

EXTREMES = {
    "all visible": torch.ones(4, 16),
    "all removed": torch.zeros(4, 16),
    "undecided": torch.full((4, 16), 0.5),
    "identical": torch.rand(1, 16).repeat(4, 1),
    "batch of one": torch.rand(1, 16),
}


def gradient(loss_function, keep_prob, *args):
    keep_prob = keep_prob.clone().requires_grad_()
    loss = loss_function(keep_prob, *args)
    loss.backward()
    return loss.item(), keep_prob.grad


def test_schedule_falls_linearly_from_one():
    assert [lambda_cl(t, 10, end=-1.0) for t in (0, 5, 10)] == pytest.approx([1.0, 0.0, -1.0])
    assert lambda_cl(1000, 1000) == pytest.approx(-0.1)
    assert lambda_cl(400, 1000) == pytest.approx(1 - 0.4 * 1.1)
    assert lambda_cl(7, 10, end=1.0) == 1.0


def test_curriculum_loss():
    z = torch.tensor([[0.25, 1.0], [0.5, 0.75]])
    e = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    # (0.75*1 + 0*2 + 0.5*3 + 0.25*4) / (0.75 + 0 + 0.5 + 0.25) = 3.25 / 1.5
    value, grad = gradient(curriculum_loss, z, e, -0.1)
    assert value == pytest.approx(-0.1 * 3.25 / 1.5)
    # d/dZ_i of sum(1-Z)e / S: (mean - e_i) / S, with S = 1.5 and mean = 3.25 / 1.5
    assert torch.allclose(grad, -0.1 * (3.25 / 1.5 - e) / 1.5)


def test_curriculum_gradient_flows_through_the_error_too():
    z = torch.full((1, 2), 0.5, requires_grad=True)
    curriculum_loss(z, z**2, 1.0).backward()
    # (1-z) z^2 summed over two equal tokens, over 2 (1-z): the derivative by each is half that of z^2
    assert torch.allclose(z.grad, torch.tensor([[0.5, 0.5]]))


def test_gaussian_loss():
    height = 0.12 * math.sqrt(2 * math.pi)
    assert height == pytest.approx(0.3008, abs=1e-4)
    value, _ = gradient(gaussian_loss, torch.full((2, 196), 0.5))
    assert value == pytest.approx(height)
    # One standard deviation away: height * exp(-1/2); a quarter of the tokens: a quarter of the loss.
    value, grad = gradient(gaussian_loss, torch.full((1, 49), 0.62))
    assert value == pytest.approx(height * math.exp(-0.5) / 4)
    # d/dZ = -height (Z - 0.5) / sigma^2 exp(-1/2), the mean over 49 tokens times 49 / 196
    assert torch.allclose(grad, torch.full_like(grad, -height * 0.12 / 0.12**2 * math.exp(-0.5) / 196))


def test_kl_loss_is_zero_exactly_where_the_counts_match():
    z = torch.zeros(3, 16)
    z[:, :4] = 1.0
    assert kl_loss(z, 0.75).item() == pytest.approx(0.0, abs=1e-6)
    for visible in (1, 3, 5, 12):
        z = torch.zeros(3, 16)
        z[:, :visible] = 1.0
        assert kl_loss(z, 0.75) > 0.01


def test_kl_loss_tallies_after_the_threshold():
    z = torch.tensor([[0.6, 0.5, 0.4, 0.1]])  # two visible, two masked; wanted: one and three
    value, grad = gradient(kl_loss, z, 0.75)
    assert value == pytest.approx(3 * math.log(3 / 2) + 1 * math.log(1 / 2))
    # Straight through: d/dv of 3 log(3/(4-v)) + log(1/v) at v = 2 is 3/2 - 1/2
    assert torch.allclose(grad, torch.full_like(grad, 1.0))
    # The mean over images
    both = torch.cat([z, torch.tensor([[0.9, 0.1, 0.1, 0.1]])])
    assert kl_loss(both, 0.75).item() == pytest.approx(value / 2)


def test_kl_loss_pulls_back_from_the_empty_and_the_full_mask():
    """At the ends a count is clamped to half a token; the pull must still point inwards."""
    value, grad = gradient(kl_loss, torch.zeros(1, 16), 0.75)
    assert value == pytest.approx(12 * math.log(12 / 16) + 4 * math.log(4 / 0.5))
    assert (grad < 0).all(), "nothing visible: every Z must be raised"
    value, grad = gradient(kl_loss, torch.ones(1, 16), 0.75)
    assert value == pytest.approx(12 * math.log(12 / 0.5) + 4 * math.log(4 / 16))
    assert (grad > 0).all(), "everything visible: every Z must be lowered"


def test_diversity_loss():
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.5]])
    # Squared distances of the three pairs: 1, 1.25, 0.25
    value, grad = gradient(diversity_loss, z)
    assert value == pytest.approx((math.exp(-1) + math.exp(-1.25) + math.exp(-0.25)) / 3, rel=1e-5)
    # d/dZ_0 = sum over its pairs of -2 (Z_0 - Z_j) exp(-d) / 3
    expected = (2 * torch.tensor([1.0, 0.0]) * math.exp(-1) + 2 * torch.tensor([1.0, 0.5]) * math.exp(-1.25)) / 3
    assert torch.allclose(grad[0], expected, atol=1e-6)


def test_diversity_loss_of_identical_and_of_single_masks():
    assert diversity_loss(torch.rand(1, 196).repeat(8, 1)).item() == pytest.approx(1.0, rel=1e-4)
    assert diversity_loss(torch.rand(1, 196)).item() == 0.0


@pytest.mark.parametrize("case", EXTREMES)
def test_losses_are_finite_at_the_extremes(case):
    z = EXTREMES[case]
    error = torch.rand_like(z)
    for function, arguments in (
        (curriculum_loss, (error, 1.0)),
        (gaussian_loss, ()),
        (kl_loss, (0.75,)),
        (diversity_loss, ()),
    ):
        value, grad = gradient(function, z, *arguments)
        assert math.isfinite(value), function.__name__
        assert torch.isfinite(grad).all(), function.__name__


def test_module_gives_a_probability_per_token():
    cmm = CurriculumMaskingModule((16, 24), 8, 2, embed_dim=32, depth=2, num_heads=2)
    imgs = torch.randn(3, 2, 16, 24)
    keep_prob = cmm(imgs)
    assert keep_prob.shape == (3, 6)
    assert ((keep_prob > 0) & (keep_prob < 1)).all()
    assert not torch.allclose(keep_prob[0], keep_prob[1]), "masks depend on the image"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert cmm(imgs).dtype == torch.float32


def test_build_cmm_fits_the_mae():
    cmm = build_cmm(build_mae("mae_vit_small_patch16", img_size=(64, 32), in_chans=1))
    assert cmm(torch.randn(2, 1, 64, 32)).shape == (2, 8)
    assert (cmm.cls_token.shape[-1], len(cmm.blocks), cmm.blocks[0].attn.num_heads) == (384, 5, 6)
    tiny = build_cmm(MaskedAutoencoderViT(32, 8, 3, 32, 1, 2, 16, 1, 2), depth=1, embed_dim=16)
    assert tiny.cls_token.shape[-1] == 16


def test_a_narrower_module_keeps_the_width_of_its_heads():
    mae = build_mae("mae_vit_small_patch16", img_size=32)
    cmm = build_cmm(mae, depth=1, dim=128)
    assert cmm.cls_token.shape[-1] == 128
    assert cmm.blocks[0].attn.num_heads == 2
    assert cmm(torch.zeros(2, 3, 32, 32)).shape == (2, 4)
    for dim in (0, 100, -64):
        with pytest.raises(ValueError, match=f"{dim} is not a multiple of 64"):
            build_cmm(mae, dim=dim)


def test_only_tokens_and_positions_are_exempt_from_weight_decay_by_name():
    cmm = CurriculumMaskingModule(32, 8, embed_dim=32, depth=1, num_heads=2)
    assert {name for name, p in cmm.named_parameters() if p.ndim > 2 and "proj" not in name} == cmm.no_weight_decay()
    assert not cmm.pos_embed.requires_grad
