"""One process with megatron-core's groups for the tests of this folder."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed


@pytest.fixture(scope="package")
def topology() -> Iterator[ParallelTopology]:
    torch.set_num_threads(1)
    started_here = not dist.is_initialized()
    if started_here:
        init_distributed()
    yield build_topology(ParallelConfig())
    if started_here:
        shutdown_distributed()
