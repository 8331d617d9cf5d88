"""Cost of a training step with 2 and 3 passes, over a step with 1 pass.

Measured: the whole optimizer step of configs/quickstart.yaml (forward and backward of all passes and micro-batches,
then norm, clipping, NorMuon and Adam in the engine), on random tokens, the three numbers of passes in turn. Time is
processor time on a CPU and wall-clock time on a GPU. Memory is what autograd keeps for the backward pass of one
micro-batch: the sizes of all distinct storages that it saves, without parameters. That is a count and not a
measurement, so it has no spread.

  python benchmarks/pass_cost.py [--repetitions N] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from common.measure import Row, parse_arguments, ratios, report, time_in_turn
from common.workload import TrainingStep, quickstart
from torch import Tensor

PASSES = (1, 2, 3)
MIB = 2**20


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=5)
    with quickstart(quick=arguments.quick) as step:
        sides: dict[str, Callable[[], object]] = {_name(passes): partial(step.run, passes) for passes in PASSES}
        times = time_in_turn(sides, repetitions=arguments.repetitions)
        kept = {_name(passes): _kept_for_backward(step, passes) for passes in PASSES}
        setting = step.setting
    one = _name(1)
    rows = [Row.over(f"{name}, seconds", values) for name, values in times.items()]
    rows += [Row.over(f"{name} / {one}, time", ratios(times[name], times[one])) for name in times if name != one]
    rows += [Row.over(f"{name}, MiB kept for backward", [size / MIB]) for name, size in kept.items()]
    rows += [Row.over(f"{name} / {one}, memory", [kept[name] / kept[one]]) for name in kept if name != one]
    report("pass_cost", setting, rows, as_json=arguments.json)
    return 0


def _name(passes: int) -> str:
    return "1 pass" if passes == 1 else f"{passes} passes"


def _kept_for_backward(step: TrainingStep, num_passes: int) -> int:
    """Bytes that autograd saves for one micro-batch; parameters, which exist anyway, are left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in step.model.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.compute_gradients(num_passes, step.batches[:1])
    step.engine.zero_grad()
    return sum(size for address, size in sizes.items() if address not in parameters)


if __name__ == "__main__":
    sys.exit(main())
