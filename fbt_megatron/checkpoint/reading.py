"""Reads the tensors of a checkpoint in one process, whatever layout wrote it, without processes and process groups."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fbt_megatron.checkpoint.folder import find_checkpoint
from fbt_megatron.checkpoint.logical_shards import LogicalLoadPlanner, LogicalShards, SafeFileSystemReader
from fbt_megatron.checkpoint.manifest import Manifest, find_damage
from fbt_megatron.config.loader import parse_config
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.errors import CheckpointError
from fbt_megatron.parallel.logical_tensor import LogicalTensor, Rect


class CheckpointTensors:
    """The tensors of one checkpoint folder by their names in it, read one whole tensor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        metadata = SafeFileSystemReader(path).read_metadata()
        self._reader = _ReaderOf(path, metadata)
        self._stored: dict[str, TensorStorageMetadata] = {}
        for name, stored in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(stored, TensorStorageMetadata), name  # the reader of metadata knows no other
            self._stored[name] = stored

    @property
    def kinds(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Whole shape and dtype of each tensor, in the order of the names."""
        return {name: (tuple(stored.size), stored.properties.dtype) for name, stored in self._stored.items()}

    def read(self, name: str) -> Tensor:
        """One whole tensor; raises CheckpointError where it cannot be read."""
        stored = self._stored[name]
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        part = whole.view(-1, whole.shape[-1])
        place = Rect(0, 0, *part.shape)
        shards = {name: LogicalShards(whole.shape, [(place, part)], dtype=whole.dtype)}
        try:
            with warnings.catch_warnings(action="ignore"):  # torch says that there is no process group
                dcp.load(shards, storage_reader=self._reader, planner=LogicalLoadPlanner(), no_dist=True)
        except (CheckpointException, ValueError, RuntimeError) as error:
            failures = error.failures if isinstance(error, CheckpointException) else {}
            reason = next(iter(failures.values()))[0] if failures else error
            raise CheckpointError(f"{self.path}: {name} cannot be read: {reason}") from None
        return whole


class StoredWeights:
    """The fp32 weights of one checkpoint, read one whole logical tensor at a time."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._tensors = CheckpointTensors(path)

    @property
    def config(self) -> RunConfig:
        """The configuration of the run that wrote it; raises ConfigError where this version cannot read it."""
        source = f"the configuration in {self.path}"
        return parse_config(self.manifest.config, source=source, check_rules=False)

    def read(self, tensor: LogicalTensor) -> Tensor:
        """A whole tensor, fp32; raises CheckpointError where it is not there or has another shape."""
        name = f"weights/{tensor.name}"
        shape, _ = self._tensors.kinds.get(name, (None, None))
        if shape != tensor.shape:
            reason = "it is not there" if shape is None else f"its shape is {list(shape)}, not {list(tensor.shape)}"
            raise CheckpointError(f"{self.path}: {tensor.name} cannot be read: {reason}")
        return self._tensors.read(name)


def open_weights(source: Path) -> StoredWeights:
    """The checkpoint at `source`: a step folder, or of a run directory or its checkpoints folder the newest.

    Every byte of it is checked. Raises CheckpointError where there is none, or it is damaged: another one is not taken
    in its place.
    """
    path = find_checkpoint(source)
    manifest = Manifest.read(path)
    damage = find_damage(path, manifest, manifest.files)
    if damage is not None:
        raise CheckpointError(f"{path} cannot be read: {damage}. Name another step folder.")
    return StoredWeights(path, manifest)


class _ReaderOf(SafeFileSystemReader):
    """A reader whose metadata is read already: torch asks for it at each load, and there is one load per tensor."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the checkpoint."""
        return self._metadata
