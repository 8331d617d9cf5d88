"""Puts a run together: folder, checkpoint to go on from, data, model, engine, metrics. Every step of it fails early."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fbt_megatron import activity
from fbt_megatron.checkpoint.folder import CHECKPOINTS_NAME
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import WEIGHTS, Manifest
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data.loader import TrainLoader, ValidationLoader, build_train_loader, build_validation_loader
from fbt_megatron.errors import TopologyError
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.kernels import Kernels
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.model.pass_schedule import build_pass_schedule
from fbt_megatron.optim.param_groups import ADAM, NORMUON, format_groups, list_groups
from fbt_megatron.parallel.collectives import agree_on_errors, agree_on_rank_zero, broadcast_object, gather_objects
from fbt_megatron.parallel.launcher import count_restarts
from fbt_megatron.parallel.logical_tensor import ParameterLayout
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.planner import count_parameters
from fbt_megatron.rank_plan import format_ranks, plan_ranks
from fbt_megatron.training.console import Console
from fbt_megatron.training.engine import TrainEngine, build_engine
from fbt_megatron.training.metrics import MetricsLogger
from fbt_megatron.training.resume import check_same_model, check_same_run, find_start, new_feedback_tensors
from fbt_megatron.training.run_dir import LOG_NAME, hold_run_dir, note_start, write_config
from fbt_megatron.training.sample_log import SampleLog
from fbt_megatron.training.shared_batches import reads_data
from fbt_megatron.training.train_state import Counters, load_tensors, software_versions
from fbt_megatron.training.trainer import RunParts, Starts, Trainer

_LISTED_RANKS = 32


@contextmanager
def open_trainer(config: RunConfig, topology: ParallelTopology, *, allowed_changes: list[str]) -> Iterator[Trainer]:
    """A trainer at the step where the run goes on; leaving finishes a save in the background and closes what is open.

    Raises the FBTError of the first thing that does not fit, on every rank, before a weight is built wherever possible.
    """
    folder = Path(config.train.run_dir)
    with hold_run_dir(folder), Console(enabled=topology.rank == 0) as console:
        agree_on_rank_zero(lambda: console.open_log(folder / LOG_NAME))
        checkpoints = CheckpointManager(folder / CHECKPOINTS_NAME, config=config.checkpoint, log=console.line)
        activity.begin("start-up, checking the newest checkpoint")
        checkpoints.prepare()
        start = find_start(config, checkpoints)
        if start is not None:
            _check_start(config, start[1], allowed_changes, console)
        activity.begin("start-up, opening the data")
        loader, validation = _open_data(config, topology, None if start is None else start[1])
        activity.begin("start-up, building the model")
        model = build_model(config, topology)
        _check_same_kernels(model.kernels)
        console.line(model.kernels.describe())
        layouts = parameter_layouts(model, config, topology)
        engine = build_engine(model, layouts, config, topology)
        _list_optimizer_groups(layouts, config, topology, console)
        activity.begin("start-up, loading the checkpoint")
        counters = _restore(start, engine, config, console)
        activity.begin("start-up, opening the run directory")
        console.line(_describe(config, topology, counters))
        starts = _count_starts(folder, counters, console)
        _list_ranks(config, topology, console)
        agree_on_rank_zero(lambda: write_config(config))
        schedule = build_pass_schedule(config.feedback, steps=config.train.steps, seed=config.train.seed)
        metrics = MetricsLogger(
            folder,
            console=console,
            total_steps=config.train.steps,
            resume_step=counters.step,
            console_every=config.logging.console_every,
            tensorboard=config.logging.tensorboard,
            passes_after=schedule.passes_after,
            validation_due=counters.validation_due,
        )
        agree_on_rank_zero(metrics.open)
        logs_samples = config.logging.samples and loader is not None
        samples = SampleLog(folder, rank=topology.rank, enabled=logs_samples, console=console)
        samples.open(counters.step)
        try:
            token_bytes = broadcast_object(None if validation is None else validation.token_bytes)
            parts = RunParts(
                model, engine, loader, validation, token_bytes, checkpoints, metrics, samples, console, schedule, starts
            )
            trainer = Trainer(config, topology, parts, counters)
            if start is not None:
                _continue_from(start[1], trainer)
            yield trainer
        finally:
            checkpoints.close()
            if loader is not None:
                loader.close()
            metrics.close()
            samples.close()


def _check_start(config: RunConfig, manifest: Manifest, allowed_changes: list[str], console: Console) -> None:
    """Raise where the configuration may not go on with a checkpoint; list what changes from there on."""
    if manifest.contents == WEIGHTS:
        check_same_model(config, manifest, allowed=allowed_changes)
        return
    changes = check_same_run(config, manifest, allowed=allowed_changes)
    if changes:
        console.line(f"changes from step {manifest.step + 1} on: {'; '.join(changes)}")


def _open_data(
    config: RunConfig, topology: ParallelTopology, manifest: Manifest | None
) -> tuple[TrainLoader | None, ValidationLoader | None]:
    """The loaders of the rank that reads for its data-parallel replica; None on the others."""
    reads = reads_data(topology)
    state = None if manifest is None or manifest.contents == WEIGHTS else manifest.state["data"]
    rank, size = topology.dp_rank, topology.dp_size
    loader = agree_on_errors(
        lambda: build_train_loader(config, dp_rank=rank, dp_size=size, state=state) if reads else None
    )
    validation = agree_on_errors(lambda: build_validation_loader(config, dp_rank=rank, dp_size=size) if reads else None)
    return loader, validation


def _restore(start: tuple[Path, Manifest] | None, engine: TrainEngine, config: RunConfig, console: Console) -> Counters:
    if start is None:
        return Counters()
    path, manifest = start
    fresh = new_feedback_tensors(config, manifest)
    load_tensors(path, engine, fresh=fresh, weights_only=manifest.contents == WEIGHTS)
    if fresh:
        console.line(f"not in the checkpoint, so with their initial values: {', '.join(sorted(fresh))}")
    if manifest.contents == WEIGHTS:
        console.line(f"weights alone from {path}: the run begins at step 0 with a fresh optimizer")
        return Counters()
    engine.optimizer.load_counters(manifest.state["optimizer"])
    if path.parent == Path(config.train.run_dir) / CHECKPOINTS_NAME:
        console.line(f"resumed from {path}")
    else:
        console.line(f"branched off from {path}: {config.train.run_dir} goes on with step {manifest.step + 1}")
    for name, version in software_versions().items():
        if manifest.versions.get(name) != version:
            console.line(
                f"note: {name} is {version} now; the checkpoint was written with {manifest.versions.get(name)}"
            )
    return Counters(**manifest.state["counters"])


def _count_starts(folder: Path, counters: Counters, console: Console) -> Starts:
    """Note this start of the run, and say which one it is."""
    restarts = agree_on_rank_zero(lambda: count_restarts(os.environ))
    where = f"step {counters.step} on {socket.gethostname()}, restart {restarts} by the launcher"
    starts = agree_on_rank_zero(lambda: note_start(folder, where))
    if starts > 1 or restarts:
        console.line(f"start {starts} of this run, restart {restarts} by the launcher")
    return Starts(starts, restarts)


def _continue_from(manifest: Manifest, trainer: Trainer) -> None:
    """What a trainer keeps of the checkpoint that it begins from, beside tensors and counters."""
    weights_alone = manifest.contents == WEIGHTS
    trainer.start_is_partial = weights_alone or bool(new_feedback_tensors(trainer.config, manifest))
    # Windows that a run has not kept up are no measure of the steps to come.
    if not weights_alone and trainer.config.resilience.spikes != "ignore":
        trainer.spikes.load_state_dict(manifest.state["spikes"])


def _check_same_kernels(kernels: Kernels) -> None:
    """Ranks that compute with different libraries would drift apart; raises TopologyError on all of them."""
    found = gather_objects(kernels)
    other = next((rank for rank, theirs in enumerate(found) if theirs != found[0]), None)
    if other is not None:
        raise TopologyError(
            f"model.kernels: rank 0 would use {found[0].describe()}, rank {other} {found[other].describe()}. "
            "Install the same libraries on all nodes, or name one that all have."
        )


def _list_optimizer_groups(
    layouts: Mapping[str, ParameterLayout], config: RunConfig, topology: ParallelTopology, console: Console
) -> None:
    """Which tensor of the whole model is in which optimizer group: a summary on the console, all of it in the log."""
    stages = gather_objects(list(layouts.values()), group=topology.pg.pp)
    entries = list_groups((layout for stage in stages for layout in stage), config.optimizer)
    parts = []
    for group in (NORMUON, ADAM):
        tensors = [entry.tensor for entry in entries if entry.group == group]
        num_matrices = sum(len(tensor.shape) == 2 for tensor in tensors)
        num_parameters = sum(tensor.numel for tensor in tensors)
        parts.append(
            f"{group} {num_matrices} matrices, {len(tensors) - num_matrices} vectors, {num_parameters:,} parameters"
        )
    console.line(f"optimizer groups: {' | '.join(parts)}")
    console.log(format_groups(entries))


def _list_ranks(config: RunConfig, topology: ParallelTopology, console: Console) -> None:
    """Which rank holds what: in the log, and on the console where it fits a screen."""
    if topology.rank == 0 and topology.world_size > 1:
        table = format_ranks(plan_ranks(config, topology.world_size))
        (console.line if topology.world_size <= _LISTED_RANKS else console.log)(table)


def _describe(config: RunConfig, topology: ParallelTopology, counters: Counters) -> str:
    layout = f"tensor {topology.tp_size} x pipeline {topology.pp_size} x data {topology.dp_size}"
    parallel, train = config.parallel, config.train
    return " | ".join(
        [
            f"{count_parameters(config):,} parameters",
            f"{topology.world_size} processes: {layout} on {topology.device.type}",
            f"ZeRO {parallel.zero_stage}, {parallel.precision}",
            f"{train.global_batch_size} rows x {config.model.seq_length} tokens per step",
            f"step {counters.step} of {train.steps}",
        ]
    )
