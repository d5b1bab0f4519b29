"""The benchmarks run and evaluate their measurements correctly. Speed itself is not tested."""

from benchmarks import bench_loader, bench_step
from benchmarks.timing import alternate, ratio


def test_rounds_alternate_after_one_to_warm_up():
    calls, ticks = [], iter(range(100))
    tasks = {name: lambda turn, name=name: calls.append((name, turn)) for name in "ab"}
    times, _ = alternate(tasks, rounds=2, clock=lambda: next(ticks))
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert times == {"a": [1, 1], "b": [1, 1]}


def test_ratios_are_of_the_same_round():
    assert ratio([2.0, 9.0, 4.0], [1.0, 3.0, 1.0]) == "3 (2 to 4)"


def test_a_step_of_each_method_is_measured(program):
    methods = ("MAE", "CL-MAE", "predictive", "preset")
    flags = ("--rounds", 1, "--batch_size", 2, "--methods", *methods)
    code, out, err = program(bench_step, *flags, "--pretrain", "--select", "topk", "--input_size", 16, 32)
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line.split() for line in out.splitlines()[4:]}
    assert lines.keys() == set(methods)
    flops = {method: float(line[-1]) for method, line in lines.items()}
    assert flops["MAE"] == 1 < flops["predictive"] < flops["preset"] < flops["CL-MAE"]


def test_loaders_are_measured_on_made_images(program):
    flags = ("--images", 4, "--width", 48, "--height", 40, "--input_size", 32, "--batch_size", 2)
    code, out, _ = program(bench_loader, *flags, "--rounds", 1, "--num_workers", 0, "--seconds", 0.01)
    assert code == 0
    for text in (
        "4 images, mean 48 x 40",
        "ours with --exact_decode",
        "from an Arrow table",
        "mean difference",
        "loader processes",
    ):
        assert text in out
