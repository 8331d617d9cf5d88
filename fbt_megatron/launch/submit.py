"""Hands a batch script to SLURM."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from fbt_megatron.errors import SubmissionError
from fbt_megatron.launch.plan import LaunchPlan
from fbt_megatron.launch.script import sbatch_options

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")


def submit(plan: LaunchPlan, script: str) -> str:
    """Submit the job with the script of its plan; returns its number. Raises SubmissionError."""
    # sbatch says nothing where a log cannot be opened: the job ends without a word.
    folder = plan.log_path("").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Options on the command line win over the SBATCH_* variables of the user, those in a script do not.
        command = ["sbatch", "--parsable", *sbatch_options(plan)]
        done = subprocess.run(command, input=script, env=job_environment(os.environ), capture_output=True, text=True)
    except FileNotFoundError:
        raise SubmissionError(
            "sbatch is not on PATH. Run this on a login node of the cluster, or use --dry-run."
        ) from None
    except OSError as error:
        raise SubmissionError(f"job.log_dir: {folder} cannot be made: {error.strerror}. Choose another.") from None
    if done.returncode:
        raise SubmissionError(f"sbatch refused the job (exit status {done.returncode}): {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]  # number;cluster


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment that a job inherits: without the variables of an allocation in which the tool itself may run."""
    return {name: value for name, value in environment.items() if not name.startswith("SLURM_") or name in _KEPT}
