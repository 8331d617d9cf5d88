"""What a run is, between two steps: everything a checkpoint has to hold so that resuming equals never having stopped.

Tensors: fp32 weights, NorMuon's momentum and row moments, Adam's moments, all as logical tensors. Numbers: the counters
below, Adam's update counts, the cursor of every data stream, the recent losses and gradient norms. Nothing else has
state: the learning rate, the number of passes and every random draw (jitter, prefix mixin) are pure functions of the
configuration and of step, row and pass.
"""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from fbt_megatron.checkpoint.logical_shards import LogicalShards
from fbt_megatron.checkpoint.manager import load_shards
from fbt_megatron.parallel.logical_tensor import LogicalTensor, Rect, pieces_of
from fbt_megatron.training.engine import TrainEngine

_PACKAGES = ("torch", "megatron-core", "deepspeed", "webdataset", "numpy")


@dataclass
class Counters:
    """Progress of a run. `tokens` counts rows x S of its steps, not times the passes; the cursors hold
    `skipped_documents`, `cut_conversations` and `cut_tokens` too.

    `validation_due` is true where a signal cut the validation of this step short.
    """

    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    """Steps that changed nothing: their gradient was not finite, no token of their rows was trained, or they were
    spikes and those are skipped."""
    consecutive_skips: int = 0
    consecutive_untrained: int = 0
    """Of the last ones, those in which no token is trained."""
    validation_due: bool = False
    skipped_documents: int = 0
    first_skipped_cycle: int = 0
    """Where the data of the skipped steps in a row begins, if there are any."""
    spikes: int = 0
    """Finite steps that stood out, skipped or not."""
    rewinds: int = 0
    """How often the run went back to a checkpoint."""
    cut_conversations: int = 0
    """Those that were longer than a row."""
    cut_tokens: int = 0
    """Tokens at their ends that were left out."""

    def as_dict(self) -> dict[str, int]:
        """Plain values for a manifest; `Counters(**values)` reads them back."""
        return asdict(self)


def shards_of(engine: TrainEngine) -> dict[str, LogicalShards]:
    """Views of this rank's part of the weights and of all optimizer state, by canonical name; reading them saves.

    The last stage's copy of a tied embedding is left out: ZeRO cuts it in other places than the first stage's, and a
    checkpoint holds every element once.
    """
    return _group(_master_parts(engine), prefix="weights") | _optimizer_shards(engine, tied_copies=False)


def load_tensors(path: Path, engine: TrainEngine, *, fresh: Collection[str] = (), weights_only: bool = False) -> None:
    """Set weights and optimizer state from a checkpoint, whatever layout wrote it.

    The logical tensors named in `fresh` are not in it: they keep the weights and the state that they have. With
    `weights_only` the optimizer keeps all the state that it has. Raises CheckpointError where another tensor is
    missing, or has another shape.
    """
    # Each rank reads its whole parameters: the copies that compute need them, and ZeRO's fragment is a part of them.
    buffers = {
        name: torch.empty(engine.layouts[name].shape).copy_(parameter.detach())
        for name, parameter in engine.module.named_parameters()
    }
    parts = [
        (piece.tensor, piece.place, piece.view(buffers[name].view(-1)))
        for name, layout in engine.layouts.items()
        for piece in pieces_of(layout)
    ]
    optimizer = {} if weights_only else _optimizer_shards(engine, tied_copies=True)
    shards = _group(parts, prefix="weights") | optimizer
    load_shards(path, {name: shard for name, shard in shards.items() if _tensor_name(name) not in fresh})
    engine.load_weights(buffers)


def _tensor_name(key: str) -> str:
    """Canonical name of the logical tensor that `weights/...` or `optimizer/STATE/...` belongs to."""
    kind, _, rest = key.partition("/")
    return rest if kind == "weights" else rest.partition("/")[2]


def software_versions() -> dict[str, str]:
    """Versions that a checkpoint records."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def _master_parts(engine: TrainEngine) -> list[tuple[LogicalTensor, Rect, Tensor]]:
    return [
        (piece.tensor, piece.place, piece.view(flat))
        for fragment, flat in engine.master_fragments()
        if not fragment.layout.tied_copy
        for piece in pieces_of(fragment.layout, start=fragment.start, stop=fragment.stop)
    ]


def _optimizer_shards(engine: TrainEngine, *, tied_copies: bool) -> dict[str, LogicalShards]:
    shards = {}
    for state, tensor, pieces in engine.optimizer.state_tensors(tied_copies=tied_copies):
        shards[f"optimizer/{state}/{tensor.name}"] = LogicalShards(tensor.shape, pieces)
    return shards


def _group(parts: list[tuple[LogicalTensor, Rect, Tensor]], *, prefix: str) -> dict[str, LogicalShards]:
    by_name: dict[str, list[tuple[Rect, Tensor]]] = defaultdict(list)
    shapes = {}
    for tensor, rect, view in parts:
        by_name[tensor.name].append((rect, view))
        shapes[tensor.name] = tensor.shape
    return {f"{prefix}/{name}": LogicalShards(shapes[name], pieces) for name, pieces in by_name.items()}
