"""Jobs of the tool on the cluster of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.pretrain.runs import ROOT
from tests.slurm.cluster import Cluster


@dataclass
class Submitted:
    """A job of the tool."""

    cluster: Cluster
    job_id: str
    run_dir: Path
    log: Path

    def wait(self, *states: str, seconds: float = 900.0) -> dict[str, str]:
        """Wait until the job is in one of the states."""
        return self.cluster.wait_for(self.job_id, *states, log=self.log, seconds=seconds)

    def wait_for_line(self, text: str, *, count: int = 1, seconds: float = 900.0) -> None:
        """Wait until the log has so many lines that contain a text."""
        deadline = time.monotonic() + seconds
        while sum(text in line for line in self._lines()) < count:
            assert time.monotonic() < deadline, f"no {text!r} in\n" + "\n".join(self._lines()[-80:])
            time.sleep(0.1)

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many more steps of the run have been trained."""
        self.wait_for_line("| loss ", count=self.count("| loss ") + count)

    def rank(self, number: int) -> int:
        """Process of a rank, as this host numbers it."""
        names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID") if "_" in self.job_id else ("SLURM_JOB_ID",)
        job = dict(zip(names, self.job_id.split("_"), strict=True))
        job["SLURM_CONF"] = self.cluster.environment["SLURM_CONF"]
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text().split("\0")
                entries = (folder / "environ").read_text().split("\0")
            except (OSError, UnicodeDecodeError):
                continue  # gone meanwhile, or another user's
            environment = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            is_training = words[0] == sys.executable and "--config" in words and "-P" not in words
            rank = environment.get("RANK", environment.get("SLURM_PROCID"))
            if is_training and rank == str(number) and job.items() <= environment.items():
                return int(folder.name)
        raise AssertionError(f"no process of rank {number}")

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Training waits for rank 0 meanwhile."""
        process = self.rank(0)
        os.kill(process, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def count(self, text: str) -> int:
        """Lines of the log that contain a text."""
        return sum(text in line for line in self._lines())


def submit(
    cluster: Cluster,
    folder: Path,
    config: Path,
    *overrides: str,
    launcher: str,
    python: str = sys.executable,
    **job: Any,
) -> list[Submitted]:
    """Submit a training on 2 nodes x 2 processes; one entry per task of an array."""
    namespaces = cluster.namespaces
    launch = {
        "job": {"nodes": 2, "gpus_per_node": 0, "processes_per_node": 2, "cpus_per_process": 1, "time": 60} | job,
        "environment": {
            "python": python,
            # Without namespaces the names of nodes do not resolve, and all of them are this host.
            "variables": {"OMP_NUM_THREADS": 1} | ({} if namespaces else {"MASTER_ADDR": "127.0.0.1"}),
        },
        "training": {"config": str(config), "launcher": launcher, "overrides": list(overrides)},
        "restarts": {"signal_seconds": 10, "max_crashes": 2},
    }
    path = folder / "launch.yaml"
    path.write_text(yaml.safe_dump(launch))
    shown = cluster.run(sys.executable, ROOT / "tools" / "launch_slurm.py", path, "--json", cwd=folder)
    found = json.loads(shown)
    numbers = [log.rpartition("_")[2].removesuffix(".log") for log in found["logs"]]
    ids = [f"{found['job_id']}_{number}" for number in numbers] if "array" in job else [found["job_id"]]
    runs = zip(ids, found["run_dirs"], found["logs"], strict=True)
    return [Submitted(cluster, job_id, folder / run_dir, Path(log)) for job_id, run_dir, log in runs]
