"""Four ranks in several layouts: what is summed before the mean over data parallel, and who reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from fbt_megatron.config.schema import ModelConfig, ParallelConfig, RunConfig, TrainConfig
from fbt_megatron.data.batch import TrainBatch
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect
from fbt_megatron.parallel.pipeline import micro_batch_group_size
from fbt_megatron.parallel.topology import ParallelTopology, build_topology
from fbt_megatron.training.engine import build_engine
from fbt_megatron.training.shared_batches import reads_data, share_batches
from tests.distributed import run_distributed
from tests.training.toy import COMBINATIONS, EACH_COMBINATION, Bag, layout, run_config, settings, state_pieces

LAYOUTS = {"pipeline": (1, 2), "tensor": (2, 1), "tensor x pipeline": (2, 2)}
BETA1 = 0.9


@pytest.fixture(scope="module")
def four_ranks() -> list[dict]:
    """Results of every case, by rank: ranks start once."""
    return run_distributed(four_rank_cases, 4)


def four_rank_cases(rank: int) -> dict:
    results: dict = {}
    for name, (tensor, pipeline) in LAYOUTS.items():
        parallel_state.destroy_model_parallel()
        topology = build_topology(ParallelConfig(tensor=tensor, pipeline=pipeline))
        results["batches", name] = shared_batches(topology)
        for combination in COMBINATIONS:
            if name == "pipeline":
                results["tied", *combination] = tied_scalar(topology, *combination)
            if name == "tensor":
                results["gain", *combination] = gain_of_divided_tokens(topology, *combination)
    return results


def mean_gradient(topology: ParallelTopology, combination: tuple[int, str], vector: Bag, layouts: dict) -> float:
    """The gradient that Adam got, from its first moment after one step."""
    zero_stage, precision = combination
    config = run_config(zero_stage, precision, tensor=topology.tp_size, pipeline=topology.pp_size)
    engine = build_engine(vector, layouts, config, topology)
    engine.module.send(matrix=torch.ones(1, 1), shared=gradient_of(topology).view_as(engine.module.shared))
    engine.step(settings())
    pieces = state_pieces(engine, "exp_avg", "shared")
    return float(pieces[0][1]) / (1 - BETA1) if pieces else float("nan")


def gradient_of(topology: ParallelTopology) -> Tensor:
    """1 and 2 on the two replicas of the first stage or tensor-parallel rank, 3 and 4 on those of the second."""
    return torch.tensor(1.0 + topology.dp_rank + 2.0 * (topology.tp_rank + topology.pp_rank))


def tied_scalar(topology: ParallelTopology, zero_stage: int, precision: str) -> float:
    """One weight, tied over two stages."""
    layouts = {
        "matrix": layout("matrix", (1, 1), ParamKind.MATRIX),
        "shared": layout("shared", (1, 1), ParamKind.EMBEDDING, tied_copy=topology.is_last_stage),
    }
    bag = Bag(matrix=torch.zeros(1, 1), shared=torch.zeros(1, 1))
    return mean_gradient(topology, (zero_stage, precision), bag, layouts)


def gain_of_divided_tokens(topology: ParallelTopology, zero_stage: int, precision: str) -> float:
    """One norm gain, of which each tensor-parallel rank has the gradient of its own tokens."""
    whole = LogicalTensor("matrix", (2, 1), ParamKind.MATRIX)
    layouts = {
        "matrix": ParameterLayout("matrix", (1, 1), ((whole, (Block(Rect(0, 0, 1, 1), topology.tp_rank, 0),)),)),
        "shared": layout("shared", (1,), ParamKind.VECTOR, replicated=True),
    }
    bag: Any = Bag(matrix=torch.zeros(1, 1), shared=torch.zeros(1))
    bag.shared.sequence_parallel = True
    return mean_gradient(topology, (zero_stage, precision), bag, layouts)


def batches_of_replica(replica: int) -> list[TrainBatch]:
    """Two micro-batches of two rows of three tokens; no two numbers are equal."""
    numbers = torch.arange(100 * replica, 100 * replica + 2 * 26).view(2, 2, 13)
    return [
        TrainBatch(*(part.contiguous() for part in batch[:, :12].split(3, dim=1)), rows=batch[:, 12])
        for batch in numbers
    ]


def shared_batches(topology: ParallelTopology) -> dict:
    config = RunConfig(
        model=ModelConfig(seq_length=3),
        train=TrainConfig(global_batch_size=4 * topology.dp_size, micro_batch_size=2),
    )
    own = batches_of_replica(topology.dp_rank) if reads_data(topology) else []
    shared = share_batches(own, config, topology)
    expected = batches_of_replica(topology.dp_rank)
    same = [
        torch.equal(getattr(ours, name), getattr(theirs, name))
        for ours, theirs in zip(shared, expected, strict=True)
        for name in vars(theirs)
    ]
    return {"replica": topology.dp_rank, "reads": reads_data(topology), "same": all(same)}


@pytest.mark.distributed
@EACH_COMBINATION
def test_tied_copies_are_summed_and_their_replicas_averaged(four_ranks, zero_stage, precision):
    """(1 + 2) / 2 + (3 + 4) / 2 = 5 on all ranks that hold the element's state; never 4.5 and 5.5, or 1.5 and 3.5."""
    found = torch.tensor([rank["tied", zero_stage, precision] for rank in four_ranks])
    held = found[~found.isnan()]
    assert len(held) == (4 if zero_stage == 0 else 2)
    assert held.tolist() == pytest.approx([5.0] * len(held), rel=1e-6)


@pytest.mark.distributed
@EACH_COMBINATION
def test_gradients_of_divided_tokens_are_summed(four_ranks, zero_stage, precision):
    """The same numbers over two tensor-parallel ranks: the sum, not the mean and not a rank's own."""
    found = torch.tensor([rank["gain", zero_stage, precision] for rank in four_ranks])
    held = found[~found.isnan()]
    assert len(held) == (4 if zero_stage == 0 else 2)
    assert held.tolist() == pytest.approx([5.0] * len(held), rel=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_of_a_replica_reads_for_all(four_ranks, name):
    results = [rank["batches", name] for rank in four_ranks]
    assert all(result["same"] for result in results)
    readers = [result["replica"] for result in results if result["reads"]]
    assert sorted(readers) == sorted({result["replica"] for result in results})


@pytest.mark.parametrize(
    ("num_micro_batches", "pp_size", "expected"),
    [(4, 4, 4), (8, 4, 4), (5, 4, 5), (7, 4, 7), (7, 2, 4), (6, 2, 2), (5, 2, 3), (9, 4, 5), (10, 4, 5)],
)
def test_groups_of_micro_batches_keep_every_stage_supplied(num_micro_batches, pp_size, expected):
    """The smallest N from PP on with M mod N = 0 or >= PP."""
    assert micro_batch_group_size(num_micro_batches, pp_size=pp_size) == expected
