"""Programs that are stopped or run out of something: one sentence, an exit code, and no work lost."""

import os
import signal
import socket
import sys
import threading

import pytest
import torch
from processes import ROOT, run_to_end
from safetensors.torch import load_file
from small_runs import DATA, SMALL, assert_same_training, checkpoint, log_lines

import main_fewshot
import main_finetune
import main_knn
import main_linprobe
import main_pretrain
import util.misc
from models_vit import VisionTransformer
from util.cli import Interrupted, OutOfResources
from util.datasets import Fetcher

ENCODER = ("--model", "vit_micro_patch4", "--input_size", "16", *DATA)
# Without torch, which takes seconds to import. `MAIN` is the body of a program's main.
PROGRAM = """
import os, signal, sys, time
from util.cli import ArgumentParser
from util.program import answer_early, expect_the_end, run
parser = ArgumentParser("program")
BEFORE
def main(args):
    MAIN
if len(sys.argv) == 1:
    run(main, parser)
"""


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("module", "moment"),
    [
        (main_pretrain, "build_networks"),
        (main_finetune, "open_subject"),
        (main_knn, "evaluate"),
        (main_fewshot, "draw"),
        (main_linprobe, "build_batches"),
    ],
)
def test_a_signal_outside_training_ends_with_75(program, monkeypatch, tmp_path, module, moment):
    flags = SMALL if module is main_pretrain else (*ENCODER, "--batch_size", 16)
    flags += ("--shots", 1) if module is main_fewshot else ()
    monkeypatch.setattr(module, moment, lambda *_, **__: send(signal.SIGUSR1))
    code, _, err = program(module, *flags, "--output_dir", tmp_path / "out")
    how = "the same command" if module in (main_knn, main_fewshot) else "with --resume auto"
    assert (code, err) == (Interrupted.exit_code, f"WARNING: stopped by SIGUSR1; rerun {how} to continue\n")


def test_an_interrupted_extraction_continues(program, monkeypatch, tmp_path):
    flags = (*ENCODER, "--batch_size", 5, "--k", 1)
    assert program(main_knn, *flags, "--output_dir", tmp_path / "whole")[0] == 0
    encoded, original = [], VisionTransformer.forward_features

    def stop_at(batch: int, number: signal.Signals):
        def forward_features(encoder, imgs):
            encoded.append(len(imgs))
            if len(encoded) == batch:
                send(number)
            return original(encoder, imgs)

        return forward_features

    parts = tmp_path / "parts"
    for batch, number in ((4, signal.SIGTERM), (9, signal.SIGUSR2)):
        with monkeypatch.context() as patch:
            patch.setattr(VisionTransformer, "forward_features", stop_at(batch, number))
            assert program(main_knn, *flags, "--output_dir", parts)[0] == Interrupted.exit_code
        assert len(list((parts / "features").glob("train-*.part0"))) == 1
    monkeypatch.setattr(VisionTransformer, "forward_features", stop_at(0, signal.SIGTERM))
    code, out, _ = program(main_knn, *flags, "--output_dir", parts)
    assert code == 0
    assert "features of 35 images, from an interrupted extraction" in out
    assert encoded[:-1].count(5) >= 10
    for path in (tmp_path / "whole" / "features").iterdir():
        whole, resumed = load_file(path), load_file(parts / "features" / path.name)
        assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    assert len(list((parts / "features").iterdir())) == 2


TWICE = """
    try:
        os.kill(os.getpid(), NUMBER)
    finally:
        expect_the_end()
        os.kill(os.getpid(), NUMBER)
        os.write(2, b"saved\\n")
"""
IN_A_DESTRUCTOR = """
    class Thing:
        def __del__(self):
            os.kill(os.getpid(), 15)
            time.sleep(1)
    Thing()
    time.sleep(20)
"""
IN_A_LIBRARY = """
    try:
        os.kill(os.getpid(), 15)
    except BaseException:
        raise ValueError("Invalid bounding box") from None
"""
CONTINUE = "rerun the same command to continue"


@pytest.mark.parametrize(
    ("before", "main", "code", "said"),
    [
        ("answer_early('__main__', lambda: parser); os.kill(os.getpid(), 15)", "pass", 75, "stopped by SIGTERM\n"),
        ("answer_early('__main__', lambda: parser); os.kill(os.getpid(), 2)", "pass", 130, "stopped by SIGINT\n"),
        ("", TWICE.replace("NUMBER", "2"), 130, "stopped by SIGINT\n"),
        ("", TWICE.replace("NUMBER", "15"), 75, f"saved\nWARNING: stopped by SIGTERM; {CONTINUE}\n"),
        ("", IN_A_LIBRARY, 75, f"WARNING: stopped by SIGTERM; {CONTINUE}\n"),
        ("", IN_A_DESTRUCTOR, 75, f"WARNING: stopped by SIGTERM; {CONTINUE}\n"),
        ("import atexit; atexit.register(os.kill, os.getpid(), 2)", "pass", 130, "stopped by SIGINT\n"),
        ("import atexit; atexit.register(os.kill, os.getpid(), 15)", "pass", 0, ""),
        ("", "sys.stdout.flush(); os.fork() or os.kill(os.getpid(), 15); os.wait()", 0, ""),
    ],
    ids=[
        *("while importing", "Ctrl-C while importing", "Ctrl-C twice", "twice, as schedulers and torchrun do"),
        *("in a library", "in a destructor", "Ctrl-C at the very end", "at the very end", "to a fork alone"),
    ],
)
def test_no_signal_leaves_a_traceback(before, main, code, said):
    text = PROGRAM.replace("BEFORE", before).replace("MAIN", main.strip())
    done = run_to_end([sys.executable, "-c", text], cwd=ROOT)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize("module", [main_pretrain, main_finetune])
def test_loader_processes_that_fail_lose_nothing(program, monkeypatch, tmp_path, module):
    """Also within an accumulation."""
    flags = SMALL if module is main_pretrain else (*ENCODER, "--epochs", 2, "--warmup_epochs", 1)
    flags = (*flags, "--batch_size", 4, "--accum_iter", 3, "--save_every", 1)
    assert program(module, *flags, "--output_dir", tmp_path / "whole")[0] == 0
    fetched, original = [], Fetcher.fetch

    def fetch(fetcher, keys):
        fetched.append(keys)
        if len(fetched) == 5:
            fetcher.fault = "too little of everything: lower --num_workers"
        return original(fetcher, keys)

    with monkeypatch.context() as patch:
        patch.setattr(Fetcher, "fetch", fetch)
        code, _, err = program(module, *flags, "--output_dir", tmp_path / "parts")
    assert code == OutOfResources.exit_code
    last = tmp_path / "parts" / "checkpoint-last.pth"
    sentence = f"too little of everything: lower --num_workers. Stopped after step 2: saved as {last}"
    assert f"ERROR: {sentence}; resume with --resume auto\n" in err
    assert program(module, *flags, "--output_dir", tmp_path / "parts", "--resume", "auto")[0] == 0
    assert_same_training(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "parts"))
    assert log_lines(tmp_path / "whole") == log_lines(tmp_path / "parts")


def test_what_the_machine_lacks_is_told(program, monkeypatch, tmp_path):
    def allocate(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")

    monkeypatch.setattr(main_pretrain, "build_networks", allocate)
    code, _, err = program(main_pretrain, *SMALL, "--output_dir", tmp_path)
    assert code == OutOfResources.exit_code
    assert err.startswith("ERROR: out of memory: lower --batch_size, --input_size or --num_workers")
    assert err.count("\n") == 1


WORLDS = {
    "no rank": ({"RANK": None}, "the environment has RANK=: start several processes with torchrun"),
    "no number": ({"WORLD_SIZE": "two"}, "the environment has WORLD_SIZE=two: start"),
    "a rank too high": ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2"),
    "no address": ({"MASTER_ADDR": None}, "the environment has no MASTER_ADDR: start"),
    "no such port": ({"MASTER_PORT": "70000"}, "processes cannot connect: RANK 0 of WORLD_SIZE 2 at 127.0.0.1:70000: "),
    "nobody else": ({}, "not all processes have joined: RANK 0 of WORLD_SIZE 2 at 127.0.0.1:"),
}


@pytest.fixture
def world(monkeypatch):
    """The environment of the first of two processes, the second of which never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(util.misc, "PATIENCE_TO_MEET", util.misc.datetime.timedelta(seconds=1))
    monkeypatch.setattr("time.sleep", lambda _, sleep=util.misc.time.sleep: sleep(0.01))  # processes wait to speak


@pytest.mark.parametrize("case", WORLDS)
def test_a_wrong_environment_of_processes_ends_in_a_sentence(program, monkeypatch, world, tmp_path, case):
    changes, sentence = WORLDS[case]
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    code, _, err = program(main_pretrain, *SMALL, "--output_dir", tmp_path / "out")
    assert code == 2
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_process_that_waits_for_others_answers_signals(program, monkeypatch, world, tmp_path):
    monkeypatch.setattr(util.misc, "PATIENCE_TO_MEET", util.misc.datetime.timedelta(seconds=30))
    threading.Timer(1, send, [signal.SIGTERM]).start()
    code, _, err = program(main_knn, *ENCODER, "--output_dir", tmp_path)
    assert (code, err) == (75, "WARNING: stopped by SIGTERM; rerun the same command to continue\n")
