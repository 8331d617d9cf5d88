"""How a rank tells the others that the run has failed, and finds out which of them still answer.

It goes over the store at which the ranks met, by a connection of its own: collectives are of no use when one rank is
gone or all wait for each other, and the main thread of a rank may be inside one.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

import torch.distributed as dist

T = TypeVar("T")

_POLL_SECONDS = 0.2
_LISTEN_SECONDS = 1.0


Kind = Literal["failed", "lost", "hang"]
"""An error of one rank alone; a connection that broke; no progress."""


@dataclass(frozen=True)
class Call:
    """Why the run ends: the first rank to notice says it, and all others hear it."""

    kind: Kind
    rank: int
    host: str
    text: str


@dataclass(frozen=True)
class Roll:
    """Which ranks answered a call, and where they are."""

    silent: list[tuple[int, str]]
    """Rank and host of those that did not."""
    places: list[tuple[str, list[int]]]
    """What each of the others is doing, with the ranks that do it; the fewest first."""

    def lines(self) -> list[str]:
        """One line for each rank without an answer, then one for each place."""
        silent = [f"rank {rank} on {host}: no answer (killed, stopped, or node lost)" for rank, host in self.silent]
        return silent + [f"{name_ranks(ranks)}: {place}" for place, ranks in self.places]


class RollCall:
    """One rank's voice and ear. Every method is bounded in time and gives up silently where the store is gone."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int) -> None:
        """`store` may be in use by others, also while they wait in it."""
        self.rank = rank
        self.world_size = world_size
        self.host = socket.gethostname()
        # torch's type stubs lack `clone`.
        self._ear = dist.PrefixStore("roll_call", store.clone())  # type: ignore[attr-defined]
        self._voice = dist.PrefixStore("roll_call", store.clone())  # type: ignore[attr-defined]
        self._ear.set(f"host/{rank}", self.host)
        self._has_heard = False
        self._store_is_gone = False

    def listen(self, stopped: threading.Event) -> Call | None:
        """Wait until some rank calls; None where `stopped` is set first, or the store is gone."""
        while not stopped.wait(_LISTEN_SECONDS):
            try:
                call = self._heard(self._ear)
            except RuntimeError:  # the process with the store has ended, as one has to be the first at a good end
                return None
            if call is not None:
                return call
        return None

    def heard(self, *, seconds: float = 5.0) -> Call | None:
        """What a rank has called, if any has."""
        return self._bounded(lambda: self._heard(self._voice), seconds)

    def call(self, kind: Kind, text: str, *, seconds: float = 5.0) -> Call:
        """Tell all ranks; the first call counts, which need not be this one. Returns this one."""
        call = Call(kind, self.rank, self.host, text)
        self._bounded(lambda: self._voice.compare_set("call", "", json.dumps(asdict(call))), seconds)
        return call

    def see_off(self, *, seconds: float = 10.0) -> None:
        """Before leaving after a call that needs no answer: rank 0, which may hold the store, stays until all heard."""
        if self.rank == 0:
            self._bounded(lambda: self._count_up_to(self.world_size - 1, "heard", 0, seconds), seconds + 5.0)

    def answer(self, place: str, *, seconds: float = 10.0) -> Roll | None:
        """Say what this rank is doing, and wait at most `seconds` for the others; None where the store is gone."""
        return self._bounded(lambda: self._answer(place, seconds), 2 * seconds + 5.0)

    def leave_together(self, *, seconds: float = 10.0) -> bool:
        """Give every rank the time to come here, at most `seconds`; whether all came."""
        return bool(self._bounded(lambda: self._count_up_to(self.world_size, "leaving", 1, seconds), seconds + 5.0))

    def _bounded(self, action: Callable[[], T], seconds: float) -> T | None:
        """The result of `action`; None where it fails for the store's sake, or takes longer than `seconds`.

        A store whose process is stopped never answers, and some of its calls know no time limit.
        """
        result: list[T] = []

        def run() -> None:
            with contextlib.suppress(RuntimeError):  # every error of a store is one
                result.append(action())

        if not self._store_is_gone:
            thread = threading.Thread(target=run, name="roll call", daemon=True)
            thread.start()
            thread.join(seconds)
        self._store_is_gone = not result
        return result[0] if result else None

    def _heard(self, store: dist.Store) -> Call | None:
        if not store.check(["call"]):
            return None
        call = Call(**json.loads(store.get("call")))
        if not self._has_heard and call.rank != self.rank:
            self._has_heard = True
            store.add("heard", 1)
        return call

    def _answer(self, place: str, seconds: float) -> Roll:
        store = self._voice
        store.set(f"place/{self.rank}", place)
        if store.add("answers", 1) == 1:
            self._count_up_to(self.world_size, "answers", 0, seconds)
            roll = self._read_roll()
            store.set("roll", json.dumps(asdict(roll)))
        else:
            deadline = time.monotonic() + 2 * seconds
            while not store.check(["roll"]) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            roll = _roll_from(json.loads(store.get("roll")))
        read = store.add("readers", 1)
        if self.rank == 0:
            self._count_up_to(max(read, self.world_size - len(roll.silent)), "readers", 0, seconds / 2)
        return roll

    def _read_roll(self) -> Roll:
        silent, places = [], defaultdict(list)
        for rank in range(self.world_size):
            if self._voice.check([f"place/{rank}"]):
                places[self._voice.get(f"place/{rank}").decode()].append(rank)
            else:
                known = self._voice.check([f"host/{rank}"])
                silent.append((rank, self._voice.get(f"host/{rank}").decode() if known else "an unknown host"))
        return Roll(silent, sorted(places.items(), key=lambda place: len(place[1])))

    def _count_up_to(self, number: int, name: str, step: int, seconds: float) -> bool:
        """Add `step` to a count and wait until it has reached `number`; false after `seconds`."""
        deadline = time.monotonic() + seconds
        count = self._voice.add(name, step)
        while count < number and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            count = self._voice.add(name, 0)
        return count >= number


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2-7`; `ranks` ascend."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    named = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def _roll_from(values: dict[str, Any]) -> Roll:
    return Roll(
        [(rank, host) for rank, host in values["silent"]], [(place, ranks) for place, ranks in values["places"]]
    )
