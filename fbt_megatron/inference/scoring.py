"""Log-likelihood of given continuations, in the three modes.

- standard: one plain forward over context and continuation.
- soft: the context is plain; the continuation is given token by token, each fused with the state before it.
- fused: the N passes of the mode over both together.

Legend: `B` rows, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.decoder import Decoder

Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of the continuation that is scored."""

_HEAD_ROWS = 512
"""States whose logits are in memory at a time."""


@dataclass(frozen=True)
class Score:
    """One continuation."""

    logprobs: tuple[float, ...]
    """Of each of its tokens, given all before it."""
    is_greedy: bool
    """Whether each of its tokens is the most likely one."""

    @property
    def total(self) -> float:
        """Log-likelihood of the continuation."""
        return sum(self.logprobs)


@dataclass(frozen=True)
class PassScores:
    """A batch after one pass, an entry per pair."""

    scores: tuple[Score, ...]
    hidden_deltas: tuple[tuple[float, ...], ...] | None
    """`||h^(k) - h^(k-1)||_2 / sqrt(H)` for each token, h the state that predicts it; from pass 2 on."""


@torch.inference_mode()
def score(decoder: Decoder, pairs: Sequence[Pair]) -> list[Score]:
    """Score one batch of (context, continuation) pairs of token ids.

    Raises DecodeError where either is empty, an id is outside the vocabulary, or both together are longer than a row of
    the training and the token after it.
    """
    if not pairs:
        return []
    for number, (context, continuation) in enumerate(pairs, start=1):
        _check_pair(decoder, context, continuation, f"pair {number}")
    if decoder.mode.name == "soft":
        return _scores(decoder, pairs, torch.cat(_soft_states(decoder, pairs)))
    hidden, _ = decoder.run_passes(_read_tokens(pairs))
    return _scores(decoder, pairs, _predicting(hidden, pairs))


@torch.inference_mode()
def score_each_pass(decoder: Decoder, pairs: Sequence[Pair]) -> Iterator[PassScores]:
    """Score one batch as `score` does, after each pass of the mode (standard or fused) in turn. Raises as `score`."""
    for number, (context, continuation) in enumerate(pairs, start=1):
        _check_pair(decoder, context, continuation, f"pair {number}")
    sizes = [len(continuation) for _, continuation in pairs]
    before: Tensor | None = None
    for hidden in decoder.each_pass(_read_tokens(pairs)):
        states = _predicting(hidden, pairs)
        deltas = None
        if before is not None:
            moved = (states.double() - before.double()).norm(dim=-1) / math.sqrt(states.shape[-1])
            deltas = tuple(tuple(own.tolist()) for own in moved.split(sizes))
        yield PassScores(tuple(_scores(decoder, pairs, states)), deltas)
        before = states


def _read_tokens(pairs: Sequence[Pair]) -> list[list[int]]:
    """What a forward over each pair reads: its last token is predicted only."""
    return [[*context, *continuation[:-1]] for context, continuation in pairs]


def _predicting(hidden: Tensor, pairs: Sequence[Pair]) -> Tensor:
    """Of top states [B, S, H] those that predict the continuations, [tokens, H]."""
    return torch.cat([row[-len(continuation) :] for row, (_, continuation) in zip(hidden, pairs, strict=True)])


def _scores(decoder: Decoder, pairs: Sequence[Pair], states: Tensor) -> list[Score]:
    """Score of each pair from the states that predict its continuation, all of them in one tensor [tokens, H]."""
    logprobs, greedy = _judge(decoder, states, [token for _, tokens in pairs for token in tokens])
    sizes = [len(continuation) for _, continuation in pairs]
    return [
        Score(tuple(own.tolist()), bool(likely.all()))
        for own, likely in zip(logprobs.split(sizes), greedy.split(sizes), strict=True)
    ]


def _check_pair(decoder: Decoder, context: Sequence[int], continuation: Sequence[int], where: str) -> None:
    config = decoder.model.config
    for part, tokens in (("context", context), ("continuation", continuation)):
        if not tokens:
            raise DecodeError(f"{where}: the {part} has no tokens. Give at least one token of each.")
        if min(tokens) < 0 or max(tokens) >= config.vocab_size:
            raise DecodeError(
                f"{where}: the {part} holds an id outside the model's vocabulary of {config.vocab_size}. "
                "Use the tokenizer that the model was trained with."
            )
    if len(context) + len(continuation) > config.seq_length + 1:
        raise DecodeError(
            f"{where} has {len(context) + len(continuation):,} tokens, but the model was trained on rows of "
            f"{config.seq_length:,} (model.seq_length) and the token after them. Cut the context at its front."
        )


def _soft_states(decoder: Decoder, pairs: Sequence[Pair]) -> list[Tensor]:
    """States [tokens, H] that predict each continuation, of a recurrence over its own tokens."""
    longest = max(len(continuation) for _, continuation in pairs)
    state = decoder.prefill([context for context, _ in pairs], max_new_tokens=longest - 1)
    found: list[list[Tensor]] = [[] for _ in pairs]
    live = list(range(len(pairs)))
    for index in range(longest):
        for row, pair in enumerate(live):
            found[pair].append(state.hidden[row])
        kept = [row for row, pair in enumerate(live) if len(pairs[pair][1]) > index + 1]
        if kept and len(kept) < len(live):
            state.select(kept)
        live = [live[row] for row in kept]
        if live:
            given = torch.tensor([pairs[pair][1][index] for pair in live], device=state.hidden.device)
            decoder.step(state, given)
    return [torch.stack(states) for states in found]


def _judge(decoder: Decoder, states: Tensor, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under its state [tokens, H], and whether it is the most likely one."""
    wanted = torch.tensor(tokens, device=states.device)
    logprobs, greedy = [], []
    for part, ids in zip(states.split(_HEAD_ROWS), wanted.split(_HEAD_ROWS), strict=True):
        logits = decoder.model.logits(part)
        logprobs.append(logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1))
        greedy.append(logits.argmax(dim=-1) == ids)
    return torch.cat(logprobs), torch.cat(greedy)
