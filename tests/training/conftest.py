"""The topology of one process, which DeepSpeed and megatron-core need even alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fbt_megatron.parallel.topology import ParallelTopology
from tests.one_process import one_process


@pytest.fixture(scope="module")
def topology() -> Iterator[ParallelTopology]:
    """One rank; torch.distributed runs while the module's tests do."""
    with one_process() as topology:
        gc.freeze()  # DeepSpeed collects garbage several times per engine: what was imported is not looked at again
        yield topology
        gc.unfreeze()
