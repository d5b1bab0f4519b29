"""What training does on GPUs, seen without one: tests/fake_cuda_worker.py runs every variant on fake CUDA tensors."""

import json
import sys

import pytest
from processes import ENVIRONMENT, ROOT

from benchmarks import bench_launches
from benchmarks.fake_cuda import obstacle, run_on_fake_cuda

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("fake_cuda")]

MASKS, LOG = "models_mae.py:hard_masking", "util/training/progress.py:fetch"
FEATURES = "util/evaluation/features.py:extract_features"
THRESHOLDED = ("curriculum", "fp16, clipped", "checkpointing", "soft attention", "cheaper")

# Ops that launch kernels in an iteration and its log (two iterations for accumulating, two batches for features), plus
# about 5 %. A change that needs more says why.
BUDGET = {
    "curriculum": 1100,
    "fp16, clipped": 1400,
    "accumulating": 2300,
    "checkpointing": 1390,
    "topk": 1080,
    "soft attention": 1200,
    "cheaper": 1110,
    "predictive": 700,
    "random": 490,
    "block": 630,
    "grid": 540,
    "noise": 540,
    "fine-tuning": 320,
    "features": 185,
}


@pytest.fixture(scope="module")
def found():
    if reason := obstacle():
        pytest.skip(reason)
    return json.loads(run_on_fake_cuda([sys.executable, str(ROOT / "tests" / "fake_cuda_worker.py")], ENVIRONMENT))


def test_no_fault_goes_unseen(found):
    raised = {"mask as index": "DynamicOutputShapeException", "mixed devices": "FakeTensorDeviceMismatchError"}
    assert found["faults"] == dict.fromkeys(found["faults"], 1) | raised


def test_the_host_waits_only_where_the_code_says_so(found):
    """No variant has any other sync, such as reading a value or a blocking copy."""
    expected = {name: {LOG: 1} for name in found["variants"]}
    expected |= {name: {MASKS: 1, LOG: 1} for name in THRESHOLDED} | {"accumulating": {MASKS: 2, LOG: 1}}
    expected["features"] = {FEATURES: 2}
    assert {name: variant["syncs"] for name, variant in found["variants"].items()} == expected


@pytest.mark.parametrize("site", [MASKS, LOG, FEATURES])
def test_syncs_are_marked_in_the_code(site):
    file, function = site.split(":")
    source = (ROOT / file).read_text(encoding="utf-8")
    body = source.split(f"def {function}(")[1].split("\ndef ")[0].split("\n    def ")[0]
    assert "host-device sync" in body


def test_only_the_batch_is_copied_to_the_gpu(found):
    pretraining = {"engine_pretrain.py:train_one_epoch": 1, "masking.py:ask": 1}
    expected = dict.fromkeys(found["variants"], pretraining)
    expected["accumulating"] = dict.fromkeys(pretraining, 2)
    expected |= {"fine-tuning": {"engine_finetune.py:train_one_epoch": 2}, "features": {FEATURES: 2}}
    assert {name: variant["copies"] for name, variant in found["variants"].items()} == expected


def test_every_generation_of_gpus_attends_with_the_same_kernels(found):
    """cuDNN's, which torch prefers on an H100, are switched off; a T4 has no flash attention, and no bf16 either."""
    kernels = {gpu: sorted(counts) for gpu, counts in found["kernels"].items()}
    both = ["efficient", "flash"]
    assert kernels == {"H100": both, "A100": both, "T4": ["efficient"]}


def test_launches_stay_within_their_budget(found):
    launches = {name: variant["launches"] for name, variant in found["variants"].items()}
    assert launches.keys() == BUDGET.keys()
    over = {name: number for name, number in launches.items() if not 0.8 * BUDGET[name] < number <= BUDGET[name]}
    assert not over, "beyond the budget, or so far below that it can be lowered"


def test_a_step_of_512_processes_is_no_longer_than_one_of_8(found):
    """Launches, exchanges and lines of Python are the same; tensors grow with the global batch, not with its square."""
    for variant in found["worlds"].values():
        few, many = variant["8"], variant["512"]
        for what in ("launches", "syncs", "copies", "collectives", "lines"):
            assert many[what] == few[what]
        assert many["largest"] <= 512 / 8 * few["largest"]


def test_what_a_step_exchanges_beside_gradients(found):
    """One gather for the masking module, one reduction for the log, one gather for the health of masks, which is due
    here; and the number of removed patches, where it may vary."""
    exchanges = {name: variant["512"]["collectives"] for name, variant in found["worlds"].items()}
    both = {"_allgather_base_": 2, "allreduce_": 2}
    assert exchanges == {"curriculum": both, "cheaper": both, "predictive": {**both, "allreduce_": 1}}


def test_counts_become_tables(found, program, monkeypatch):
    """For a CL-MAE step with nothing but its one sync and the copies of the batch, and a curriculum that costs."""
    monkeypatch.setattr(bench_launches, "run_on_fake_cuda", lambda _: json.dumps(found["bench"]))
    code, out, err = program(bench_launches)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.split()[0] in ("MAE", "CL-MAE")]
    assert [row[4:6] for row in rows[:2]] == [["0", "2"], ["1", "2"]]
    assert rows[2][5] == "1.00"
    assert 3 < float(rows[3][5]) < 6
