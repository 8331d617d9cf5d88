"""How this process was started: by torchrun, by srun, or alone. Reads the environment only; imports no torch.

srun sets SLURM_STEP_* in the tasks of a step and nowhere else. The script of `sbatch` and the shell of `salloc` have
SLURM_NTASKS (and the first one SLURM_PROCID=0) as well, but start one process: there the number of tasks is what a
later srun may start.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fbt_megatron.errors import FBTError, TopologyError

PORT_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
_SRUN = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
_STEP_MARKS = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""SLURM numbers its own steps from here on: the batch script, the shell of an interactive allocation."""
_LOWEST_PORT = 10000
_STEP_STRIDE = 7919
"""Keeps the ports of steps of one job apart from those of the following jobs."""


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together."""

    launcher: str
    """`torchrun`, `srun`, or `none` for a process on its own."""
    world_size: int
    rank: int
    local_rank: int
    """Number of this process on its node."""
    address: str
    """Host of rank 0, where the processes find each other; empty for a process on its own."""
    port: int

    @property
    def label(self) -> str:
        """Says which rank speaks; empty where there is only one."""
        return f"[rank {self.rank}] " if self.world_size > 1 else ""

    def say(self, text: str) -> None:
        """Print on standard error with the label at each line, in one write: lines of several ranks stay whole.

        Not through `sys.stderr`, whose lock a thread that stands still may hold.
        """
        rest = "".join(f"{self.label}{line}\n" for line in text.splitlines()).encode(errors="replace")
        with contextlib.suppress(OSError):  # whoever ends the process must get there, heard or not
            while rest:
                rest = rest[os.write(2, rest) :]

    def report(self, error: FBTError) -> None:
        """Print an error without a stack trace."""
        self.say(f"{type(error).__name__}: {error}")


ALONE = Launch("none", world_size=1, rank=0, local_rank=0, address="", port=0)


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Read the launcher's variables. Raises TopologyError where a launcher set only some of them, or no numbers."""
    if any(name in environment for name in _TORCHRUN):
        _require(environment, (*_TORCHRUN, *_RENDEZVOUS), launcher="torchrun")
        rank, world_size, local_rank = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        port = _number(environment, "MASTER_PORT")
        return Launch("torchrun", world_size, rank, local_rank, environment["MASTER_ADDR"], port)
    if _is_srun_task(environment):
        _require(environment, _SRUN, launcher="srun")
        rank, world_size, local_rank = (_number(environment, name) for name in _SRUN)
        if world_size > 1:
            address, port = _srun_address(environment), _srun_port(environment)
            return Launch("srun", world_size, rank, local_rank, address, port)
    return ALONE


def count_restarts(environment: Mapping[str, str]) -> int:
    """How often the launcher has started this job again: SLURM's requeues of it, and torchrun's restarts within.

    Raises TopologyError where a variable holds no number.
    """
    names = [name for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT") if name in environment]
    return sum(_number(environment, name) for name in names)


def first_host(nodelist: str) -> str:
    """The first host of a SLURM node list: `n[08-10],gpu1` is n08, `red,blue` is red."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def job_port(job_id: int, *, step_id: int, ephemeral: tuple[int, int]) -> int:
    """A port that all tasks of a step compute alike, outside the range from which the host serves its own connections.

    `ephemeral` is that range, both ends included. Neighbouring job numbers, which share nodes most often, differ.
    Raises TopologyError where the range leaves no port.
    """
    low, high = ephemeral
    ports = [*range(_LOWEST_PORT, min(low, 65536)), *range(max(high + 1, _LOWEST_PORT), 65536)]
    if not ports:
        raise TopologyError(f"{PORT_RANGE_FILE} leaves no port from {_LOWEST_PORT} on. Set MASTER_PORT for all tasks.")
    return ports[(job_id + step_id * _STEP_STRIDE) % len(ports)]


def _is_srun_task(environment: Mapping[str, str]) -> bool:
    marks = [name for name in _STEP_MARKS if name in environment]
    if not marks:
        if environment.get("SLURM_PROCID", "0") != "0":
            _require(environment, ("SLURM_STEP_ID",), launcher="srun")
        return False
    return _step_id(environment) < _FIRST_SPECIAL_STEP


def _step_id(environment: Mapping[str, str]) -> int:
    name = next((name for name in ("SLURM_STEP_ID", "SLURM_STEPID") if name in environment), None)
    return 0 if name is None else _number(environment, name)


def _srun_address(environment: Mapping[str, str]) -> str:
    nodelist = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    address = environment.get("MASTER_ADDR") or first_host(nodelist)
    if not address:
        raise TopologyError(
            "The environment has srun's variables but neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST to tell the "
            "first host. Set MASTER_ADDR to it for all tasks."
        )
    return address


def _srun_port(environment: Mapping[str, str]) -> int:
    if environment.get("MASTER_PORT"):
        return _number(environment, "MASTER_PORT")
    job = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if name in environment), "SLURM_JOB_ID")
    _require(environment, (job,), launcher="srun", remedy="Set MASTER_PORT for all tasks.")
    return job_port(_number(environment, job), step_id=_step_id(environment), ephemeral=ephemeral_ports())


def ephemeral_ports(path: Path = PORT_RANGE_FILE) -> tuple[int, int]:
    """The range of ports from which this host serves outgoing connections; Linux' default where it cannot be read."""
    try:
        low, high = (int(number) for number in path.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999
    return low, high


def _require(
    environment: Mapping[str, str],
    names: tuple[str, ...],
    *,
    launcher: str,
    remedy: str = "Start all processes with torchrun or srun, or unset them to run one process.",
) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        known = (*_TORCHRUN, *_RENDEZVOUS) if launcher == "torchrun" else (*_SRUN, *_STEP_MARKS)
        present = [name for name in known if name in environment]
        raise TopologyError(f"The environment has {', '.join(present)} but not {', '.join(missing)}. {remedy}")


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment[name]
    if not value.isdecimal():
        raise TopologyError(f"{name}={value!r}: must be a whole number; launchers set it. Unset it to run one process.")
    return int(value)
