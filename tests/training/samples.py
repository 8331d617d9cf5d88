"""Which documents a run was trained on, and which ones it should have been trained on."""

from __future__ import annotations

import json
from pathlib import Path

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.loader import build_train_loader

Sample = tuple[int, int, tuple[str, ...]]


def read_samples_log(run_dir: Path) -> list[Sample]:
    """(step, global row number, keys of its documents) of every trained row in `samples/`, of all ranks, sorted."""
    lines = [line for path in (run_dir / "samples").glob("rank_*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(line) for line in lines]
    return sorted((record["step"], int(row), tuple(keys)) for record in records for row, keys in record["rows"].items())


def expected_samples(config: RunConfig) -> list[Sample]:
    """The same for all steps of a run, as one loader gives them."""
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    samples = []
    for step in range(1, config.train.steps + 1):
        loader.next_step()
        samples += [(step, row, keys) for row, keys in loader.last_documents.items()]
    loader.close()
    assert len(samples) == config.train.steps * config.train.global_batch_size
    return samples
