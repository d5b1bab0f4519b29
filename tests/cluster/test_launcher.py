"""Cluster jobs: what is requested, and, on a real SLURM, runs on two nodes that survive interruptions."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import submitit
from processes import ROOT, run_to_end, wait_for, wait_until
from small_runs import DATA, SMALL, assert_same_training, checkpoint
from submitit.core import utils

import main_knn
import main_pretrain
from util.cli import UserError, logger
from util.training import launcher
from util.training.launcher import (
    ClusterJob,
    add_job_arguments,
    build_executor,
    combinations,
    failure,
    launch,
    program_args,
)

RUN = (*SMALL, "--shapes_images", "240", "--epochs", "8", "--num_workers", "1", "--global_batch_size", "16")


def flags(*extra):
    parser = main_pretrain.get_args_parser()
    add_job_arguments(parser)
    return parser.parse_args([str(flag) for flag in extra])


@pytest.fixture
def submitted(slurm, monkeypatch, tmp_path):
    """Submits a main program to the cluster as the launcher scripts do; returns the jobs."""
    for name in set(os.environ) - set(slurm.env):
        monkeypatch.delenv(name)
    for name, value in slurm.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["submitit_pretrain.py"])

    def call(*argv, program=main_pretrain):
        return launch(program.__name__, program.get_args_parser(), [str(flag) for flag in argv])

    yield call
    logger.handlers.clear()


def job_in(told):
    """The job number that the launcher has printed."""
    return re.search(r"^(?:.* )?job (\d+)$", told, re.MULTILINE)[1]


def said(job_id, kind="out", folder=None):
    """What the first process of a job wrote."""
    file = (folder or Path("output_dir") / str(job_id)) / f"{job_id}_0_log.{kind}"
    return file.read_text() if file.exists() else ""


def assert_same_end(a: Path, b: Path):
    assert_same_training(checkpoint(a, 7), checkpoint(b, 7))
    assert (a / "log.txt").read_bytes() == (b / "log.txt").read_bytes()


# --- What is asked of the cluster ---


def test_no_site_is_presumed(upstream_flags):
    args = flags()
    expected = dict(nodes=2, ngpus=8, timeout=4320, partition=None, comment=None, use_volta32=False)
    expected |= dict(job_dir="./output_dir/%j", account=None, qos=None, constraint=None, mem_gb=None, cluster="slurm")
    assert {name: getattr(args, name) for name in expected} == expected


def test_flags_of_the_program_fit_the_job():
    args = program_args(flags())
    assert (args.output_dir, args.device) == ("./output_dir/%j", "cuda"), "the job's device, not this machine's"
    args = program_args(flags("--output_dir", "runs/a", "--ngpus", 0))
    assert (args.output_dir, args.device) == ("runs/a", "cpu")
    assert program_args(flags("--device", "cpu")).device == "cpu"
    assert args.__dict__.keys() == vars(main_pretrain.get_args_parser().parse_args([])).keys(), "no flags of the job"


def test_a_restarted_job_continues_whatever_it_began_with(tmp_path):
    folder = tmp_path / "7"
    folder.mkdir()

    def resume(*extra):
        return (
            ClusterJob("main_pretrain", program_args(flags("--output_dir", tmp_path / "%j", *extra)))
            .own_args("7")
            .resume
        )

    assert resume() == "auto"
    assert resume("--resume", "x.pth") == "x.pth"
    (folder / "checkpoint-last.pth").touch()
    assert resume("--resume", "x.pth") == "auto", "not from x.pth again"
    args = program_args(flags("--output_dir", folder, "--resume", "head.pth"))
    args.eval = True
    assert ClusterJob("main_linprobe", args).own_args("7").resume == "head.pth"


def test_the_failure_of_a_job_is_that_of_the_first_process_to_fail(tmp_path):
    job = submitit.Job(tmp_path, "7", tasks=(0, 1))
    assert failure(job) is None
    for echo in ("gloo: Connection closed by peer", "[c10d] NCCL communicator was aborted"):
        for task, text in enumerate((f"RuntimeError: {echo}", "KeyError: the reason")):
            utils.cloudpickle_dump(("error", text), job.task(task).paths.result_pickle)
        assert failure(job) == "KeyError: the reason"


def test_request_for_resources(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/srun")
    monkeypatch.setenv("PYTHONPATH", "")
    wanted = ("--job_dir", tmp_path / "%j", "--nodes", 4, "--ngpus", 2, "--partition", "gpu", "--account", "a")
    wanted += ("--qos", "high", "--constraint", "a100", "--use_volta32", "--mem_gb", 64, "--comment", "icml")
    wanted += ("--timeout", 600, "--num_workers", 7)
    executor = build_executor("main_pretrain", flags(*wanted))._executor
    script = executor._make_submission_file_text("true", "")
    for line in (
        *("nodes=4", "gpus-per-node=2", "ntasks-per-node=2", "cpus-per-task=8", "partition=gpu", "account=a"),
        *("qos=high", "constraint='a100&volta32gb'", "mem=64GB", "comment=icml", "time=600", "signal=USR2@120"),
        "job-name=pretrain",
    ):
        assert f"#SBATCH --{line}\n" in script, script
    assert "--kill-on-bad-exit=1" in script
    script = build_executor("main_knn", flags("--job_dir", tmp_path / "%j", "--ngpus", 0))._executor
    script = script._make_submission_file_text("true", "")
    for absent in ("partition", "gpus", "account", "qos", "constraint", "mem", "comment"):
        assert f"#SBATCH --{absent}" not in script
    assert "ntasks-per-node=1" in script


def test_arrays_multiply():
    assert combinations([]) == [[]]
    assert combinations(["seed=0,1"]) == [["--seed", "0"], ["--seed", "1"]]
    both = combinations(["seed=0,1", "--masking=random,curriculum"])
    assert len(both) == 4
    assert ["--seed", "1", "--masking", "random"] in both
    for bad in ("seed", "seed=", "=1", "seed=1,,2"):
        with pytest.raises(UserError, match="as in --array seed=0,1,2"):
            combinations([bad])


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (("--cluster", "slurm"), "no SLURM here (no srun)"),
        (("--cluster", "local"), "--cluster local runs on this machine only: use --nodes 1"),
        (("--cluster", "debug", "--nodes", "1", "--ngpus", "2"), "--ngpus 1, or 0"),
        (("--nodes", "0"), "argument --nodes: 0 must be at least 1"),
        (("--ngpus", "-1"), "argument --ngpus: -1 must be at least 0"),
        (("--array", "seed"), "--array seed: give a flag and its values"),
        (("--array", "nodes=1,2"), "--nodes is the same for all runs of an array"),
        (("--array", "seed=0,1", "--output_dir", "runs/a"), "the runs would share runs/a; put %j"),
        (("--array", "seed=a,b"), "argument --seed: 'a' is not a whole number"),
        (("--cluster", "cloud"), "argument --cluster: invalid choice: 'cloud'"),
        (("--cluster", "local", "--nodes", "1", "--job_dir", os.devnull), f"--job_dir {os.devnull}: File exists"),
        (("--model", "mae_vit_bsae"), "--model mae_vit_bsae is unknown; choose from mae_vit_base"),
        (("--mask_ratio", "3"), "argument --mask_ratio: 3 must be above 0 and below 1"),
        (("--masking", "mine.py:stripes"), "--masking mine.py:stripes: there is no file mine.py"),
        (("--array", "mask_ratio=0.5,3"), "argument --mask_ratio: 3 must be above 0 and below 1"),
    ],
)
def test_bad_requests_end_with_one_sentence(monkeypatch, capsys, tmp_path, argv, expected):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launcher, "submit", None)  # nothing gets that far
    with pytest.raises(SystemExit) as stop:
        launch("main_pretrain", main_pretrain.get_args_parser(), ["--data_set", "shapes", *argv])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1


def test_data_out_of_this_machines_sight_is_worth_a_warning_only(monkeypatch, capsys):
    submitted = []
    monkeypatch.setattr(launcher, "build_executor", lambda *_: None)
    monkeypatch.setattr(launcher, "submit", lambda _, jobs, args: submitted.extend(jobs))
    launch("main_knn", main_knn.get_args_parser(), ["--data_path", "nowhere", "--finetune", "none.pth"])
    warnings = capsys.readouterr().err.splitlines()
    assert warnings == [
        "WARNING: --data_path nowhere does not exist on this machine; do the cluster's nodes see it?",
        "WARNING: --finetune none.pth does not exist on this machine; do the cluster's nodes see it?",
    ]
    assert [job.program for job in submitted] == ["main_knn"]


@pytest.mark.parametrize("script", ["finetune", "linprobe", "eval"])
def test_every_evaluation_has_a_launcher(monkeypatch, tmp_path, script):
    """In this very process, by --cluster debug."""
    monkeypatch.chdir(tmp_path)
    own = {"finetune": ("--epochs", 1, "--warmup_epochs", 0), "linprobe": ("--epochs", 1, "--warmup_epochs", 0)}
    encoder = ("--model", "vit_micro_patch4", "--input_size", 16, "--batch_size", 16, *DATA)
    job = ("--cluster", "debug", "--nodes", 1, "--ngpus", 0, "--job_dir", "job")
    argv = [f"submitit_{script}.py", *job, *encoder, *own.get(script, ("--task", "knn"))]
    monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
    runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
    (result,) = (tmp_path / "job" / "results.jsonl").read_text().splitlines()
    assert json.loads(result)["protocol"] == {"eval": "knn"}.get(script, script)


@pytest.mark.slow
def test_local_processes_as_a_user_starts_them(background, tmp_path):
    """Two processes on this machine, interrupted and continued; from a folder that is not the project's."""
    job = ("--cluster", "local", "--nodes", "1", "--ngpus", "2")
    command = [sys.executable, str(ROOT / "submitit_pretrain.py"), *job, *RUN, "--epochs", "4"]
    process, told = background(command, PYTHONPATH="")
    wait_for(f"{tmp_path}", told, process)
    job_id = job_in(told.read_text())
    folder = tmp_path / "output_dir" / job_id
    wait_until(lambda: "epoch 1/4 done" in said(job_id, folder=folder), told.read_text)
    for task in subprocess.run(["pgrep", "-P", job_id], capture_output=True, text=True).stdout.split():
        os.kill(int(task), signal.SIGUSR2)
    assert process.wait(timeout=120) == 0, told.read_text()
    assert f"follow  tail -F {folder}" in told.read_text()
    assert "stopped by SIGUSR2" in said(job_id, "err", folder)
    assert "resuming from" in said(job_id, folder=folder)
    assert said(job_id, folder=folder).count("training time") == 1
    assert (folder / "checkpoint-3.pth").exists()
    assert [path.name for path in (tmp_path / "output_dir").iterdir()] == [job_id]


# --- A real SLURM ---


@pytest.fixture(scope="module")
def reference(slurm, tmp_path_factory):
    """An uninterrupted run on two nodes, started with the command a user would run."""
    folder = tmp_path_factory.mktemp("reference")
    command = [sys.executable, str(ROOT / "submitit_pretrain.py"), "--nodes", "2", "--ngpus", "0", *RUN]
    done = run_to_end(command, cwd=folder, env=slurm.env)
    assert done.returncode == 0, done.stderr
    job_id = job_in(done.stdout)
    assert slurm.wait(job_id, "COMPLETED", "FAILED") == "COMPLETED"
    return folder / "output_dir" / job_id, done.stdout


def test_two_nodes(reference):
    folder, told = reference
    job_id = folder.name
    assert told.splitlines() == [
        f"job {job_id}",
        f"  logs    {folder}",
        f"  follow  tail -F {folder / f'{job_id}_0_log.out'}",
        f"  state   squeue -j {job_id}    end: scancel {job_id}",
    ]
    assert "batch 8 x 1 on each of 2 processes" in said(job_id, folder=folder)
    assert (folder / "checkpoint-7.pth").exists()
    assert (folder / "checkpoint-last.pth").exists()


def test_gpus_are_asked_for_and_the_cpu_computes(submitted, slurm, reference):
    (job,) = submitted("--nodes", 2, "--ngpus", 2, *RUN, "--shapes_images", 48, "--epochs", 1)
    assert slurm.wait(job.job_id, "COMPLETED", "FAILED") == "COMPLETED", said(job.job_id, "err")
    assert "gres:gpu:2" in slurm.run("scontrol", "show", "job", job.job_id)
    assert "batch 4 x 1 on each of 4 processes" in said(job.job_id)


def test_interrupted_and_preempted_runs_go_on_and_end_the_same(submitted, slurm, reference, tmp_path):
    """First by submitit's own signals, then by a job that is more urgent: two requeues of one run. Of so few minutes
    submitit thinks that they are over, so the first is a time-out."""
    (job,) = submitted("--nodes", 2, "--ngpus", 0, "--timeout", 10, *RUN)
    wait_until(lambda: "epoch 1/8 done" in said(job.job_id), lambda: said(job.job_id))
    job._interrupt()
    wait_until(lambda: "resuming from" in said(job.job_id), lambda: said(job.job_id))
    assert slurm.restarts(job.job_id) == 1
    assert "Job has timed out" in said(job.job_id)
    assert "9999 remaining timeouts" in said(job.job_id)

    wait_until(lambda: said(job.job_id).count(" done, ") >= 2, lambda: said(job.job_id))
    slurm.run(
        *("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent", "--wrap=sleep 1")
    )
    wait_until(lambda: said(job.job_id).count("resuming from") == 2, lambda: said(job.job_id))
    assert slurm.restarts(job.job_id) == 2
    assert slurm.wait(job.job_id, "COMPLETED", "FAILED") == "COMPLETED", said(job.job_id, "err")
    assert said(job.job_id, "err").count("WARNING: stopped by SIG") == 2, "it saved before it left"
    assert said(job.job_id).count("of its updates") == 2
    assert_same_end(job.paths.folder, reference[0])


def test_a_job_that_fails_is_reported_with_its_traceback(submitted, slurm, reference):
    (job,) = submitted("--nodes", 2, "--ngpus", 0, *RUN, "--data_set", "folder", "--data_path", "nowhere")
    assert slurm.wait(job.job_id, "COMPLETED", "FAILED") == "FAILED"
    error = str(job.exception())
    assert "Traceback (most recent call last)" in error
    assert "--data_path nowhere is not a folder" in error


def test_an_array_of_evaluations(submitted, slurm, reference):
    jobs = submitted(
        *("--nodes", 1, "--ngpus", 0, "--array", "distance=euclidean,cosine"),
        *("--finetune", reference[0], *DATA),
        program=main_knn,
    )
    assert len({job.job_id.split("_")[0] for job in jobs}) == 1, "one array"
    for job in jobs:
        assert slurm.wait(job.job_id, "COMPLETED", "FAILED") == "COMPLETED", said(job.job_id, "err")
    results = [(job.paths.folder / "results.jsonl").read_text() for job in jobs]
    assert ["cosine" in line for line in results] == [False, True]


def test_the_sbatch_file_of_the_documentation(slurm, reference, tmp_path):
    """As printed, but for the size of the job: warned, saved, requeued by itself, and the same in the end."""
    text = (ROOT / "docs" / "cluster.md").read_text()
    (script,) = re.findall(r"^```bash sbatch\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    file = tmp_path / "pretrain.sbatch"
    file.write_text(script)
    smaller = ("--ntasks-per-node=1", "--gpus-per-node=1", f"--output={tmp_path}/log")
    path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
    submit = ("env", f"--chdir={ROOT}", f"PATH={path}", "sbatch", "--parsable", *smaller, str(file))
    job_id = slurm.run(*submit, *RUN, "--output_dir", str(tmp_path / "run")).strip()
    log = tmp_path / "log"
    wait_until(lambda: log.exists() and "epoch 1/8 done" in log.read_text(), log.read_text)
    slurm.run("scancel", "--signal=USR2", job_id)
    wait_until(lambda: "resuming from" in log.read_text(), log.read_text)
    assert slurm.wait(job_id, "COMPLETED", "FAILED") == "COMPLETED", log.read_text()
    assert "stopped by SIGUSR2" in log.read_text()
    assert slurm.restarts(job_id) == 1
    assert_same_end(tmp_path / "run", reference[0])


def test_a_job_that_the_cluster_refuses(submitted, capsys):
    with pytest.raises(SystemExit) as stop:
        submitted("--nodes", 3, "--ngpus", 0, *RUN)
    assert stop.value.code == 2
    assert "the job was not accepted: sbatch: error: Batch job submission failed" in capsys.readouterr().err
