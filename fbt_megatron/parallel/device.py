"""Which device a process computes on."""

from __future__ import annotations

import torch

from fbt_megatron.errors import TopologyError
from fbt_megatron.parallel.launcher import Launch


def device_of(launch: Launch) -> torch.device:
    """The GPU of this process, or the CPU where there is none. A launcher may show each process its own GPU only.

    Raises TopologyError where this node has fewer GPUs than processes.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if visible > 1 and launch.local_rank >= visible:
        raise TopologyError(
            f"process {launch.local_rank} of this node (counted from 0) finds {visible} GPUs: start at most one "
            "process per GPU."
        )
    return torch.device("cuda", launch.local_rank if visible > 1 else 0)
