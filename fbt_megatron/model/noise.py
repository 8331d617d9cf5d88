"""Random draws of training with feedback: the jitter on the fed-back state, and prefixes that stay plain.

Every draw is a function of (seed, global row of the run, pass) alone, so it is the same in whatever layout and
micro-batch the row is trained. The streams of CPU and GPU generators differ; a run compares with runs on its own kind.

Legend: `S` sequence, `B` micro batch, `H` hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fbt_megatron.model.seeding import derive_seed


@dataclass(frozen=True)
class FeedbackNoise:
    """Draws of the passes after the first."""

    seed: int
    jitter: float
    """Half-width of the uniform noise on the fed-back state."""
    prefix_mixin: Literal["row", "document", "off"]

    def add_jitter(self, state: Tensor, *, rows: Sequence[int], pass_idx: int) -> Tensor:
        """`state` [S, B, H] plus uniform noise in [-jitter, jitter]; row b of the batch is row `rows[b]` of the run."""
        if self.jitter == 0.0:
            return state
        seq_length, _, hidden_size = state.shape
        draws = [self._uniform("jitter", row, pass_idx, (seq_length, hidden_size), state.device) for row in rows]
        noise = torch.stack(draws, dim=1).mul_(2.0 * self.jitter).sub_(self.jitter)
        return state + noise.to(state.dtype)

    def plain_prefix(self, document_ids: Tensor, *, rows: Sequence[int], pass_idx: int) -> Tensor | None:
        """True where a token belongs to a prefix that keeps its plain embedding, [B, S] bool; None: there is none.

        Row: the first `1 + floor(U * S)` tokens. Document: the first `1 + floor(U * length)` of each document, whose
        length is its number of tokens in this row. U is uniform in [0, 1), drawn anew for each pass.
        """
        if self.prefix_mixin == "off":
            return None
        seq_length, device = document_ids.shape[1], document_ids.device
        index = torch.arange(seq_length, device=device)
        if self.prefix_mixin == "row":
            draws = torch.stack([self._uniform("cut", row, pass_idx, (1,), device) for row in rows])
            return index < 1 + (draws * seq_length).floor()
        draws = torch.stack([self._uniform("cut", row, pass_idx, (seq_length,), device) for row in rows])
        lengths = torch.zeros_like(document_ids).scatter_add_(1, document_ids, torch.ones_like(document_ids))
        starts = lengths.cumsum(dim=1) - lengths
        ends = starts + 1 + (draws * lengths).floor()
        return index < ends.gather(1, document_ids)

    def _uniform(self, purpose: str, row: int, pass_idx: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, purpose, row, pass_idx))
        return torch.rand(shape, generator=generator, device=device)
