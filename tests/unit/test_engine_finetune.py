"""Fine-tuning's parts: the loss that fits the labels, augmentation that depends on the image alone, exact tests."""

import random
from argparse import Namespace
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import nn

import engine_finetune
from engine_finetune import Objective, evaluate, train_one_epoch
from main_finetune import check_args, get_args_parser
from models_vit import load_encoder, with_head
from util.data.augment import build_finetune_loader, finetune_augmentation
from util.data.shapes import ShapesDataset
from util.datasets import Augmentation, build_eval_dataset, count_steps, normalise
from util.misc import NativeScalerWithGradNormCount, seed_globals
from util.training.progress import EpochLog, LossGuard
from util.training.resume import Start, TrainingState

CPU = torch.device("cpu")
SMALL = (
    *("--model", "vit_micro_patch4", "--data_set", "shapes", "--shapes_images", "16", "--batch_size", "8"),
    *("--epochs", "4", "--warmup_epochs", "1", "--lr", "1e-3", "--num_workers", "0", "--device", "cpu"),
)
PLAIN = ("--aa", "", "--reprob", "0")


def flags(*extra) -> Namespace:
    args = get_args_parser().parse_args([*SMALL, *map(str, extra)])
    check_args(args)
    args.nb_classes, args.input_size, args.in_chans = 10, [16, 16], args.in_chans or 3
    return args


def classifier(drop_path=0.0):
    return with_head(load_encoder(None, model="vit_micro_patch4", input_size=(16, 16), drop_path=drop_path), 10)


@pytest.fixture
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))


# --- Losses ---


def test_the_loss_fits_the_labels():
    for mixing in (("--mixup", 0.8), ("--cutmix", 1), ("--cutmix_minmax", 0.2, 0.8)):
        assert isinstance(Objective(flags(*mixing)).criterion, SoftTargetCrossEntropy)
    assert Objective(flags()).mixup is None
    assert isinstance(Objective(flags("--smoothing", 0.1)).criterion, LabelSmoothingCrossEntropy)
    assert isinstance(Objective(flags("--smoothing", 0)).criterion, nn.CrossEntropyLoss)
    imgs, labels = torch.rand(4, 3, 16, 16), torch.arange(4)
    assert Objective(flags()).mix(imgs, labels) == (imgs, labels), "unchanged without mixup"


def test_smoothing_mixes_the_label_with_all_classes():
    logits, labels = torch.randn(6, 10), torch.arange(6)
    log_p = logits.log_softmax(dim=1)
    expected = -(0.9 * log_p[range(6), labels] + 0.1 * log_p.mean(dim=1)).mean()
    assert Objective(flags("--smoothing", 0.1)).criterion(logits, labels).item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_mixed_labels_are_the_shares_of_the_mixed_images():
    seed_globals("test")
    imgs = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 16, 16).clone()
    mixed, shares = Objective(flags("--mixup", 0.8, "--smoothing", 0)).mix(imgs, torch.arange(8))
    share = (mixed[0, 0, 0, 0] - 7) / -7  # image 0 is black, its partner is 7
    assert shares[0, 0].item() == pytest.approx(share.item(), abs=1e-5)
    assert shares.sum(dim=1).tolist() == pytest.approx([1] * 8)


# --- Augmentation ---


def test_without_distortion_an_image_is_cropped_flipped_and_normalised(photo):
    strong = finetune_augmentation(flags(*PLAIN))
    for seed in range(5):
        pixels = Augmentation(strong.size, strong.mode, strong.draw)(photo, random.Random(seed))
        assert torch.allclose(strong(photo, random.Random(seed)), normalise(pixels[None])[0], atol=1e-5)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_an_augmented_image_depends_on_its_seed_alone(photo, in_chans):
    strong = finetune_augmentation(flags("--in_chans", in_chans, "--reprob", 1))
    first = [strong(photo.convert(strong.mode), random.Random(seed)) for seed in range(20)]
    seed_globals("something else")
    again = [strong(photo.convert(strong.mode), random.Random(seed)) for seed in range(20)]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in pairwise(first))
    assert first[0].shape == (in_chans, 16, 16)


def test_full_strength_is_black_and_no_error(photo):
    strong = finetune_augmentation(flags("--aa", "rand-m10-n1-p1-inc1", "--reprob", 0))
    (posterize,) = (op for op in strong.distort.transforms[0].ops if op.name == "PosterizeIncreasing")
    assert posterize(photo).getextrema() == ((0, 0), (0, 0), (0, 0))


# --- Training and testing ---


def train(model, *extra, steps_done=0):
    args = flags(*extra)
    loader = build_finetune_loader(ShapesDataset((16, 16), 16), args)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = TrainingState(model, optimizer, NativeScalerWithGradNormCount("cpu", enabled=False))
    iterations = count_steps(loader, args) * args.accum_iter
    log = EpochLog(Start(2, steps_done), iterations, LossGuard({}), None, args)
    return train_one_epoch(model, Objective(args), loader, state, 2, log, args)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    whole, parts = classifier(), classifier()
    stats = train(whole)
    again = train(parts, "--batch_size", 4, "--accum_iter", 2)
    assert stats["loss"] == pytest.approx(again["loss"], rel=1e-5)
    moved = (whole.head.weight - classifier().head.weight).abs().max()
    assert moved > 1e-5
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-3 * moved.item())


def test_branches_are_dropped_at_rates_that_rise_with_depth_and_as_the_step_says():
    model = classifier(drop_path=0.3)
    assert [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    other = classifier(drop_path=0.3)
    torch.manual_seed(5)  # what was drawn before plays no part
    assert train(model) == train(other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    undropped = classifier()
    train(undropped)
    assert not torch.equal(model.head.weight, undropped.head.weight)


def test_testing_sees_each_image_once_as_it_is():
    args = flags("--shapes_images", 65)
    model, dataset = classifier(drop_path=0.5), build_eval_dataset(args, "val")
    nn.init.normal_(model.head.weight)
    test = evaluate(dataset, model.train(), CPU, args)
    imgs = torch.stack([dataset[0, i][0] for i in range(13)])
    assert torch.allclose(test.features, model.eval()(imgs), atol=1e-5)
    assert test.labels.tolist() == [i % 10 for i in range(13)]
    found = engine_finetune.test_metrics(test)
    assert found["test/loss"] == pytest.approx(F.cross_entropy(test.features, test.labels).item())
    assert found["test/acc1"] == pytest.approx(100 * (test.features.argmax(dim=1) == test.labels).double().mean())
    assert found["test/acc5"] >= found["test/acc1"]
