"""Which rank of a layout holds what, and what NorMuon's exchange costs it; computed without processes or weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.validation import data_parallel_size
from fbt_megatron.model.layout import stage_layers, stage_layouts
from fbt_megatron.optim.param_groups import ADAM, NORMUON, update_rule
from fbt_megatron.optim.partition import (
    ExchangePlan,
    RankFragments,
    build_exchange_plan,
    whole_fragments,
    zero_fragments,
)
from fbt_megatron.parallel.logical_tensor import Fragment, ParameterLayout

_GPU_ITEM_BYTES, _CPU_ITEM_BYTES = 2, 4
"""Matrices travel in bf16 between GPUs and in fp32 between CPUs."""


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and sends."""

    rank: int
    tp_rank: int
    dp_rank: int
    pp_rank: int
    parts: str
    """Parts of the model on its pipeline stage."""
    num_parameters: int
    """Numbers it stores of weights, without padding."""
    num_optimized: int
    """Numbers of which it holds the optimizer state."""
    streams: range
    """Streams of data that its replica reads."""
    sent: Mapping[bool, int]
    """Numbers that it sends in NorMuon's exchange per step, both ways together, without and with feedback."""
    flops: Mapping[bool, int]
    """Floating-point operations of its orthogonalisations per step, without and with feedback."""


def plan_ranks(config: RunConfig, world_size: int) -> list[RankPlan]:
    """The plan of every rank. Raises TopologyError where `world_size` is no multiple of the layout."""
    dp_size, tp_size = data_parallel_size(config.parallel, world_size), config.parallel.tensor
    per_replica = config.data.streams // dp_size
    plans = []
    for pp_rank in range(config.parallel.pipeline):
        exchange = stage_exchange(config, dp_size=dp_size, pp_rank=pp_rank)
        layouts = [stage_layouts(config, tp_rank=tp_rank, pp_rank=pp_rank) for tp_rank in range(tp_size)]
        for place in range(tp_size * dp_size):
            dp_rank, tp_rank = divmod(place, tp_size)
            held = rank_fragments(config, layouts[tp_rank].values(), dp_rank=dp_rank, dp_size=dp_size)
            plans.append(
                RankPlan(
                    rank=pp_rank * tp_size * dp_size + place,
                    tp_rank=tp_rank,
                    dp_rank=dp_rank,
                    pp_rank=pp_rank,
                    parts=_parts(config, pp_rank),
                    num_parameters=sum(_without_padding(layout) for layout in layouts[tp_rank].values()),
                    num_optimized=sum(fragment.numel for fragments in held.values() for fragment in fragments),
                    streams=range(dp_rank * per_replica, (dp_rank + 1) * per_replica),
                    sent={flag: exchange.bytes_sent(place, uses_feedback=flag, itemsize=1) for flag in (False, True)},
                    flops={flag: exchange.flops(place, uses_feedback=flag) for flag in (False, True)},
                )
            )
    return plans


def stage_exchange(config: RunConfig, *, dp_size: int, pp_rank: int) -> ExchangePlan:
    """NorMuon's exchange plan of a pipeline stage, as its ranks will build it."""
    tp_size = config.parallel.tensor
    matrices = [stage_layouts(config, tp_rank=tp_rank, pp_rank=pp_rank).values() for tp_rank in range(tp_size)]
    ranks = [
        RankFragments(dp_rank, rank_fragments(config, layouts, dp_rank=dp_rank, dp_size=dp_size)[NORMUON])
        for dp_rank in range(dp_size)
        for layouts in matrices
    ]
    return build_exchange_plan(
        ranks,
        replicated_over_dp=config.parallel.zero_stage == 0,
        ns_steps=config.optimizer.normuon.ns_steps,
    )


def rank_fragments(
    config: RunConfig, layouts: Iterable[ParameterLayout], *, dp_rank: int, dp_size: int
) -> dict[str, tuple[Fragment, ...]]:
    """The fragments of a rank in each of the two parameter groups; `layouts` are those of its stage, in its order."""
    groups: dict[str, list[ParameterLayout]] = {NORMUON: [], ADAM: []}
    for layout in layouts:
        groups[update_rule(layout.tensors[0].kind)].append(layout)
    if config.parallel.zero_stage == 0:
        return {rule: whole_fragments(members) for rule, members in groups.items()}
    return {rule: zero_fragments(members, dp_rank=dp_rank, dp_size=dp_size) for rule, members in groups.items()}


def format_ranks(plans: Iterable[RankPlan]) -> str:
    """A line for every rank: its place in the layout, what it holds, and the streams that its replica reads."""
    rows: list[tuple[str, ...]] = [
        ("rank", "stage", "data", "tensor", "holds", "parameters", "optimizer state of", "streams")
    ]
    for plan in plans:
        place = (f"{number}" for number in (plan.rank, plan.pp_rank, plan.dp_rank, plan.tp_rank))
        counts = f"{plan.num_parameters:,}", f"{plan.num_optimized:,}"
        rows.append((*place, plan.parts, *counts, _span(plan.streams)))
    return _table(rows, left={4})


def format_exchange(plans: Iterable[RankPlan]) -> str:
    """A line for every rank: bytes that it sends in NorMuon's exchange per step, and its share of the work."""
    plans = list(plans)
    kinds = (False, "1 pass"), (True, "2 and more passes")
    rows = [("rank", *(f"{device}, {kind}" for device in ("GPU", "CPU") for _, kind in kinds), "operations / mean")]
    for plan in plans:
        sizes = (f"{plan.sent[flag] * size:,}" for size in (_GPU_ITEM_BYTES, _CPU_ITEM_BYTES) for flag, _ in kinds)
        stage = [other.flops[True] for other in plans if other.pp_rank == plan.pp_rank]
        rows.append((f"{plan.rank}", *sizes, f"{plan.flops[True] * len(stage) / sum(stage):.2f}"))
    return _table(rows, left=set())


def _parts(config: RunConfig, pp_rank: int) -> str:
    first, last = pp_rank == 0, pp_rank == config.parallel.pipeline - 1
    parts = ["embedding"] * first
    parts += ["fusion"] * (first and config.feedback.fusion != "none")
    parts.append(f"layers {_span(stage_layers(config, pp_rank))}")
    parts += ["final norm", "tied head" if config.model.tie_embeddings else "head"] * last
    return ", ".join(parts)


def _span(numbers: range) -> str:
    return f"{numbers.start}" if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"


def _without_padding(layout: ParameterLayout) -> int:
    return sum(block.stored.numel for _, blocks in layout.blocks for block in blocks)


def _table(rows: Sequence[tuple[str, ...]], *, left: set[int]) -> str:
    """Columns of equal width, to the right but for those in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
