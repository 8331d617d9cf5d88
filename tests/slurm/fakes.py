"""Stand-ins for SLURM's commands that note how they were called, to run batch scripts without a cluster."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fbt_megatron.launch.plan import LaunchPlan, plan_launch
from fbt_megatron.launch.script import render_script
from tests.pretrain.runs import TINY

_COMMANDS = {
    # Refuses what srun refuses, then does what the test says the step does.
    "srun": """
        printf '%s\\n' "$@" >"$FAKE/srun.arguments"; env >"$FAKE/srun.environment"
        [ -z "$SLURM_CPUS_PER_TASK" ] || [ -z "$SLURM_TRES_PER_TASK" ] ||
            { echo 'srun: fatal: SLURM_CPUS_PER_TASK and SLURM_TRES_PER_TASK disagree' >&2; exit 1; }
        [ -z "$SLURM_MEM_PER_CPU" ] || [ -z "$SLURM_MEM_PER_NODE" ] ||
            { echo 'srun: fatal: SLURM_MEM_PER_CPU and SLURM_MEM_PER_NODE are mutually exclusive' >&2; exit 1; }
        eval "$STEP"
    """,
    "scontrol": """
        case "$*" in
            "--oneliner show job"*) echo "JobId=$4 PreemptEligibleTime=2026-11-29 PreemptTime=${PREEMPTED-None}" ;;
            show*) printf '%s\\n' "$3" >"$FAKE/hostnames.argument"; printf '%s\\n' node7 node8 ;;
            requeue*) echo "$2" >>"$FAKE/requeued" ;;
        esac
    """,
    # The number of an array is that of its last task as well: asked for it, squeue shows all tasks.
    "squeue": """
        echo "${STATE-RUNNING}"
        [ "$*" != "--noheader --jobs=$SLURM_ARRAY_JOB_ID --format=%T" ] || echo PENDING
    """,
    "sbatch": """
        printf '%s\\n' "$@" >"$FAKE/sbatch.arguments"; env >"$FAKE/sbatch.environment"; cat >"$FAKE/sbatch.script"
        [ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }
        echo '4711;cluster'
    """,
    "apptainer": """printf '%s\\n' "$@" >"$FAKE/apptainer.arguments" """,
}


class FakeSlurm:
    """A folder with the commands, and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        for name, text in _COMMANDS.items():
            path = folder / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)

    def environment(self, **variables: str | int) -> dict[str, str]:
        """The environment of a job, or of a user for sbatch."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return inherited | {"PATH": path, "FAKE": str(self.folder)} | {k: str(v) for k, v in variables.items()}

    def start(self, script: str, *, step: str = "exit 0", **variables: str | int) -> Job:
        """Run a batch script whose step is the shell text `step`."""
        job = {"SLURM_JOB_ID": 4711, "SLURM_JOB_NODELIST": "node[7-8]", "STEP": step} | variables
        process = subprocess.Popen(
            ["bash", "-c", script],
            env=self.environment(**job),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Job(self, process)

    def run(self, script: str, **options: Any) -> Job:
        """The same, to its end."""
        job = self.start(script, **options)
        job.finish()
        return job

    def lines(self, name: str) -> list[str]:
        """What a command noted; empty where it was not called."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def noted_environment(self, command: str = "srun") -> dict[str, str]:
        """The environment in which a command was called."""
        return dict(line.split("=", 1) for line in self.lines(f"{command}.environment") if "=" in line)

    def wait_for_file(self, name: str) -> None:
        """Wait until the step has written a file."""
        deadline = time.monotonic() + 60.0
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.01)


@dataclass
class Job:
    """A batch script at work."""

    slurm: FakeSlurm
    process: subprocess.Popen[str]
    output: str = ""

    def finish(self) -> Job:
        """Wait for the end."""
        self.output = self.process.communicate(timeout=60.0)[0]
        return self

    @property
    def status(self) -> int:
        """Exit status of the script."""
        return self.process.returncode

    @property
    def requeued(self) -> list[str]:
        """Jobs that were requeued, once for each time."""
        return self.slurm.lines("requeued")


def write_launch(folder: Path, **changes: dict[str, Any]) -> Path:
    """A launch file of 2 nodes x 2 processes without GPUs, with some keys replaced; its training is the tiny one."""
    training = {section: dict(values) for section, values in TINY.items()}
    training["data"] = {"train": "shards/train", "streams": 8}
    training["train"] |= {"run_dir": "runs/tiny"}
    (folder / "train.yaml").write_text(yaml.safe_dump(training))
    launch: dict[str, dict[str, Any]] = {
        "job": {"nodes": 2, "gpus_per_node": 0, "processes_per_node": 2, "cpus_per_process": 3, "time": 30},
        "environment": {},
        "training": {"config": "train.yaml", "launcher": "srun"},
        "restarts": {"signal_seconds": 60, "max_crashes": 2},
    }
    for section, values in changes.items():
        launch[section] |= values
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(launch))
    return path


def plan_in(folder: Path, **changes: dict[str, Any]) -> LaunchPlan:
    """The plan of such a launch file."""
    return plan_launch(write_launch(folder, **changes), workdir=folder)


def script_in(folder: Path, **changes: dict[str, Any]) -> str:
    """Its batch script, started in that folder as sbatch would."""
    return f"cd {folder}\n{render_script(plan_in(folder, **changes))}"
