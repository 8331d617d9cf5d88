"""From logits to the next token: greedy or drawn, with the usual filters, each request from a seed of its own.

What a request draws depends on its logits, its settings and its seed alone, and on nothing about its batch.

Legend: `B` rows, `R` rows with the same settings, `C` candidates of each, `V` vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fbt_megatron.errors import DecodeError


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen.

    The fields apply in their order, each filter to what those before it left. Filters do not change a greedy choice.
    """

    repetition_penalty: float = 1.0
    """Logits of tokens of the prompt and of the text so far are divided by it, negative ones multiplied."""
    temperature: float = 0.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int | None = None
    """Keep the k most likely tokens."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities add up to p."""
    min_p: float = 0.0
    """Keep tokens that are at least so likely, as a share of the most likely one."""
    seed: int = 0
    """Of the request's draws."""

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise DecodeError("\n".join(problems))

    def _problems(self) -> Iterator[str]:
        if not self.repetition_penalty > 0:
            yield f"repetition penalty={self.repetition_penalty}: must be greater than 0; 1 switches it off."
        if not self.temperature >= 0:
            yield f"temperature={self.temperature}: must not be negative; 0 takes the most likely token."
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k}: must be at least 1; leave it out to keep all tokens."
        if not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p}: must be above 0 and at most 1; 1 keeps all tokens."
        if not 0 <= self.min_p <= 1:
            yield f"min_p={self.min_p}: must be between 0 and 1; 0 keeps all tokens."


class Sampler:
    """Chooses the next token of every row of a batch."""

    def __init__(
        self,
        settings: Sequence[Sampling],
        prompts: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        num_ids: int,
        device: torch.device,
    ) -> None:
        """Rows of these settings and prompts. Ids from `num_ids` on, which no tokenizer has, are never chosen."""
        self._settings = list(settings)
        self._alike = _group(self._settings)
        self._generators = [torch.Generator().manual_seed(one.seed) for one in settings]
        self._num_ids = num_ids
        self._seen: Tensor | None = None
        if any(one.repetition_penalty != 1.0 for one in settings):
            self._seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(list(prompt), device=device)] = True

    @torch.inference_mode()
    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] int64 for `logits` [B, V] fp32, and the log-probability that the model itself gives each, [B].

        That is over all V ids, also those that are never chosen.
        """
        known = logits[:, : self._num_ids]
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        for settings, rows in self._alike.items():
            tokens[rows] = self._choose_alike(known if len(self._alike) == 1 else known[rows], settings, rows)
        if self._seen is not None:
            self._seen[torch.arange(len(tokens), device=tokens.device), tokens] = True
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        return tokens, chosen - logits.logsumexp(dim=-1)

    def select(self, rows: Sequence[int]) -> None:
        """Keep the rows of these numbers, in this order."""
        self._settings = [self._settings[row] for row in rows]
        self._alike = _group(self._settings)
        self._generators = [self._generators[row] for row in rows]
        if self._seen is not None:
            self._seen = self._seen[torch.tensor(rows, dtype=torch.int64, device=self._seen.device)]

    def _choose_alike(self, logits: Tensor, settings: Sampling, rows: list[int]) -> Tensor:
        if settings.repetition_penalty != 1.0:
            assert self._seen is not None
            logits = _penalized(logits, self._seen[rows, : self._num_ids], settings.repetition_penalty)
        if settings.temperature == 0:
            return logits.argmax(dim=-1)
        values, ids = filter_logits(logits, settings)
        # Numbers of the rows' own generators on the CPU, so that another device draws the same.
        numbers = [torch.rand((), dtype=torch.float64, generator=self._generators[row]) for row in rows]
        return _draw(values, ids, torch.stack(numbers).to(logits.device))


def _group(settings: Sequence[Sampling]) -> dict[Sampling, list[int]]:
    """Rows by their settings without the seed."""
    rows: dict[Sampling, list[int]] = defaultdict(list)
    for row, one in enumerate(settings):
        rows[replace(one, seed=0)].append(row)
    return rows


def filter_logits(logits: Tensor, settings: Sampling) -> tuple[Tensor, Tensor | None]:
    """Logits [R, C] fp64 over the temperature, -inf where filtered out, and the token ids of the columns, [R, C].

    Without `top_k` and `top_p` the columns are the vocabulary and there are no ids; otherwise they fall.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    scaled, ids = (logits - largest).double() / settings.temperature, None  # the largest is 0 at any temperature
    if settings.top_k is not None:
        scaled, ids = scaled.topk(min(settings.top_k, scaled.shape[1]), dim=-1)
    elif settings.top_p < 1.0:
        scaled, ids = scaled.sort(dim=-1, descending=True, stable=True)
    if settings.top_p < 1.0:
        probabilities = scaled.softmax(dim=-1)
        reached_before = probabilities.cumsum(dim=-1) - probabilities >= settings.top_p
        reached_before[:, 0] = False
        scaled = scaled.masked_fill(reached_before, -torch.inf)
    if settings.min_p > 0.0:
        probabilities = scaled.softmax(dim=-1)
        unlikely = probabilities < settings.min_p * probabilities.max(dim=-1, keepdim=True).values
        scaled = scaled.masked_fill(unlikely, -torch.inf)
    return scaled, ids


def _penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Source: Keskar et al., CTRL (arXiv 1909.05858), section 4.1, with the usual reading for negative logits."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def _draw(values: Tensor, ids: Tensor | None, numbers: Tensor) -> Tensor:
    """A token id per row [R] where the distribution of `values` [R, C] reaches `numbers` [R], uniform in [0, 1).

    A column of probability 0 is never reached: the first one whose sum is above the number adds something to it.
    """
    sums = values.softmax(dim=-1).cumsum(dim=-1)
    columns = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    return (columns if ids is None else ids.gather(1, columns))[:, 0]
