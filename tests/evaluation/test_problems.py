"""Problem files: prompts, examples, programs, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.code_runner import Limits, run_program
from fbt_megatron.evaluation.problems import FORMATS, CodeProblem, MathProblem, Problem, read_problems, read_shots

GSM8K = {"question": "What is 600 + 400?", "answer": "600 + 400 = <<600+400=1000>>1000.\n#### 1,000"}
MATH_500 = {
    "problem": "Half of one?",
    "solution": "It is $\\boxed{\\frac12}$.",
    "answer": "\\frac12",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'from typing import List\n\n\ndef total(numbers: List[int]) -> int:\n    """Sum.\n    """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(numbers)\n",
    "test": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
}
MBPP = {
    "task_id": 11,
    "text": "Write a function to add.",
    "code": "def add(a, b):\r\n  return math.fsum([a, b])",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "import math",
}
SANITIZED = {
    "task_id": 12,
    "prompt": "Write a function to add.",
    "code": "def add(a, b):\n  return math.fsum([a, b])",
    "test_list": ["assert add(1, 2) == 3"],
    "test_imports": ["import math"],
}


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return path


def read_one(tmp_path: Path, form: str, record: dict[str, Any]) -> Problem:
    (problem,) = read_problems(written(tmp_path / "one.jsonl", record), form)
    return problem


@pytest.mark.parametrize(
    ("form", "record", "key", "prompt", "expected"),
    [
        ("gsm8k", GSM8K, "1", "Question: What is 600 + 400?\nAnswer:", "1000"),
        ("math", MATH_500, "test/algebra/1.json", "Problem:\nHalf of one?\n\nSolution:", "\\frac12"),
        ("math", {k: MATH_500[k] for k in ("problem", "solution")}, "1", None, "\\frac12"),
        ("math", {k: MATH_500[k] for k in ("problem", "answer")}, "1", None, "\\frac12"),
    ],
)
def test_mathematical_problems(
    tmp_path: Path, form: str, record: dict[str, Any], key: str, prompt: str | None, expected: str
) -> None:
    pytest.importorskip("math_verify", reason="requirements-eval.txt is not installed")
    problem = read_one(tmp_path, form, record)
    assert isinstance(problem, MathProblem)
    assert (problem.key, problem.expected) == (key, expected)
    assert prompt is None or problem.prompt == prompt
    # What is right is what an example of the same problem would show.
    solved = problem.solved
    assert solved is not None
    assert problem.grade(solved.removeprefix(problem.prompt))[0]
    assert problem.grade("I do not know")[0] is False
    assert problem.grade("The answer is 7")[0] is False


@pytest.mark.parametrize(
    ("form", "record", "right"),
    [
        ("humaneval", HUMANEVAL, HUMANEVAL["canonical_solution"]),
        ("humaneval", HUMANEVAL, "```python\ndef total(numbers):\n    return sum(numbers)\n```\nDone."),
        ("mbpp", MBPP, MBPP["code"]),
        ("mbpp", SANITIZED, SANITIZED["code"] + "\n"),
        ("mbpp", MBPP, "Here:\n```\ndef add(a, b): return a + b\n"),
    ],
)
def test_programs(tmp_path: Path, form: str, record: dict[str, Any], right: str) -> None:
    problem = read_one(tmp_path, form, record)
    assert isinstance(problem, CodeProblem)
    limits = Limits(namespaces=False)
    assert run_program(problem.program(right), limits).passed
    for wrong in (
        "",
        "    return None\n",
        right.replace("sum(", "len(").replace("a", "b"),
        "import sys\nsys.exit(0)\n",
    ):
        assert not run_program(problem.program(wrong), limits).passed


def test_prompts_with_examples(tmp_path: Path) -> None:
    problems = read_problems(written(tmp_path / "test.jsonl", GSM8K), "gsm8k")
    train = written(tmp_path / "train.jsonl", *({"question": f"Q{n}?", "answer": f"#### {n}"} for n in range(3)))
    assert (
        read_shots(train, "gsm8k", 2, problems) == "Question: Q0?\nAnswer: #### 0\n\nQuestion: Q1?\nAnswer: #### 1\n\n"
    )
    shots = read_shots(written(tmp_path / "mbpp.jsonl", SANITIZED), "mbpp", 1, problems)
    assert shots == (
        "You are an expert Python programmer, and here is your task: Write a function to add. Your code should pass "
        "these tests:\n\nassert add(1, 2) == 3\n[BEGIN]\ndef add(a, b):\n  return math.fsum([a, b])\n[DONE]\n\n"
    )
    with pytest.raises(EvaluationError, match=r"--num-shots 4: .* has 3 problems"):
        read_shots(train, "gsm8k", 4, problems)
    with pytest.raises(EvaluationError, match="problem 1 is one of those to be solved"):
        read_shots(tmp_path / "test.jsonl", "gsm8k", 1, problems)
    with pytest.raises(EvaluationError, match="the prompts of humaneval are complete"):
        read_shots(written(tmp_path / "h.jsonl", HUMANEVAL), "humaneval", 1, problems)


@pytest.mark.parametrize(
    ("form", "line", "expected"),
    [
        ("gsm8k", "{", "line 2: is not of the form gsm8k"),
        ("gsm8k", "[1]", "line 2: question is missing"),
        ("gsm8k", '{"question": "a", "answer": "5"}', "answer has no number after ####"),
        ("gsm8k", '{"question": 1, "answer": "#### 5"}', "question is no text"),
        ("math", '{"problem": "a"}', "there is neither an answer nor a solution with a box"),
        ("mbpp", '{"task_id": 1, "text": "a", "code": "b", "test_list": "c"}', "test_list is no list of texts"),
        ("humaneval", '{"task_id": "a"}', "line 2: prompt is missing"),
    ],
)
def test_lines_of_another_form(tmp_path: Path, form: str, line: str, expected: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(EvaluationError) as caught:
        read_problems(tmp_path / "a.jsonl", form)
    assert expected in str(caught.value)


def test_files_that_hold_no_problems(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="cannot be read"):
        read_problems(tmp_path / "missing.jsonl", "gsm8k")
    with pytest.raises(EvaluationError, match="holds no problem"):
        read_problems(written(tmp_path / "empty.jsonl"), "gsm8k")
    with pytest.raises(EvaluationError, match="line 2: the key HumanEval/0 has occurred before"):
        read_problems(written(tmp_path / "twice.jsonl", HUMANEVAL, HUMANEVAL), "humaneval")
    assert set(FORMATS) == {"gsm8k", "math", "humaneval", "mbpp"}
