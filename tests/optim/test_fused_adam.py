"""Fused Adam against torch's AdamW, with stand-ins for NVIDIA's kernels that follow their documented convention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fbt_megatron.config.schema import AdamConfig, OptimizerConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.optim.adam import adam_update
from fbt_megatron.optim.fused_adam import adam_with
from fbt_megatron.optim.optimizer import NorMuonAdam
from tests.optim import harness, world

CPU = torch.device("cpu")
CHUNK_SIZE = 2048 * 32
LIBRARIES = pytest.mark.parametrize("library", ["apex", "te"])


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    /,
) -> None:
    """NVIDIA's kernel in plain torch: gradients, weights and moments in this order, mode 0 is L2 and 1 is decoupled."""
    assert chunk_size == CHUNK_SIZE
    assert noop_flag.dtype == torch.int32
    assert noop_flag.tolist() == [0]
    assert all(type(value) is int for value in (step, mode, bias_correction))
    for gradient, weight, first, second in zip(*tensor_lists, strict=True):
        corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
        gradient = gradient + weight_decay * weight if mode == 0 else gradient
        first.copy_(beta1 * first + (1 - beta1) * gradient)
        second.copy_(beta2 * second + (1 - beta2) * gradient * gradient)
        update = (first / corrections[0]) / ((second / corrections[1]).sqrt() + epsilon)
        weight.sub_(lr * (update + weight_decay * weight if mode == 1 else update))


def install(monkeypatch: pytest.MonkeyPatch, library: str, kernel: Callable[..., None] = multi_tensor_adam) -> None:
    def applier(op: Callable[..., None], noop_flag: Tensor, tensor_lists: list[list[Tensor]], *scalars: Any) -> None:
        op(CHUNK_SIZE, noop_flag, tensor_lists, *scalars)

    modules = {
        "apex": {"apex": {}, "apex.multi_tensor_apply": {"multi_tensor_applier": applier}},
        "te": {"transformer_engine": {}, "transformer_engine.pytorch": {}},
    }[library]
    if library == "apex":
        modules["amp_C"] = {"multi_tensor_adam": kernel}
    else:
        both = {"multi_tensor_applier": applier, "multi_tensor_adam": kernel}
        modules["transformer_engine.pytorch.optimizers"] = both
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("kernel", ["torch", "torch_fused", "apex", "te"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_thirty_updates_equal_torch(kernel: Any, weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "te" if kernel == "te" else "apex")
    update = adam_with(kernel, device=CPU)
    draw = torch.Generator().manual_seed(1)
    storage = torch.randn(51, generator=draw)
    weights, moments = storage[1:], (torch.zeros(50), torch.zeros(50))
    expected = torch.nn.Parameter(weights.clone())
    betas, rates = (0.8, 0.95), {"lr": 0.02, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([expected], betas=betas, eps=1e-6, **rates)
    for num_updates in range(1, 31):
        gradient = torch.randn(50, generator=draw) * 10 ** torch.randint(-4, 2, (50,), generator=draw).float()
        given = gradient.clone()
        expected.grad = gradient.clone()
        optimizer.step()
        update(weights, given, *moments, num_updates=num_updates, config=AdamConfig(betas=betas, eps=1e-6), **rates)
        torch.testing.assert_close(weights, expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(given, gradient)
    for moment, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
        torch.testing.assert_close(moment, optimizer.state[expected][name], rtol=1e-5, atol=1e-9)


def swapped_lists(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], *scalars: Any) -> None:
    multi_tensor_adam(chunk_size, noop_flag, [lists[1], lists[0], lists[2], lists[3]], *scalars)


def l2_decay(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], *scalars: Any) -> None:
    multi_tensor_adam(chunk_size, noop_flag, lists, *scalars[:5], 0, *scalars[6:])


def no_bias_correction(chunk_size: int, noop_flag: Tensor, lists: list[list[Tensor]], *scalars: Any) -> None:
    multi_tensor_adam(chunk_size, noop_flag, lists, *scalars[:6], 0, *scalars[7:])


def does_nothing(*arguments: Any) -> None:
    pass


@LIBRARIES
@pytest.mark.parametrize("kernel", [swapped_lists, l2_decay, no_bias_correction, does_nothing])
def test_a_kernel_that_is_not_adam_is_refused(
    library: Any, kernel: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, library, kernel)
    with pytest.raises(ConfigError, match=rf"fused Adam \({library}\) .* does not compute Adam. Use kernels: torch"):
        adam_with(library, device=CPU)


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize("zero", [True, False])
def test_the_optimizer_takes_it(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same weights as with plain Adam, over steps with and without feedback, whose update counts differ."""
    install(monkeypatch, "apex")
    shape = world.Shape()
    layouts = world.layouts(shape, tp=1, tp_rank=0)
    groups = [[layout for layout in layouts.values() if world.is_matrix(layout) == flag] for flag in (True, False)]
    bounds = tuple(world.even_bounds(group, 1) for group in groups) if zero else None
    finals = []
    for update in (adam_update, adam_with("apex", device=CPU)):
        weights = harness.whole_tensors(shape, 0)
        rank = harness.Rank(layouts, weights, OptimizerConfig(), dp_rank=0, bounds=bounds, group=None, adam=update)
        assert isinstance(rank.optimizer, NorMuonAdam)
        for step, uses_feedback in enumerate((False, True, False, True)):
            rank.step(harness.whole_tensors(shape, step + 1), harness.settings(uses_feedback=uses_feedback))
        finals.append([param.detach().clone() for group in rank.optimizer.param_groups for param in group["params"]])
    for plain, fused in zip(*finals, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)
