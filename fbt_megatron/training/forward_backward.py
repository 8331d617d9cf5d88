"""All passes of all micro-batches of one optimizer step, and of validation, in every layout.

L = sum_k w_k * (CE_k + c * mean(lse_k^2)), each mean over the trained tokens of the whole global batch (all ranks, all
micro-batches), whose number is known before the first forward. A micro-batch adds its sums divided by that number, so
no mean of means appears, and gradients of all micro-batches simply add up.
Source: arXiv 2608.08888, eq. 9 to 12.

What differs between one stage and a pipeline is `parallel.pipeline.run_passes`. Backward starts from the loss of the
last pass; the losses of earlier passes ride on the hidden state that they hand on.

Legend: `S` sequence, `B` micro batch, `H` hidden, `K` passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fbt_megatron import activity
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.evaluation.validation import PassSums
from fbt_megatron.model.fbt_model import FBTModel, MicroBatch
from fbt_megatron.model.loss import PassLosses
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import PassPlan
from fbt_megatron.parallel.collectives import sum_across
from fbt_megatron.parallel.pipeline import run_passes
from fbt_megatron.parallel.topology import ParallelTopology


@dataclass(frozen=True)
class StepLosses:
    """Loss sums of one data-parallel replica in one step, the same on all its ranks; fp64, on the model's device.

    Sum over data parallel, divide by the tokens.
    """

    cross_entropy: Tensor
    """[K], in nats."""
    z_sum: Tensor
    """[K], squared log-partition function."""


def forward_backward(
    model: FBTModel,
    batches: Sequence[TrainBatch],
    plan: PassPlan,
    *,
    num_tokens: int,
    z_loss: float,
    noise: FeedbackNoise,
    topology: ParallelTopology,
    timed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> StepLosses:
    """Accumulate the gradients of one optimizer step.

    `batches` are the micro-batches of this data-parallel replica, the same on all its ranks. `num_tokens` is the number
    of trained tokens of the global batch, `z_loss` the coefficient of this step. Gradients come out multiplied by the
    data-parallel size, because the engine averages over it. Each pass of this stage runs forward inside `timed()`.
    """
    sums = torch.zeros(2, plan.num_passes, dtype=torch.float64, device=topology.device)
    weights = [weight * topology.dp_size / num_tokens for weight in plan.weights]
    micro_batches = _MicroBatches(model, batches, topology, num_passes=plan.num_passes)

    def objective(pass_idx: int, losses: PassLosses) -> Tensor:
        sums[0, pass_idx] += losses.ce_sum.detach()
        sums[1, pass_idx] += losses.z_sum.detach()
        return weights[pass_idx] * (losses.ce_sum + z_loss * losses.z_sum)

    def stage_pass(pass_idx: int, index: int, received: Tensor | None) -> Tensor:
        activity.advance(f"pass {pass_idx + 1} of micro-batch {index + 1}/{len(batches)}")
        with timed():
            output = model.forward_pass(micro_batches.get(index, pass_idx), pass_idx, received, noise)
        if output.losses is None:
            return output.hidden
        loss = objective(pass_idx, output.losses)
        return loss if pass_idx == plan.num_passes - 1 else _AttachLoss.apply(output.hidden, loss)

    run_passes(
        stage_pass,
        num_passes=plan.num_passes,
        num_micro_batches=len(batches),
        batch_shape=_shape(batches),
        config=model.config,
        topology=topology,
        backward=True,
    )
    cross_entropy, z_sum = sum_across(sums, group=topology.pg.pp)  # only the last stage has losses
    return StepLosses(cross_entropy, z_sum)


@torch.no_grad()
def forward_only(
    model: FBTModel, batches: Sequence[TrainBatch], *, num_passes: int, topology: ParallelTopology
) -> PassSums:
    """Loss sums and state changes of `num_passes` passes over the micro-batches of one data-parallel replica.

    They are the same on all its ranks. Nothing is drawn at random.
    """
    sums = torch.zeros(2, num_passes, dtype=torch.float64, device=topology.device)
    micro_batches = _MicroBatches(model, batches, topology, num_passes=num_passes)
    states: dict[int, Tensor] = {}

    def stage_pass(pass_idx: int, index: int, received: Tensor | None) -> Tensor:
        activity.advance(f"pass {pass_idx + 1} of micro-batch {index + 1}/{len(batches)}")
        micro_batch = micro_batches.get(index, pass_idx)
        output = model.forward_pass(micro_batch, pass_idx, received)
        if output.losses is None:
            return output.hidden
        sums[0, pass_idx] += output.losses.ce_sum
        if pass_idx > 0:
            trained = _own_positions(micro_batch.labels != IGNORE_INDEX, model, topology)
            sums[1, pass_idx] += _state_change(states.pop(index), output.hidden, trained)
        if pass_idx == num_passes - 1:
            return output.losses.ce_sum
        states[index] = output.hidden.detach()  # the pipeline empties the tensor that it has handed on
        return output.hidden

    run_passes(
        stage_pass,
        num_passes=num_passes,
        num_micro_batches=len(batches),
        batch_shape=_shape(batches),
        config=model.config,
        topology=topology,
        backward=False,
    )
    if model.config.sequence_parallel:
        sums[1] = sum_across(sums[1], group=topology.pg.tp)
    cross_entropy, changes = sum_across(sums, group=topology.pg.pp)
    return PassSums(cross_entropy=cross_entropy, hidden_delta=changes[1:])


class _AttachLoss(torch.autograd.Function):
    """The hidden state unchanged; in backward the loss gets the gradient 1 beside what arrives for the state."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        ctx.loss_dtype = loss.dtype
        return hidden.clone()  # of its own memory: the pipeline frees what it has handed on

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, torch.ones((), dtype=ctx.loss_dtype, device=gradient.device)


class _MicroBatches:
    """What the passes share of each micro-batch: derived for its first pass, held until its last one has it."""

    def __init__(
        self, model: FBTModel, batches: Sequence[TrainBatch], topology: ParallelTopology, *, num_passes: int
    ) -> None:
        self._model = model
        self._batches = batches
        self._topology = topology
        self._num_passes = num_passes
        self._derived: dict[int, MicroBatch] = {}

    def get(self, index: int, pass_idx: int) -> MicroBatch:
        """Micro-batch `index`; its passes come in order."""
        micro_batch = self._derived.pop(index) if pass_idx > 0 else self._derive(self._batches[index])
        if pass_idx < self._num_passes - 1:
            self._derived[index] = micro_batch
        return micro_batch

    def _derive(self, batch: TrainBatch) -> MicroBatch:
        # Row numbers seed generators on the host; the rest is used on the device.
        on_device = batch.to(self._topology.device)
        return self._model.micro_batch(
            tokens=on_device.tokens,
            labels=on_device.labels,
            positions=on_device.positions,
            document_ids=on_device.document_ids,
            rows=batch.rows.tolist(),
        )


def _shape(batches: Sequence[TrainBatch]) -> tuple[int, int]:
    rows, seq_length = batches[0].tokens.shape
    return rows, seq_length


def _own_positions(mask: Tensor, model: FBTModel, topology: ParallelTopology) -> Tensor:
    """[S, B] for a mask [B, S], or under sequence parallelism this rank's [S / tp, B]."""
    mask = mask.t()
    return mask.chunk(topology.tp_size)[topology.tp_rank] if model.config.sequence_parallel else mask


def _state_change(before: Tensor, after: Tensor, trained: Tensor) -> Tensor:
    """Sum over trained tokens ([S, B] bool) of ||after - before||_2 / sqrt(H), states [S, B, H]."""
    change = torch.linalg.vector_norm((after - before).float(), dim=-1) / before.shape[-1] ** 0.5
    return change.masked_fill(~trained, 0.0).sum(dtype=torch.float64)
