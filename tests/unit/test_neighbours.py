"""Exact neighbours, ties and all, against scikit-learn's brute force and against plain sorting."""

import numpy as np
import pytest
import torch
from sklearn.metrics import pairwise_distances
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors

from util.evaluation.neighbours import Scan, block_shape, inverse_distance, nearest_neighbours, vote


def random_features(n, width, seed, offset=0.0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) + offset


def brute_force(train, queries, k, metric="euclidean"):
    """scikit-learn's distances in double precision, sorted by distance, then by index."""
    distances = pairwise_distances(queries.double().numpy(), train.double().numpy(), metric=metric)
    index = np.argsort(distances, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(distances, index, axis=1), index


@pytest.mark.parametrize("block_mb", [0.05, 0.3, 256])
@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_equals_scikit_learn_on_random_features(metric, block_mb):
    train, queries = random_features(3000, 48, 0), random_features(150, 48, 1)
    distances, index = nearest_neighbours(train, queries, 20, cosine=metric == "cosine", block_mb=block_mb)
    reference = NearestNeighbors(n_neighbors=20, algorithm="brute", metric=metric).fit(train.double().numpy())
    expected, expected_index = reference.kneighbors(queries.double().numpy())
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(distances, expected, rtol=1e-5 if metric == "cosine" else 1e-9)


def tied_features(n, seed):
    """Corners of a small cube: every vector many times over, and every distance one of a few."""
    return torch.randint(0, 2, (n, 4), generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("block_mb", [0.05, 256])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_ties_are_broken_by_index(k, block_mb):
    train, queries = tied_features(500, 0), tied_features(60, 1)
    distances, index = nearest_neighbours(train, queries, k, block_mb=block_mb)
    expected, expected_index = brute_force(train, queries, k)
    np.testing.assert_array_equal(index, expected_index)
    np.testing.assert_allclose(distances, expected, atol=1e-7)


def test_copies_far_from_the_origin_are_ties():
    """|q|^2 + |t|^2 - 2 q.t would lose all digits here: copies would differ, and near vectors would coincide."""
    base = random_features(50, 32, 0, offset=1000.0)
    train = torch.cat([base, base, base + 1e-3, base])
    distances, index = nearest_neighbours(train, base, 3)
    assert index.tolist() == [[i, i + 50, i + 150] for i in range(50)]
    assert (distances == 0).all()


def test_a_constant_encoder_is_all_ties():
    train = torch.full((300, 8), 0.3)
    distances, index = nearest_neighbours(train, train[:5], 7)
    assert (distances == 0).all()
    assert index.tolist() == [list(range(7))] * 5


def test_an_outlier_does_not_hide_the_neighbours():
    train, queries = random_features(2000, 16, 0), random_features(20, 16, 1)
    train[7] = 1e6
    np.testing.assert_array_equal(nearest_neighbours(train, queries, 5)[1], brute_force(train, queries, 5)[1])


def test_random_features_need_no_second_search(monkeypatch):
    """Otherwise, the scan would be correct but useless."""
    monkeypatch.setattr(Scan, "search_all", lambda *_: pytest.fail("searched again"))
    train, queries = random_features(5000, 64, 0, offset=5.0), random_features(100, 64, 1, offset=5.0)
    nearest_neighbours(train, queries, 10)


def test_all_training_images_can_be_neighbours():
    train = random_features(6, 3, 0)
    distances, index = nearest_neighbours(train, train[:1], 6)
    assert sorted(index[0].tolist()) == list(range(6))
    assert (distances.diff() >= 0).all()


def test_blocks_stay_within_their_memory():
    for block_mb in (1, 16, 256, 4096):
        for width in (64, 768, 1280):
            rows, columns = block_shape(block_mb, 50_000, 50_000, width)
            assert 4 * (rows * columns + 2 * columns * width) <= max(block_mb * 2**20, 4 * 64 * (rows + 2 * width))
    assert block_shape(256, 1, 1, 768) == (1, 1)


def test_votes_equal_scikit_learn():
    train, queries = random_features(400, 8, 0), random_features(200, 8, 1)
    labels = torch.randint(0, 3, (400,), generator=torch.Generator().manual_seed(2))
    for k in (1, 5, 9):
        distances, index = nearest_neighbours(train, queries, k)
        near = labels[index]
        for weights, ballot in (("uniform", torch.ones(200, k)), ("distance", inverse_distance(distances))):
            reference = KNeighborsClassifier(k, algorithm="brute", weights=weights).fit(train.double(), labels)
            probabilities = reference.predict_proba(queries.double())
            clear = np.sort(probabilities, axis=1)[:, -1] > np.sort(probabilities, axis=1)[:, -2] + 1e-9
            predicted = vote(near, ballot, 3).numpy()
            assert clear.sum() > 100
            np.testing.assert_array_equal(predicted[clear], reference.predict(queries.double())[clear])


def test_votes_of_equal_weight_go_to_the_nearest():
    labels = torch.tensor([[2, 1, 1, 2, 0], [0, 1, 2, 1, 2], [4, 3, 2, 1, 0]])
    assert vote(labels, torch.ones(3, 5), 5).tolist() == [2, 1, 4]


def test_coinciding_neighbours_alone_decide_a_weighted_vote():
    distances = torch.tensor([[0.0, 0.0, 0.1], [0.5, 1.0, 2.0]], dtype=torch.float64)
    assert inverse_distance(distances).tolist() == [[1, 1, 0], [2, 1, 0.5]]
