"""Adam with decoupled weight decay, elementwise on flat tensors."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from fbt_megatron.config.schema import AdamConfig


class AdamUpdate(Protocol):
    """What `adam_update` is, and what every other implementation of Adam here has to be."""

    def __call__(
        self,
        weights: Tensor,
        gradients: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        num_updates: int,
        lr: float,
        weight_decay: float,
        config: AdamConfig,
    ) -> None: ...


def adam_update(
    weights: Tensor,
    gradients: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    num_updates: int,
    lr: float,
    weight_decay: float,
    config: AdamConfig,
) -> None:
    """Update `weights`, `exp_avg` and `exp_avg_sq` in place; all four tensors are fp32 and of one shape.

    `num_updates` counts the updates these weights have had, this one included: the bias correction rests on it.

    Source: arXiv 1412.6980, with the decay of arXiv 1711.05101: W <- (1 - lr * weight_decay) W before the step.
    """
    beta1, beta2 = config.betas
    exp_avg.mul_(beta1).add_(gradients, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
    root_correction = (1 - beta2**num_updates) ** 0.5
    denominator = exp_avg_sq.sqrt().div_(root_correction).add_(config.eps)
    if weight_decay:
        weights.mul_(1 - lr * weight_decay)
    weights.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**num_updates))
