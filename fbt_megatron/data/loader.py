"""Micro-batches of one data-parallel rank, for training and for validation.

Reader processes may run ahead of the training step. Every micro-batch therefore carries the cursors that follow it, and
the state of the loader is made of those of the micro-batches handed out, never of how far a reader has come.

Every rank gets the same number of micro-batches per step, whatever the data: training begins the data anew, validation
fills up with rows that have no labels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.data.conversations import open_conversations
from fbt_megatron.data.dataset import DocumentDataset, open_dataset
from fbt_megatron.data.loader_state import LoaderState
from fbt_megatron.data.order import DocumentOrder
from fbt_megatron.data.packing import PackedRow
from fbt_megatron.data.reader_processes import ReaderProcesses
from fbt_megatron.data.streams import StreamLayout, StreamReader
from fbt_megatron.errors import DataError


@dataclass(frozen=True)
class _Delivery:
    """What a reader hands over: the rows of a micro-batch by stream, each with the cursor that follows it.

    Arrays and no tensors, because PyTorch passes every tensor between processes through a file of its own: slower for
    tensors of this size, and it needs more shared memory than containers have by default.
    """

    cycle: int
    rows: dict[int, PackedRow]


class TrainLoader:
    """Endless training data of one data-parallel rank, resumable at any step."""

    def __init__(
        self, reader: StreamReader, layout: StreamLayout, *, cycles_per_step: int, workers: int, state: LoaderState
    ) -> None:
        """Use `build_train_loader`."""
        # The configuration is checked in the user's words before this; taking turns needs it.
        assert workers == 0 or layout.num_groups % workers == 0, (workers, layout)
        self._reader = reader
        self._layout = layout
        self._cycles_per_step = cycles_per_step
        self._workers = workers
        self._state = state
        self._readers: ReaderProcesses[_Delivery] | None = None
        self._deliveries: Iterator[_Delivery] | None = None
        self._documents: dict[int, tuple[str, ...]] = {}
        self.token_bytes = _as_tensor(reader.dataset.token_bytes)
        """[V] int64, bytes of text per token id; `None` where the tokenizer is not known."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step."""
        return self._cycles_per_step * self._layout.num_groups

    @property
    def epoch(self) -> int:
        """Largest number of times that a stream of this rank has begun its data anew."""
        return max(cursor.epoch for cursor in self._state.cursors.values())

    @property
    def skipped(self) -> tuple[int, int]:
        """Documents that the streams of this rank have passed over since the beginning of the run, and their tokens."""
        cursors = self._state.cursors.values()
        return sum(cursor.skipped for cursor in cursors), sum(cursor.skipped_tokens for cursor in cursors)

    @property
    def cut(self) -> tuple[int, int]:
        """Conversations of this rank's streams that were longer than a row since the beginning of the run, and how many
        of their tokens were left out."""
        cursors = self._state.cursors.values()
        return sum(cursor.cut for cursor in cursors), sum(cursor.cut_tokens for cursor in cursors)

    @property
    def last_documents(self) -> dict[int, tuple[str, ...]]:
        """Keys of the documents in each row of the last step, by global row number."""
        return self._documents

    def next_step(self) -> list[TrainBatch]:
        """The micro-batches of the next optimizer step, in order, without the rows that are passed over.

        Raises:
            DataError: a shard or sample cannot be used, or a reader process has died.
        """
        if self._deliveries is None:
            self._deliveries = self._start_reading()
        try:
            read, step = self._read_step(self._deliveries)
        except DataError:
            self.close()  # another try starts from the last step again
            raise
        self._state.cursors.update({stream: row.next for delivery in read for stream, row in delivery.rows.items()})
        self._state.cycle = read[-1].cycle + 1
        self._documents = {
            self._layout.row(delivery.cycle, stream): row.documents
            for delivery in step
            for stream, row in delivery.rows.items()
        }
        return [_collate(delivery, self._layout) for delivery in step]

    def rewind(self, state: Mapping[str, Any], *, pass_over: tuple[int, int]) -> None:
        """Go on from a merged state of this data set, and pass over a range (first, stop) of cycles beside its own.

        Raises:
            DataError: see `build_train_loader`.
        """
        self.close()
        self._state = LoaderState.restored(state, self._layout, fingerprint=self._reader.dataset.fingerprint)
        self._state.passed_over += (pass_over,)

    def check_skipped(self, skipped: int, epoch: int) -> None:
        """Raise DataError where so many documents, over all ranks, are more than `data.max_skipped` allows."""
        self._reader.check_skipped(skipped, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's streams go on after the last step; see `loader_state.merge_loader_states`."""
        fingerprint = self._reader.dataset.fingerprint
        return self._state.as_dict(num_streams=self._layout.num_streams, fingerprint=fingerprint)

    def close(self) -> None:
        """Stop the reader processes; the next `next_step` would start others."""
        self._deliveries = None
        if self._readers is not None:
            self._readers.close()
            self._readers = None

    def _read_step(self, deliveries: Iterator[_Delivery]) -> tuple[list[_Delivery], list[_Delivery]]:
        """All that is read for one step, and what of it is trained. Cycles are trained or passed over as a whole."""
        read: list[_Delivery] = []
        step: list[_Delivery] = []
        while len(step) < self.num_micro_batches:
            delivery = next(deliveries)
            read.append(delivery)
            if not self._state.passes_over(delivery.cycle):
                step.append(delivery)
        return read, step

    def _start_reading(self) -> Iterator[_Delivery]:
        source = _TrainSource(self._reader, self._layout, self._state.copy())
        if self._workers == 0:
            return source.deliveries(0, 1)
        self._readers = ReaderProcesses(source.deliveries, self._workers)
        return iter(self._readers)


class ValidationLoader:
    """The same global batches each time it is iterated over; items are the micro-batches of one of them."""

    def __init__(self, reader: StreamReader, layout: StreamLayout, *, batches: int, cycles_per_batch: int) -> None:
        """Use `build_validation_loader`."""
        self._reader = reader
        self._layout = layout
        self._batches = batches
        self._cycles_per_batch = cycles_per_batch
        self.token_bytes = _as_tensor(reader.dataset.token_bytes)
        """[V] int64, bytes of text per token id; `None` where the tokenizer is not known."""

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[list[TrainBatch]]:
        groups = range(self._layout.num_groups)
        deliveries = _read_groups(self._layout, groups, self._reader.validation_rows, first_cycle=0)
        num_micro_batches = self._cycles_per_batch * self._layout.num_groups
        for _ in range(self._batches):
            yield [_collate(delivery, self._layout) for delivery in islice(deliveries, num_micro_batches)]


def build_train_loader(
    config: RunConfig, *, dp_rank: int, dp_size: int, state: Mapping[str, Any] | None = None
) -> TrainLoader:
    """Open `data.train`.

    Args:
        config: a validated configuration.
        dp_rank: data-parallel rank that reads.
        dp_size: number of data-parallel ranks.
        state: `state_dict` of a loader, merged over all ranks that it had; any number of ranks can go on from it.

    Raises:
        DataError: the data set cannot be used, is too small, or is not the one that `state` belongs to.
    """
    dataset = _open(config, "train", on_error=config.data.on_error)
    num_streams, seq_length = config.data.streams, config.model.seq_length
    keeps_whole = _keeps_whole(config)
    _check_enough(dataset, num_streams=num_streams, seq_length=seq_length, fills_rows=not keeps_whole)
    layout = _layout(config, dp_rank, dp_size)
    documents_per_shard = [shard.num_documents for shard in dataset.shards]
    order = DocumentOrder(documents_per_shard, seed=config.train.seed)
    start = (
        LoaderState.at_start(layout)
        if state is None
        else LoaderState.restored(state, layout, fingerprint=dataset.fingerprint)
    )
    return TrainLoader(
        StreamReader(
            dataset, order, num_streams, seq_length, max_skipped=config.data.max_skipped, keeps_whole=keeps_whole
        ),
        layout,
        cycles_per_step=config.train.global_batch_size // num_streams,
        workers=config.data.workers,
        state=start,
    )


def build_validation_loader(config: RunConfig, *, dp_rank: int, dp_size: int) -> ValidationLoader | None:
    """Open `data.validation`; `None` where the configuration has none.

    Raises:
        DataError: the data set cannot be used.
    """
    if config.data.validation is None:
        return None
    # A validation loss over fewer documents would look like a better or a worse model.
    dataset = _open(config, "validation", on_error="stop")
    order = DocumentOrder([shard.num_documents for shard in dataset.shards], seed=None)
    return ValidationLoader(
        StreamReader(
            dataset,
            order,
            config.data.streams,
            config.model.seq_length,
            max_skipped=0.0,
            keeps_whole=_keeps_whole(config),
        ),
        _layout(config, dp_rank, dp_size),
        batches=config.evaluation.batches,
        cycles_per_batch=config.train.global_batch_size // config.data.streams,
    )


@dataclass(frozen=True)
class _TrainSource:
    """Deliveries of one rank from a state on."""

    reader: StreamReader
    layout: StreamLayout
    state: LoaderState

    def deliveries(self, worker: int, num_workers: int) -> Iterator[_Delivery]:
        """Those of every `num_workers`-th group, beginning with group `worker`, without end."""
        groups = range(worker, self.layout.num_groups, num_workers)
        return _read_groups(self.layout, groups, self._training_rows, first_cycle=self.state.cycle)

    def _training_rows(self, stream: int) -> Iterator[PackedRow]:
        return self.reader.training_rows(stream, self.state.cursors[stream])


def _read_groups(
    layout: StreamLayout, groups: range, open_rows: Callable[[int], Iterator[PackedRow]], *, first_cycle: int
) -> Iterator[_Delivery]:
    """Micro-batches of `groups`, cycle after cycle without end; `open_rows` gives the rows of one stream."""
    rows = {stream: open_rows(stream) for group in groups for stream in layout.group(group)}
    for cycle in count(first_cycle):
        for group in groups:
            yield _Delivery(cycle, {stream: next(rows[stream]) for stream in layout.group(group)})


def _collate(delivery: _Delivery, layout: StreamLayout) -> TrainBatch:
    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(row, name) for row in delivery.rows.values()]))

    return TrainBatch(
        tokens=stacked("tokens"),
        labels=stacked("labels"),
        positions=stacked("positions"),
        document_ids=stacked("document_ids"),
        rows=torch.tensor([layout.row(delivery.cycle, stream) for stream in delivery.rows], dtype=torch.int64),
    )


def _open(
    config: RunConfig, section: Literal["train", "validation"], *, on_error: Literal["stop", "skip"]
) -> DocumentDataset:
    if config.data.kind == "chat":
        return open_conversations(config.data, section, vocab_size=config.model.vocab_size, on_error=on_error)
    return open_dataset(
        getattr(config.data, section),
        tokenizer=config.data.tokenizer,
        vocab_size=config.model.vocab_size,
        key=f"data.{section}",
        on_error=on_error,
    )


def _keeps_whole(config: RunConfig) -> bool:
    """Whether documents are kept whole: the end of a conversation means nothing without what it answers."""
    return config.data.kind == "chat"


def _layout(config: RunConfig, dp_rank: int, dp_size: int) -> StreamLayout:
    return StreamLayout(config.data.streams, config.train.micro_batch_size, dp_rank, dp_size)


def _check_enough(dataset: DocumentDataset, *, num_streams: int, seq_length: int, fills_rows: bool) -> None:
    """Refuse data of which a stream would not get a document, or on average not a row, in an epoch.

    Rows that nothing has to fill, because the rest of them is padding, need no number of tokens.
    """
    if dataset.num_documents < num_streams:
        raise DataError(
            f"data.streams={num_streams}: the training data has only {dataset.num_documents} documents, and each "
            "stream needs one. Lower data.streams or add documents."
        )
    if fills_rows and dataset.num_tokens < num_streams * (seq_length + 1):
        raise DataError(
            f"model.seq_length={seq_length}: a row takes {seq_length + 1} tokens, but the data.streams={num_streams} "
            f"streams share {dataset.num_tokens} training tokens, about {dataset.num_tokens // num_streams} each. "
            "Lower model.seq_length or data.streams, or add text."
        )


def _as_tensor(table: np.ndarray[Any, Any] | None) -> Tensor | None:
    return None if table is None else torch.from_numpy(table)
