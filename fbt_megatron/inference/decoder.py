"""The three decode modes: what the prompt is computed from, and what each next token is.

- standard: the prompt and the generated tokens are plain.
- soft: the prompt is plain; a generated token is fused with the top state of the token before it.
- fused: N passes over the prompt, each from position 0 in an empty cache; in all but the first every token is fused
  with the state that the pass before left of the token before it. Generated tokens as in soft.

The first token of a prompt is plain in every pass, as the first token of a document is in training.

Legend: `B` rows, `S` tokens of the longest prompt, `H` hidden, `V` vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from fbt_megatron.errors import DecodeError
from fbt_megatron.inference.cache import KVCache
from fbt_megatron.inference.model import DecoderModel

ModeName = Literal["standard", "soft", "fused"]
MODES: tuple[ModeName, ...] = ("standard", "soft", "fused")
FUSED_PASSES = 2


@dataclass(frozen=True)
class DecodeMode:
    """How a model is decoded. `prefill_passes` counts all passes over the prompt."""

    name: ModeName
    prefill_passes: int

    def __post_init__(self) -> None:
        if self.name not in MODES:
            raise DecodeError(f"mode={self.name}: must be one of {', '.join(MODES)}.")
        if self.name == "fused" and self.prefill_passes < 2:
            raise DecodeError(
                f"prefill passes={self.prefill_passes}: fused takes at least 2; with one pass it is mode soft."
            )
        if self.name != "fused" and self.prefill_passes != 1:
            raise DecodeError(f"prefill passes={self.prefill_passes}: mode {self.name} takes one pass. Use mode fused.")

    @classmethod
    def of(cls, name: str, *, prefill_passes: int | None = None) -> DecodeMode:
        """The mode `name`; raises DecodeError where there is no such mode, or not with so many passes."""
        passes = (FUSED_PASSES if name == "fused" else 1) if prefill_passes is None else prefill_passes
        return cls(cast(ModeName, name), passes)

    @property
    def feedback(self) -> bool:
        """Whether a generated token is fused with the state before it."""
        return self.name != "standard"


class DecodeState:
    """What is kept of every row between two tokens: its keys and values, and one state."""

    def __init__(self, cache: KVCache, hidden: Tensor) -> None:
        self.cache = cache
        self.hidden = hidden
        """[B, H]: top state of the newest token. It gives the logits of the next token, and feedback."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows of these numbers, in this order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.hidden.device)
        self.cache.select(index)
        self.hidden = self.hidden.index_select(0, index)


class Decoder:
    """A model in one mode."""

    def __init__(self, model: DecoderModel, mode: DecodeMode) -> None:
        """Raises DecodeError where the mode needs feedback and the model has none."""
        if mode.feedback and model.fusion == "none":
            raise DecodeError(
                f"mode={mode.name}: the model was trained without feedback (feedback.fusion: none), so it has no "
                "fusion to decode with. Use mode standard."
            )
        self.model = model
        self.mode = mode

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> DecodeState:
        """The state after the prompts, with room for `max_new_tokens` more inputs each.

        Raises DecodeError for a prompt that is empty, holds an id outside the vocabulary, or is longer than a row of
        the training.
        """
        hidden, cache = self.run_passes(prompts, max_new_tokens=max_new_tokens)
        return DecodeState(cache, hidden[:, -1].clone())

    @torch.inference_mode()
    def step(self, state: DecodeState, tokens: Tensor) -> None:
        """Add one token to each row, `tokens` [B] int64: changes `state`."""
        tokens = tokens[:, None]
        if self.mode.feedback:
            stack_input = self.model.fused_input(tokens, state.hidden[:, None])
        else:
            stack_input = self.model.plain_input(tokens)
        state.hidden = self.model.forward(stack_input, state.cache)[:, 0]

    def logits(self, state: DecodeState) -> Tensor:
        """Logits of each row's next token, [B, V] fp32."""
        return self.model.logits(state.hidden)

    def run_passes(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | None = None
    ) -> tuple[Tensor, KVCache]:
        """Top states [B, S, H] of the last pass over the prompts, each at the end of its row, and the cache of it.

        Without `max_new_tokens` nothing can follow, and the cache keeps nothing. Raises as `prefill` does.
        """
        return deque(self._passes(prompts, max_new_tokens=max_new_tokens), maxlen=1).pop()  # no earlier state is kept

    def each_pass(self, prompts: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Top states [B, S, H] of one pass over the prompts after the other, each prompt at the end of its row.

        Raises as `prefill` does.
        """
        return (hidden for hidden, _ in self._passes(prompts, max_new_tokens=None))

    @torch.inference_mode()
    def _passes(
        self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int | None
    ) -> Iterator[tuple[Tensor, KVCache]]:
        check_tokens(self.model, prompts)
        tokens, starts = self._padded(prompts)
        plain_input = self.model.plain_input(tokens)
        slots = torch.arange(tokens.shape[1], device=starts.device)
        plain = (slots <= starts[:, None]).unsqueeze(-1)
        cache = KVCache(
            self.model.config,
            starts=starts,
            capacity=tokens.shape[1] + (max_new_tokens or 0),
            dtype=self.model.dtype,
            keeps=max_new_tokens is not None,
        )
        hidden = self.model.forward(plain_input, cache)
        yield hidden, cache
        for _ in range(1, self.mode.prefill_passes):
            before = hidden.roll(1, dims=1)  # what comes round to the first place is not used: that one is plain
            stack_input = torch.where(plain, plain_input, self.model.fused_input(tokens, before))
            cache.clear()
            hidden = self.model.forward(stack_input, cache)
            yield hidden, cache

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens [B, S], padded in front with id 0, and the first slot of each row, [B]."""
        longest = max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        starts = [longest - len(prompt) for prompt in prompts]
        device = self.model.device
        return torch.tensor(rows, device=device), torch.tensor(starts, device=device)


def check_tokens(model: DecoderModel, prompts: Sequence[Sequence[int]], *, first_number: int = 1) -> None:
    """Raise DecodeError for a prompt that the model cannot take; the message counts prompts from `first_number`."""
    vocab_size, seq_length = model.config.vocab_size, model.config.seq_length
    for number, prompt in enumerate(prompts, start=first_number):
        if not prompt:
            raise DecodeError(
                f"prompt {number} has no tokens. Give at least one, such as the token that starts a text."
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < vocab_size)
            raise DecodeError(
                f"prompt {number} holds token id {wrong}, outside the model's vocabulary of {vocab_size}. "
                "Use the tokenizer that the model was trained with."
            )
        if len(prompt) > seq_length:
            raise DecodeError(
                f"prompt {number} has {len(prompt):,} tokens, but the model was trained on rows of {seq_length:,} "
                "(model.seq_length) and knows no later positions. Shorten it."
            )
