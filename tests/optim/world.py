"""A small model's parameters over tensor-parallel and ZeRO ranks, written by hand.

It has what a real one has: query, key and value interleaved by group in one parameter, gate and up in another, row and
column slices, a padded embedding, replicated vectors, and fusion matrices that only steps with feedback use.

`store` and `unstore` go between whole tensors and flat partitions by slicing and concatenating alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fbt_megatron.parallel.logical_tensor import Block, Fragment, LogicalTensor, ParameterLayout, ParamKind, Rect


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    layers: int = 2
    hidden: int = 12
    heads: int = 8
    groups: int = 4
    head_dim: int = 2
    ffn: int = 20
    vocab: int = 13
    padded_vocab: int = 16


FBT_1B = Shape(24, 1536, 16, 8, 128, 6656, 100352, 100352)


def _matrix(name: str, rows: int, cols: int, *, feedback: bool = False) -> LogicalTensor:
    return LogicalTensor(name, (rows, cols), ParamKind.MATRIX, feedback)


def _row_slice(tensor: LogicalTensor, tp: int, rank: int) -> ParameterLayout:
    rows = tensor.rows // tp
    block = Block(Rect(0, 0, rows, tensor.cols), rank * rows, 0)
    return ParameterLayout(tensor.name, (rows, tensor.cols), ((tensor, (block,)),))


def _col_slice(tensor: LogicalTensor, tp: int, rank: int) -> ParameterLayout:
    cols = tensor.cols // tp
    block = Block(Rect(0, 0, tensor.rows, cols), 0, rank * cols)
    return ParameterLayout(tensor.name, (tensor.rows, cols), ((tensor, (block,)),))


def _vector(name: str, size: int, *, feedback: bool = False) -> ParameterLayout:
    tensor = LogicalTensor(name, (size,), ParamKind.VECTOR, feedback)
    return ParameterLayout(name, (size,), ((tensor, (Block(Rect(0, 0, 1, size), 0, 0),)),), replicated=True)


def _qkv(prefix: str, shape: Shape, tp: int, rank: int) -> ParameterLayout:
    per_group = {"q": shape.heads // shape.groups * shape.head_dim, "k": shape.head_dim, "v": shape.head_dim}
    blocks: dict[str, list[Block]] = {name: [] for name in per_group}
    row, local_groups = 0, shape.groups // tp
    for group in range(rank * local_groups, (rank + 1) * local_groups):
        for name, rows in per_group.items():
            blocks[name].append(Block(Rect(row, 0, rows, shape.hidden), group * rows, 0))
            row += rows
    tensors = {n: _matrix(f"{prefix}.{n}.weight", rows * shape.groups, shape.hidden) for n, rows in per_group.items()}
    pairs = tuple((tensors[name], tuple(blocks[name])) for name in per_group)
    return ParameterLayout(f"{prefix}.qkv", (row, shape.hidden), pairs)


def _gate_up(prefix: str, shape: Shape, tp: int, rank: int) -> ParameterLayout:
    rows = shape.ffn // tp
    pairs = []
    for index, name in enumerate(("gate", "up")):
        block = Block(Rect(index * rows, 0, rows, shape.hidden), rank * rows, 0)
        pairs.append((_matrix(f"{prefix}.{name}.weight", shape.ffn, shape.hidden), (block,)))
    return ParameterLayout(f"{prefix}.fc1", (2 * rows, shape.hidden), tuple(pairs))


def _embedding(shape: Shape, tp: int, rank: int) -> ParameterLayout:
    tensor = LogicalTensor("embedding.weight", (shape.vocab, shape.hidden), ParamKind.EMBEDDING)
    rows = shape.padded_vocab // tp
    used = min(rows, shape.vocab - rank * rows)
    block = Block(Rect(0, 0, used, shape.hidden), rank * rows, 0)
    return ParameterLayout(tensor.name, (rows, shape.hidden), ((tensor, (block,)),))


def layouts(shape: Shape, *, tp: int, tp_rank: int) -> dict[str, ParameterLayout]:
    """Every parameter of one tensor-parallel rank, in the order of the model."""
    found = [_embedding(shape, tp, tp_rank), _vector("embedding_norm.weight", shape.hidden, feedback=True)]
    for name in ("fusion.w_u.weight", "fusion.w_g.weight"):
        found.append(_row_slice(_matrix(name, shape.hidden, shape.hidden, feedback=True), tp, tp_rank))
    for layer in range(shape.layers):
        attention, mlp = f"layers.{layer}.attention", f"layers.{layer}.mlp"
        width = shape.heads * shape.head_dim
        found += [
            _vector(f"{attention}_norm.weight", shape.hidden),
            _qkv(attention, shape, tp, tp_rank),
            _row_slice(_matrix(f"{attention}.gate.weight", shape.heads, shape.hidden), tp, tp_rank),
            _col_slice(_matrix(f"{attention}.output.weight", shape.hidden, width), tp, tp_rank),
            _gate_up(mlp, shape, tp, tp_rank),
            _col_slice(_matrix(f"{mlp}.down.weight", shape.hidden, shape.ffn), tp, tp_rank),
        ]
    return {layout.name: layout for layout in [*found, _vector("final_norm.weight", shape.hidden)]}


def logical_tensors(shape: Shape) -> list[LogicalTensor]:
    """Every logical tensor of the model."""
    return [tensor for layout in layouts(shape, tp=1, tp_rank=0).values() for tensor in layout.tensors]


def is_matrix(layout: ParameterLayout) -> bool:
    """True for parameters of the matrix group."""
    return layout.tensors[0].kind is ParamKind.MATRIX


def _rectangles(layout: ParameterLayout) -> Iterator[tuple[str, tuple[slice, slice], tuple[slice, slice]]]:
    for tensor, blocks in layout.blocks:
        for block in blocks:
            stored = block.stored
            inside = slice(stored.row, stored.row + stored.rows), slice(stored.col, stored.col + stored.cols)
            whole = slice(block.row, block.row + stored.rows), slice(block.col, block.col + stored.cols)
            yield tensor.name, inside, whole


def store(layout: ParameterLayout, whole: dict[str, Tensor]) -> Tensor:
    """What this parameter stores of the whole tensors, in its local shape; padding is zero."""
    local = torch.zeros(layout.numel // layout.cols, layout.cols)
    for name, inside, place in _rectangles(layout):
        local[inside] = whole[name].reshape(-1, whole[name].shape[-1])[place]
    return local.view(layout.shape)


def unstore(layout: ParameterLayout, local: Tensor, whole: dict[str, Tensor]) -> None:
    """Put what this parameter stores into the whole tensors."""
    for name, inside, place in _rectangles(layout):
        whole[name].view(-1, whole[name].shape[-1])[place] = local.reshape(-1, layout.cols)[inside]


def cut(group: list[ParameterLayout], start: int, stop: int) -> list[Fragment]:
    """The fragments in the range [start, stop) of the concatenated parameters; that range is the flat partition."""
    fragments, before = [], 0
    for layout in group:
        first, last = max(start, before), min(stop, before + layout.numel)
        if first < last:
            fragments.append(Fragment(layout, first - before, last - before, first - start))
        before += layout.numel
    return fragments


def even_bounds(group: list[ParameterLayout], parts: int) -> list[int]:
    """Bounds of equal partitions of the concatenated parameters, the last one padded."""
    size = -(-sum(layout.numel for layout in group) // parts)
    return [part * size for part in range(parts + 1)]
