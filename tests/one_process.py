"""torch.distributed and megatron-core's groups in the process of the tests, which need them even alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, init_distributed, shutdown_distributed


@contextmanager
def one_process() -> Iterator[ParallelTopology]:
    """The topology of one rank; an outer block that is open already stays so."""
    torch.set_num_threads(1)
    started_here = not dist.is_initialized()
    if started_here:
        init_distributed()
    yield build_topology(ParallelConfig())
    if started_here:
        shutdown_distributed()
