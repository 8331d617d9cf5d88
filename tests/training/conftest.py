"""The topology of one process, which DeepSpeed and megatron-core need even alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed


@pytest.fixture(scope="module")
def topology() -> Iterator[ParallelTopology]:
    """One rank; torch.distributed runs while the module's tests do."""
    init_distributed()
    gc.freeze()  # DeepSpeed collects garbage several times per engine; what was imported need not be looked at again
    yield build_topology(ParallelConfig())
    gc.unfreeze()
    shutdown_distributed()
