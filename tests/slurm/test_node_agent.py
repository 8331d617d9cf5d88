"""torchrun on one node: which status it has, and what becomes of SIGUSR1."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fbt_megatron.launch import node_agent
from tests.pretrain.runs import environment
from tests.slurm.cluster import free_port

pytestmark = pytest.mark.distributed

WORKER = """
import os, signal, sys, time
rank, folder, ends = int(os.environ["RANK"]), sys.argv[1], sys.argv[2:]
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
with open(f"{folder}/ready{rank}.new", "w") as file:
    file.write(str(os.getppid()))
os.rename(file.name, f"{folder}/ready{rank}")
while ends[rank] in ("138", "told") and not told:
    time.sleep(0.02)
if ends[rank] == "told":
    sys.exit(0)
if ends[rank] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if ends[rank] == "waits":
    time.sleep(300)
sys.exit(int(ends[rank]))
"""


def start(folder: Path, *ends: str, port: int, node: int = 0, nodes: int = 1) -> subprocess.Popen[str]:
    """One of `nodes` nodes, with two processes in all, that end as they are told."""
    folder.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(WORKER)
    step = {"SLURM_STEP_NUM_NODES": str(nodes), "SLURM_NODEID": str(node), "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    agent = [sys.executable, "-P", "-W", "ignore", node_agent.__file__, f"--processes={2 // nodes}"]
    return subprocess.Popen(
        [*agent, str(folder / "worker.py"), str(folder), *ends],
        env=environment(**step, **meeting),
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_ready(folder: Path) -> None:
    wait_until(lambda: all((folder / f"ready{rank}").exists() for rank in (0, 1)), "the processes did not start")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 240.0
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


def listens(port: int) -> bool:
    """True once something takes connections there."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def has_children(pid: int) -> bool:
    """True while a process that the main thread of `pid` started runs, or has ended and was not waited for."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text() != ""


def test_exit_statuses(tmp_path: Path) -> None:
    """Those of the process that failed first, as `torchrun` itself would not give them."""
    cases = {
        "mistake": (("waits", "3"), 3),
        "killed": (("killed", "waits"), 128 + signal.SIGKILL),
        "finished": (("0", "0"), 0),
        "told": (("138", "138"), 138),
    }
    first = free_port()  # and the ten after it
    agents = {}
    for number, (name, (ends, _)) in enumerate(cases.items()):
        agents[name] = start(tmp_path / name, *ends, port=first + number)
    try:
        wait_until_ready(tmp_path / "told")
        agents["told"].send_signal(signal.SIGUSR1)
        errors = {name: agent.communicate(timeout=300.0)[1] for name, agent in agents.items()}
    finally:
        for agent in agents.values():
            agent.terminate()
    assert {name: agent.returncode for name, agent in agents.items()} == {name: case[1] for name, case in cases.items()}
    assert "[rank 1 on " in errors["mistake"]
    assert "ended first, with exit status 3" in errors["mistake"]
    assert "Traceback" not in errors["mistake"]


def test_a_node_that_waits_for_the_others_leaves_when_told(tmp_path: Path) -> None:
    """Its status is that of processes that were told, so that the job is requeued."""
    port = free_port()
    agent = start(tmp_path / "alone", "138", "138", port=port, nodes=2)
    try:
        wait_until(lambda: listens(port), "the node did not begin to wait")
        agent.send_signal(signal.SIGUSR1)
        errors = agent.communicate(timeout=60.0)[1]
    finally:
        agent.kill()
    assert agent.returncode == 138
    assert "told to stop before the processes were started" in errors
    assert not list((tmp_path / "alone").glob("ready*"))


def test_a_node_that_has_finished_keeps_its_status_when_told(tmp_path: Path) -> None:
    """The other node's process is still at work."""
    folder, port = tmp_path / "pair", free_port()
    agents = [start(folder, "0", "told", port=port, node=node, nodes=2) for node in (0, 1)]
    try:
        wait_until_ready(folder)
        finished, working = (
            next(agent for agent in agents if agent.pid == int((folder / f"ready{rank}").read_text()))
            for rank in (0, 1)
        )
        wait_until(lambda: not has_children(finished.pid), "the first process did not end")
        finished.send_signal(signal.SIGUSR1)
        working.send_signal(signal.SIGUSR1)
        for agent in agents:
            agent.communicate(timeout=120.0)
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0]
