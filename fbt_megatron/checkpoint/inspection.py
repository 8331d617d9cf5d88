"""Looks into checkpoints without a run: what one holds, whether it is as it was written, how two differ.

One process without a process group; tensors are read one at a time, so a checkpoint may be larger than memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fbt_megatron.checkpoint.folder import find_checkpoint
from fbt_megatron.checkpoint.manifest import Manifest, find_damage
from fbt_megatron.checkpoint.reading import CheckpointTensors
from fbt_megatron.config.yaml_text import parse_yaml
from fbt_megatron.errors import CheckpointError

_METADATA_NAME = ".metadata"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: its whole shape, however many parts the ranks wrote it in."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class Checkpoint:
    """One complete checkpoint on the disk. Opened by `open_checkpoint`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._tensors = CheckpointTensors(path)

    @property
    def tensors(self) -> list[TensorEntry]:
        """All tensors, by name."""
        return [
            TensorEntry(name, shape, str(dtype).removeprefix("torch."), math.prod(shape) * dtype.itemsize)
            for name, (shape, dtype) in self._tensors.kinds.items()
        ]

    def read(self, name: str) -> Tensor:
        """One whole tensor. Raises CheckpointError where it cannot be read."""
        return self._tensors.read(name)

    def damage(self) -> list[str]:
        """What is wrong with each file that is not as it was written; reads every byte."""
        found = (find_damage(self.path, self.manifest, [name]) for name in self.manifest.files)
        return [damage for damage in found if damage is not None]

    def config(self) -> dict[str, Any]:
        """The configuration of the run as plain values, whichever version of this project wrote it."""
        values, problems = parse_yaml(self.manifest.config)
        if problems or not isinstance(values, dict):
            raise CheckpointError(f"{self.path}: the configuration in the manifest cannot be read: {problems}")
        return values


def open_checkpoint(source: Path) -> Checkpoint:
    """The checkpoint at `source`: a step_* folder, or the newest of a folder of checkpoints or of a run directory.

    Raises CheckpointError where there is none, and where its manifest or the file that lists its tensors is damaged.
    The newest is taken even so: whoever looks wants to know.
    """
    path = find_checkpoint(source)
    manifest = Manifest.read(path)
    damage = find_damage(path, manifest, [_METADATA_NAME])
    if damage is not None:
        raise CheckpointError(f"{path}: {damage}")
    return Checkpoint(path, manifest)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints do not have in common, bit for bit.

    `distance` is ||first - second|| / ||second||, in 2-norms; None where there is none to give.
    """

    name: str
    reason: str
    distance: float | None = None


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ. Values that are not tensors are (first, second) by key; None: the key is missing."""

    num_equal: int
    tensors: list[TensorDifference]
    state: dict[str, tuple[Any, Any]]
    """Step, counters and data cursors."""
    config: dict[str, tuple[Any, Any]]
    versions: dict[str, tuple[Any, Any]]

    @property
    def same_state(self) -> bool:
        """True where both would train on alike, given the same configuration and versions."""
        return not self.tensors and not self.state


def compare(
    first: Checkpoint, second: Checkpoint, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> Comparison:
    """Compare everything in two checkpoints. Does not look for damage: see `Checkpoint.damage`.

    Raises CheckpointError where a tensor cannot be read. `progress` is called with the tensors done and their number.
    """
    ours = {entry.name: entry for entry in first.tensors}
    theirs = {entry.name: entry for entry in second.tensors}
    names = sorted(ours.keys() | theirs.keys())
    differences = []
    for done, name in enumerate(names):
        progress(done, len(names))
        difference = _compare_tensor(name, ours.get(name), theirs.get(name), first, second)
        if difference is not None:
            differences.append(difference)
    progress(len(names), len(names))
    return Comparison(
        len(names) - len(differences),
        differences,
        _differing(_state(first), _state(second)),
        _differing(first.config(), second.config()),
        _differing(first.manifest.versions, second.manifest.versions),
    )


def _state(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"step": checkpoint.manifest.step} | checkpoint.manifest.state


def _compare_tensor(
    name: str, ours: TensorEntry | None, theirs: TensorEntry | None, first: Checkpoint, second: Checkpoint
) -> TensorDifference | None:
    if ours is None or theirs is None:
        return TensorDifference(name, "only in the second" if ours is None else "only in the first")
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return TensorDifference(name, f"{_kind(ours)} and {_kind(theirs)}")
    one, other = first.read(name), second.read(name)
    if torch.equal(one.view(torch.uint8), other.view(torch.uint8)):  # bits: a NaN equals itself, and -0 is not 0
        return None
    size = torch.linalg.vector_norm(other, dtype=torch.float64)
    distance = float(torch.linalg.vector_norm(one.sub_(other), dtype=torch.float64) / size)
    return TensorDifference(name, "values", distance if math.isfinite(distance) else None)


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys (`section.key`) whose values differ, with both."""
    ours, theirs = dict(_leaves(first)), dict(_leaves(second))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    return {key: (ours.get(key), theirs.get(key)) for key in keys if not _same(ours.get(key), theirs.get(key))}


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other  # a step number is not the fraction 1.0


def _leaves(values: Mapping[str, Any], *, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings, as (`outer.inner`, value)."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, prefix=f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
