"""Which whole matrices and vectors each stored parameter holds, on any tensor-parallel rank and pipeline stage.

One table for the layers and one for the rest; a parameter that neither names is an error, so nothing is ever trained,
saved or initialised by a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import nn

from fbt_megatron.config.schema import ModelConfig, RunConfig
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect

if TYPE_CHECKING:  # dry runs compute layouts without megatron-core
    from fbt_megatron.parallel.topology import ParallelTopology

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this on each tensor-parallel rank."""

_Blocks: TypeAlias = tuple[tuple[LogicalTensor, tuple[Block, ...]], ...]


def padded_vocab_size(vocab_size: int, *, tp_size: int) -> int:
    """Stored rows of embedding and head over all tensor-parallel ranks."""
    multiple = VOCAB_MULTIPLE * tp_size
    return -(-vocab_size // multiple) * multiple


def stage_layers(config: RunConfig, pp_rank: int) -> range:
    """Global 0-based numbers of the layers of a pipeline stage."""
    counts = config.parallel.pipeline_layers or (config.model.num_layers // config.parallel.pipeline,) * (pp_rank + 1)
    first = sum(counts[:pp_rank])
    return range(first, first + counts[pp_rank])


def parameter_layouts(model: nn.Module, config: RunConfig, topology: ParallelTopology) -> dict[str, ParameterLayout]:
    """Layout of every parameter of a stage built by `build_model`, by its name in the model.

    Raises ValueError for a parameter that the tables do not know, or whose shape is not the one they say.
    """
    shard = _Shard(config.model, topology.tp_rank, topology.tp_size)
    layers = stage_layers(config, topology.pp_rank)
    layouts = {}
    for name, parameter in model.named_parameters():
        layouts[name] = _layout(name, tuple(parameter.shape), shard, layers)
        _check_covered(layouts[name])
    return layouts


def stage_layouts(config: RunConfig, *, tp_rank: int, pp_rank: int) -> dict[str, ParameterLayout]:
    """What `parameter_layouts` gives on a rank, in the model's order, without a model and without processes."""
    shard = _Shard(config.model, tp_rank, config.parallel.tensor)
    layers = stage_layers(config, pp_rank)
    layouts = {}
    for name in _parameter_names(config, layers=len(layers), pp_rank=pp_rank):
        layout = _layout(name, (), shard, layers)
        layouts[name] = replace(layout, shape=_stored_shape(layout, shard))
    return layouts


def _parameter_names(config: RunConfig, *, layers: int, pp_rank: int) -> Iterator[str]:
    """Names of a stage's parameters, in the model's order: that of the tables."""
    model, fusion = config.model, config.feedback.fusion
    first, last = pp_rank == 0, pp_rank == config.parallel.pipeline - 1
    if first:
        yield "embedding.weight"
        if model.embedding_norm or fusion != "none":
            yield "embedding_norm.weight"
        yield from (f"fusion.{matrix}.weight" for matrix in _FUSION_MATRICES[fusion])
    absent = {
        "self_attention.gate.weight": not model.attention_gate,
        "self_attention.q_layernorm.weight": not model.qk_norm,
        "self_attention.k_layernorm.weight": not model.qk_norm,
        "self_attn_bda.norm.weight": not model.post_norm,
        "mlp_bda.norm.weight": not model.post_norm,
    }
    for layer in range(layers):
        yield from (f"stack.layers.{layer}.{name}" for name in _LAYER_TABLE if not absent.get(name, False))
    if last:
        yield "stack.final_layernorm.weight"
        if not (model.tie_embeddings and first):
            yield "head.weight"


def _stored_shape(layout: ParameterLayout, shard: _Shard) -> tuple[int, ...]:
    """Shape of the parameter: what its blocks span, for a vocabulary its padding as well."""
    tensor = layout.tensors[0]
    if tensor.kind is ParamKind.VECTOR:
        return tensor.shape
    if tensor.kind in (ParamKind.EMBEDDING, ParamKind.HEAD):
        return shard.stored_vocabulary, tensor.cols
    stored = [block.stored for _, blocks in layout.blocks for block in blocks]
    return max(rect.row + rect.rows for rect in stored), max(rect.col + rect.cols for rect in stored)


@dataclass(frozen=True)
class _Shard:
    """Builds the blocks of one tensor-parallel rank."""

    model: ModelConfig
    tp_rank: int
    tp_size: int

    @property
    def stored_vocabulary(self) -> int:
        """Rows of embedding or head on this rank, padding included."""
        return padded_vocab_size(self.model.vocab_size, tp_size=self.tp_size) // self.tp_size

    def vector(self, name: str, size: int, *, feedback: bool = False) -> _Blocks:
        tensor = LogicalTensor(name, (size,), ParamKind.VECTOR, feedback)
        return ((tensor, (Block(Rect(0, 0, 1, size), 0, 0),)),)

    def rows(self, name: str, rows: int, cols: int, *, feedback: bool = False) -> _Blocks:
        """Output channels divided: megatron-core's column-parallel matrix."""
        local = rows // self.tp_size
        tensor = LogicalTensor(name, (rows, cols), ParamKind.MATRIX, feedback)
        return ((tensor, (Block(Rect(0, 0, local, cols), self.tp_rank * local, 0),)),)

    def columns(self, name: str, rows: int, cols: int) -> _Blocks:
        """Input channels divided: megatron-core's row-parallel matrix."""
        local = cols // self.tp_size
        tensor = LogicalTensor(name, (rows, cols), ParamKind.MATRIX)
        return ((tensor, (Block(Rect(0, 0, rows, local), 0, self.tp_rank * local),)),)

    def vocabulary(self, name: str, kind: ParamKind) -> _Blocks:
        """Vocabulary divided with its padding; the padding is in no block."""
        vocab_size, hidden, stored = self.model.vocab_size, self.model.hidden_size, self.stored_vocabulary
        first = self.tp_rank * stored
        rows = min(max(vocab_size - first, 0), stored)
        blocks = (Block(Rect(0, 0, rows, hidden), first, 0),) if rows else ()
        return ((LogicalTensor(name, (vocab_size, hidden), kind), blocks),)

    def query_key_value(self, layer: str) -> _Blocks:
        """Group after group: the group's query heads, its key head, its value head."""
        model = self.model
        hidden, head, groups = model.hidden_size, model.head_dim, model.num_query_groups
        query_rows = model.num_attention_heads // groups * head
        parts = {"q": (query_rows, 0), "k": (head, query_rows), "v": (head, query_rows + head)}
        local_groups, group_rows = groups // self.tp_size, query_rows + 2 * head
        result = []
        for part, (rows, offset) in parts.items():
            tensor = LogicalTensor(f"{layer}.attention.{part}.weight", (groups * rows, hidden), ParamKind.MATRIX)
            blocks = tuple(
                Block(
                    Rect(group * group_rows + offset, 0, rows, hidden),
                    (self.tp_rank * local_groups + group) * rows,
                    0,
                )
                for group in range(local_groups)
            )
            result.append((tensor, blocks))
        return tuple(result)

    def gate_up(self, layer: str) -> _Blocks:
        """This rank's rows of the gate, then those of the up projection."""
        ffn, hidden = self.model.ffn_hidden_size, self.model.hidden_size
        local = ffn // self.tp_size
        return tuple(
            (
                LogicalTensor(f"{layer}.mlp.{part}.weight", (ffn, hidden), ParamKind.MATRIX),
                (Block(Rect(index * local, 0, local, hidden), self.tp_rank * local, 0),),
            )
            for index, part in enumerate(("gate", "up"))
        )


_Builder: TypeAlias = Callable[[_Shard, str], _Blocks]


def _layer_norm(name: str) -> _Builder:
    return lambda shard, layer: shard.vector(f"{layer}.{name}.weight", shard.model.hidden_size)


def _head_norm(name: str) -> _Builder:
    return lambda shard, layer: shard.vector(f"{layer}.attention.{name}.weight", shard.model.head_dim)


def _attention_gate(shard: _Shard, layer: str) -> _Blocks:
    return shard.rows(f"{layer}.attention.gate.weight", shard.model.num_attention_heads, shard.model.hidden_size)


def _attention_output(shard: _Shard, layer: str) -> _Blocks:
    width = shard.model.num_attention_heads * shard.model.head_dim
    return shard.columns(f"{layer}.attention.output.weight", shard.model.hidden_size, width)


def _mlp_down(shard: _Shard, layer: str) -> _Blocks:
    return shard.columns(f"{layer}.mlp.down.weight", shard.model.hidden_size, shard.model.ffn_hidden_size)


_LAYER_TABLE: dict[str, _Builder] = {
    "input_layernorm.weight": _layer_norm("attention_norm"),
    "self_attention.linear_proj.weight": _attention_output,
    "self_attention.linear_qkv.weight": lambda shard, layer: shard.query_key_value(layer),
    "self_attention.q_layernorm.weight": _head_norm("q_norm"),
    "self_attention.k_layernorm.weight": _head_norm("k_norm"),
    "self_attention.gate.weight": _attention_gate,
    "self_attn_bda.norm.weight": _layer_norm("attention_post_norm"),
    "pre_mlp_layernorm.weight": _layer_norm("mlp_norm"),
    "mlp.linear_fc1.weight": lambda shard, layer: shard.gate_up(layer),
    "mlp.linear_fc2.weight": _mlp_down,
    "mlp_bda.norm.weight": _layer_norm("mlp_post_norm"),
}
"""Parameters of a layer, in the model's order: name inside the layer -> blocks of the layer's logical tensors."""


def _embedding(shard: _Shard, name: str) -> _Blocks:
    return shard.vocabulary("embedding.weight", ParamKind.EMBEDDING)


def _embedding_norm(shard: _Shard, name: str) -> _Blocks:
    return shard.vector(name, shard.model.hidden_size, feedback=not shard.model.embedding_norm)


def _head(shard: _Shard, name: str) -> _Blocks:
    return _embedding(shard, name) if shard.model.tie_embeddings else shard.vocabulary(name, ParamKind.HEAD)


def _fusion_matrix(inputs: int) -> _Builder:
    def build(shard: _Shard, name: str) -> _Blocks:
        hidden = shard.model.hidden_size
        return shard.rows(name, hidden, inputs * hidden, feedback=True)

    return build


_TABLE: dict[str, _Builder] = {
    "embedding.weight": _embedding,
    "embedding_norm.weight": _embedding_norm,
    "fusion.w_u.weight": _fusion_matrix(1),
    "fusion.w_g.weight": _fusion_matrix(1),
    "fusion.w_e.weight": _fusion_matrix(1),
    "fusion.w.weight": _fusion_matrix(2),
    "stack.final_layernorm.weight": lambda shard, name: shard.vector("final_norm.weight", shard.model.hidden_size),
    "head.weight": _head,
}
"""All other parameters, by their whole name."""

_FUSION_MATRICES = {"none": (), "glu": ("w_u", "w_g"), "concat": ("w",), "add": ("w_u", "w_e")}
"""Matrices of each fusion, in the model's order."""

_LAYER_NAME = re.compile(r"stack\.layers\.(\d+)\.(.+)")


def _layout(name: str, shape: tuple[int, ...], shard: _Shard, layers: range) -> ParameterLayout:
    """Layout of the parameter `name` of a stage with these layers."""
    match = _LAYER_NAME.fullmatch(name)
    if match:
        builder, argument = _LAYER_TABLE.get(match[2]), f"layers.{layers[int(match[1])]}"
    else:
        builder, argument = _TABLE.get(name), name
    if builder is None:
        raise ValueError(f"parameter {name} is not in the tables of {__name__}: say what it holds there.")
    blocks = builder(shard, argument)
    return ParameterLayout(
        name,
        shape,
        blocks,
        replicated=all(tensor.kind is ParamKind.VECTOR for tensor, _ in blocks),
        tied_copy=name == "head.weight" and shard.model.tie_embeddings,
    )


def _check_covered(layout: ParameterLayout) -> None:
    """Blocks must fill the parameter, up to the padding of a vocabulary."""
    covered = sum(block.stored.numel for _, blocks in layout.blocks for block in blocks)
    vocabulary = layout.tensors[0].kind in (ParamKind.EMBEDDING, ParamKind.HEAD)
    if covered != layout.numel and not (vocabulary and covered < layout.numel):
        raise ValueError(f"parameter {layout.name} has shape {layout.shape}, but its layout covers {covered} elements.")
