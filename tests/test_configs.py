"""Every shipped configuration: what the planner says of its model is what the builder makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import padded_vocab_size, parameter_layouts
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed
from fbt_megatron.planner import count_parameters, logical_tensors

FILES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def topology() -> Iterator[ParallelTopology]:
    init_distributed()
    yield build_topology(ParallelConfig())
    shutdown_distributed()


def test_there_are_configurations() -> None:
    assert {path.stem for path in FILES} >= {"quickstart", "fbt_125m", "fbt_350m", "fbt_1b", "baseline_1b"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("tied", [True, False])
def test_the_built_model_is_the_planned_one(topology: ParallelTopology, path: Path, tied: bool) -> None:
    config = load_config(path)
    parallel = replace(config.parallel, tensor=1, pipeline=1, sequence=False)
    config = replace(config, parallel=parallel, model=replace(config.model, tie_embeddings=tied))
    model = build_model(config, topology, device=torch.device("meta"))
    layouts = parameter_layouts(model, config, topology)

    built = [tensor for layout in layouts.values() for tensor in layout.tensors]
    planned = logical_tensors(config.model, config.feedback)
    assert len(built) == len(planned)  # each once
    assert set(built) == set(planned)  # names, shapes, kinds and feedback

    padding = padded_vocab_size(config.model.vocab_size, tp_size=1) - config.model.vocab_size
    stored = sum(parameter.numel() for parameter in model.parameters())
    assert stored == count_parameters(config) + padding * config.model.hidden_size * (1 if tied else 2)


def test_fine_tuning_starts_from_the_pretraining() -> None:
    """The example's model is the one whose checkpoint it loads, and its template is there."""
    pretraining, tuning = (load_config(FILES[0].parent / f"{name}.yaml") for name in ("fbt_125m", "sft_example"))
    assert tuning.checkpoint.load == pretraining.train.run_dir
    assert tuning.model == pretraining.model
    assert tuning.feedback.fusion == pretraining.feedback.fusion
    assert tuning.data.chat_template is not None
    assert (FILES[0].parents[1] / tuning.data.chat_template).is_file()
