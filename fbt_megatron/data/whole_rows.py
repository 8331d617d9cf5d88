"""Documents of one stream -> rows that hold each of them whole: one that does not fit begins the next row.

A row has the inputs x[0 : S] and the labels x[1 : S + 1] of S + 1 places. A document takes as many places as it has
tokens, and it fits if it ends in place S at the latest: its last token is then a label and no input. What is left of a
row is padding, a document of its own without labels, so nothing of it is seen, fed back or trained.

Example: documents A = [5, 6, 7, E] and B = [8, 9, 4, E], S = 6, padding P:

    tokens        5  6  7  E  P  P     8  9  4  E ...
    labels        6  7  E  -  -  -     9  4  E  - ...
    positions     0  1  2  3  0  1     0  1  2  3 ...
    document_ids  0  0  0  0  1  1     0  0  0  0 ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fbt_megatron.data.packing import Cursor, Document, PackedRow, build_row


def pack_whole_rows(documents: Iterator[Document], *, seq_length: int, pad_id: int) -> Iterator[PackedRow]:
    """Fill rows with whole documents.

    Args:
        documents: the documents in order, of at most S + 1 tokens. Those without tokens are passed over.
        seq_length: S, tokens per row.
        pad_id: what fills the rest of a row.

    Yields:
        Row after row; without end if `documents` has none. `next` is the place of the first document of the next row.
    """
    row: list[Document] = []
    num_filled = 0
    for document in documents:
        size = len(document.tokens)
        if not size:
            continue
        if row and num_filled + max(size - 1, 1) > seq_length:
            yield _padded_row(row, seq_length, pad_id, document.start)
            row, num_filled = [], 0
        row.append(document)
        num_filled += size
    if row:
        yield _padded_row(row, seq_length, pad_id, row[-1].start.next_document())


def _padded_row(documents: Sequence[Document], seq_length: int, pad_id: int, next_row: Cursor) -> PackedRow:
    tokens = np.full(seq_length + 1, pad_id, dtype=np.int64)
    is_start = np.zeros(seq_length + 1, dtype=np.bool_)
    is_trained = np.zeros(seq_length + 1, dtype=np.bool_)
    place = 0
    for document in documents:
        stop = place + len(document.tokens)
        tokens[place:stop] = document.tokens
        is_start[place] = True
        is_trained[place:stop] = True if document.trained is None else document.trained
        place = stop
    is_start[place : place + 1] = True  # the padding, if there is any
    row = build_row(tokens, is_start, is_trained, next_row)
    return replace(row, documents=tuple(document.key for document in documents))
