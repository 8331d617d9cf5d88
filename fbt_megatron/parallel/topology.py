"""Starts torch.distributed, builds megatron-core's process groups, and owns ranks and the device.

Process order is megatron-core's: tensor parallel varies fastest, then data parallel, then pipeline.
"""

from __future__ import annotations

import datetime
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from fbt_megatron.config.schema import ParallelConfig
from fbt_megatron.errors import PeerError, TopologyError
from fbt_megatron.parallel.collectives import COLLECTIVE_SECONDS
from fbt_megatron.parallel.device import device_of
from fbt_megatron.parallel.launcher import Launch, find_launch


@dataclass(frozen=True)
class ParallelTopology:
    """Sizes, this process's ranks, its device and its process groups."""

    world_size: int
    rank: int
    local_rank: int
    """Number of this process on its node; on a GPU the number of the GPU among those that the process sees."""
    tp_size: int
    pp_size: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    device: torch.device
    pg: ProcessGroupCollection
    """megatron-core's groups: `.tp .pp .dp .mp .embd` and more."""
    tp_dp_group: dist.ProcessGroup
    """Tensor-and-data-parallel group of this pipeline stage: NorMuon exchanges matrices over it."""

    @property
    def is_first_stage(self) -> bool:
        """True on the first pipeline stage, which holds embedding and fusion."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True on the last pipeline stage, which holds final norm and head."""
        return self.pp_rank == self.pp_size - 1


def init_distributed(launch: Launch | None = None, *, timeout_seconds: float = COLLECTIVE_SECONDS) -> None:
    """Start torch.distributed among the processes of a launch (default: the one that the environment tells of).

    Raises TopologyError when only part of a launcher's variables is set or this node has fewer GPUs than processes, and
    PeerError when the processes do not find each other: that may be another at the next start.
    """
    launch = launch or find_launch(os.environ)
    timeout = datetime.timedelta(seconds=timeout_seconds)
    device = device_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if launch.launcher == "none":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    # torchrun's agent may already serve the meeting point, which only env:// knows.
    where = "env://" if launch.launcher == "torchrun" else f"tcp://{launch.address}:{launch.port}"
    try:
        dist.init_process_group(
            backend, init_method=where, rank=launch.rank, world_size=launch.world_size, timeout=timeout
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise PeerError(
            f"rank {launch.rank} of {launch.world_size} did not meet the others at {launch.address}:{launch.port}: "
            f"{str(error).splitlines()[0]} Check that rank 0 runs on that host, or set MASTER_ADDR and MASTER_PORT."
        ) from error


def build_topology(parallel: ParallelConfig, *, timeout_seconds: float = COLLECTIVE_SECONDS) -> ParallelTopology:
    """Build megatron-core's groups for a layout; needs `init_distributed` before. Their time limit is in whole minutes.

    Raises TopologyError when the factors do not divide the number of processes.
    """
    world_size = dist.get_world_size()
    model_size = parallel.tensor * parallel.pipeline
    if world_size % model_size:
        raise TopologyError(
            f"{world_size} processes do not fit parallel.tensor ({parallel.tensor}) x parallel.pipeline "
            f"({parallel.pipeline}) = {model_size}: start a multiple of {model_size}."
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            parallel.tensor,
            parallel.pipeline,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=math.ceil(timeout_seconds / 60),
        )
    launch = find_launch(os.environ)
    device = device_of(launch)
    return ParallelTopology(
        world_size=world_size,
        rank=dist.get_rank(),
        local_rank=launch.local_rank if device.index is None else device.index,
        tp_size=parallel.tensor,
        pp_size=parallel.pipeline,
        dp_size=world_size // model_size,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        device=device,
        pg=ProcessGroupCollection.use_mpu_process_groups(),
        tp_dp_group=parallel_state.get_tensor_and_data_parallel_group(),
    )


def shutdown_distributed() -> None:
    """Tear down megatron-core's groups and torch.distributed."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
