"""Record what the MAE of one tree has and computes: state-dict shapes, losses, predictions, masks, gradients.

    python tools/mae_probe.py TREE INPUTS.npz ANSWER.npz [--shim]

tools/diff_upstream.py starts it once per tree, because both have modules of the same names. The interpreter may belong
to an old environment made for upstream: hence no newer syntax, and nothing imported from this project.
"""

import contextlib
import functools
import inspect
import json
import os
import sys
from types import ModuleType
from unittest import mock

SIZES = ("mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14")
TINY: dict = dict(img_size=32, patch_size=8, in_chans=3, embed_dim=32, depth=2, num_heads=4, mlp_ratio=4)
TINY.update(decoder_embed_dim=16, decoder_depth=1, decoder_num_heads=4)


def main(tree: str, inputs: str, answer: str, shim: bool) -> None:
    # A package without __init__.py, as upstream's util, would lose to another tree's that has one.
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if not os.path.isfile(os.path.join(entry, "models_mae.py"))]
    sys.path[:] = [tree, *(entry for entry in others if os.path.abspath(entry) != here)]
    shims = apply_shims() if shim else []
    import numpy
    import timm
    import torch

    import models_mae

    torch.set_num_threads(1)
    versions = [f"{module.__name__} {module.__version__}" for module in (torch, timm, numpy)]
    device = torch.device("meta")  # spares gigabytes, where torch can build models on it
    with device if hasattr(device, "__enter__") else contextlib.nullcontext():
        states = {name: getattr(models_mae, name)().state_dict() for name in SIZES}
    shapes = {name: {key: list(each.shape) for key, each in state.items()} for name, state in states.items()}
    found: dict = {"ran": ", ".join(versions + shims), "shapes": shapes}
    arrays: dict = {}
    try:  # weights of other keys or shapes do not load; which ones, the shapes tell
        arrays = numbers(models_mae, numpy.load(inputs))
    except Exception as error:
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    numpy.savez(answer, found=json.dumps(found), **arrays)


def apply_shims() -> list:
    """Put back what code for timm 0.3 and numpy 1.20 expects, where only a name is missing."""
    import numpy
    import timm.models.vision_transformer as vision_transformer

    applied = []
    if not hasattr(numpy, "float"):
        setattr(numpy, "float", float)  # noqa: B010
        applied.append("numpy.float is float")
    original = vision_transformer.Block
    if "qk_scale" not in inspect.signature(original.__init__).parameters:

        class Block(original):
            def __init__(self, *args, qk_scale: None = None, **kwargs):
                if qk_scale is not None:
                    raise TypeError("this timm's Block has no qk_scale")
                super().__init__(*args, **kwargs)

        vision_transformer.Block = Block
        applied.append("timm's Block takes qk_scale=None")
    return applied


def numbers(models_mae: ModuleType, given: dict) -> dict:
    """Under the names of tests/data/mae_tiny.npz. `given` has `weights/KEY`, `imgs` and `noise`."""
    import torch

    given = {name: torch.from_numpy(given[name]) for name in given}
    weights = {name[len("weights/") :]: value for name, value in given.items() if name.startswith("weights/")}
    arrays = {}
    for variant in ("plain", "norm_pix"):
        norm_layer = functools.partial(torch.nn.LayerNorm, eps=1e-6)
        mae = models_mae.MaskedAutoencoderViT(norm_layer=norm_layer, norm_pix_loss=variant == "norm_pix", **TINY)
        arrays.update({"fresh/" + name: getattr(mae, name).clone() for name in ("pos_embed", "decoder_pos_embed")})
        mae.load_state_dict(weights)
        with mock.patch.object(torch, "rand", return_value=given["noise"]):
            loss, pred, mask = mae(given["imgs"], mask_ratio=0.75)
        loss.backward()
        results = {"loss": loss, "pred": pred, "mask": mask}
        results.update({"grad/" + name: p.grad for name, p in mae.named_parameters() if p.grad is not None})
        arrays.update({variant + "/" + name: value for name, value in results.items()})
    return {name: value.detach().numpy() for name, value in arrays.items()}


if __name__ == "__main__":
    main(*sys.argv[1:4], shim="--shim" in sys.argv[4:])
