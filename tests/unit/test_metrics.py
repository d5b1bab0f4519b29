import numpy as np
import pytest
import torch

from util.evaluation.metrics import summary, top_classes


def test_top_classes_of_few_classes_are_filled_up():
    assert top_classes(torch.tensor([[0.1, 0.9, 0.5]])).tolist() == [[1, 2, 0, -1, -1]]
    assert top_classes(torch.arange(8.0)[None]).tolist() == [[7, 6, 5, 4, 3]]


def test_summary_of_runs():
    labels = torch.tensor([0, 1, 2, 3])
    right = torch.tensor([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [2, 0, 1, 3, 4], [3, 0, 1, 2, 4]])
    one_wrong = right.clone()
    one_wrong[0] = torch.tensor([4, 0, 1, 2, 3])
    metrics = summary(torch.stack([right, one_wrong, right]), labels)
    assert metrics["acc1"] == pytest.approx((100 + 75 + 100) / 3)
    assert metrics["acc1_std"] == pytest.approx(np.std([100, 75, 100], ddof=1))
    assert (metrics["acc5"], metrics["acc5_std"]) == (100, 0)
    assert summary(right[None], labels)["acc1_std"] is None
