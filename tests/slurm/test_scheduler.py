"""The batch script under a real SLURM, with a small program in the place of the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from fbt_megatron.parallel.launcher import first_host
from tests.slurm.cluster import Cluster
from tests.slurm.fakes import write_launch
from tests.slurm.jobs import Submitted, submit

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

WAITING = """#!/bin/bash
# Waits for a signal in the first start, and ends well in the second.
trap 'echo "told to stop"; exit 143' TERM
trap 'echo "told of the time limit"; exit 138' USR1
echo "CPUs of the task: $SLURM_CPUS_PER_TASK"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
echo waiting
while :; do sleep 0.1; done
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    """Stands for the interpreter: what it would run are its arguments."""
    path = tmp_path / "program"
    path.write_text(WAITING)
    path.chmod(0o755)
    return str(path)


def start(cluster: Cluster, folder: Path, program: str, *overrides: str, **job: object) -> list[Submitted]:
    write_launch(folder)
    return submit(cluster, folder, folder / "train.yaml", *overrides, launcher="srun", python=program, **job)


def test_the_step_gets_the_cpus_of_its_options(cluster: Cluster, tmp_path: Path, program: str, monkeypatch) -> None:
    """As from inside another allocation: what that one exports reaches neither srun nor the tasks."""
    outer = {"SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu:1", "SLURM_NTASKS": "7"}
    for name, value in outer.items():
        monkeypatch.setitem(cluster.environment, name, value)
    [job] = start(cluster, tmp_path, program, cpus_per_process=2)
    job.wait_for_line("CPUs of the task: 2", count=4)
    cluster.run("scancel", job.job_id)
    job.wait("CANCELLED")


def test_a_cancelled_job_stays_cancelled(cluster: Cluster, tmp_path: Path, program: str) -> None:
    [job] = start(cluster, tmp_path, program)
    job.wait_for_line("waiting", count=4)
    cluster.run("scancel", job.job_id)
    assert job.wait("CANCELLED")["Restarts"] == "0"


@pytest.mark.slow
def test_a_preempted_job_comes_back(cluster: Cluster, tmp_path: Path, program: str) -> None:
    [job] = start(cluster, tmp_path, program, exclusive=True)
    job.wait_for_line("waiting", count=4)
    urgent = cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true", cwd=tmp_path
    )
    job.wait_for_line("preempted; requeued")
    cluster.wait_for(urgent.strip(), "COMPLETED")
    assert job.wait("COMPLETED")["Restarts"] == "1"


def test_tasks_of_an_array_are_requeued_for_themselves(cluster: Cluster, tmp_path: Path, program: str) -> None:
    """The last task has the number of the array as well."""
    jobs = start(cluster, tmp_path, program, "train.run_dir=runs/{array}", array="1-3", processes_per_node=1)
    for job in jobs:
        job.wait_for_line("waiting", count=2)
    for job in jobs[1:]:
        cluster.run("scancel", "--batch", "--signal=USR1", job.job_id)
    for job in jobs[1:]:
        assert job.wait("COMPLETED")["Restarts"] == "1"
        assert job.count("told of the time limit") == 2
    first = cluster.job(jobs[0].job_id)
    assert (first["JobState"], first["Restarts"]) == ("RUNNING", "0")
    cluster.run("scancel", jobs[0].job_id)
    jobs[0].wait("CANCELLED")


@pytest.mark.slow
def test_the_time_limit_of_the_scheduler(cluster: Cluster, tmp_path: Path, program: str) -> None:
    [job] = start(cluster, tmp_path, program, time=1)
    assert job.wait("COMPLETED")["Restarts"] == "1"
    assert job.count("told of the time limit") == 4
    assert job.count("the time limit is near") == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["node1", "node2"])
def test_a_lost_node_brings_the_job_back(cluster: Cluster, tmp_path: Path, program: str, lost: str) -> None:
    """The first node takes the script with it."""
    if not cluster.namespaces:
        pytest.skip("only root can take a node's power away: it needs namespaces")
    [job] = start(cluster, tmp_path, program)
    job.wait_for_line("waiting", count=4)
    cluster.lose_node(lost)
    job.wait("PENDING", "REQUEUED", "CONFIGURING", "COMPLETING")
    cluster.start_node(lost)
    assert job.wait("COMPLETED")["Restarts"] == "1"
    assert job.count("training has ended") == 1


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("gpuA,gpuB[001,003],gpuC", ["gpuA", "gpuB001", "gpuB003", "gpuC"]),
        ("tux[1,2]", ["tux1", "tux2"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("c-ab-i[810-811]", ["c-ab-i810", "c-ab-i811"]),
        ("red,blue", ["red", "blue"]),
        ("x1", ["x1"]),
    ],
)
def test_node_lists_as_the_script_and_the_launcher_read_them(cluster: Cluster, nodelist: str, hosts: list[str]) -> None:
    assert cluster.run("scontrol", "show", "hostnames", nodelist).split() == hosts
    assert first_host(nodelist) == hosts[0]
