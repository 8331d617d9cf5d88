"""One optimizer step is the same in every TP x PP x DP x ZeRO layout, up to the order of floating-point sums.

In fp32 one process is compared with the reference of `reference.py`, and every other layout with that one process. In
bf16 the first step of a layout is compared with bf16 in one process, and what follows with fp32: rounding grows, but no
layout may be much farther from fp32 than bf16 in one process is. Measured is ||a - b|| / ||b|| of whole tensors.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from operator import attrgetter

import numpy as np
import pytest

from tests.distributed import run_distributed
from tests.parity.cases import (
    MIXED,
    STEPS,
    Layout,
    RankResult,
    Training,
    distance,
    train_cases,
)
from tests.parity.compare import (
    KINDS,
    Tolerance,
    assert_parameters_follow_weights,
    assert_same_tensors,
    joined,
    whole,
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
    (Layout(tp=2), Training(MIXED, tied=False, precision="bf16")),
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
    (Layout(tp=2, pp=2, zero=0), Training((1,), tied=True)),
    (Layout(pp=2, dp=2, zero=0), Training(MIXED, tied=True)),
    (Layout(tp=2, dp=2, zero=0), Training((2,), tied=False)),
}
"""The cases of `make test`; `make test-all` runs all of them."""


NEEDED = {
    replace(training, precision=precision) for _, training in CHOSEN for precision in (training.precision, "fp32")
}
"""What one process has to train for them."""

FP32 = {1: Tolerance(1e-4, 1e-4, 1e-4, 1e-4), STEPS: Tolerance(1e-4, 1e-4, 1e-3, 1e-3)}
"""By the number of steps."""
BF16_FIRST_STEP = Tolerance(losses=5e-3, norms=3e-2, weights=5e-3, state=1.5e-1, pooled=True)
"""Eight bits of mantissa: tensor parallelism rounds activations in other places, a pipeline sums gradients in another
order. A forgotten sum or factor is at 0.5 or beyond."""
BF16_FACTOR = 3.0
"""Errors of the same rounding have about the same size: over all cases the median quotient is 1.0, the largest 2.7."""
VALIDATION_FP32 = 1e-4


Limits = dict[int, Tolerance]


def all_cases() -> list[tuple[Layout, Training]]:
    pairs = itertools.product(LAYOUTS, TRAININGS)
    return [(layout, training) for layout, training in pairs if layout.zero or training.precision == "fp32"]


def parameters() -> list[object]:
    return [
        pytest.param(layout, training, id=f"{layout}-{training}", marks=[] if chosen else [pytest.mark.slow])
        for layout, training in all_cases()
        for chosen in [(layout, training) in CHOSEN]
    ]


def test_the_chosen_cases_cover_what_they_should() -> None:
    assert set(all_cases()) > CHOSEN
    assert {layout for layout, _ in CHOSEN} == set(LAYOUTS)
    chosen = [training for _, training in CHOSEN]
    for pair in itertools.combinations(("passes", "tied", "precision"), 2):
        values = attrgetter(*pair)
        assert set(map(values, chosen)) == set(map(values, TRAININGS))


@functools.cache
def results_of_world(world_size: int, chosen: bool) -> dict[tuple[Layout, Training], list[RankResult]]:
    """Results by rank of all cases of one number of ranks, which start once; the chosen ones, or the others."""
    cases = [case for case in all_cases() if case[0].world_size == world_size and (case in CHOSEN) == chosen]
    if world_size == 1:
        needed = NEEDED if chosen else set(TRAININGS) - NEEDED
        cases += [(ONE, training) for training in TRAININGS if training in needed]
    ranks = run_distributed(train_cases, world_size, cases, timeout_seconds=180.0 + 60.0 * len(cases))
    return {case: [rank[index] for rank in ranks] for index, case in enumerate(cases)}


def result_of(layout: Layout, training: Training, *, chosen: bool) -> list[RankResult]:
    return results_of_world(layout.world_size, chosen)[layout, training]


def one_process(training: Training) -> RankResult:
    return result_of(ONE, training, chosen=training in NEEDED)[0]


def assert_same_steps(result: RankResult, losses: list[list[float]], norms: list[float], limits: Limits) -> None:
    """Losses of each pass and norm of each step, up to the last one that has a limit."""
    for step in range(max(limits)):
        tolerance = limits[min(number for number in limits if number > step)]
        assert result.losses[step] == pytest.approx(losses[step], rel=tolerance.losses), f"step {step}"
        assert result.norms[step] == pytest.approx(norms[step], rel=tolerance.norms), f"step {step}"


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
            ours = whole([result], steps=steps, kind=kind)
            assert_same_tensors(ours, tensors, tolerance=FP32[steps].of(kind), what=f"{kind} after {steps} steps")


@pytest.mark.parametrize(("layout", "training"), parameters())
def test_every_layout_equals_one_process(layout: Layout, training: Training) -> None:
    """Each rank reports the same losses and norms; copies of a tensor on several ranks are equal to the bit."""
    ranks = result_of(layout, training, chosen=(layout, training) in CHOSEN)
    one = one_process(training)
    for rank in ranks:
        assert [len(losses) for losses in rank.losses] == [training.passes_of(step) for step in range(STEPS)]
        assert (rank.losses, rank.norms, rank.validation) == (ranks[0].losses, ranks[0].norms, ranks[0].validation)
    assert_same_tensors(
        whole(ranks, steps=0, kind="weight"), whole([one], steps=0, kind="weight"), tolerance=0.0, what="initial"
    )
    if training.precision == "fp32":
        assert_equal_up_to_rounding(ranks, one, FP32)
        assert ranks[0].validation == pytest.approx(one.validation, rel=VALIDATION_FP32)
    else:
        assert_equal_up_to_rounding(ranks, one, {1: BF16_FIRST_STEP})
        assert_no_farther_from_fp32(ranks, one, one_process(replace(training, precision="fp32")))
    for steps in (1, STEPS):
        assert_parameters_follow_weights(ranks, steps=steps, precision=training.precision)


def assert_equal_up_to_rounding(ranks: list[RankResult], one: RankResult, limits: Limits) -> None:
    """Losses, norms, weights and the optimizer's state of a layout are those of one process."""
    assert_same_steps(ranks[0], one.losses, one.norms, limits)
    for steps, tolerance in limits.items():
        for kind in KINDS:
            assert_same_tensors(
                whole(ranks, steps=steps, kind=kind),
                whole([one], steps=steps, kind=kind),
                tolerance=tolerance.of(kind),
                what=f"{kind} after {steps} steps",
                pooled=tolerance.pooled,
            )


def assert_no_farther_from_fp32(ranks: list[RankResult], one: RankResult, fp32: RankResult) -> None:
    """All steps together: a layout's distance from fp32 is about that of one process."""
    ours, theirs = distances([fp32], ranks), distances([fp32], [one])
    far = {name: f"{ours[name]:.2e}, one process {theirs[name]:.2e}" for name in ours}
    assert not {name: text for name, text in far.items() if ours[name] > BF16_FACTOR * theirs[name]}


def distances(truth: list[RankResult], results: list[RankResult]) -> dict[str, float]:
    """How far a training has come from another one, for each kind of result.

    Of the gradient norms the median step counts: in a few steps rounding changes the norm by a tenth, in any layout.
    """
    expected = everything(truth)
    found = {name: distance(values, expected[name]) for name, values in everything(results).items()}
    norms, true_norms = (np.array(ranks[0].norms) for ranks in (results, truth))
    return found | {"norms": float(np.median(np.abs(norms / true_norms - 1.0)))}


def everything(ranks: list[RankResult]) -> dict[str, np.ndarray]:
    """All that a training ends with, as one vector for each kind."""
    tensors = {kind: joined(whole(ranks, steps=STEPS, kind=kind)) for kind in KINDS}
    return tensors | {"losses": np.concatenate(ranks[0].losses), "validation": np.array(ranks[0].validation)}


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
