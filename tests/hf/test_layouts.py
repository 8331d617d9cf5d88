"""A checkpoint of four ranks and one of one process give the same exported bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core import parallel_state

from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import CheckpointConfig, DataConfig, ParallelConfig
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.hf.safetensors_files import open_tensors
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.parallel.topology import build_topology
from fbt_megatron.training.engine import build_engine
from fbt_megatron.training.train_state import shards_of
from tests.distributed import run_distributed
from tests.hf.models import config_of
from tests.hf.test_import import same_files

FOUR = ParallelConfig(tensor=2, pipeline=2, sequence=True, precision="fp32")
ONE = ParallelConfig(precision="fp32")


def save_run(rank: int, folder: Path, parallel: ParallelConfig, tied: bool) -> None:
    """What a run saves at its first step: weights and the state of the optimizers, as its ranks hold them."""
    config = config_of("windowed", num_layers=4, vocab_size=300, tie_embeddings=tied)
    config = replace(config, parallel=parallel, data=DataConfig(tokenizer="bytes"))
    config = replace(config, train=replace(config.train, global_batch_size=4, micro_batch_size=1))
    parallel_state.destroy_model_parallel()
    topology = build_topology(parallel)
    model = build_model(config, topology)
    engine = build_engine(model, parameter_layouts(model, config, topology), config, topology)
    manager = CheckpointManager(folder / "checkpoints", config=CheckpointConfig(), log=lambda text: None)
    manager.prepare()
    manager.save(Manifest(5, {}, format_config(config), {}, {}), shards_of(engine))


def save_runs(rank: int, folder: Path, name: str, parallel: ParallelConfig) -> None:
    for tied in (True, False):
        save_run(rank, folder / f"{name}_{tied}", parallel, tied)


@pytest.mark.distributed
def test_the_layout_leaves_no_trace(tmp_path: Path) -> None:
    run_distributed(save_runs, 4, tmp_path, "four", FOUR)
    run_distributed(save_runs, 1, tmp_path, "one", ONE)
    for tied in (True, False):
        for name in ("four", "one"):
            export_checkpoint(tmp_path / f"{name}_{tied}", tmp_path / f"out_{name}_{tied}", max_shard_bytes=40_000)
        assert same_files(tmp_path / f"out_four_{tied}", tmp_path / f"out_one_{tied}")
    for tied in (True, False):
        with open_tensors(tmp_path / f"out_four_{tied}") as stored:
            assert ("lm_head.weight" in stored.names) == (not tied)
