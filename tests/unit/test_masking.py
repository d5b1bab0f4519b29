import pytest
import torch

from masking import mask_health


def test_mask_health_of_hand_made_masks():
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])  # 0 is keep, 1 is remove
    keep_prob = torch.tensor([[0.05, 0.08, 0.95, 0.6], [0.0, 0.3, 0.2, 1.0], [0.5, 0.4, 0.91, 0.92]])
    health = {name: value.item() for name, value in mask_health(mask, keep_prob).items()}
    assert health["visible"] == pytest.approx((0.5 + 0.25 + 0.5) / 3)
    assert health["visible_std"] == pytest.approx(torch.tensor([0.5, 0.25, 0.5]).std(correction=0).item())
    assert health["distinct"] == pytest.approx(2 / 3)
    assert health["hamming"] == pytest.approx((0.25 + 0.0 + 0.25) / 3)
    assert health["unseen"] == pytest.approx(2 / 4)
    assert health["decisive"] == pytest.approx(7 / 12)


def test_mask_health_counts_distinct_masks_as_unique_does():
    mask = (torch.rand(64, 4) < 0.5).float()
    assert mask_health(mask)["distinct"].item() == pytest.approx(len(mask.unique(dim=0)) / 64)
    assert mask_health(torch.ones(64, 9))["distinct"].item() == pytest.approx(1 / 64)


def test_mask_health_of_a_batch_of_one():
    health = mask_health(torch.tensor([[1.0, 0.0]]))
    assert health["distinct"] == 1
    assert health["hamming"] == 0
    assert "decisive" not in health
