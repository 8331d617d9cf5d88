"""One process with megatron-core's groups for the tests of this folder."""

from collections.abc import Iterator

import pytest

from fbt_megatron.parallel.topology import ParallelTopology
from tests.one_process import one_process


@pytest.fixture(scope="package")
def topology() -> Iterator[ParallelTopology]:
    with one_process() as topology:
        yield topology
