"""Reads the weights of a checkpoint in one process, whatever layout wrote it, without processes and process groups."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from fbt_megatron.checkpoint.logical_shards import LogicalLoadPlanner, LogicalShards, SafeFileSystemReader
from fbt_megatron.checkpoint.manager import LATEST_NAME, list_checkpoints
from fbt_megatron.checkpoint.manifest import MANIFEST_NAME, Manifest, find_damage
from fbt_megatron.config.loader import parse_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.errors import CheckpointError
from fbt_megatron.parallel.logical_tensor import LogicalTensor, Rect

_CHECKPOINTS_NAME = "checkpoints"


class StoredWeights:
    """The fp32 weights of one checkpoint, read one whole logical tensor at a time."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @property
    def config(self) -> RunConfig:
        """The configuration of the run that wrote it; raises ConfigError where this version cannot read it."""
        source = f"the configuration in {self.path}"
        return parse_config(self.manifest.config, source=source, check_rules=False)

    def read(self, tensor: LogicalTensor) -> Tensor:
        """A whole tensor, fp32; raises CheckpointError where it is not there or has another shape."""
        values = torch.empty(tensor.shape)
        whole = Rect(0, 0, tensor.rows, tensor.cols)
        part = values.view(tensor.rows, tensor.cols)
        shards = {f"weights/{tensor.name}": LogicalShards(tensor.shape, [(whole, part)])}
        try:
            dcp.load(shards, storage_reader=SafeFileSystemReader(self.path), planner=LogicalLoadPlanner(), no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as error:
            failures = error.failures if isinstance(error, CheckpointException) else {}
            reason = next(iter(failures.values()))[0] if failures else error
            raise CheckpointError(f"{self.path}: {tensor.name} cannot be read: {reason}") from None
        return values


def open_weights(source: Path) -> StoredWeights:
    """The checkpoint at `source`: a step folder, or of a run directory or its checkpoints folder the newest.

    Every byte of it is checked. Raises CheckpointError where there is none, or it is damaged: another one is not taken
    in its place.
    """
    path = _find(source)
    manifest = Manifest.read(path)
    damage = find_damage(path, manifest, manifest.files)
    if damage is not None:
        raise CheckpointError(f"{path} cannot be read: {damage}. Name another step folder.")
    return StoredWeights(path, manifest)


def _find(source: Path) -> Path:
    if (source / MANIFEST_NAME).exists():
        return source
    nested = source / _CHECKPOINTS_NAME
    folder = nested if nested.is_dir() else source
    try:
        return folder / (folder / LATEST_NAME).read_text().strip()
    except (OSError, ValueError):
        found = list_checkpoints(folder)
    if not found:
        raise CheckpointError(
            f"{source}: there is no checkpoint. Name a run directory, its checkpoints folder, or one step_* folder."
        )
    return found[0][1]
