"""Every document once per epoch, whatever the shards and the number of streams."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fbt_megatron.data.order import DocumentOrder

Places = list[tuple[int, int]]
SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(lambda counts: sum(counts) > 0)


def read_epoch(order: DocumentOrder, epoch: int, num_streams: int = 1) -> list[Places]:
    """(shard, document) of each stream, in reading order."""
    streams = []
    for stream in range(num_streams):
        spans = order.epoch(epoch).spans(*order.stream_range(stream, num_streams=num_streams))
        streams.append([(span.shard, span.first + i) for span in spans for i in range(span.count)])
    return streams


@given(SHARDS, st.integers(1, 6), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_epoch_has_every_document_once(counts: list[int], num_streams: int, seed: int, epoch: int) -> None:
    streams = read_epoch(DocumentOrder(counts, seed=seed), epoch, num_streams)
    expected = [(shard, document) for shard, count in enumerate(counts) for document in range(count)]
    assert sorted(place for stream in streams for place in stream) == expected
    assert max(map(len, streams)) - min(map(len, streams)) <= 1


@given(SHARDS, st.integers(0, 2**40), st.integers(0, 1000))
def test_the_list_does_not_depend_on_the_number_of_streams(counts: list[int], seed: int, epoch: int) -> None:
    whole = read_epoch(DocumentOrder(counts, seed=seed), epoch)[0]
    for num_streams in (2, 3, 5):
        streams = read_epoch(DocumentOrder(counts, seed=seed), epoch, num_streams)
        assert [place for stream in streams for place in stream] == whole


@given(SHARDS.filter(lambda counts: max(counts) > 1), st.integers(0, 2**40), st.integers(0, 1000))
def test_following_epochs_differ(counts: list[int], seed: int, epoch: int) -> None:
    order = DocumentOrder(counts, seed=seed)
    assert read_epoch(order, epoch) != read_epoch(order, epoch + 1)


@given(SHARDS, st.integers(0, 2**40), st.data())
def test_spans_may_start_anywhere(counts: list[int], seed: int, data: st.DataObject) -> None:
    order = DocumentOrder(counts, seed=seed)
    whole = read_epoch(order, 3)[0]
    start = data.draw(st.integers(0, len(whole)))
    rest = [(span.shard, span.first + i) for span in order.epoch(3).spans(start, len(whole)) for i in range(span.count)]
    assert rest == whole[start:]


def test_seeds_give_different_orders() -> None:
    counts = [5, 3, 1, 7]
    orders = {tuple(read_epoch(DocumentOrder(counts, seed=seed), 0)[0]) for seed in range(20)}
    assert len(orders) == 20


def test_shards_move_in_the_list_from_epoch_to_epoch() -> None:
    order = DocumentOrder([2] * 16, seed=7)
    firsts = {read_epoch(order, epoch)[0][0][0] for epoch in range(32)}
    assert len(firsts) > 8


def test_a_shard_is_read_in_two_runs() -> None:
    spans = list(DocumentOrder([1000], seed=3).epoch(5).spans(0, 1000))
    assert [span.count for span in spans] == [1000 - spans[0].first, spans[0].first]


def test_without_a_seed_the_order_is_the_stored_one() -> None:
    order = DocumentOrder([2, 0, 3], seed=None)
    assert read_epoch(order, 0, 2) == [[(0, 0), (0, 1)], [(2, 0), (2, 1), (2, 2)]]
    assert read_epoch(order, 1, 2) == read_epoch(order, 0, 2)


def test_the_order_of_a_seed_never_changes() -> None:
    """Checkpoints of earlier versions hold places in it."""
    order = DocumentOrder([5, 3, 1], seed=1)
    assert read_epoch(order, 0)[0] == [(1, 1), (1, 2), (1, 0), (0, 3), (0, 4), (0, 0), (0, 1), (0, 2), (2, 0)]
    assert read_epoch(order, 1)[0] == [(1, 0), (1, 1), (1, 2), (2, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 0)]


def test_epochs_can_be_asked_for_in_any_order() -> None:
    order = DocumentOrder([4, 4], seed=9)
    for epoch in (0, 3, 1, 2, 1, 0, 7, 0):
        assert read_epoch(order, epoch) == read_epoch(DocumentOrder([4, 4], seed=9), epoch)
