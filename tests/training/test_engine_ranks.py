"""The engine on two ranks: both do the same, and what one rank would do with the whole batch."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.errors import TopologyError
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.engine import build_engine
from tests.distributed import run_distributed
from tests.training.toy import (
    BAG_LAYOUTS,
    COMBINATIONS,
    EACH_COMBINATION,
    TILTED,
    Bag,
    assert_same_training,
    bag_engine,
    layout,
    momentum_of,
    run_config,
    settings,
    train_net,
    weights_of,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    """Results of every two-rank case, by rank: ranks start once."""
    return [pickle.loads(results) for results in run_distributed(two_rank_cases, 2)]


def two_rank_cases(rank: int) -> bytes:
    """Results of this rank by case, pickled: a rank that has ended can no longer hand over tensors by reference."""
    results: dict = {}
    data_parallel = build_topology(ParallelConfig())
    for combination in COMBINATIONS:
        results["train", *combination] = train_net(data_parallel, *combination)
        results["mean", *combination] = split_gradient(data_parallel, *combination)
        for bad in ("inf", "nan"):
            results[bad, *combination] = skip_second_step(data_parallel, *combination, bad=float(bad))
        results["refused", *combination] = skip_second_step(data_parallel, *combination, bad=200.0, largest_norm=10.0)
        results["fine", *combination] = fine_gradient(data_parallel, *combination)
        results["missing", *combination] = missing_on_rank_one(data_parallel, *combination)
    results["empty group"] = empty_group_on_rank_one(data_parallel)
    for axis in ("tensor", "pipeline"):
        parallel_state.destroy_model_parallel()  # another layout in the same processes
        sharded = build_topology(ParallelConfig(**{axis: 2}))
        for combination in COMBINATIONS:
            results[axis, *combination] = sharded_norm(sharded, *combination)
            results["overflow", axis, *combination] = sharded_norm(sharded, *combination, factor=2e18)
    return pickle.dumps(results)


def split_gradient(topology: ParallelTopology, zero_stage: int, precision: str) -> dict:
    """Ranks with gradients [[6, 0], [0, 10]] and [[0, 0], [8, 0]]: the mean is [[3, 0], [4, 5]]."""
    engine = bag_engine(topology, zero_stage, precision, momentum=0.0, scale="none")
    own = [[[6.0, 0.0], [0.0, 10.0]], [[0.0, 0.0], [8.0, 0.0]]][topology.dp_rank]
    engine.module.send(matrix=torch.tensor(own), vector=torch.ones(2))
    result = engine.step(settings(lr_normuon=1.0, uses_feedback=False))
    return {"update": -weights_of(engine)["matrix"], "norm": result.grad_norm}


def fine_gradient(topology: ParallelTopology, zero_stage: int, precision: str) -> Tensor:
    """Momentum after gradients of 1 and 1/256 on each rank: their sum needs nine bits, one more than bf16 has."""
    engine = bag_engine(topology, zero_stage, precision, momentum=0.0)
    for value in (1.0, 1 / 256):
        engine.module.send(matrix=torch.full((2, 2), value), vector=torch.ones(2))
    engine.step(settings(uses_feedback=False))
    return momentum_of(engine)


def skip_second_step(
    topology: ParallelTopology, zero_stage: int, precision: str, *, bad: float, largest_norm: float | None = None
) -> dict:
    """Three steps of gradient 1; in the second, one entry on rank 1 alone is `bad`.

    With `largest_norm`, steps of a larger norm are refused; `asked` then has all norms.
    """
    engine = bag_engine(topology, zero_stage, precision, momentum=0.9)
    results, momenta, weights, counters, asked = [], [], [], [], []

    def refuses(norm: float) -> bool:
        asked.append(norm)
        return norm > largest_norm

    for step in (1, 2, 3):
        gradient = torch.ones(2, 2)
        if step == 2 and topology.dp_rank == 1:
            gradient[0, 1] = bad
        engine.module.send(matrix=gradient, vector=torch.ones(2))
        options = {} if largest_norm is None else {"refuses": refuses}
        results.append(engine.step(settings(uses_feedback=False), **options))
        momenta.append(momentum_of(engine))
        weights.append([*weights_of(engine).values(), *(master.clone() for _, master in engine.master_fragments())])
        counters.append(engine.optimizer.counters()["adam"])
    return {"results": results, "momenta": momenta, "weights": weights, "counters": counters, "asked": asked}


def missing_on_rank_one(topology: ParallelTopology, zero_stage: int, precision: str) -> str:
    """The message of each rank where only rank 1 lacks a gradient."""
    engine = bag_engine(topology, zero_stage, precision)
    gradients = {"matrix": TILTED, "vector": torch.ones(2)}
    engine.module.send(**gradients if topology.dp_rank == 0 else {"matrix": TILTED})
    with pytest.raises(RuntimeError) as caught:
        engine.step(settings(uses_feedback=False))
    return str(caught.value)


def empty_group_on_rank_one(topology: ParallelTopology) -> str:
    """The message of each rank where rank 1 has no matrix."""
    values = {"matrix": torch.zeros(2, 2), "vector": torch.zeros(2)}
    kept = {name: value for name, value in values.items() if topology.dp_rank == 0 or name == "vector"}
    with pytest.raises(TopologyError) as caught:
        build_engine(Bag(**kept), {name: BAG_LAYOUTS[name] for name in kept}, run_config(1, "fp32"), topology)
    return str(caught.value)


def sharded_norm(topology: ParallelTopology, zero_stage: int, precision: str, *, factor: float = 1.0) -> dict:
    """A matrix in two shards with gradients 6 and 8 times `factor`, beside a parameter that both ranks hold.

    That is a vector with gradient 2 on both tensor-parallel ranks, or a tied embedding whose two copies have parts of
    the gradient (3, 4).
    """
    tensor_parallel = topology.tp_size == 2
    own = topology.tp_rank if tensor_parallel else topology.pp_rank
    whole = LogicalTensor("matrix", (2, 1), ParamKind.MATRIX)
    layouts = {"matrix": ParameterLayout("matrix", (1, 1), ((whole, (Block(Rect(0, 0, 1, 1), own, 0),)),))}
    if tensor_parallel:
        layouts["shared"] = layout("shared", (1,), ParamKind.VECTOR, replicated=True)
        gradient = torch.tensor([2.0])
    else:
        layouts["matrix"] = layout("matrix", (1, 1), ParamKind.MATRIX)
        layouts["shared"] = layout("shared", (1, 2), ParamKind.EMBEDDING, tied_copy=topology.is_last_stage)
        gradient = torch.tensor([[[1.0, 5.0]], [[2.0, -1.0]]])[own]
    config = run_config(
        zero_stage, precision, grad_clip=1.0, tensor=topology.tp_size, pipeline=topology.pp_size, momentum=0.0
    )
    engine = build_engine(Bag(matrix=torch.zeros(1, 1), shared=torch.zeros_like(gradient)), layouts, config, topology)
    engine.module.send(matrix=torch.tensor([[6.0 + 2.0 * own]]) * factor, shared=gradient)
    result = engine.step(settings())
    return {"result": result, "momentum": momentum_of(engine).item() / (6.0 + 2.0 * own)}


@EACH_COMBINATION
def test_two_ranks_train_as_one(topology, two_ranks, zero_stage, precision):
    one = train_net(topology, zero_stage, precision)
    for rank in two_ranks:
        assert_same_training(rank["train", zero_stage, precision], one, tolerance=1e-4)
    assert_ranks_equal(*(rank["train", zero_stage, precision]["weights"][-1] for rank in two_ranks))


def assert_ranks_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert all(torch.equal(first[name], second[name]) for name in first)


@EACH_COMBINATION
def test_matrix_cut_between_ranks_is_orthogonalised_whole(two_ranks, zero_stage, precision):
    first, second = (rank["mean", zero_stage, precision] for rank in two_ranks)
    assert torch.equal(first["update"], second["update"])
    assert first["norm"] == pytest.approx(math.sqrt(9 + 16 + 25 + 2), rel=1e-6)
    polar = torch.tensor([[0.8944, -0.4472], [0.4472, 0.8944]])
    assert (first["update"] - polar).abs().max() < 0.1


@EACH_COMBINATION
def test_mean_over_ranks_keeps_fp32(two_ranks, zero_stage, precision):
    momentum = torch.cat([rank["fine", zero_stage, precision] for rank in two_ranks])
    assert torch.equal(momentum, torch.full_like(momentum, 1 + 1 / 256))


@EACH_COMBINATION
@pytest.mark.parametrize("bad", ["inf", "nan", "refused"])
def test_gradient_that_is_bad_on_one_rank_skips_on_all(two_ranks, zero_stage, precision, bad):
    for rank in two_ranks:
        outcome = rank[bad, zero_stage, precision]
        assert [result.skipped for result in outcome["results"]] == [False, True, False]
        norm = None if bad != "refused" else pytest.approx(math.sqrt(5 + (201 / 2) ** 2))  # ranks have 1 and 200
        assert outcome["results"][1].grad_norm == norm
        assert outcome["asked"] == ([] if bad != "refused" else [result.grad_norm for result in outcome["results"]])
        assert outcome["results"][2].grad_norm == pytest.approx(math.sqrt(6))
        for momentum, expected in zip(outcome["momenta"], (0.1, 0.1, 0.19), strict=True):
            torch.testing.assert_close(momentum, torch.full_like(momentum, expected), rtol=1e-6, atol=0)
        first, second, third = outcome["weights"]
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
        assert outcome["counters"] == [1, 1, 2]
    assert sum(rank[bad, zero_stage, precision]["momenta"][0].numel() for rank in two_ranks) >= 4


@EACH_COMBINATION
def test_missing_gradient_on_one_rank_stops_both(two_ranks, zero_stage, precision):
    first, second = (rank["missing", zero_stage, precision] for rank in two_ranks)
    assert "1 on another rank" in first
    assert "vector" in second


def test_rank_without_matrix_stops_both(two_ranks):
    assert all("no parameter that normuon updates" in rank["empty group"] for rank in two_ranks)


@EACH_COMBINATION
@pytest.mark.parametrize(("axis", "norm"), [("tensor", math.sqrt(4 + 100)), ("pipeline", math.sqrt(25 + 100))])
def test_norm_counts_shared_parameters_once(two_ranks, zero_stage, precision, axis, norm):
    for rank in two_ranks:
        outcome = rank[axis, zero_stage, precision]
        assert outcome["result"].grad_norm == pytest.approx(norm, rel=1e-6)
        assert outcome["momentum"] == pytest.approx(1 / norm, rel=1e-5)  # clipped to 1 with the global norm


@pytest.mark.parametrize(("zero_stage", "precision"), [(1, "fp32"), (1, "bf16")])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_norm_that_overflows_over_ranks_only_skips(two_ranks, zero_stage, precision, axis):
    """Each shard's norm (1.2e19, 1.6e19) is a fine fp32 number, and so is the square of either; their sum is not."""
    for rank in two_ranks:
        outcome = rank["overflow", axis, zero_stage, precision]
        assert outcome["result"].skipped
        assert outcome["result"].grad_norm is None
        assert outcome["momentum"] == 0.0
