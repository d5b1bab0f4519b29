"""Layer-wise learning rates for fine-tuning: the nearer a layer is to the image, the less it moves."""

from collections.abc import Collection

from timm.models.vision_transformer import VisionTransformer


def param_groups_lrd(
    model: VisionTransformer,
    weight_decay: float = 0.05,
    no_weight_decay_list: Collection[str] = (),
    layer_decay: float = 0.75,
) -> list[dict]:
    """The parameters of a ViT as groups of an optimizer: one for each layer, with and without weight decay.

    A group's `lr_scale`, which util/lr_sched.py multiplies its rate by, is `layer_decay` to the power of its distance
    from the head. Vectors (biases, norms) and the names in `no_weight_decay_list` have no weight decay.
    """
    num_layers = len(model.blocks) + 1  # the number of the head's layer; the embeddings are layer 0
    groups: dict[tuple[int, bool], dict] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        layer = get_layer_id_for_vit(name, num_layers)
        decays = parameter.ndim > 1 and name not in no_weight_decay_list
        group = groups.setdefault(
            (layer, decays),
            {
                "lr_scale": layer_decay ** (num_layers - layer),
                "weight_decay": weight_decay if decays else 0.0,
                "params": [],
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def get_layer_id_for_vit(name: str, num_layers: int) -> int:
    """0 for the embeddings, i + 1 for blocks.i, `num_layers` for all that follows the blocks."""
    if name in ("cls_token", "pos_embed") or name.startswith("patch_embed"):
        return 0
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return num_layers
