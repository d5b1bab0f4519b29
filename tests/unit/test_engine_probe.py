"""Heads on frozen features: each learns what it would alone, and as much as scikit-learn's logistic regression."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import nn

from engine_probe import (
    CachedBatches,
    LinearHeads,
    build_optimizer,
    fit_softmax,
    no_denormals,
    predict,
    train_one_epoch,
)
from util.evaluation.features import FeatureSet
from util.evaluation.metrics import accuracies, top_classes
from util.lars import LARS
from util.lr_sched import learning_rate


def blobs(n, width=20, classes=5, spread=1.0, seed=0, scale=1.0):
    """Gaussian classes; the seed draws the images, not the classes."""
    centres = torch.randn(classes, width, generator=torch.Generator().manual_seed(99)) * spread
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    features = (centres[labels] + torch.randn(n, width, generator=generator)) * scale + 3
    return FeatureSet(features, labels, torch.arange(n))


def settings(**changed):
    defaults = dict(epochs=4, warmup_epochs=1, min_lr=0.0, weight_decay=0.0, accum_iter=1)
    return Namespace(**{**defaults, **changed})


def train(train_set, seeds, rates, args, batch_size=32, classes=5):
    heads = LinearHeads(seeds, len(rates), train_set.features.shape[1], classes)
    optimizer = build_optimizer(heads, args)
    batches = CachedBatches(train_set, seeds, batch_size, torch.device("cpu"))
    for epoch in range(args.epochs):
        losses = train_one_epoch(heads, batches.epoch(epoch), len(batches), optimizer, torch.tensor(rates), epoch, args)
    return heads, losses


def test_heads_trained_together_are_those_trained_alone():
    data, args = blobs(200), settings(weight_decay=0.01)
    together, losses = train(data, [3, 4], [0.5, 5.0], args)
    for run, seed in enumerate((3, 4)):
        for g, rate in enumerate((0.5, 5.0)):
            alone, loss = train(data, [seed], [rate], args)
            torch.testing.assert_close(together.weight[run, g], alone.weight[0, 0])
            torch.testing.assert_close(losses[run, g], loss[0, 0])
            expected = predict(alone, data.features)[0, 0]
            assert torch.equal(predict(together, data.features)[run, g], expected)


def test_one_head_is_upstreams_batch_norm_linear_layer_and_lars():
    data, args = blobs(96), settings()
    heads, _ = train(data, [7], [2.0], args)
    plain = nn.Sequential(nn.BatchNorm1d(20, affine=False, eps=1e-6), nn.Linear(20, 5))
    start = LinearHeads([7], 1, 20, 5)
    plain[1].weight.data.copy_(start.weight[0, 0])
    nn.init.zeros_(plain[1].bias)
    optimizer = LARS(plain[1].parameters(), weight_decay=0.0)
    batches = CachedBatches(data, [7], 32, torch.device("cpu"))
    for epoch in range(4):
        for i, (x, labels) in enumerate(batches.epoch(epoch)):
            lr = learning_rate(epoch + i / 3, lr=2.0, min_lr=0.0, warmup_epochs=1, epochs=4)
            optimizer.param_groups[0]["lr"] = lr
            nn.functional.cross_entropy(plain(x[0]), labels[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(heads.weight[0, 0], plain[1].weight)
    torch.testing.assert_close(heads.norm.running_var, plain[0].running_var)
    plain.eval()
    assert torch.equal(predict(heads, data.features)[0, 0], top_classes(plain(data.features)))


def test_heads_start_small_and_differ_by_seed():
    heads = LinearHeads([0, 1], 2, 4000, 3)
    assert heads.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert torch.equal(heads.weight[0, 0], heads.weight[0, 1]), "the rates of a run start alike"
    assert not torch.equal(heads.weight[0, 0], heads.weight[1, 0])
    assert not heads.bias.any()


def test_seeds_see_their_images_in_their_own_order():
    batches = CachedBatches(blobs(64), [0, 1], 16, torch.device("cpu"))
    (x, labels), *rest = list(batches.epoch(0))
    assert (x.shape, labels.shape, len(rest)) == ((2, 16, 20), (2, 16), 3)
    assert not torch.equal(x[0], x[1])
    assert torch.equal(next(batches.epoch(0))[0], x), "an epoch can be repeated"
    assert not torch.equal(next(batches.epoch(1))[0], x)


def test_accumulated_batches_make_one_step():
    data = blobs(100)
    one, _ = train(data, [0], [1.0], settings(epochs=1, warmup_epochs=0), batch_size=24)
    accumulated = LinearHeads([0], 1, 20, 5)
    before = accumulated.weight.clone()
    args = settings(epochs=1, warmup_epochs=0, accum_iter=4)
    batches = CachedBatches(data, [0], 24, torch.device("cpu"))
    optimizer = build_optimizer(accumulated, args)
    train_one_epoch(accumulated, batches.epoch(0), len(batches), optimizer, torch.tensor([1.0]), 0, args)
    assert not torch.equal(accumulated.weight, before)
    assert not torch.allclose(accumulated.weight, one.weight)
    # A single step of LARS from zero momentum has the length lr * 0.001 * |W|.
    step = (accumulated.weight - before).norm() / before.norm()
    assert step.item() == pytest.approx(0.001, rel=1e-4)


def test_linear_probe_reaches_logistic_regression():
    """Within a point, on features that are neither separable nor standardised."""
    train_set, test = blobs(2000, spread=0.45, seed=1, scale=20), blobs(2000, spread=0.45, seed=2, scale=20)
    heads, _ = train(train_set, [0, 1, 2], [20.0], settings(epochs=60, warmup_epochs=5), batch_size=128)
    ours = accuracies(predict(heads, test.features), test.labels)[0]
    scaler = StandardScaler().fit(train_set.features)
    reference = LogisticRegression(max_iter=1000).fit(scaler.transform(train_set.features), train_set.labels)
    theirs = 100 * reference.score(scaler.transform(test.features), test.labels)
    assert 50 < theirs < 90
    assert (ours - theirs).abs().max() < 1, (ours, theirs)


@pytest.mark.parametrize(("n", "l2"), [(5, 1.0), (40, 1.0), (40, 0.1)])
def test_few_shot_layer_is_scikit_learns_logistic_regression(n, l2):
    data = blobs(n, seed=3)
    head = fit_softmax(data.features, data.labels, 5, l2, "cpu")
    x = StandardScaler().fit(data.features.double()).transform(data.features.double())
    reference = LogisticRegression(C=1 / l2, tol=1e-8, max_iter=10_000).fit(x, data.labels)
    np.testing.assert_allclose(head.weight[0, 0].detach(), reference.coef_, atol=2e-3)
    test = blobs(500, seed=4)
    ours = predict(head, test.features)[0, 0, :, 0].numpy()
    scaler = StandardScaler().fit(data.features.double())
    assert (ours == reference.predict(scaler.transform(test.features.double()))).mean() > 0.99


def test_few_shot_layer_survives_constant_features_and_one_class():
    features = torch.ones(4, 3)
    head = fit_softmax(features, torch.tensor([0, 1, 0, 1]), 2, 1.0, "cpu")
    assert head.weight.isfinite().all()
    assert (predict(fit_softmax(features, torch.zeros(4).long(), 1, 1.0, "cpu"), features)[..., 0] == 0).all()


def test_numbers_next_to_zero_are_zero_while_heads_are_trained_and_not_afterwards():
    tiny = torch.tensor([1e-44])
    with no_denormals():
        assert not (tiny * 1).any()
    assert (tiny * 1).any()
