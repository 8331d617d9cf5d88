"""Every stored element of a logical tensor is in one piece, and the piece's view holds it, however a range is cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fbt_megatron.parallel.logical_tensor import (
    Block,
    Fragment,
    LogicalTensor,
    ParameterLayout,
    ParamKind,
    Piece,
    Rect,
    pieces_of,
)

PADDING = -1.0


@dataclass(frozen=True)
class Stored:
    """A parameter, and its values where every logical element is the number of its tensor and its place in it.

    `labels` is made by slicing and stacking whole tensors, as a model does it, and never from `layout`.
    """

    layout: ParameterLayout
    labels: Tensor


def _whole(number: int, tensor: LogicalTensor) -> Tensor:
    """Element (row, col) of tensor `number` has the value 10000 number + row-major place."""
    return (10000.0 * number + torch.arange(tensor.numel)).view(tensor.rows, tensor.cols)


def _matrix(name: str, rows: int, cols: int) -> LogicalTensor:
    return LogicalTensor(name, (rows, cols), ParamKind.MATRIX)


@st.composite
def fused_groups(draw: st.DrawFn) -> Stored:
    """Query, key and value of several groups, interleaved; one rank's groups of a tensor-parallel layout."""
    tp, local_groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rank = draw(st.integers(0, tp - 1))
    heights, cols = draw(st.tuples(*[st.integers(1, 3)] * 3)), draw(st.integers(1, 5))
    tensors = [_matrix(name, tp * local_groups * rows, cols) for name, rows in zip("qkv", heights, strict=True)]
    blocks: list[list[Block]] = [[], [], []]
    stacked, start = [], 0
    for group in range(local_groups):
        for part, rows in enumerate(heights):
            first = (rank * local_groups + group) * rows
            blocks[part].append(Block(Rect(start, 0, rows, cols), first, 0))
            stacked.append(_whole(part, tensors[part])[first : first + rows])
            start += rows
    pairs = tuple((tensor, tuple(parts)) for tensor, parts in zip(tensors, blocks, strict=True))
    return Stored(ParameterLayout("qkv", (start, cols), pairs), torch.cat(stacked))


@st.composite
def column_slices(draw: st.DrawFn) -> Stored:
    """Input channels divided over tensor-parallel ranks."""
    tp, rows, cols = draw(st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4)))
    rank = draw(st.integers(0, tp - 1))
    tensor = _matrix("down", rows, tp * cols)
    block = Block(Rect(0, 0, rows, cols), 0, rank * cols)
    layout = ParameterLayout("down", (rows, cols), ((tensor, (block,)),))
    return Stored(layout, _whole(0, tensor)[:, rank * cols : (rank + 1) * cols])


@st.composite
def padded_vocabularies(draw: st.DrawFn) -> Stored:
    """Rows of the last ranks partly or wholly beyond the vocabulary."""
    tp, stored_rows, cols = draw(st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4)))
    rank, vocab = draw(st.integers(0, tp - 1)), draw(st.integers(1, tp * stored_rows))
    tensor = LogicalTensor("embedding", (vocab, cols), ParamKind.EMBEDDING)
    first = rank * stored_rows
    used = min(max(vocab - first, 0), stored_rows)
    blocks = (Block(Rect(0, 0, used, cols), first, 0),) if used else ()
    labels = torch.full((stored_rows, cols), PADDING)
    labels[:used] = _whole(0, tensor)[first : first + used]
    return Stored(ParameterLayout("embedding", (stored_rows, cols), ((tensor, blocks),)), labels)


@st.composite
def side_by_side(draw: st.DrawFn) -> Stored:
    """Two tensors in the columns of one parameter, and padding beside them: blocks narrower than a stored row."""
    rows, *widths, padding = draw(st.tuples(st.integers(1, 4), *[st.integers(1, 3)] * 2, st.integers(0, 2)))
    tensors = [_matrix(name, rows, width) for name, width in zip("ab", widths, strict=True)]
    cols = sum(widths) + padding
    blocks = [Block(Rect(0, first, rows, width), 0, 0) for first, width in zip((0, widths[0]), widths, strict=True)]
    pairs = tuple((tensor, (block,)) for tensor, block in zip(tensors, blocks, strict=True))
    parts = [*(_whole(number, tensor) for number, tensor in enumerate(tensors)), torch.full((rows, padding), PADDING)]
    return Stored(ParameterLayout("ab", (rows, cols), pairs), torch.cat(parts, dim=1))


@st.composite
def vectors(draw: st.DrawFn) -> Stored:
    size = draw(st.integers(1, 12))
    tensor = LogicalTensor("norm", (size,), ParamKind.VECTOR)
    layout = ParameterLayout("norm", (size,), ((tensor, (Block(Rect(0, 0, 1, size), 0, 0),)),))
    return Stored(layout, _whole(0, tensor).view(-1))


ANY_LAYOUT = st.one_of(fused_groups(), column_slices(), padded_vocabularies(), side_by_side(), vectors())


def _expected(piece: Piece, layout: ParameterLayout) -> Tensor:
    """The values of the piece's rectangle, cut out of the whole tensor."""
    whole = _whole(layout.tensors.index(piece.tensor), piece.tensor)
    place = piece.place
    return whole[place.row : place.row + place.rows, place.col : place.col + place.cols]


@given(stored=ANY_LAYOUT, cuts=st.lists(st.integers(0, 80), max_size=6))
def test_pieces_of_any_cut_hold_each_element_once(stored: Stored, cuts: list[int]) -> None:
    layout = stored.layout
    assert layout.numel == stored.labels.numel()
    bounds = sorted({0, layout.numel, *(cut for cut in cuts if cut < layout.numel)})
    seen = []
    for start, stop in itertools.pairwise(bounds):
        flat = stored.labels.reshape(-1)[start:stop].clone()
        for piece in pieces_of(layout, start=start, stop=stop):
            view = piece.view(flat)
            assert torch.equal(view, _expected(piece, layout))
            seen += view.flatten().tolist()
    assert sorted(seen) == sorted(stored.labels[stored.labels != PADDING].flatten().tolist())


@given(stored=ANY_LAYOUT, cut=st.tuples(st.integers(0, 80), st.integers(0, 80)), offset=st.integers(0, 7))
def test_writing_through_the_views_fills_the_fragment(stored: Stored, cut: tuple[int, int], offset: int) -> None:
    """A fragment inside a larger flat tensor, as ZeRO's partitions are: nothing outside it is touched."""
    start, stop = sorted(min(place, stored.layout.numel) for place in cut)
    partition = torch.full((offset + stop - start + 3,), PADDING)
    fragment = Fragment(stored.layout, start, stop, offset)
    for piece in pieces_of(stored.layout, start=start, stop=stop):
        piece.view(fragment.of(partition)).copy_(_expected(piece, stored.layout))
    expected = torch.full_like(partition, PADDING)
    expected[offset : offset + stop - start] = stored.labels.reshape(-1)[start:stop]
    assert torch.equal(partition, expected)


@given(stored=ANY_LAYOUT)
def test_pieces_of_a_whole_parameter_are_its_blocks(stored: Stored) -> None:
    layout = stored.layout
    assert len(pieces_of(layout)) == sum(len(blocks) for _, blocks in layout.blocks)
    assert pieces_of(layout) == pieces_of(layout, start=0, stop=layout.numel)


def test_an_empty_range_has_no_pieces() -> None:
    tensor = _matrix("m", 2, 3)
    layout = ParameterLayout("m", (2, 3), ((tensor, (Block(Rect(0, 0, 2, 3), 0, 0),)),))
    assert pieces_of(layout, start=4, stop=4) == []


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (Rect(0, 0, 4, 4), Rect(1, 2, 2, 9), Rect(1, 2, 2, 2)),
        (Rect(0, 0, 4, 4), Rect(4, 0, 1, 1), None),
        (Rect(0, 0, 4, 4), Rect(0, 4, 4, 4), None),
        (Rect(2, 2, 1, 1), Rect(0, 0, 9, 9), Rect(2, 2, 1, 1)),
    ],
)
def test_intersection(first: Rect, second: Rect, common: Rect | None) -> None:
    assert first.intersection(second) == common
    assert second.intersection(first) == common
