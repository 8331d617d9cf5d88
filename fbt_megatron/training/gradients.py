"""The gradients of one optimizer step, between the last backward pass and the update, and tied copies after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fbt_megatron.parallel.collectives import broadcast_in, sum_across
from fbt_megatron.parallel.logical_tensor import ParameterLayout, ParamKind
from fbt_megatron.parallel.topology import ParallelTopology


def accumulated_gradient(parameter: Parameter) -> Tensor | None:
    """The gradient that the next step will use, or None where no backward pass has reached the parameter.

    In fp32 it is `parameter.grad`. In bf16 DeepSpeed accumulates into a flat fp32 buffer of [numel] and drops `.grad`;
    whatever is summed into a gradient between backward and step has to go there.
    """
    high_precision = getattr(parameter, "_hp_grad", None)
    return parameter.grad if high_precision is None else high_precision


def sum_partial_gradients(
    gradients: Mapping[str, Tensor],
    parameters: Mapping[str, Parameter],
    layouts: Mapping[str, ParameterLayout],
    *,
    tie_embeddings: bool,
    topology: ParallelTopology,
) -> None:
    """Complete, in place, gradients of which other ranks of this data-parallel replica hold a part; all ranks call it.

    All three mappings are by parameter name. A parameter marked `sequence_parallel` (see `model/norm.py`) has seen the
    tokens or heads of its tensor-parallel rank alone. An embedding that is tied over a pipeline has two copies: the
    first stage has the gradient of the input, the last one that of the head. This comes before the reduction over data
    parallel, which cuts the two copies in different places.
    """
    if topology.tp_size > 1:
        partial = [g for name, g in gradients.items() if getattr(parameters[name], "sequence_parallel", False)]
        if partial:
            _sum_together(partial, group=topology.pg.tp)
    if _holds_tied_copy(tie_embeddings=tie_embeddings, topology=topology):
        for name, gradient in gradients.items():
            if layouts[name].tensors[0].kind is ParamKind.EMBEDDING:
                dist.all_reduce(gradient, group=topology.pg.embd)


def copy_tied_weight(
    parameters: Mapping[str, Parameter],
    layouts: Mapping[str, ParameterLayout],
    *,
    tie_embeddings: bool,
    topology: ParallelTopology,
) -> None:
    """Overwrite the last stage's copy of a tied embedding with the first stage's weight, where they could differ.

    Both get the same gradient, but more than two replicas add theirs up in an order that depends on where the weight
    lies in its stage's buckets. Two make the same sum in either order, and need no copy.
    """
    if topology.dp_size > 2 and _holds_tied_copy(tie_embeddings=tie_embeddings, topology=topology):
        for name, parameter in parameters.items():
            if layouts[name].tensors[0].kind is ParamKind.EMBEDDING:
                broadcast_in(parameter.detach(), group=topology.pg.embd)


def _holds_tied_copy(*, tie_embeddings: bool, topology: ParallelTopology) -> bool:
    return topology.pp_size > 1 and tie_embeddings and (topology.is_first_stage or topology.is_last_stage)


def _sum_together(gradients: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
    """Sum each of many small gradients over a group, in one message."""
    total = sum_across(torch.cat([gradient.reshape(-1) for gradient in gradients]), group=group)
    for gradient, summed in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(summed.view_as(gradient))


def all_finite(gradients: Sequence[Tensor]) -> bool:
    """True where the joint 2-norm of this rank's gradients is a finite fp32 number.

    A norm beyond fp32 counts as not finite: it could not be clipped.
    """
    return bool(torch.isfinite(torch.nn.utils.get_total_norm(gradients)))


def average_across(gradients: Sequence[Tensor], *, group: dist.ProcessGroup) -> None:
    """Replace each gradient by its mean over a group, whose ranks pass the same shapes in the same order."""
    pending = [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]
    for gradient, work in zip(gradients, pending, strict=True):
        work.wait()
        gradient.div_(dist.get_world_size(group))


def global_norm(gradients: Sequence[Tensor], *, device: torch.device, group: dist.ProcessGroup) -> float:
    """2-norm of the gradients of all ranks of a group, in fp64.

    Each rank passes the gradients that it alone contributes, so that a replicated or tied parameter is counted once.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
    return float(sum_across(squares, group=group).sqrt())


def clip(gradients: Sequence[Tensor], *, norm: float, max_norm: float) -> None:
    """Scale gradients of global norm `norm` down to `max_norm`, with the factor `max_norm / (norm + 1e-6)`; 0: never.

    Source: the factor is that of `torch.nn.utils.clip_grad_norm_` and of DeepSpeed, so that all stages agree.
    """
    factor = max_norm / (norm + 1e-6)
    if max_norm > 0.0 and factor < 1.0:
        for gradient in gradients:
            gradient.mul_(factor)
