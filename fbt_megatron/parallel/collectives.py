"""The few reductions this project does outside megatron-core and DeepSpeed, named by what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.activity import communicating
from fbt_megatron.errors import FBTError

T = TypeVar("T")

COLLECTIVE_SECONDS = 1800.0
"""Time limit of torch.distributed for a collective, and for the ranks to meet."""


def sum_across(values: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of `values` over the ranks of a group (default: all), as a new tensor."""
    total = values.clone()
    with communicating("sum_across"):
        dist.all_reduce(total, group=group)
    return total


def max_across(values: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """Element-wise maximum of `values` over the ranks of a group (default: all), as a new tensor."""
    largest = values.clone()
    with communicating("max_across"):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest


def gather_across(values: Tensor) -> Tensor:
    """`values` [n] of every rank, [ranks, n], on every rank."""
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    with communicating("gather_across"):
        dist.all_gather(gathered, values)
    return torch.stack(gathered)


def broadcast_in(values: Tensor, *, group: dist.ProcessGroup) -> None:
    """Overwrite `values` with those of the first rank of a group."""
    with communicating("broadcast_in"):
        dist.broadcast(values, group=group, group_src=0)


def any_rank_true(flag: bool, *, device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """True on every rank where `flag` is true on at least one."""
    return bool(max_across(torch.tensor(float(flag), device=device), group=group))


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """The values of all ranks of a group, in rank order, on every rank."""
    gathered: list[T] = [value] * dist.get_world_size(group)
    with communicating("gather_objects"):
        dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: T | None, *, group: dist.ProcessGroup | None = None) -> T:
    """The value of global rank 0, on every rank; a `group` given here or below holds all ranks as well."""
    box = [value]
    with communicating("broadcast_object"):
        dist.broadcast_object_list(box, src=0, group=group)
    return cast(T, box[0])  # rank 0 put a T in the box


def raise_together(error: FBTError | None, *, group: dist.ProcessGroup | None = None) -> None:
    """Raise the same error on every rank if any rank has one: that of the lowest such rank. All ranks call it.

    One rank that fails alone leaves the others waiting in their next collective, and the user with a timeout in place
    of the reason.
    """
    errors = [other for other in gather_objects(error, group=group) if other is not None]
    if errors:
        raise errors[0]


def agree_on_errors(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on every rank; if it raises an FBTError on some, raise on all. `action` must not communicate."""
    error: FBTError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except FBTError as caught:
        error = caught
    raise_together(error, group=group)
    return result[0]


def agree_on_rank_zero(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Run `action` on global rank 0 and give its result, or raise its FBTError, on every rank."""
    outcome: tuple[T | None, FBTError | None] | None = None
    if dist.get_rank() == 0:
        try:
            outcome = action(), None
        except FBTError as caught:
            outcome = None, caught
    result, error = broadcast_object(outcome, group=group)
    if error is not None:
        raise error
    return cast(T, result)
