"""Checkpoints and resuming as a user sees them: what is saved when, what resumes, what is refused."""

import os
import resource
from pathlib import Path

import pytest
import torch
from conftest import DATA
from small_runs import SMALL, assert_identical, assert_same_training, checkpoint, log_lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

import main_pretrain
import models_mae
import util.checkpoint
from main_pretrain import get_args_parser
from models_mae import mae_vit_micro_patch4
from util.cli import Interrupted, UserError
from util.program import STOP_SIGNALS
from util.training import progress as journal
from util.training import resume
from util.training.resume import differences
from util.training.saver import Saver

MAPS = Path("/proc/self/maps")


@pytest.mark.parametrize("masks", ["curriculum", "curriculum --soft attention", "predictive --mask_noise curriculum"])
def test_resumed_run_equals_an_uninterrupted_one(cli, tmp_path, monkeypatch, masks):
    """Killed two epochs after its last checkpoint: these are trained, logged and shown again."""
    flags = (*SMALL, "--epochs", 4, "--save_every", 1, "--knn_every", 1, "--masking", *masks.split())
    assert cli(*flags, "--output_dir", tmp_path / "whole")[0] == 0

    def stop_before_the_last_epoch(*args, **kwargs):
        if args[4] == 3:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    original = main_pretrain.train_one_epoch
    with monkeypatch.context() as patch:
        patch.setattr(main_pretrain, "train_one_epoch", stop_before_the_last_epoch)
        assert cli(*flags, "--output_dir", tmp_path / "parts")[0] == 130
    for name in (1, 2, "last"):
        (tmp_path / "parts" / f"checkpoint-{name}.pth").unlink()
    code, _, err = cli(*flags, "--output_dir", tmp_path / "parts")
    assert code == 2
    assert "add --resume auto" in err
    code, _, err = cli(*flags, "--output_dir", tmp_path / "parts", "--resume", "auto")
    assert code == 0
    assert "log.txt: dropped 2 lines of epochs that are trained again" in err
    assert_same_training(checkpoint(tmp_path / "whole", 3), checkpoint(tmp_path / "parts", 3))
    assert log_lines(tmp_path / "parts") == log_lines(tmp_path / "whole")
    events = EventAccumulator(str(tmp_path / "parts"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1000, 2000, 3000, 4000]
    file = tmp_path / "whole" / "checkpoint-1.pth"
    assert cli(*flags, "--output_dir", tmp_path / "file", "--resume", file)[0] == 0
    assert_same_training(checkpoint(tmp_path / "whole", 3), checkpoint(tmp_path / "file", 3))


def test_checkpoints_in_time_and_in_number(cli, tmp_path):
    flags = (*SMALL, "--epochs", 5, "--save_every", 1, "--keep", 2, "--save_minutes", 1e-6)
    seen = []

    def spy(path, state, original=util.checkpoint.save_checkpoint):
        seen.append((path.name, state["epoch"], state["step"]))
        original(path, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util.checkpoint, "save_checkpoint", spy)
        assert cli(*flags, "--output_dir", tmp_path)[0] == 0
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-3.pth", "checkpoint-4.pth", "checkpoint-last.pth"]
    # Three updates per epoch, each saved. A finished epoch counts as such only when its end is saved.
    assert seen[:4] == [
        (f"checkpoint-{name}.pth", e, s)
        for name, e, s in (("last", -1, 1), ("last", -1, 2), ("last", -1, 3), (0, 0, 3))
    ]
    assert checkpoint(tmp_path, "last")["step"] == 15


def test_resuming_within_an_epoch(cli, tmp_path, monkeypatch):
    """A signal at every update of a run, in turn."""
    flags = (*SMALL, "--shapes_images", 24, "--accum_iter", 2, "--batch_size", 4, "--save_every", 1)
    assert cli(*flags, "--output_dir", tmp_path / "whole")[0] == 0
    for stop_at in range(1, 6):
        folder = tmp_path / str(stop_at)

        number = STOP_SIGNALS[stop_at % 3]

        def stop(saver, step, log, original=Saver.after_update, stop_at=stop_at, number=number):
            if step == stop_at:
                os.kill(os.getpid(), number)
            original(saver, step, log)

        with monkeypatch.context() as patch:
            patch.setattr(Saver, "after_update", stop)
            code, _, err = cli(*flags, "--output_dir", folder)
        assert code == Interrupted.exit_code
        assert f"stopped by {number.name} after step {stop_at}" in err
        assert cli(*flags, "--output_dir", folder, "--resume", "auto", "--num_workers", stop_at % 2)[0] == 0
        assert_same_training(checkpoint(tmp_path / "whole"), checkpoint(folder))
        assert log_lines(folder) == log_lines(tmp_path / "whole")


def test_resuming_with_other_settings_is_refused_with_the_list(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    changes = ("--lambda_kl", 3, "--shapes_images", 64, "--batch_size", 8, "--exact_decode", "--resume", "auto")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *changes)
    assert code == 2
    for difference in (
        "--epochs 1, now 2",
        "--lambda_kl 1.0, now 3.0",
        "--shapes_images 48, now 64",
        "images per iteration 16, now 8",
        "list of images 48 images, ",
        "--exact_decode False, now True",
    ):
        assert difference in err
    assert "--model" not in err
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, *changes, "--allow_changes")
    assert code == 0
    assert "WARNING: resuming from" in err
    assert "--lambda_kl 1.0, now 3.0" in err
    assert checkpoint(tmp_path, "last")["args"]["lambda_kl"] == 3


def test_what_may_change_between_parts_of_a_run(cli, tmp_path, one_class):
    """Where data and output lie, how the work is shared out, and how often something is saved or shown."""
    flags = (*SMALL, "--data_set", "folder", "--batch_size", 1, "--num_workers", 0)
    assert cli(*flags, "--data_path", one_class, "--output_dir", tmp_path / "a")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    moved = one_class.rename(tmp_path / "elsewhere" / "data")
    also = ("--output_dir", tmp_path / "b", "--save_every", 7, "--vis_every", 0, "--num_workers", 1)
    code, _, err = cli(*flags, "--data_path", moved, *also, "--resume", tmp_path / "a" / "checkpoint-1.pth")
    assert (code, err) == (0, "")
    (moved / "train" / "only" / "a.jpg").rename(moved / "train" / "only" / "b.jpg")
    code, _, err = cli(*flags, "--data_path", moved, *also, "--resume", tmp_path / "a" / "checkpoint-1.pth")
    assert code == 2
    assert "list of images 1 images, " in err
    defaults = vars(get_args_parser().parse_args([]))
    alone = defaults | {"batch_size": 8, "world_size": 1}
    assert differences(alone, defaults | {"batch_size": 4, "world_size": 2}) == []
    assert differences({"commit": "0123456789ab"}, {"commit": "ba9876543210-dirty"}) == []
    assert differences(alone, defaults | {"batch_size": 8, "world_size": 2}) == ["images per iteration 8, now 16"]


def test_going_on_from_an_older_file_beside_later_ones_is_refused(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert cli(*flags)[0] == 0
    code, _, err = cli(*flags, "--resume", tmp_path / "checkpoint-0.pth")
    assert code == 2
    assert "holds checkpoint-1.pth, which is later than --resume" in err


def test_resume_auto_does_not_start_over_where_no_checkpoint_can_be_read(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path)
    assert cli(*flags)[0] == 0
    for path in tmp_path.glob("checkpoint-*.pth"):
        path.write_bytes(b"PK")
    code, _, err = cli(*flags, "--resume", "auto")
    assert code == 2
    assert f"none of the checkpoints in {tmp_path} can be read" in err
    assert len(log_lines(tmp_path)) == 2


def test_changes_that_are_allowed_take_effect(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto", "--allow_changes", "--weight_decay", 0.9)[0] == 0
    assert {group["weight_decay"] for group in checkpoint(tmp_path)["optimizer"]["param_groups"]} == {0, 0.9}


def test_resume_auto_passes_over_a_damaged_checkpoint(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert cli(*flags)[0] == 0
    whole = checkpoint(tmp_path)
    for name in ("last", "1"):
        file = tmp_path / f"checkpoint-{name}.pth"
        file.write_bytes(file.read_bytes()[:5000])
    code, out, err = cli(*flags, "--resume", "auto")
    assert code == 0
    assert "checkpoint-last.pth is damaged" in err
    assert "checkpoint-1.pth is damaged" in err
    assert "resuming from" in out
    assert "checkpoint-0.pth: epoch 2, after 0 of its updates" in out
    assert_same_training(whole, checkpoint(tmp_path))


def test_the_first_process_checks_a_checkpoint_for_all_and_nobody_keeps_it_mapped(tmp_path, monkeypatch):
    args = get_args_parser().parse_args([*SMALL, "--lr", "0.1"])
    main_pretrain.check_args(args)
    args.cmm_lr, file = args.lr, tmp_path / "checkpoint-0.pth"
    state, other = (main_pretrain.build_networks(args, torch.device("cpu")) for _ in range(2))
    for network, optimizer in ((state.model, state.optimizer), (state.cmm, state.optimizer_cmm)):
        sum(p.square().sum() for p in network.parameters() if p.requires_grad).backward()
        optimizer.step()
    util.checkpoint.save_checkpoint(file, state.state_dict())
    loaded = resume.load_for_all(str(file))
    assert str(file) in MAPS.read_text()
    other.load(loaded, str(file))
    del loaded
    assert str(file) not in MAPS.read_text(), "it may be deleted, even from another machine"
    assert_identical(other.state_dict(), state.state_dict())

    with monkeypatch.context() as patch:  # another process relies on the first
        patch.setattr(resume, "is_main_process", lambda: False)
        patch.setattr(util.checkpoint, "check_sums", None)
        assert resume.load_for_all(str(file)).keys() == state.state_dict().keys()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match="checksum") as first:
        resume.load_for_all(str(file))
    monkeypatch.setattr(resume, "is_main_process", lambda: False)
    monkeypatch.setattr(resume, "gather_objects", lambda value: [str(first.value), value])
    with pytest.raises(UserError) as second:
        resume.load_for_all(str(file))
    assert str(second.value) == str(first.value)


@pytest.fixture
def full_disk(monkeypatch):
    """A set of checkpoint names that the system refuses to write in full."""
    names = set()

    def save(path, state, original=util.checkpoint.save_checkpoint):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            if path.name in names:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
            original(path, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    monkeypatch.setattr(util.checkpoint, "save_checkpoint", save)
    return names


def test_full_disk_is_reported_and_the_run_goes_on(cli, tmp_path, full_disk):
    full_disk.add("checkpoint-0.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, "--save_every", 1)
    assert code == 0
    assert "checkpoint-0.pth (File too large)" in err
    assert "training continues" in err
    assert sorted(path.name for path in tmp_path.glob("*.p*")) == ["checkpoint-1.pth", "checkpoint-last.pth"]
    assert checkpoint(tmp_path)["epoch"] == checkpoint(tmp_path, "last")["epoch"] == 1


def test_full_disk_at_the_end_keeps_the_checkpoint_before(cli, tmp_path, full_disk):
    full_disk.add("checkpoint-1.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path, "--save_minutes", 0)
    assert code == 2
    assert "cannot write the checkpoint" in err
    assert "(File too large); existing files are untouched" in err
    assert checkpoint(tmp_path, "last")["epoch"] == 0
    full_disk.clear()
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto")[0] == 0, "when there is room again"
    assert checkpoint(tmp_path)["epoch"] == 1


def test_tensorboard_on_a_full_disk_does_not_end_the_run(cli, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "add_scalar", full)
    code, _, err = cli(*SMALL, "--output_dir", tmp_path)
    assert code == 0
    assert err.count("--track tensorboard failed (No space left on device); the run continues without it") == 1


def test_log_that_cannot_be_written_ends_the_run_with_a_sentence(cli, tmp_path, monkeypatch):
    (tmp_path / "full").symlink_to("/dev/full")
    original = journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda _, line: original(tmp_path / "full", line))
    code, _, err = cli(*SMALL, "--output_dir", tmp_path)
    assert code == 2
    assert "full (No space left on device); rerun with --resume auto after fixing this" in err


def test_architecture_of_another_checkpoint_names_the_first_mismatch(cli, tmp_path):
    torch.save({"model": mae_vit_micro_patch4(img_size=32).state_dict()}, tmp_path / "other.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "out", "--init", tmp_path / "other.pth")
    assert code == 2
    assert "other.pth has pos_embed of shape (1, 65, 64), but this model needs (1, 17, 64)" in err


def test_tensorboard_keeps_what_was_shown_before_resuming(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path, "--epochs", 1)[0] == 0
    assert cli(*SMALL, "--output_dir", tmp_path, "--resume", "auto", "--allow_changes")[0] == 0
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1000, 2000]


def test_log_line_cut_short_by_a_kill_is_dropped_and_said(cli, tmp_path):
    flags = (*SMALL, "--output_dir", tmp_path)
    assert cli(*flags, "--epochs", 1)[0] == 0
    with open(tmp_path / "log.txt", "a") as file:
        file.write('{"train_loss": 0.1')
    code, _, err = cli(*flags, "--resume", "auto", "--allow_changes")
    assert code == 0
    assert "log.txt: skipped damaged lines: 2" in err
    assert [line["epoch"] for line in log_lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("flag", ["--resume", "--init"])
def test_weights_alone_start_a_new_run(cli, tmp_path, flag):
    """A model as upstream publishes it: no optimizer, no epoch; and an encoder without decoder."""
    model = mae_vit_micro_patch4(img_size=16)
    torch.save({"model": model.state_dict()}, tmp_path / "mae.pth")
    code, out, _ = cli(*SMALL, "--output_dir", tmp_path / "out", flag, tmp_path / "mae.pth", "--lr", 0)
    assert code == 0
    assert f"weights from {tmp_path / 'mae.pth'}; training starts from its first epoch" in out
    trained = checkpoint(tmp_path / "out")["model"]
    assert all(torch.equal(value, trained[key]) for key, value in model.state_dict().items())

    encoder = {key: v for key, v in model.state_dict().items() if "decoder" not in key and key != "mask_token"}
    torch.save({"model": encoder}, tmp_path / "enc.pth")
    code, out, _ = cli(*SMALL, "--output_dir", tmp_path / "enc", flag, tmp_path / "enc.pth", "--lr", 0)
    assert code == 0
    assert "enc.pth has no decoder; a new one is initialised" in out
    trained = checkpoint(tmp_path / "enc")["model"]
    assert all(torch.equal(value, trained[key]) for key, value in encoder.items())

    torch.save({"model": {**encoder, "mask_token": model.mask_token.data}}, tmp_path / "part.pth")
    code, _, err = cli(*SMALL, "--output_dir", tmp_path / "part", flag, tmp_path / "part.pth")
    assert code == 2
    assert "part.pth has no decoder_pos_embed" in err


def test_a_checkpoint_of_an_earlier_version_is_trained_to_its_end(cli, tmp_path, monkeypatch):
    """It stopped in its last epoch, after two of four updates, and knows nothing of newer flags."""

    def nano(**kwargs):
        return models_mae._mae(4, (16, 1, 2), (8, 1, 1), **{"img_size": 8, **kwargs})

    monkeypatch.setitem(models_mae.MODELS, "mae_vit_micro_patch4", nano)
    flags = ("--input_size", 8, "--shapes_images", 64, "--epochs", 3, "--blr", 1e-3, "--cmm_dim", 16)
    old = DATA / "before" / "checkpoint.pth"
    code, out, err = cli(*SMALL, *flags, "--no_norm_pix_loss", "--resume", old, "--output_dir", tmp_path)
    assert (code, err) == (0, "")
    assert f"resuming from {old}: epoch 3, after 2 of its updates" in out
    before, after = torch.load(old, weights_only=True), checkpoint(tmp_path, 2)
    assert (after["epoch"], after["step"]) == (2, 12)
    for part in ("model", "cmm"):
        assert before[part].keys() == after[part].keys()
    assert not torch.equal(before["model"]["cls_token"], after["model"]["cls_token"])
    assert after["moment"] == {"mask_ratio": 0.75, "lambda_cl": pytest.approx(-0.1)}
    (line,) = log_lines(tmp_path)
    assert line["epoch"] == 2
    code, _, err = cli(*SMALL, *flags, "--resume", old, "--output_dir", tmp_path / "other")
    assert code == 2
    assert "--norm_pix_loss False, now True" in err


def test_init_takes_the_weights_of_a_run_and_nothing_else(cli, tmp_path):
    assert cli(*SMALL, "--output_dir", tmp_path / "first")[0] == 0
    flags = (*SMALL, "--output_dir", tmp_path / "second", "--init", tmp_path / "first" / "checkpoint-1.pth")
    assert cli(*flags, "--lr", 0, "--resume", "auto")[0] == 0
    first, second = checkpoint(tmp_path / "first"), checkpoint(tmp_path / "second")
    for part in ("model", "cmm"):
        assert all(torch.equal(value, second[part][key]) for key, value in first[part].items())
    assert not torch.equal(first["optimizer"]["state"][0]["exp_avg"], second["optimizer"]["state"][0]["exp_avg"])
    assert [line["epoch"] for line in log_lines(tmp_path / "second")] == [0, 1]
