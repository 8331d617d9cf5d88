"""Cost of the NorMuon and Adam update, beside AdamW on the same parameters and gradients.

Measured, in turn within each repetition, for the 1-pass step of configs/quickstart.yaml on random tokens:
- forward and backward of all micro-batches;
- AdamW: `torch.optim.AdamW` (PyTorch's default implementation) with norm and clipping, on copies of the parameters and
  of the gradients that the step uses;
- NorMuon+Adam: the engine's whole update with the same gradients, i.e. finite check, norm, clipping, NorMuon, Adam and
  the copy between ZeRO's flat weights and the parameters.
Time is processor time on a CPU and wall-clock time on a GPU. A share is that of the update in a step of forward,
backward and update; it falls as a step has more tokens or passes.

  python benchmarks/optimizer_cost.py [--repetitions N] [--json]
"""

from __future__ import annotations

import sys

import torch
from common.measure import Row, parse_arguments, ratios, report, seconds
from common.workload import TrainingStep, quickstart
from torch.nn import Parameter

from fbt_megatron.training.gradients import accumulated_gradient

GRADIENTS, ADAMW, NORMUON = "forward and backward", "AdamW", "NorMuon+Adam"


def main() -> int:
    """Run the benchmark; returns the exit status."""
    arguments = parse_arguments(__doc__, repetitions=15)
    with quickstart(quick=arguments.quick) as step:
        peer = AdamWPeer(step)
        times: dict[str, list[float]] = {GRADIENTS: [], ADAMW: [], NORMUON: []}
        for repetition in range(-1, arguments.repetitions):
            spent = _one_round(step, peer, adamw_first=repetition % 2 == 0)
            if repetition >= 0:
                for name, value in spent.items():
                    times[name].append(value)
        setting = step.setting
    steps = {
        name: [sum(parts) for parts in zip(times[GRADIENTS], times[name], strict=True)] for name in (ADAMW, NORMUON)
    }
    rows = [Row.over(f"{name}, seconds", values) for name, values in times.items()]
    rows += [Row.over(f"{name}, share of the step", ratios(times[name], steps[name])) for name in steps]
    rows.append(Row.over(f"{NORMUON} / {ADAMW}, update", ratios(times[NORMUON], times[ADAMW])))
    rows.append(Row.over(f"{NORMUON} / {ADAMW}, whole step", ratios(steps[NORMUON], steps[ADAMW])))
    report("optimizer_cost", setting, rows, as_json=arguments.json)
    return 0


class AdamWPeer:
    """`torch.optim.AdamW` on copies of a model's parameters."""

    def __init__(self, step: TrainingStep) -> None:
        self._originals = list(step.model.parameters())
        self._copies = [Parameter(parameter.detach().float().clone()) for parameter in self._originals]
        self._optimizer = torch.optim.AdamW(self._copies, lr=step.config.optimizer.adam.lr)
        self._max_norm = step.config.optimizer.grad_clip

    def copy_gradients(self) -> None:
        """Take over the gradients that the next step of the original would use."""
        for copy, original in zip(self._copies, self._originals, strict=True):
            gradient = accumulated_gradient(original)
            copy.grad = None if gradient is None else gradient.detach().float().clone().view_as(copy)

    def update(self) -> None:
        """Clip and step."""
        torch.nn.utils.clip_grad_norm_(self._copies, self._max_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()


def _one_round(step: TrainingStep, peer: AdamWPeer, *, adamw_first: bool) -> dict[str, float]:
    spent = {GRADIENTS: seconds(lambda: step.compute_gradients(1, step.batches))}
    peer.copy_gradients()
    updates = [(ADAMW, peer.update), (NORMUON, lambda: step.update(1))]
    for name, update in updates if adamw_first else reversed(updates):
        spent[name] = seconds(update)
    return spent


if __name__ == "__main__":
    sys.exit(main())
