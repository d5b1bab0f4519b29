"""On real GPUs: short runs of every variant, against the same runs on the CPU. Skipped where there is no GPU."""

import sys

import pytest
import torch
from processes import ROOT, run_to_end, torchrun
from small_runs import DATA, SMALL, checkpoint, log_lines

import main_finetune
import main_knn
import main_linprobe

GPUS = torch.cuda.device_count()
DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not GPUS, reason="there is no GPU here: no CUDA path is tested")
VARIANTS = {
    "curriculum": (),
    "attention": ("--soft", "attention"),
    "topk": ("--select", "topk", "--clip_grad", "1"),
    "preset": ("--cmm_every", "2", "--cmm_fraction", "0.25", "--cmm_dim", "32"),
    "predictive": ("--masking", "predictive"),
    "random": ("--masking", "random", "--accum_iter", "2", "--batch_size", "8"),
    "checkpointing": ("--grad_checkpointing",),
}
ROUNDING = {"off": 0.01, "tf32": 0.02, "bf16": 0.05, "fp16": 0.05}


def losses(folder):
    return [line["train_loss"] for line in log_lines(folder)]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """The losses of a variant on the CPU, where it runs once."""
    known = {}

    def run(variant):
        if variant not in known:
            folder = tmp_path_factory.mktemp(variant)
            command = [sys.executable, ROOT / "main_pretrain.py", *SMALL, *VARIANTS[variant], "--output_dir", folder]
            assert run_to_end(command).returncode == 0
            known[variant] = losses(folder)
        return known[variant]

    return run


@pytest.mark.parametrize("amp", ROUNDING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_pretraining(cli, tmp_path, on_cpu, variant, amp):
    code, out, err = cli(*SMALL, *VARIANTS[variant], "--device", DEVICE, "--amp", amp, "--output_dir", tmp_path)
    assert (code, err) == (0, ""), out
    assert losses(tmp_path) == pytest.approx(on_cpu(variant), rel=ROUNDING[amp])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled(cli, tmp_path, on_cpu, variant):
    flags = ("--device", DEVICE, "--amp", "bf16", "--compile", "--output_dir", tmp_path)
    code, out, _ = cli(*SMALL, *VARIANTS[variant], *flags)
    assert code == 0, out
    assert losses(tmp_path) == pytest.approx(on_cpu(variant), rel=ROUNDING["bf16"])


@pytest.mark.parametrize("attention", ["flash", "efficient", "cudnn", "math"])
def test_attention_kernels_agree(cli, tmp_path, on_cpu, attention):
    flags = ("--device", DEVICE, "--amp", "bf16", "--attention", attention, "--output_dir", tmp_path)
    assert cli(*SMALL, *flags)[0] == 0
    assert losses(tmp_path) == pytest.approx(on_cpu("curriculum"), rel=ROUNDING["bf16"])
    assert DEVICE == "cpu" or attention[:5] in checkpoint(tmp_path)["args"]["attention_kernels"]


def test_a_run_resumes_and_is_evaluated(cli, program, tmp_path):
    run = tmp_path / "run"
    flags = (*SMALL, "--device", DEVICE, "--output_dir", run, "--knn_every", 1, "--num_workers", 1)
    assert cli(*flags, "--epochs", 1, "--warmup_epochs", 0)[0] == 0
    assert cli(*flags, "--resume", "auto", "--allow_changes")[0] == 0
    assert [line["epoch"] for line in log_lines(run)] == [0, 1]
    short = ("--epochs", 1, "--warmup_epochs", 0, "--batch_size", 16)
    for main, flags in ((main_knn, ()), (main_linprobe, short), (main_finetune, short)):
        flags = (*DATA, "--device", DEVICE, *flags, "--finetune", run, "--output_dir", tmp_path / main.__name__)
        code, out, err = program(main, *flags)
        assert code == 0, out + err


@pytest.mark.slow
@pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs here: NCCL is not tested")
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_gpus_train_as_one_process(tmp_path, on_cpu, variant):
    batch = 8 // (2 if variant == "random" else 1)
    flags = (*SMALL, *VARIANTS[variant], "--device", DEVICE, "--amp", "off", "--batch_size", batch)
    ended = run_to_end(torchrun(2, ROOT / "main_pretrain.py", *flags, "--output_dir", tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert losses(tmp_path) == pytest.approx(on_cpu(variant), rel=ROUNDING["off"])
