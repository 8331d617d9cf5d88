"""Whole jobs on a real SLURM cluster of two nodes: time limits, lost nodes, crashes, mistakes, arrays."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain.runs import pretrain, steps
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import submit

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3000)]

COMPARED = ("step", "tokens", "passes", "loss", "grad_norm", "lr_normuon")


def compared(run_dir: Path) -> list[list[Any]]:
    """What must not depend on how often a run was interrupted."""
    return [[record[key] for key in COMPARED] for record in steps(run_dir)]


def test_a_job_goes_on_after_its_signal(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    """The short one: one process on each node, told once as SLURM does before the time limit."""
    overrides = ["train.run_dir=run", "train.steps=30", "evaluation.every=30"]
    [job] = submit(cluster, tmp_path, config, *overrides, launcher="srun", processes_per_node=1)
    job.wait_for_steps(2)
    cluster.run("scancel", "--batch", "--signal=USR1", job.job_id)
    finished = job.wait("COMPLETED")
    assert finished["Restarts"] == "1"
    assert [record["step"] for record in steps(job.run_dir)] == list(range(1, 31))
    assert job.count("requeued (0 of 2") == 1
    assert job.count("start 2 on") == 1
    assert "resumed from" in job.log.read_text()


FOUR = ("train.steps=50", "evaluation.every=50", "checkpoint.every=10")
"""What the runs on four processes have in common."""


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """The same four processes, started once on this host."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    pretrain(config, run_dir, *FOUR, processes=4, timeout=900.0).check()
    return compared(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_time_limit_and_a_lost_node_change_nothing(
    cluster: Cluster, config: Path, tmp_path: Path, undisturbed: list[list[Any]], launcher: str
) -> None:
    if not cluster.namespaces:
        pytest.skip("only root can take a node's power away: it needs namespaces")
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", *FOUR, launcher=launcher)

    # The time limit itself: training stands still until SLURM's own signal has come.
    job.wait_for_steps(2)
    rank = job.rank(0)
    os.kill(rank, signal.SIGSTOP)
    hours, minutes, _ = cluster.job(job.job_id)["RunTime"].split(":")
    cluster.run("scontrol", "update", f"JobId={job.job_id}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    job.wait_for_line("the time limit is near")
    os.kill(rank, signal.SIGCONT)
    job.wait_for_line("stopped with a checkpoint before the time limit; requeued (0 of 2")
    job.wait("PENDING", "CONFIGURING")
    cluster.run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")

    # A power cut at the second node; the other one stands still, so that training cannot end before it is noticed.
    job.wait_for_line("start 2 on")
    job.wait_for_steps(2)
    os.kill(job.rank(0), signal.SIGSTOP)
    cluster.lose_node("node2")
    job.wait("PENDING", "REQUEUED", "CONFIGURING", "COMPLETING")
    cluster.start_node("node2")
    finished = job.wait("COMPLETED")
    assert finished["Restarts"] == "2"
    assert compared(job.run_dir) == undisturbed

    # Submitted again, it has nothing to do.
    [again] = submit(cluster, tmp_path, config, "train.run_dir=run", *FOUR, launcher=launcher)
    assert again.wait("COMPLETED")["Restarts"] == "0"
    assert again.count("step 50 of 50") == 1
    assert compared(job.run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_crash_is_followed_by_another_start(
    cluster: Cluster, config: Path, tmp_path: Path, undisturbed: list[list[Any]], launcher: str
) -> None:
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", *FOUR, launcher=launcher)
    job.wait_for_steps(12)
    os.kill(job.rank(3), signal.SIGKILL)
    finished = job.wait("COMPLETED")
    assert finished["Restarts"] == "1"
    assert job.count("crashed; requeued (0 of 2") + job.count("crashed; requeued (1 of 2") == 1
    assert compared(job.run_dir) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_mistake_is_not_tried_again(cluster: Cluster, config: Path, tmp_path: Path, launcher: str) -> None:
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", "data.train=absent", launcher=launcher)
    failed = job.wait("FAILED")
    assert (failed["ExitCode"], failed["Restarts"]) == ("3:0", "0")
    assert job.count("DataError: ") == 4  # of each rank
    assert job.count("another start would end in the same way") == 1


@pytest.mark.slow
def test_an_array_is_two_runs(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    overrides = ["train.run_dir=run-{array}", "train.seed={array}", "train.steps=20"]
    jobs = submit(cluster, tmp_path, config, *overrides, launcher="torchrun", processes_per_node=1, array="1-2")
    jobs[1].wait_for_steps(2)
    cluster.run("scancel", "--batch", "--signal=USR1", jobs[1].job_id)
    assert [job.wait("COMPLETED")["Restarts"] for job in jobs] == ["0", "1"]
    runs = [compared(job.run_dir) for job in jobs]
    assert [len(run) for run in runs] == [20, 20]
    assert runs[0] != runs[1]
