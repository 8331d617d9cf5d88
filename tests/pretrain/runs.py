"""Runs pretrain_fbt.py as a user does, in processes of its own, on a model of a few thousand parameters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent

TIMES = (
    "step_seconds",
    "tokens_per_second",
    "data_seconds",
    "slowest_rank",
    "slowest_rank_ratio",
    "starts",
    "restarts",
)

TINY: dict[str, Any] = {
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 8,
        "vocab_size": 257,
        "seq_length": 64,
        "sliding_window": 16,
        "full_attention_every": 2,
    },
    "feedback": {"schedule": [{"until": 0.3, "mix": {1: 1.0}}, {"until": 1.0, "mix": {1: 0.2, 2: 0.5, 3: 0.3}}]},
    "lr_schedule": {"warmup_steps": 3},
    "parallel": {"precision": "fp32", "zero_stage": 1},
    "data": {"streams": 8},
    "train": {"steps": 20, "global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
    "checkpoint": {"every": 10},
    "evaluation": {"every": 10, "batches": 2, "extra_passes": 1},
    "logging": {"console_every": 1, "tensorboard": False},
}


@dataclass(frozen=True)
class Outcome:
    """What a finished command left."""

    status: int
    output: str

    def check(self, status: int = 0) -> Outcome:
        """This outcome, if its exit status is the one expected."""
        assert self.status == status, f"exit status {self.status}, expected {status}:\n{self.output[-6000:]}"
        return self


def write_config(path: Path, data: Path, changes: dict[str, dict[str, Any]] | None = None) -> Path:
    """The tiny configuration with some keys replaced, as a file."""
    config = {section: dict(values) for section, values in TINY.items()}
    config["data"] |= {"train": str(data / "train"), "validation": str(data / "validation")}
    for section, values in (changes or {}).items():
        config.setdefault(section, {}).update(values)
    path.write_text(yaml.safe_dump(config))
    return path


def environment(**changes: str) -> dict[str, str]:
    """A user's environment with one thread per process, and none of a launcher's variables."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    return inherited | {"OMP_NUM_THREADS": "1"} | changes


def command(config: Path, *overrides: str, processes: int = 1) -> list[str]:
    """The command line of a run; more than one process through torchrun."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, str(ROOT / "pretrain_fbt.py"), "--config", str(config), *overrides]


def pretrain(config: Path, run_dir: Path, *overrides: str, processes: int = 1, timeout: float = 200.0) -> Outcome:
    """Run to the end."""
    line = command(config, f"train.run_dir={run_dir}", *overrides, processes=processes)
    done = subprocess.run(
        line, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    return Outcome(done.returncode, done.stdout)


def pretrain_and_signal(config: Path, run_dir: Path, *overrides: str, when: str, number: signal.Signals) -> Outcome:
    """Run until a line of the output contains `when`, then send a signal and wait for the end."""
    process = subprocess.Popen(
        command(config, f"train.run_dir={run_dir}", *overrides),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines, deadline = [], time.monotonic() + 120.0
    for line in process.stdout:
        lines.append(line)
        if when in line:
            process.send_signal(number)
            break
        assert time.monotonic() < deadline, "".join(lines)
    rest, _ = process.communicate(timeout=120.0)
    return Outcome(process.returncode, "".join(lines) + rest)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of `metrics.jsonl` without what depends on the machine and on how often it started; strict JSON."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line, parse_constant=_refuse) for line in lines]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in parsed]


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """The optimizer steps of `metrics.jsonl`."""
    return [record for record in records(run_dir) if "kind" not in record]


def _refuse(constant: str) -> None:
    raise AssertionError(f"metrics.jsonl holds {constant}, which is not JSON")
