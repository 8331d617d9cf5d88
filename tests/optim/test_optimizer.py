"""The optimizer on one rank: against the equations, torch's optimizers, and the order of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from fbt_megatron.config.schema import AdamConfig, NorMuonConfig, OptimizerConfig
from fbt_megatron.optim import exchange, newton_schulz
from fbt_megatron.optim.optimizer import NorMuonAdam, StepSettings
from fbt_megatron.parallel.logical_tensor import Block, Fragment, LogicalTensor, ParameterLayout, ParamKind, Rect
from tests.optim import harness, reference, world

pytestmark = pytest.mark.usefixtures("single_rank")


def whole(name: str, shape: tuple[int, ...], kind: ParamKind, *, feedback: bool = False) -> Fragment:
    tensor = LogicalTensor(name, shape, kind, feedback)
    layout = ParameterLayout(name, shape, ((tensor, (Block(Rect(0, 0, tensor.rows, tensor.cols), 0, 0),)),))
    return Fragment(layout, 0, layout.numel, 0)


def bound(matrix: torch.Tensor, vector: torch.Tensor, **normuon: Any) -> tuple[NorMuonAdam, Parameter, Parameter]:
    """An optimizer of one matrix and one vector, without ZeRO."""
    matrix_param, vector_param = Parameter(matrix.clone()), Parameter(vector.clone())
    config = OptimizerConfig(normuon=NorMuonConfig(**normuon), adam=AdamConfig())
    optimizer = NorMuonAdam([matrix_param], [vector_param], config)
    topology: Any = SimpleNamespace(dp_rank=0, tp_dp_group=None)
    fragments = whole("w", tuple(matrix.shape), ParamKind.MATRIX), whole("g", tuple(vector.shape), ParamKind.VECTOR)
    optimizer.bind([fragments[0]], [fragments[1]], topology=topology, replicated_over_dp=True)
    return optimizer, matrix_param, vector_param


def rank_of_one(config: OptimizerConfig | None = None, *, zero: bool = True) -> tuple[harness.Rank, world.Shape]:
    shape = world.Shape()
    layouts = world.layouts(shape, tp=1, tp_rank=0)
    groups = [[layout for layout in layouts.values() if world.is_matrix(layout) == flag] for flag in (True, False)]
    bounds = tuple(world.even_bounds(group, 1) for group in groups)
    weights = harness.whole_tensors(shape, 0)
    options = {"dp_rank": 0, "bounds": bounds if zero else None, "group": None}
    return harness.Rank(layouts, weights, config or OptimizerConfig(), **options), shape


def test_hand_worked_step():
    """Gradient Q diag(3, 4) [I 0]: the update is worked in test_normuon.py. W - lr * (wd * W + U) by hand."""
    weight = torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 2.0]])
    optimizer, matrix, _ = bound(weight, torch.zeros(2))
    matrix.grad = torch.tensor([[1.8, -3.2, 0.0], [2.4, 2.4, 0.0]])
    optimizer.param_groups[1]["params"][0].grad = torch.zeros(2)
    optimizer.prepare(StepSettings(0.1, 0.1, 0.5, 0.0, uses_feedback=False))
    optimizer.step()
    expected = [[0.95 - 0.04687749, 1.9 + 0.05798115, 2.85], [-0.95 - 0.06120492, -0.04258252, 1.9]]
    torch.testing.assert_close(matrix.detach(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": True},
        {"row_norm": False, "scale": "none"},
        {"coefficients": "quintic", "scale": "rms", "momentum": 0.8, "beta2": 0.9},
    ],
    ids=["default", "nesterov", "muon", "quintic"],
)
def test_twenty_steps_equal_the_equations(shape, options):
    draw = torch.Generator().manual_seed(sum(shape))
    start = torch.randn(shape, generator=draw)
    optimizer, matrix, vector = bound(start, torch.zeros(3), **options)
    table = {"polar_express": reference.POLAR_EXPRESS, "quintic": reference.QUINTIC}
    names = {"momentum": "mu", "coefficients": "coefficients"}
    kwargs = {names.get(k, k): table[v] if k == "coefficients" else v for k, v in options.items()}
    expected = reference.ReferenceNorMuon(start.double().numpy(), **kwargs)
    for step in range(20):
        gradient = torch.randn(shape, generator=draw)
        lr, decay = 0.02 + 0.001 * step, 0.1
        matrix.grad, vector.grad = gradient.clone(), torch.zeros(3)
        optimizer.prepare(StepSettings(lr, 0.1, decay, 0.0, uses_feedback=True))
        optimizer.step()
        expected.step(gradient.double().numpy(), lr=lr, weight_decay=decay)
    assert reference.relative_error(matrix.detach().double().numpy(), expected.weight) < 1e-5
    state = {entry.state: entry.pieces[0][1].double().numpy() for entry in optimizer.state_tensors()}
    assert reference.relative_error(state["momentum"], expected.momentum) < 1e-5
    if options.get("row_norm", True):
        assert reference.relative_error(state["row_moment"][0], expected.v) < 1e-5


def beside_torch_muon(shape: tuple[int, int], *, nesterov: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, our weights and torch.optim.Muon's after five steps; that one iterates in bf16 and has no row stage."""
    draw = torch.Generator().manual_seed(7)
    start = 0.02 * torch.randn(shape, generator=draw)
    options = {"scale": "rms", "coefficients": "quintic", "row_norm": False, "nesterov": nesterov}
    optimizer, matrix, vector = bound(start, torch.zeros(3), **options)
    other, rates = Parameter(start.clone()), {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95}
    muon = torch.optim.Muon([other], nesterov=nesterov, adjust_lr_fn="match_rms_adamw", **rates)
    for _ in range(5):
        gradient = torch.randn(shape, generator=draw)
        matrix.grad, vector.grad, other.grad = gradient.clone(), torch.zeros(3), gradient.clone()
        optimizer.prepare(StepSettings(0.01, 0.1, 0.1, 0.0, uses_feedback=True))
        optimizer.step()
        muon.step()
    return start.numpy(), matrix.detach().numpy(), other.detach().numpy()


MUON_CASES = [((48, 20), False), ((20, 48), False), ((48, 20), True), ((20, 48), True)]


@pytest.mark.parametrize(("shape", "nesterov"), MUON_CASES)
def test_weights_stay_near_those_of_torch_muon(shape, nesterov):
    _, weights, expected = beside_torch_muon(shape, nesterov=nesterov)
    assert reference.relative_error(weights, expected) < 2e-2


@pytest.mark.parametrize(("shape", "nesterov"), MUON_CASES)
def test_updates_equal_torch_muon_but_for_rounding_when_it_is_normalised_alike(shape, nesterov, monkeypatch):
    """torch divides by the norm, we by 1.02 times the norm: the quintic has not converged, so that shows."""
    monkeypatch.setattr(newton_schulz, "NORM_MARGIN", 1.0)
    start, weights, expected = beside_torch_muon(shape, nesterov=nesterov)
    assert reference.relative_error(weights - start, expected - start) < 2e-2


def test_singular_values_of_the_first_update_are_near_one_another():
    optimizer, matrix, vector = bound(torch.zeros(2, 2), torch.zeros(2))
    matrix.grad, vector.grad = torch.tensor([[8.0, -0.5], [8.0, 0.5]]), torch.zeros(2)
    optimizer.prepare(StepSettings(0.1, 0.1, 0.0, 0.0, uses_feedback=True))
    optimizer.step()
    values = torch.linalg.svdvals(matrix.detach())
    assert values[1] > 0.01
    assert values[0] / values[1] < 1.7


def test_momentum_is_a_weighted_mean():
    optimizer, matrix, vector = bound(torch.zeros(1, 2), torch.zeros(2), momentum=0.9)
    for expected in (0.1, 0.19):
        matrix.grad, vector.grad = torch.tensor([[1.0, 2.0]]), torch.zeros(2)
        optimizer.prepare(harness.settings())
        optimizer.step()
        momentum = next(optimizer.state_tensors()).pieces[0][1]
        torch.testing.assert_close(momentum, torch.tensor([[expected, 2 * expected]]))


def test_rates_of_the_groups_stay_apart():
    optimizer, _, _ = bound(torch.zeros(2, 2), torch.zeros(2))
    for step in range(1, 5):
        optimizer.prepare(StepSettings(0.02 * step / 4, 3e-4 * step / 4, 0.01, 0.0, uses_feedback=False))
        first, second = optimizer.param_groups
        assert first["lr"] / second["lr"] == pytest.approx(66.6667, rel=1e-5)
        assert first["lr"] == pytest.approx(0.005 * step)
        assert (first["weight_decay"], second["weight_decay"]) == (0.01, 0.0)


@pytest.mark.parametrize("zero", [True, False])
def test_step_without_feedback_leaves_the_fusion_bit_for_bit(zero):
    rank, shape = rank_of_one(zero=zero)
    for seed in range(2):
        rank.step(harness.whole_tensors(shape, seed + 1), harness.settings(uses_feedback=True))
    before, weights = harness.assemble_state(shape, [rank.state()]), rank.weights()
    feedback = {tensor.name for tensor in world.logical_tensors(shape) if tensor.feedback}
    rank.step(harness.whole_tensors(shape, 9), harness.settings(uses_feedback=False))
    after = harness.assemble_state(shape, [rank.state()])
    for key, value in before.items():
        assert np.array_equal(value, after[key]) == (key[1] in feedback), key
    assert rank.optimizer.counters() == {"adam": 3, "adam_feedback": 2}
    for group, old, new in zip(rank.groups, weights, rank.weights(), strict=True):
        start = 0
        for layout in group:
            same = np.array_equal(old[start : start + layout.numel], new[start : start + layout.numel])
            assert same == layout.feedback, layout.name
            start += layout.numel


@pytest.mark.parametrize("zero", [True, False])
def test_adam_counts_updates_of_feedback_parameters_apart(zero):
    """Each parameter moves as torch's AdamW would move it in the steps that use it; vectors do not decay."""
    config = OptimizerConfig(adam=AdamConfig(betas=(0.8, 0.9), eps=1e-6))
    rank, shape = rank_of_one(config, zero=zero)
    expected = {name: Parameter(value) for name, value in harness.whole_tensors(shape, 0).items()}
    tensors = [t for t in world.logical_tensors(shape) if t.kind is not ParamKind.MATRIX]
    options = {"lr": 0.005, "betas": (0.8, 0.9), "eps": 1e-6}
    optimizers = {
        t.name: torch.optim.AdamW([expected[t.name]], weight_decay=0.02 if len(t.shape) == 2 else 0.0, **options)
        for t in tensors
    }
    for step, uses_feedback in enumerate([False, True, False, True, True]):
        gradients = harness.whole_tensors(shape, step + 1)
        rank.step(gradients, harness.settings(uses_feedback=uses_feedback))
        for tensor in tensors:
            if uses_feedback or not tensor.feedback:
                expected[tensor.name].grad = gradients[tensor.name]
                optimizers[tensor.name].step()
    after = torch.from_numpy(rank.weights()[1])
    local = torch.cat([world.store(g, {n: p.detach() for n, p in expected.items()}).view(-1) for g in rank.groups[1]])
    torch.testing.assert_close(after, local, rtol=1e-5, atol=1e-6)


def test_zero_partition_equals_whole_parameters():
    ranks = [rank_of_one(zero=zero)[0] for zero in (True, False)]
    for step in range(3):
        for rank in ranks:
            rank.step(harness.whole_tensors(world.Shape(), step + 1), harness.settings())
    for flat, separate in zip(*(rank.weights() for rank in ranks), strict=True):
        np.testing.assert_array_equal(flat[: len(separate)], separate)


def test_size_of_the_batches_does_not_matter(monkeypatch):
    results = []
    for limit in (1, 2 * 12 * 12, exchange.MAX_BATCH_NUMEL):
        monkeypatch.setattr(exchange, "MAX_BATCH_NUMEL", limit)
        rank, shape = rank_of_one()
        for step in range(2):
            rank.step(harness.whole_tensors(shape, step + 1), harness.settings(uses_feedback=step == 1))
        results.append(rank.weights()[0])
    for other in results[1:]:
        assert reference.relative_error(other, results[0]) < 1e-6


def test_state_loads_by_copying_into_the_views():
    """A second optimizer that gets weights, state and counters of the first goes on exactly like it."""
    first, shape = rank_of_one()
    second, _ = rank_of_one(zero=False)
    for step in range(3):
        first.step(harness.whole_tensors(shape, step + 1), harness.settings(uses_feedback=step != 1))
    whole_state = harness.assemble_state(shape, [first.state()])
    loaded = set()
    for state, tensor, pieces in second.optimizer.state_tensors():
        for rect, view in pieces:
            value = whole_state[state, tensor.name]
            part = value[rect.row : rect.row + rect.rows, rect.col : rect.col + rect.cols]
            view.copy_(torch.from_numpy(part))
            loaded.add((state, tensor.name))
    assert loaded == set(whole_state)
    second.optimizer.load_counters(first.optimizer.counters())
    for group, params in zip(first.weights(), second.optimizer.param_groups, strict=True):
        start = 0
        for param in params["params"]:
            param.data.copy_(torch.from_numpy(group[start : start + param.numel()]).view_as(param))
            start += param.numel()
    for step in range(3, 5):
        for rank in (first, second):
            rank.step(harness.whole_tensors(shape, step + 1), harness.settings())
    for flat, separate in zip(first.weights(), second.weights(), strict=True):
        np.testing.assert_array_equal(flat[: len(separate)], separate)


def test_padding_of_the_partition_is_never_touched():
    shape = world.Shape()
    layouts = world.layouts(shape, tp=1, tp_rank=0)
    groups = [[layout for layout in layouts.values() if world.is_matrix(layout) == flag] for flag in (True, False)]
    totals = [sum(layout.numel for layout in group) for group in groups]
    bounds = tuple([0, total + 5] for total in totals)
    rank = harness.Rank(
        layouts, harness.whole_tensors(shape, 0), OptimizerConfig(), dp_rank=0, bounds=bounds, group=None
    )
    for group in rank.optimizer.param_groups:
        group["params"][0].data[-5:] = 3.0
    rank.step(harness.whole_tensors(shape, 1), harness.settings())
    for weights in rank.weights():
        np.testing.assert_array_equal(weights[-5:], np.full(5, 3.0))


def test_wrong_order_of_calls_is_an_error():
    optimizer, matrix, vector = bound(torch.zeros(2, 2), torch.zeros(2))
    matrix.grad, vector.grad = torch.ones(2, 2), torch.ones(2)
    with pytest.raises(RuntimeError, match=r"without prepare\(\)"):
        optimizer.step()
    optimizer.prepare(harness.settings())
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"without prepare\(\)"):
        optimizer.step()
    optimizer.prepare(harness.settings())
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_missing_gradient_of_a_used_parameter_is_an_error():
    optimizer, matrix, _ = bound(torch.zeros(2, 2), torch.zeros(2))
    matrix.grad = torch.ones(2, 2)
    optimizer.prepare(harness.settings())
    with pytest.raises(RuntimeError, match="No gradient for g"):
        optimizer.step()


def test_fragments_that_do_not_fit_are_an_error():
    topology: Any = SimpleNamespace(dp_rank=0, tp_dp_group=None)
    matrix, vector = whole("w", (2, 2), ParamKind.MATRIX), whole("g", (2,), ParamKind.VECTOR)
    optimizer = NorMuonAdam([Parameter(torch.zeros(2, 3))], [Parameter(torch.zeros(2))], OptimizerConfig())
    with pytest.raises(ValueError, match="elements 0 to 4 at 0 do not fit a tensor of 6 elements"):
        optimizer.bind([matrix], [vector], topology=topology, replicated_over_dp=True)
    with pytest.raises(ValueError, match="0 fragments for 1 whole parameters"):
        optimizer.bind([], [vector], topology=topology, replicated_over_dp=True)
    two = NorMuonAdam([Parameter(torch.zeros(4)) for _ in range(2)], [Parameter(torch.zeros(2))], OptimizerConfig())
    with pytest.raises(ValueError, match="got 2 tensors"):
        two.bind([matrix], [vector], topology=topology, replicated_over_dp=False)
    low = NorMuonAdam([Parameter(torch.zeros(4).bfloat16())], [Parameter(torch.zeros(2))], OptimizerConfig())
    with pytest.raises(ValueError, match="not contiguous fp32"):
        low.bind([matrix], [vector], topology=topology, replicated_over_dp=False)
