"""Write down what the MAE of one tree has and computes: state-dict keys and shapes, losses, predictions, gradients.

    python tools/mae_probe.py TREE INPUTS.npz ANSWER [--shim]       # writes ANSWER.json and ANSWER.npz

tools/diff_upstream.py starts it once for each tree, because both have modules of the same names. The interpreter may be
that of an old environment made for upstream: hence no newer syntax, and nothing imported from this project.
INPUTS.npz has `weights/KEY`, `imgs` and `noise`; what is written has the names of tests/data/mae_tiny.npz.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import platform
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import numpy
    import torch

SIZES = ("mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14")
TINY = dict(
    img_size=32,
    patch_size=8,
    in_chans=3,
    embed_dim=32,
    depth=2,
    num_heads=4,
    decoder_embed_dim=16,
    decoder_depth=1,
    decoder_num_heads=4,
    mlp_ratio=4,
)
MASK_RATIO = 0.75


def main(tree: str, inputs: str, answer: str, shim: bool) -> None:
    # A package without __init__.py, as upstream's util, would lose against another tree's that has one.
    here = os.path.dirname(os.path.abspath(__file__))
    others = [entry for entry in sys.path if not os.path.isfile(os.path.join(entry, "models_mae.py"))]
    sys.path[:] = [tree, *(entry for entry in others if os.path.abspath(entry) != here)]
    found = {"shapes": {}, "errors": {}, "shims": [], "versions": versions()}
    arrays = {}
    with reported(found["errors"], "import"):
        if shim:
            found["shims"] = apply_shim()
        import numpy
        import torch

        import models_mae

        torch.set_num_threads(1)
        for name in SIZES:
            with reported(found["errors"], name):
                found["shapes"][name] = shapes(models_mae, name)
        with reported(found["errors"], "numbers"), numpy.load(inputs) as given:
            arrays = numbers(models_mae, {name: torch.from_numpy(given[name]) for name in given.files})
        numpy.savez(answer + ".npz", **arrays)
    with open(answer + ".json", "w") as file:
        json.dump(found, file)


def versions() -> dict[str, str]:
    """As installed, so that they are known where an import fails."""
    found = {"Python": platform.python_version()}
    with contextlib.suppress(ImportError):  # of the module before Python 3.8, or of a package
        from importlib import metadata

        for name in ("torch", "timm", "numpy"):
            found[name] = metadata.version(name)
    return found


@contextlib.contextmanager
def reported(errors: dict[str, str], part: str) -> Iterator[None]:
    """What goes wrong in `part` becomes one line of the answer."""
    try:
        yield
    except (Exception, SystemExit) as error:
        errors[part] = " ".join(f"{type(error).__name__}: {error}".split())[:300]


def apply_shim() -> list[str]:
    """Let code for timm 0.3 and numpy 1.20 meet newer ones, where nothing but a name is in the way."""
    import numpy
    import timm.models.vision_transformer as vision_transformer

    applied = []
    if not hasattr(numpy, "float"):
        numpy.float = float  # noqa: NPY001 (old code asks for it)
        applied.append("numpy.float is float")
    original = vision_transformer.Block
    if "qk_scale" not in inspect.signature(original.__init__).parameters:

        class Block(original):
            def __init__(self, *args, **kwargs):
                if kwargs.pop("qk_scale", None) is not None:
                    raise TypeError("this timm's Block has no qk_scale, which is not None here")
                super().__init__(*args, **kwargs)

        vision_transformer.Block = Block
        applied.append("timm's Block is not given qk_scale=None")
    return applied


def shapes(models_mae: ModuleType, name: str) -> dict[str, list[int]]:
    """Keys and shapes of a size's state dict, without its gigabytes where torch has a meta device to build on."""
    import torch

    device = torch.device("meta")
    with device if hasattr(device, "__enter__") else contextlib.nullcontext():
        model = getattr(models_mae, name)()
    return {key: list(value.shape) for key, value in model.state_dict().items()}


def numbers(models_mae: ModuleType, given: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray]:
    import torch

    weights = {name[len("weights/") :]: value for name, value in given.items() if name.startswith("weights/")}
    arrays = {}
    for variant, norm_pix_loss in (("plain", False), ("norm_pix", True)):
        norm_layer = functools.partial(torch.nn.LayerNorm, eps=1e-6)
        mae = models_mae.MaskedAutoencoderViT(norm_layer=norm_layer, norm_pix_loss=norm_pix_loss, **TINY)
        for name in ("pos_embed", "decoder_pos_embed"):
            arrays["fresh/" + name] = getattr(mae, name).detach().clone()
        mae.load_state_dict(weights)
        with drawn_noise(given["noise"]):
            loss, pred, mask = mae(given["imgs"], mask_ratio=MASK_RATIO)
        loss.backward()
        results = {"loss": loss, "pred": pred, "mask": mask}
        results.update({"grad/" + name: p.grad for name, p in mae.named_parameters() if p.grad is not None})
        arrays.update({variant + "/" + name: value.detach() for name, value in results.items()})
    return {name: value.numpy() for name, value in arrays.items()}


@contextlib.contextmanager
def drawn_noise(noise: torch.Tensor) -> Iterator[None]:
    """The next and only torch.rand gives `noise`, if it asks for that shape."""
    import torch

    drawn, original = [], torch.rand

    def rand(*size, **_):
        drawn.append(tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size))
        return noise.clone()

    torch.rand = rand
    try:
        yield
    finally:
        torch.rand = original
    if drawn != [tuple(noise.shape)]:
        raise RuntimeError(f"random masking drew {drawn} with torch.rand, not {tuple(noise.shape)} once")


if __name__ == "__main__":
    main(*sys.argv[1:4], shim="--shim" in sys.argv[4:])
