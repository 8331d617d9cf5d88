"""One frozen dataclass per section of a launch file: what is asked of SLURM, and what runs there.

The string under a field is its documentation: `docs/slurm_configuration.md` is generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

ARRAY_PLACEHOLDER = "{array}"
"""Stands for the number of the array task."""

_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_ARRAY_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class JobConfig:
    """What is asked of SLURM."""

    name: str = "fbt"
    """Name of the job."""
    nodes: int = 1
    """Number of nodes."""
    gpus_per_node: int = 8
    """GPUs of each node; 0 trains on CPUs."""
    processes_per_node: int | None = None
    """Processes of each node. `null`: one per GPU."""
    cpus_per_process: int = 8
    """CPUs of each process."""
    memory: str | None = None
    """Memory of each node, e.g. `480G`; `"0"`: all of it. `null`: what the cluster gives by default."""
    exclusive: bool = False
    """Share the nodes with no other job."""
    partition: str | None = None
    """Partition. `null`: the cluster's default."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the nodes must have."""
    time: str | int = "24:00:00"
    """Limit of one start, as SLURM writes it (`90` minutes, `12:00:00`, `2-00:00:00`). The job is requeued at the limit
    until training has ended."""
    array: str | None = None
    """Numbers of an array of jobs, e.g. `0-3` or `1,2,5-7%2`; each is a run of its own. `{array}` in `training` stands
    for the number."""
    log_dir: str = "slurm_logs"
    """Folder of the jobs' logs, one file per job, to which each start appends."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, e.g. `["--reservation=weekend"]`."""

    @property
    def processes(self) -> int:
        """Processes of each node."""
        return self.gpus_per_node if self.processes_per_node is None else self.processes_per_node

    @property
    def world_size(self) -> int:
        """Processes of the whole job."""
        return self.nodes * self.processes

    @property
    def array_numbers(self) -> tuple[int, ...]:
        """Number of each task of the array; empty without one."""
        return () if self.array is None else _array_numbers(self.array) or ()

    def problems(self) -> Iterator[str]:
        for name in ("nodes", "cpus_per_process"):
            if getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)}: must be at least 1."
        if self.gpus_per_node < 0:
            yield f"gpus_per_node={self.gpus_per_node}: must not be negative; 0 trains on CPUs."
        if self.processes_per_node is None and self.gpus_per_node == 0:
            yield "gpus_per_node is 0 and processes_per_node is null: say how many processes a node runs."
        elif self.processes < 1:
            yield f"processes_per_node={self.processes_per_node}: must be at least 1."
        elif 0 < self.gpus_per_node < self.processes:
            yield (
                f"processes_per_node={self.processes_per_node}: must be at most gpus_per_node ({self.gpus_per_node}), "
                "one process per GPU."
            )
        for name in ("name", "memory", "partition", "account", "qos", "constraint", "log_dir"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[^\s\"'\\#%]+", value):
                yield f'{name}="{value}": must be text without spaces, quotes, backslashes, # and %.'
        if time_seconds(self.time) is None:
            yield f"time={self.time}: must be a time limit as SLURM writes it: 90 (minutes), 12:00:00, 2-00:00:00."
        if self.array is not None and not _array_numbers(self.array):
            yield f"array={self.array}: must be an array as SLURM writes it: 0-3, 1,2,5-7%2, 0-8:2."
        for option in self.options:
            if not re.fullmatch(r"--[a-z][^\s\"'\\#]*", option):
                yield f'options="{option}": must be one long option of sbatch without spaces: --reservation=weekend.'


@dataclass(frozen=True)
class ContainerConfig:
    """A container in which the processes run."""

    image: str | None = None
    """Image: for `pyxis` what `srun --container-image` takes, for `apptainer` a file or URL. `null`: no container."""
    runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """Who starts it: the pyxis plugin of srun, or `apptainer exec` in each task."""
    mounts: tuple[str, ...] = ()
    """Folders seen inside, each `/outside:/inside`. This repository, data and runs must have the same path inside as
    outside."""

    def problems(self) -> Iterator[str]:
        if self.image is None and self.mounts:
            yield "mounts are given but image is null: name the image."


@dataclass(frozen=True)
class EnvironmentConfig:
    """What surrounds the processes."""

    modules: tuple[str, ...] = ()
    """Modules to load, in order."""
    setup: tuple[str, ...] = ()
    """Lines of shell that run on the first node before the processes start, after the modules."""
    variables: dict[str, str | int] = field(default_factory=dict)
    """Environment variables, taken literally. They win over what the script sets itself, e.g. `MASTER_ADDR`."""
    python: str | None = None
    """Interpreter, e.g. `/shared/venv/bin/python`. `null`: the one that runs the tool; in a container `python`."""
    container: ContainerConfig = ContainerConfig()
    """Container, if any."""

    def problems(self) -> Iterator[str]:
        for name in self.variables:
            if not _VARIABLE.fullmatch(name):
                yield f'variables: "{name}" is not the name of an environment variable.'


@dataclass(frozen=True)
class TrainingConfig:
    """What runs."""

    config: str = ""
    """Configuration file of the training, e.g. `configs/fbt_1b.yaml`."""
    overrides: tuple[str, ...] = ()
    """Keys that replace those of the file, each `section.key=value`."""
    allow_config_change: tuple[str, ...] = ()
    """Keys that may differ from those of the checkpoint that is resumed."""
    launcher: Literal["torchrun", "srun"] = "torchrun"
    """`torchrun`: srun starts one task per node, which starts the processes; `srun`: one task per process."""

    def problems(self) -> Iterator[str]:
        if not self.config:
            yield "config is empty: name the configuration file of the training."


@dataclass(frozen=True)
class RestartConfig:
    """How a job goes on after its time limit and after a crash."""

    signal_seconds: int = 600
    """Seconds before the time limit at which training is told to save a checkpoint and leave. Longer than the longest
    step, a batch of validation and a checkpoint together; SLURM may be a minute early."""
    max_crashes: int = 3
    """Crashes in a row, without a new checkpoint between them, after which the job is not requeued any more; 0: never
    requeue after a crash. A start that leaves at its time limit counts only where it saved no checkpoint."""

    def problems(self) -> Iterator[str]:
        if not 1 <= self.signal_seconds <= 65535:
            yield f"signal_seconds={self.signal_seconds}: must be between 1 and 65535."
        if self.max_crashes < 0:
            yield f"max_crashes={self.max_crashes}: must not be negative."


@dataclass(frozen=True)
class LaunchConfig:
    """A whole launch file."""

    job: JobConfig = JobConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    training: TrainingConfig = TrainingConfig()
    restarts: RestartConfig = RestartConfig()


def time_seconds(time: str | int) -> int | None:
    """Seconds of a time limit as SLURM writes it, or None where it is none."""
    found = _TIME.fullmatch(str(time))
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = parts + [0] * (3 - len(parts))  # days-hours[:minutes[:seconds]]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, minutes, seconds = 0, parts[0], parts[1] if len(parts) == 2 else 0  # minutes[:seconds]
    total = ((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    return total or None


def _array_numbers(text: str) -> tuple[int, ...] | None:
    """The numbers that an array has, or None where `text` is no array."""
    ranges, _, most = text.partition("%")
    if "%" in text and not re.fullmatch(r"[1-9]\d*", most):
        return None
    numbers: set[int] = set()
    for part in ranges.split(","):
        found = _ARRAY_RANGE.fullmatch(part)
        if found is None:
            return None
        first, last, stride = found.groups()
        numbers.update(range(int(first), int(last or first) + 1, int(stride or 1)))
    return tuple(sorted(numbers)) or None
