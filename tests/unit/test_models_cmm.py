"""The masking module's output and losses, against values and gradients computed by hand."""

import math

import numpy as np
import pytest
import torch

from models_cmm import (
    CurriculumMaskingModule,
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
from models_mae import MaskedAutoencoderViT, build_mae, transformer_blocks, vit_layer_norm

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
    assert [lambda_cl(progress, end=-1.0) for progress in (0, 0.5, 1)] == pytest.approx([1.0, 0.0, -1.0])
    assert lambda_cl(1.0) == pytest.approx(-0.1)
    assert lambda_cl(0.4) == pytest.approx(1 - 0.4 * 1.1)
    assert lambda_cl(0.7, end=1.0) == 1.0
    assert lambda_cl(0.25, start=0.0, end=-1.0) == pytest.approx(-0.25)


def test_curriculum_loss():
    z = torch.tensor([[0.25, 1.0], [0.5, 0.75]])
    e = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    # (0.75*1 + 0*2 + 0.5*3 + 0.25*4) / (0.75 + 0 + 0.5 + 0.25) = 3.25 / 1.5
    value, grad = gradient(curriculum_loss, z, e)
    assert value == pytest.approx(3.25 / 1.5)
    # d/dZ_i of sum(1-Z)e / S: (mean - e_i) / S, with S = 1.5 and mean = 3.25 / 1.5
    assert torch.allclose(grad, (3.25 / 1.5 - e) / 1.5)


def test_curriculum_gradient_flows_through_the_error_too():
    z = torch.full((1, 2), 0.5, requires_grad=True)
    curriculum_loss(z, z**2).backward()
    # (1-z) z^2 summed over two equal tokens, over 2 (1-z): the derivative by each is half that of z^2
    assert torch.allclose(z.grad, torch.tensor([[0.5, 0.5]]))


def test_hidden_curriculum_loss_counts_hidden_patches_alone():
    z = torch.tensor([[0.25, 0.5, 0.9], [0.0, 1.0, 0.4]])
    e = torch.tensor([[1.0, 7.0, 7.0], [3.0, 7.0, 5.0]])
    # Three tokens, times (0.75*1 + 1*3 + 0.6*5) / (0.75 + 1 + 0.6)
    mean = 6.75 / 2.35
    value, grad = gradient(hidden_curriculum_loss, z, e)
    assert value == pytest.approx(3 * mean)
    expected = 3 * (mean - e) / 2.35 * torch.tensor([[1.0, 0, 0], [1, 0, 1]])
    assert torch.allclose(grad, expected, atol=1e-6)
    z = torch.full((1, 2), 0.25, requires_grad=True)
    hidden_curriculum_loss(z, z**2).backward()
    # Two tokens, so twice the mean of z^2: the derivative by each is that of z^2
    assert torch.allclose(z.grad, torch.tensor([[0.5, 0.5]]))


def test_a_balanced_gradient_changes_no_value_and_sums_to_zero_over_each_image():
    z, slope = torch.rand(3, 16), torch.randn(3, 16)
    assert torch.equal(with_balanced_gradient(z), z)
    _, grad = gradient(lambda keep_prob: (with_balanced_gradient(keep_prob) * slope).sum(), z)
    assert torch.allclose(grad, slope - slope.mean(dim=1, keepdim=True), atol=1e-6)


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


@pytest.mark.parametrize(("tokens", "factor"), [(196, 1), (256, 1), (49, 49 / 196), (64, 64 / 196), (400, 400 / 196)])
def test_gaussian_loss_keeps_its_weight_at_the_papers_sizes_and_its_balance_at_others(tokens, factor):
    value, _ = gradient(gaussian_loss, torch.full((3, tokens), 0.5))
    assert value == pytest.approx(factor * 0.12 * math.sqrt(2 * math.pi), rel=1e-5)


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


def test_soft_kl_loss_sums_the_divergence_of_soft_fractions():
    z = torch.tensor([[0.6, 0.5, 0.4, 0.1], [0.25, 0.25, 0.25, 0.25]])  # 0.4 visible, and 0.25, which is the target
    value, grad = gradient(soft_kl_loss, z, 0.75)
    assert value == pytest.approx(0.4 * math.log(0.4 / 0.25) + 0.6 * math.log(0.6 / 0.75), rel=1e-5)
    # d/dv of v log(v/t) + (1-v) log((1-v)/(1-t)) is log(v/t) - log((1-v)/(1-t)); v is a mean over four tokens
    expected = (math.log(0.4 / 0.25) - math.log(0.6 / 0.75)) / 4
    assert torch.allclose(grad[0], torch.full((4,), expected))
    assert torch.allclose(grad[1], torch.zeros(4), atol=1e-6)


def test_position_loss_is_zero_where_every_position_has_the_target_rate():
    z = torch.eye(4).repeat(2, 1)  # eight images; each of four positions is visible in a quarter of them
    value, _ = gradient(position_loss, z, 0.75)
    assert value == pytest.approx(0.0, abs=1e-6)
    for dead in (torch.eye(4)[[0, 0, 1, 2]], torch.tensor([[1.0, 0, 0, 0]] * 4)):  # the right ratio in every image
        assert kl_loss(dead, 0.75).item() == pytest.approx(0.0, abs=1e-6)
        assert position_loss(dead, 0.75) > 0.1


def test_position_loss_and_its_pull_by_hand():
    z = torch.tensor([[0.9, 0.1, 0.2], [0.8, 0.3, 0.9], [0.6, 0.2, 0.1], [0.7, 0.1, 0.4]])
    # Visible after the threshold: 4, 0 and 1 of 4; clamped to [1/8, 7/8]. The third is on target.
    value, grad = gradient(position_loss, z, 0.75)
    always = 0.25 * math.log(0.25 / 0.875) + 0.75 * math.log(0.75 / 0.125)
    never = 0.25 * math.log(0.25 / 0.125) + 0.75 * math.log(0.75 / 0.875)
    assert value == pytest.approx(always + never, rel=1e-5)
    # d/dv of t log(t/v) + r log(r/(1-v)) = -t/v + r/(1-v), and v is a mean over four images
    expected = torch.tensor([-0.25 / 0.875 + 0.75 / 0.125, -0.25 / 0.125 + 0.75 / 0.875, 0.0]) / 4
    assert torch.allclose(grad, expected.expand(4, 3), atol=1e-5)
    assert (grad[:, 1] < 0).all(), "descent raises what no image shows"
    assert (grad[:, 0] > 0).all(), "and lowers what every image shows"


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


def test_distance_diversity_loss():
    z = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 0.5]])
    distances = (1, math.sqrt(1.25), 0.5)
    value, grad = gradient(distance_diversity_loss, z)
    assert value == pytest.approx(sum(math.exp(-0.1 * d) for d in distances) / 3, rel=1e-5)
    # d/dZ_2 = sum over its pairs of -0.1 (Z_2 - Z_j) / d exp(-0.1 d) / 3
    pull = [-0.1 / d * math.exp(-0.1 * d) / 3 for d in distances[1:]]
    expected = pull[0] * torch.tensor([1.0, 0.5]) + pull[1] * torch.tensor([0.0, 0.5])
    assert torch.allclose(grad[2], expected, atol=1e-6)


@pytest.mark.parametrize("loss", [diversity_loss, distance_diversity_loss])
def test_diversity_of_each_process_is_a_share_of_all(loss):
    """The mean of the values is that of all pairs; each process has the gradient of its own rows."""
    z = torch.rand(12, 16)
    whole, grad = gradient(loss, z)
    shares = [slice(start, start + 3) for start in range(0, 12, 3)]
    values, grads = zip(*(gradient(loss, z, own) for own in shares), strict=True)
    assert sum(values) / 4 == pytest.approx(whole, rel=1e-5)
    assert grad.abs().max() > 1e-5
    for own, found in zip(shares, grads, strict=True):
        assert torch.allclose(found[own], grad[own], rtol=1e-4, atol=1e-8)


def test_no_process_holds_all_pairs():
    largest = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: largest.append(t.numel()) or t, lambda t: t):
        diversity_loss(torch.rand(64, 4, requires_grad=True), slice(8, 16))
    assert max(largest) == 8 * 64


def test_prediction_loss_equals_a_numpy_computation():
    rng = np.random.default_rng(0)
    score, error = rng.normal(size=(5, 12)), rng.exponential(size=(5, 12))
    mask = (rng.random((5, 12)) < 0.75).astype(float)
    mask[3], mask[4] = 0, np.eye(12)[7]  # nothing removed; a single patch, whose standardised error is 0
    squares = []
    for s, e, removed in zip(score, error, mask == 1, strict=True):
        if removed.any():
            deviation = e[removed].std()
            target = (e[removed] - e[removed].mean()) / (deviation if deviation > 0 else 1)
            squares.extend((s[removed] - target) ** 2)
    loss = prediction_loss(*(torch.from_numpy(x) for x in (score, error, mask)))
    assert loss.item() == pytest.approx(np.mean(squares), rel=1e-6)
    other = np.where(mask == 1, error, 100.0)
    again = prediction_loss(*(torch.from_numpy(x) for x in (score, other, mask)))
    assert again.item() == pytest.approx(loss.item(), rel=1e-9), "errors of visible patches play no part"


@pytest.mark.parametrize("case", EXTREMES)
def test_losses_are_finite_at_the_extremes(case):
    z = EXTREMES[case]
    error = torch.rand_like(z)
    for function, arguments in (
        (curriculum_loss, (error,)),
        (hidden_curriculum_loss, (error,)),
        (gaussian_loss, ()),
        (kl_loss, (0.75,)),
        (position_loss, (0.75,)),
        (diversity_loss, ()),
        (distance_diversity_loss, ()),
        (prediction_loss, (error, (z < 0.5).float())),
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
    tiny = build_cmm(MaskedAutoencoderViT(32, 8, 3, 32, 1, 2, 16, 1, 2), depth=1, dim=16)
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


def test_the_predictor_is_narrow_and_scores_every_patch_by_its_own_token():
    mae = build_mae("mae_vit_small_patch16", img_size=(64, 32))
    predictor = build_predictor(mae)
    assert (predictor.cls_token.shape[-1], len(predictor.blocks)) == (64, 2), "heads of 64: one is nearest to a quarter"
    predictor = build_predictor(mae, depth=0)  # without attention a score depends on its own patch alone
    imgs = torch.randn(2, 3, 64, 32)
    scores = predictor(imgs)
    assert scores.shape == (2, 8)
    changed = imgs.clone()
    changed[0, :, 16:32, 16:32] += 1  # the second patch of the second row
    assert ((predictor(changed) - scores).abs() > 1e-6).nonzero().tolist() == [[0, 3]]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert predictor(imgs).dtype == torch.float32
    assert scores.std() < 1, "it starts next to indifferent"


def test_positions_are_fixed():
    cmm = CurriculumMaskingModule(32, 8, embed_dim=32, depth=1, num_heads=2)
    assert [name for name, p in cmm.named_parameters() if not p.requires_grad] == ["pos_embed"]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("way", ["plain", "grad_checkpointing", "compiled", "bf16"])
def test_the_last_block_computes_cls_alone_and_changes_nothing(way, depth):
    """Against the same weights with all tokens in every block: Z and every gradient."""
    torch.manual_seed(0)
    cmm = build_cmm(build_mae("mae_vit_micro_patch4"), depth)
    whole = build_cmm(build_mae("mae_vit_micro_patch4"), depth)
    whole.blocks = transformer_blocks(depth, 64, 4, 4.0, vit_layer_norm)
    whole.load_state_dict(cmm.state_dict())
    cmm.set_grad_checkpointing(way == "grad_checkpointing")
    if way == "compiled":
        torch._dynamo.reset()
        for block in cmm.blocks:
            block.compile(dynamic=True, backend="eager", fullgraph=True)
    imgs, weights, found = torch.randn(4, 3, 32, 32), torch.randn(4, 64), []
    for module in (whole, cmm):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "bf16"):
            z = module(imgs)
        (z * weights).sum().backward()
        found.append([z, *(p.grad for p in module.parameters() if p.requires_grad)])
    tolerance = 2e-2 if way == "bf16" else 1e-5
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).abs().max() <= tolerance * max(expected.abs().max(), 1)
    assert cmm.forward_trunk(imgs).shape == (4, 1, 64)
