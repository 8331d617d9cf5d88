"""Logical streams: what each reads, and which rows of the run come from which.

The data set is divided into a fixed number V of streams (`data.streams`). Row n of the run comes from stream n mod V,
so one *cycle* takes one row from each stream. A data-parallel rank owns a contiguous block of V/dp streams; a
micro-batch is one row of each of `micro_batch_size` following streams, a *group*. Which rows make up a group does not
depend on the number of ranks, nor does the order of rows within a stream.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from itertools import repeat

from fbt_megatron.data.dataset import DocumentDataset
from fbt_megatron.data.document_reader import ReadDocument
from fbt_megatron.data.order import DocumentOrder
from fbt_megatron.data.packing import Cursor, Document, PackedRow, masked_row, pack_rows
from fbt_megatron.data.whole_rows import pack_whole_rows
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
    max_skipped: float
    """Largest share of an epoch's documents that may be passed over."""
    keeps_whole: bool
    """True where a document must not go on in another row: `whole_rows` in place of `packing`."""

    def training_rows(self, stream: int, cursor: Cursor) -> Iterator[PackedRow]:
        """Rows of `stream` from `cursor` on, epoch after epoch, without end."""
        documents = self._repeated_documents(stream, cursor)
        if self.keeps_whole:
            return pack_whole_rows(documents, seq_length=self.seq_length, pad_id=self.dataset.pad_id)
        return pack_rows(documents, seq_length=self.seq_length)

    def validation_rows(self, stream: int) -> Iterator[PackedRow]:
        """Rows of one reading of `stream`, the last one padded, and then rows without labels, without end."""
        end = Cursor(epoch=1)
        documents = self._documents(stream, Cursor())
        pack = pack_whole_rows if self.keeps_whole else pack_rows
        yield from pack(documents, seq_length=self.seq_length, pad_id=self.dataset.pad_id)
        yield from repeat(masked_row(self.seq_length, pad_id=self.dataset.pad_id, cursor=end))

    def check_skipped(self, skipped: int, epoch: int) -> None:
        """Stop a run that loses its data.

        Args:
            skipped: documents passed over since the beginning of the run.
            epoch: number of the epoch that is furthest, counted from 0.

        Raises:
            DataError: they are more than the allowed share of the documents of the epochs begun so far.
        """
        begun = self.order.num_documents * (epoch + 1)
        if skipped > self.max_skipped * begun:
            raise DataError(
                f"data.on_error=skip: {skipped:,} of the {begun:,} documents of the epochs begun so far were passed "
                f"over, and data.max_skipped={self.max_skipped:g} allows {int(self.max_skipped * begun):,}. What was "
                "printed before says why; tools/verify_shards.py finds all damage. Repair the data set, or raise "
                "data.max_skipped."
            )

    def _repeated_documents(self, stream: int, cursor: Cursor) -> Iterator[Document]:
        while True:
            is_whole_epoch = cursor.document == cursor.offset == 0
            end, num_tokens = yield from self._documents(stream, cursor)
            if is_whole_epoch and not num_tokens:
                raise DataError(
                    f"stream {stream} of data.streams={self.num_streams} found no tokens in epoch {cursor.epoch}: its "
                    "documents are empty or cannot be read. Lower data.streams or add text."
                )
            cursor = replace(end, epoch=cursor.epoch + 1, document=0)

    def _documents(self, stream: int, cursor: Cursor) -> Generator[Document, None, tuple[Cursor, int]]:
        """The documents of `stream` in one epoch from `cursor` on; returns the place after them and their tokens."""
        start, stop = self.order.stream_range(stream, num_streams=self.num_streams)
        num_tokens = 0
        for span in self.order.epoch(cursor.epoch).spans(start + cursor.document, stop):
            for read in self.dataset.read(span):
                part = slice(cursor.offset, self.seq_length + 1 if self.keeps_whole else None)
                trained = None if read.trained is None else read.trained[part]
                document = Document(key=read.key, tokens=read.tokens[part], start=cursor, trained=trained)
                num_tokens += len(document.tokens)
                yield document
                cursor = cursor.next_document()
                left_out = len(read.tokens) - (self.seq_length + 1)
                if self.keeps_whole and left_out > 0:
                    cursor = replace(cursor, cut=cursor.cut + 1, cut_tokens=cursor.cut_tokens + left_out)
                if read.skipped:
                    cursor = self._after_skipped(cursor, read)
        return cursor, num_tokens

    def _after_skipped(self, cursor: Cursor, read: ReadDocument) -> Cursor:
        """`cursor` with one more document passed over; raises DataError where this stream alone has lost too many.

        The trainer adds the streams up, but a stream that finds nothing to read would never hand it a row.
        """
        after = replace(cursor, skipped=cursor.skipped + 1, skipped_tokens=cursor.skipped_tokens + read.skipped_tokens)
        self.check_skipped(after.skipped, after.epoch)
        return after
