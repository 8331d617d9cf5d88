"""The update of whole matrices is the same on every layout of ranks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fbt_megatron.config.schema import AdamConfig, NorMuonConfig, OptimizerConfig
from fbt_megatron.optim import exchange
from fbt_megatron.optim.normuon import normuon_update
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect
from tests.distributed import run_distributed
from tests.optim import harness, reference, world

SHAPE = world.Shape()
MESSAGE_DTYPE = exchange.message_dtype
CONFIG = OptimizerConfig(normuon=NorMuonConfig(momentum=0.9), adam=AdamConfig(betas=(0.9, 0.95)))
NESTEROV = replace(CONFIG, normuon=NorMuonConfig(momentum=0.9, nesterov=True))
USES_FEEDBACK = [step % 3 != 1 for step in range(20)]
SEEDS = {"equal": None, "cuts-1": 1, "cuts-2": 2}
CASES = {
    f"tp{tp}-dp{dp}-{'whole' if cuts is None else cuts}": (tp, dp, cuts)
    for tp, dp in [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
    for cuts in [None, *SEEDS]
    if dp > 1 or cuts in (None, "equal")
}


def build_rank(rank: int, tp: int, dp: int, cuts: str | None, group: Any, config: OptimizerConfig) -> harness.Rank:
    """Rank `rank` of a layout, tensor parallel varying fastest."""
    layouts = world.layouts(SHAPE, tp=tp, tp_rank=rank % tp)
    bounds = None
    if cuts is not None:
        groups = [[layout for layout in layouts.values() if world.is_matrix(layout) == flag] for flag in (True, False)]
        bounds = tuple(cut_bounds(members, dp, SEEDS[cuts]) for members in groups)
    options = {"dp_rank": rank // tp, "bounds": bounds, "group": group}
    return harness.Rank(layouts, harness.whole_tensors(SHAPE, 0), config, **options)


def cut_bounds(group: list[ParameterLayout], dp: int, seed: int | None) -> list[int]:
    """Equal partitions, or random ones that end anywhere in a row."""
    if seed is None:
        return world.even_bounds(group, dp)
    total = sum(layout.numel for layout in group)
    return [0, *sorted(random.Random(seed).sample(range(1, total), dp - 1)), total]


class CountedUpdates:
    """Stands for `normuon_update` and remembers the shape of each matrix that it is given."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, directions: torch.Tensor, *args: Any) -> Any:
        self.shapes += [tuple(directions.shape[1:])] * len(directions)
        return normuon_update(directions, *args)


def run_cases(rank: int) -> dict[str, Any]:
    """All layouts on the first ranks of four."""
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
    results = {}
    for name, (tp, dp, cuts) in CASES.items():
        if rank < tp * dp:
            results[name] = run_steps(build_rank(rank, tp, dp, cuts, groups[tp * dp], CONFIG), steps=20)
    for name in ("tp1-dp1-whole", "tp2-dp2-cuts-1"):
        tp, dp, cuts = CASES[name]
        if rank < tp * dp:
            results[f"nesterov-{name}"] = run_steps(build_rank(rank, tp, dp, cuts, groups[tp * dp], NESTEROV), steps=3)
            exchange.message_dtype = lambda device: torch.bfloat16
            results[f"bf16-{name}"] = run_steps(build_rank(rank, tp, dp, cuts, groups[tp * dp], CONFIG), steps=1)
            exchange.message_dtype = MESSAGE_DTYPE
    return results


def run_steps(subject: harness.Rank, *, steps: int) -> dict[str, Any]:
    """Weights after one step and after all, state after all, and the orthogonalised shapes of each step."""
    shapes, first = [], None
    for step in range(steps):
        exchange.normuon_update = counted = CountedUpdates()
        how = harness.settings(uses_feedback=USES_FEEDBACK[step])
        subject.step(harness.whole_tensors(SHAPE, step + 1), how)
        shapes.append(counted.shapes)
        first = subject.weights() if first is None else first
    exchange.normuon_update = normuon_update
    return {"first": first, "last": subject.weights(), "state": subject.state(), "shapes": shapes}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_distributed(run_cases, 4)


def whole_weights(name: str, results: list[dict[str, Any]], key: str) -> dict[str, np.ndarray]:
    """Whole tensors from the partitions of all ranks."""
    tp, dp, cuts = CASES[name.removeprefix("nesterov-").removeprefix("bf16-")]
    whole = {tensor.name: torch.full(tensor.shape, np.nan) for tensor in world.logical_tensors(SHAPE)}
    for tp_rank in range(tp):
        layouts = list(world.layouts(SHAPE, tp=tp, tp_rank=tp_rank).values())
        for index, flag in enumerate((True, False)):
            parts = [torch.from_numpy(results[d * tp + tp_rank][name][key][index]) for d in range(dp)]
            flat = parts[0] if cuts is None else torch.cat(parts)
            for layout in (member for member in layouts if world.is_matrix(member) == flag):
                world.unstore(layout, flat[: layout.numel], whole)
                flat = flat[layout.numel :]
    return {tensor: value.numpy() for tensor, value in whole.items()}


def expected_matrices(steps: int, *, nesterov: bool = False) -> dict[str, reference.ReferenceNorMuon]:
    """Every matrix by the equations."""
    start = harness.whole_tensors(SHAPE, 0)
    tensors = [tensor for tensor in world.logical_tensors(SHAPE) if tensor.kind is ParamKind.MATRIX]
    options = {"mu": 0.9, "nesterov": nesterov}
    expected = {t.name: reference.ReferenceNorMuon(start[t.name].double().numpy(), **options) for t in tensors}
    for step in range(steps):
        gradients, how = harness.whole_tensors(SHAPE, step + 1), harness.settings()
        for tensor in tensors:
            if USES_FEEDBACK[step] or not tensor.feedback:
                gradient = gradients[tensor.name].double().numpy()
                decay = how.weight_decay_normuon
                expected[tensor.name].step(gradient, lr=how.lr_normuon, weight_decay=decay)
    return expected


@pytest.mark.distributed
@pytest.mark.parametrize(("key", "steps", "tolerance"), [("first", 1, 1e-6), ("last", 20, 1e-5)])
@pytest.mark.parametrize("name", CASES)
def test_weights_equal_the_equations(name, key, steps, tolerance, results):
    weights = whole_weights(name, results, key)
    for tensor, expected in expected_matrices(steps).items():
        assert reference.relative_error(weights[tensor], expected.weight) < tolerance, tensor


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_state_equals_the_equations(name, results):
    tp, dp, _ = CASES[name]
    state = harness.assemble_state(SHAPE, [results[rank][name]["state"] for rank in range(tp * dp)])
    for tensor, expected in expected_matrices(20).items():
        assert reference.relative_error(state["momentum", tensor], expected.momentum) < 1e-5, tensor
        assert reference.relative_error(state["row_moment", tensor][0], expected.v) < 1e-5, tensor
    assert not any(np.isnan(value).any() for value in state.values())


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_everything_equals_one_rank(name, results):
    tp, dp, _ = CASES[name]
    for key, tolerance in (("first", 1e-6), ("last", 1e-5)):
        alone, here = whole_weights("tp1-dp1-whole", results, key), whole_weights(name, results, key)
        for tensor, value in alone.items():
            assert reference.relative_error(here[tensor], value) < tolerance, tensor
    alone = harness.assemble_state(SHAPE, [results[0]["tp1-dp1-whole"]["state"]])
    here = harness.assemble_state(SHAPE, [results[rank][name]["state"] for rank in range(tp * dp)])
    assert alone.keys() == here.keys()
    for key, value in alone.items():
        assert reference.relative_error(here[key], value) < 1e-5, key


@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("whole")])
def test_replicas_without_zero_are_bit_identical(name, results):
    tp, dp, _ = CASES[name]
    for rank in range(tp, tp * dp):
        for own, other in zip(results[rank][name]["last"], results[rank % tp][name]["last"], strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
def test_each_used_matrix_is_orthogonalised_once_over_all_ranks(name, results):
    tp, dp, _ = CASES[name]
    matrices = [tensor for tensor in world.logical_tensors(SHAPE) if tensor.kind is ParamKind.MATRIX]
    for step in range(20):
        done = [shape for rank in range(tp * dp) for shape in results[rank][name]["shapes"][step]]
        assert sorted(done) == sorted(t.shape for t in matrices if USES_FEEDBACK[step] or not t.feedback)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["nesterov-tp1-dp1-whole", "nesterov-tp2-dp2-cuts-1"])
def test_nesterov_equals_the_equations(name, results):
    weights = whole_weights(name, results, "last")
    for tensor, expected in expected_matrices(3, nesterov=True).items():
        assert reference.relative_error(weights[tensor], expected.weight) < 1e-5, tensor


@pytest.mark.distributed
def test_bf16_messages_move_weights_alike(results):
    """What GPUs do: messages and iterations in bf16, everything kept in fp32."""
    start = harness.whole_tensors(SHAPE, 0)
    alone = whole_weights("bf16-tp1-dp1-whole", results, "first")
    here = whole_weights("bf16-tp2-dp2-cuts-1", results, "first")
    for tensor, expected in expected_matrices(1).items():
        before = start[tensor].numpy()
        assert reference.relative_error(alone[tensor] - before, expected.weight - before) < 0.1, tensor
        assert reference.relative_error(here[tensor] - before, alone[tensor] - before) < 1e-3, tensor


# A 2 x 2 matrix of which the ranks hold one row each; a shard-local step would give rows [1, 0] and [0.6247, 0.7809].
MEAN_GRADIENT = torch.tensor([[3.0, 0.0], [4.0, 5.0]])
POLAR_FACTOR = np.array([[0.8944, -0.4472], [0.4472, 0.8944]])
W = LogicalTensor("w", (2, 2), ParamKind.MATRIX)
G = LogicalTensor("g", (2,), ParamKind.VECTOR)


def run_two_rows(rank: int) -> dict[str, np.ndarray]:
    """Updates of this rank's row, when ZeRO cuts between the rows and when tensor parallelism does."""
    config = OptimizerConfig(normuon=NorMuonConfig(row_norm=False, scale="none"))
    vector = ParameterLayout("g", (2,), ((G, (Block(Rect(0, 0, 1, 2), 0, 0),)),), replicated=True)
    whole = ParameterLayout("w", (2, 2), ((W, (Block(Rect(0, 0, 2, 2), 0, 0),)),))
    row = ParameterLayout("w", (1, 2), ((W, (Block(Rect(0, 0, 1, 2), rank, 0),)),))
    zero, gradients = {"w": torch.zeros(2, 2), "g": torch.zeros(2)}, {"w": MEAN_GRADIENT, "g": torch.zeros(2)}
    layouts_and_cuts = {"zero": (whole, rank, ([0, 2, 4], [0, 1, 2])), "tensor": (row, 0, ([0, 2], [0, 2]))}
    updates = {}
    for name, (layout, dp_rank, bounds) in layouts_and_cuts.items():
        layouts = {"w": layout, "g": vector}
        subject = harness.Rank(layouts, zero, config, dp_rank=dp_rank, bounds=bounds, group=dist.group.WORLD)
        subject.step(gradients, harness.settings(lr=1.0, decay=0.0))
        updates[name] = -subject.weights()[0]
    return updates


@pytest.mark.distributed
def test_matrix_cut_between_its_rows_moves_along_the_whole_polar_factor():
    ranks = run_distributed(run_two_rows, 2)
    for name in ("zero", "tensor"):
        update = np.stack([ranks[0][name], ranks[1][name]])
        assert reference.relative_error(update, POLAR_FACTOR) < 0.1
        exact = reference.orthogonalize(MEAN_GRADIENT.double().numpy(), reference.POLAR_EXPRESS)
        assert reference.relative_error(update, exact) < 1e-5
    np.testing.assert_array_equal(ranks[0]["zero"], ranks[0]["tensor"])
