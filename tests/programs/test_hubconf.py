"""The encoder through torch.hub, in a program that knows nothing of this project."""

import os
import sys

import pytest
import torch
from processes import ROOT, run_to_end

import hubconf
import models_vit
from models_mae import mae_vit_micro_patch4
from models_vit import SIZES, load_encoder
from util.checkpoint import save_checkpoint

HUB = """
import sys, torch, util, models_vit        # the caller's own
repo, run = sys.argv[1:]
encoder = torch.hub.load(repo, "encoder", run, source="local")
imgs = torch.ones(2, 3, 32, 32)
pooled = torch.hub.load(repo, "encoder", run, global_pool=True, source="local")
mae = torch.hub.load(repo, "mae_vit_micro_patch4", run, source="local")
new = torch.hub.load(repo, "vit_micro_patch4", num_classes=7, source="local")
assert new(imgs).shape == (2, 7)
import models_mae, masking                  # not imported before: the caller's own, too
assert util.MINE and models_vit.MINE and models_mae.MINE and masking.MINE
assert sys.modules["util"] is util and sys.modules["models_vit"] is models_vit
loss = mae(imgs, noise=torch.arange(128.0).view(2, 64))[0]
torch.save([encoder.forward_features(imgs), pooled.forward_features(imgs), loss], "out.pth")
"""


@pytest.mark.slow
def test_hub_gives_the_encoder_to_a_program_with_modules_of_the_same_names(tmp_path):
    model = mae_vit_micro_patch4()
    run = tmp_path / "run"
    run.mkdir()
    save_checkpoint(run / "checkpoint-2.pth", {"model": model.state_dict()})
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("util", "models_vit", "models_mae", "masking"):
        (elsewhere / f"{name}.py").write_text("MINE = True\n")
    (elsewhere / "program.py").write_text(HUB)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    result = run_to_end([sys.executable, "program.py", ROOT, run], cwd=elsewhere, env=env)
    assert result.returncode == 0, result.stderr
    token, mean, loss = torch.load(elsewhere / "out.pth")
    imgs = torch.ones(2, 3, 32, 32)
    assert torch.equal(token, load_encoder(run / "checkpoint-2.pth").forward_features(imgs))
    assert torch.equal(mean, load_encoder(run / "checkpoint-2.pth", global_pool=True).forward_features(imgs))
    assert torch.equal(loss, model(imgs, noise=torch.arange(128.0).view(2, 64))[0])


def test_hub_lists_documented_entries_and_nothing_else():
    entries = {name: value for name, value in vars(hubconf).items() if callable(value) and not name.startswith("_")}
    assert entries.keys() == {"encoder", "mae", "masking_module", *SIZES, *(f"mae_{name}" for name in SIZES)}
    assert all(entry.__doc__ for entry in entries.values())
    with torch.device("meta"):
        assert hubconf.mae_vit_base_patch16().blocks[0].attn.num_heads == 12
    assert models_vit is sys.modules["models_vit"], "importing it leaves the caller's modules alone"
