"""The training step of the quickstart: its real model, objective and engine on packed rows of random tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.optim.optimizer import StepSettings
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed
from fbt_megatron.training.engine import build_engine
from fbt_megatron.training.forward_backward import forward_backward

_CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
_QUICK = [
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "model.vocab_size=512",
    "model.seq_length=32",
    "model.sliding_window=8",
]


class TrainingStep:
    """One optimizer step, in its two parts; `quickstart` makes it."""

    def __init__(self, config: RunConfig, topology: ParallelTopology) -> None:
        self.config = config
        self.model = build_model(config, topology)
        self.engine = build_engine(self.model, parameter_layouts(self.model, config, topology), config, topology)
        self.batches = _random_batches(config)
        self._topology = topology
        self._noise = FeedbackNoise(config.train.seed, config.feedback.jitter, config.feedback.prefix_mixin)

    @property
    def setting(self) -> str:
        """Sizes, for the head of a report."""
        model, train, parallel = self.config.model, self.config.train, self.config.parallel
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"{parameters:,} parameters, {train.global_batch_size} rows x {model.seq_length} tokens per step, "
            f"micro-batches of {train.micro_batch_size}, {parallel.precision}, ZeRO {parallel.zero_stage}"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.global_batch_size * self.config.model.seq_length

    def with_recompute(self, recompute: str) -> TrainingStep:
        """The same step of a model of its own, with this kind of recomputation."""
        parallel = replace(self.config.parallel, recompute=recompute)
        return TrainingStep(replace(self.config, parallel=parallel), self._topology)

    def run(self, num_passes: int) -> None:
        """The whole step."""
        self.compute_gradients(num_passes, self.batches)
        self.update(num_passes)

    def compute_gradients(self, num_passes: int, batches: list[TrainBatch]) -> None:
        """Forward and backward of all passes over `batches`."""
        forward_backward(
            self.model,
            batches,
            build_pass_plan(self.config.feedback, num_passes),
            num_tokens=sum(batch.num_trained_tokens for batch in batches),
            z_loss=0.0,
            noise=self._noise,
            topology=self._topology,
        )

    def update(self, num_passes: int) -> None:
        """The engine's part: norm, clipping, NorMuon and Adam, new parameters."""
        normuon, adam = self.config.optimizer.normuon, self.config.optimizer.adam
        settings = StepSettings(normuon.lr, adam.lr, normuon.weight_decay, adam.weight_decay, num_passes > 1)
        if self.engine.step(settings).skipped:
            raise RuntimeError("a step was skipped: its time says nothing")


@contextmanager
def quickstart(*, quick: bool, overrides: Sequence[str] = ()) -> Iterator[TrainingStep]:
    """The step of configs/quickstart.yaml with `overrides`, in this process alone; with `quick`, of a tiny model."""
    config = load_config(_CONFIG, [*overrides, *(_QUICK if quick else [])])
    init_distributed()
    try:
        yield TrainingStep(config, build_topology(config.parallel))
    finally:
        shutdown_distributed()


def _random_batches(config: RunConfig) -> list[TrainBatch]:
    """One step's micro-batches; every row holds two documents that meet at a random place."""
    rows, seq_length = config.train.micro_batch_size, config.model.seq_length
    draw = torch.Generator().manual_seed(config.train.seed)
    batches = []
    for first_row in range(0, config.train.global_batch_size, rows):
        stream = torch.randint(0, config.model.vocab_size, (rows, seq_length + 1), generator=draw)
        cuts = torch.randint(1, seq_length, (rows, 1), generator=draw)
        index = torch.arange(seq_length).expand(rows, -1)
        in_second = index >= cuts
        batches.append(
            TrainBatch(
                tokens=stream[:, :-1].contiguous(),
                labels=stream[:, 1:].masked_fill(index == cuts - 1, IGNORE_INDEX),
                positions=torch.where(in_second, index - cuts, index),
                document_ids=in_second.long(),
                rows=torch.arange(first_row, first_row + rows),
            )
        )
    return batches
