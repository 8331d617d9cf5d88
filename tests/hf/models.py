"""Small models, their checkpoints, and what the trainer's own forward gives for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fbt_megatron.checkpoint.logical_shards import LogicalShards
from fbt_megatron.checkpoint.manager import CheckpointManager
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.checkpoint.reading import open_weights
from fbt_megatron.config.loader import format_config
from fbt_megatron.config.schema import CheckpointConfig, DataConfig, ModelConfig, RunConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.layout import parameter_layouts
from fbt_megatron.parallel.logical_tensor import ParameterLayout, Rect, pieces_of
from fbt_megatron.parallel.topology import ParallelTopology
from tests.model.reference import Row, Weights, fuse, pass_input, rms_norm, stack
from tests.model.toy import batch_of, packed_row, run_passes, tiny_config

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "windowed": {"sliding_window": 5, "full_attention_every": 2},
    "bare": {
        "fusion": "add",
        "attention_gate": False,
        "qk_norm": False,
        "post_norm": False,
        "residual_scale": "none",
        "embedding_norm": False,
        "tie_embeddings": False,
    },
    "unusual": {
        "fusion": "concat",
        "embedding_norm": False,
        "head_dim": 6,
        "num_query_groups": 1,
        "rope_theta": 523.5,
        "norm_eps": 3e-3,
        "vocab_size": 131,
        "sliding_window": 3,
    },
    "baseline": {"fusion": "none", "num_query_groups": 4},
}


def config_of(name: str, **changes: Any) -> RunConfig:
    """The configuration of an architecture; its tokenizer is raw bytes where the vocabulary is that large."""
    config = tiny_config(**(ARCHITECTURES[name] | changes))
    return replace(config, data=DataConfig(tokenizer="bytes" if config.model.vocab_size >= 257 else None))


def draw_model(config: RunConfig, topology: ParallelTopology) -> FBTModel:
    """A model whose norms are not all ones, so that each matters."""
    model = build_model(config, topology).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def save_model(folder: Path, model: FBTModel, config: RunConfig, topology: ParallelTopology, *, step: int = 7) -> Path:
    """A checkpoint of this rank's parameters in the run directory `folder`; gives `folder`."""
    layouts = parameter_layouts(model, config, topology)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return save_parameters(folder, values, layouts.values(), config, step=step)


def save_parameters(
    folder: Path, values: Mapping[str, Tensor], layouts: Any, config: RunConfig, *, step: int = 7
) -> Path:
    """The same from stored parameters; of layouts with one name each rank's value may be `NAME@RANK`."""
    parts: dict[str, list[tuple[Rect, Tensor]]] = {}
    shapes = {}
    for layout in layouts:
        if layout.tied_copy:
            continue
        for piece in pieces_of(layout):
            view = piece.view(values[layout.name].reshape(-1))
            parts.setdefault(piece.tensor.name, []).append((piece.place, view))
            shapes[piece.tensor.name] = piece.tensor.shape
    shards = {f"weights/{name}": LogicalShards(shapes[name], pieces) for name, pieces in parts.items()}
    manager = CheckpointManager(folder / "checkpoints", config=CheckpointConfig(), log=lambda text: None)
    manager.prepare()
    manager.save(Manifest(step, {}, format_config(config), {}, {}), shards)
    return folder


def load_model(source: Path, topology: ParallelTopology, **changes: Any) -> FBTModel:
    """The trainer's model with the weights of a checkpoint; keyword arguments change its model section."""
    weights = open_weights(source)
    config = replace(weights.config, model=replace(weights.config.model, **changes))
    model = build_model(replace(config, parallel=replace(config.parallel, precision="fp32")), topology).eval()
    parameters = dict(model.named_parameters())
    for name, layout in parameter_layouts(model, config, topology).items():
        _fill(parameters[name], layout, weights)
    return model


@torch.no_grad()
def _fill(parameter: Tensor, layout: ParameterLayout, weights: Any) -> None:
    flat = torch.zeros(layout.numel)
    for piece in pieces_of(layout):
        whole, place = weights.read(piece.tensor).view(piece.tensor.rows, piece.tensor.cols), piece.place
        piece.view(flat).copy_(whole[place.row : place.row + place.rows, place.col : place.col + place.cols])
    parameter.copy_(flat.view(layout.shape))


@torch.no_grad()
def trainer_logits(model: FBTModel, rows: Sequence[Row], num_passes: int = 1) -> Tensor:
    """[B, S, V] of the last of `num_passes` passes of the trainer's forward, without noise."""
    output = run_passes(model, batch_of(model, list(rows)), num_passes)[-1]
    return model.logits(output.hidden).transpose(0, 1)[..., : model.model.vocab_size]


def random_tokens(vocab_size: int, *lengths: int, seed: int = 3) -> list[list[int]]:
    """Rows of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def rows_of(tokens: Sequence[list[int]]) -> list[Row]:
    """Rows of one document each."""
    return [packed_row(row) for row in tokens]


class RecurrenceReference:
    """Decoding of one text from the equations, in fp64, without a cache: everything is computed anew each time."""

    def __init__(self, weights: Weights, model: ModelConfig, fusion: str) -> None:
        self.weights, self.model, self.fusion = weights, model, fusion

    def start(self, prompt: list[int], *, prefill_passes: int) -> Tensor:
        """Inputs of the stack for a prompt in so many passes, [S, H]."""
        row, before = packed_row(prompt), None
        for number in range(prefill_passes):
            inputs = pass_input(row, before, self.weights, self.model, self.fusion, None)
            if number < prefill_passes - 1:
                before = self._states(inputs)
        return inputs

    def logits(self, inputs: Tensor) -> Tensor:
        """Logits [V] after the last input."""
        head = self.weights["embedding.weight" if self.model.tie_embeddings else "head.weight"]
        return head @ self._states(inputs)[-1]

    def append(self, inputs: Tensor, token: int, *, feedback: bool) -> Tensor:
        """`inputs` with that of one token more, fed with the last state or not."""
        norm, eps = self.weights.get("embedding_norm.weight"), self.model.norm_eps
        embedding = self.weights["embedding.weight"][token]
        normed = None if norm is None else rms_norm(embedding, norm, eps)
        if feedback:
            assert norm is not None
            mixed = fuse(self.fusion, self._states(inputs)[-1], normed, self.weights)
            own = rms_norm(mixed, norm, eps)
        else:
            own = normed if self.model.embedding_norm else embedding
        return torch.cat((inputs, own[None]))

    def greedy(self, prompt: list[int], num_tokens: int, *, feedback: bool, prefill_passes: int) -> list[int]:
        """The most likely token, `num_tokens` times."""
        inputs, chosen = self.start(prompt, prefill_passes=prefill_passes), []
        for _ in range(num_tokens):
            chosen.append(int(self.logits(inputs).argmax()))
            inputs = self.append(inputs, chosen[-1], feedback=feedback)
        return chosen

    def _states(self, inputs: Tensor) -> Tensor:
        return stack(inputs, self.weights, self.model, [0] * len(inputs), True)
