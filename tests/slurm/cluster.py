"""A SLURM cluster of a few virtual nodes on this machine, for as long as a test needs it. One folder holds all of it.

Two kinds. `namespaces` (as root): each node has its own network, host name and processes, so that `localhost` is not
the other node and a node can be lost as by a power cut. `host`: several slurmd side by side, without privileges; names
of nodes do not resolve there. Nothing is pinned or limited: a node claims CPUs and memory, and the kernel shares them.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DAEMONS = ("munged", "mungekey", "munge", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "setpriv")
NODE_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")
_PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

# bash is process 1 of the node: it reaps what jobs leave behind, and all processes of the node end with it.
_BOOT = """
hostname "$1"; mount --make-rprivate /
for file in hosts nsswitch.conf; do touch "/etc/$file"; mount --bind "$2/$file" "/etc/$file"; done
mount -t proc proc /proc; mount -t tmpfs shm /dev/shm
slurmd -D -N "$1" & child=$!
trap 'kill "$child"' TERM
while kill -0 "$child" 2>/dev/null; do wait "$child"; done
"""


def missing_daemons() -> list[str]:
    """Programs that a cluster needs and this machine lacks."""
    return [name for name in DAEMONS if shutil.which(name, path=_PATH) is None]


def namespaces_work() -> bool:
    """True where this user may give a process its own network, host name and mounts."""
    if os.geteuid() or any(shutil.which(name, path=_PATH) is None for name in NODE_TOOLS):
        return False
    probe = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "--ipc",
        "--pid",
        "--fork",
        "ip",
        "link",
        "add",
        "br0",
        "type",
        "bridge",
    ]
    return subprocess.run(probe, capture_output=True, env={"PATH": _PATH}).returncode == 0


_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")


class Cluster:
    """A running cluster with nodes `node1`, `node2`, ...; made by `start_cluster`."""

    def __init__(self, folder: Path, *, nodes: int, namespaces: bool) -> None:
        self.folder = folder
        self.names = [f"node{number + 1}" for number in range(nodes)]
        self.namespaces = namespaces
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))
        }
        self.environment |= {"PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._prefix = f"fs{os.getpid() % 100000}"
        self._net = f"10.77.{os.getpid() % 250}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, *command: str | Path, timeout: float = 60.0, check: bool = True, cwd: Path | None = None) -> str:
        """Output of a command on the host from which jobs are submitted."""
        line = list(map(str, command))
        done = subprocess.run(line, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0 or not check, f"{shlex.join(line)}: {done.stdout}{done.stderr}"
        return done.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """What SLURM knows of a job, by the names of `scontrol show job`."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def wait_for(self, job_id: str, *states: str, log: Path | None = None, seconds: float = 900.0) -> dict[str, str]:
        """Wait until a job is in one of the states.

        Fails after `seconds`, or once the job has ended in another state, with the job's log.
        """
        deadline = time.monotonic() + seconds
        while True:
            job = self.job(job_id)
            state = job["JobState"]
            if state in states:
                return job
            if state in _ENDED or time.monotonic() > deadline:
                text = log.read_text() if log and log.exists() else ""
                raise AssertionError(f"job {job_id} is {state}, not {' or '.join(states)}: {job}\n{text[-8000:]}")
            time.sleep(0.3)

    def lose_node(self, name: str) -> None:
        """A power cut: the network goes first, then every process of the node."""
        assert self.namespaces
        self._ip("-n", f"{self._prefix}-{name}", "link", "set", "eth0", "down")
        self._end(name, signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """Boot a node, or boot it again."""
        (self.folder / "spool" / name).mkdir(parents=True, exist_ok=True)
        if not self.namespaces:
            self._spawn(name, "slurmd", "-D", "-N", name)
            return
        space = f"{self._prefix}-{name}"
        self._ip("-n", space, "link", "set", "eth0", "up")
        own = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
        # Not `ip netns exec`: that mounts a fresh /sys, without the control groups that slurmd looks for.
        boot = ["bash", "-c", _BOOT, "boot", name, str(self.folder)]
        self._spawn(name, "nsenter", f"--net=/run/netns/{space}", *own, *boot)

    def wait_idle(self, *, seconds: float = 60.0) -> None:
        """Wait until every node answers and has nothing to do."""
        deadline = time.monotonic() + seconds
        while True:
            states = self.run("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T", check=False).split()
            if states == ["idle"] * len(self.names):
                return
            assert time.monotonic() < deadline, f"nodes are {states}\n{self._logs()}"
            time.sleep(0.2)

    def start(self) -> None:
        """Start everything; `stop` must follow, whatever happens."""
        folder, port = self.folder, free_port()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        if self.namespaces:
            self._build_network()
        (folder / "slurm.conf").write_text(self._configuration(port))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # used by nothing, yet read at start
        self.run("mungekey", "--create", f"--keyfile={folder / 'key'}")
        options = {
            "key-file": "key",
            "socket": "munge",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "seed",
        }
        self._spawn("munged", "munged", "--foreground", "--force", *(f"--{k}={folder / v}" for k, v in options.items()))
        deadline = time.monotonic() + 30.0
        while subprocess.run(
            ["munge", "-n", "-S", folder / "munge"], env=self.environment, capture_output=True
        ).returncode:
            assert time.monotonic() < deadline, self._logs()
            time.sleep(0.05)
        self._spawn("slurmctld", "slurmctld", "-D", "-i")
        for name in self.names:
            self.start_node(name)
        self.wait_idle()

    def stop(self) -> None:
        """End every daemon and what it started, and take the network away."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", f"--user={getpass.getuser()}", timeout=10.0)
            if not self.namespaces:  # there processes of jobs do not end with their node
                self.wait_idle(seconds=20.0)
        for name in reversed(list(self._daemons)):
            self._end(name, signal.SIGTERM)
        if self.namespaces:
            for name in (*self.names, "switch"):
                self._ip("netns", "delete", f"{self._prefix}-{name}", check=False)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # no daemon outlives a test that was killed
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _end(self, name: str, number: signal.Signals) -> None:
        daemon = self._daemons.pop(name)
        if self.namespaces and name in self.names:
            number = signal.SIGKILL  # to `unshare`, which takes the node's first process and so all of them with it
        daemon.send_signal(number)
        try:
            daemon.wait(10.0)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _build_network(self) -> None:
        """A switch in a namespace of its own, out of reach of the host's firewall, with a line to each node."""
        switch = f"{self._prefix}-switch"
        self._ip("netns", "add", switch)
        self._ip("-n", switch, "link", "add", "br0", "type", "bridge")
        self._ip("-n", switch, "link", "set", "br0", "up")
        hosts = [(socket.gethostname(), f"{self._net}.1")]
        self._plug([], f"{self._prefix}h", f"{self._net}.1", port="p0")
        for number, name in enumerate(self.names, start=1):
            space = f"{self._prefix}-{name}"
            hosts.append((name, f"{self._net}.{10 + number}"))
            self._ip("netns", "add", space)
            self._ip("-n", space, "link", "set", "lo", "up")
            self._plug(["-n", space], "eth0", hosts[-1][1], port=f"p{number}")
        # No name server is in reach of a node, and each look-up would hang for seconds; torch also asks for addresses
        # in their IPv6 form.
        lines = [
            "127.0.0.1 localhost",
            *(f"{prefix}{address} {name}" for name, address in hosts for prefix in ("", "::ffff:")),
        ]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")

    def _plug(self, where: list[str], interface: str, address: str, *, port: str) -> None:
        switch, inside = f"{self._prefix}-switch", ["netns", where[1]] if where else []
        self._ip("link", "add", interface, *inside, "type", "veth", "peer", "name", port, "netns", switch)
        self._ip("-n", switch, "link", "set", port, "master", "br0", "up")
        self._ip(*where, "address", "add", f"{address}/24", "dev", interface)
        self._ip(*where, "link", "set", interface, "up")

    def _ip(self, *arguments: str, check: bool = True) -> None:
        self.run("ip", *arguments, check=check)

    def _configuration(self, port: int) -> str:
        control = f"{self._net}.1" if self.namespaces else "127.0.0.1"
        user, folder = getpass.getuser(), self.folder
        # cred_expire: for so long a requeued job is held back, and for so long a step may take to start.
        settings = f"""\
            ClusterName=test
            SlurmctldHost=localhost({control})
            SlurmctldPort={port}
            SlurmdPort={port + 1}
            SlurmUser={user}
            SlurmdUser={user}
            AuthType=auth/munge
            CredType=cred/munge
            AuthInfo=socket={folder}/munge,cred_expire=15
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/spool/%n
            SlurmctldPidFile={folder}/slurmctld.pid
            SlurmdPidFile={folder}/%n.pid
            SlurmctldLogFile={folder}/slurmctld.log
            SlurmdLogFile={folder}/%n.log
            ProctrackType=proctrack/linuxproc
            TaskPlugin=task/none
            JobAcctGatherType=jobacct_gather/none
            SwitchType=switch/none
            MpiDefault=none
            SelectType=select/cons_tres
            SelectTypeParameters=CR_Core_Memory
            SlurmdParameters=config_overrides
            GresTypes=gpu
            ReturnToService=2
            PropagateResourceLimits=NONE
            MailProg=/bin/true
            SlurmdTimeout=15
            MessageTimeout=20
            KillWait=5
            MinJobAge=3600
            SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
            PreemptType=preempt/partition_prio
            PreemptMode=REQUEUE
            """
        partition = "Nodes=ALL MaxTime=INFINITE DefMemPerCPU=100 State=UP"
        lines = [line.strip() for line in settings.splitlines()]
        for number, name in enumerate(self.names, start=1):
            place = f"NodeHostname={name} NodeAddr={self._net}.{10 + number}"
            if not self.namespaces:
                place = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port + number}"
            shape = "CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN"
            lines.append(f"NodeName={name} {place} {shape}")
        lines.append(f"PartitionName=debug {partition} Default=YES PriorityTier=1 GraceTime=60")
        lines.append(f"PartitionName=urgent {partition} PriorityTier=9")
        return "\n".join(lines) + "\n"

    def _logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in files)


@contextlib.contextmanager
def start_cluster(*, nodes: int = 2, namespaces: bool | None = None) -> Iterator[Cluster]:
    """A cluster that is there inside the `with` block."""
    # Not below pytest's folders: sockets need a short path.
    folder = Path(tempfile.mkdtemp(prefix="fbt-slurm-", dir="/tmp"))
    cluster = Cluster(folder, nodes=nodes, namespaces=namespaces_work() if namespaces is None else namespaces)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port below the range of outgoing connections, free together with the ten after it."""
    for port in range(17000 + os.getpid() % 1000, 32000, 11):
        with contextlib.ExitStack() as stack:
            try:
                for number in range(11):
                    stack.enter_context(socket.create_server(("", port + number)))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")
