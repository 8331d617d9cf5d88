"""The full-bandwidth transformer: megatron-core's stack, whose top state of one token feeds the next one.

A forward is one pass of one pipeline stage. The first stage embeds the tokens in every pass and, after pass 0, fuses
them with the top state of the pass before; the last one applies final norm and head. Gradients flow through all passes.

Legend: `S` sequence, `B` micro batch, `H` hidden, `V` padded vocabulary of this tensor-parallel rank. Under sequence
parallelism the hidden states between stages and passes are [S / tp, B, H].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.model.attention import AttentionInputs
from fbt_megatron.model.fusion import Fusion, shift_by_one
from fbt_megatron.model.kernels import Kernels
from fbt_megatron.model.loss import PassLosses, pass_losses
from fbt_megatron.model.masks import build_masks, layer_window
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.model.rotary import rotary_table
from fbt_megatron.parallel.topology import ParallelTopology


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows and what all passes and layers derive from them once."""

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64, negative where not trained."""
    positions: Tensor
    """[B, S] int64, 0 at every document start and row start."""
    document_ids: Tensor
    """[B, S] int64, rising inside a row."""
    rows: tuple[int, ...]
    """Global row numbers."""
    attention: AttentionInputs


@dataclass(frozen=True)
class PassOutput:
    """Result of one pass of one stage."""

    hidden: Tensor
    """[S, B, H]: on the last stage the state after the final norm, which feeds head and next pass."""
    losses: PassLosses | None
    """Loss sums; on the last stage only."""


class FBTModel(MegatronModule):
    """The parts of one pipeline stage. `build_model` makes them; what a stage lacks is None."""

    def __init__(
        self,
        model: ModelConfig,
        transformer: TransformerConfig,
        topology: ParallelTopology,
        kernels: Kernels,
        *,
        reset_attention_mask: bool,
        recompute_passes: bool,
        embedding: VocabParallelEmbedding | None,
        embedding_norm: nn.Module | None,
        fusion: Fusion | None,
        stack: TransformerBlock,
        head: ColumnParallelLinear | None,
    ) -> None:
        super().__init__(transformer)
        self.model = model
        self.topology = topology
        self.kernels = kernels
        self.reset_attention_mask = reset_attention_mask
        self.recompute_passes = recompute_passes
        self.embedding = embedding
        self.embedding_norm = embedding_norm
        self.fusion = fusion
        self.stack = stack
        self.head = head

    def micro_batch(
        self, *, tokens: Tensor, labels: Tensor, positions: Tensor, document_ids: Tensor, rows: Tensor | Sequence[int]
    ) -> MicroBatch:
        """Derive from packed rows (see `MicroBatch`; all on the model's device) what the passes share."""
        model = self.model
        windows = {layer_window(model, number) for number in range(1, model.num_layers + 1)}
        attention = AttentionInputs(
            rotary=rotary_table(
                positions, head_dim=model.head_dim, theta=model.rope_theta, dtype=self.config.params_dtype
            ),
            masks=build_masks(
                document_ids, windows=windows, reset=self.reset_attention_mask, kernel=self.kernels.attention
            ),
        )
        row_numbers = tuple(rows.tolist() if isinstance(rows, Tensor) else rows)
        return MicroBatch(tokens, labels, positions, document_ids, row_numbers, attention)

    def forward_pass(
        self,
        batch: MicroBatch,
        pass_idx: int,
        received: Tensor | None = None,
        noise: FeedbackNoise | None = None,
    ) -> PassOutput:
        """Pass `pass_idx` (from 0) of this stage.

        `received` [S, B, H] is, on the first stage, the top state of the pass before (None for pass 0), elsewhere the
        hidden state of the stage before. `noise` draws jitter and plain prefixes; without it, as in validation, nothing
        is random.

        With `recompute_passes` nothing but the arguments is kept for the backward pass, which computes the rest again,
        head and loss included. Draws are functions of row and pass, so there is no generator to wind back.
        """
        if not (self.recompute_passes and torch.is_grad_enabled()):
            return self._compute_pass(batch, pass_idx, received, noise)
        return checkpoint(
            self._compute_pass, batch, pass_idx, received, noise, use_reentrant=False, preserve_rng_state=False
        )

    def _compute_pass(
        self, batch: MicroBatch, pass_idx: int, received: Tensor | None, noise: FeedbackNoise | None
    ) -> PassOutput:
        hidden = self.stack_input(batch, pass_idx, received, noise) if self.topology.is_first_stage else received
        hidden = self.stack(hidden_states=hidden, attention_mask=None, packed_seq_params=batch.attention)
        if self.head is None:
            return PassOutput(hidden, None)
        losses = pass_losses(
            self.logits(hidden), batch.labels, vocab_size=self.model.vocab_size, group=self.topology.pg.tp
        )
        return PassOutput(hidden, losses)

    def stack_input(
        self, batch: MicroBatch, pass_idx: int, received: Tensor | None, noise: FeedbackNoise | None
    ) -> Tensor:
        """Input of the first layer, [S, B, H]: `u` of pass `pass_idx`. First stage only.

        Source: arXiv 2608.08888, eq. 4 and the appendix' listing for the norms.
        """
        assert self.embedding is not None
        embedded = self.embedding(batch.tokens).transpose(0, 1).contiguous()
        plain_input = self._normed(embedded) if self.model.embedding_norm else embedded
        if pass_idx == 0:
            result = plain_input
        else:
            assert received is not None
            result = self._fused_input(batch, pass_idx, received, noise, embedded, plain_input)
        if self.config.sequence_parallel:
            result = tensor_parallel.scatter_to_sequence_parallel_region(result, group=self.topology.pg.tp)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, B, V] of the state after the final norm; columns beyond the vocabulary are padding."""
        assert self.head is not None
        weight = self.head.weight
        if weight is None:  # tied, on the stage of the embedding
            assert self.embedding is not None
            weight = self.embedding.weight
        logits, _ = self.head(hidden, weight=weight)
        return logits

    def _normed(self, x: Tensor) -> Tensor:
        assert self.embedding_norm is not None
        return self.embedding_norm(x)

    def _fused_input(
        self,
        batch: MicroBatch,
        pass_idx: int,
        received: Tensor,
        noise: FeedbackNoise | None,
        embedded: Tensor,
        plain_input: Tensor,
    ) -> Tensor:
        assert self.fusion is not None
        if self.config.sequence_parallel:
            # What follows is the same on every tensor-parallel rank, so the gradient is divided and not summed.
            received = tensor_parallel.gather_from_sequence_parallel_region(
                received, tensor_parallel_output_grad=False, group=self.topology.pg.tp
            )
        plain = batch.positions == 0
        if noise is not None:
            received = noise.add_jitter(received, rows=batch.rows, pass_idx=pass_idx)
            prefix = noise.plain_prefix(batch.document_ids, rows=batch.rows, pass_idx=pass_idx)
            plain = plain if prefix is None else plain | prefix
        plain = plain.t().contiguous()  # elementwise results take the strides of their first operand
        gate_input = plain_input if self.model.embedding_norm else self._normed(embedded)
        fused = self._normed(self.fusion(shift_by_one(received, plain=plain), gate_input))
        return torch.where(plain.unsqueeze(-1), plain_input, fused)
