"""Vocabulary-parallel cross entropy and log-partition function, without the padding of the vocabulary.

Legend: `S` sequence, `B` micro batch, `V` padded vocabulary columns of this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PassLosses:
    """Sums over the trained tokens of one pass over a micro-batch; fp32 scalars, the first two differentiable."""

    ce_sum: Tensor
    """Sum of the cross entropy."""
    z_sum: Tensor
    """Sum of the squared log-partition function."""
    num_tokens: Tensor
    """Number of trained tokens."""


def pass_losses(logits: Tensor, labels: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None) -> PassLosses:
    """Loss sums for `logits` [S, B, V] and `labels` [B, S] (negative: not trained)."""
    ce, lse = token_cross_entropy(logits, labels.t(), vocab_size=vocab_size, group=group)
    return PassLosses(ce.sum(), lse.square().sum(), (labels >= 0).sum())


def token_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Cross entropy and log-sum-exp of each token, [S, B] fp32 each; both 0, with gradient 0, where `labels` < 0.

    Rank r of `group` (None: one rank) holds columns [r V, (r + 1) V) of the logits [S, B, V]; `labels` [S, B] are ids
    of the whole vocabulary. Columns from `vocab_size` on are padding: no probability, gradient 0.
    """
    return _VocabParallelCrossEntropy.apply(logits, labels, vocab_size, group)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Keeps one fp32 buffer of the logits' shape, which turns from logits into probabilities and into the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        width = logits.shape[-1]
        first = 0 if group is None else group.rank() * width
        buffer = logits.to(torch.float32, copy=True)
        buffer[..., max(vocab_size - first, 0) :] = -torch.inf

        largest = _all_reduce(buffer.amax(dim=-1), dist.ReduceOp.MAX, group)
        buffer.sub_(largest.unsqueeze(-1))
        here = (labels >= first) & (labels < first + width)
        column = torch.where(here, labels - first, 0)
        target = torch.where(here, buffer.gather(-1, column.unsqueeze(-1)).squeeze(-1), 0.0)
        exp_sum, target = _all_reduce(torch.stack((buffer.exp_().sum(dim=-1), target)), dist.ReduceOp.SUM, group)
        buffer.div_(exp_sum.unsqueeze(-1))

        log_sum = exp_sum.log()
        trained = labels >= 0
        ctx.save_for_backward(buffer, column, here, trained)
        ctx.dtype = logits.dtype
        return torch.where(trained, log_sum - target, 0.0), torch.where(trained, log_sum + largest, 0.0)

    @staticmethod
    def backward(ctx: Any, ce_grad: Tensor, lse_grad: Tensor) -> tuple[Tensor, None, None, None]:
        """d ce / d logit = p - onehot, d lse / d logit = p."""
        gradient, column, here, trained = ctx.saved_tensors
        gradient.mul_(torch.where(trained, ce_grad + lse_grad, 0.0).unsqueeze(-1))
        gradient.scatter_add_(-1, column.unsqueeze(-1), torch.where(here, -ce_grad, 0.0).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None


def _all_reduce(values: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(values, op=op, group=group)
    return values
