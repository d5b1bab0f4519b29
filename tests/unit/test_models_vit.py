"""The evaluation encoder: upstream's features, any checkpoint, and clear errors for the wrong one."""

import argparse
from functools import partial

import pytest
import torch
from torch import nn

from models_mae import MODELS as MAE_MODELS
from models_mae import build_mae, mae_vit_micro_patch4
from models_vit import (
    MODELS,
    VisionTransformer,
    encoder_weights,
    fit_weights,
    load_encoder,
    load_mae,
)
from util.checkpoint import resolve_checkpoint, save_checkpoint
from util.cli import UserError
from util.misc import derive_seed
from util.pos_embed import interpolate_pos_embed


@pytest.mark.parametrize("pooling", ["global_pool", "cls_token"])
def test_features_equal_upstream(golden, golden_mae, pooling):
    encoder = VisionTransformer(
        global_pool=pooling == "global_pool",
        img_size=32,
        patch_size=8,
        embed_dim=32,
        depth=2,
        num_heads=4,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        num_classes=0,
    ).eval()
    fit_weights(encoder, encoder_weights({"model": golden_mae().state_dict()}, "golden"), (32, 32), "golden")
    features = encoder.forward_features(golden["imgs"])
    torch.testing.assert_close(features, golden[f"vit/features_{pooling}"], rtol=0, atol=1e-5)
    assert torch.equal(encoder(golden["imgs"]), features), "without classes, the head is the identity"


def test_one_encoder_for_each_mae():
    sizes = {name.removeprefix("mae_").removesuffix("_dec512d8b") for name in MAE_MODELS}
    assert set(MODELS) == sizes - {"vit_base", "vit_large", "vit_huge"}, "short names have no upstream counterpart"
    with torch.device("meta"):
        for name in MODELS:
            mae_model, vit_model = build_mae(f"mae_{name}"), MODELS[name](num_classes=0)
            assert mae_model.blocks[0].attn.num_heads == vit_model.blocks[0].attn.num_heads, "no weight tells it"
            mae, vit = encoder_weights({"model": mae_model.state_dict()}, name), vit_model.state_dict()
            assert {key: value.shape for key, value in vit.items()} == {key: value.shape for key, value in mae.items()}


@pytest.fixture
def mae():
    torch.manual_seed(1)
    return mae_vit_micro_patch4()


@pytest.fixture
def imgs():
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def latent_cls(mae, imgs):
    """[CLS] of the MAE's own encoder over whole images."""
    visible = torch.ones(len(imgs), mae.patch_embed.num_patches, dtype=torch.bool)
    return mae.forward_encoder(imgs, 0.0, visible=visible)[0][:, 0]


KINDS = {
    "ours": lambda mae: {"model": mae.state_dict(), "args": {"input_size": [32, 32]}, "epoch": 3},
    "upstream with a Namespace": lambda mae: {"model": mae.state_dict(), "args": argparse.Namespace(input_size=32)},
    "encoder only": lambda mae: {"model": encoder_weights({"model": mae.state_dict()}, "")},
    "bare state dict": lambda mae: mae.state_dict(),
    "fine-tuned": lambda mae: {
        "model": {**mae.state_dict(), "head.weight": torch.ones(5, 64), "head.bias": torch.ones(5)}
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_checkpoint_gives_the_encoder_it_holds(tmp_path, mae, imgs, kind):
    torch.save(KINDS[kind](mae), tmp_path / "mae.pth")
    encoder = load_encoder(tmp_path / "mae.pth")
    torch.testing.assert_close(encoder.forward_features(imgs), latent_cls(mae, imgs), rtol=1e-5, atol=1e-5)
    assert not encoder.training
    assert not any(p.requires_grad for p in encoder.parameters())


def test_random_weights_are_those_a_pretraining_starts_from(imgs):
    torch.manual_seed(derive_seed("weights", 5))
    expected = latent_cls(mae_vit_micro_patch4(), imgs)
    encoder = load_encoder(None, model="vit_micro_patch4", seed=5)
    torch.testing.assert_close(encoder.forward_features(imgs), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="--model"):
        load_encoder(None)


def test_another_input_size_interpolates_positions(tmp_path, mae):
    save_checkpoint(tmp_path / "a.pth", {"model": mae.state_dict()})
    encoder = load_encoder(tmp_path / "a.pth", input_size=(48, 40))
    expected = {"pos_embed": mae.pos_embed.detach()}
    interpolate_pos_embed(encoder, expected)
    assert torch.equal(encoder.pos_embed, expected["pos_embed"])
    assert encoder.pos_embed.shape == (1, 1 + 12 * 10, 64)
    assert encoder.forward_features(torch.zeros(1, 3, 48, 40)).shape == (1, 64)


def test_a_non_square_checkpoint_knows_its_shape_by_its_arguments(tmp_path):
    mae = mae_vit_micro_patch4(img_size=(16, 64))  # as many patches as 32 x 32
    save_checkpoint(tmp_path / "a.pth", {"model": mae.state_dict(), "args": {"input_size": [16, 64]}})
    assert load_encoder(tmp_path / "a.pth").patch_embed.img_size == (16, 64)
    square = load_encoder(tmp_path / "a.pth", input_size=(32, 32))
    assert not torch.equal(square.pos_embed, mae.pos_embed), "64 patches each, but in another grid"


def test_grey_images_are_inferred(tmp_path):
    save_checkpoint(tmp_path / "a.pth", {"model": mae_vit_micro_patch4(in_chans=1).state_dict()})
    assert load_encoder(tmp_path / "a.pth").forward_features(torch.zeros(1, 1, 32, 32)).shape == (1, 64)
    with pytest.raises(UserError, match=r"--in_chans 3, but .* images of 1 channels"):
        load_encoder(tmp_path / "a.pth", in_chans=3)


def test_a_run_folder_means_its_newest_checkpoint(tmp_path, mae):
    for epoch in (3, 20):
        save_checkpoint(tmp_path / f"checkpoint-{epoch}.pth", {"model": mae.state_dict()})
    assert resolve_checkpoint(str(tmp_path)).name == "checkpoint-20.pth"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--finetune .*empty is a folder without checkpoint-N\.pth"):
        resolve_checkpoint(str(tmp_path / "empty"))


def without(state, *keys):
    return {key: value for key, value in state.items() if key not in keys}


def test_what_does_not_fit_is_named(tmp_path, mae):
    def load(state, **kwargs):
        torch.save(state, tmp_path / "x.pth")
        load_encoder(tmp_path / "x.pth", **kwargs)

    state = mae.state_dict()
    with pytest.raises(UserError, match=r"x\.pth has no norm\.weight, blocks\.3\.mlp\.fc2\.bias|has no .*norm\.weight"):
        load(without(state, "norm.weight", "blocks.3.mlp.fc2.bias"))
    load(without(state, "norm.weight", "norm.bias"), global_pool=True)  # that norm is not used then
    with pytest.raises(UserError, match=r"x\.pth has extra, which this model does not"):
        load({**state, "extra": torch.ones(1)})
    with pytest.raises(UserError, match=r"has no pos_embed"):
        load(without(state, "pos_embed"))
    with pytest.raises(UserError, match=r"holds no patch_embed\.proj\.weight"):
        load({"fc.weight": torch.ones(2, 2)})
    with pytest.raises(UserError, match=r"has cls_token of shape \(1, 1, 64\), but this model needs \(1, 1, 192\)"):
        load(state, model="vit_tiny_patch16")
    with pytest.raises(UserError, match="--model vit_giant is unknown; choose from vit_base_patch16"):
        load(state, model="vit_giant")
    odd = mae_vit_micro_patch4(img_size=32).state_dict()
    odd = {key: value for key, value in odd.items() if not key.startswith("blocks.3.")}
    with pytest.raises(UserError, match="patch size 4, width 64 and depth 3, which matches none of"):
        load(odd)
    with pytest.raises(UserError, match="not divisible by the patch size 4"):
        load(state, input_size=(30, 32))


def test_an_autoencoder_needs_its_decoder(tmp_path, mae):
    save_checkpoint(tmp_path / "a.pth", {"model": mae.state_dict()})
    torch.save(encoder_weights({"model": mae.state_dict()}, ""), tmp_path / "encoder.pth")
    with pytest.raises(UserError, match=r"encoder\.pth has no decoder"):
        load_mae(tmp_path / "encoder.pth")
    with pytest.raises(UserError, match=r"has cls_token of shape \(1, 1, 64\), but this model needs \(1, 1, 192\)"):
        load_mae(tmp_path / "a.pth", model="mae_vit_tiny_patch16")
    with pytest.raises(UserError, match="unknown model 'mae_vit_giant'"):
        load_mae(tmp_path / "a.pth", model="mae_vit_giant")
    save_checkpoint(tmp_path / "odd.pth", {"model": mae.state_dict(), "args": {"input_size": 33}})
    with pytest.raises(UserError, match=r"odd\.pth: image size 33x33 is not divisible"):
        load_mae(tmp_path / "odd.pth")
