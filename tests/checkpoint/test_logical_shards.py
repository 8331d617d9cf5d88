"""Tensors saved in one cut and loaded in another, and files that must not be believed."""

from __future__ import annotations

import itertools
import os
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from fbt_megatron.checkpoint.logical_shards import LogicalLoadPlanner, LogicalSavePlanner, LogicalShards
from fbt_megatron.checkpoint.manager import load_shards
from fbt_megatron.errors import CheckpointError
from fbt_megatron.parallel.logical_tensor import Rect
from tests.checkpoint.toy import SHAPES, Cut, share, whole_tensors
from tests.distributed import run_distributed

WHOLE = share(0, 1)


def _save(folder: Path, shards: dict[str, LogicalShards]) -> None:
    dcp.save(dict(shards), storage_writer=dcp.FileSystemWriter(folder, sync_files=False), planner=LogicalSavePlanner())


def _ranges(cuts: list[int]) -> dict[str, list[tuple[int, int]]]:
    """Each tensor cut at the given places, taken modulo its size."""
    ranges = {}
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        bounds = sorted({0, numel, *(cut % numel for cut in cuts)})
        ranges[name] = list(itertools.pairwise(bounds))
    return ranges


CUTS = st.lists(st.integers(0, 100), max_size=5)


@pytest.mark.usefixtures("process_group")
@settings(max_examples=25, deadline=None)
@given(saved=CUTS, loaded=CUTS)
def test_any_cut_reads_what_any_other_wrote(saved: list[int], loaded: list[int]) -> None:
    values = whole_tensors(3)
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), Cut(SHAPES, _ranges(saved), values).shards)
        target = Cut(SHAPES, _ranges(loaded))
        load_shards(Path(folder), target.shards)
    assert target.holds(values)


@pytest.fixture
def checkpoint(process_group: None, tmp_path: Path) -> Path:
    _save(tmp_path / "saved", Cut(SHAPES, WHOLE, whole_tensors(1)).shards)
    return tmp_path / "saved"


def test_a_part_of_the_tensors_can_be_loaded(checkpoint: Path) -> None:
    shapes = {"weights/vector": SHAPES["weights/vector"]}
    target = Cut(shapes, {"weights/vector": [(2, 5)]})
    load_shards(checkpoint, target.shards)
    assert target.holds(whole_tensors(1))


def test_a_missing_tensor_is_an_error(checkpoint: Path) -> None:
    target = Cut({"weights/other": (2, 2)}, {"weights/other": [(0, 4)]})
    with pytest.raises(CheckpointError, match=r"does not fit this run.*weights/other"):
        load_shards(checkpoint, target.shards)


@pytest.mark.parametrize("shape", [(5, 5), (4, 4), (4, 5), (20,)])
def test_another_shape_is_an_error(checkpoint: Path, shape: tuple[int, ...]) -> None:
    target = Cut({"weights/matrix": shape}, {"weights/matrix": [(0, torch.Size(shape).numel())]})
    with pytest.raises(CheckpointError, match=r"does not fit this run.*weights/matrix"):
        load_shards(checkpoint, target.shards)


@pytest.mark.usefixtures("process_group")
def test_a_tensor_with_a_hole_is_never_written(tmp_path: Path) -> None:
    holed = Cut({"m": (4, 4)}, {"m": [(0, 8), (12, 16)]}, {"m": torch.zeros(4, 4)})
    with pytest.raises(dcp.api.CheckpointException):
        _save(tmp_path, holed.shards)
    assert not (tmp_path / ".metadata").exists()


def test_two_parts_at_one_place_are_refused() -> None:
    with pytest.raises(AssertionError, match="same place"):
        LogicalShards((2, 2), [(Rect(0, 0, 1, 2), torch.zeros(1, 2)), (Rect(0, 0, 2, 2), torch.zeros(2, 2))])


class _Malice:
    """Unpickling this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_metadata_that_would_run_a_command_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    poisoned = pickle.dumps(_Malice(f"touch {marker}"))
    pickle.loads(poisoned)
    assert marker.exists(), "this file would not show a reader that runs it"
    marker.unlink()
    (checkpoint / ".metadata").write_bytes(poisoned)
    with pytest.raises(CheckpointError, match="which a checkpoint does not contain"):
        load_shards(checkpoint, Cut(SHAPES, WHOLE).shards)
    assert not marker.exists()


def test_metadata_may_not_turn_a_tensor_into_a_pickle(checkpoint: Path, tmp_path: Path) -> None:
    """torch loads entries of bytes without restriction, whatever the caller asked for."""
    marker, name = tmp_path / "ran", "weights/vector"
    torch.save(_Malice(f"touch {marker}"), checkpoint / "bytes")
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex(name)] = _StorageInfo("bytes", 0, (checkpoint / "bytes").stat().st_size)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    shards = Cut({name: SHAPES[name]}, WHOLE).shards
    dcp.load(dict(shards), storage_reader=dcp.FileSystemReader(checkpoint), planner=LogicalLoadPlanner())
    assert marker.exists(), "this checkpoint would not show a reader that runs it"
    marker.unlink()
    with pytest.raises(CheckpointError, match="BytesStorageMetadata"):
        load_shards(checkpoint, shards)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["load", "serialization.os.system", "hub.load"])
def test_metadata_may_not_name_other_parts_of_torch(checkpoint: Path, name: str) -> None:
    """Protocol 4's STACK_GLOBAL: `torch` and a name, which may have points in it."""
    module, encoded = b"torch", name.encode()
    frames = [b"\x8c" + bytes([len(text)]) + text for text in (module, encoded)]
    (checkpoint / ".metadata").write_bytes(b"\x80\x04" + b"".join(frames) + b"\x93.")
    with pytest.raises(CheckpointError, match=f"names torch.{name}"):
        load_shards(checkpoint, Cut(SHAPES, WHOLE).shards)


def _reshard_over_two_ranks(rank: int, folder: str) -> dict[str, object]:
    """Rank 1 holds nothing of one tensor, both hold one tensor whole; loaded in other cuts, and with errors."""
    values, path = whole_tensors(2), Path(folder)
    halves = share(rank, 2)
    halves["weights/vector"] = [(0, 7)]
    halves["optimizer/momentum"] = [(0, 18)] if rank == 0 else []
    _save(path, Cut(SHAPES, halves, values).shards)
    dist.barrier()
    found: dict[str, object] = {}
    swapped = share(1 - rank, 2)
    uneven = {name: [(3, 5)] if rank else [(0, 3), (5, 6)] for name in SHAPES}
    for label, ranges in {"same": halves, "swapped": swapped, "whole": WHOLE, "uneven": uneven}.items():
        target = Cut(SHAPES, ranges)
        load_shards(path, target.shards)
        found[label] = target.holds(values)
    # Only rank 1 asks for what is not there.
    shapes = {"weights/other": (2, 2)} if rank else {"weights/matrix": (5, 4)}
    try:
        load_shards(path, Cut(shapes, {name: [(0, 4)] for name in shapes}).shards)
    except CheckpointError as error:
        found["error"] = str(error)
    return found


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path) -> None:
    ranks = run_distributed(_reshard_over_two_ranks, 2, str(tmp_path))
    for found in ranks:
        assert [found[label] for label in ("same", "swapped", "whole", "uneven")] == [True] * 4
        assert "weights/other" in str(found["error"])
    assert ranks[0]["error"] == ranks[1]["error"]
