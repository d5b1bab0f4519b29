"""The benchmarks run, and what they compute from measurements is right. No speed is tested."""

import torch

from benchmarks import bench_step, footprint
from benchmarks.bench_probe import objective
from benchmarks.timing import alternate, ratio
from engine_probe import fit_softmax


def test_rounds_alternate_after_one_to_warm_up():
    calls, ticks = [], iter(range(100))
    tasks = {name: lambda turn, name=name: calls.append((name, turn)) for name in "ab"}
    times, _ = alternate(tasks, rounds=2, clock=lambda: next(ticks))
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert times == {"a": [1, 1], "b": [1, 1]}


def test_ratios_are_of_the_same_round():
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == "3 (2 to 4)"


def test_a_step_of_each_method_is_measured(program):
    methods = ("MAE", "CL-MAE", "preset", bench_step.PLAIN)
    flags = ("--rounds", 1, "--batch_size", 2, "--input_size", 16, "--profile", "--methods", *methods)
    code, out, err = program(bench_step, *flags)
    assert (code, err) == (0, "")
    for method in methods:
        assert method in out
    assert "soft pass, forward" in out


def test_footprint_of_a_model():
    _, _, gflop, memory, activations = footprint.footprint("mae_vit_tiny_patch16")
    for counts in (gflop, memory, activations):
        mae, clmae = map(float, counts.split(" / "))
        assert mae <= clmae


def test_the_solver_ends_at_the_least_objective():
    draw = torch.Generator().manual_seed(0)
    x, labels = torch.randn(12, 5, generator=draw), torch.arange(12) % 3
    heads = fit_softmax(x, labels, 3, 1.0, "cpu")
    least = objective(heads, x, labels, 1.0)
    for _ in range(5):
        heads.weight.data += 0.01 * torch.randn(heads.weight.shape, generator=draw)
        assert objective(heads, x, labels, 1.0) > least
