"""Continues prompts: a batch of requests, token by token, each with settings and an end of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.decoder import Decoder, check_tokens
from fbt_megatron.inference.sampling import Sampler, Sampling
from fbt_megatron.inference.text import TextDecoder, TextStream

FinishReason = Literal["eos", "stop", "length", "context"]


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of its continuation."""

    prompt: tuple[int, ...]
    """Token ids; the first one is taken as the start of a document."""
    max_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()
    """Each ends the text and is not part of it."""
    stop: tuple[str, ...] = ()
    """Each ends the text and is not part of it; needs a tokenizer."""
    is_over: Callable[[str, str], bool] | None = None
    """Asked with the text before one of `stop`, and that string, whether it ends the text; default: always."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DecodeError(f"max tokens={self.max_tokens}: must be at least 1.")


@dataclass(frozen=True)
class Token:
    """One token of one request."""

    request: int
    """Number of the request, from 0."""
    token: int
    logprob: float
    """Log-probability under the model, before temperature and filters."""
    text: str
    """Text that has become certain; empty without a tokenizer."""
    finish: FinishReason | None
    """Set with the last token: one of `eos_ids`, a stop string, `max_tokens`, or the end of the trained context."""


@dataclass(frozen=True)
class Completion:
    """All of one request."""

    tokens: tuple[int, ...]
    """The end-of-text id included, where one came."""
    logprobs: tuple[float, ...]
    text: str
    finish: FinishReason


class Generator:
    """Runs requests through a decoder."""

    def __init__(self, decoder: Decoder, *, tokenizer: TextDecoder | None = None, num_ids: int | None = None) -> None:
        """`tokenizer` gives texts; of its `num_ids` ids (default: the model's vocabulary) a token is chosen."""
        self.decoder = decoder
        self.tokenizer = tokenizer
        vocab_size = decoder.model.config.vocab_size
        self._num_ids = vocab_size if num_ids is None else min(num_ids, vocab_size)

    def generate(self, requests: Sequence[Request], *, batch_size: int = 16) -> list[Completion]:
        """Completions in the order of the requests, computed `batch_size` at a time. Raises as `stream` does."""
        for number, request in enumerate(requests, start=1):
            self._check(request, number)
        completions: list[Completion] = []
        for first in range(0, len(requests), batch_size):
            batch = requests[first : first + batch_size]
            found: list[list[Token]] = [[] for _ in batch]
            for token in self.stream(batch):
                found[token.request].append(token)
            completions += map(_complete, found)
        return completions

    def stream(self, requests: Sequence[Request]) -> Iterator[Token]:
        """The tokens of one batch of requests as they come; a request that has ended takes no more work.

        Raises DecodeError for a prompt that the model cannot take, and for stop strings without a tokenizer.
        """
        for number, request in enumerate(requests, start=1):
            self._check(request, number)
        return self._stream(requests) if requests else iter(())

    def _stream(self, requests: Sequence[Request]) -> Iterator[Token]:
        limits = [min(request.max_tokens, self._context_left(request)) for request in requests]
        prompts = [request.prompt for request in requests]
        state = self.decoder.prefill(prompts, max_new_tokens=max(limits) - 1)  # the last token is not fed back
        sampler = Sampler(
            [request.sampling for request in requests],
            prompts,
            vocab_size=self.decoder.model.config.vocab_size,
            num_ids=self._num_ids,
            device=state.hidden.device,
        )
        live = [
            _Live(number, request, limit, self.tokenizer)
            for number, (request, limit) in enumerate(zip(requests, limits, strict=True))
        ]
        while True:
            tokens, logprobs = sampler.choose(self.decoder.logits(state))
            yield from (row.add(*chosen) for row, *chosen in zip(live, tokens.tolist(), logprobs.tolist(), strict=True))
            going_on = [index for index, row in enumerate(live) if not row.finished]
            if not going_on:
                return
            if len(going_on) < len(live):
                live = [live[index] for index in going_on]
                tokens = tokens[going_on]
                state.select(going_on)
                sampler.select(going_on)
            self.decoder.step(state, tokens)

    def _context_left(self, request: Request) -> int:
        """Tokens that may follow: the one after a full row is the last that training has ever predicted."""
        return self.decoder.model.config.seq_length + 1 - len(request.prompt)

    def _check(self, request: Request, number: int) -> None:
        check_tokens(self.decoder.model, [request.prompt], first_number=number)
        if request.stop and self.tokenizer is None:
            raise DecodeError("stop strings need a tokenizer. Name one, or end texts by token ids (eos_ids).")


class _Live:
    """A request that has not ended."""

    def __init__(self, number: int, request: Request, limit: int, tokenizer: TextDecoder | None) -> None:
        self._number = number
        self._request = request
        self._tokens_left = limit
        self._text = None if tokenizer is None else TextStream(tokenizer, request.prompt, request.stop, request.is_over)
        self._limit_reason: FinishReason = "length" if limit == request.max_tokens else "context"
        self.finished = False

    def add(self, token: int, logprob: float) -> Token:
        """Count one token and say what it means."""
        self._tokens_left -= 1
        is_eos = token in self._request.eos_ids
        text = "" if self._text is None or is_eos else self._text.push(token)
        finish: FinishReason | None = None
        if is_eos:
            finish = "eos"
        elif self._text is not None and self._text.stopped:
            finish = "stop"
        elif not self._tokens_left:
            finish = self._limit_reason
        self.finished = finish is not None
        if self._text is not None and self.finished:
            text += self._text.finish()
        return Token(self._number, token, logprob, text, finish)


def _complete(tokens: list[Token]) -> Completion:
    finish = tokens[-1].finish
    assert finish is not None
    return Completion(
        tuple(token.token for token in tokens),
        tuple(token.logprob for token in tokens),
        "".join(token.text for token in tokens),
        finish,
    )
