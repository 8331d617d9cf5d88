"""Every script of benchmarks/ runs, on a tiny model, and prints one JSON object with the rows that it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.runs import ROOT, environment

pytestmark = pytest.mark.training

SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))

RANGES = {
    "decode": {
        "soft / standard, time per token": (0.2, 10.0),
        "fused / standard, prefill": (0.5, 20.0),
        "here / transformers, tokens per second": (0.05, 100.0),
    },
    "pass_cost": {"2 passes / 1 pass, memory": (1.5, 2.5), "3 passes / 1 pass, memory": (2.5, 3.5)},
    "recompute_memory": {
        "none, 3 passes / 1 pass": (2.5, 3.5),
        "full, 3 passes less 2 states / 1 pass": (1.0, 1.3),
    },
    "async_save": {"in the background / at once": (0.0, 1.0)},
    "optimizer_cost": {"AdamW, share of the step": (0.0, 1.0), "NorMuon+Adam, share of the step": (0.0, 1.0)},
    "loader_throughput": {
        "loader, 0 workers / training step": (1.0, 1e6),
        "loader, 2 workers / training step": (1.0, 1e6),
    },
}
"""Rows of each script, and where their medians lie whatever else the machine does."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_script_runs(script: Path) -> None:
    command = [sys.executable, str(script), "--quick", "--repetitions", "2", "--json"]
    done = subprocess.run(command, cwd="/", env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["benchmark"] == script.stem
    assert {"commit", "processor", "cores", "torch", "megatron-core", "deepspeed"} <= result["environment"].keys()
    rows = {row["name"]: row for row in result["rows"]}
    assert all(0 < row["smallest"] <= row["median"] <= row["largest"] for row in rows.values())
    for name, (low, high) in RANGES[script.stem].items():
        assert low < rows[name]["median"] < high, name
