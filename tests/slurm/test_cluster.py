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
from tests.training.samples import Sample, read_samples_log

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3000)]

Compared = tuple[list[list[Any]], list[Sample]]
COMPARED = ("step", "tokens", "passes", "loss", "grad_norm", "lr_normuon")


def compared(run_dir: Path) -> Compared:
    """What must not depend on how often a run was interrupted: metrics and samples of every step."""
    return [[record[key] for key in COMPARED] for record in steps(run_dir)], read_samples_log(run_dir)


def test_a_job_goes_on_after_its_signal(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    """The short one: one process on each node, told once as SLURM does before the time limit."""
    overrides = ["train.run_dir=run", "train.steps=30", "evaluation.every=30"]
    [job] = submit(cluster, tmp_path, config, *overrides, launcher="srun", processes_per_node=1)
    job.wait_for_steps(2)
    with job.standing_still():
        cluster.run("scancel", "--batch", "--signal=USR1", job.job_id)
        job.wait_for_line("the time limit is near")
    finished = job.wait("COMPLETED")
    assert finished["Restarts"] == "1"
    assert [record["step"] for record in steps(job.run_dir)] == list(range(1, 31))
    assert job.count("requeued (0 of 2") == 1
    assert job.count("start 2 on") == 1
    assert "resumed from" in job.log.read_text()


FOUR = ("train.steps=50", "evaluation.every=50", "checkpoint.every=10", "logging.samples=true")
"""What the runs on four processes have in common."""


@pytest.fixture(scope="module")
def undisturbed(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    """The same four processes, started once on this host."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    pretrain(config, run_dir, *FOUR, processes=4, timeout=900.0).check()
    metrics, samples = compared(run_dir)
    assert len(metrics) == 50
    assert len(samples) == 50 * 8
    return metrics, samples


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_mistake_is_no_crash(cluster: Cluster, config: Path, tmp_path: Path, launcher: str) -> None:
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", "data.train=absent", launcher=launcher)
    failed = job.wait("FAILED")
    assert (failed["ExitCode"], failed["Restarts"]) == ("3:0", "0")
    assert job.count("DataError: ") == 4  # of each rank
    assert job.count("another start would end in the same way") == 1


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_crash_is_followed_by_another_start(
    cluster: Cluster, config: Path, tmp_path: Path, undisturbed: Compared, launcher: str
) -> None:
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", *FOUR, launcher=launcher)
    job.wait_for_steps(12)
    os.kill(job.rank(3), signal.SIGKILL)
    finished = job.wait("COMPLETED")
    assert finished["Restarts"] == "1"
    assert job.count("crashed; requeued (0 of 2") + job.count("crashed; requeued (1 of 2") == 1
    assert compared(job.run_dir) == undisturbed


@pytest.mark.slow
def test_an_array_is_two_runs(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    overrides = ["train.run_dir=run-{array}", "train.seed={array}", "train.steps=20"]
    jobs = submit(cluster, tmp_path, config, *overrides, launcher="torchrun", processes_per_node=1, array="1-2")
    jobs[1].wait_for_steps(2)
    with jobs[1].standing_still():
        cluster.run("scancel", "--batch", "--signal=USR1", jobs[1].job_id)
        jobs[1].wait_for_line("the time limit is near")
    assert [job.wait("COMPLETED")["Restarts"] for job in jobs] == ["0", "1"]
    runs = [compared(job.run_dir) for job in jobs]
    assert [len(metrics) for metrics, _ in runs] == [20, 20]
    assert runs[0][0] != runs[1][0]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_time_limit_and_a_lost_node_change_nothing(
    cluster: Cluster, config: Path, tmp_path: Path, undisturbed: Compared, launcher: str
) -> None:
    if not cluster.namespaces:
        pytest.skip("only root can take a node's power away: it needs namespaces")
    [job] = submit(cluster, tmp_path, config, "train.run_dir=run", *FOUR, launcher=launcher)

    # The time limit itself: training stands still until SLURM's own signal has come.
    job.wait_for_steps(2)
    with job.standing_still():
        hours, minutes, _ = cluster.job(job.job_id)["RunTime"].split(":")
        cluster.run("scontrol", "update", f"JobId={job.job_id}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
        job.wait_for_line("the time limit is near")
    job.wait_for_line("stopped before the time limit; requeued (0 of 2")
    job.wait("PENDING", "CONFIGURING")
    cluster.run("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=60")

    # A power cut at the second node; the other one stands still, so that training cannot end before it is noticed.
    job.wait_for_line("start 2 on")
    job.wait_for_steps(2)
    with job.standing_still():
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
