"""What a launch file amounts to, checked before anything is submitted: the runs it starts and where they go."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from fbt_megatron.config.document import read_document, read_text
from fbt_megatron.config.loader import load_config
from fbt_megatron.config.validation import section_problems, validate_world_size
from fbt_megatron.errors import ConfigError, TopologyError
from fbt_megatron.launch.schema import ARRAY_PLACEHOLDER, LaunchConfig, time_seconds

_REPOSITORY = Path(__file__).parents[2]
_OWN_OPTIONS = re.compile(
    r"--(array|chdir|cpus-per-task|export|gpus-per-node|job-name|no-requeue|nodes|ntasks|ntasks-per-node|open-mode|output"
    r"|requeue|signal|time|wait)(=|$)"
)
"""Options of sbatch that the script sets, or that would undo what it relies on."""


@dataclass(frozen=True)
class LaunchPlan:
    """A launch file whose trainings have been read and checked."""

    source: str
    """The launch file."""
    config: LaunchConfig
    workdir: Path
    """Folder in which the job runs; relative paths of the training start there."""
    run_dirs: tuple[str, ...]
    """Run directory of each task of the array, or the only one."""
    repository: Path = _REPOSITORY
    """Folder of pretrain_fbt.py."""

    @property
    def python(self) -> str:
        """The interpreter."""
        environment = self.config.environment
        outside = sys.executable if environment.container.image is None else "python"
        return environment.python or outside

    @property
    def tasks_per_node(self) -> int:
        """Tasks that srun starts on a node."""
        return 1 if self.config.training.launcher == "torchrun" else self.config.job.processes

    @property
    def cpus_per_task(self) -> int:
        """CPUs of each of these tasks."""
        return self.config.job.cpus_per_process * self.config.job.processes // self.tasks_per_node

    def log_path(self, job: str) -> Path:
        """Log of the job with this number."""
        return self.workdir / self.config.job.log_dir / f"{self.config.job.name}_{job}.log"


def plan_launch(path: str | Path, overrides: list[str] | None = None, *, workdir: Path) -> LaunchPlan:
    """Read a launch file and the configuration of every training that it starts.

    Raises ConfigError for mistakes in either, TopologyError where the processes do not fit the training's layout.
    """
    source = str(path)
    config = read_document(
        LaunchConfig, read_text(Path(path)), source=source, overrides=overrides, check=_launch_problems
    )
    numbers = config.job.array_numbers or (None,)
    run_dirs = tuple(_check_training(config, number, workdir) for number in numbers)
    twice = [run_dir for run_dir, count in Counter(run_dirs).items() if count > 1]
    if twice:
        rule = f"{twice[0]} is the run directory of more than one task of job.array={config.job.array}"
        remedy = f"Put {ARRAY_PLACEHOLDER} into it, e.g. train.run_dir=runs/sweep-{ARRAY_PLACEHOLDER}"
        raise ConfigError(source, [f"training.overrides: {rule}. {remedy}."])
    return LaunchPlan(source, config, workdir, run_dirs)


def _check_training(config: LaunchConfig, number: int | None, workdir: Path) -> str:
    """Check the training of one task; returns its run directory."""
    training, job = config.training, config.job
    path, *overrides = (_fill(text, number) for text in (training.config, *training.overrides))
    run = load_config(workdir / path, overrides)
    try:
        validate_world_size(run, job.world_size)
    except TopologyError as error:
        raise TopologyError(f"job.nodes={job.nodes} with {job.processes} processes each: {error}") from None
    return run.train.run_dir


def _fill(text: str, number: int | None) -> str:
    return text if number is None else text.replace(ARRAY_PLACEHOLDER, str(number))


def _launch_problems(config: LaunchConfig, *, unread: frozenset[str]) -> list[str]:
    """Broken rules of a launch file; those between sections only where each section is sound."""
    problems: list[str] = []
    for section in fields(config):
        problems += section_problems(getattr(config, section.name), key=section.name, unread=unread)
    return problems if problems or unread else list(_rules_between_sections(config))


def _rules_between_sections(config: LaunchConfig) -> Iterator[str]:
    job, training, lead = config.job, config.training, config.restarts.signal_seconds
    limit = time_seconds(job.time) or 0
    if lead >= limit:
        yield f"restarts.signal_seconds={lead}: must be less than job.time ({limit} s), or training gets nowhere."
    for option in job.options:
        if _OWN_OPTIONS.match(option):
            yield f"job.options: {option} is the script's own, or would undo what it relies on. Use keys of this file."
    if not job.array_numbers and any(ARRAY_PLACEHOLDER in text for text in (training.config, *training.overrides)):
        yield f"training: {ARRAY_PLACEHOLDER} stands for the number of an array task, but job.array is null."
