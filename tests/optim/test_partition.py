"""The exchange plan, computed from hand-made fragments without processes."""

from __future__ import annotations

import random

import pytest

from fbt_megatron.optim.partition import ExchangePlan, RankFragments, build_exchange_plan
from tests.optim import world


def plan_of(
    shape: world.Shape, *, tp: int, dp: int, stage: int = 1, seed: int | None = None, ns_steps: int = 5
) -> ExchangePlan:
    """Plan of a layout; ranks in megatron-core's order. `seed`: random cuts in place of equal ones."""
    by_rank = {}
    for tp_rank in range(tp):
        group = [g for g in world.layouts(shape, tp=tp, tp_rank=tp_rank).values() if world.is_matrix(g)]
        total = sum(layout.numel for layout in group)
        bounds = world.even_bounds(group, dp)
        if seed is not None:
            bounds = [0, *sorted(random.Random(seed).sample(range(total), dp - 1)), total]
        for dp_rank in range(dp):
            whole = [f for layout in group for f in world.cut([layout], 0, layout.numel)]
            held = whole if stage == 0 else world.cut(group, bounds[dp_rank], bounds[dp_rank + 1])
            by_rank[dp_rank, tp_rank] = RankFragments(dp_rank, tuple(held))
    ranks = [by_rank[key] for key in sorted(by_rank)]
    return build_exchange_plan(ranks, replicated_over_dp=stage == 0, ns_steps=ns_steps)


def cells(plan: ExchangePlan, pieces: list) -> list[tuple[str, int, int]]:
    """Every element of the pieces: (matrix, row, column)."""
    return [
        (holding.piece.tensor.name, row, col)
        for holding in pieces
        for row in range(holding.piece.place.row, holding.piece.place.row + holding.piece.place.rows)
        for col in range(holding.piece.place.col, holding.piece.place.col + holding.piece.place.cols)
    ]


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (4, 3, 1), (1, 2, 0), (2, 2, 0)]


@pytest.mark.parametrize(("tp", "dp", "stage"), LAYOUTS)
@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("uses_feedback", [False, True])
def test_every_element_arrives_once_and_every_holder_gets_its_update(tp, dp, stage, seed, uses_feedback):
    plan = plan_of(world.Shape(), tp=tp, dp=dp, stage=stage, seed=seed)
    matrices = [t for t in world.logical_tensors(world.Shape()) if t.kind.value == "matrix"]
    used = [t for t in matrices if uses_feedback or not t.feedback]
    expected = sorted((t.name, row, col) for t in used for row in range(t.rows) for col in range(t.cols))
    ranks = range(plan.num_ranks)
    arrived, returned = [], []
    for owner in ranks:
        names = {tensor.name for tensor in plan.owned(owner, uses_feedback=uses_feedback)}
        for holder in ranks:
            pieces = cells(plan, plan.momentum_pieces(holder=holder, owner=owner, uses_feedback=uses_feedback))
            assert {name for name, _, _ in pieces} <= names
            arrived += pieces
            returned += cells(plan, plan.update_pieces(holder=holder, owner=owner, uses_feedback=uses_feedback))
    assert sorted(arrived) == expected
    assert sorted(returned) == sorted(expected * (dp if stage == 0 else 1))


@pytest.mark.parametrize(("tp", "dp", "stage"), LAYOUTS)
def test_every_used_matrix_has_one_owner(tp, dp, stage):
    plan = plan_of(world.Shape(), tp=tp, dp=dp, stage=stage)
    for uses_feedback in (False, True):
        owned = [t.name for r in range(tp * dp) for t in plan.owned(r, uses_feedback=uses_feedback)]
        expected = [
            t.name
            for t in world.logical_tensors(world.Shape())
            if t.kind.value == "matrix" and (uses_feedback or not t.feedback)
        ]
        assert sorted(owned) == sorted(expected)


def test_owners_do_not_depend_on_the_cuts():
    assert plan_of(world.Shape(), tp=2, dp=2, seed=1).owners == plan_of(world.Shape(), tp=4, dp=1).owners


@pytest.mark.parametrize("stage", [0, 1])
def test_work_is_even_with_and_without_feedback(stage):
    """24 layers of width 1536 on tensor parallel 2 x data parallel 8."""
    plan = plan_of(world.FBT_1B, tp=2, dp=8, stage=stage)
    for uses_feedback in (False, True):
        work = [plan.flops(rank, uses_feedback=uses_feedback) for rank in range(16)]
        assert max(work) < 1.5 * sum(work) / 16
    assert sum(len(plan.owned(rank, uses_feedback=True)) for rank in range(16)) == 24 * 8 + 2


def test_traffic_is_about_two_partitions_per_rank():
    plan = plan_of(world.FBT_1B, tp=2, dp=8)
    for uses_feedback in (False, True):
        elements = sum(t.numel for t in plan.matrices if uses_feedback or not t.feedback)
        sent = [plan.bytes_sent(rank, uses_feedback=uses_feedback, itemsize=2) for rank in range(16)]
        assert sum(sent) < 2 * 2 * elements
        assert max(sent) < 1.5 * 2 * 2 * elements / 16


def test_bytes_of_a_layout_worked_by_hand():
    """One 12 x 12 matrix on two ranks that hold 100 and 44 elements; rank 0 owns it."""
    layout = world.layouts(world.Shape(), tp=1, tp_rank=0)["fusion.w_u.weight"]
    ranks = [RankFragments(dp, tuple(world.cut([layout], *ends))) for dp, ends in enumerate([(0, 100), (100, 144)])]
    plan = build_exchange_plan(ranks, replicated_over_dp=False, ns_steps=5)
    assert [plan.bytes_sent(rank, uses_feedback=True, itemsize=4) for rank in (0, 1)] == [176, 176]
    assert [plan.bytes_sent(rank, uses_feedback=False, itemsize=4) for rank in (0, 1)] == [0, 0]
    assert plan.flops(0, uses_feedback=True) == 5 * 2 * 144 * 36
    assert plan.flops(1, uses_feedback=True) == plan.flops(0, uses_feedback=False) == 0


def test_missing_piece_is_an_error():
    layout = world.layouts(world.Shape(), tp=1, tp_rank=0)["fusion.w_u.weight"]
    ranks = [RankFragments(0, tuple(world.cut([layout], 0, 100)))]
    with pytest.raises(ValueError, match=r"fusion\.w_u\.weight \(100 of 144\)"):
        build_exchange_plan(ranks, replicated_over_dp=False, ns_steps=5)
