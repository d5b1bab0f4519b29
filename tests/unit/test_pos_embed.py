import numpy as np
import pytest
import torch

from models_mae import MaskedAutoencoderViT
from util.pos_embed import get_2d_sincos_pos_embed, interpolate_pos_embed


def test_equals_upstream(golden_util):
    np.testing.assert_allclose(get_2d_sincos_pos_embed(32, 4, cls_token=True), golden_util["pos/32_4_cls"], rtol=1e-6)
    sample = golden_util["pos/768_14"]  # [196, 12]: a sample of the 768 channels
    ours = get_2d_sincos_pos_embed(768, 14)
    columns = [np.abs(ours - column[:, None]).max(axis=0).min() for column in sample.T]
    assert max(columns) < 1e-6


def test_interpolation_equals_upstream(golden_util):
    checkpoint = {"pos_embed": torch.from_numpy(golden_util["pos/interp_4_to_6_in"])}
    interpolate_pos_embed(MaskedAutoencoderViT(48, 8, 3, 32, 1, 2, 16, 1, 2), checkpoint)
    expected = golden_util["pos/interp_4_to_6_out"]
    np.testing.assert_allclose(checkpoint["pos_embed"].numpy(), expected, rtol=1e-6, atol=1e-6)


def test_interpolation_leaves_a_fitting_grid_alone_and_refuses_one_of_unknown_shape():
    model = MaskedAutoencoderViT((16, 24), 8, 3, 32, 1, 2, 16, 1, 2)  # 6 patches
    own = {"pos_embed": torch.rand(1, 7, 32)}
    before = own["pos_embed"].clone()
    interpolate_pos_embed(model, own)
    assert torch.equal(own["pos_embed"], before)
    square = {"pos_embed": torch.rand(1, 1 + 16, 32)}
    interpolate_pos_embed(model, square)
    assert square["pos_embed"].shape == (1, 7, 32)
    with pytest.raises(ValueError, match="not square"):
        interpolate_pos_embed(model, {"pos_embed": torch.rand(1, 1 + 15, 32)})


def test_non_square_grid_puts_the_column_first():
    embed = get_2d_sincos_pos_embed(8, (2, 3)).reshape(2, 3, 8)
    assert np.array_equal(embed[0, :, :4], embed[1, :, :4]), "the first half depends on the column alone"
    assert np.array_equal(embed[:, 0, 4:], embed[:, 2, 4:]), "the second half depends on the row alone"
    with pytest.raises(ValueError, match="divisible by 4"):
        get_2d_sincos_pos_embed(30, 2)
