"""A short run with a validation, and its export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.config.schema import EvaluationConfig
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.resilience import StopSignal
from tests.data.datasets import write_dataset
from tests.inference.toy import random_prompts
from tests.training.tiny_run import read_records, tiny_run, write_data
from tools import evaluate


class Trained:
    """Two steps on raw bytes with rows of 16 tokens, and the validation line after them."""

    def __init__(self, folder: Path, topology: ParallelTopology) -> None:
        self.run, self.exported = folder / "run", folder / "exported"
        documents = random_prompts(30, 3, 17, 1, 25, 40, seed=8, vocab_size=257)
        self.validation = write_dataset(folder / "validation", [documents])
        config = tiny_run(self.run, write_data(folder / "data"), mix={2: 1.0}, steps=2)
        config = replace(
            config,
            data=replace(config.data, validation=str(self.validation)),
            evaluation=EvaluationConfig(every=2, batches=1, extra_passes=1),
        )
        with open_trainer(config, topology, allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
        self.record = [line for line in read_records(self.run) if line.get("kind") == "validation"][-1]
        assert self.record["step"] == 2
        export_checkpoint(self.run, self.exported, dtype="float32")


def losses_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """What tools/evaluate.py prints with --json."""
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def assert_losses_of_the_run(found: dict[str, Any], record: dict[str, Any]) -> None:
    """That the passes of `losses_of` have the figures of a validation's line in the metrics."""
    for number, one in enumerate(found["modes"], start=1):
        assert one["loss"] == pytest.approx(record[f"val_loss_pass_{number}"], rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(record[f"val_bpb_pass_{number}"], rel=1e-5)
        delta = record.get(f"hidden_delta_pass_{number}")
        assert one["hidden_delta"] == (None if number == 1 else pytest.approx(delta, rel=1e-4))
