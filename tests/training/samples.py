"""Reads back which documents a run was trained on."""

from __future__ import annotations

import json
from pathlib import Path

Sample = tuple[int, int, tuple[str, ...]]


def read_samples_log(run_dir: Path) -> list[Sample]:
    """(step, global row number, keys of its documents) of every trained row in `samples/`, of all ranks, sorted."""
    lines = [line for path in (run_dir / "samples").glob("rank_*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return sorted((record["step"], int(row), tuple(keys)) for record in records for row, keys in record["rows"].items())
