"""Rows of whole documents against the rule, place by place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fbt_megatron.data.packing import Cursor, Document, PackedRow
from fbt_megatron.data.whole_rows import pack_whole_rows

MASKED = -100
PAD = 77
E = 99
Text = list[tuple[int, bool]]


def documents(texts: list[Text], first: int = 0) -> Iterator[Document]:
    """Documents from number `first` on; the key is the number."""
    for number, text in enumerate(texts[first:], start=first):
        ids, trained = (np.array([token[part] for token in text]) for part in (0, 1))
        yield Document(str(number), ids.astype(np.int64), Cursor(0, number), trained.astype(np.bool_))


def as_lists(row: PackedRow) -> dict[str, list[int]]:
    return {name: getattr(row, name).tolist() for name in ("tokens", "labels", "positions", "document_ids")}


def plain(*texts: list[int]) -> Iterator[Document]:
    return (Document(str(n), np.array(text), Cursor(0, n)) for n, text in enumerate(texts))


def test_a_document_that_does_not_fit_begins_the_next_row() -> None:
    first, second = pack_whole_rows(plain([5, 6, 7, E], [8, 9, 4, E]), seq_length=6, pad_id=PAD)
    assert as_lists(first) == {
        "tokens": [5, 6, 7, E, PAD, PAD],
        "labels": [6, 7, E, MASKED, MASKED, MASKED],
        "positions": [0, 1, 2, 3, 0, 1],
        "document_ids": [0, 0, 0, 0, 1, 1],
    }
    assert (first.documents, first.next) == (("0",), Cursor(0, 1))
    assert second.labels.tolist() == [9, 4, E, MASKED, MASKED, MASKED]
    assert second.documents == ("1",)


def test_the_last_token_needs_no_input() -> None:
    (row,) = pack_whole_rows(plain([5, 6, E], [8, 9, 4, E]), seq_length=6, pad_id=PAD)
    assert as_lists(row) == {
        "tokens": [5, 6, E, 8, 9, 4],
        "labels": [6, E, MASKED, 9, 4, E],
        "positions": [0, 1, 2, 0, 1, 2],
        "document_ids": [0, 0, 0, 1, 1, 1],
    }


def test_the_first_token_of_a_document_is_an_input() -> None:
    """One of a single token does not go where only the last label would be."""
    first, second = pack_whole_rows(plain([5, 6, E], [8]), seq_length=3, pad_id=PAD)
    assert first.labels.tolist() == [6, E, MASKED]
    assert (first.documents, second.documents) == (("0",), ("1",))
    assert second.tokens.tolist() == [8, PAD, PAD]


def test_padding_that_looks_like_the_end_of_a_document_is_not_trained() -> None:
    (row,) = pack_whole_rows(plain([5, E]), seq_length=4, pad_id=E)
    assert row.labels.tolist() == [E, MASKED, MASKED, MASKED]


@given(st.integers(1, 7), st.data())
def test_every_document_is_in_one_row(seq_length: int, data: st.DataObject) -> None:
    sizes = st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=seq_length + 1)
    texts = data.draw(st.lists(sizes, max_size=12))
    found = list(pack_whole_rows(documents(texts), seq_length=seq_length, pad_id=PAD))
    assert [key for row in found for key in row.documents] == [str(n) for n, text in enumerate(texts) if text]
    for row in found:
        parts = [texts[int(key)] for key in row.documents]
        flat = [(number, n, *token) for number, part in enumerate(parts) for n, token in enumerate(part)]
        flat += [(len(row.documents), n, PAD, False) for n in range(seq_length + 1 - len(flat))]
        assert as_lists(row) == {
            "tokens": [token for _, _, token, _ in flat[:-1]],
            "labels": [after[2] if after[0] == before[0] and after[3] else MASKED for before, after in pairwise(flat)],
            "positions": [place for _, place, _, _ in flat[:-1]],
            "document_ids": [number for number, _, _, _ in flat[:-1]],
        }
    for row, following in pairwise(found):
        num_filled = sum(len(texts[int(key)]) for key in row.documents)
        size = len(texts[int(following.documents[0])])
        assert num_filled + size > seq_length + 1 or num_filled >= seq_length
        assert row.next == Cursor(0, int(following.documents[0]))


@given(st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=6), max_size=12), st.integers(5, 9))
def test_going_on_from_any_row_gives_the_same_rows(texts: list[Text], seq_length: int) -> None:
    found = list(pack_whole_rows(documents(texts), seq_length=seq_length, pad_id=PAD))
    for number, row in enumerate(found):
        rest = list(pack_whole_rows(documents(texts, row.next.document), seq_length=seq_length, pad_id=PAD))
        assert [(as_lists(r), r.documents, r.next) for r in rest] == [
            (as_lists(r), r.documents, r.next) for r in found[number + 1 :]
        ]
