"""Logical streams: what each reads, and which rows of the run come from which.

The data set is divided into a fixed number V of streams (`data.streams`). Row n of the run comes from stream n mod V,
so one *cycle* takes one row from each stream. A data-parallel rank owns a contiguous block of V/dp streams; a
micro-batch is one row of each of `micro_batch_size` following streams, a *group*. Which rows make up a group does not
depend on the number of ranks, nor does the order of rows within a stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, repeat

from fbt_megatron.data.dataset import DocumentDataset
from fbt_megatron.data.order import DocumentOrder
from fbt_megatron.data.packing import Cursor, Document, PackedRow, masked_row, pack_rows
from fbt_megatron.errors import DataError


@dataclass(frozen=True)
class StreamLayout:
    """Which streams and rows belong to one data-parallel rank."""

    num_streams: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        # The configuration is checked in the user's words before this; here it is an invariant.
        assert self.num_streams % (self.micro_batch_size * self.dp_size) == 0, self

    @property
    def streams_per_rank(self) -> int:
        """Streams that this rank reads."""
        return self.num_streams // self.dp_size

    @property
    def num_groups(self) -> int:
        """Micro-batches that this rank takes per cycle."""
        return self.streams_per_rank // self.micro_batch_size

    def group(self, group: int) -> range:
        """Streams of this rank's micro-batch `group` of a cycle."""
        first = self.dp_rank * self.streams_per_rank + group * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def streams(self) -> range:
        """All streams of this rank."""
        return range(self.dp_rank * self.streams_per_rank, (self.dp_rank + 1) * self.streams_per_rank)

    def row(self, cycle: int, stream: int) -> int:
        """Global number of the row that `stream` gives in `cycle`."""
        return cycle * self.num_streams + stream


@dataclass(frozen=True)
class StreamReader:
    """Rows of any stream of one data set."""

    dataset: DocumentDataset
    order: DocumentOrder
    num_streams: int
    seq_length: int

    def training_rows(self, stream: int, cursor: Cursor) -> Iterator[PackedRow]:
        """Rows of `stream` from `cursor` on, epoch after epoch, without end."""
        return pack_rows(self._repeated_documents(stream, cursor), seq_length=self.seq_length)

    def validation_rows(self, stream: int) -> Iterator[PackedRow]:
        """Rows of one reading of `stream`, the last one padded, and then rows without labels, without end."""
        end = Cursor(epoch=1)
        documents = self._documents(stream, Cursor())
        yield from pack_rows(documents, seq_length=self.seq_length, pad_id=self.dataset.pad_id)
        yield from repeat(masked_row(self.seq_length, pad_id=self.dataset.pad_id, cursor=end))

    def _repeated_documents(self, stream: int, cursor: Cursor) -> Iterator[Document]:
        for epoch in count(cursor.epoch):
            start = cursor if epoch == cursor.epoch else Cursor(epoch=epoch)
            num_tokens = 0
            for document in self._documents(stream, start):
                num_tokens += len(document.tokens)
                yield document
            if not num_tokens and start == Cursor(epoch=epoch):
                raise DataError(
                    f"stream {stream} of data.streams={self.num_streams} found no tokens in epoch {epoch}: its "
                    "documents are empty. Lower data.streams or add text."
                )

    def _documents(self, stream: int, cursor: Cursor) -> Iterator[Document]:
        """The documents of `stream` in one epoch, from `cursor` on."""
        start, stop = self.order.stream_range(stream, num_streams=self.num_streams)
        document, offset = cursor.document, cursor.offset
        for span in self.order.epoch(cursor.epoch).spans(start + document, stop):
            for key, tokens in self.dataset.read(span):
                yield Document(key=key, tokens=tokens[offset:], start=Cursor(cursor.epoch, document, offset))
                document, offset = document + 1, 0
