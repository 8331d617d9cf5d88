"""A run that starts from a checkpoint of weights alone, as an import makes: step 0, fresh optimizer, own data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fbt_megatron.checkpoint.logical_shards import LogicalShards
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.checkpoint.reading import open_weights
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import CheckpointConfig, RunConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.parallel.logical_tensor import Rect
from fbt_megatron.planner import logical_tensors
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.trainer import Trainer
from tests.training.tiny_run import state_of, tiny_run


@contextmanager
def trainer_of(config: RunConfig, topology: Any, *allowed: str) -> Iterator[Trainer]:
    with open_trainer(config, topology, allowed_changes=list(allowed)) as trainer:
        yield trainer


def train(config: RunConfig, topology: Any) -> list[float]:
    """Train to the end, save, and give the losses."""
    with trainer_of(config, topology) as trainer:
        losses = [trainer.train_step().loss for _ in range(trainer.counters.step, trainer.last_step)]
        trainer.save()
    return losses


def weights_of(folder: Path, out: Path) -> Path:
    """The weights of a run's newest checkpoint as a checkpoint of weights alone."""
    source = open_weights(folder)
    config = source.config
    tensors = logical_tensors(config.model, config.feedback)
    manager = CheckpointManager(out / "checkpoints", config=CheckpointConfig(), log=lambda text: None)
    manager.prepare()
    shards = {}
    for tensor in tensors:
        whole = Rect(0, 0, tensor.rows, tensor.cols)
        view = source.read(tensor).view(tensor.rows, tensor.cols)
        shards[f"weights/{tensor.name}"] = LogicalShards(tensor.shape, [(whole, view)])
    manager.save(Manifest(0, {}, format_config(config), {}, {}, contents=WEIGHTS), shards)
    return out


@pytest.fixture(scope="module")
def first(topology, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps."""
    folder = tmp_path_factory.mktemp("first")
    train(tiny_run(folder, data, steps=3), topology)
    return folder


@pytest.fixture(scope="module")
def source(first: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights."""
    return weights_of(first, tmp_path_factory.mktemp("weights"))


def test_a_start_from_weights(topology, data: Path, first: Path, source: Path, tmp_path: Path) -> None:
    """Weights are those that the source ended with, all of them; the optimizer's state is that of a first step."""
    config = tiny_run(tmp_path / "second", data, steps=4)
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, load=str(source)),
        train=replace(config.train, seed=99),  # so that no weight begins as those of the source did
    )
    with trainer_of(config, topology) as trainer:
        started = state_of(trainer)
        assert trainer.counters.step == trainer.counters.tokens == 0
    with trainer_of(replace(config, checkpoint=replace(config.checkpoint, load=None)), topology) as trainer:
        fresh = state_of(trainer)
    with trainer_of(tiny_run(first, data, steps=3), topology) as trainer:
        trained = state_of(trainer)
        assert trainer.counters.step == 3
    assert started.keys() == fresh.keys() == trained.keys()
    weights = {name for name in fresh if name.startswith(("parameter ", "master "))}
    for kind in ("parameter", "master"):
        assert sum(name.startswith(f"{kind} ") for name in weights) == len(list(trainer.model.parameters()))
    for name in fresh:
        assert torch.equal(started[name], trained[name] if name in weights else fresh[name]), name
        # A tensor that would be the same either way would show nothing.
        assert not torch.equal(trained[name], fresh[name]) or name not in weights, name
    assert any(not torch.equal(trained[name], fresh[name]) for name in fresh.keys() - weights)


def test_such_a_run_stops_and_goes_on_like_any_other(topology, data: Path, source: Path, tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> RunConfig:
        config = tiny_run(tmp_path / name, data, steps=4)
        return replace(
            config,
            checkpoint=replace(config.checkpoint, load=str(source)),
            train=replace(config.train, **changes),
        )

    straight = train(run("straight"), topology)
    stopped = train(run("stopped", stop_step=2), topology) + train(run("stopped"), topology)
    log = (tmp_path / "stopped" / "log.txt").read_text()
    assert log.count("weights alone from ") == log.count("the run begins at step 0 with a fresh optimizer") == 1
    assert log.count("resumed from") == 1
    assert len(straight) == 4
    assert stopped == straight


def test_what_the_weights_mean_may_not_change(topology, data: Path, source: Path, tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "second", data, steps=9, fusion="add")
    config = replace(
        config,
        checkpoint=replace(config.checkpoint, load=str(source)),
        model=replace(config.model, norm_eps=0.1, seq_length=8, init_std=0.3, kernels="torch"),
        train=replace(config.train, seed=99),
    )
    with pytest.raises(ConfigError) as caught, trainer_of(config, topology, "model.norm_eps"):
        pass
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["feedback.fusion"]
    with pytest.raises(ConfigError) as caught, trainer_of(config, topology):
        pass
    assert [problem.split("=")[0] for problem in caught.value.problems] == ["model.norm_eps", "feedback.fusion"]
    config = replace(config, feedback=replace(config.feedback, fusion="glu"))
    with trainer_of(config, topology, "model.norm_eps") as trainer:
        assert trainer.counters.step == 0


def test_feedback_for_a_model_without(topology, data: Path, tmp_path: Path) -> None:
    """The fusion, which the weights lack, has its initial values."""
    train(tiny_run(tmp_path / "first", data, steps=1, fusion="none"), topology)
    source = weights_of(tmp_path / "first", tmp_path / "weights")
    config = tiny_run(tmp_path / "second", data, steps=4)
    config = replace(config, checkpoint=replace(config.checkpoint, load=str(source)))
    with pytest.raises(ConfigError, match="fusoin: unknown key"), trainer_of(config, topology, "feedback.fusoin"):
        pass
    with trainer_of(config, topology) as trainer:
        fusion = dict(trainer.model.named_parameters())["fusion.w_u.weight"]
        assert float(fusion.detach().std()) == pytest.approx(config.model.init_std, rel=0.2)
    assert "with their initial values: fusion.w_g.weight" in (tmp_path / "second" / "log.txt").read_text()


def test_nothing_but_the_weights_of_a_run(topology, data: Path, first: Path, source: Path, tmp_path: Path) -> None:
    """With `checkpoint.load_weights_only` a run's own checkpoint is worth what its weights alone are."""

    def run(name: str, load: Path, **changes: Any) -> RunConfig:
        config = tiny_run(tmp_path / name, data, steps=4, mix={2: 1.0})
        checkpoint = replace(config.checkpoint, load=str(load), load_weights_only=load == first)
        optimizer = replace(config.optimizer, adam=replace(config.optimizer.adam, lr=1e-3))
        return replace(
            config, checkpoint=checkpoint, optimizer=optimizer, train=replace(config.train, seed=99, **changes)
        )

    expected = train(run("from weights", source), topology)
    assert train(run("from the run", first), topology) == expected
    stopped = train(run("stopped", first, stop_step=2), topology) + train(run("stopped", first), topology)
    assert stopped == expected
    log = (tmp_path / "stopped" / "log.txt").read_text()
    assert log.count("weights alone from ") == log.count("resumed from") == 1
