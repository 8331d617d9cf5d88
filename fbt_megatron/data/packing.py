"""Documents of one stream -> rows of `S` tokens with labels, positions and document ids.

The documents of a stream are one long sequence of tokens x. Row k has the inputs x[k*S : k*S + S] and the labels
x[k*S + 1 : k*S + S + 1], so rows need S + 1 tokens, follow each other at stride S, and no token is dropped: documents
are cut wherever a row ends. A label that belongs to another document than its input is masked, and so is one that its
document says is not trained. Both decisions use places, never token values, so a padding id equal to the
end-of-document id hides nothing.

Example: documents A = [5, 6, 7, E] and B = [8, 9, E], S = 7:

    tokens        5  6  7  E  8  9  E
    labels        6  7  E  -  9  E  -
    positions     0  1  2  3  0  1  2
    document_ids  0  0  0  0  1  1  1
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.data.batch import IGNORE_INDEX

Array = NDArray[np.int64]


@dataclass(frozen=True)
class Cursor:
    """Place of one token in a stream: all that must be kept to go on from there."""

    epoch: int = 0
    """How often the stream has begun its range anew."""
    document: int = 0
    """Document, counted inside the stream's range of that epoch."""
    offset: int = 0
    """Token, counted inside the document."""
    skipped: int = 0
    """Documents of the stream that were passed over on the way here, in all epochs."""
    skipped_tokens: int = 0
    """Tokens of those, as far as an index states them."""
    cut: int = 0
    """Conversations of the stream that were longer than a row on the way here, in all epochs."""
    cut_tokens: int = 0
    """Tokens at their ends that were left out."""

    # Written out, because `dataclasses.replace` is slow and these are called for every document.

    def after_tokens(self, num_tokens: int) -> Cursor:
        """The place so many tokens further in the same document."""
        return Cursor(self.epoch, self.document, self.offset + num_tokens, *self._counts)

    def next_document(self) -> Cursor:
        """The beginning of the next document."""
        return Cursor(self.epoch, self.document + 1, 0, *self._counts)

    @property
    def _counts(self) -> tuple[int, int, int, int]:
        return self.skipped, self.skipped_tokens, self.cut, self.cut_tokens


@dataclass(frozen=True)
class Document:
    """The tokens of one document, from `start.offset` on."""

    key: str
    """Name of the sample in its data set."""
    tokens: NDArray[np.integer]
    """[tokens] unsigned ids as stored."""
    start: Cursor
    """Place of `tokens[0]`."""
    trained: NDArray[np.bool_] | None = None
    """[tokens] whether a token is trained where it is a label; `None`: all of them."""


@dataclass(frozen=True)
class PackedRow:
    """One row; arrays are [S]."""

    tokens: Array
    labels: Array
    positions: Array
    document_ids: Array
    next: Cursor
    """Place of the first token of the next row."""
    documents: tuple[str, ...] = ()
    """Keys of the documents that the inputs belong to, in order of `document_ids`; nothing for padding."""


def pack_rows(documents: Iterator[Document], *, seq_length: int, pad_id: int | None = None) -> Iterator[PackedRow]:
    """Cut a sequence of documents into rows.

    Args:
        documents: the documents in order; the first may start inside. Documents without tokens are passed over.
        seq_length: S, tokens per row.
        pad_id: what fills the row in which the documents end; such a row comes if it has a label. `None` drops it.

    Yields:
        Row after row; without end if `documents` has none.
    """
    pending: deque[Document] = deque()
    num_pending = 0
    for document in documents:
        if not len(document.tokens):
            continue
        pending.append(document)
        num_pending += len(document.tokens)
        while num_pending > seq_length:
            yield _take_row(pending, seq_length)
            num_pending -= seq_length
    if pad_id is not None and num_pending > 1:
        yield _take_padded_row(pending, num_pending, seq_length, pad_id)


def build_row(
    tokens: Array, is_document_start: NDArray[np.bool_], is_trained: NDArray[np.bool_], next_row: Cursor
) -> PackedRow:
    """Inputs, labels, positions and document ids of one row.

    Args:
        tokens: [S + 1] int64.
        is_document_start: [S + 1], true where a document begins; the first entry does not matter.
        is_trained: [S + 1], false for tokens that are no labels; the first entry does not matter.
        next_row: place of `tokens[S]`.
    """
    seq_length = len(tokens) - 1
    begins = is_document_start[:-1].copy()
    begins[0] = True  # a row starts its first document anew, wherever it was cut
    index = np.arange(seq_length, dtype=np.int64)
    return PackedRow(
        tokens=tokens[:-1],
        labels=np.where(is_document_start[1:] | ~is_trained[1:], IGNORE_INDEX, tokens[1:]),
        positions=index - np.maximum.accumulate(np.where(begins, index, 0)),
        document_ids=np.cumsum(begins, dtype=np.int64) - 1,
        next=next_row,
    )


def masked_row(seq_length: int, *, pad_id: int, cursor: Cursor) -> PackedRow:
    """A row of padding without a trained label: keeps ranks in step where a finite stream has ended."""
    return PackedRow(
        tokens=np.full(seq_length, pad_id, dtype=np.int64),
        labels=np.full(seq_length, IGNORE_INDEX, dtype=np.int64),
        positions=np.arange(seq_length, dtype=np.int64),
        document_ids=np.zeros(seq_length, dtype=np.int64),
        next=cursor,
    )


def _take_row(pending: deque[Document], seq_length: int) -> PackedRow:
    """Build a row from the first S + 1 pending tokens and remove the first S of them."""
    tokens = np.empty(seq_length + 1, dtype=np.int64)
    is_start = np.zeros(seq_length + 1, dtype=np.bool_)
    is_trained = np.ones(seq_length + 1, dtype=np.bool_)
    keys = []
    filled = 0
    while True:
        document = pending[0]
        piece = document.tokens[: seq_length + 1 - filled]
        tokens[filled : filled + len(piece)] = piece
        is_start[filled] = True
        if document.trained is not None:
            is_trained[filled : filled + len(piece)] = document.trained[: len(piece)]
        if filled < seq_length:
            keys.append(document.key)
        if filled + len(piece) > seq_length:
            break
        filled += len(piece)
        pending.popleft()
    # A first document that was cut before is no document start, but `build_row` ignores entry 0; one that begins with
    # the last token of the row is, and masks the last label.
    pending[0] = _without_first(document, seq_length - filled)
    row = build_row(tokens, is_start, is_trained, pending[0].start)
    return replace(row, documents=tuple(keys))


def _take_padded_row(pending: deque[Document], num_pending: int, seq_length: int, pad_id: int) -> PackedRow:
    """The last row of a finite stream: what is left, then padding that counts as a document without labels."""
    num_padding = seq_length + 1 - num_pending
    end = pending[-1].start.next_document()
    pending.append(Document(key="", tokens=np.full(num_padding, pad_id, dtype=np.int64), start=end))
    row = _take_row(pending, seq_length)
    labels = row.labels.copy()
    labels[num_pending - 1 :] = IGNORE_INDEX
    return replace(row, labels=labels, next=end, documents=tuple(key for key in row.documents if key))


def _without_first(document: Document, num_tokens: int) -> Document:
    trained = None if document.trained is None else document.trained[num_tokens:]
    start = document.start.after_tokens(num_tokens)
    return Document(key=document.key, tokens=document.tokens[num_tokens:], start=start, trained=trained)
