"""The code of docs/interop.md, verbatim: our masks in other autoencoders, and theirs in ours."""

import re

import pytest
import torch
from processes import ROOT
from small_runs import SMALL, checkpoint, log_lines

from main_pretrain import get_args_parser, settle_mask_args
from masking import Masking, MaskSettings
from models_mae import mae_vit_micro_patch4, take_tokens

PAGE = (ROOT / "docs" / "interop.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python ?(\S*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


class IndexMAE(torch.nn.Module):
    """An autoencoder that takes tokens by index, as lightly's does, built from our networks."""

    def __init__(self):
        super().__init__()
        self.parts = mae_vit_micro_patch4(img_size=16)

    def forward(self, imgs, idx_keep, idx_mask):
        mae = self.parts
        tokens = torch.cat([mae.cls_token.expand(len(imgs), -1, -1), mae.patch_embed(imgs)], dim=1) + mae.pos_embed
        encoded = take_tokens(tokens, idx_keep)
        for block in mae.blocks:
            encoded = block(encoded)
        encoded = mae.decoder_embed(mae.norm(encoded))
        everywhere = mae.mask_token.repeat(len(imgs), tokens.shape[1], 1)
        decoded = everywhere.scatter(1, idx_keep[..., None].expand_as(encoded), encoded) + mae.decoder_pos_embed
        for block in mae.decoder_blocks:
            decoded = block(decoded)
        pred = take_tokens(mae.decoder_pred(mae.decoder_norm(decoded)), idx_mask)
        return (pred - take_tokens(mae.patchify(imgs), idx_mask - 1)).square().mean()


def test_our_masks_drive_other_autoencoders(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for masking, name in (("predictive", "predictive"), ("curriculum", "clmae")):
        assert cli(*SMALL, "--masking", masking, "--output_dir", tmp_path / "runs" / name)[0] == 0
    page: dict = {}
    for file, code in BLOCKS:
        if not file:
            exec(compile(code, "docs/interop.md", "exec"), page)
    for name, settings in page["settings"].items():
        settle_mask_args(flags := get_args_parser().parse_args(["--masking", name]))
        assert settings.lambda_cl_end == flags.lambda_cl_end
    assert page["settings"]["predictive"].cmm_strength == flags.cmm_strength
    imgs, index, index_mae = page["imgs"], page["index"], IndexMAE()
    masks = []
    for name, masking in page["strategies"].items():
        values = masking.values(imgs)
        ours = masking.choose(masking.ask(imgs, index, 30, 0.3), values)
        loss, _, mask = index_mae.parts(imgs, 0.75, **ours)
        noise = page["noise_of"](masking, imgs, index, epoch=30)
        assert torch.equal(page["theirs"](imgs, noise=noise).mask, mask), name
        idx_keep, idx_mask = page["token_indices"](noise, 0.75)
        hidden = torch.zeros(8, 17).scatter_(1, idx_mask, 1)
        assert torch.equal(hidden[:, 1:], mask), name
        assert torch.equal(idx_keep.sort(dim=1).values[:, 0], torch.zeros(8, dtype=torch.long)), "[CLS] stays"
        torch.testing.assert_close(index_mae(imgs, idx_keep, idx_mask), loss)
        masks.append(mask)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("name", ["adapted", "noise"])
def test_their_masks_drive_ours(cli, tmp_path, name):
    (tmp_path / "theirs.py").write_text(dict(BLOCKS)["theirs.py"])
    strategy = f"{tmp_path / 'theirs.py'}:{name}"
    assert cli(*SMALL, "--masking", strategy, "--output_dir", tmp_path / "out")[0] == 0
    assert checkpoint(tmp_path / "out")["args"]["masking"] == strategy
    assert all(line["train_mask_visible"] == pytest.approx(0.25) for line in log_lines(tmp_path / "out"))
    if name == "adapted":
        masking, imgs = Masking(MaskSettings(strategy), (4, 4)), torch.zeros(8, 3, 16, 16)
        visible = masking.choose(masking.ask(imgs, torch.arange(8), 0, 0.0))["visible"].view(8, 4, 4)
        assert (visible.sum(dim=1) == 4 * visible[:, 0]).all(), "whole columns"
        assert (visible[:, 0].sum(dim=1) == 1).all()
