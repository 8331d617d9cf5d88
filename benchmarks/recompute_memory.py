"""Peak memory of forward and backward with 3 passes over that with 1 pass, for each kind of recomputation.

Measured: all storages that PyTorch allocates while one micro-batch of configs/quickstart.yaml goes forward and backward
(activations, gradients of activations, temporaries; gradients of parameters exist before), and the largest sum of those
alive at one time. That is a count and not a measurement, so it has no spread. What `full` has to keep of the passes
before is the state that each later pass receives; it is given beside the peak. Time is processor time on a CPU and
wall-clock time on a GPU.

  python benchmarks/recompute_memory.py [--repetitions N] [--json]
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from common.measure import Row, parse_arguments, ratios, report, time_in_turn
from common.workload import TrainingStep, quickstart
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PASSES = (1, 3)
KINDS = ("none", "selective", "full")
MIB = 2**20


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=5)
    with quickstart(quick=arguments.quick) as base:
        steps = {kind: base.with_recompute(kind) for kind in KINDS}
        most = max(PASSES)
        sides: dict[str, Callable[[], object]] = {kind: partial(_gradients, steps[kind], most) for kind in KINDS}
        times = time_in_turn(sides, repetitions=arguments.repetitions)
        peaks = {kind: {passes: _peak_bytes(step, passes) for passes in PASSES} for kind, step in steps.items()}
        setting, state = base.setting, _state_bytes(base)
    rows = [row for kind in KINDS for row in _rows(kind, peaks[kind], state)]
    rows += [Row.over(f"{kind} / none, time of 3 passes", ratios(times[kind], times["none"])) for kind in KINDS[1:]]
    report("recompute_memory", f"{setting}; a state is {state / MIB:.3f} MiB", rows, as_json=arguments.json)
    return 0


def _rows(kind: str, peaks: dict[int, int], state: int) -> Iterator[Row]:
    one, three = (peaks[passes] for passes in PASSES)
    yield Row.over(f"{kind}, 1 pass, MiB at the peak", [one / MIB])
    yield Row.over(f"{kind}, 3 passes, MiB at the peak", [three / MIB])
    yield Row.over(f"{kind}, 3 passes / 1 pass", [three / one])
    yield Row.over(f"{kind}, 3 passes less 2 states / 1 pass", [(three - 2 * state) / one])


def _gradients(step: TrainingStep, num_passes: int) -> None:
    step.compute_gradients(num_passes, step.batches[:1])


def _state_bytes(step: TrainingStep) -> int:
    """Size of what one pass hands to the next."""
    rows, config = step.config.train.micro_batch_size, step.config.model
    return rows * config.seq_length * config.hidden_size * step.model.config.params_dtype.itemsize


def _peak_bytes(step: TrainingStep, num_passes: int) -> int:
    _gradients(step, max(PASSES))  # from here on every parameter has a gradient to add to
    with LiveBytes() as live:
        _gradients(step, num_passes)
    step.engine.zero_grad()
    return live.peak


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations allocate, as long as each is alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if _has_storage(tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if _has_storage(tensor):
                self._count(tensor.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        address = storage._cdata
        if address not in self._known and address not in before:
            self._known.add(address)
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
            weakref.finalize(storage, self._gone, address, storage.nbytes())

    def _gone(self, address: int, size: int) -> None:
        self._known.discard(address)
        self._now -= size


def _has_storage(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


if __name__ == "__main__":
    sys.exit(main())
