"""Pieces of text add up to the whole text, and stop strings are found wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from fbt_megatron.data.tokenizer import ByteTokenizer
from fbt_megatron.inference.text import StopMatcher, TextStream

LETTERS = st.text("ab.", max_size=14)


def cut(text: str, sizes: Sequence[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def until_first_stop(text: str, stops: Sequence[str], is_over: Callable[[str, str], bool]) -> tuple[str, bool]:
    """Character after character: what stood before the longest stop string that is complete first and counts."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop) and is_over(text[: end - len(stop)], stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(deadline=None, max_examples=500)
@given(
    text=LETTERS,
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=8),
    is_over=st.sampled_from([None, lambda before, stop: "a" in before, lambda before, stop: len(before + stop) % 3]),
)
def test_stop_strings_do_not_depend_on_the_pieces(
    text: str, stops: list[str], sizes: list[int], is_over: Callable[[str, str], bool] | None
) -> None:
    matcher, found = StopMatcher(stops, is_over), ""
    expected, stopped = until_first_stop(text, stops, is_over or (lambda before, stop: True))
    for piece in cut(text, sizes):
        if not matcher.stopped:
            found += matcher.push(piece)
            assert expected.startswith(found), "text was handed out that belongs to a stop string"
    found += matcher.flush()
    assert (found, matcher.stopped) == (expected, stopped)


def test_no_more_is_held_back_than_needed() -> None:
    matcher = StopMatcher(["\n\n", "END"])
    assert [matcher.push(piece) for piece in ("a\n", "b", " EN", "T", "\n", "\nx")] == ["a", "\nb", " ", "ENT", "", ""]
    assert matcher.stopped


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=20), prompt=st.text(max_size=6))
def test_pieces_of_byte_tokens_are_the_text(text: str, prompt: str) -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, tokenizer.encode(prompt), [])
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" not in text)
    assert "".join([*pieces, stream.finish()]) == text


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, tokenizer.encode("x"), [])
    assert [stream.push(token) for token in tokenizer.encode("é€a")] == ["", "é", "", "", "€", "a"]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_inside_and_across_tokens() -> None:
    tokenizer = ByteTokenizer()
    stream = TextStream(tokenizer, [1], ["€\n"])
    assert [stream.push(token) for token in tokenizer.encode("a€b€\n")] == ["a", "", "", "", "€b", "", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("prompt", [["▁the"], []])
def test_spaces_that_a_tokenizer_leaves_out_at_the_start(prompt: list[str]) -> None:
    """SentencePiece's way: the first token's space is not text, but after a prompt it is."""
    words = ["▁the", "▁cat", "s", "▁sat"]
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    library.decoder = tokenizers.decoders.Metaspace()
    stream = TextStream(library, [words.index(word) for word in prompt], [])
    pieces = [stream.push(words.index(word)) for word in ("▁cat", "s", "▁sat")]
    assert pieces == ([" cat", "s", " sat"] if prompt else ["cat", "s", " sat"])
