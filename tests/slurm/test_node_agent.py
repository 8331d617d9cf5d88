"""torchrun on one node: which status it has, and what becomes of SIGUSR1."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
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
open(f"{folder}/ready{rank}", "w").close()
while ends[rank] == "138" and not told:
    time.sleep(0.02)
if ends[rank] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if ends[rank] == "waits":
    time.sleep(300)
sys.exit(int(ends[rank]))
"""


def start(folder: Path, *ends: str, port: int) -> subprocess.Popen[str]:
    """A node with two processes that end as they are told."""
    folder.mkdir()
    (folder / "worker.py").write_text(WORKER)
    step = {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0"}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    agent = [sys.executable, "-P", "-W", "ignore", node_agent.__file__, "--processes=2"]
    return subprocess.Popen(
        [*agent, str(folder / "worker.py"), str(folder), *ends],
        env=environment(**step, **meeting),
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_ready(folder: Path) -> None:
    deadline = time.monotonic() + 240.0
    while len(list(folder.glob("ready*"))) < 2:
        assert time.monotonic() < deadline, "the processes did not start"
        time.sleep(0.05)


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
