"""The order in which documents are read: a pure function of seed and epoch.

Nothing here knows ranks, workers or files, and memory is proportional to the number of shards, not of documents.

An epoch is one list of all documents. Shards are put into an order drawn from (seed, epoch); the documents of a shard
start at a rotation and wrap around inside it (a drive or an object store reads a shard in two long runs). Documents
were shuffled globally when the shards were built, so nothing finer is needed. The list is then cut into one range per
logical stream. Every document therefore occurs exactly once per epoch, however many processes read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.data.hashing import hash64

_KEPT_EPOCHS = 2  # streams of one reader are at most an epoch apart for long
_GOLDEN_RATIO_CONJUGATE = 0.6180339887498949


@dataclass(frozen=True)
class Span:
    """Consecutive documents of one shard: numbers `first` to `first + count - 1`."""

    shard: int
    first: int
    count: int


@dataclass(frozen=True)
class EpochOrder:
    """The list of one epoch: shards in order, and where each begins in the list and in itself."""

    shards: NDArray[np.int64]
    """[shards] shard numbers in reading order; shards without documents are left out."""
    starts: NDArray[np.int64]
    """[shards + 1] place in the list of each shard's first document; the last entry is the number of documents."""
    rotations: NDArray[np.int64]
    """[shards] number of the document with which each shard starts."""

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """The documents at places `start` to `stop - 1` of the list, as runs that can be read without a seek."""
        place = start
        while place < stop:
            slot = int(np.searchsorted(self.starts, place, side="right")) - 1
            num_documents = int(self.starts[slot + 1] - self.starts[slot])
            first = (place - int(self.starts[slot]) + int(self.rotations[slot])) % num_documents
            # A run ends with the shard's last document, with the shard's part of the list, or with the request.
            count = min(num_documents - first, int(self.starts[slot + 1]) - place, stop - place)
            yield Span(int(self.shards[slot]), first, count)
            place += count


class DocumentOrder:
    """The order of every epoch of one data set."""

    def __init__(self, documents_per_shard: Sequence[int], *, seed: int | None) -> None:
        """`seed=None` keeps the stored order in every epoch (validation)."""
        self._counts = np.asarray(documents_per_shard, dtype=np.int64)
        self._seed = seed
        self._cache: OrderedDict[int, EpochOrder] = OrderedDict()
        self.num_documents = int(self._counts.sum())

    def epoch(self, epoch: int) -> EpochOrder:
        """The list of `epoch`, counted from 0."""
        if epoch not in self._cache:
            self._cache[epoch] = epoch_order(self._counts, seed=self._seed, epoch=epoch)
            if len(self._cache) > _KEPT_EPOCHS:
                self._cache.popitem(last=False)
        self._cache.move_to_end(epoch)
        return self._cache[epoch]

    def stream_range(self, stream: int, *, num_streams: int) -> tuple[int, int]:
        """Places `(start, stop)` of the list that `stream` reads; the ranges partition it as evenly as possible."""
        return stream * self.num_documents // num_streams, (stream + 1) * self.num_documents // num_streams


def epoch_order(documents_per_shard: NDArray[np.int64], *, seed: int | None, epoch: int) -> EpochOrder:
    """The list of `epoch` for shards of these sizes; two following epochs differ if any shard has two documents."""
    shards = np.flatnonzero(documents_per_shard)
    if seed is not None:
        shards = np.array(
            sorted(shards, key=lambda shard: hash64(f"order {seed} {epoch} {shard}".encode())), dtype=np.int64
        )
    counts = documents_per_shard[shards]
    rotations = np.zeros_like(shards)
    if seed is not None:
        pairs = zip(shards.tolist(), counts.tolist(), strict=True)
        rotations = np.array([_rotation(seed, epoch, shard, count) for shard, count in pairs], dtype=np.int64)
    return EpochOrder(shards=shards, starts=np.concatenate([[0], np.cumsum(counts)]), rotations=rotations)


def _rotation(seed: int, epoch: int, shard: int, count: int) -> int:
    """First document of a shard: a drawn start, moved on by the golden section of the shard each epoch.

    A fresh draw per epoch would repeat the last one with probability 1/count; this never does for count >= 2.
    """
    stride = round(count * _GOLDEN_RATIO_CONJUGATE)
    return (hash64(f"rotation {seed} {shard}".encode()) + epoch * stride) % count
