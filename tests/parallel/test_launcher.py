"""How a process learns from its environment which others were started with it, and where they meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_fbt
from fbt_megatron.errors import PeerError, TopologyError
from fbt_megatron.parallel.launcher import (
    ALONE,
    Launch,
    count_restarts,
    ephemeral_ports,
    find_launch,
    first_host,
    job_port,
)
from fbt_megatron.parallel.topology import init_distributed

ROOT = Path(__file__).parents[2]

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu7", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "n[08-10]",
    "SLURM_JOB_NODELIST": "n[01-10]",
}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "4711"}
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


def test_torchrun_says_everything():
    launch = find_launch(TORCHRUN)
    assert (launch.world_size, launch.rank, launch.local_rank) == (8, 3, 1)
    assert (launch.launcher, launch.address, launch.port, launch.label) == ("torchrun", "gpu7", 29500, "[rank 3] ")


def test_torchrun_inside_a_step_of_srun_wins():
    assert find_launch(SRUN | TORCHRUN) == find_launch(TORCHRUN)


def test_tasks_of_srun():
    launch = find_launch(SRUN)
    assert (launch.launcher, launch.world_size, launch.rank, launch.local_rank) == ("srun", 8, 5, 1)
    assert launch.address == "n08"
    assert find_launch(without(SRUN, "SLURM_STEP_NODELIST")).address == "n01"
    assert find_launch(without(SRUN, "SLURM_STEP_ID")).rank == 5  # the node list of the step marks it, too


def test_restarts_by_the_launcher():
    assert count_restarts(SRUN) == 0
    assert count_restarts(SRUN | {"SLURM_RESTART_COUNT": "3"}) == 3
    assert count_restarts(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}) == 2
    assert count_restarts({"SLURM_RESTART_COUNT": "3", "TORCHELASTIC_RESTART_COUNT": "2"}) == 5
    with pytest.raises(TopologyError, match="SLURM_RESTART_COUNT='many': must be a whole number"):
        count_restarts({"SLURM_RESTART_COUNT": "many"})


def test_a_chosen_meeting_point_is_kept():
    launch = find_launch(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "12345"})
    assert (launch.address, launch.port) == ("10.0.0.7", 12345)
    no_job = without(SRUN, "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    assert find_launch(no_job | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).port == 1


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"MASTER_ADDR": "left over", "MASTER_PORT": "29500"},
        BATCH_SCRIPT,
        {"SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"},  # a shell of salloc on the login node
        SRUN | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # a shell of salloc on a compute node
        SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # srun --pty bash
    ],
    ids=["nothing", "meeting point only", "batch script", "allocation", "interactive step", "one task"],
)
def test_a_process_on_its_own(environment):
    assert find_launch(environment) == ALONE
    assert ALONE.world_size == 1
    assert ALONE.label == ""


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "has RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        (without(TORCHRUN, "RANK"), "but not RANK"),
        (without(SRUN, "SLURM_NTASKS"), "but not SLURM_NTASKS"),
        (without(SRUN, "SLURM_LOCALID"), "but not SLURM_LOCALID"),
        (BATCH_SCRIPT | {"SLURM_PROCID": "2"}, "has SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID but not SLURM_STEP_ID"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "Set MASTER_ADDR"),
        (without(SRUN, "SLURM_JOB_ID"), "but not SLURM_JOB_ID. Set MASTER_PORT for all tasks"),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE='two': must be a whole number"),
    ],
)
def test_half_a_launcher_is_one_error(environment, message):
    with pytest.raises(TopologyError) as caught:
        find_launch(environment)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpuA,gpuB[001,003],gpuC", "gpuA"),
        ("tux[1,2]", "tux1"),
        ("n[08-10]", "n08"),
        ("c-ab-i[810-811]", "c-ab-i810"),
        ("red,blue", "red"),
        ("x1", "x1"),
        ("rack[2-3]n[01-04,9]-ib,other", "rack2n01-ib"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


@pytest.mark.parametrize("job_id", [1, 16384, 1234567, 2147483647])
def test_port_stays_clear_of_the_hosts_own_connections(job_id):
    for low, high in ((32768, 60999), (15000, 65535), (1024, 40000)):
        port = job_port(job_id, step_id=0, ephemeral=(low, high))
        assert 10000 <= port <= 65535
        assert not low <= port <= high


def test_ports_of_neighbouring_jobs_and_steps_differ():
    ports = {job_port(job, step_id=step, ephemeral=(32768, 60999)) for job in range(700, 900) for step in range(4)}
    assert len(ports) == 800


def test_no_free_port_asks_for_one():
    with pytest.raises(TopologyError, match="Set MASTER_PORT"):
        job_port(1, step_id=0, ephemeral=(1024, 65535))


def test_range_of_the_host(tmp_path):
    file = tmp_path / "range"
    file.write_text("20000\t30000\n")
    assert ephemeral_ports(file) == (20000, 30000)
    assert ephemeral_ports(tmp_path / "none") == (32768, 60999)


def test_what_cannot_be_said_stops_nobody():
    kept = os.dup(2)
    try:
        with Path("/dev/full").open("wb") as full:  # every write to it finds a full disk
            os.dup2(full.fileno(), 2)
        with pytest.raises(OSError, match="No space left"):
            os.write(2, b"unheard")
        find_launch(TORCHRUN).say("unheard")
        ALONE.report(PeerError("unheard"))
    finally:
        os.dup2(kept, 2)
        os.close(kept)


MEET = """
import torch
from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.collectives import sum_across
from fbt_megatron.parallel.topology import build_topology, init_distributed, shutdown_distributed
init_distributed(timeout_seconds=60.0)
topology = build_topology(ParallelConfig(tensor=2))
print("found", topology.rank, topology.local_rank, topology.tp_rank, int(sum_across(torch.tensor(10 + topology.rank))))
shutdown_distributed()
"""


def start(environment: dict[str, str]) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    inherited = without(inherited, *LAUNCHER_VARIABLES) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", MEET]
    return subprocess.Popen(command, env=inherited | environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.distributed
def test_two_processes_meet_with_the_variables_of_srun():
    """`localhost` is the only host name of a node list that every machine can reach."""
    step = SRUN | {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": str(os.getpid())}
    processes = [start(step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in "01"]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.split() for output in outputs] == [["found", rank, rank, rank, "21"] for rank in "01"]


def test_a_taken_port_is_one_error():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        launch = Launch("srun", 2, 0, 0, "localhost", taken.getsockname()[1])
        with pytest.raises(PeerError, match=r"rank 0 of 2 did not meet the others at localhost:\d+: .*MASTER_PORT"):
            init_distributed(launch, timeout_seconds=10.0)


def test_wrong_number_of_tasks_names_the_factors(monkeypatch, capfd):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in (SRUN | {"SLURM_NTASKS": "3", "SLURM_PROCID": "2"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["pretrain_fbt.py", "--config", str(ROOT / "configs/quickstart.yaml")])
    assert pretrain_fbt.main() == 2
    message = capfd.readouterr().err
    assert message.startswith("[rank 2] TopologyError: 3 processes (tensor 1 x pipeline 1 x data 3) do not fit")
