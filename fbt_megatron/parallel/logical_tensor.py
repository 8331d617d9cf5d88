"""Whole matrices and vectors of the model, and which rectangle of each a rank stores where.

megatron-core stores several matrices in one parameter (query, key and value; gate and up), tensor parallelism stores a
slice of them, and ZeRO stores a flat range of that slice. Initialisation, NorMuon, checkpoints and conversion all speak
of the *whole* matrix. This file is the only place that knows how the two meet; it is plain geometry, without
communication.

Legend: a rectangle is (row, col) start and (rows, cols) size. A vector of n numbers is a rectangle of one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


class ParamKind(Enum):
    """What a logical tensor is to the optimizer."""

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    HEAD = "head"
    VECTOR = "vector"


@dataclass(frozen=True)
class Rect:
    """A rectangle of a tensor: start and size, in (rows, columns)."""

    row: int
    col: int
    rows: int
    cols: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.rows * self.cols

    def intersection(self, other: Rect) -> Rect | None:
        """The common rectangle, or None where there is none."""
        row, col = max(self.row, other.row), max(self.col, other.col)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        cols = min(self.col + self.cols, other.col + other.cols) - col
        return Rect(row, col, rows, cols) if rows > 0 and cols > 0 else None


@dataclass(frozen=True)
class Block:
    """A rectangle of a stored parameter and the place of its first element in the logical tensor."""

    stored: Rect
    row: int
    col: int


@dataclass(frozen=True)
class LogicalTensor:
    """One whole matrix or vector of the model, the same in every layout.

    `name` is canonical: global 0-based layer numbers, one name per logical matrix. `shape` is the whole shape, without
    vocabulary padding. `feedback` marks tensors that only steps with two passes or more use.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParamKind
    feedback: bool = False

    @property
    def rows(self) -> int:
        """Rows of the rectangle view (1 for a vector)."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def cols(self) -> int:
        """Columns of the rectangle view."""
        return self.shape[-1]

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return self.rows * self.cols


@dataclass(frozen=True)
class ParameterLayout:
    """What one parameter of this rank stores: its local shape, and the blocks of each logical tensor in it.

    `replicated` says that every tensor-parallel rank holds the same values. `tied_copy` marks the copy of the tied
    embedding on the last pipeline stage. Elements in no block are padding.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[tuple[LogicalTensor, tuple[Block, ...]], ...]
    replicated: bool = False
    tied_copy: bool = False

    @property
    def cols(self) -> int:
        """Columns of the stored rectangle (its row stride)."""
        return self.shape[-1]

    @property
    def numel(self) -> int:
        """Number of stored elements, padding included."""
        return self.cols * (self.shape[0] if len(self.shape) == 2 else 1)

    @property
    def tensors(self) -> tuple[LogicalTensor, ...]:
        """The logical tensors that have a block here."""
        return tuple(tensor for tensor, _ in self.blocks)

    @property
    def feedback(self) -> bool:
        """True where only steps with two passes or more use this parameter."""
        return all(tensor.feedback for tensor in self.tensors)


@dataclass(frozen=True)
class Piece:
    """A rectangle of a logical tensor inside a flat range of a stored parameter.

    `place` is the rectangle in the logical tensor; its first element is at `start` of the flat range, and its rows are
    `stride` elements apart.
    """

    tensor: LogicalTensor
    place: Rect
    start: int
    stride: int

    def view(self, flat: Tensor) -> Tensor:
        """The [rows, cols] view of this piece in `flat`, the range it was computed for ([numel], contiguous)."""
        size, stride = (self.place.rows, self.place.cols), (self.stride, 1)
        return torch.as_strided(flat, size, stride, flat.storage_offset() + self.start)


def pieces_of(layout: ParameterLayout, *, start: int = 0, stop: int | None = None) -> list[Piece]:
    """Pieces of logical tensors in the flat range [start, stop) of a parameter (default: all of it).

    A flat range of a row-major parameter is at most three rectangles: the end of a row, whole rows, the start of a row.
    """
    stop = layout.numel if stop is None else stop
    cols = layout.cols
    pieces = []
    for rect in _range_rects(start, stop, cols=cols):
        for tensor, blocks in layout.blocks:
            for block in blocks:
                common = rect.intersection(block.stored)
                if common is not None:
                    row = block.row + common.row - block.stored.row
                    col = block.col + common.col - block.stored.col
                    place = Rect(row, col, common.rows, common.cols)
                    pieces.append(Piece(tensor, place, common.row * cols + common.col - start, cols))
    return pieces


def _range_rects(start: int, stop: int, *, cols: int) -> list[Rect]:
    """The rectangles that cover the flat range [start, stop) of a row-major tensor with `cols` columns."""
    rects = []
    while start < stop:
        row, col = divmod(start, cols)
        if col or stop - start < cols:
            rects.append(Rect(row, col, 1, min(cols - col, stop - start)))
        else:
            rects.append(Rect(row, 0, (stop - start) // cols, cols))
        start += rects[-1].numel
    return rects


@dataclass(frozen=True)
class Fragment:
    """The flat range [start, stop) of a parameter of which this rank holds the optimizer state.

    `offset` is the place of the range's first element in the flat tensor that the optimizer sees. Without ZeRO the
    range is the whole parameter, the flat tensor its own storage, and `offset` 0.
    """

    layout: ParameterLayout
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements of the range."""
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """This fragment's part of the flat optimizer tensor, as a [numel] view."""
        return flat.narrow(0, self.offset, self.numel)
