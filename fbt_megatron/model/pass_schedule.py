"""How many passes each optimizer step runs, and the weight of each pass in the objective.

The number of passes is a pure function of (seed, step). Inside a phase the counts never stray: after any n steps of it,
each number of passes K has occurred share_K * n times, give or take one. So a rare K is neither bunched nor late,
wherever a run is cut, resumed or read off.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice

from fbt_megatron.config.schema import FeedbackConfig

_ROUNDING = 1e-9
"""Slack for the rounding of share * n, so that the promised bounds hold for the exact product."""


@dataclass(frozen=True)
class PassPlan:
    """The passes of one step. `weights[k - 1]` is the weight of L_k, the loss of pass k, in the objective."""

    num_passes: int
    weights: tuple[float, ...]

    @property
    def uses_feedback(self) -> bool:
        """True where a pass reads the state of the one before, i.e. the fusion's parameters take part."""
        return self.num_passes > 1


def build_pass_plan(feedback: FeedbackConfig, num_passes: int) -> PassPlan:
    """The plan of a step with `num_passes` passes.

    L = L_1 + lambda * mean_{k>=2} L_k, or the sum in place of the mean.
    Source: arXiv 2608.08888, Eq. 12 (mean) and its listing (sum).
    """
    later = feedback.loss_weight
    if feedback.loss_reduction == "mean" and num_passes > 1:
        later /= num_passes - 1
    return PassPlan(num_passes, (1.0,) + (later,) * (num_passes - 1))


class PassSchedule:
    """The plan of every step of a run; build it with `build_pass_schedule`."""

    def __init__(self, phases: list[_Phase], plans: dict[int, PassPlan]) -> None:
        self._phases = phases
        self._plans = plans

    def plan(self, step: int) -> PassPlan:
        """The plan of `step`, counted from 1. Constant time once the step's phase has been laid out.

        Raises `ValueError` outside the run.
        """
        for phase in self._phases:
            if phase.first <= step <= phase.last:
                return self._plans[phase.num_passes(step)]
        raise ValueError(f"step {step} is outside the run: steps are counted from 1 to {self._phases[-1].last}")

    def passes_after(self, step: int) -> int:
        """Number of passes that all steps after `step` run together."""
        return sum(phase.passes_after(step) for phase in self._phases)

    def counts(self) -> list[dict[int, int]]:
        """For each phase, the number of steps at each number of passes of its mix, in rising order of passes."""
        return [phase.counts() for phase in self._phases]


def build_pass_schedule(feedback: FeedbackConfig, *, steps: int, seed: int) -> PassSchedule:
    """The schedule of a run of `steps` steps. `feedback.schedule` must cover the run (a rule of the configuration)."""
    phases = []
    first = 1
    for index, phase in enumerate(feedback.schedule):
        last = phase.last_step(steps)
        mix = {num_passes: share for num_passes, share in sorted(phase.mix.items()) if share > 0}
        phases.append(_Phase(first, last, mix, f"passes of phase {index} from seed {seed}"))
        first = last + 1
    plans = {num_passes: build_pass_plan(feedback, num_passes) for phase in phases for num_passes in phase.mix}
    return PassSchedule(phases, plans)


@dataclass(frozen=True)
class _Phase:
    """Steps `first` to `last` with the mix {number of passes: share}. The order is laid out when it is first needed."""

    first: int
    last: int
    mix: dict[int, float]
    seed: str

    def num_passes(self, step: int) -> int:
        return self._order[step - self.first] if len(self.mix) > 1 else next(iter(self.mix))

    def counts(self) -> dict[int, int]:
        if len(self.mix) == 1:
            return dict.fromkeys(self.mix, self.last - self.first + 1)
        found = Counter(self._order)
        return {num_passes: found[num_passes] for num_passes in self.mix}

    def passes_after(self, step: int) -> int:
        done = min(max(step - self.first + 1, 0), self.last - self.first + 1)
        if len(self.mix) == 1:
            return next(iter(self.mix)) * (self.last - self.first + 1 - done)
        return self._total - (self._sums[done - 1] if done else 0)

    @cached_property
    def _sums(self) -> array[int]:
        """Passes of the first n steps, for n = 1, 2, ..."""
        return array("Q", accumulate(self._order))

    @property
    def _total(self) -> int:
        return self._sums[-1]

    @cached_property
    def _order(self) -> array[int]:
        classes = list(self.mix)
        order = _shuffled_chairman_order(list(self.mix.values()), random.Random(self.seed))
        return array("I", (classes[chosen] for chosen in islice(order, self.last - self.first + 1)))


def _shuffled_chairman_order(shares: list[float], rng: random.Random) -> Iterator[int]:
    """An endless order of class numbers with |count_i(n) - share_i * n| <= 1 after every n, drawn by `rng`.

    One entry of the chairman order is held back. Whenever the next one is of another class, the two compete for the
    slot in proportion to their shares, so that a rare class is held back for a while, up to its bound. If the held
    entry takes the slot, the counts are those of the chairman order; if the next one does, they differ from these in
    the two classes only, whose bounds are checked. An entry depends on those before it alone: a longer phase has the
    same order and then some.
    """
    total = sum(shares)
    shares = [share / total for share in shares]
    counts = [0] * len(shares)
    source = _chairman_order(shares)
    held = next(source)
    for slot, rival in enumerate(source, start=1):
        chosen, kept = held, rival
        if rival != held and rng.random() * (shares[held] + shares[rival]) < shares[rival]:
            held_lags = shares[held] * slot - counts[held]
            rival_leads = counts[rival] + 1 - shares[rival] * slot
            if max(held_lags, rival_leads) <= 1.0 - _ROUNDING:
                chosen, kept = rival, held
        counts[chosen] += 1
        held = kept
        yield chosen


def _chairman_order(shares: list[float]) -> Iterator[int]:
    """The endless order of c >= 2 classes with |count_i(n) - share_i * n| <= 1 - 1/(2c - 2) after every n.

    The shares add up to 1.
    Slot n goes, among the classes that lag by 1/(2c - 2) or more, to the one that must have it soonest.
    Source: R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980) 323-330.
    """
    margin = 1.0 / (2 * len(shares) - 2)
    counts = [0] * len(shares)
    slot = 0
    while True:
        slot += 1
        chosen, soonest = -1, float("inf")
        for number, share in enumerate(shares):
            lag = share * slot - counts[number]
            slots_left = (1.0 - margin - lag) / share
            if lag >= margin - _ROUNDING and slots_left < soonest:
                chosen, soonest = number, slots_left
        counts[chosen] += 1
        yield chosen
