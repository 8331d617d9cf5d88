"""One process with megatron-core's groups for the tests of this folder, and a run in it."""

from collections.abc import Iterator

import pytest

from fbt_megatron.parallel.topology import ParallelTopology
from tests.evaluation.trained_run import Trained
from tests.one_process import one_process


@pytest.fixture(scope="package")
def topology() -> Iterator[ParallelTopology]:
    with one_process() as topology:
        yield topology


@pytest.fixture(scope="package")
def trained(topology: ParallelTopology, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), topology)
