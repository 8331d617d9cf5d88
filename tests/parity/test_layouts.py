"""One optimizer step is the same in every TP x PP x DP x ZeRO layout, up to the order of floating-point sums.

In fp32 one process is compared with the reference of `reference.py`, and every other layout with that one process; bf16
layouts with bf16 in one process. Measured is ||a - b|| / ||b|| of whole tensors.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.distributed import run_distributed
from tests.parity.cases import (
    MIXED,
    STEPS,
    Layout,
    RankResult,
    Training,
    assemble,
    distance,
    train_cases,
)
from tests.parity.reference import train_reference

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(3600)]

ONE = Layout()
LAYOUTS = (
    Layout(zero=0),
    Layout(tp=2),
    Layout(pp=2),
    Layout(dp=2),
    Layout(pp=4),
    Layout(tp=2, pp=2),
    Layout(pp=2, dp=2),
    Layout(tp=2, dp=2),
    Layout(tp=2, pp=2, dp=2),
    Layout(tp=2, sequence=True),
    Layout(tp=2, pp=2, sequence=True),
    Layout(tp=2, pp=2, zero=0),
    Layout(pp=2, dp=2, zero=0),
    Layout(tp=2, dp=2, zero=0),
)
PASSES = ((1,), (2,), (3,), MIXED)
TRAININGS = tuple(
    Training(passes, tied, precision)
    for passes, tied, precision in itertools.product(PASSES, (True, False), ("fp32", "bf16"))
)

# Every layout, number of passes, tying and type; and every pair of passes, tying and type.
CHOSEN = {
    (Layout(zero=0), Training((3,), tied=True)),
    (Layout(tp=2), Training(MIXED, tied=True)),
    (Layout(tp=2), Training((2,), tied=False, precision="bf16")),
    (Layout(pp=2), Training((1,), tied=True)),
    (Layout(pp=2), Training((3,), tied=True, precision="bf16")),
    (Layout(dp=2), Training(MIXED, tied=False)),
    (Layout(pp=4), Training((2,), tied=True)),
    (Layout(tp=2, pp=2), Training(MIXED, tied=True)),
    (Layout(tp=2, pp=2), Training((1,), tied=False, precision="bf16")),
    (Layout(pp=2, dp=2), Training((3,), tied=True)),
    (Layout(tp=2, dp=2), Training((1,), tied=False)),
    (Layout(tp=2, pp=2, dp=2), Training((2,), tied=True, precision="bf16")),
    (Layout(tp=2, sequence=True), Training((3,), tied=False)),
    (Layout(tp=2, pp=2, sequence=True), Training((2,), tied=False)),
    (Layout(pp=2, dp=2, zero=0), Training(MIXED, tied=True)),
    (Layout(tp=2, dp=2, zero=0), Training((2,), tied=False)),
}
"""The cases of `make test`; `make test-all` runs all of them."""


@dataclass(frozen=True)
class Tolerance:
    """Relative limits, by the number of steps done: what the first step shows, and what any step up to the last does.

    Tensors are compared one by one, or with `pooled` all weights together and all of a state together.
    """

    losses: dict[int, float]
    norms: dict[int, float]
    weights: dict[int, float]
    state: dict[int, float]
    validation: float
    pooled: bool = False


FP32 = Tolerance(
    losses={1: 1e-4, STEPS: 1e-4},
    norms={1: 1e-4, STEPS: 1e-4},
    weights={1: 1e-4, STEPS: 1e-3},
    state={1: 1e-4, STEPS: 1e-3},
    validation=1e-4,
)
# Eight bits of mantissa: tensor parallelism rounds activations in other places, a pipeline sums gradients in another
# order, and 20 steps let both grow. A forgotten sum or factor is at 0.5 or beyond from the first step on.
BF16 = Tolerance(
    losses={1: 5e-3, STEPS: 2e-2},
    norms={1: 3e-2, STEPS: 1.5e-1},
    weights={1: 5e-3, STEPS: 4e-2},
    state={1: 1.5e-1, STEPS: 3e-1},
    validation=1e-1,
    pooled=True,
)


def all_cases() -> list[tuple[Layout, Training]]:
    pairs = itertools.product(LAYOUTS, TRAININGS)
    return [(layout, training) for layout, training in pairs if layout.zero or training.precision == "fp32"]


def parameters() -> list[object]:
    return [
        pytest.param(layout, training, id=f"{layout}-{training}", marks=[] if chosen else [pytest.mark.slow])
        for layout, training in all_cases()
        for chosen in [(layout, training) in CHOSEN]
    ]


@functools.cache
def results_of_world(world_size: int, chosen: bool) -> dict[tuple[Layout, Training], list[RankResult]]:
    """Results by rank of all cases of one number of ranks, which start once; the chosen ones, or the others."""
    cases = [case for case in all_cases() if case[0].world_size == world_size and (case in CHOSEN) == chosen]
    if world_size == 1:
        needed = {training for _, training in CHOSEN} if chosen else TRAININGS
        cases += [(ONE, training) for training in TRAININGS if training in needed]
    ranks = run_distributed(train_cases, world_size, cases, timeout_seconds=180.0 + 60.0 * len(cases))
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}


def result_of(layout: Layout, training: Training, *, chosen: bool) -> list[RankResult]:
    return results_of_world(layout.world_size, chosen)[layout, training]


def one_process(training: Training) -> RankResult:
    chosen = any(training == other for _, other in CHOSEN)
    return result_of(ONE, training, chosen=chosen)[0]


def whole(ranks: list[RankResult], *, steps: int, kind: str) -> dict[str, np.ndarray]:
    """Whole tensors from the pieces of all ranks, whose copies are equal to the bit."""
    return assemble([rank.parts[steps].get(kind, []) for rank in ranks])


def assert_same_steps(result: RankResult, losses: list[list[float]], norms: list[float], tolerance: Tolerance) -> None:
    """Losses of each pass and norm of each step."""
    assert [len(step) for step in result.losses] == [len(step) for step in losses]
    for step in range(STEPS):
        last = 1 if step == 0 else STEPS
        assert result.losses[step] == pytest.approx(losses[step], rel=tolerance.losses[last]), f"step {step}"
        assert result.norms[step] == pytest.approx(norms[step], rel=tolerance.norms[last]), f"step {step}"


def assert_same_tensors(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], *, tolerance: float, what: str, pooled: bool = False
) -> None:
    assert actual.keys() == expected.keys(), what
    if pooled:
        actual, expected = {"all": _joined(actual)}, {"all": _joined(expected)}
    far = {name: distance(actual[name], expected[name]) for name in expected}
    worst = max(far, key=far.__getitem__)
    assert far[worst] <= tolerance, f"{what} {worst}: {far[worst]:.2e}"


def _joined(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[name].ravel() for name in sorted(tensors)])


def reference_trainings() -> list[object]:
    return [
        pytest.param(training, id=str(training), marks=[] if training.passes == MIXED else [pytest.mark.slow])
        for training in TRAININGS
        if training.precision == "fp32"
    ]


@pytest.mark.parametrize("training", reference_trainings())
def test_one_process_equals_the_equations(training: Training) -> None:
    result = one_process(training)
    expected = train_reference(whole([result], steps=0, kind="weight"), training)
    assert_same_steps(result, expected.losses, expected.norms, FP32)
    assert min(result.norms) > 1.0, "clipping takes part"
    for steps, states in expected.state.items():
        for kind, tensors in states.items():
            tolerance = (FP32.weights if kind == "weight" else FP32.state)[steps]
            ours = whole([result], steps=steps, kind=kind)
            assert_same_tensors(ours, tensors, tolerance=tolerance, what=f"{kind} after {steps} steps")


@pytest.mark.parametrize(("layout", "training"), parameters())
def test_every_layout_equals_one_process(layout: Layout, training: Training) -> None:
    """Each rank reports the same losses and norms; copies of a tensor on several ranks are equal to the bit."""
    ranks = result_of(layout, training, chosen=(layout, training) in CHOSEN)
    one = one_process(training)
    tolerance = FP32 if training.precision == "fp32" else BF16
    for rank in ranks:
        assert_same_steps(rank, one.losses, one.norms, tolerance)
        assert rank.validation == pytest.approx(one.validation, rel=tolerance.validation)
        assert (rank.losses, rank.norms, rank.validation) == (ranks[0].losses, ranks[0].norms, ranks[0].validation)
    assert_same_tensors(
        whole(ranks, steps=0, kind="weight"), whole([one], steps=0, kind="weight"), tolerance=0.0, what="initial"
    )
    for steps in (1, STEPS):
        for kind in ("weight", "momentum", "row_moment", "exp_avg", "exp_avg_sq"):
            limit = (tolerance.weights if kind == "weight" else tolerance.state)[steps]
            ours, theirs = whole(ranks, steps=steps, kind=kind), whole([one], steps=steps, kind=kind)
            what = f"{kind} after {steps} steps"
            assert_same_tensors(ours, theirs, tolerance=limit, what=what, pooled=tolerance.pooled)
        assert_parameters_follow_weights(ranks, steps=steps, precision=training.precision)


def assert_parameters_follow_weights(ranks: list[RankResult], *, steps: int, precision: str) -> None:
    """What the model computes with are the optimizer's fp32 weights, or these rounded to bf16."""
    weights = whole(ranks, steps=steps, kind="weight")
    for name, parameter in whole(ranks, steps=steps, kind="parameter").items():
        weight = torch.from_numpy(weights[name])
        expected = weight.bfloat16().float() if precision == "bf16" else weight
        assert torch.equal(torch.from_numpy(parameter), expected), name


@pytest.mark.parametrize(("layout", "training"), parameters())
def test_each_used_matrix_is_orthogonalised_once(layout: Layout, training: Training) -> None:
    """Eight matrices in each of four layers, and in steps of several passes the two of the fusion, over all ranks.

    Without ZeRO every data-parallel replica holds every matrix, and still only one rank computes its update.
    """
    ranks = result_of(layout, training, chosen=(layout, training) in CHOSEN)
    counts = np.sum([rank.orthogonalized for rank in ranks], axis=0).tolist()
    assert counts == [4 * 8 + (2 if training.passes_of(step) > 1 else 0) for step in range(STEPS)]


def test_the_fusion_is_frozen_in_steps_of_one_pass() -> None:
    training = Training(MIXED, tied=True)
    layout = Layout(tp=2, pp=2)
    ranks = result_of(layout, training, chosen=True)
    for kind in ("weight", "momentum"):
        before, after = whole(ranks, steps=0, kind=kind), whole(ranks, steps=1, kind=kind)
        same = {name for name in before if np.array_equal(before[name], after[name])}
        assert same == {"fusion.w_u.weight", "fusion.w_g.weight"}
