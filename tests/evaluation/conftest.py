"""One process with megatron-core's groups, and a run in it; libraries look nothing up in the network."""

import os
import tempfile
from collections.abc import Iterator

import pytest

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed
from tests.evaluation.trained_run import Trained

# Read where these libraries are imported, so before any test file is.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_CACHE", tempfile.mkdtemp(prefix="hf_datasets_"))


@pytest.fixture(scope="package")
def topology() -> Iterator[ParallelTopology]:
    init_distributed()
    yield build_topology(ParallelConfig())
    shutdown_distributed()


@pytest.fixture(scope="package")
def trained(topology: ParallelTopology, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), topology)
