import hashlib

import numpy as np
import pytest

from util.data.shapes import CAMOUFLAGED, CLEAR, SHAPES, ShapesDataset


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        (CLEAR, "458adefb592bebff6bb2b5bd8c5de4e6951f314cb4af7aff2f58226e7c67d9bc"),
        (CAMOUFLAGED, "6d00becab60a42379391af733ce8eb37e6666266585d0a9cb07ef45bdaee8561"),
    ],
    ids=["clear", "camouflaged"],
)
def test_same_images_on_any_machine(style, expected):
    """A digest of ten images, so that a result on shapes means the same everywhere."""
    digest = hashlib.sha256()
    for index in range(10):
        digest.update(ShapesDataset((32, 32), 10, style=style).render(index)[0].tobytes())
    assert digest.hexdigest() == expected


def test_seed_split_and_index_matter():
    images = [
        ShapesDataset((32, 32), 10, split, seed).render(index)[0].tobytes()
        for split in ("train", "val")
        for seed in (0, 1)
        for index in range(10)
    ]
    assert len(set(images)) == len(images)


def test_labels_are_balanced_and_images_have_the_asked_size():
    dataset = ShapesDataset((24, 40), 50)
    assert [dataset.label(i) for i in range(50)] == list(range(len(SHAPES))) * 5
    image = dataset.read(13)
    assert (image.size, image.mode) == ((40, 24), "RGB")


@pytest.mark.parametrize("style", [CLEAR, CAMOUFLAGED], ids=["clear", "camouflaged"])
def test_object_masks_cover_the_object(style):
    """Inside and outside differ in colour in every image, and every class leaves room for both."""
    dataset = ShapesDataset((48, 48), 100, style=style)
    for index in range(100):
        pixels, covered = dataset.render(index)
        assert 0.02 < covered.mean() < 0.6, dataset.classes[dataset.label(index)]
        inside, outside = pixels[covered].mean(axis=0), pixels[~covered].mean(axis=0)
        assert np.abs(inside - outside).sum() > 60
