"""What DeepSpeed is told: every option that touches the optimizer path, and the process groups.

Defaults of these options moved within DeepSpeed's 0.19 series, so none is left to the library.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.parallel.topology import ParallelTopology

_BUCKET_ELEMENTS = 2**27
"""Elements per reduction and gather: 512 MiB in fp32, large enough for full bandwidth on any network."""


def deepspeed_config(config: RunConfig) -> dict[str, Any]:
    """DeepSpeed's configuration for one of the covered combinations: ZeRO 0 or 1 in fp32, ZeRO 1 in bf16.

    Gradients are accumulated in fp32, averaged over data parallel in fp32 and clipped by their raw global norm; the
    caller says when a step ends, and DeepSpeed applies no accumulation factor. At stage 0 DeepSpeed's own clipping is
    wrong under pipeline parallelism and stays off: `TrainEngine` clips.
    """
    parallel = config.parallel
    return {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.optimizer.grad_clip if parallel.zero_stage else 0.0,
        "gradient_allreduce_op": "mean",
        "gradient_predivide_factor": 1.0,
        "prescale_gradients": False,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32", "keep_in_fp32_modules": []},
        "fp16": {"enabled": False},
        "bf16": _bf16_section(enabled=parallel.precision == "bf16"),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": _zero_section(parallel.zero_stage),
        **_LOGGING_OFF,
    }


_LOGGING_OFF: dict[str, Any] = {
    "log_level": "error",
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "timers": {"throughput": {"enabled": False, "synchronized": False}},
}


def _bf16_section(*, enabled: bool) -> dict[str, Any]:
    """`immediate_grad_update` moves each gradient to the fp32 buffer as backward produces it.

    Without it only DeepSpeed's own backward call does that, and gradients of any other schedule never arrive.
    """
    return {
        "enabled": enabled,
        "immediate_grad_update": enabled,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }


def _zero_section(stage: int) -> dict[str, Any]:
    """No hooks and no overlap: gradients stay where they are until the step, over the many backward passes of one."""
    return {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "use_multi_rank_bucket_allreduce": False,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
        "allgather_partitions": True,
        "allgather_bucket_size": _BUCKET_ELEMENTS,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "compute_grad_norm": True,
        "ignore_unused_parameters": True,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
    }


class ModelParallelUnit:
    """DeepSpeed's view of the topology (its `mpu` argument): model parallel is tensor times pipeline.

    It must not define `initialize_sequence_parallel`: DeepSpeed takes that method as the sign of another protocol and
    would ignore the model-parallel group, so every norm would be a rank's own.
    """

    def __init__(self, topology: ParallelTopology) -> None:
        self._topology = topology

    def get_model_parallel_world_size(self) -> int:
        return self._topology.tp_size * self._topology.pp_size

    def get_model_parallel_rank(self) -> int:
        return self._topology.tp_rank + self._topology.tp_size * self._topology.pp_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.pg.mp

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._topology.tp_size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._topology.tp_rank

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.pg.tp

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._topology.pp_size

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._topology.pp_rank

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.pg.pp

    def get_data_parallel_world_size(self) -> int:
        return self._topology.dp_size

    def get_data_parallel_rank(self) -> int:
        return self._topology.dp_rank

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._topology.pg.dp

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._topology.pg.dp)
