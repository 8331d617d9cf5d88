"""Parts of the flat tensors that the optimizer sees: fragments of parameters, and runs of fragments treated alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fbt_megatron.optim.param_groups import decays
from fbt_megatron.parallel.logical_tensor import Fragment


@dataclass(frozen=True)
class BoundFragment:
    """A fragment and the tensor that the optimizer holds for it: ZeRO's flat partition, or a whole parameter."""

    fragment: Fragment
    param: Tensor

    def of(self, tensor: Tensor) -> Tensor:
        """The [numel] view of this fragment in `param` or in a tensor of equal size."""
        return self.fragment.of(tensor.view(-1))

    def gradient(self) -> Tensor:
        """The [numel] gradient; raises RuntimeError where there is none."""
        return self.of(_gradient(self.param, self.fragment.layout.name))


@dataclass(frozen=True)
class Span:
    """Neighbouring fragments that an elementwise rule treats alike: [start, stop) of the flat form of `param`."""

    param: Tensor
    start: int
    stop: int
    feedback: bool
    decays: bool
    names: tuple[str, ...]

    def of(self, tensor: Tensor) -> Tensor:
        """The [numel] view of this span in `param` or in a tensor of equal size."""
        return tensor.view(-1)[self.start : self.stop]

    def gradient(self) -> Tensor:
        """The [numel] gradient; raises RuntimeError where there is none."""
        return self.of(_gradient(self.param, ", ".join(self.names)))


def bind_fragments(
    fragments: Sequence[Fragment], params: Sequence[Tensor], *, whole_parameters: bool
) -> list[BoundFragment]:
    """Pair fragments with the tensors of their group.

    All lie in the one flat tensor of the group, or with `whole_parameters` fragment i is all of parameter i. Raises
    ValueError where they do not fit or a tensor is not contiguous fp32.
    """
    wrong = [tuple(p.shape) for p in params if p.dtype != torch.float32 or not p.is_contiguous()]
    if wrong:
        raise ValueError(f"Optimizer tensors of shapes {wrong} are not contiguous fp32.")
    if not whole_parameters:
        if len(params) != 1:
            raise ValueError(f"Expected the one flat partition that ZeRO makes of a group, got {len(params)} tensors.")
        bound = [BoundFragment(fragment, params[0]) for fragment in fragments]
    elif len(fragments) == len(params):
        bound = [BoundFragment(fragment, param) for fragment, param in zip(fragments, params, strict=True)]
    else:
        raise ValueError(f"{len(fragments)} fragments for {len(params)} whole parameters.")
    for part in bound:
        _check_fit(part, whole_parameters=whole_parameters)
    return bound


def join_fragments(bound: Sequence[BoundFragment]) -> list[Span]:
    """The fewest spans: fragments that touch in the same tensor and agree on use and decay become one."""
    spans: list[Span] = []
    for part in sorted(bound, key=lambda part: part.fragment.offset):
        fragment, layout = part.fragment, part.fragment.layout
        stop, decaying = fragment.offset + fragment.numel, decays(layout.tensors[0].kind)
        span = Span(part.param, fragment.offset, stop, layout.feedback, decaying, (layout.name,))
        if spans and _touch(spans[-1], span):
            before = spans.pop()
            span = replace(span, start=before.start, names=before.names + span.names)
        spans.append(span)
    return spans


def _gradient(param: Tensor, names: str) -> Tensor:
    if param.grad is None:
        raise RuntimeError(f"No gradient for {names}, which this step updates.")
    return param.grad


def _touch(left: Span, right: Span) -> bool:
    return (
        left.param is right.param
        and left.stop == right.start
        and (left.feedback, left.decays) == (right.feedback, right.decays)
    )


def _check_fit(part: BoundFragment, *, whole_parameters: bool) -> None:
    fragment, size = part.fragment, part.param.numel()
    whole = (fragment.start, fragment.stop, fragment.offset) == (0, size, 0) and fragment.layout.numel == size
    inside = 0 <= fragment.start <= fragment.stop <= fragment.layout.numel and fragment.offset + fragment.numel <= size
    if not (whole if whole_parameters else inside):
        raise ValueError(
            f"{fragment.layout.name}: elements {fragment.start} to {fragment.stop} at {fragment.offset} do not fit a "
            f"tensor of {size} elements."
        )
