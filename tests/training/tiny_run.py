"""Whole runs in this process: a model of a few thousand parameters on random documents."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from torch import Tensor

from fbt_megatron.config.schema import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    FeedbackConfig,
    LoggingConfig,
    LRScheduleConfig,
    ModelConfig,
    ParallelConfig,
    ResilienceConfig,
    RunConfig,
    SchedulePhase,
    TrainConfig,
)
from fbt_megatron.training.trainer import Trainer
from tests.data.datasets import write_dataset

SEQ_LENGTH, GLOBAL_BATCH = 16, 8
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=2,
    num_query_groups=2,
    head_dim=8,
    vocab_size=257,
    seq_length=SEQ_LENGTH,
    init_std=0.2,
)


def write_data(folder: Path) -> Path:
    """60 documents of 1 to 40 tokens."""
    draw = random.Random(5)
    documents = [[draw.randrange(256) for _ in range(draw.randint(0, 39))] + [256] for _ in range(60)]
    return write_dataset(folder, [documents[:30], documents[30:]])


def tiny_run(
    folder: Path,
    data: Path,
    *,
    mix: dict[int, float] | None = None,
    steps: int = 10,
    micro_batch_size: int = 2,
    zero_stage: int = 1,
    precision: str = "fp32",
    pipeline: int = 1,
    max_consecutive_skips: int = 10,
    **feedback: Any,
) -> RunConfig:
    """A run in `folder` without validation; its steps all have the pass counts of `mix` (default: one pass)."""
    return RunConfig(
        model=MODEL,
        feedback=FeedbackConfig(schedule=(SchedulePhase(1.0, mix or {1: 1.0}),), **feedback),
        lr_schedule=LRScheduleConfig(warmup_steps=4),
        parallel=ParallelConfig(zero_stage=zero_stage, precision=precision, pipeline=pipeline),
        data=DataConfig(train=str(data), streams=4),
        train=TrainConfig(
            steps=steps, global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size, run_dir=str(folder)
        ),
        checkpoint=CheckpointConfig(every=100),
        evaluation=EvaluationConfig(every=100, batches=1),
        logging=LoggingConfig(tensorboard=False),
        resilience=ResilienceConfig(max_consecutive_skips=max_consecutive_skips),
    )


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of everything that a step may change on this rank: parameters, fp32 weights, optimizer state."""
    engine = trainer.engine
    state = {f"parameter {name}": parameter for name, parameter in trainer.model.named_parameters()}
    for fragment, master in engine.master_fragments():
        state[f"master {fragment.layout.name} {fragment.start}"] = master
    for name, tensor, pieces in engine.optimizer.state_tensors():
        state |= {f"{name} {tensor.name} {place}": view for place, view in pieces}
    return {name: value.detach().clone() for name, value in state.items()}


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
