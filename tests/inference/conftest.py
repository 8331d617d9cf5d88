"""One process with megatron-core's groups; code of exported models is copied to a folder of the tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed

# Read where transformers is imported, so before any test file is.
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="hf_modules_"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="package")
def topology() -> Iterator[ParallelTopology]:
    torch.set_num_threads(1)
    started_here = not dist.is_initialized()
    if started_here:
        init_distributed()
    yield build_topology(ParallelConfig())
    if started_here:
        shutdown_distributed()
