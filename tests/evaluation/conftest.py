"""One process with megatron-core's groups."""

from collections.abc import Iterator

import pytest

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed


@pytest.fixture(scope="module")
def topology() -> Iterator[ParallelTopology]:
    init_distributed()
    yield build_topology(ParallelConfig())
    shutdown_distributed()
