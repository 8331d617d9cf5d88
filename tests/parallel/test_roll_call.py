"""Ranks call each other and answer over the store; each rank is a thread here."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fbt_megatron.parallel.roll_call import Call, Roll, RollCall, name_ranks


@pytest.fixture
def store() -> dist.Store:
    """A store as ranks meet at."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ranks(store: dist.Store) -> list[RollCall]:
    """Three ranks."""
    return [RollCall(dist.PrefixStore("default_pg", store), rank=rank, world_size=3) for rank in range(3)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for what ranks do at the same time."""
    with ThreadPoolExecutor(3) as executor:
        yield executor


def test_every_rank_hears_the_first_call(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    never = threading.Event()
    heard = [pool.submit(ranks[rank].listen, never) for rank in (0, 2)]
    assert ranks[0].heard() is None
    ranks[1].host, ranks[2].host = "node1", "node2"
    first = ranks[1].call("failed", "KeyError: 'x'.")
    assert first == Call("failed", 1, "node1", "KeyError: 'x'.")
    assert ranks[2].call("lost", "Broken pipe.") == Call("lost", 2, "node2", "Broken pipe.")
    assert [future.result(30) for future in heard] == [first, first]
    assert ranks[2].heard() == first


def test_listening_ends_when_it_is_told_to(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    stopped = threading.Event()
    listening = pool.submit(ranks[0].listen, stopped)
    stopped.set()
    assert listening.result(30) is None


def test_the_first_rank_stays_until_its_call_is_heard(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    """It may hold the store, which ends with its process; of a failure it alone knows what it was."""
    ranks[0].call("failed", "KeyError: 'x'.")
    assert ranks[0].heard() is not None
    staying = pool.submit(ranks[0].see_off, seconds=60.0)
    for other in ranks[1:]:
        time.sleep(0.5)
        assert not staying.done()
        assert other.heard() == other.heard() is not None  # twice by one rank is once
    staying.result(30)
    ranks[1].see_off()  # another rank need not stay


def test_all_ranks_answer(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    places = ["waiting in sum_across", "reading", "waiting in sum_across"]
    answers = [pool.submit(rank.answer, place, seconds=60.0) for rank, place in zip(ranks, places, strict=True)]
    rolls = [answer.result(60) for answer in answers]
    assert rolls == [Roll([], [("reading", [1]), ("waiting in sum_across", [0, 2])])] * 3
    assert rolls[0].lines() == ["rank 1: reading", "ranks 0, 2: waiting in sum_across"]


def test_a_rank_that_does_not_answer_is_named(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    answers = [pool.submit(rank.answer, "waiting", seconds=1.0) for rank in ranks[:2]]
    for answer in answers:
        roll = answer.result(60)
        assert roll == Roll([(2, ranks[2].host)], [("waiting", [0, 1])])
        assert roll.lines()[0] == f"rank 2 on {ranks[2].host}: no answer (killed, stopped, or node lost)"


def test_ranks_leave_together(ranks: list[RollCall], pool: ThreadPoolExecutor) -> None:
    leaving = [pool.submit(rank.leave_together, seconds=60.0) for rank in ranks[:2]]
    time.sleep(0.5)
    assert not any(future.done() for future in leaving)
    assert ranks[2].leave_together()
    assert all(future.result(30) for future in leaving)


def test_a_rank_that_others_do_not_follow_leaves_alone(ranks: list[RollCall]) -> None:
    start = time.monotonic()
    assert not ranks[0].leave_together(seconds=1.0)
    assert 0.9 < time.monotonic() - start < 10.0


def test_nothing_waits_for_a_store_that_is_gone() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    rank = RollCall(client, rank=1, world_size=2)
    del server
    start = time.monotonic()
    rank.call("failed", "KeyError: 'x'.")
    assert rank.heard() is None
    assert rank.answer("waiting") is None
    assert not rank.leave_together()
    assert rank.listen(threading.Event()) is None
    assert time.monotonic() - start < 10.0


@pytest.mark.parametrize(
    ("ranks", "name"),
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7"), ([1, 3], "ranks 1, 3")],
)
def test_names_of_ranks(ranks: list[int], name: str) -> None:
    assert name_ranks(ranks) == name
