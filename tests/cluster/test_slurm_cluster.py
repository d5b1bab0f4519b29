"""The SLURM cluster that other tests use: two nodes with GPUs, preemption, and nothing left behind."""

from pathlib import Path

import pytest
import slurm as slurm_module
from processes import wait_until
from slurm import Cluster


def submit(cluster: Cluster, log: Path, command: str, *flags: str) -> str:
    """Submits a shell command as a batch job, and returns the job's id."""
    return cluster.run("sbatch", "--parsable", f"--output={log}", *flags, f"--wrap={command}").strip()


def test_a_job_runs_on_both_nodes(slurm, tmp_path):
    job = submit(slurm, tmp_path / "log", "srun printenv SLURMD_NODENAME", "--nodes=2")
    assert slurm.wait(job, "COMPLETED", "FAILED") == "COMPLETED"
    assert sorted((tmp_path / "log").read_text().split()) == ["node1", "node2"]
    assert f"{job}|COMPLETED|node[1-2]" in slurm.run("sacct").splitlines()


def test_a_job_gets_the_gpus_it_asks_for(slurm):
    gpus = slurm.run("srun", "--nodes=2", "--gpus-per-node=8", "printenv", "CUDA_VISIBLE_DEVICES")
    assert gpus.split() == ["0,1,2,3,4,5,6,7"] * 2


def test_waiting_in_vain_shows_the_log_of_the_job(slurm, tmp_path):
    job = submit(slurm, tmp_path / "log", "echo the reason; exit 3")
    slurm.wait(job, "FAILED")
    with pytest.raises(TimeoutError, match=rf"job {job} is FAILED, not COMPLETED(.|\n)*the reason"):
        slurm.wait(job, "COMPLETED", timeout=0)
    with pytest.raises(TimeoutError, match="job 999 is unknown"):
        slurm.wait(999, "COMPLETED", timeout=0)


def test_nothing_remains_of_a_cluster_with_a_running_job(tmp_path, slurm):
    with Cluster() as cluster:
        job = submit(cluster, tmp_path / "log", "srun sh -c 'trap true TERM; echo $$; while :; do sleep 0.1; done'")
        wait_until(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().endswith("\n"))
        assert int((tmp_path / "log").read_text()) in cluster.processes()
        assert cluster.state(job) == "RUNNING"
    assert cluster.processes() == []
    assert not cluster.folder.exists()
    assert slurm.processes()  # another cluster is not affected


def test_nothing_remains_of_a_cluster_that_does_not_start(slurm, monkeypatch):
    monkeypatch.setattr(slurm_module, "SLURM_CONF", slurm_module.SLURM_CONF + "NoSuchOption=1\n")
    cluster = Cluster()
    with pytest.raises(RuntimeError, match=r"SLURM is not ready(.|\n)*NoSuchOption"), cluster:
        pass
    assert cluster.processes() == []
    assert not cluster.folder.exists()
