"""Runs the passes of all micro-batches of a step through this stage, in a pipeline by megatron-core's schedules.

K passes over a pipeline are the interleaved 1F1B schedule with K model chunks: its wrap-around hop, from the last
stage's chunk k to the first stage's chunk k + 1, carries the top state to the next pass, and its gradient back. The
chunks are thin views that hold no weights of their own. One pass is plain 1F1B. The number of passes may change from
step to step.

Legend: `M` micro-batches of a step, `K` passes, `B` rows of a micro-batch, `S` tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from fbt_megatron.parallel.mcore_compat import on_cpu_without_gpu
from fbt_megatron.parallel.topology import ParallelTopology

StagePass = Callable[[int, int, Tensor | None], Tensor]
"""(pass from 0, micro-batch from 0, received) -> output of one pass of this stage.

`received` is the output of the stage before, on the first stage that of the last one in the pass before (None in pass
0). The output of pass K - 1 on the last stage is the scalar to run backward from. Every other output is a hidden state
whose memory is freed once it is handed on: it must be a tensor of its own, not a view, that nothing else needs.
"""


def run_passes(
    stage_pass: StagePass,
    *,
    num_passes: int,
    num_micro_batches: int,
    batch_shape: tuple[int, int],
    config: TransformerConfig,
    topology: ParallelTopology,
    backward: bool,
) -> None:
    """Call `stage_pass` for each pass of each micro-batch, and run backward from what its last calls return.

    `batch_shape` is (B, S). Every rank of a pipeline calls this with the same numbers, and M is at least the number of
    stages. `config` is changed during the call only.
    """
    if topology.pp_size == 1:
        _run_in_turn(stage_pass, num_passes, num_micro_batches, backward=backward)
        return
    views = [_PassView(config, pass_idx) for pass_idx in range(num_passes)]
    rows, seq_length = batch_shape
    arguments = {
        "forward_step_func": _forward_step(stage_pass, num_micro_batches),
        "num_microbatches": num_micro_batches,
        "seq_length": seq_length,
        "micro_batch_size": rows,
        "forward_only": not backward,
    }
    with on_cpu_without_gpu():
        if num_passes == 1:
            schedules.forward_backward_pipelining_without_interleaving(
                model=views[0], data_iterator=iter(range(num_micro_batches)), **arguments
            )
            return
        group_size = micro_batch_group_size(num_micro_batches, pp_size=topology.pp_size)
        with _virtual_stages(config, num=num_passes, group_size=group_size):
            schedules.forward_backward_pipelining_with_interleaving(
                model=views, data_iterator=[iter(range(num_micro_batches)) for _ in views], **arguments
            )


def micro_batch_group_size(num_micro_batches: int, *, pp_size: int) -> int:
    """How many micro-batches run through one pass before the next begins.

    The smallest N >= pp_size for which the last group, M mod N, is empty or fills the pipeline as well: with fewer, the
    first stage would wait for a state that the last has not computed. Needs M >= pp_size (a rule of the configuration).
    """
    return next(
        size
        for size in range(pp_size, num_micro_batches + 1)
        if num_micro_batches % size == 0 or num_micro_batches % size >= pp_size
    )


class _PassView(nn.Module):
    """One pass of the stage, in the form of the model chunks that the schedules know."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, config: TransformerConfig, pass_idx: int) -> None:
        super().__init__()
        self.config = config
        self.pass_idx = pass_idx
        self.received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        """Called by the schedule with what the stage before has sent."""
        self.received = tensors[0]


def _run_in_turn(stage_pass: StagePass, num_passes: int, num_micro_batches: int, *, backward: bool) -> None:
    for index in range(num_micro_batches):
        output = stage_pass(0, index, None)
        for pass_idx in range(1, num_passes):
            output = stage_pass(pass_idx, index, output)
        if backward:
            torch.autograd.backward(output)


def _forward_step(
    stage_pass: StagePass, num_micro_batches: int
) -> Callable[[Iterator[int], _PassView], tuple[Tensor, Callable[[Tensor], tuple[Tensor, None]]]]:
    def undo_mean(objective: Tensor) -> tuple[Tensor, None]:
        return objective * num_micro_batches, None  # the schedule divides by it, in place

    def forward_step(indices: Iterator[int], view: _PassView) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, None]]]:
        return stage_pass(view.pass_idx, next(indices), view.received), undo_mean

    return forward_step


@contextmanager
def _virtual_stages(config: TransformerConfig, *, num: int, group_size: int) -> Iterator[None]:
    """Tell megatron-core of `num` chunks per rank, and forget it afterwards: a one-pass step has none."""
    parallel_state.set_virtual_pipeline_model_parallel_world_size(num)
    config.virtual_pipeline_model_parallel_size = num
    config.microbatch_group_size_per_vp_stage = group_size
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        config.virtual_pipeline_model_parallel_size = None
        config.microbatch_group_size_per_vp_stage = None
