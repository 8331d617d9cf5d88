"""Training a small model in one layout, and what is compared afterwards. Every layout gets the same rows.

Legend: `S` tokens of a row, `K` passes of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from fbt_megatron.config.schema import (
    AdamConfig,
    DataConfig,
    FeedbackConfig,
    ModelConfig,
    NorMuonConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    SchedulePhase,
    TrainConfig,
)
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.evaluation.validation import PassSums
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import build_pass_plan
from fbt_megatron.optim import exchange
from fbt_megatron.optim.normuon import normuon_update
from fbt_megatron.optim.optimizer import StepSettings
from fbt_megatron.parallel.logical_tensor import Rect, pieces_of
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.engine import TrainEngine, build_engine
from fbt_megatron.training.forward_backward import forward_backward, forward_only
from tests.model.reference import Row
from tests.model.toy import packed_row

ROWS_PER_STEP, SEQ_LENGTH, STEPS = 4, 10, 20
LENGTHS = ([10], [3, 1, 6], [1, 2, 1, 1, 5], [4, 6], [7, 1, 1, 1], [5, 5])
"""Lengths of the documents of a row, in turn: rows have 9 to 5 trained tokens."""

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=20,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=6,
    vocab_size=150,  # at two tensor-parallel ranks the second one has 22 rows and padding
    seq_length=SEQ_LENGTH,
    sliding_window=4,
    full_attention_every=2,
    init_std=0.2,
)
OPTIMIZER = OptimizerConfig(
    normuon=NorMuonConfig(lr=0.01, weight_decay=0.1), adam=AdamConfig(lr=2e-3, weight_decay=0.1), grad_clip=1.0
)
FEEDBACK = FeedbackConfig(
    jitter=0.1, loss_weight=0.7, prefix_mixin="document", schedule=(SchedulePhase(1.0, {1: 1.0}),)
)
Z_LOSS, SEED = 1e-3, 7
MIXED = (1, 3, 2, 1, 3)

Part = tuple[str, tuple[int, ...], Rect, np.ndarray]
"""Name, whole shape, place and values of a piece that a rank holds."""


@dataclass(frozen=True)
class Layout:
    """TP x PP x DP x ZeRO stage."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    sequence: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-zero{self.zero}{'-sequence' if self.sequence else ''}"


@dataclass(frozen=True)
class Training:
    """What is trained, in whatever layout. `passes` are those of the steps, over and over."""

    passes: tuple[int, ...]
    tied: bool = True
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"passes{''.join(map(str, self.passes))}-{'tied' if self.tied else 'untied'}-{self.precision}"

    def passes_of(self, step: int) -> int:
        """Passes of a step, counted from 0."""
        return self.passes[step % len(self.passes)]


@dataclass
class RankResult:
    """What one rank has seen and holds."""

    losses: list[list[float]] = field(default_factory=list)
    """Cross entropy per token of each pass, for each step."""
    norms: list[float | None] = field(default_factory=list)
    orthogonalized: list[int] = field(default_factory=list)
    """Matrices that this rank orthogonalised, for each step."""
    validation: list[float] = field(default_factory=list)
    """Losses, then state changes, of four passes after the last step."""
    parts: dict[int, dict[str, list[Part]]] = field(default_factory=dict)
    """By number of steps done and kind: `parameter`, `weight` (fp32), and the states of the optimizer."""


def rows_of_step(step: int) -> list[Row]:
    """The global batch of a step; step -1 is that of validation."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        packed_row(
            *(
                torch.randint(0, MODEL.vocab_size, (length,), generator=generator).tolist()
                for length in LENGTHS[(ROWS_PER_STEP * step + index) % len(LENGTHS)]
            )
        )
        for index in range(ROWS_PER_STEP)
    ]


def num_trained(rows: list[Row]) -> int:
    """Labels that count."""
    return sum(label >= 0 for row in rows for label in row.labels)


def micro_batches(step: int, topology: ParallelTopology) -> list[TrainBatch]:
    """This replica's rows of a global batch, one to a micro-batch."""
    rows = rows_of_step(step)
    share = len(rows) // topology.dp_size
    own = range(topology.dp_rank * share, (topology.dp_rank + 1) * share)
    return [batch_of_row(rows[index], number=ROWS_PER_STEP * step + index) for index in own]


def batch_of_row(row: Row, *, number: int) -> TrainBatch:
    """A micro-batch of one row, the `number`-th of the run."""
    positions = [row.documents[:t].count(document) for t, document in enumerate(row.documents)]
    tensors = (torch.tensor([values]) for values in (row.tokens, row.labels, positions, row.documents))
    return TrainBatch(*tensors, rows=torch.tensor([number]))


def noise() -> FeedbackNoise:
    """The draws of all cases."""
    return FeedbackNoise(SEED, FEEDBACK.jitter, FEEDBACK.prefix_mixin)


def run_config(layout: Layout, training: Training) -> RunConfig:
    """The configuration of a case."""
    return RunConfig(
        model=replace(MODEL, tie_embeddings=training.tied),
        feedback=FEEDBACK,
        optimizer=OPTIMIZER,
        parallel=ParallelConfig(
            tensor=layout.tp,
            pipeline=layout.pp,
            sequence=layout.sequence,
            zero_stage=layout.zero,
            precision=training.precision,
        ),
        data=DataConfig(train="unused"),
        train=TrainConfig(seed=SEED, global_batch_size=ROWS_PER_STEP, micro_batch_size=1),
    )


def train_cases(rank: int, cases: list[tuple[Layout, Training]]) -> list[RankResult]:
    """One result per case, of this rank; all cases have this number of ranks."""
    return [train(run_config(layout, training), training, topology) for layout, training, topology in in_layouts(cases)]


def in_layouts(cases: Iterable[tuple[Layout, Training]]) -> Iterator[tuple[Layout, Training, ParallelTopology]]:
    """The cases, which are sorted by layout, with their process groups."""
    for layout, of_layout in groupby(cases, key=lambda case: case[0]):
        # Once per layout: megatron-core's groups keep their threads, and thousands of them would take turns.
        parallel_state.destroy_model_parallel()
        topology = build_topology(run_config(layout, Training((1,))).parallel)
        yield from ((layout, training, topology) for _, training in of_layout)


def train(config: RunConfig, training: Training, topology: ParallelTopology) -> RankResult:
    """`STEPS` steps, with what is compared noted before the first, after the first and after the last."""
    model = build_model(config, topology)
    engine = build_engine(model, parameter_layouts(model, config, topology), config, topology)
    result = RankResult(parts={0: held_parts(model, engine)})
    for step in range(STEPS):
        with counted_updates() as counts:
            train_step(model, engine, training.passes_of(step), step, topology, result)
        result.orthogonalized.append(sum(counts))
        if step in (0, STEPS - 1):
            result.parts[step + 1] = held_parts(model, engine)
    model.eval()
    sums = forward_only(model, micro_batches(-1, topology), num_passes=4, topology=topology)
    result.validation = _validation_means(sums, topology)
    return result


@contextmanager
def counted_updates() -> Iterator[list[int]]:
    """The number of matrices of each call of NorMuon's update on this rank."""
    counts: list[int] = []

    def counting(directions: torch.Tensor, *arguments: Any) -> Any:
        counts.append(len(directions))
        return normuon_update(directions, *arguments)

    exchange.normuon_update = counting
    try:
        yield counts
    finally:
        exchange.normuon_update = normuon_update


def train_step(
    model: FBTModel, engine: TrainEngine, num_passes: int, step: int, topology: ParallelTopology, result: RankResult
) -> None:
    num_tokens = num_trained(rows_of_step(step))
    losses = forward_backward(
        model,
        micro_batches(step, topology),
        build_pass_plan(FEEDBACK, num_passes),
        num_tokens=num_tokens,
        z_loss=Z_LOSS,
        noise=noise(),
        topology=topology,
    )
    normuon, adam = OPTIMIZER.normuon, OPTIMIZER.adam
    settings = StepSettings(normuon.lr, adam.lr, normuon.weight_decay, adam.weight_decay, num_passes > 1)
    result.norms.append(engine.step(settings).grad_norm)
    torch.distributed.all_reduce(losses.cross_entropy, group=topology.pg.dp)
    result.losses.append((losses.cross_entropy / num_tokens).tolist())


def _validation_means(sums: PassSums, topology: ParallelTopology) -> list[float]:
    values = torch.cat([sums.cross_entropy, sums.hidden_delta])
    torch.distributed.all_reduce(values, group=topology.pg.dp)
    return (values / num_trained(rows_of_step(-1))).tolist()


def held_parts(model: FBTModel, engine: TrainEngine) -> dict[str, list[Part]]:
    """Copies of every piece of weights and optimizer state on this rank."""
    parts: dict[str, list[Part]] = {"parameter": [], "weight": []}
    for name, parameter in model.named_parameters():
        add_pieces(parts["parameter"], engine.layouts[name], parameter.detach().float().flatten())
    for fragment, master in engine.master_fragments():
        add_pieces(parts["weight"], fragment.layout, master, start=fragment.start, stop=fragment.stop)
    for state, tensor, pieces in engine.optimizer.state_tensors():
        parts.setdefault(state, []).extend(
            (tensor.name, tensor.shape, place, view.numpy().copy()) for place, view in pieces
        )
    return parts


def add_pieces(parts: list[Part], layout: Any, flat: torch.Tensor, **flat_range: int) -> None:
    """Add copies of the pieces of a flat tensor, or of a range of it, to `parts`."""
    for piece in pieces_of(layout, **flat_range):
        parts.append((piece.tensor.name, piece.tensor.shape, piece.place, piece.view(flat).numpy().copy()))


def assemble(parts_of_ranks: list[list[Part]]) -> dict[str, np.ndarray]:
    """Whole tensors by name; fails where copies are not equal to the bit, or a gap is left."""
    whole: dict[str, np.ndarray] = {}
    for name, shape, place, values in (part for parts in parts_of_ranks for part in parts):
        target = whole.setdefault(name, np.full(shape, np.nan, np.float32)).reshape(-1, shape[-1])
        view = target[place.row : place.row + place.rows, place.col : place.col + place.cols]
        assert bool((np.isnan(view) | (view == values)).all()), f"{name}: copies differ"
        view[...] = values
    assert not [name for name, tensor in whole.items() if np.isnan(tensor).any()]
    return whole


def distance(actual: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b|| in the Frobenius norm; 0 for two zero tensors."""
    difference = float(np.linalg.norm(actual - expected))
    return difference / float(np.linalg.norm(expected)) if difference else 0.0
