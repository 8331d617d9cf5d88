"""Runs an exchange plan on one rank: momentum to the owners, their updates back.

Four phases, in the order of the code:
1. pack the momentum pieces of this rank by owner, one all-to-all;
2. put the pieces that arrived together to whole matrices, batched by shape, and compute their updates;
3. pack the updates by holder, a second all-to-all;
4. hand each piece of the update to the caller.

Messages are fp32 on CPU and bf16 on GPU. A rank sends about its own share of the matrices each way, or, without ZeRO,
its own updates to every replica.

Legend: k matrices of one shape, m rows, n columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fbt_megatron.activity import communicating
from fbt_megatron.config.schema import NorMuonConfig
from fbt_megatron.optim.normuon import normuon_update
from fbt_megatron.optim.partition import ExchangePlan, Holding
from fbt_megatron.parallel.logical_tensor import LogicalTensor

MAX_BATCH_NUMEL = 1 << 25
"""Elements of the matrices that are orthogonalised at once: bounds the working memory."""


@dataclass(frozen=True)
class Parcel:
    """A piece and its place in the buffer of a message."""

    holding: Holding
    offset: int

    def of(self, buffer: Tensor) -> Tensor:
        """The [rows, cols] view of this parcel in a flat buffer."""
        place = self.holding.piece.place
        return buffer.narrow(0, self.offset, place.numel).view(place.rows, place.cols)

    def inside(self, matrix: Tensor) -> Tensor:
        """The rectangle of this parcel in its whole matrix [m, n]."""
        place = self.holding.piece.place
        return matrix[place.row : place.row + place.rows, place.col : place.col + place.cols]


@dataclass(frozen=True)
class Message:
    """The buffer of one side of an all-to-all: numbers per peer, and the parcels in it."""

    splits: list[int]
    parcels: list[Parcel]

    @classmethod
    def pack(cls, pieces_by_peer: Iterable[list[Holding]]) -> Message:
        """Parcels one after the other, peers in rank order."""
        splits, parcels, offset = [], [], 0
        for pieces in pieces_by_peer:
            splits.append(sum(holding.numel for holding in pieces))
            for holding in pieces:
                parcels.append(Parcel(holding, offset))
                offset += holding.numel
        return cls(splits, parcels)

    def buffer(self, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised flat buffer of this message's size."""
        return torch.empty(sum(self.splits), dtype=dtype, device=device)

    def by_matrix(self) -> dict[str, list[Parcel]]:
        """The parcels of each matrix."""
        parcels = defaultdict(list)
        for parcel in self.parcels:
            parcels[parcel.holding.piece.tensor.name].append(parcel)
        return parcels


class Route:
    """The four messages of one rank in one kind of step."""

    def __init__(self, plan: ExchangePlan, *, rank: int, uses_feedback: bool) -> None:
        peers = range(plan.num_ranks)
        self.momentum_out = Message.pack(
            plan.momentum_pieces(holder=rank, owner=peer, uses_feedback=uses_feedback) for peer in peers
        )
        self.momentum_in = Message.pack(
            plan.momentum_pieces(holder=peer, owner=rank, uses_feedback=uses_feedback) for peer in peers
        )
        self.update_out = Message.pack(
            plan.update_pieces(holder=peer, owner=rank, uses_feedback=uses_feedback) for peer in peers
        )
        self.update_in = Message.pack(
            plan.update_pieces(holder=rank, owner=peer, uses_feedback=uses_feedback) for peer in peers
        )
        self.arriving = self.momentum_in.by_matrix()
        self.leaving = self.update_out.by_matrix()


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape that an owner updates together, and their row moments [k, m] (fp32)."""

    matrices: tuple[LogicalTensor, ...]
    row_moments: Tensor

    @property
    def feedback(self) -> bool:
        """True where only steps with feedback update these matrices."""
        return self.matrices[0].feedback

    @property
    def shape(self) -> tuple[int, int, int]:
        """(k, m, n)."""
        return len(self.matrices), self.matrices[0].rows, self.matrices[0].cols


def message_dtype(device: torch.device) -> torch.dtype:
    """Type in which matrices travel and are orthogonalised: bf16 on GPU, fp32 on CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


class MatrixExchange:
    """One rank's part in the updates of all matrices of its pipeline stage, and the row moments of those it owns."""

    def __init__(
        self,
        plan: ExchangePlan,
        *,
        config: NorMuonConfig,
        group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._config = config
        self._group = group
        self._device = device
        self._dtype = message_dtype(device)
        self._routes = {flag: Route(plan, rank=rank, uses_feedback=flag) for flag in (False, True)}
        self._batches = _batches(plan.owned(rank, uses_feedback=True), device=device)

    def row_moments(self) -> Iterator[tuple[LogicalTensor, Tensor]]:
        """Each matrix that this rank owns with its row moments, a [1, m] view of the state."""
        for batch in self._batches:
            for index, matrix in enumerate(batch.matrices):
                yield matrix, batch.row_moments.narrow(0, index, 1)

    def updates(self, directions: Sequence[Tensor], *, uses_feedback: bool) -> Iterator[tuple[Holding, Tensor]]:
        """Pieces of this step's updates for this rank, each as a [rows, cols] tensor.

        `directions` has a flat fp32 tensor for each fragment of this rank: what is to be orthogonalised. Fragments of
        feedback matrices are not read in a step without feedback. All ranks of the group have to call this together.
        """
        route = self._routes[uses_feedback]
        sent = route.momentum_out.buffer(dtype=self._dtype, device=self._device)
        for parcel in route.momentum_out.parcels:
            parcel.of(sent).copy_(parcel.holding.piece.view(directions[parcel.holding.fragment]))
        momentum = self._all_to_all(sent, source=route.momentum_out, target=route.momentum_in)
        updates = route.update_out.buffer(dtype=self._dtype, device=self._device)
        for batch in self._batches:
            if uses_feedback or not batch.feedback:
                self._update_batch(batch, route, momentum=momentum, updates=updates)
        received = self._all_to_all(updates, source=route.update_out, target=route.update_in)
        for parcel in route.update_in.parcels:
            yield parcel.holding, parcel.of(received)

    def _update_batch(self, batch: Batch, route: Route, *, momentum: Tensor, updates: Tensor) -> None:
        """Phase 2 for one batch: from the message `momentum` to the message `updates`."""
        directions = torch.empty(batch.shape, dtype=self._dtype, device=self._device)
        for matrix, direction in zip(batch.matrices, directions, strict=True):
            for parcel in route.arriving[matrix.name]:
                parcel.inside(direction).copy_(parcel.of(momentum))
        update, row_moments = normuon_update(directions, batch.row_moments, self._config)
        batch.row_moments.copy_(row_moments)
        for matrix, whole in zip(batch.matrices, update, strict=True):
            for parcel in route.leaving[matrix.name]:
                parcel.of(updates).copy_(parcel.inside(whole))

    def _all_to_all(self, sent: Tensor, *, source: Message, target: Message) -> Tensor:
        if self.plan.num_ranks == 1:
            return sent
        received = target.buffer(dtype=self._dtype, device=self._device)
        with communicating("NorMuon's exchange"):
            dist.all_to_all_single(received, sent, target.splits, source.splits, group=self._group)
        return received


def _batches(owned: Iterable[LogicalTensor], *, device: torch.device) -> list[Batch]:
    """Matrices of equal shape and use, in batches of at most MAX_BATCH_NUMEL elements (or one matrix)."""
    alike = defaultdict(list)
    for matrix in owned:
        alike[matrix.shape, matrix.feedback].append(matrix)
    batches = []
    for matrices in alike.values():
        size = max(1, MAX_BATCH_NUMEL // matrices[0].numel)
        for start in range(0, len(matrices), size):
            some = tuple(matrices[start : start + size])
            batches.append(Batch(some, torch.zeros(len(some), some[0].rows, device=device)))
    return batches
