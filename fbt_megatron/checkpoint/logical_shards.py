"""Logical tensors in torch.distributed.checkpoint: each rank writes and reads the rectangles it holds.

A checkpoint holds whole logical tensors under canonical names, cut into rectangles that may differ at save and at load.
torch.distributed.checkpoint finds the overlaps, so any layout reads what any other wrote.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from fbt_megatron.parallel.logical_tensor import Rect

_NAMED_TENSORS = 8
"""Tensors that an error lists by name."""


class LogicalShards:
    """The rectangles of one logical tensor that this rank holds.

    `shape` is the whole shape ([m, n] or [n]); each part is a rectangle of it and a [rows, cols] view of the values. A
    rank may hold none. Two ranks that hold the same rectangle hold the same values: one of them writes it.
    """

    def __init__(
        self, shape: Sequence[int], parts: Sequence[tuple[Rect, Tensor]], *, dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self._views = {self._offsets(rect): self._shaped(view) for rect, view in parts}
        assert len(self._views) == len(parts), "two parts of one logical tensor start at the same place"

    def size(self) -> torch.Size:
        """The whole shape, which torch.distributed.checkpoint compares with the stored one."""
        return self.shape

    def view_at(self, offsets: torch.Size) -> Tensor:
        """The values of the part that starts at `offsets`."""
        return self._views[offsets]

    def views(self) -> list[Tensor]:
        """The values of all parts."""
        return list(self._views.values())

    def with_views(self, views: Sequence[Tensor]) -> LogicalShards:
        """The same parts with other values, in the order of `views()`."""
        other = copy.copy(self)
        other._views = dict(zip(self._views, views, strict=True))
        return other

    def _offsets(self, rect: Rect) -> torch.Size:
        return torch.Size((rect.row, rect.col) if len(self.shape) == 2 else (rect.col,))

    def _shaped(self, view: Tensor) -> Tensor:
        return view if len(self.shape) == 2 else view.reshape(-1)

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offsets, sizes=view.size()) for offsets, view in self._views.items()]

    # The two methods below are the protocol by which torch.distributed.checkpoint asks an object for its parts.

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]


class LogicalSavePlanner(DefaultSavePlanner):
    """Writes `LogicalShards`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plan of all ranks; raises ValueError where a tensor has a hole, which torch looks for on several only."""
        plan, metadata = super().create_global_plan(all_plans)
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), name
            stored = sum(chunk.sizes.numel() for chunk in tensor.chunks)
            if stored != tensor.size.numel():
                raise ValueError(f"{name}: the ranks hold {stored} of {tensor.size.numel()} elements")
        return plan, metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The part that `index` names."""
        return _part(self.state_dict, index)


class LogicalLoadPlanner(DefaultLoadPlanner):
    """Reads into the views of `LogicalShards`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the state as it is: the default replaces meta tensors in it, and there are none.

        Raises ValueError with all tensors that the checkpoint has not; torch would name the first.
        """
        missing = sorted(state_dict.keys() - ({} if metadata is None else metadata.state_dict_metadata).keys())
        if missing:
            more = f" and {len(missing) - _NAMED_TENSORS} more" if len(missing) > _NAMED_TENSORS else ""
            raise ValueError(f"it does not have {', '.join(missing[:_NAMED_TENSORS])}{more}")
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The part that `index` names."""
        return _part(self.state_dict, index)


def _part(state_dict: dict[str, Any], index: MetadataIndex) -> Tensor:
    assert index.offset is not None, f"{index.fqn} was asked for without a place"
    return state_dict[index.fqn].view_at(index.offset)


class SafeFileSystemReader(FileSystemReader):
    """A reader that cannot be made to run code: torch's own unpickles the metadata file without restriction."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata; raises pickle.UnpicklingError where the file holds anything else."""
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the plain data classes of a metadata file, and nothing that acts.

    `BytesStorageMetadata` is left out on purpose: torch unpickles what such an entry points at without restriction.
    """

    _ALLOWED = frozenset(
        {
            ("pathlib", "PosixPath"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        }
    )
    _DTYPES = frozenset({"float32", "bfloat16", "float64", "int64", "int32", "uint8"})

    def find_class(self, module: str, name: str) -> Any:
        """The class, where it is on the list."""
        if (module, name) in self._ALLOWED or (module == "torch" and name in self._DTYPES):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the metadata file names {module}.{name}, which a checkpoint does not contain")
