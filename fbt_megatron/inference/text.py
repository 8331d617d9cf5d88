"""Text of one request while its tokens arrive: pieces that will not change any more, and stop strings.

A token need not be whole characters, and a stop string may begin and end inside tokens, so text is handed out when it
can neither change with the next token nor turn out to be the beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

_PROMPT_TOKENS = 8
_BROKEN_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TextDecoder(Protocol):
    """What is asked of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, leaving special tokens out."""


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, however it is cut into them."""

    def __init__(self, stops: Sequence[str], is_over: Callable[[str, str], bool] | None = None) -> None:
        """`is_over` is asked with the text before a stop string, and the string, whether it counts; default: always."""
        self._stops = [stop for stop in stops if stop]
        self._is_over = is_over
        self._given = ""
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that is certain after `piece`; when a stop string is complete, what stood before it."""
        text = self._held + piece
        for place, stop in self._complete(text):
            if self._is_over is None or self._is_over(self._given + text[:place], stop):
                self.stopped = True
                self._held = ""
                return text[:place]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        certain = text[: len(text) - held]
        if self._is_over is not None:
            self._given += certain
        return certain

    def _complete(self, text: str) -> list[tuple[int, str]]:
        """Where stop strings stand, in the order in which they would be complete if every character came alone.

        Of those that end together the longest comes first.
        """
        found = [(place, stop) for stop in self._stops for place in range(len(text)) if text.startswith(stop, place)]
        return sorted(found, key=lambda one: (one[0] + len(one[1]), -len(one[1])))

    def flush(self) -> str:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one request's tokens."""

    def __init__(
        self,
        decoder: TextDecoder,
        prompt: Sequence[int],
        stops: Sequence[str],
        is_over: Callable[[str, str], bool] | None = None,
    ) -> None:
        # Some of the prompt in front, because the first token may read otherwise alone (a space that is left out).
        self._ids = list(prompt[-_PROMPT_TOKENS:])
        self._decoder = decoder
        self._matcher = StopMatcher(stops, is_over)
        self._first, self._read = 0, len(self._ids)

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._matcher.stopped

    def push(self, token: int) -> str:
        """The text that is certain after `token`."""
        self._ids.append(token)
        text = self._new_text()
        if text.endswith(_BROKEN_CHARACTER):  # the rest of a character may follow
            return ""
        self._first, self._read = self._read, len(self._ids)
        return self._matcher.push(text)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._matcher.push(self._new_text())
        self._first, self._read = self._read, len(self._ids)
        return text if self.stopped else text + self._matcher.flush()

    def _new_text(self) -> str:
        """Text of the tokens that have not been handed out, decoded behind those before them."""
        before = self._decoder.decode(self._ids[self._first : self._read])
        return self._decoder.decode(self._ids[self._first :])[len(before) :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, not all of it."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
