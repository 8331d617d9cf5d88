"""Keys and values of a batch while it is decoded; layers with a window keep no more than the window.

Rows end at the same slot, so a shorter prompt begins at a later one. In a layer without window the token of slot t lies
at t; in one with window w it lies at t mod w, where it takes the place of the token that has left the window.

Legend: `B` rows, `S` new tokens of each row, `N` query heads, `G` key/value heads, `D` head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.model.masks import build_masks, layer_window
from fbt_megatron.model.rotary import RotaryTable, rotary_table


@dataclass(frozen=True)
class Forward:
    """What the layers of one forward share."""

    start: int
    """Slot of the first new token."""
    num_tokens: int
    rotary: RotaryTable
    """Of the new tokens, [B, S, 1, D]."""
    masks: dict[int, Tensor | None]
    """By the slots of a layer: who sees whom, for `scaled_dot_product_attention`."""


class KVCache:
    """The cache of all layers; `length` slots are in use."""

    def __init__(
        self, model: ModelConfig, *, starts: Tensor, capacity: int, dtype: torch.dtype, keeps: bool = True
    ) -> None:
        """An empty cache on the device of `starts` [B] int64, the first slot of each row; `capacity` slots at most.

        With `keeps` false nothing is kept: for one forward without steps after it.
        """
        self.model = model
        self.capacity = capacity
        self.dtype = dtype
        self.length = 0
        self._slots = [_num_slots(model, number, capacity) for number in range(1, model.num_layers + 1)]
        self._keeps = keeps
        rows, groups = len(starts) if keeps else 0, model.num_query_groups
        shapes = [(rows, groups, slots, model.head_dim) for slots in self._slots]
        self._keys = [torch.empty(shape, dtype=dtype, device=starts.device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=dtype, device=starts.device) for shape in shapes]
        self._set_starts(starts)

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values))

    def select(self, rows: Tensor) -> None:
        """Keep the rows of these numbers ([R] int64), in this order."""
        self._keys = [keys.index_select(0, rows) for keys in self._keys]
        self._values = [values.index_select(0, rows) for values in self._values]
        self._set_starts(self._starts.index_select(0, rows))

    def clear(self) -> None:
        """Forget all tokens; the rows begin where they did."""
        self.length = 0

    def start_forward(self, num_tokens: int) -> Forward:
        """Places of the next `num_tokens` tokens; more than one need an empty cache."""
        assert not self.length or (num_tokens == 1 and self._keeps), (
            "only single tokens follow others, if these are kept"
        )
        assert self.length + num_tokens <= self.capacity, "the cache is full"
        slots = torch.arange(self.length, self.length + num_tokens, device=self._starts.device)
        positions = (slots - self._starts[:, None]).clamp(min=0)
        rotary = rotary_table(
            positions.t(), head_dim=self.model.head_dim, theta=self.model.rope_theta, dtype=self.dtype
        )
        masks = self._prefill_masks(slots) if not self.length else self._step_masks()
        return Forward(self.length, num_tokens, rotary, masks)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, forward: Forward) -> Tensor:
        """Heads [B, S, N, D] of layer `layer` (from 0) for rotated query [B, S, N, D] and key, and value [B, S, G, D].

        Keys and values of the new tokens are kept.
        """
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        if self._keeps:
            self._store(layer, key, value, forward)
        mask = forward.masks[self._slots[layer]]
        if not forward.start:
            return _prompt_heads(query, key, value, mask).transpose(1, 2)
        used = min(forward.start + 1, self._slots[layer])
        keys, values = self._keys[layer][:, :, :used], self._values[layer][:, :, :used]
        # The query heads of a group see the same keys, as if they were queries of several tokens: nothing is copied.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        heads = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return heads.reshape(len(query), 1, -1, query.shape[-1])

    def end_forward(self, forward: Forward) -> None:
        """Count the new tokens, when all layers have seen them."""
        self.length += forward.num_tokens

    def _set_starts(self, starts: Tensor) -> None:
        self._starts = starts
        self._last_start = int(starts.max()) if len(starts) else 0

    def _store(self, layer: int, key: Tensor, value: Tensor, forward: Forward) -> None:
        slots, keys, values = self._slots[layer], self._keys[layer], self._values[layer]
        if forward.num_tokens == 1:
            place = forward.start % slots
            keys[:, :, place], values[:, :, place] = key[:, :, 0], value[:, :, 0]
            return
        kept = min(forward.num_tokens, slots)
        places = torch.arange(forward.num_tokens - kept, forward.num_tokens, device=key.device) % slots
        keys[:, :, places], values[:, :, places] = key[:, :, -kept:], value[:, :, -kept:]

    def _prefill_masks(self, slots: Tensor) -> dict[int, Tensor | None]:
        """Padding sees padding only, as if it were a document of its own: no query is left without a key."""
        documents = (slots >= self._starts[:, None]).long()
        windows = set(self._slots)
        masks = build_masks(documents, windows=windows, reset=self._last_start > 0, kernel="sdpa")
        return {window: masks[window] for window in windows}  # type: ignore[misc]

    def _step_masks(self) -> dict[int, Tensor | None]:
        """[B, 1, 1, used] bool, or None where every key in use is a token of the row."""
        return {slots: self._step_mask(slots) for slots in set(self._slots)}

    def _step_mask(self, slots: int) -> Tensor | None:
        newest = self.length
        oldest = max(0, newest + 1 - slots)
        if self._last_start <= oldest:
            return None
        places = torch.arange(min(newest + 1, slots), device=self._starts.device)
        held = newest - (newest - places) % slots  # the slot whose token lies at each place
        return (held >= self._starts[:, None])[:, None, None, :]


def _prompt_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Heads [B, N, S, D] of tokens that see each other only."""
    repeated = _repeats_heads(query, mask)
    if repeated:
        shared = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=not repeated
    )


def _repeats_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Flash attention takes grouped heads, but no mask and no fp32; without it CUDA may hold all scores at once."""
    return query.is_cuda and (mask is not None or query.dtype == torch.float32)


def _num_slots(model: ModelConfig, layer_number: int, capacity: int) -> int:
    window = layer_window(model, layer_number)
    return capacity if window is None else min(window, capacity)
