"""State through a checkpoint and back: numbers known beforehand, in every combination of ZeRO stage and precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.engine import TrainEngine
from fbt_megatron.training.train_state import load_tensors, shards_of
from tests.training.toy import EACH_COMBINATION, bag_engine, momentum_of, settings, state_pieces

MOMENTUM = (0.05, 0.0975, 0.142625, 0.185494)
"""After steps with the gradient 1 and decay 0.95; a momentum that is dropped after two steps is 0.0975 after four."""


def step_with_ones(engine: TrainEngine) -> None:
    """One step in which every gradient is 1, of the feedback matrix too."""
    ones = torch.ones(2, 2)
    engine.module.send(matrix=ones, fusion=ones, vector=torch.ones(2))
    engine.step(settings())


@EACH_COMBINATION
def test_momentum_goes_on_from_a_checkpoint(
    topology: ParallelTopology, tmp_path: Path, zero_stage: int, precision: str
) -> None:
    manager = CheckpointManager(tmp_path, config=CheckpointConfig(), log=print)
    engine = bag_engine(topology, zero_stage, precision)
    for expected in MOMENTUM[:2]:
        step_with_ones(engine)
        assert momentum_of(engine).tolist() == pytest.approx([expected] * 4, rel=1e-5)
    state = {"optimizer": engine.optimizer.counters()}
    manager.save(Manifest(2, state, "", {}, {}), shards_of(engine))
    path = tmp_path / "step_00000002"
    resumed = bag_engine(topology, zero_stage, precision)
    load_tensors(path, resumed)
    resumed.optimizer.load_counters(Manifest.read(path).state["optimizer"])
    for expected in MOMENTUM[2:]:
        for one in (engine, resumed):
            step_with_ones(one)
            for name in ("matrix", "fusion"):
                assert momentum_of(one, name).tolist() == pytest.approx([expected] * 4, rel=1e-5)
        assert_same_state(resumed, engine)
    # Adam's first moment of a constant gradient 1 after n updates is 1 - 0.9^n, its second 1 - 0.95^n.
    for state_name, beta in (("exp_avg", 0.9), ("exp_avg_sq", 0.95)):
        ((_, values),) = state_pieces(resumed, state_name, "vector")
        assert values.flatten().tolist() == pytest.approx([1 - beta**4] * 2, rel=1e-5)
    assert resumed.optimizer.counters() == {"adam": 4, "adam_feedback": 4}


def assert_same_state(resumed: TrainEngine, straight: TrainEngine) -> None:
    """Weights and all state, bit for bit."""
    for name, parameter in straight.module.named_parameters():
        assert torch.equal(dict(resumed.module.named_parameters())[name], parameter), name
    for (_, ours), (_, theirs) in zip(resumed.master_fragments(), straight.master_fragments(), strict=True):
        assert torch.equal(ours, theirs)
    pairs = zip(resumed.optimizer.state_tensors(), straight.optimizer.state_tensors(), strict=True)
    for ours, theirs in pairs:
        assert (ours.state, ours.tensor) == (theirs.state, theirs.tensor)
        for (_, our_view), (_, their_view) in zip(ours.pieces, theirs.pieces, strict=True):
            assert torch.equal(our_view, their_view), f"{ours.state} {ours.tensor.name}"


@EACH_COMBINATION
def test_fresh_tensors_keep_what_they_have(
    topology: ParallelTopology, tmp_path: Path, zero_stage: int, precision: str
) -> None:
    """What is named fresh is not read even where the checkpoint has it; the rest is."""
    manager = CheckpointManager(tmp_path, config=CheckpointConfig(), log=print)
    engine = bag_engine(topology, zero_stage, precision)
    step_with_ones(engine)
    manager.save(Manifest(1, {}, "", {}, {}), shards_of(engine))
    path = tmp_path / "step_00000001"
    resumed = bag_engine(topology, zero_stage, precision)
    load_tensors(path, resumed, fresh={"fusion"})
    parameters = {name: parameter.detach().float() for name, parameter in resumed.module.named_parameters()}
    trained = {name: parameter.detach().float() for name, parameter in engine.module.named_parameters()}
    assert torch.equal(parameters["fusion"], torch.ones(2, 2))
    assert momentum_of(resumed, "fusion").tolist() == [0.0] * 4
    assert not any(view.any() for _, view in state_pieces(resumed, "row_moment", "fusion"))
    for name in ("matrix", "vector"):
        assert torch.equal(parameters[name], trained[name])
        assert parameters[name].any()
    assert torch.equal(momentum_of(resumed), momentum_of(engine))
