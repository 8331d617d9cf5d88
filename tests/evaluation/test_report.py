"""Reports of results that are made up: every figure by hand."""

from __future__ import annotations

import pytest

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.report import make_report, table
from fbt_megatron.evaluation.results import Answer, AnswerKey
from fbt_megatron.evaluation.statistics import mcnemar_test, wilson_interval


def answers_of(marks: dict[str, list[str]]) -> dict[AnswerKey, Answer]:
    """`marks` of each mode: a word per problem with a letter per sample: y right, n wrong, c wrong and cut off."""
    found = [
        Answer(mode, str(number), sample, "text", 10 + number, "length" if mark == "c" else "eos", mark == "y", None)
        for mode, words in marks.items()
        for number, word in enumerate(words)
        for sample, mark in enumerate(word)
    ]
    return {answer.key: answer for answer in found}


def test_one_sample_each() -> None:
    marks = {"standard": list("ynnyy"), "soft": list("ynynn"), "fused-2": list("yyyyc")}
    report = make_report(answers_of(marks), problems=list("01234"), modes=list(marks), num_samples=1)
    assert report.num_problems == 5
    assert [(one.mode, one.num_correct, one.num_cut_off) for one in report.modes] == [
        ("standard", 3, 0), ("soft", 2, 0), ("fused-2", 4, 1),
    ]  # fmt: skip
    (rate,) = report.modes[0].rates
    assert (rate.k, rate.value, rate.low, rate.high) == (1, 0.6, *wilson_interval(0.6, 5))
    assert report.modes[0].mean_tokens == 12
    pairs = {(pair.first, pair.second): (pair.only_first, pair.only_second) for pair in report.pairs}
    assert pairs == {("standard", "soft"): (2, 1), ("standard", "fused-2"): (1, 2), ("soft", "fused-2"): (0, 2)}
    assert [pair.p_value for pair in report.pairs] == [mcnemar_test(2, 1), mcnemar_test(1, 2), mcnemar_test(0, 2)]
    assert [round(pair.difference, 9) for pair in report.pairs] == [-0.2, 0.2, 0.4]
    lines = list(table(report))
    assert lines[2].split() == ["standard", "pass@1", "60.0%", "23.1%", "-", "88.2%", "3/5", "0", "0", "12.0"]
    assert lines[6].split() == ["standard", "/", "soft", "-20.0%", "2", "1", "1.0000"]


def test_several_samples() -> None:
    """Six samples: pass@1 is the mean share, pass@5 and pass@6 nearly always found."""
    marks = {"standard": ["yyynnn", "nnnnnn"], "soft": ["ynnnnn", "ynnnnn"]}
    report = make_report(answers_of(marks), problems=["0", "1"], modes=list(marks), num_samples=6)
    rates = [{rate.k: rate.value for rate in one.rates} for one in report.modes]
    assert rates[0] == pytest.approx({1: 0.25, 5: 0.5, 6: 0.5})
    assert rates[1] == pytest.approx({1: 1 / 6, 5: 5 / 6, 6: 1.0})
    assert (report.pairs[0].only_first, report.pairs[0].only_second) == (1, 1)
    assert report.pairs[0].difference == pytest.approx(1 / 6 - 0.25)
    assert report.modes[0].num_answers == 12


def test_what_is_missing_is_named() -> None:
    answers = answers_of({"standard": ["yn", "nn"]})
    del answers[AnswerKey("standard", "1", 0)]
    with pytest.raises(EvaluationError, match="1 of 4 answers are missing, such as sample 0 of problem 1"):
        make_report(answers, problems=["0", "1"], modes=["standard"], num_samples=2)
