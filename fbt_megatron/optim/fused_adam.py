"""Adam as one kernel per tensor, for GPUs: PyTorch's, NVIDIA Apex's or Transformer Engine's.

Each computes what `adam.adam_update` states, but reads and writes every tensor once; the plain version does so for each
of its operations. Under ZeRO a step updates a few long spans, so nothing is gained by more tensors per launch.

Apex and Transformer Engine share one calling convention:

    multi_tensor_applier(multi_tensor_adam, noop_flag, [gradients, weights, exp_avg, exp_avg_sq],
                         lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)

with lists of tensors, `noop_flag` one int32 on the device, `mode` 1 for decoupled decay and 0 for L2, and
`bias_correction` 0 or 1. The kernels compute in fp32 and need no alignment of the tensors.
Source: `csrc/multi_tensor_adam.cu` of NVIDIA Apex; `common/multi_tensor/adam.cu` of Transformer Engine.
"""

from __future__ import annotations

import importlib
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fbt_megatron.config.schema import AdamConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.optim.adam import AdamUpdate, adam_update

AdamKernel = Literal["torch", "torch_fused", "apex", "te"]

# Modules of the applier and of the kernel.
_MULTI_TENSOR = {
    "apex": ("apex.multi_tensor_apply", "amp_C"),
    "te": ("transformer_engine.pytorch.optimizers", "transformer_engine.pytorch.optimizers"),
}
_DECOUPLED_DECAY = 1
_CORRECT_BIAS = 1


def adam_with(kernel: AdamKernel, *, device: torch.device) -> AdamUpdate:
    """The Adam update of a kernel, for fp32 tensors on `device`.

    Every kernel but the plain one (`torch`) is compared with it here, on a few numbers. Raises ConfigError where the
    results differ: the libraries are built from source at any version, and a wrong update would spoil a run silently.
    """
    if kernel == "torch":
        return adam_update
    fused = _torch_fused_update if kernel == "torch_fused" else _multi_tensor_update(kernel, device)
    if not _agrees_with_plain_adam(fused, device):
        problem = f"kernels: the fused Adam ({kernel}) of this machine does not compute Adam. Use kernels: torch."
        raise ConfigError("model", [problem])
    return fused


def _torch_fused_update(
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
    updates_before = torch.full((), num_updates - 1, dtype=torch.float32, device=weights.device)
    adamw(
        [weights],
        [gradients],
        [exp_avg],
        [exp_avg_sq],
        [],
        [updates_before],
        fused=True,
        amsgrad=False,
        beta1=config.betas[0],
        beta2=config.betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=config.eps,
        maximize=False,
    )


def _multi_tensor_update(library: Literal["apex", "te"], device: torch.device) -> AdamUpdate:
    applier_module, kernel_module = (importlib.import_module(name) for name in _MULTI_TENSOR[library])
    apply_kernel: Any = applier_module.multi_tensor_applier
    kernel: Any = kernel_module.multi_tensor_adam
    noop_flag = torch.zeros(1, dtype=torch.int32, device=device)

    def update(
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
        lists = [[gradients], [weights], [exp_avg], [exp_avg_sq]]
        scalars = (lr, *config.betas, config.eps, num_updates, _DECOUPLED_DECAY, _CORRECT_BIAS, weight_decay)
        apply_kernel(kernel, noop_flag, lists, *scalars)

    return update


def _agrees_with_plain_adam(update: AdamUpdate, device: torch.device) -> bool:
    """Compare one update with decay of five elements that start at an odd place, as spans of a partition do."""
    start = torch.tensor([9.0, 0.5, -2.0, 3.0, -0.01, 0.0], device=device)
    results = []
    for candidate in (adam_update, update):
        weights, gradients, exp_avg = start.clone(), start.flip(0), 0.1 * start
        exp_avg_sq = start.square()
        tensors = [tensor[1:] for tensor in (weights, gradients, exp_avg, exp_avg_sq)]
        candidate(*tensors, num_updates=3, lr=0.02, weight_decay=0.3, config=AdamConfig())
        results.append(torch.stack([weights, exp_avg, exp_avg_sq]))
    return torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-6)
