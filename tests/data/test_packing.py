"""Rows against a token-by-token definition of what they must hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fbt_megatron.data.packing import Cursor, Document, PackedRow, masked_row, pack_rows

MASKED = -100
DOCUMENTS = st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=12)
E = 99


def documents(texts: Sequence[Sequence[int]], start: Cursor | None = None) -> Iterator[Document]:
    """Documents of one epoch from `start` on; the key is the number."""
    start = start or Cursor()
    for number, text in enumerate(texts):
        if number >= start.document:
            offset = start.offset if number == start.document else 0
            yield Document(str(number), np.array(text[offset:], dtype=np.uint16), Cursor(0, number, offset))


def rows_of(texts: Sequence[Sequence[int]], seq_length: int, pad_id: int | None = None) -> list[PackedRow]:
    return list(pack_rows(documents(texts), seq_length=seq_length, pad_id=pad_id))


def naive_row(texts: Sequence[Sequence[int]], first: int, seq_length: int) -> dict[str, list[int]]:
    """Row that starts at token `first` of the concatenated documents, one token at a time."""
    owner = [(number, token) for number, text in enumerate(texts) for token in text]
    row: dict[str, list[int]] = {"tokens": [], "labels": [], "positions": [], "document_ids": []}
    for place in range(first, first + seq_length):
        number, token = owner[place]
        next_number, next_token = owner[place + 1]
        new = place == first or owner[place - 1][0] != number
        row["tokens"].append(token)
        row["labels"].append(next_token if next_number == number else MASKED)
        row["positions"].append(0 if new else row["positions"][-1] + 1)
        row["document_ids"].append(0 if place == first else row["document_ids"][-1] + new)
    return row


def as_lists(row: PackedRow) -> dict[str, list[int]]:
    return {name: getattr(row, name).tolist() for name in ("tokens", "labels", "positions", "document_ids")}


def test_two_documents_in_one_row() -> None:
    row = rows_of([[5, 6, 7, E], [8, 9, E], [1]], 7)[0]
    assert as_lists(row) == {
        "tokens": [5, 6, 7, E, 8, 9, E],
        "labels": [6, 7, E, MASKED, 9, E, MASKED],
        "positions": [0, 1, 2, 3, 0, 1, 2],
        "document_ids": [0, 0, 0, 0, 1, 1, 1],
    }
    assert row.documents == ("0", "1")
    assert row.next == Cursor(0, 2, 0)


def test_masking_ignores_token_values() -> None:
    """BOS 1, EOS 2, padding 2 as well: both EOS are trained, the padding is not."""
    (row,) = rows_of([[1, 10, 2], [1, 11, 2]], 8, pad_id=2)
    assert row.tokens.tolist() == [1, 10, 2, 1, 11, 2, 2, 2]
    assert row.labels.tolist() == [10, 2, MASKED, 11, 2, MASKED, MASKED, MASKED]
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert row.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert row.documents == ("0", "1")


def test_a_document_is_cut_across_rows_and_the_label_at_the_cut_is_trained() -> None:
    first, second = rows_of([[10, 11, 12, 13, 14, E], [1]], 3)
    assert first.labels.tolist() == [11, 12, 13]
    assert first.next == Cursor(0, 0, 3)
    assert second.tokens.tolist() == [13, 14, E]
    assert second.positions.tolist() == [0, 1, 2]
    assert second.labels.tolist() == [14, E, MASKED]


def test_the_same_document_twice_is_two_documents() -> None:
    twice = [Document("a", np.array([3, E]), Cursor(epoch, 0, 0)) for epoch in (0, 1, 2)]
    rows = list(pack_rows(iter(twice), seq_length=2))
    assert [row.labels.tolist() for row in rows] == [[E, MASKED], [E, MASKED]]
    assert rows[-1].next == Cursor(2, 0, 0)


@given(DOCUMENTS, st.integers(1, 8))
def test_rows_hold_every_token_in_order(texts: list[list[int]], seq_length: int) -> None:
    stream = [token for text in texts for token in text]
    rows = rows_of(texts, seq_length)
    assert len(rows) == max(0, (len(stream) - 1) // seq_length)
    for number, row in enumerate(rows):
        assert as_lists(row) == naive_row(texts, number * seq_length, seq_length)


@given(DOCUMENTS, st.integers(1, 8))
def test_going_on_from_any_row_gives_the_same_rows(texts: list[list[int]], seq_length: int) -> None:
    rows = rows_of(texts, seq_length)
    for number, row in enumerate(rows):
        rest = list(pack_rows(documents(texts, row.next), seq_length=seq_length))
        assert [as_lists(r) for r in rest] == [as_lists(r) for r in rows[number + 1 :]]
        assert [(r.next, r.documents) for r in rest] == [(r.next, r.documents) for r in rows[number + 1 :]]


@given(DOCUMENTS, st.integers(1, 8))
def test_padding_adds_the_labels_that_are_left_and_no_others(texts: list[list[int]], seq_length: int) -> None:
    rows = rows_of(texts, seq_length, pad_id=77)
    labels = [label for row in rows for label in row.labels.tolist() if label != MASKED]
    assert labels == [token for text in texts for token in text[1:]]
    assert all(len(row.tokens) == seq_length for row in rows)
    whole = rows_of(texts, seq_length)
    assert [as_lists(row) for row in rows[: len(whole)]] == [as_lists(row) for row in whole]


@given(DOCUMENTS, st.integers(1, 8))
def test_a_row_names_its_documents(texts: list[list[int]], seq_length: int) -> None:
    keys = [str(number) for number, text in enumerate(texts) for _ in text]
    for number, row in enumerate(rows_of(texts, seq_length)):
        inputs = keys[number * seq_length : (number + 1) * seq_length]
        assert list(row.documents) == list(dict.fromkeys(inputs))


def test_rows_come_before_the_documents_end() -> None:
    def endless() -> Iterator[Document]:
        while True:
            yield Document("a", np.array([1, 2, E]), Cursor())

    assert len(list(islice(pack_rows(endless(), seq_length=5), 100))) == 100


def test_a_masked_row_has_no_labels() -> None:
    row = masked_row(4, pad_id=9, cursor=Cursor(1))
    assert as_lists(row) == {
        "tokens": [9] * 4,
        "labels": [MASKED] * 4,
        "positions": [0, 1, 2, 3],
        "document_ids": [0] * 4,
    }


MASKED_DOCUMENTS = st.lists(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=9), max_size=12)


@given(MASKED_DOCUMENTS, st.integers(1, 7), st.integers(0, 40))
def test_a_label_counts_where_its_document_says_so(
    texts: list[list[tuple[int, bool]]], seq_length: int, first_token: int
) -> None:
    """From the beginning, and going on at any token of it; only labels differ from those of the same ids without."""
    ids = [[token for token, _ in text] for text in texts]
    flags = [np.array([flag for _, flag in text], dtype=np.bool_) for text in texts]
    places = [(number, offset) for number, text in enumerate(ids) for offset in range(len(text))]
    start = Cursor(0, *places[first_token]) if first_token < len(places) else Cursor()

    def with_masks() -> Iterator[Document]:
        for document in documents(ids, start):
            yield replace(document, trained=flags[document.start.document][document.start.offset :])

    found = list(pack_rows(with_masks(), seq_length=seq_length, pad_id=9))
    plain = list(pack_rows(documents(ids, start), seq_length=seq_length, pad_id=9))
    trained = [flag for text in texts for _, flag in text][_num_before(ids, start) :]
    assert len(found) == len(plain)
    for number, (row, other) in enumerate(zip(found, plain, strict=True)):
        assert _without_labels(row) == _without_labels(other)
        for place in range(seq_length):
            label = number * seq_length + place + 1
            counts = label < len(trained) and trained[label]
            assert row.labels[place] == (other.labels[place] if counts else MASKED)


def _num_before(ids: list[list[int]], start: Cursor) -> int:
    return sum(len(text) for text in ids[: start.document]) + start.offset


def _without_labels(row: PackedRow) -> dict[str, object]:
    """All of a row but its labels."""
    lists = {name: value for name, value in as_lists(row).items() if name != "labels"}
    return {**lists, "next": row.next, "documents": row.documents}
