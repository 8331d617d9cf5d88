"""Who sees whom: causal, inside the own document, inside the window.

A mask is what its kernel takes: a dense bool tensor for `scaled_dot_product_attention` (True: visible), a `BlockMask`
for flex attention, or None for plain causal attention. One mask per distinct window is built for a micro-batch and
shared by all layers and passes.

Legend: `S` sequence, `B` micro batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.model.kernels import AttentionKernel

AttentionMask: TypeAlias = Tensor | BlockMask | None


def layer_window(model: ModelConfig, layer_number: int) -> int | None:
    """Number of keys that a query of layer `layer_number` (from 1) sees, itself included; None: no limit."""
    every = model.full_attention_every
    attends_to_all = every is not None and layer_number % every == 0
    return None if attends_to_all else model.sliding_window


def build_masks(
    document_ids: Tensor, *, windows: Collection[int | None], reset: bool, kernel: AttentionKernel
) -> dict[int | None, AttentionMask]:
    """Mask of each of `windows` for `document_ids` [B, S]; with `reset` a token sees its own document only."""
    build = _block_mask if kernel == "flex" else _dense_mask
    if kernel == "sdpa" and reset:
        # Looked at on the CPU only: on an accelerator the answer would have to be waited for.
        reset = bool((document_ids != document_ids[:, :1]).any())
    seq_length = document_ids.shape[1]
    effective = {window: None if window is None or window >= seq_length else window for window in windows}
    built = {window: build(document_ids, window=window, reset=reset) for window in set(effective.values())}
    return {window: built[effective[window]] for window in windows}


def _dense_mask(document_ids: Tensor, *, window: int | None, reset: bool) -> Tensor | None:
    """[B or 1, 1, S, S] bool, or None where the mask is plain causal."""
    if window is None and not reset:
        return None
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    distance = index[:, None] - index[None, :]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if reset:
        visible = visible & (document_ids[:, :, None] == document_ids[:, None, :])
    return visible.view(-1, 1, *visible.shape[-2:])


def _block_mask(document_ids: Tensor, *, window: int | None, reset: bool) -> BlockMask:
    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key < window)
        if reset:
            seen = seen & (document_ids[row, query] == document_ids[row, key])
        return seen

    rows, seq_length = document_ids.shape
    create = _compiled_create_block_mask() if document_ids.is_cuda else create_block_mask
    return create(visible, rows if reset else None, None, seq_length, seq_length, device=document_ids.device)


@functools.cache
def _compiled_create_block_mask() -> Callable[..., BlockMask]:
    """Compiled, it never holds the S x S mask that the block mask is computed from."""
    return torch.compile(create_block_mask)
