"""A checkpoint of a few numbers: what each step holds is known from the step alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fbt_megatron.checkpoint.logical_shards import LogicalShards
from fbt_megatron.checkpoint.manager import CheckpointManager, load_shards
from fbt_megatron.checkpoint.manifest import Manifest
from fbt_megatron.config.schema import CheckpointConfig
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect, pieces_of

SHAPES: dict[str, tuple[int, ...]] = {"weights/matrix": (5, 4), "weights/vector": (7,), "optimizer/momentum": (3, 6)}


def whole_tensors(step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Every element of every tensor has another value, in every step."""
    tensors, first = {}, 1000.0 * step
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + numel).view(shape)
        first += numel
    return tensors


class Cut:
    """What one rank holds of some tensors: flat ranges, each in a buffer of its own, as partitions of ZeRO are.

    `ranges[name]` is a list of (start, stop). The buffers are filled with `values`, or with NaN for loading.
    """

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        ranges: dict[str, Sequence[tuple[int, int]]],
        values: dict[str, Tensor] | None = None,
    ) -> None:
        self.buffers: dict[tuple[str, int, int], Tensor] = {}
        self.shards: dict[str, LogicalShards] = {}
        for name, shape in shapes.items():
            tensor = LogicalTensor(name, shape, ParamKind.VECTOR if len(shape) == 1 else ParamKind.MATRIX)
            block = Block(Rect(0, 0, tensor.rows, tensor.cols), 0, 0)
            layout = ParameterLayout(name, shape, ((tensor, (block,)),))
            parts = []
            for start, stop in ranges[name]:
                flat = torch.full((stop - start,), torch.nan)
                if values is not None:
                    flat.copy_(values[name].reshape(-1)[start:stop])
                self.buffers[name, start, stop] = flat
                parts += [(piece.place, piece.view(flat)) for piece in pieces_of(layout, start=start, stop=stop)]
            self.shards[name] = LogicalShards(shape, parts)

    def holds(self, values: dict[str, Tensor]) -> bool:
        """True where every buffer has exactly its range of `values`."""
        return all(
            torch.equal(flat, values[name].reshape(-1)[start:stop])
            for (name, start, stop), flat in self.buffers.items()
        )


def share(rank: int, world_size: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, list[tuple[int, int]]]:
    """This rank's half of each tensor; the cut falls inside a row."""
    ranges = {}
    for name, shape in shapes.items():
        numel = torch.Size(shape).numel()
        bounds = [numel * part // world_size for part in range(world_size + 1)]
        ranges[name] = [(bounds[rank], bounds[rank + 1])]
    return ranges


class Run:
    """A folder of checkpoints seen from one rank; saves are made at once or in the background."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        keep_every: int | None = None,
        in_background: bool = False,
        rank: int = 0,
        world_size: int = 1,
        shapes: dict[str, tuple[int, ...]] = SHAPES,
    ) -> None:
        self.folder = folder
        self.log: list[str] = []
        self.shapes = shapes
        self.ranges = share(rank, world_size, shapes)
        config = CheckpointConfig(keep=keep, keep_every=keep_every, async_=in_background)
        self.manager = CheckpointManager(folder, config=config, log=self.log.append)
        self.manager.prepare()

    def save(self, step: int, *, values_of: int | None = None) -> None:
        """Save the values of `step` (or of another number) under `step`, to the end."""
        self.begin_save(step, values_of=values_of)
        self.manager.finish()

    def begin_save(self, step: int, *, values_of: int | None = None) -> None:
        """What a training step does: hand over a state, and change all of it as soon as that is allowed."""
        values = whole_tensors(step if values_of is None else values_of, self.shapes)
        manifest = Manifest(step, {"counter": values_of or step}, "seed: 1", {"torch": "2"}, files={})
        cut = Cut(self.shapes, self.ranges, values)
        self.manager.save(manifest, cut.shards)
        for buffer in cut.buffers.values():
            buffer.fill_(-1.0)
        manifest.state["counter"] = -1

    def newest(self) -> int | None:
        """Step of the checkpoint that a run would go on from, after its values were loaded and compared."""
        found = self.manager.find_newest(self.folder)
        if found is None:
            return None
        path, manifest = found
        assert path == self.folder / f"step_{manifest.step:08d}"
        empty = Cut(self.shapes, self.ranges)
        load_shards(path, empty.shards)
        assert empty.holds(whole_tensors(manifest.state["counter"], self.shapes))
        return manifest.step

    def skipped(self) -> list[str]:
        """Lines of the log about checkpoints that were passed over."""
        return [line for line in self.log if "skipped" in line]

    def names(self) -> set[str]:
        """Everything in the folder."""
        return {path.name for path in self.folder.iterdir()}


def remove(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip_bit(path: Path, place: float = 0.5) -> None:
    """One bit of the file, at a place between the first byte (0) and the last (1)."""
    content = bytearray(path.read_bytes())
    content[round(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": remove,
    "truncated": truncate,
    "halved": halve,
    "emptied": empty,
    "flipped": flip_bit,
    "flipped at its begin": partial(flip_bit, place=0.0),
    "flipped at its end": partial(flip_bit, place=1.0),
}
