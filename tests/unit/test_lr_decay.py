"""Layer-wise learning rates: which parameter belongs to which layer, and what that means for its rate and decay."""

from argparse import Namespace

import pytest
import torch

from models_vit import vit_micro_patch4, with_head
from util.lr_decay import get_layer_id_for_vit, param_groups_lrd
from util.lr_sched import adjust_learning_rate

LAYERS = {
    "cls_token": 0,
    "pos_embed": 0,
    "patch_embed.proj.weight": 0,
    "blocks.0.norm1.weight": 1,
    "blocks.11.mlp.fc2.bias": 12,
    "fc_norm.weight": 13,
    "head.bias": 13,
}


@pytest.fixture
def model():
    """Four blocks, so the embeddings are layer 0 and the head layer 5."""
    return with_head(vit_micro_patch4(img_size=16, global_pool=True, num_classes=0), 10)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_counted_from_the_image_to_the_head(name):
    assert get_layer_id_for_vit(name, 13) == LAYERS[name]


def test_every_parameter_has_the_rate_and_decay_of_its_place(model):
    groups = param_groups_lrd(model, 0.05, model.no_weight_decay(), 0.65)
    of = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(of) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        layer = {"blocks": 1 + int(name.split(".")[1]) if name.startswith("blocks") else 0, "head": 5, "fc_norm": 5}
        assert of[id(p)]["lr_scale"] == pytest.approx(0.65 ** (5 - layer.get(name.split(".")[0], 0)))
        vector = name.endswith("bias") or "norm" in name or name in ("pos_embed", "cls_token")
        assert of[id(p)]["weight_decay"] == (0 if vector else 0.05), name
    assert len({(group["lr_scale"], group["weight_decay"]) for group in groups}) == len(groups) == 12


def test_the_schedule_multiplies_by_the_scale(model):
    optimizer = torch.optim.AdamW(param_groups_lrd(model), lr=1.0)
    lr = adjust_learning_rate(optimizer, 3.0, Namespace(lr=8e-3, min_lr=0.0, warmup_epochs=6, epochs=12))
    assert lr == pytest.approx(4e-3)
    assert max(group["lr"] for group in optimizer.param_groups) == lr, "the head's"
    assert min(group["lr"] for group in optimizer.param_groups) == pytest.approx(4e-3 * 0.75**5)


def test_what_is_frozen_is_not_trained(model):
    model.patch_embed.requires_grad_(False)
    trained = [id(p) for group in param_groups_lrd(model) for p in group["params"]]
    assert not {id(p) for p in model.patch_embed.parameters()} & set(trained)
