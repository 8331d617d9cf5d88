"""Loss, bits per byte and state changes of a validation, against an implementation written from the equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.errors import DataError
from fbt_megatron.evaluation.validation import EvaluationResult, PassSums, evaluate
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.forward_backward import forward_only
from tests.distributed import run_distributed
from tests.model import reference
from tests.model.reference import Row
from tests.model.toy import TINY, random_rows, tiny_config, whole_tensors

NUM_PASSES = 4
TOKEN_BYTES = torch.arange(TINY.vocab_size) % 5
"""Token ids stand for 0 to 4 bytes."""


def train_batch(rows: list[Row]) -> TrainBatch:
    documents = [row.documents for row in rows]
    positions = [[row.documents[:t].count(document) for t, document in enumerate(row.documents)] for row in rows]
    return TrainBatch(
        tokens=torch.tensor([row.tokens for row in rows]),
        labels=torch.tensor([row.labels for row in rows]),
        positions=torch.tensor(positions),
        document_ids=torch.tensor(documents),
        rows=torch.arange(len(rows)),
    )


def masked(row: Row) -> Row:
    """A row that fills up a batch: nothing of it is trained."""
    return replace(row, labels=[IGNORE_INDEX] * len(row.labels))


def expected_result(model: FBTModel, rows: list[Row]) -> EvaluationResult:
    """In fp64, row by row, from whole matrices."""
    weights = whole_tensors(model)
    losses, deltas = [0.0] * NUM_PASSES, [0.0] * (NUM_PASSES - 1)
    labels = [label for row in rows for label in row.labels if label != IGNORE_INDEX]
    for row in rows:
        before: Tensor | None = None
        for k in range(NUM_PASSES):
            inputs = reference.pass_input(row, before, weights, TINY, "glu", None)
            hidden = reference.stack(inputs, weights, TINY, row.documents, reset=True)
            log_probabilities = (hidden @ weights["embedding.weight"].T).log_softmax(-1)
            for t, label in enumerate(row.labels):
                if label != IGNORE_INDEX:
                    losses[k] -= float(log_probabilities[t, label])
                    if before is not None:
                        deltas[k - 1] += float((hidden[t] - before[t]).norm()) / math.sqrt(TINY.hidden_size)
            before = hidden
    num_bytes = sum(label % 5 for label in labels)
    return EvaluationResult(
        losses=tuple(loss / len(labels) for loss in losses),
        bits_per_byte=tuple(loss / math.log(2.0) / num_bytes for loss in losses),
        hidden_deltas=tuple(delta / len(labels) for delta in deltas),
    )


@pytest.fixture(scope="module")
def model(topology: ParallelTopology) -> FBTModel:
    return build_model(tiny_config(), topology).eval()


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Documents of one token add nothing; the rows have 13, 9 and 4 trained tokens."""
    return random_rows(torch.Generator().manual_seed(3), [14], [3, 1, 6, 1, 3], [1, 1, 2, 2, 1, 1, 2, 1, 2, 1])


def run(model: FBTModel, topology: ParallelTopology, batches: list[TrainBatch], **options: object) -> EvaluationResult:
    settings = {"token_bytes": TOKEN_BYTES, "num_passes": NUM_PASSES} | options
    return evaluate(
        lambda batches: forward_only(model, batches, num_passes=settings["num_passes"], topology=topology),
        [batches],
        token_bytes=settings["token_bytes"],
        group=topology.pg.dp,
    )


def assert_close(found: EvaluationResult, expected: EvaluationResult) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=1e-5)
    assert found.hidden_deltas == pytest.approx(expected.hidden_deltas, rel=1e-4)


def test_against_an_independent_computation(model: FBTModel, topology: ParallelTopology, rows: list[Row]) -> None:
    expected = expected_result(model, rows)
    assert len(set(expected.losses)) == NUM_PASSES
    assert all(delta > 0.01 for delta in expected.hidden_deltas)
    assert_close(run(model, topology, [train_batch(rows[:2]), train_batch(rows[2:])]), expected)
    assert_close(run(model, topology, [train_batch([row]) for row in rows]), expected)


def test_masked_rows_add_nothing(model: FBTModel, topology: ParallelTopology, rows: list[Row]) -> None:
    batches = [train_batch([rows[0], masked(rows[1])]), train_batch([masked(rows[0]), masked(rows[2])])]
    assert_close(run(model, topology, batches), expected_result(model, rows[:1]))


def test_one_pass_has_no_state_change(model: FBTModel, topology: ParallelTopology, rows: list[Row]) -> None:
    result = run(model, topology, [train_batch(rows)], num_passes=1)
    assert len(result.losses) == 1
    assert result.hidden_deltas == ()


def test_without_a_table_of_bytes(model: FBTModel, topology: ParallelTopology, rows: list[Row]) -> None:
    result = run(model, topology, [train_batch(rows)], token_bytes=None)
    assert result.bits_per_byte is None
    assert result.losses == pytest.approx(expected_result(model, rows).losses, rel=1e-5)


def test_validation_leaves_no_gradient_and_draws_nothing(
    model: FBTModel, topology: ParallelTopology, rows: list[Row]
) -> None:
    state = torch.get_rng_state()
    first, second = (run(model, topology, [train_batch(rows)]) for _ in range(2))
    assert first == second
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


# Rank 0 has 5 trained tokens of 10 nats in its two batches, rank 1 has 1 token of 2 nats in one and none in the other.
COUNTS, NATS = {0: (3, 2), 1: (1, 0)}, {0: 10.0, 1: 2.0}


def _pooled(rank: int) -> EvaluationResult:
    def forward(micro_batches: Sequence[TrainBatch]) -> PassSums:
        total = NATS[rank] * sum(batch.num_trained_tokens for batch in micro_batches)
        return PassSums(torch.tensor([total, total / 2]).double(), torch.tensor([total / 4]).double())

    batches = []
    for count in COUNTS[rank]:
        labels = torch.full((1, 4), IGNORE_INDEX)
        labels[0, :count] = 3
        batches.append([TrainBatch(labels, labels, labels, labels, labels[:, 0])])
    return evaluate(forward, batches, token_bytes=torch.tensor([9, 9, 9, 2]), group=dist.group.WORLD)


@pytest.mark.distributed
def test_ranks_with_unequal_data_are_pooled_by_token() -> None:
    nats, tokens = 5 * 10.0 + 1 * 2.0, 6
    for result in run_distributed(_pooled, 2):
        assert result.losses == pytest.approx((nats / tokens, nats / tokens / 2))
        assert result.bits_per_byte == pytest.approx((nats / math.log(2) / 12, nats / math.log(2) / 24))
        assert result.hidden_deltas == pytest.approx((nats / tokens / 4,))
        assert result.losses[0] != pytest.approx((10.0 + 2.0) / 2)


def test_rows_without_a_trained_token_are_an_error(
    model: FBTModel, rows: list[Row], topology: ParallelTopology
) -> None:
    def forward(micro_batches: Sequence[TrainBatch]) -> PassSums:
        return forward_only(model, micro_batches, num_passes=2, topology=topology)

    batches = [[train_batch([masked(row) for row in rows])]]
    with pytest.raises(DataError, match=r"data\.validation: no token of its rows is trained"):
        evaluate(forward, batches, token_bytes=None, group=topology.pg.dp)
