"""Folders that are shared, full, or suddenly gone: programs report this in one sentence and lose nothing written."""

import shutil
import subprocess
import time

import pytest
from small_runs import DATA, SMALL, assert_same_training, checkpoint, log_lines

import main_finetune
import main_knn
import main_linprobe
import main_pretrain
from main_compare import read_run
from util import lock
from util.checkpoint import load_checkpoint

JUDGE = (*DATA, "--batch_size", "16")


def meanwhile(monkeypatch, module, action):
    """Call `action` in the second epoch of a program's training."""
    epochs, original = [], module.train_one_epoch

    def train_one_epoch(*args, **kwargs):
        epochs.append(len(epochs))
        if epochs[-1] == 1:
            action()
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "train_one_epoch", train_one_epoch)


@pytest.fixture
def pretrained(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path / "pretrained")[0] == 0
    return tmp_path / "pretrained"


def test_a_second_run_in_the_folder_of_a_first_changes_nothing(program, cli, pretrained, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0)
    folder, said = tmp_path / "shared", []
    tune = (*JUDGE, "--epochs", "1", "--finetune", pretrained)

    def others():
        said.append(cli(*SMALL, "--output_dir", folder, "--seed", 1))
        said.append(cli(*SMALL, "--output_dir", folder, "--resume", "auto"))
        said.append(program(main_finetune, *tune, "--output_dir", folder))
        said.append(program(main_knn, *JUDGE, "--finetune", pretrained, "--output_dir", folder))

    meanwhile(monkeypatch, main_pretrain, others)
    assert cli(*SMALL, "--output_dir", folder)[0] == 0
    *refused, evaluation = said
    for code, _, err in refused:
        assert code == 2
        assert f"--output_dir {folder} is in use by process " in err
    assert evaluation[0] == 0, "an evaluation shares a folder with anything: each of its files is its own"
    assert_same_training(checkpoint(folder), checkpoint(pretrained))
    assert log_lines(folder) == log_lines(pretrained)


def test_of_two_linear_probes_at_once_the_second_is_refused_but_other_evaluations_are_not(
    program, pretrained, tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "PATIENCE", 0)
    folder, said = tmp_path / "evaluations", []
    common = (*JUDGE, "--finetune", pretrained, "--output_dir", folder)
    probe = (main_linprobe, *common, "--epochs", "2", "--warmup_epochs", "0")

    def others():
        said.append(program(*probe, "--resume", "auto"))
        said.append(program(*probe, "--cache_features"))
        said.append(program(main_knn, *common))

    meanwhile(monkeypatch, main_linprobe, others)
    assert program(*probe)[0] == 0
    assert [code for code, _, _ in said] == [2, 0, 0]
    assert "in use by process" in said[0][2]
    assert {protocol for protocol, _ in read_run("", folder).results} == {"linprobe", "linprobe-cached", "knn"}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_folder_that_is_removed_meanwhile_is_named(cli, tmp_path, monkeypatch):
    folder = tmp_path / "out"
    meanwhile(monkeypatch, main_pretrain, lambda: shutil.rmtree(folder))
    code, _, err = cli(*SMALL, "--output_dir", folder)
    assert code == 2
    assert err.count("--track tensorboard failed (No such file or directory); the run continues without it") == 1
    assert f"cannot write {folder / 'log.txt'} (No such file or directory)" in err
    assert "Traceback" not in err
    assert "None" not in err


@pytest.fixture
def small_disk(tmp_path):
    """A 16 MB disk, and a function that fills it up to the given number of free kilobytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs takes root")

    def leave(kilobytes):
        (disk / "rest").unlink(missing_ok=True)
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free - 1024 * kilobytes))

    yield disk, leave
    subprocess.run(["umount", disk], check=True)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kilobytes", [0, 12, 300])
def test_a_full_disk_is_named_and_a_run_resumes_when_there_is_room(cli, pretrained, small_disk, kilobytes, monkeypatch):
    """The disk fills up in the second epoch."""
    disk, leave = small_disk
    flags = (*SMALL, "--output_dir", disk / "run", "--save_every", "1")

    def fill_up():
        while not (disk / "run" / "checkpoint-last.pth").exists():  # it is written in the background
            time.sleep(0.01)
        leave(kilobytes)

    with monkeypatch.context() as patch:
        meanwhile(patch, main_pretrain, fill_up)
        code, _, err = cli(*flags)
    assert code == 2
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert "None" not in err
    assert load_checkpoint(disk / "run" / "checkpoint-0.pth")["epoch"] == 0
    assert not list((disk / "run").glob("*.partial"))
    (disk / "rest").unlink()
    assert cli(*flags, "--resume", "auto")[0] == 0
    assert_same_training(checkpoint(disk / "run"), checkpoint(pretrained))


@pytest.mark.parametrize("kilobytes", [0, 4])
def test_an_evaluation_on_a_full_disk_leaves_no_half_result(program, pretrained, small_disk, kilobytes):
    disk, leave = small_disk
    evaluation = (main_knn, *JUDGE, "--finetune", pretrained, "--output_dir", disk / "out", "--no_cache")
    assert program(*evaluation)[0] == 0
    before = sorted(path.name for path in (disk / "out").iterdir() if "tfevents" not in path.name)
    leave(kilobytes)
    code, _, err = program(*evaluation)
    assert code == 2
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert "None" not in err
    assert sorted(path.name for path in (disk / "out").iterdir() if "tfevents" not in path.name) == before
    (disk / "rest").unlink()
    assert program(*evaluation)[0] == 0
    assert len(read_run("", disk / "out").results) == 1
