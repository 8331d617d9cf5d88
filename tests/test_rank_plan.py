"""What a dry run says of the ranks of a layout, against engines on real ranks and numbers worked out by hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import pretrain_fbt
from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import ParallelConfig, RunConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import parameter_layouts, stage_layouts
from fbt_megatron.optim import exchange
from fbt_megatron.optim.param_groups import ADAM, NORMUON, list_groups
from fbt_megatron.parallel.topology import build_topology, shutdown_distributed
from fbt_megatron.planner import count_parameters
from fbt_megatron.rank_plan import plan_ranks, rank_fragments, stage_exchange
from fbt_megatron.training.engine import TrainEngine, build_engine
from tests.distributed import run_distributed
from tests.model.toy import tiny_config

ROOT = Path(__file__).parents[1]

CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # Odd sizes: no partition ends where a row does, and the last one is padded.
    ({"precision": "fp32"}, {"hidden_size": 21, "ffn_hidden_size": 13, "num_layers": 1, "vocab_size": 201}),
    ({"precision": "bf16"}, {"hidden_size": 21, "ffn_hidden_size": 13, "num_layers": 1, "tie_embeddings": False}),
    ({"precision": "fp32", "zero_stage": 0, "tensor": 2}, {}),
    ({"precision": "fp32", "tensor": 2}, {"vocab_size": 200, "embedding_norm": False}),
    ({"precision": "bf16", "tensor": 2}, {"fusion": "concat", "post_norm": False, "attention_gate": False}),
    ({"precision": "fp32", "pipeline": 2}, {"num_layers": 4, "qk_norm": False}),
    ({"precision": "bf16", "pipeline": 2, "pipeline_layers": (1, 2)}, {"tie_embeddings": False}),
    ({"precision": "fp32", "tensor": 2, "pipeline": 2}, {"num_layers": 2, "fusion": "add"}),
]


def config_of(case: int) -> RunConfig:
    parallel, options = CASES[case]
    return tiny_config(parallel=ParallelConfig(**parallel), **options)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Bytes that this rank hands to others in all-to-alls, as they happen."""
    counts: list[int] = []
    original = dist.all_to_all_single

    def counting(output, input, output_splits, input_splits, group):
        own = input_splits[dist.get_rank(group)]
        counts.append((sum(input_splits) - own) * input.element_size())
        return original(output, input, output_splits, input_splits, group=group)

    exchange.dist.all_to_all_single = counting
    try:
        yield counts
    finally:
        exchange.dist.all_to_all_single = original


def _measured_bytes(engine: TrainEngine, *, uses_feedback: bool) -> int:
    fragments = engine.fragments
    matrices = [part for part in fragments if part.layout.tensors[0].kind.value == "matrix"]
    with counted_bytes() as counts:
        for _ in engine.optimizer.exchange.updates(
            [torch.zeros(part.numel) for part in matrices], uses_feedback=uses_feedback
        ):
            pass
    return sum(counts)


def _engines_of_all_cases(rank: int) -> list[dict[str, Any]]:
    found = []
    for case in range(len(CASES)):
        config = config_of(case)
        topology = build_topology(config.parallel)
        model = build_model(config, topology)
        layouts = parameter_layouts(model, config, topology)
        engine = build_engine(model, layouts, config, topology)
        place = {"tp_rank": topology.tp_rank, "pp_rank": topology.pp_rank}
        planned = stage_layouts(config, **place)
        fragments = rank_fragments(config, planned.values(), dp_rank=topology.dp_rank, dp_size=topology.dp_size)
        plan = stage_exchange(config, dp_size=topology.dp_size, pp_rank=topology.pp_rank)
        found.append(
            {
                "place": (topology.pp_rank, topology.dp_rank, topology.tp_rank),
                "same layouts": list(planned.items()) == list(layouts.items()),
                "same fragments": [*fragments[NORMUON], *fragments[ADAM]] == engine.fragments,
                "same plan": plan == engine.optimizer.exchange.plan,
                "bytes": [_measured_bytes(engine, uses_feedback=flag) for flag in (False, True)],
                "parameters": sum(layout.numel for layout in layouts.values()),
            }
        )
        parallel_state.destroy_model_parallel()
    shutdown_distributed()
    return found


@pytest.mark.distributed
def test_plans_are_those_of_real_engines():
    results = run_distributed(_engines_of_all_cases, 4)
    for case in range(len(CASES)):
        plans = plan_ranks(config_of(case), 4)
        assert [plan.rank for plan in plans] == [0, 1, 2, 3]
        for plan, found in zip(plans, (ranks[case] for ranks in results), strict=True):
            where = f"case {case}, rank {plan.rank}"
            assert found["place"] == (plan.pp_rank, plan.dp_rank, plan.tp_rank), where
            for part in ("same layouts", "same fragments", "same plan"):
                assert found[part], f"{where}: not the {part}"
            assert found["bytes"] == [4 * plan.sent[False], 4 * plan.sent[True]], where
            assert plan.num_parameters <= found["parameters"], where
        assert any(plan.sent[True] > plan.sent[False] for plan in plans)


def with_layout(config: RunConfig, **parallel: Any) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, **parallel))


@pytest.fixture(scope="module")
def paper_model() -> RunConfig:
    return load_config(ROOT / "configs/fbt_1b.yaml")


@pytest.mark.parametrize("tied", [True, False])
def test_the_optimizer_groups_are_the_same_in_every_layout(paper_model, tied):
    """Name, shape, group and decay of every tensor: NorMuon has the matrices of the stack and the fusion, Adam the
    rest. A tied head is the embedding and is not listed again."""
    paper_model = replace(paper_model, model=replace(paper_model.model, tie_embeddings=tied))
    listings = []
    for tensor, pipeline in ((1, 1), (2, 1), (1, 2), (2, 2), (8, 4)):
        config = with_layout(paper_model, tensor=tensor, pipeline=pipeline)
        for tp_rank in {0, tensor - 1}:
            stages = [stage_layouts(config, tp_rank=tp_rank, pp_rank=pp_rank) for pp_rank in range(pipeline)]
            listings.append(list_groups((layout for stage in stages for layout in stage.values()), config.optimizer))
    first = {entry.tensor.name: entry for entry in listings[0]}
    assert all({entry.tensor.name: entry for entry in listing} == first for listing in listings)
    assert all(len(listing) == len(first) for listing in listings)
    assert sum(entry.tensor.numel for entry in listings[0]) == count_parameters(paper_model)
    matrices = {name for name, entry in first.items() if entry.group == NORMUON}
    assert matrices == {name for name, entry in first.items() if len(entry.tensor.shape) == 2} - {
        "embedding.weight",
        "head.weight",
    }
    assert len(matrices) == 24 * 8 + 2
    assert {entry.weight_decay for entry in listings[0] if len(entry.tensor.shape) == 1} == {0.0}
    assert ("head.weight" in first) is not tied


@pytest.mark.parametrize("uses_feedback", [False, True])
@pytest.mark.parametrize(("tensor", "pipeline", "world_size"), [(2, 1, 16), (1, 1, 8), (2, 4, 32)])
def test_owners_of_the_paper_model_have_even_work(paper_model, tensor, pipeline, world_size, uses_feedback):
    plans = plan_ranks(with_layout(paper_model, tensor=tensor, pipeline=pipeline), world_size)
    for stage in range(pipeline):
        work = [plan.flops[uses_feedback] for plan in plans if plan.pp_rank == stage]
        assert min(work) > 0
        assert max(work) <= 1.5 * sum(work) / len(work)


def test_every_parameter_and_its_state_are_held_once_per_replica(paper_model):
    plans = plan_ranks(with_layout(paper_model, tensor=2, pipeline=4), 16)
    replicas = [[plan for plan in plans if plan.dp_rank == rank] for rank in range(2)]
    # Beside the model: a second copy of every vector (tensor parallel) and of the embedding (last stage).
    extra = 24 * (4 * 1536 + 2 * 128) + 2 * 1536 + 100_352 * 1536
    for replica in replicas:
        assert sum(plan.num_parameters for plan in replica) == 1_122_198_528 + extra
    assert sum(plan.num_optimized for plan in plans) == 1_122_198_528 + extra
    assert [plan.streams for plan in plans[:4]] == [range(0, 20), range(0, 20), range(20, 40), range(20, 40)]
    assert [plan.parts for plan in plans[::4]] == [
        "embedding, fusion, layers 0-5",
        "layers 6-11",
        "layers 12-17",
        "layers 18-23, final norm, tied head",
    ]


def test_ranks_send_about_their_share(paper_model):
    """Each way a rank sends at most its own partition of the matrices, and receives as much; ZeRO 0 sends more."""
    sharded = plan_ranks(paper_model, 8)
    matrices = 1_122_198_528 - 100_352 * 1536 - 24 * (4 * 1536 + 2 * 128) - 2 * 1536
    total = sum(plan.sent[True] for plan in sharded)
    assert matrices < total < 2 * matrices
    assert all(plan.sent[False] <= plan.sent[True] for plan in sharded)
    replicated = plan_ranks(with_layout(paper_model, zero_stage=0, precision="fp32"), 8)
    assert sum(plan.sent[True] for plan in replicated) == 7 * matrices  # each owner sends its updates to 7 others


def test_one_rank_sends_nothing(paper_model):
    (plan,) = plan_ranks(paper_model, 1)
    assert plan.sent == {False: 0, True: 0}


def test_dry_run_prints_a_line_for_each_rank(monkeypatch, capsys):
    command = ["pretrain_fbt.py", "--config", "configs/fbt_1b.yaml", "--dry-run", "--world-size", "8"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", command)
    assert pretrain_fbt.main() == 0
    output = capsys.readouterr().out
    lines = output[output.index("\nRanks\n") :].splitlines()
    held = next(line for line in lines if line.split()[:4] == ["7", "0", "7", "0"])
    assert held.split()[-3:] == ["1,122,198,528", "140,274,816", "35-39"]
    plan = plan_ranks(load_config(ROOT / "configs/fbt_1b.yaml"), 8)[7]
    sent = next(line.split() for line in reversed(lines) if line.split()[0] == "7")
    assert sent[1:5] == [f"{size * plan.sent[flag]:,}" for size in (2, 4) for flag in (False, True)]
