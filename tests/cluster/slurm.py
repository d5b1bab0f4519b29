"""A real SLURM on the loopback interface, for tests: munged, slurmctld, and a slurmd for each of two nodes.

    from slurm import slurm_fixture  # noqa: F401

    def test_job(slurm, tmp_path):
        job = slurm.run("sbatch", "--parsable", f"--output={tmp_path}/log", "--nodes=2", "--wrap=srun hostname").strip()
        slurm.wait(job, "COMPLETED")

Both nodes are this machine, each with 128 pretended CPUs and 8 pretended GPUs. A job in the partition "urgent" preempts
jobs in the default partition "main", which are requeued. Needs no root, no systemd and no cgroups, only
`apt-get install slurm-wlm munge`.
"""

import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
NODES = ("node1", "node2")
# What an outer cluster or launcher would tell our jobs.
FOREIGN = re.compile(r"(SLURM|SBATCH|SUBMITIT)_|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$")

SLURM_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
# A requeued job waits until its credential has expired: at least 5 s, by default 120 s.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid

# Nothing that needs cgroups, a database or MPI.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none

SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
EnforcePartLimits=ALL
JobRequeue=1
KillWait=3
# In seconds: for want of a database, only the controller can tell how a job ended.
MinJobAge=3600

# The signal that a job asks for by --signal is also sent when it is preempted, GraceTime before its end.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF

# Believe this file about the nodes, whatever the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
NodeName=DEFAULT CPUs=128 RealMemory=1000000 Gres=gpu:8 State=UNKNOWN
NodeName=node1 NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=node2 NodeAddr=127.0.0.1 Port={ports[2]}
"""

# submitit asks sacct, which would ask the database.
SACCT = """#!/bin/sh
echo "JobID|State|NodeList"
exec squeue --noheader --array --states=all --format="%i|%T|%N"
"""


def find_program(name: str) -> str | None:
    """The path of a program. Daemons are in /usr/sbin, which is not on every user's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def missing() -> list[str]:
    """The programs that a cluster needs and this machine lacks."""
    return [name for name in PROGRAMS if find_program(name) is None]


def free_ports(number: int) -> list[int]:
    """TCP ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]  # open together, so that ports differ
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


def addresses(host: str) -> set[str]:
    """What a host name resolves to, if anything."""
    try:
        return {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def tail(file: Path, lines: int = 20) -> str:
    """The end of a log, below its name."""
    text = file.read_text(errors="replace") if file.is_file() else "(no such file)"
    return "\n".join([f"--- {file}", *text.splitlines()[-lines:]])


class Cluster:
    """A context manager: on entry the cluster takes jobs, on exit no process and no file of it remains."""

    def __enter__(self) -> "Cluster":
        self.folder = Path(tempfile.mkdtemp(prefix="slurm", dir="/tmp"))  # short: socket paths end at 107 characters
        self.conf = self.folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen] = {}
        try:
            self._configure()
            self.env = self._environment()
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(RuntimeError, subprocess.TimeoutExpired):  # what is not cancelled is killed
                self.run("scancel", f"--user={os.getuid()}", timeout=5)
        finally:
            self._stop()

    def run(self, *command: str, timeout: float = 30) -> str:
        """The standard output of a SLURM command. Without a timeout it would seek a lost controller for minutes."""
        done = subprocess.run(command, env=self.env, timeout=timeout, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}: {done.stderr}")
        return done.stdout

    def state(self, job_id: int | str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, ...; empty if there is no such job."""
        jobs = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i %T")
        return dict(line.split() for line in jobs.splitlines()).get(str(job_id), "")

    def restarts(self, job_id: int | str) -> int:
        """How often a job was requeued."""
        return int(re.search(r"Restarts=(\d+)", self.run("scontrol", "show", "job", str(job_id)))[1])

    def wait(self, job_id: int | str, *states: str, timeout: float = 240) -> str:
        """Waits until a job is in one of the states, and returns which."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job_id)) not in states:
            if time.monotonic() > deadline:
                message = f"job {job_id} is {state or 'unknown'}, not {' or '.join(states)}, after {timeout} s"
                job = self.run("scontrol", "show", "job", str(job_id)) if state else ""
                logs = dict.fromkeys(re.findall(r"^ *Std(?:Out|Err)=(.+)$", job, re.MULTILINE))  # often the same file
                raise TimeoutError("\n".join([message, *(tail(Path(log)) for log in logs)]))
            time.sleep(0.2)
        return state

    def processes(self) -> list[int]:
        """The daemons, jobs and commands of this cluster: what has its slurm.conf in the environment, except us."""
        mark = f"SLURM_CONF={self.conf}".encode()
        pids = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    pids.append(int(folder.name))
        return [pid for pid in pids if pid != os.getpid()]

    def _configure(self) -> None:
        """Writes the files that daemons and jobs read."""
        host = socket.gethostname().split(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        conf = SLURM_CONF.format(host=host, user=user, folder=self.folder, ports=free_ports(1 + len(NODES)))
        if addresses(host) == {"127.0.0.1"}:
            # Closed to the network: the daemons then listen on the host name's address, and look for each other here.
            conf += "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny\n"
        self.conf.write_text(conf)
        # slurmd loads one or the other. It would ask v2 for a delegated group, while v1 unused asks for nothing.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

        for index in range(8):
            (self.folder / f"gpu{index}").symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={self.folder}/gpu[0-7]\n")

        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))

        sacct = self.folder / "bin" / "sacct"
        sacct.parent.mkdir()
        sacct.write_text(SACCT)
        sacct.chmod(0o755)

    def _environment(self) -> dict[str, str]:
        """For daemons, commands and jobs."""
        return {name: value for name, value in os.environ.items() if not FOREIGN.match(name)} | {
            "SLURM_CONF": str(self.conf),
            "PATH": f"{self.folder}/bin:{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",  # node1 and node2 do not resolve
            "GLOO_SOCKET_IFNAME": "lo",
        }

    def _start(self) -> None:
        """Starts the daemons, and waits until both nodes take jobs."""
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed", "log")]
        sock = self.folder / "munge.sock"
        # Forced, as munged refuses a folder that others cannot enter; with an origin, as the host may not resolve.
        self._launch("munged", "munged", "--foreground", "--force", "--origin=127.0.0.1", f"--socket={sock}", *files)
        self._await(sock.exists)
        self._launch("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
        for node in NODES:
            self._launch(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))
        self._await(self._is_idle)

    def _launch(self, name: str, program: str, *flags: str) -> None:
        """Starts a daemon, in a session of its own: Ctrl-C must not end it before its jobs."""
        command = [find_program(program), *flags]
        with open(self.folder / f"{name}.out", "w") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _await(self, condition: Callable[[], bool], timeout: float = 30) -> None:
        """Waits for a step of the start. If it does not come, shows what the daemons said."""
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [name for name, daemon in self.daemons.items() if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                message = f"SLURM is not ready; ended: {', '.join(ended) or 'none'}"
                raise RuntimeError("\n".join([message, *(tail(self.folder / f"{name}.out") for name in self.daemons)]))
            time.sleep(0.1)

    def _is_idle(self) -> bool:
        """Whether both nodes have reported to the controller."""
        try:
            nodes = self.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T", timeout=5)
        except (RuntimeError, subprocess.TimeoutExpired):  # the controller is not there yet
            return False
        return nodes.splitlines() == [f"{name} idle" for name in NODES]

    def _stop(self) -> None:
        """Ends the daemons and all that remains of their jobs, and removes the folder."""
        self._end("slurmctld")  # first, lest it start more jobs
        self._kill_jobs()
        self._end(*NODES, "munged")
        self._kill_jobs()  # a slurmd may have started one meanwhile
        shutil.rmtree(self.folder)

    def _end(self, *names: str) -> None:
        """Ends daemons. A slurmd whose jobs were killed would try for long to tell the controller: 1 s is enough."""
        daemons = [self.daemons.pop(name) for name in names if name in self.daemons]
        for daemon in daemons:
            daemon.terminate()
        for daemon in daemons:
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=1)
            daemon.kill()
            daemon.wait()

    def _kill_jobs(self, timeout: float = 10) -> None:
        """Kills all processes of this cluster except its daemons."""
        deadline = time.monotonic() + timeout
        daemons = {daemon.pid for daemon in self.daemons.values()}
        while pids := set(self.processes()) - daemons:
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of {self.conf} remain: {pids}")
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


@pytest.fixture(scope="session", name="slurm")
def slurm_fixture() -> Iterator[Cluster]:
    """A cluster that all tests share, if imported in conftest.py; each test file that imports it has its own."""
    if names := missing():
        message = f"no SLURM here (missing: {', '.join(names)}); apt-get install slurm-wlm munge to run these tests"
        if os.environ.get("CLMAE_REQUIRE_SLURM") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with Cluster() as cluster:
        yield cluster
