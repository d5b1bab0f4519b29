"""The arithmetic of the benchmarks, on numbers made by hand. Nothing here is timed."""

import pytest
import torch

from benchmarks.bench_probe import objective
from benchmarks.growth import fit_exponent
from benchmarks.projection import (
    IMAGENET_IMAGES,
    PAGE,
    Counts,
    Gpus,
    Method,
    accumulation,
    get_args_parser,
    hours,
    iteration_gflop,
    memory_gb,
    page,
    read_counts,
    sustained_tflops,
)
from engine_probe import fit_softmax

MAE, FULL = Method("MAE"), Method("CL-MAE", "CMM")
PRESET = Method("preset", "half", every=2, fraction=0.25)
GB = 10**9


@pytest.fixture
def counts() -> Counts:
    return Counts(
        parameters={"MAE": GB // 16, "CMM": GB // 16, "half": GB // 16},
        gflop={"MAE": (10.0, 20.0), "CMM": (4.0, 8.0), "half": (1.0, 2.0), "soft": (40.0, 40.0)},
        copies={"MAE": 0, "CMM": 0, "half": 0, "soft": 0},
        activations={"MAE": 4 * GB, "CMM": 2 * GB, "half": GB, "soft": 8 * GB},
        checkpointed={"MAE": GB, "CMM": GB, "half": GB, "soft": 2 * GB},
        block={"MAE": GB, "CMM": GB, "half": GB, "soft": 2 * GB},
    )


def test_flops_of_an_iteration(counts):
    assert iteration_gflop(counts, MAE) == 30
    assert iteration_gflop(counts, FULL) == 30 + 12 + 80
    assert iteration_gflop(counts, PRESET) == 30 + 1 + (2 + 80 / 4) / 2


def test_the_calibrated_rate_gives_back_the_reported_hours():
    rate = sustained_tflops(gflop=124.0, hours=42, gpus=64)
    assert hours(124.0, Gpus("V100", 64, 32, rate)) == pytest.approx(42)
    assert rate == pytest.approx(124e9 * IMAGENET_IMAGES * 800 / (42 * 3600 * 64) / 1e12)


def test_memory_is_that_of_the_larger_step(counts):
    """1 GB of states for each network, and for each image the CMM's graph beside the MAE's or the soft pass's."""
    assert memory_gb(counts, MAE, 3, grad_checkpointing=False) == pytest.approx(1 + 3 * 4)
    assert memory_gb(counts, FULL, 3, grad_checkpointing=False) == pytest.approx(2 + 3 * (2 + 8))
    assert memory_gb(counts, PRESET, 3, grad_checkpointing=False) == pytest.approx(2 + 3 * (1 + 4))
    assert memory_gb(counts, FULL, 3, grad_checkpointing=True) == pytest.approx(2 + 3 * (1 + 2 + 2))


def test_accumulation_is_the_smallest_that_fits(counts):
    gpus = Gpus("some", 512, 40, 1.0)  # 8 images each, 34 GB usable
    assert accumulation(counts, MAE, gpus, grad_checkpointing=False) == 1  # 33 GB
    assert accumulation(counts, FULL, gpus, grad_checkpointing=False) == 4  # 82, 42, 22 GB
    assert accumulation(counts, FULL, Gpus("small", 512, 10, 1.0), grad_checkpointing=False) is None


def test_the_projection_is_not_stale():
    args = get_args_parser().parse_args([])
    text = page(read_counts(), args.overhead, args.overhead_preset, args.a100_tflops)
    assert PAGE.read_text(encoding="utf-8") == text, "run: python -m benchmarks.projection"


def test_exponent_of_a_power_law():
    sizes = [10, 30, 100, 1000]
    exponent, factor = fit_exponent(sizes, [0.5 * size**1.5 for size in sizes])
    assert exponent == pytest.approx(1.5)
    assert factor == pytest.approx(0.5)


def test_the_solver_ends_at_the_least_objective():
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(12, 5, generator=draw), torch.arange(12) % 3
    heads = fit_softmax(x, labels, 3, 1.0, "cpu")
    least = objective(heads, x, labels, 1.0)
    for _ in range(5):
        heads.weight.data += 0.01 * torch.randn(heads.weight.shape, generator=draw)
        assert objective(heads, x, labels, 1.0) > least
