"""Entry points for torch.hub, from a clone of this repository:

encoder = torch.hub.load("path/to/clone", "encoder", "runs/clmae", source="local")
features = encoder.forward_features(imgs)
"""

import importlib as _importlib
import sys as _sys

dependencies = ["torch", "torchvision", "timm", "numpy", "safetensors", "tqdm"]


def _own_modules(*names: str) -> list:
    """This repository's modules, imported without leaving them in sys.modules.

    Many projects have a `util`, and forks of MAE also a `models_mae` and a `models_vit`, so the caller's modules and
    ours must not be confused. Pickling a whole model would need ours in sys.modules; pickling its state_dict does not.
    """

    def clashing() -> dict:
        tops = {*names, "util"}
        return {name: module for name, module in _sys.modules.items() if name.split(".")[0] in tops}

    theirs = clashing()
    for name in theirs:
        del _sys.modules[name]
    try:
        return [_importlib.import_module(name) for name in names]
    finally:
        for name in clashing():
            del _sys.modules[name]
        _sys.modules.update(theirs)


_modules = _own_modules("models_mae", "models_vit", "masking", "util.checkpoint", "models_cmm")
_models_mae, _models_vit, _masking, _checkpoint, _ = _modules


def encoder(checkpoint: str, global_pool: bool = False, input_size: tuple[int, int] | None = None):
    """The frozen encoder of a checkpoint, in evaluation mode; the model and its input size are inferred from the file.

    checkpoint   a file of this project or of upstream MAE, with or without a decoder, a run's folder, or a model of
                 transformers or timm: its folder or its name on the Hub, such as hf-hub:facebook/vit-mae-base
    global_pool  use the normalised mean of the patch tokens as features, instead of the [CLS] token
    input_size   (height, width) of the images, if different from training
    """
    path = _checkpoint.resolve_checkpoint(checkpoint, "checkpoint")
    return _models_vit.load_encoder(path, global_pool=global_pool, input_size=input_size)


def mae(checkpoint: str):
    """The whole masked autoencoder of a checkpoint, ready to train: `loss, pred, mask = mae(imgs)`."""
    return _models_vit.load_mae(_checkpoint.resolve_checkpoint(checkpoint, "checkpoint"))


def masking_module(checkpoint: str):
    """The trained masking module of a checkpoint, in evaluation mode: images [N, C, H, W] to a value per patch [N, L].

    checkpoint   a file or folder of a run with learned masks, or an export of `tools.export --format masking`
    """
    return _masking.load_module(_checkpoint.resolve_checkpoint(checkpoint, "checkpoint"))


def _entries(name: str) -> tuple:
    def vit(checkpoint: str | None = None, **kwargs):
        if checkpoint is None:
            return _models_vit.MODELS[name](**kwargs)
        path = _checkpoint.resolve_checkpoint(checkpoint, "checkpoint")
        return _models_vit.load_encoder(path, model=name, **kwargs)

    def mae_vit(checkpoint: str | None = None, **kwargs):
        if checkpoint is None:
            return _models_mae.build_mae(f"mae_{name}", **kwargs)
        path = _checkpoint.resolve_checkpoint(checkpoint, "checkpoint")
        return _models_vit.load_mae(path, model=f"mae_{name}", **kwargs)

    new = "without one, a new model built with the keyword arguments"
    vit.__doc__ = f"{name}: the encoder of a checkpoint, as from `encoder`; {new}."
    mae_vit.__doc__ = f"mae_{name}: the autoencoder of a checkpoint, as from `mae`; {new}."
    return vit, mae_vit


for _name in _models_vit.SIZES:
    globals()[_name], globals()[f"mae_{_name}"] = _entries(_name)
