"""The autoencoder equals upstream wherever upstream defines the result; elsewhere, it masks as requested."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import DATA
from torch.utils.flop_counter import FlopCounterMode

from main_pretrain import with_optimizer
from models_mae import MODELS, MaskedAutoencoderViT, build_mae, mae_vit_micro_patch4


def assert_close(actual, expected, tolerance=1e-5):
    """Largest difference relative to the largest expected value."""
    scale = expected.abs().max().clamp(min=1e-12)
    assert (actual - expected).abs().max() <= tolerance * scale


def random_visible(n, num_patches, seed=0):
    """A different number of visible tokens for each image, none and all among them."""
    noise = torch.rand(n, num_patches, generator=torch.Generator().manual_seed(seed))
    counts = torch.linspace(0, num_patches, n).round().long()
    return noise.argsort(dim=1).argsort(dim=1) < counts[:, None]


@pytest.mark.parametrize("variant", ["plain", "norm_pix"])
def test_equals_upstream(golden, golden_mae, variant):
    model = golden_mae(norm_pix_loss=variant == "norm_pix")
    imgs, noise = golden["imgs"], golden["noise"]
    loss, pred, mask = model(imgs, mask_ratio=0.75, noise=noise)
    latent, _, ids_restore = model.forward_encoder(imgs, 0.75, noise)
    loss.backward()

    assert_close(loss, golden[f"{variant}/loss"])
    assert_close(pred, golden[f"{variant}/pred"])
    assert_close(latent, golden[f"{variant}/latent"])
    assert torch.equal(mask, golden[f"{variant}/mask"])
    assert torch.equal(ids_restore, golden[f"{variant}/ids_restore"])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == {name.split("grad/")[1] for name in golden if name.startswith(f"{variant}/grad/")}
    for name, gradient in gradients.items():
        assert_close(gradient, golden[f"{variant}/grad/{name}"])


def test_three_updates_equal_upstreams(golden, golden_mae):
    """Losses, weights and the names of the parameters that decay, [CLS] and mask tokens among them."""
    with np.load(DATA / "adamw.npz") as file:
        expected = {name: torch.from_numpy(file[name]) for name in file.files if name != "decayed"}
        decayed = set(file["decayed"].tolist())
    args = Namespace(
        weight_decay=expected["weight_decay"].item(), grad_checkpointing=False, compile=False, amp="off", clip_grad=None
    )
    cpu = torch.device("cpu")
    model, optimizer, scaler = with_optimizer(golden_mae(norm_pix_loss=True), expected["lr"].item(), args, cpu)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.pop(args.weight_decay) == decayed
    assert groups.keys() == {0.0}
    assert all(group["betas"] == pytest.approx(expected["betas"].tolist()) for group in optimizer.param_groups)
    for step in range(3):
        loss, _, _ = model(golden["imgs"], 0.75, noise=golden["noise"])
        assert_close(loss, expected[f"loss{step}"])
        scaler(loss, optimizer)
    for name, value in model.state_dict().items():
        assert (value - expected[f"after/{name}"]).abs().max() <= 1e-5, name


def test_draws_its_noise_with_one_torch_rand(golden, golden_mae):
    model, imgs = golden_mae(), golden["imgs"]
    torch.manual_seed(5)
    _, _, mask = model(imgs, 0.75)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    _, _, expected = model(imgs, 0.75, noise=torch.rand(4, 16))
    assert torch.equal(mask, expected)
    assert torch.equal(torch.get_rng_state(), state), "something else was drawn as well"


def test_given_mask_equals_the_random_path_with_that_mask(golden, golden_mae):
    model, imgs = golden_mae(), golden["imgs"]
    loss, pred, mask = model(imgs, 0.75, noise=golden["noise"])
    gradients = torch.autograd.grad(loss, list(model.blocks.parameters()))
    loss_told, pred_told, mask_told = model(imgs, visible=mask == 0)
    gradients_told = torch.autograd.grad(loss_told, list(model.blocks.parameters()))
    assert torch.equal(mask, mask_told)
    assert_close(loss_told, loss)
    assert_close(pred_told, pred)
    for told, expected in zip(gradients_told, gradients, strict=True):
        assert_close(told, expected)


def test_padding_does_not_leak(golden_mae):
    """An image's prediction and gradient do not depend on the other images in its batch."""
    model = golden_mae()
    imgs = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    visible = random_visible(9, 16)
    assert visible.sum(dim=1).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    _, together, _ = model(imgs, visible=visible)
    for i in range(9):
        _, alone, _ = model(imgs[i : i + 1], visible=visible[i : i + 1])
        assert (together[i] - alone[0]).abs().max() < 1e-5
    perturbed = imgs.clone()
    perturbed[3:] = 100.0
    _, other, _ = model(perturbed, visible=visible)
    assert (together[:3] - other[:3]).abs().max() < 1e-5


def test_lengths_are_padded_to_multiples_and_change_no_result(golden_mae):
    model, imgs = golden_mae(), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    lengths = []
    model.blocks[0].register_forward_hook(lambda *call: lengths.append(call[1][0].shape[1]))
    for counts in ((1, 3, 5, 5), (7, 7, 7, 7), (8, 2, 3, 4), (16, 0, 3, 15), (0, 0, 0, 0)):
        visible = torch.arange(16) < torch.tensor(counts)[:, None]
        results = []
        for model.pad_to in (1, 8):
            model.zero_grad()
            loss, pred, _ = model(imgs, visible=visible)
            loss.backward()
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            results.append((loss.detach(), pred.detach(), gradients))
        longest = max(counts)
        assert lengths[-2:] == [1 + longest, min(-(-(1 + longest) // 8) * 8, 17)]
        for exact, padded in zip(*results, strict=True):
            assert torch.allclose(exact, padded, atol=1e-5)


def test_loss_is_the_mean_error_of_the_removed_patches(golden_mae):
    model = golden_mae()
    imgs = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    visible = random_visible(5, 16)
    loss, pred, mask = model(imgs, visible=visible)
    assert torch.equal(mask, (~visible).float())
    squared = (pred - model.patchify(imgs)) ** 2
    assert_close(loss, squared[~visible].mean())
    # The last image keeps everything: it adds nothing.
    without_last, _, _ = model(imgs[:4], visible=visible[:4])
    assert_close(loss, without_last)


@pytest.mark.parametrize("keep", ["all", "none"])
def test_everything_or_nothing_visible(golden_mae, keep):
    model = golden_mae()
    imgs = torch.randn(2, 3, 32, 32)
    loss, pred, _ = model(imgs, visible=torch.full((2, 16), keep == "all"))
    loss.backward()
    assert pred.shape == (2, 16, 192)
    assert (loss == 0) == (keep == "all")
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_soft_path_scales_every_token_and_drops_none(golden_mae):
    model = golden_mae()
    imgs = torch.randn(3, 3, 32, 32)
    keep_prob = torch.rand(3, 16)
    loss, pred, mask = model(imgs, keep_prob=keep_prob)

    x = (model.patch_embed(imgs) + model.pos_embed[:, 1:]) * keep_prob[..., None]
    x = torch.cat([(model.cls_token + model.pos_embed[:, :1]).expand(3, -1, -1), x], dim=1)
    x = model.decoder_embed(model.norm(torch.nn.Sequential(*model.blocks)(x))) + model.decoder_pos_embed
    expected = model.decoder_pred(model.decoder_norm(torch.nn.Sequential(*model.decoder_blocks)(x)))[:, 1:]
    assert_close(pred, expected)
    assert torch.equal(mask, 1 - keep_prob)
    error = ((expected - model.patchify(imgs)) ** 2).mean(dim=-1)
    assert_close(loss, ((1 - keep_prob) * error).sum() / (1 - keep_prob).sum())


def test_soft_path_with_all_ones_is_the_hard_path_with_all_visible(golden_mae):
    model = golden_mae()
    imgs = torch.randn(3, 3, 32, 32)
    _, soft, _ = model(imgs, keep_prob=torch.ones(3, 16))
    _, hard, _ = model(imgs, visible=torch.ones(3, 16, dtype=torch.bool))
    assert_close(soft, hard)


# --- Soft attention: the hard pass, made differentiable ---


@pytest.fixture(scope="module")
def trained_mae(golden):
    """Upstream's tiny MAE after a few updates, so that no mask or [CLS] token is next to zero."""
    torch.manual_seed(0)
    model = MaskedAutoencoderViT(32, 8, 3, 32, 2, 4, 16, 1, 4, norm_pix_loss=True)
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model


def removed_errors(model, imgs, **masking):
    """Loss, prediction, and the errors of removed patches."""
    loss, pred, mask = model(imgs, **masking)
    return loss, pred, model.patch_error(imgs, pred) * mask


def test_soft_attention_with_binary_values_is_the_hard_path(trained_mae):
    imgs = torch.randn(9, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    visible = random_visible(9, 16)
    hard = removed_errors(trained_mae, imgs, visible=visible)
    soft = removed_errors(trained_mae, imgs, keep_prob=visible.float(), soft="attention")
    for ours, expected in zip(soft, hard, strict=True):
        assert_close(ours, expected)
    tokens = removed_errors(trained_mae, imgs, keep_prob=visible.float(), soft="tokens")
    for ours, expected in zip(tokens, hard, strict=True):
        assert (ours - expected).abs().max() > 1e-3 * expected.abs().max()


def test_soft_attention_gives_the_hard_paths_gradients_to_the_weights(trained_mae):
    imgs = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    visible = random_visible(5, 16)
    weights = [p for p in trained_mae.parameters() if p.requires_grad]
    hard = torch.autograd.grad(trained_mae(imgs, visible=visible)[0], weights)
    soft = torch.autograd.grad(trained_mae(imgs, keep_prob=visible.float(), soft="attention")[0], weights)
    for ours, expected in zip(soft, hard, strict=True):
        assert_close(ours, expected, tolerance=1e-4)


@pytest.mark.parametrize("soft", ["attention", "tokens"])
def test_soft_gradients_equal_finite_differences(soft):
    torch.manual_seed(0)
    model = MaskedAutoencoderViT(16, 8, 1, 16, 2, 2, 8, 1, 2).double()
    imgs = torch.randn(2, 1, 16, 16, dtype=torch.float64)
    keep_prob = torch.rand(2, 4, dtype=torch.float64) * 0.9 + 0.05

    def prediction(z):
        return model(imgs, keep_prob=z, soft=soft)[1]

    assert torch.autograd.gradcheck(prediction, keep_prob.requires_grad_(), eps=1e-6, atol=1e-6, rtol=1e-4)


def test_soft_attention_moves_from_the_hidden_to_the_visible_patch(trained_mae):
    imgs = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    visible = random_visible(2, 16, seed=3)
    visible[:, 0] = False
    ends = []
    for shown in (False, True):
        visible[:, 0] = shown
        ends.append(trained_mae(imgs, visible=visible)[1])
    between = []
    for z in (0.0, 0.1, 0.5, 0.9, 1.0):
        keep_prob = visible.float()
        keep_prob[:, 0] = z
        pred = trained_mae(imgs, keep_prob=keep_prob, soft="attention")[1]
        between.append((pred - ends[0]).norm().item())
    assert between == sorted(between)
    assert between[0] == pytest.approx(0, abs=1e-3)
    assert between[-1] == pytest.approx((ends[1] - ends[0]).norm().item(), rel=1e-3)


def test_soft_attention_under_autocast_checkpointing_and_compile(trained_mae):
    imgs = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    given = torch.rand(4, 16, generator=torch.Generator().manual_seed(2))

    def loss_and_gradient(model):
        keep_prob = given.clone().requires_grad_()
        loss, _, _ = model(imgs, keep_prob=keep_prob, soft="attention")
        return loss, *torch.autograd.grad(loss, keep_prob)

    loss, gradient = loss_and_gradient(trained_mae)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough_loss, rough_gradient = loss_and_gradient(trained_mae)
    assert rough_loss.dtype == rough_gradient.dtype == torch.float32
    assert rough_loss.item() == pytest.approx(loss.item(), rel=0.03)
    assert torch.cosine_similarity(rough_gradient.flatten(), gradient.flatten(), dim=0) > 0.95

    trained_mae.set_grad_checkpointing(True)
    checkpointed = loss_and_gradient(trained_mae)
    trained_mae.set_grad_checkpointing(False)
    assert all(torch.equal(a, b) for a, b in zip(checkpointed, (loss, gradient), strict=True))

    torch._dynamo.reset()
    compiled = loss_and_gradient(torch.compile(trained_mae, backend="eager"))
    torch._dynamo.reset()
    for ours, expected in zip(compiled, (loss, gradient), strict=True):
        assert_close(ours, expected)


def test_soft_attention_costs_no_more_than_soft_tokens():
    model, imgs = mae_vit_micro_patch4(), torch.randn(2, 3, 32, 32)
    counts = {}
    for soft in ("tokens", "attention"):
        keep_prob = torch.rand(2, 64, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            model(imgs, keep_prob=keep_prob, soft=soft)[0].backward()
        counts[soft] = counter.get_total_flops()
    assert counts["tokens"] > 0
    assert counts["attention"] <= 1.01 * counts["tokens"]


def test_non_square_images_with_any_number_of_channels():
    model = MaskedAutoencoderViT((16, 24), 8, 5, 32, 1, 2, 16, 1, 2)
    imgs = torch.randn(2, 5, 16, 24)
    patches = model.patchify(imgs)
    assert patches.shape == (2, 6, 8 * 8 * 5)
    assert torch.equal(model.unpatchify(patches), imgs)
    # Patch 4 is the second of the second row; within it, the channel runs fastest.
    assert torch.equal(patches[0, 4], imgs[0, :, 8:16, 8:16].permute(1, 2, 0).flatten())
    keep_prob = torch.rand(2, 6)
    for masking in (
        {},
        {"visible": torch.eye(6, dtype=torch.bool)[:2]},
        {"keep_prob": keep_prob},
        {"keep_prob": keep_prob, "soft": "attention"},
    ):
        loss, pred, _ = model(imgs, 0.5, **masking)
        assert torch.isfinite(loss)
        assert pred.shape == patches.shape


@pytest.mark.parametrize("name", ["mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14"])
def test_state_dict_has_exactly_upstreams_keys_and_shapes(upstream_shapes, name):
    with torch.device("meta"):  # shapes without the gigabytes
        model = MODELS[name]()
    assert {key: list(value.shape) for key, value in model.state_dict().items()} == upstream_shapes[name]


def test_names():
    assert MODELS["mae_vit_base"] is MODELS["mae_vit_base_patch16"] is MODELS["mae_vit_base_patch16_dec512d8b"]
    assert MODELS["mae_vit_large"] is MODELS["mae_vit_large_patch16"] is MODELS["mae_vit_large_patch16_dec512d8b"]
    assert MODELS["mae_vit_huge"] is MODELS["mae_vit_huge_patch14"] is MODELS["mae_vit_huge_patch14_dec512d8b"]
    with pytest.raises(ValueError, match=r"mae_vit_bsae.*mae_vit_base.*mae_vit_tiny_patch16"):
        build_mae("mae_vit_bsae")


@pytest.mark.parametrize(
    ("name", "width", "depth", "heads", "patches"),
    [
        ("mae_vit_base", 768, 12, 12, 196),
        ("mae_vit_small_patch16", 384, 12, 6, 196),
        ("mae_vit_tiny_patch16", 192, 12, 3, 196),
        ("mae_vit_micro_patch4", 64, 4, 4, 64),
    ],
)
def test_sizes_run(name, width, depth, heads, patches):
    model = build_mae(name)
    assert (model.cls_token.shape[-1], len(model.blocks), model.blocks[0].attn.num_heads) == (width, depth, heads)
    loss, pred, _ = model(torch.randn(1, 3, *model.patch_embed.img_size))
    assert torch.isfinite(loss)
    assert pred.shape[1] == patches


def test_masking_that_does_not_fit_is_refused_by_name():
    model, imgs = mae_vit_micro_patch4(), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="visible has dtype"):
        model(imgs, visible=torch.ones(2, 64))
    with pytest.raises(ValueError, match=r"keep_prob has shape \(1, 64\)"):
        model(imgs, keep_prob=torch.ones(1, 64))
    with pytest.raises(ValueError, match="not visible and keep_prob"):
        model(imgs, visible=torch.ones(2, 64, dtype=torch.bool), keep_prob=torch.ones(2, 64))
    with pytest.raises(ValueError, match="soft='atention' is unknown; choose from attention, tokens"):
        model(imgs, keep_prob=torch.ones(2, 64), soft="atention")
    with pytest.raises(ValueError, match=r"imgs has shape \(2, 1, 32, 32\).*\(N, 3, 32, 32\)"):
        model(imgs[:, :1])
    with pytest.raises(ValueError, match="image size 30x30 is not divisible by the patch size 4"):
        mae_vit_micro_patch4(img_size=30)
