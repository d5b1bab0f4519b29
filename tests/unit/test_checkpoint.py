import argparse
import itertools
import math
import os
import pickle
import subprocess

import pytest
import torch
from small_runs import assert_identical

from util.checkpoint import (
    lambda_cl_of,
    link_checkpoint,
    load_checkpoint,
    load_weights,
    newest_checkpoint,
    numbered_checkpoints,
    partial_of,
    save_checkpoint,
    save_safetensors,
    training_checkpoint,
    write_text,
)
from util.cli import UserError


def test_round_trip_with_plain_types(tmp_path):
    state = {"model": {"w": torch.arange(3.0)}, "epoch": 4, "args": {"lr": 1e-3, "resume": ""}}
    save_checkpoint(tmp_path / "checkpoint-4.pth", state)
    loaded = torch.load(tmp_path / "checkpoint-4.pth", weights_only=True)
    assert torch.equal(loaded.pop("model")["w"], state["model"]["w"])
    assert loaded == {"epoch": 4, "args": {"lr": 1e-3, "resume": ""}}
    assert os.listdir(tmp_path) == ["checkpoint-4.pth"], "no temporary file is left"


def test_a_training_checkpoint_tells_where_its_curriculum_stood(tmp_path):
    parts = dict(epoch=3, step=40, log=None, args=argparse.Namespace(lr=0.1))
    for moment, expected in (({"mask_ratio": 0.6, "lambda_cl": 0.25}, 0.25), ({"mask_ratio": 0.6}, None)):
        state = training_checkpoint({"model": {"w": torch.ones(2)}, "cmm": {}}, moment=moment, **parts)
        save_checkpoint(tmp_path / "checkpoint-3.pth", state)
        loaded = load_checkpoint(tmp_path / "checkpoint-3.pth")
        assert lambda_cl_of(loaded) == expected
        assert loaded["moment"] == moment
        assert (loaded["epoch"], loaded["step"], loaded["log"], loaded["args"]) == (3, 40, None, {"lr": 0.1})


def test_upstream_file_with_a_pickled_namespace(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=0.1)}, tmp_path / "mae.pth")
    assert load_checkpoint(tmp_path / "mae.pth")["args"] == {"lr": 0.1}


def test_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-0.pth"
    save_checkpoint(path, {"epoch": 0})

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save_checkpoint(path, {"epoch": 1})
    assert load_checkpoint(path)["epoch"] == 0
    assert os.listdir(tmp_path) == ["checkpoint-0.pth"]


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


def test_a_checkpoint_that_would_run_code_is_refused_and_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {}, "args": Bomb()}, "bomb.pth")
    with open("old.pth", "wb") as file:
        pickle.dump(Bomb(), file)
    for name in ("bomb.pth", "old.pth"):
        with pytest.raises(UserError, match=f"{name} is damaged"):
            load_checkpoint(name)
    assert not os.path.exists("exploded")


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage", "list", "folder", "flipped bit"])
def test_damaged_files_are_named(tmp_path, damage):
    path = tmp_path / "checkpoint-1.pth"
    if damage == "empty":
        path.touch()
    elif damage == "truncated":
        save_checkpoint(path, {"w": torch.rand(1000)})
        path.write_bytes(path.read_bytes()[:2000])
    elif damage == "flipped bit":
        save_checkpoint(path, {"w": torch.zeros(1000)})
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1  # within the tensor; torch itself would load it
        path.write_bytes(content)
        assert torch.load(path)["w"].count_nonzero() == 1
    elif damage == "garbage":
        path.write_bytes(bytes(range(256)) * 10)
    elif damage == "list":
        torch.save([1, 2], path)
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(UserError, match=r"checkpoint-1\.pth"):
        load_checkpoint(path)


def test_wherever_a_file_is_damaged_the_one_beside_it_is_taken(tmp_path, clmae_log):
    """A flipped bit in tensors, pickle, padding, directory or end record; a file truncated at every tenth."""
    newest = tmp_path / "checkpoint-1.pth"
    save_checkpoint(tmp_path / "checkpoint-0.pth", {"epoch": 0})
    good = {"model": {"w": torch.arange(300.0)}, "epoch": 1, "args": {"epochs": 2, "classes": ["a", "b"]}}
    save_checkpoint(newest, good)
    content = newest.read_bytes()
    # Every so many bytes, and more closely in the records at the end, which say where everything is
    places = [*range(0, len(content) - 700, 17), *range(len(content) - 700, len(content), 3)]
    bits = zip(places, itertools.cycle(range(8)), strict=False)
    flipped = [content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :] for at, bit in bits]
    refused = 0
    for damaged in [*flipped, *(content[: len(content) * tenth // 10] for tenth in range(10))]:
        newest.write_bytes(damaged)
        found, path = newest_checkpoint(tmp_path)
        refused += path != newest
        if path == newest:  # the bit does not matter, as in padding
            assert_identical(found, good)
    assert refused > 0.4 * len(flipped)
    assert "trying the previous one" in clmae_log.text


def test_memory_that_runs_out_is_not_taken_for_damage(tmp_path, monkeypatch):
    """Otherwise, --resume auto would fall back to an older checkpoint."""
    save_checkpoint(tmp_path / "checkpoint-0.pth", {"epoch": 0})
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")):
        monkeypatch.setattr(torch, "load", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        with pytest.raises(type(error)):
            newest_checkpoint(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "checkpoint-0.pth")
    with pytest.raises(UserError, match="not a regular file"):
        load_checkpoint(tmp_path / "checkpoint-0.pth")


def test_nobody_is_advised_to_run_what_a_file_holds(tmp_path):
    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    (tmp_path / "text.pth").write_bytes(b"hello world" * 20)
    (tmp_path / "pickle.pth").write_bytes(pickle.dumps({"a": 1}))
    for name, fact in (
        ("bomb", "could run code: posix.mkdir"),
        ("text", "not a checkpoint"),
        ("pickle", "not a checkp"),
    ):
        with pytest.raises(UserError, match=fact) as caught:
            load_checkpoint(tmp_path / f"{name}.pth")
        assert "weights_only" not in str(caught.value)
        assert "\n" not in str(caught.value)


MOMENTS = {"step": torch.tensor(2.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
GOOD = {
    "model": {"w": torch.ones(2)},
    "optimizer": {"state": {0: MOMENTS}, "param_groups": [{"params": [0], "lr": 0.1}]},
    "scaler": {"scale": 2.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 9, "_growth_tracker": 0},
    "epoch": 1,
    "step": 7,
    "log": {"iterations": 4, "interval": {}, "averages": {"loss": (3.5, 2)}},
    "moment": {"mask_ratio": 0.75, "lambda_cl": -0.1},
    "args": {"epochs": 3, "input_size": [8, 8], "classes": ["a"], "masking": "random", "masking_file": None},
}
ODD = {
    "model": [None, [1], {1: torch.ones(2)}, "x"],
    "cmm": [3],
    "optimizer": [
        *({}, None, [1], {"state": {}}, {"state": [1], "param_groups": [{"params": [0]}]}),
        *({"state": {5: {}}, "param_groups": [{"params": [0]}]}, {"state": {0: 5}, "param_groups": [{"params": [0]}]}),
        {"state": {}, "param_groups": [{"params": [10**9]}]},
    ],
    "scaler": [
        None,
        "x",
        {"scale": "x"},
        {**GOOD["scaler"], "scale": math.nan},
        {**GOOD["scaler"], "_growth_tracker": -1},
    ],
    "epoch": ["x", 1.5, True, -2, 3, 10**6, 2**70, torch.tensor(1), None],
    "step": ["x", -1, [1], math.inf, None],
    "log": [
        3,
        "x",
        {"iterations": "x"},
        {**GOOD["log"], "averages": {"loss": 3}},
        {**GOOD["log"], "interval": {"a": (1, 0)}},
    ],
    "moment": [3, None, {"lambda_cl": "x"}, {"lambda_cl": math.nan}],
    "args": [
        *(
            [1],
            "x",
            {"epochs": "x"},
            {"epochs": 0},
            {"input_size": "x"},
            {"input_size": [1, 2, 3]},
            {"input_size": [0, 8]},
        ),
        *({"classes": 5}, {"classes": [[1]]}, {"masking": 5}, {"lambda_cl_end": [1]}, {"lr": torch.ones(3)}),
    ],
    "metadata": [5, {"model": 5}],
}


@pytest.mark.parametrize("entry", ODD)
def test_an_entry_that_is_not_what_it_should_be_is_refused_by_name(tmp_path, entry):
    save_checkpoint(tmp_path / "x.pth", GOOD)
    assert_identical(load_checkpoint(tmp_path / "x.pth"), GOOD)
    for value in ODD[entry]:
        save_checkpoint(tmp_path / "x.pth", {**GOOD, entry: value})
        with pytest.raises(UserError, match=r"x\.pth is damaged, or from another program: `\w+` is "):
            load_checkpoint(tmp_path / "x.pth")


def test_entries_without_names_and_ones_that_hold_themselves_are_refused(tmp_path):
    endless = {}
    endless["a"] = endless
    for content in ({1: torch.ones(2)}, {**GOOD, "args": endless}):
        torch.save(content, tmp_path / "x.pth")
        with pytest.raises(UserError, match=r"x\.pth"):
            load_checkpoint(tmp_path / "x.pth")


def test_what_killed_processes_were_writing_is_removed_and_what_others_write_is_not(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    mine, other = partial_of(tmp_path / "a.pth"), tmp_path / "a.pth.elsewhere-12.partial"
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}.", f"-{gone.pid}."))
    old = tmp_path / "a.pth.partial"
    for path in (mine, other, dead, old):
        path.touch()
    os.utime(old, (0, 0))
    save_checkpoint(tmp_path / "b.pth", {"epoch": 1})
    assert sorted(tmp_path.iterdir()) == sorted([mine, other, tmp_path / "b.pth"])


def test_a_changed_safetensors_file_of_ours_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_safetensors(path, {"w": torch.arange(100.0), "n": torch.tensor(3)}, {"mask_ratio": "0.75"})
    loaded, content = load_checkpoint(path), path.read_bytes()
    assert (loaded["metadata"], loaded["args"]) == ({"mask_ratio": "0.75"}, {"mask_ratio": 0.75})
    for changed in (content.replace(b"0.75", b"0.76"), content[:-1] + b"\x40", content.replace(b'"n"', b'"m"')):
        assert changed != content
        path.write_bytes(changed)
        with pytest.raises(UserError, match="damaged"):
            load_checkpoint(path)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "garbage", "folder"])
def test_damaged_safetensors_are_named(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    if damage == "empty":
        path.touch()
    elif damage == "truncated":
        save_safetensors(path, {"w": torch.rand(1000)}, {})
        path.write_bytes(path.read_bytes()[:2000])
    elif damage == "garbage":
        path.write_bytes(bytes(range(256)) * 10)
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(UserError, match=r"the checkpoint .*model\.safetensors"):
        load_checkpoint(path)


def test_another_programs_header_is_no_flag(tmp_path):
    header = {"format": "pt", "input_size": "224x224", "mask_ratio": "high", "norm_pix_loss": "true"}
    save_safetensors(tmp_path / "a.safetensors", {"w": torch.arange(3.0)}, header)
    loaded = load_checkpoint(tmp_path / "a.safetensors")
    assert torch.equal(loaded["model"]["w"], torch.arange(3.0))
    assert loaded["metadata"] == header
    assert loaded["args"] == {"norm_pix_loss": True}


def test_newest_readable_checkpoint(tmp_path, caplog):
    for epoch in (2, 9, 10):
        save_checkpoint(tmp_path / f"checkpoint-{epoch}.pth", {"epoch": epoch})
    (tmp_path / "checkpoint-best.pth").touch()
    assert [path.name for path in numbered_checkpoints(tmp_path)] == [f"checkpoint-{n}.pth" for n in (10, 9, 2)]
    (tmp_path / "checkpoint-10.pth").write_bytes(b"PK")
    assert newest_checkpoint(tmp_path)[0]["epoch"] == 9
    assert newest_checkpoint(tmp_path / "nowhere") is None


def test_the_checkpoint_that_got_furthest(tmp_path):
    save_checkpoint(tmp_path / "checkpoint-last.pth", {"epoch": 3, "step": 45})
    save_checkpoint(tmp_path / "checkpoint-3.pth", {"epoch": 3, "step": 40})
    assert newest_checkpoint(tmp_path)[1].name == "checkpoint-last.pth", "it is within epoch 4"
    save_checkpoint(tmp_path / "checkpoint-4.pth", {"epoch": 4, "step": 50})
    assert newest_checkpoint(tmp_path)[1].name == "checkpoint-4.pth", "a kill between the two saves"
    (tmp_path / "checkpoint-4.pth").write_bytes(b"")
    assert newest_checkpoint(tmp_path)[1].name == "checkpoint-last.pth"
    (tmp_path / "checkpoint-last.pth").write_bytes(b"")
    assert newest_checkpoint(tmp_path)[1].name == "checkpoint-3.pth"


def test_a_kill_between_link_and_rename_harms_no_finished_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "checkpoint-3.pth", {"epoch": 3})
    os.link(tmp_path / "checkpoint-3.pth", partial_of(tmp_path / "checkpoint-last.pth"))
    save_checkpoint(tmp_path / "checkpoint-last.pth", {"epoch": 4})
    assert load_checkpoint(tmp_path / "checkpoint-3.pth")["epoch"] == 3
    assert load_checkpoint(tmp_path / "checkpoint-last.pth")["epoch"] == 4


def test_second_name_survives_a_new_file_under_the_first(tmp_path, monkeypatch):
    for name in ("linked", "copied"):
        save_checkpoint(tmp_path / name, {"epoch": 1})
        link_checkpoint(tmp_path / name, tmp_path / "last")
        save_checkpoint(tmp_path / "last", {"epoch": 2})
        assert load_checkpoint(tmp_path / name)["epoch"] == 1
        assert load_checkpoint(tmp_path / "last")["epoch"] == 2
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "no hard links here")))


def test_a_link_that_was_made_although_the_system_reports_an_error_harms_nothing(tmp_path, monkeypatch):
    """As on NFS, where a lost reply makes the client repeat the request."""

    def link_and_fail(*names, original=os.link):
        original(*names)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", link_and_fail)
    save_checkpoint(tmp_path / "checkpoint-last.pth", {"epoch": 18})
    save_checkpoint(tmp_path / "checkpoint-19.pth", {"epoch": 19})
    link_checkpoint(tmp_path / "checkpoint-19.pth", tmp_path / "checkpoint-last.pth")
    assert load_checkpoint(tmp_path / "checkpoint-last.pth")["epoch"] == 19
    assert os.path.samefile(tmp_path / "checkpoint-last.pth", tmp_path / "checkpoint-19.pth"), "and nothing is copied"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-19.pth", "checkpoint-last.pth"]


def test_weights_of_another_architecture_name_the_first_mismatch():
    model = torch.nn.Linear(3, 2)
    with pytest.raises(UserError, match=r"x.pth has weight of shape \(4, 4\), but this model needs \(2, 3\)"):
        load_weights(model, {"weight": torch.ones(4, 4), "bias": torch.ones(2)}, "x.pth")
    with pytest.raises(UserError, match="has no bias"):
        load_weights(model, {"weight": torch.ones(2, 3)}, "x.pth")
    with pytest.raises(UserError, match="has head, which this model does not"):
        load_weights(model, {**model.state_dict(), "head": torch.ones(1)}, "x.pth")


STRANGE = {
    "not a number": (torch.full((2, 3), torch.nan), "is not finite"),
    "infinite": (torch.tensor([[1.0, 2, 3], [4, 5, torch.inf]]), "is not finite"),
    "too large for float32": (torch.full((2, 3), 1e300, dtype=torch.float64), "is not finite"),
    "boolean": (torch.ones(2, 3, dtype=torch.bool), "is of type torch.bool"),
    "complex": (torch.ones(2, 3, dtype=torch.complex64), "is of type torch.complex64"),
    "integer": (torch.ones(2, 3, dtype=torch.int32), "is of type torch.int32"),
    "sparse": (torch.ones(2, 3).to_sparse(), "is not a plain tensor"),
    "no tensor": ([1.0], "is not a plain tensor"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_what_is_no_weight_is_refused_by_name(case):
    value, expected = STRANGE[case]
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    good = model.state_dict()
    load_weights(model, {key: value.half() if key == "0.weight" else value for key, value in good.items()}, "x.pth")
    with pytest.raises(UserError, match=f"x.pth: 0.weight {expected}"):
        load_weights(model, {**good, "0.weight": value}, "x.pth")
    with pytest.raises(UserError, match=r"x.pth: 1.num_batches_tracked is of type"):
        load_weights(model, {**good, "1.num_batches_tracked": torch.tensor(1.0)}, "x.pth")


@pytest.mark.parametrize("kind", ["FIFO", "folder"])
def test_only_regular_files_are_replaced(tmp_path, kind):
    """As root, /dev/null could be."""
    path = tmp_path / "x"
    os.mkfifo(path) if kind == "FIFO" else path.mkdir()
    with pytest.raises(UserError, match="x cannot be replaced: it is not a regular file"):
        write_text(path, "text")
    assert (path.is_fifo(), path.is_dir()) == (kind == "FIFO", kind == "folder")
