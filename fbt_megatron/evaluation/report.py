"""Results of a benchmark in figures: pass@k with intervals, and the modes compared on the same problems.

Problems are the independent cases. With one sample each, pass@1 is the share of problems solved and its interval that
of Wilson; with several samples pass@k is a mean of estimates between 0 and 1, for which the interval is at most too
wide. Two modes are compared by the problems of which one has solved more samples than the other: McNemar's test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.benchmark import TOO_LONG, expected_keys
from fbt_megatron.evaluation.results import Answer, AnswerKey
from fbt_megatron.evaluation.statistics import mcnemar_test, pass_at_k, wilson_interval

_COMMON_K = (1, 5, 10, 50, 100)


@dataclass(frozen=True)
class PassRate:
    """pass@k of one mode."""

    k: int
    value: float
    low: float
    high: float
    """Ends of the 95% interval."""


@dataclass(frozen=True)
class ModeReport:
    """One mode."""

    mode: str
    rates: tuple[PassRate, ...]
    num_correct: int
    """Of all samples of all problems."""
    num_answers: int
    num_cut_off: int
    """Answers that ended at the longest length or at the end of the context."""
    num_too_long: int
    """Answers that were never begun, because the prompt is longer than the model's context; they count as wrong."""
    mean_tokens: float


@dataclass(frozen=True)
class PairReport:
    """Two modes on the same problems."""

    first: str
    second: str
    difference: float
    """pass@1 of the second minus that of the first."""
    only_first: int
    """Problems of which the first has solved more samples."""
    only_second: int
    p_value: float
    """That they would differ so much, or more, if both were equally good."""


@dataclass(frozen=True)
class BenchmarkReport:
    """All modes."""

    num_problems: int
    modes: tuple[ModeReport, ...]
    pairs: tuple[PairReport, ...]


def make_report(
    answers: Mapping[AnswerKey, Answer], *, problems: Sequence[str], modes: Sequence[str], num_samples: int
) -> BenchmarkReport:
    """Figures of complete results; raises EvaluationError where answers are missing."""
    expected = expected_keys(problems, modes, num_samples)
    missing = sorted(expected - answers.keys())
    if missing:
        first = missing[0]
        raise EvaluationError(
            f"{len(missing):,} of {len(expected):,} answers are missing, such as sample {first.sample} of problem "
            f"{first.problem} in mode {first.mode}. Start the benchmark again with the same command: it goes on."
        )
    solved = {mode: _solved(answers, mode, problems, num_samples) for mode in modes}
    return BenchmarkReport(
        num_problems=len(problems),
        modes=tuple(
            _of_mode(mode, solved[mode], [answers[key] for key in expected if key.mode == mode], num_samples)
            for mode in modes
        ),
        pairs=tuple(_of_pair(a, b, solved[a], solved[b], num_samples) for a, b in combinations(modes, 2)),
    )


def _solved(
    answers: Mapping[AnswerKey, Answer], mode: str, problems: Sequence[str], num_samples: int
) -> dict[str, int]:
    """How many samples of each problem are right."""
    return {
        problem: sum(answers[AnswerKey(mode, problem, sample)].correct for sample in range(num_samples))
        for problem in problems
    }


def _of_mode(mode: str, solved: Mapping[str, int], answers: Sequence[Answer], num_samples: int) -> ModeReport:
    finishes = Counter(answer.finish for answer in answers)
    rates = []
    for k in sorted({*(k for k in _COMMON_K if k <= num_samples), num_samples}):
        value = fmean(pass_at_k(num_samples, count, k) for count in solved.values())
        rates.append(PassRate(k, value, *wilson_interval(value, len(solved))))
    return ModeReport(
        mode=mode,
        rates=tuple(rates),
        num_correct=sum(solved.values()),
        num_answers=len(answers),
        num_cut_off=finishes["length"] + finishes["context"],
        num_too_long=finishes[TOO_LONG],
        mean_tokens=fmean(answer.num_tokens for answer in answers),
    )


def _of_pair(
    first: str, second: str, solved_first: Mapping[str, int], solved_second: Mapping[str, int], num_samples: int
) -> PairReport:
    differences = [solved_second[problem] - solved_first[problem] for problem in solved_first]
    only_first, only_second = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    return PairReport(
        first=first,
        second=second,
        difference=fmean(differences) / num_samples,
        only_first=only_first,
        only_second=only_second,
        p_value=mcnemar_test(only_first, only_second),
    )


def table(report: BenchmarkReport) -> Iterator[str]:
    """The report for a terminal."""
    yield f"{report.num_problems:,} problems"
    head = f"{'mode':12} {'':8} {'share':>7} {'95% interval':>17}"
    yield f"{head} {'correct':>15} {'cut off':>8} {'too long':>9} {'tokens':>8}"
    for one in report.modes:
        for number, rate in enumerate(one.rates):
            line = f"{'' if number else one.mode:12} {f'pass@{rate.k}':8} {rate.value:7.1%} "
            line += f"{f'{rate.low:.1%} - {rate.high:.1%}':>17}"
            if not number:
                correct = f"{one.num_correct:,}/{one.num_answers:,}"
                line += f" {correct:>15} {one.num_cut_off:8,} {one.num_too_long:9,} {one.mean_tokens:8.1f}"
            yield line
    if report.pairs:
        yield f"{'pair':28} {'difference':>10} {'only first':>11} {'only second':>12} {'p (McNemar)':>12}"
    for pair in report.pairs:
        names = f"{pair.first} / {pair.second}"
        p_value = f"{pair.p_value:.4f}" if pair.p_value >= 1e-4 else f"{pair.p_value:.1e}"
        yield f"{names:28} {pair.difference:+10.1%} {pair.only_first:11,} {pair.only_second:12,} {p_value:>12}"
