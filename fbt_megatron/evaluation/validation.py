"""Validation: loss and bits per byte of every pass, and how far the top state still moves from pass to pass.

Passes beyond the trained depth show whether the recurrence is stable: the losses stay level and the deltas small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.errors import DataError
from fbt_megatron.parallel.collectives import sum_across


@dataclass(frozen=True)
class PassSums:
    """Sums over the trained tokens of some rows, per pass (K passes); fp64."""

    cross_entropy: Tensor
    """[K], in nats."""
    hidden_delta: Tensor
    """[K - 1], `||h^(k) - h^(k-1)||_2 / sqrt(H)` for k = 2..K."""


@dataclass(frozen=True)
class EvaluationResult:
    """Means over the trained tokens of all ranks; entry k - 1 belongs to pass k."""

    losses: tuple[float, ...]
    """Cross entropy per token, in nats."""
    bits_per_byte: tuple[float, ...] | None
    """Cross entropy in bits per byte of text; None where the data set does not know the bytes of its tokens."""
    hidden_deltas: tuple[float, ...]
    """K - 1 values, from pass 2 on: mean of `||h^(k) - h^(k-1)||_2 / sqrt(H)`."""


def evaluate(
    forward: Callable[[Sequence[TrainBatch]], PassSums],
    batches: Iterable[Sequence[TrainBatch]],
    *,
    token_bytes: Tensor | None,
    group: dist.ProcessGroup,
    interrupted: Callable[[], bool] = lambda: False,
) -> EvaluationResult | None:
    """Run `forward` over this rank's part of each global batch, its micro-batches, and reduce over `group`.

    That is the data-parallel group, whose ranks all pass the same number of batches. `token_bytes` ([V], bytes that
    each token id stands for) turns nats per token into bits per byte. `interrupted` is asked before each batch and must
    answer alike on all ranks; None where it was true.
    Raises DataError on all ranks where no token is trained.
    """
    cross_entropy = hidden_delta = torch.zeros(1, dtype=torch.float64)
    counts = torch.zeros(2, dtype=torch.float64)  # trained tokens, their bytes
    for micro_batches in batches:
        if interrupted():
            return None
        sums = forward(micro_batches)
        cross_entropy = cross_entropy.to(sums.cross_entropy) + sums.cross_entropy
        hidden_delta = hidden_delta.to(sums.hidden_delta) + sums.hidden_delta
        labels = torch.cat([batch.labels.flatten() for batch in micro_batches])
        targets = labels[labels != IGNORE_INDEX]
        counts[0] += targets.numel()
        counts[1] += 0 if token_bytes is None else token_bytes[targets.cpu()].sum()
    num_passes = cross_entropy.numel()
    totals = sum_across(torch.cat([cross_entropy, hidden_delta, counts.to(cross_entropy)]), group=group).tolist()
    num_tokens, num_bytes = totals[-2:]
    if not num_tokens:
        raise DataError(
            "data.validation: no token of its rows is trained, because all of them lie outside the assistant's "
            "messages. Raise evaluation.batches, or name conversations with shorter questions."
        )
    losses = tuple(total / num_tokens for total in totals[:num_passes])
    return EvaluationResult(
        losses=losses,
        bits_per_byte=tuple(t / math.log(2) / num_bytes for t in totals[:num_passes]) if num_bytes else None,
        hidden_deltas=tuple(total / num_tokens for total in totals[num_passes:-2]),
    )
