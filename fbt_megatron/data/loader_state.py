"""How far the training data has been read: one cursor per stream, for any number of ranks and readers.

Beside that only the cycles that are not trained are kept: rows, their numbers and their order follow from the cursors,
the cycle and the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fbt_megatron.data.packing import Cursor
from fbt_megatron.data.streams import StreamLayout
from fbt_megatron.errors import DataError

STATE_VERSION = 2


@dataclass
class LoaderState:
    """Where the streams of one rank go on."""

    cycle: int
    """Number of the next cycle; the same for all streams between two steps."""
    cursors: dict[int, Cursor]
    """By stream number."""
    passed_over: tuple[tuple[int, int], ...] = ()
    """Ranges (first, stop) of cycles whose rows are read and not trained."""

    @classmethod
    def at_start(cls, layout: StreamLayout) -> LoaderState:
        """The state before the first step."""
        return cls(0, {stream: Cursor() for stream in layout.streams()})

    @classmethod
    def restored(cls, state: Mapping[str, Any], layout: StreamLayout, *, fingerprint: str) -> LoaderState:
        """The part of a merged state that belongs to the rank of `layout`.

        Raises:
            DataError: it was made with another number of streams or another data set.
        """
        if state["version"] != STATE_VERSION:
            raise DataError(
                f"the checkpoint's place in the data has format {state['version']}, this version reads "
                f"{STATE_VERSION}. Use the version that wrote the checkpoint."
            )
        if state["num_streams"] != layout.num_streams:
            raise DataError(
                f"data.streams={layout.num_streams}: the checkpoint was made with {state['num_streams']}, and the "
                f"order of the data depends on it. Set data.streams={state['num_streams']}."
            )
        if state["dataset"] != fingerprint:
            raise DataError(
                "data.train: not the data set that the checkpoint was made with, so its place in the data has no "
                "meaning. Name the data set of the checkpoint."
            )
        return cls(
            state["cycle"],
            {stream: Cursor(**state["cursors"][str(stream)]) for stream in layout.streams()},
            tuple((first, stop) for first, stop in state["passed_over"]),
        )

    def copy(self) -> LoaderState:
        """A state that does not follow this one."""
        return LoaderState(self.cycle, dict(self.cursors), self.passed_over)

    def passes_over(self, cycle: int) -> bool:
        """True where the rows of a cycle are not trained."""
        return any(first <= cycle < stop for first, stop in self.passed_over)

    def as_dict(self, *, num_streams: int, fingerprint: str) -> dict[str, Any]:
        """The state in plain numbers and strings, as a checkpoint keeps it."""
        return {
            "version": STATE_VERSION,
            "num_streams": num_streams,
            "dataset": fingerprint,
            "cycle": self.cycle,
            "passed_over": [list(cycles) for cycles in self.passed_over],
            "cursors": {str(stream): asdict(cursor) for stream, cursor in sorted(self.cursors.items())},
        }


def merge_loader_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of all data-parallel ranks, taken after the same step."""
    first = states[0]
    assert all(state["cycle"] == first["cycle"] for state in states), "states of different steps"
    cursors = {stream: cursor for state in states for stream, cursor in state["cursors"].items()}
    return {**first, "cursors": dict(sorted(cursors.items(), key=lambda item: int(item[0])))}
