"""All passes of all micro-batches of one optimizer step, and of validation.

L = sum_k w_k * (CE_k + c * mean(lse_k^2)), each mean over the trained tokens of the whole global batch (all ranks, all
micro-batches), whose number is known before the first forward. A micro-batch adds its sums divided by that number, so
no mean of means appears, and gradients of all micro-batches simply add up.
Source: arXiv 2608.08888, eq. 9 to 12.

Legend: `S` sequence, `B` micro batch, `H` hidden, `K` passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.evaluation.validation import PassSums
from fbt_megatron.model.fbt_model import FBTModel, MicroBatch, PassOutput
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.pass_schedule import PassPlan
from fbt_megatron.parallel.topology import ParallelTopology


@dataclass(frozen=True)
class StepLosses:
    """This rank's loss sums of one step; fp64, on the model's device. Sum over data parallel, divide by the tokens."""

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
) -> StepLosses:
    """Accumulate the gradients of one optimizer step, one micro-batch after the other.

    `num_tokens` is the number of trained tokens of the global batch, `z_loss` the coefficient of this step. Gradients
    come out multiplied by the data-parallel size, because the engine averages over it.
    """
    sums = torch.zeros(2, plan.num_passes, dtype=torch.float64, device=topology.device)
    weights = [weight * topology.dp_size / num_tokens for weight in plan.weights]
    for batch in batches:
        outputs = _run_passes(model, _micro_batch(model, batch, topology), plan.num_passes, noise)
        losses = [output.losses for output in outputs if output.losses is not None]
        objective = torch.stack([w * (p.ce_sum + z_loss * p.z_sum) for w, p in zip(weights, losses, strict=True)]).sum()
        objective.backward()
        sums[0] += torch.stack([loss.ce_sum.detach() for loss in losses])
        sums[1] += torch.stack([loss.z_sum.detach() for loss in losses])
    return StepLosses(cross_entropy=sums[0], z_sum=sums[1])


@torch.no_grad()
def forward_only(model: FBTModel, batch: TrainBatch, *, num_passes: int, topology: ParallelTopology) -> PassSums:
    """Loss sums and state changes of `num_passes` passes over one micro-batch, without any random draw."""
    outputs = _run_passes(model, _micro_batch(model, batch, topology), num_passes, None)
    trained = (batch.labels != IGNORE_INDEX).t().to(topology.device)
    changes = [_state_change(before.hidden, after.hidden, trained) for before, after in itertools.pairwise(outputs)]
    return PassSums(
        cross_entropy=torch.stack([output.losses.ce_sum.double() for output in outputs if output.losses is not None]),
        hidden_delta=torch.stack(changes) if changes else torch.zeros(0, dtype=torch.float64, device=topology.device),
    )


def _run_passes(model: FBTModel, batch: MicroBatch, num_passes: int, noise: FeedbackNoise | None) -> list[PassOutput]:
    """Pass k reads the top state of pass k - 1, with gradient."""
    outputs: list[PassOutput] = []
    for pass_idx in range(num_passes):
        received = outputs[-1].hidden if outputs else None
        outputs.append(model.forward_pass(batch, pass_idx, received, noise))
    return outputs


def _micro_batch(model: FBTModel, batch: TrainBatch, topology: ParallelTopology) -> MicroBatch:
    # Row numbers seed generators on the host; the rest is used on the device.
    on_device = batch.to(topology.device)
    return model.micro_batch(
        tokens=on_device.tokens,
        labels=on_device.labels,
        positions=on_device.positions,
        document_ids=on_device.document_ids,
        rows=batch.rows.tolist(),
    )


def _state_change(before: Tensor, after: Tensor, trained: Tensor) -> Tensor:
    """Sum over trained tokens ([S, B] bool) of ||after - before||_2 / sqrt(H), states [S, B, H]."""
    change = torch.linalg.vector_norm((after - before).float(), dim=-1) / before.shape[-1] ** 0.5
    return change.masked_fill(~trained, 0.0).sum(dtype=torch.float64)
