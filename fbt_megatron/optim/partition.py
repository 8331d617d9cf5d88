"""Who computes the update of which matrix, and which pieces travel for it. Geometry only: no communication, no tensors.

A matrix is usually spread over ranks: tensor parallelism cuts it into slices, and ZeRO cuts the slices into flat ranges
that may end in the middle of a row. Its update needs all of it. So every matrix has one *owner* among the ranks of the
tensor-and-data-parallel group; the *holders* of its pieces send their momentum to the owner and get their part of the
update back. A plan can be computed for any cluster from the fragments of its ranks, without processes.

Two kinds of steps exist: those of one pass, which leave the feedback matrices alone, and those of more. `uses_feedback`
tells them apart everywhere below.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fbt_megatron.optim.newton_schulz import orthogonalize_flops
from fbt_megatron.parallel.logical_tensor import Fragment, LogicalTensor, ParameterLayout, Piece, pieces_of

_ZERO_ALIGNMENT = 2
"""Numbers to whose multiple DeepSpeed pads each partition."""


@dataclass(frozen=True)
class RankFragments:
    """The matrix fragments of one rank of the tensor-and-data-parallel group."""

    dp_rank: int
    fragments: tuple[Fragment, ...]


def zero_fragments(layouts: Sequence[ParameterLayout], *, dp_rank: int, dp_size: int) -> tuple[Fragment, ...]:
    """The fragments of a parameter group that ZeRO-1 gives to a data-parallel rank.

    `layouts` are the group's parameters in the order of the model. DeepSpeed lays them end to end, pads the end to a
    multiple of 2 x `dp_size` numbers, and cuts the whole into equal parts.
    """
    total = sum(layout.numel for layout in layouts)
    part = _ZERO_ALIGNMENT * -(-total // (_ZERO_ALIGNMENT * dp_size))
    first, last = dp_rank * part, (dp_rank + 1) * part
    fragments, offset = [], 0
    for layout in layouts:
        start, stop = max(first, offset), min(last, offset + layout.numel)
        if start < stop:
            fragments.append(Fragment(layout, start - offset, stop - offset, offset=start - first))
        offset += layout.numel
    return tuple(fragments)


def whole_fragments(layouts: Sequence[ParameterLayout]) -> tuple[Fragment, ...]:
    """Without ZeRO a rank holds the optimizer state of all that it stores."""
    return tuple(Fragment(layout, 0, layout.numel, offset=0) for layout in layouts)


@dataclass(frozen=True)
class Holding:
    """A piece of a matrix on a rank: the number of the rank's fragment, and the piece inside that fragment."""

    fragment: int
    piece: Piece

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.piece.place.numel


@dataclass(frozen=True)
class ExchangePlan:
    """Owners and holders of all matrices of a pipeline stage; ranks are numbers in its tensor-and-data-parallel group.

    With `replicated_over_dp` (no ZeRO) each data-parallel replica holds everything: an owner takes pieces from its own
    replica only, and sends updates to all.
    """

    matrices: tuple[LogicalTensor, ...]
    owners: dict[str, int]
    dp_ranks: tuple[int, ...]
    replicated_over_dp: bool
    ns_steps: int
    holdings: dict[tuple[int, int], list[Holding]]
    """Pieces by (holder, owner)."""

    @property
    def num_ranks(self) -> int:
        """Size of the tensor-and-data-parallel group."""
        return len(self.dp_ranks)

    def owned(self, rank: int, *, uses_feedback: bool) -> list[LogicalTensor]:
        """Matrices that a rank orthogonalises in a step."""
        return [tensor for tensor in active(self.matrices, uses_feedback) if self.owners[tensor.name] == rank]

    def flops(self, rank: int, *, uses_feedback: bool) -> int:
        """Floating-point operations of the orthogonalisations of a rank in a step."""
        return sum(_cost(tensor, self.ns_steps) for tensor in self.owned(rank, uses_feedback=uses_feedback))

    def update_pieces(self, *, holder: int, owner: int, uses_feedback: bool) -> list[Holding]:
        """Pieces of the update that `owner` sends to `holder` in a step, in the order of the message."""
        pieces = self.holdings.get((holder, owner), [])
        return [holding for holding in pieces if uses_feedback or not holding.piece.tensor.feedback]

    def momentum_pieces(self, *, holder: int, owner: int, uses_feedback: bool) -> list[Holding]:
        """Pieces of the momentum that `holder` sends to `owner` in a step, in the order of the message."""
        if self.replicated_over_dp and self.dp_ranks[holder] != self.dp_ranks[owner]:
            return []
        return self.update_pieces(holder=holder, owner=owner, uses_feedback=uses_feedback)

    def bytes_sent(self, rank: int, *, uses_feedback: bool, itemsize: int) -> int:
        """Bytes that a rank sends to others in a step, both ways together; `itemsize` is bytes per number."""
        return itemsize * sum(
            holding.numel
            for peer in range(self.num_ranks)
            if peer != rank
            for pieces in (
                self.momentum_pieces(holder=rank, owner=peer, uses_feedback=uses_feedback),
                self.update_pieces(holder=peer, owner=rank, uses_feedback=uses_feedback),
            )
            for holding in pieces
        )


def build_exchange_plan(ranks: Sequence[RankFragments], *, replicated_over_dp: bool, ns_steps: int) -> ExchangePlan:
    """The plan for one pipeline stage, the same on every rank that is given the same `ranks` (in group order).

    Raises ValueError where the pieces that an owner would receive do not make up the whole matrix.
    """
    found = [
        [
            Holding(number, piece)
            for number, fragment in enumerate(rank.fragments)
            for piece in pieces_of(fragment.layout, start=fragment.start, stop=fragment.stop)
        ]
        for rank in ranks
    ]
    tensors = {holding.piece.tensor.name: holding.piece.tensor for holdings in found for holding in holdings}
    owners = assign_owners(tensors.values(), num_ranks=len(ranks), ns_steps=ns_steps)
    between = defaultdict(list)
    for holder, holdings in enumerate(found):
        for holding in holdings:
            between[holder, owners[holding.piece.tensor.name]].append(holding)
    plan = ExchangePlan(
        matrices=tuple(tensors[name] for name in owners),
        owners=owners,
        dp_ranks=tuple(rank.dp_rank for rank in ranks),
        replicated_over_dp=replicated_over_dp,
        ns_steps=ns_steps,
        holdings=dict(between),
    )
    _check_complete(plan)
    return plan


def assign_owners(tensors: Iterable[LogicalTensor], *, num_ranks: int, ns_steps: int) -> dict[str, int]:
    """The owner of each matrix: costliest first, each to the rank with the least work so far.

    Feedback matrices come last, on top of the others, so the work is even in steps with and without them. Ties go by
    name and then to the lowest rank: the result depends on nothing else.
    """
    work = [0] * num_ranks
    owners = {}
    for tensor in sorted(tensors, key=lambda t: (t.feedback, -_cost(t, ns_steps), t.name)):
        owners[tensor.name] = min(range(num_ranks), key=lambda rank: (work[rank], rank))
        work[owners[tensor.name]] += _cost(tensor, ns_steps)
    return owners


def active(tensors: Iterable[LogicalTensor], uses_feedback: bool) -> list[LogicalTensor]:
    """The tensors that a step updates."""
    return [tensor for tensor in tensors if uses_feedback or not tensor.feedback]


def _cost(tensor: LogicalTensor, ns_steps: int) -> int:
    return orthogonalize_flops(tensor.rows, tensor.cols, ns_steps=ns_steps)


def _check_complete(plan: ExchangePlan) -> None:
    """Every matrix arrives at its owner as disjoint pieces that cover it."""
    covered: dict[str, int] = defaultdict(int)
    for holder, owner in plan.holdings:
        for holding in plan.momentum_pieces(holder=holder, owner=owner, uses_feedback=True):
            covered[holding.piece.tensor.name] += holding.numel
    wrong = [f"{t.name} ({covered[t.name]} of {t.numel})" for t in plan.matrices if covered[t.name] != t.numel]
    if wrong:
        raise ValueError(f"The fragments of the ranks do not make up whole matrices: {', '.join(wrong)}.")
