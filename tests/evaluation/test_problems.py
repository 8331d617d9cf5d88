"""Problem files: prompts, examples, programs, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.code_runner import CodeResult, Limits, run_program
from fbt_megatron.evaluation.problems import FORMATS, CodeProblem, MathProblem, Problem, read_problems, read_shots
from fbt_megatron.inference.text import StopMatcher

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


BODY = "    return sum(numbers)\n"
WHOLE = "def total(numbers):\n    return sum(numbers)\n"
ADD = "def add(a, b):\n    return a + b\n"
NODES = {
    "task_id": 927,
    "text": "Write a function to find the height of a tree.",
    "code": "class Node:\n    def __init__(self, left=None):\n        self.left = left\n"
    "def height(node):\n    return 0 if node is None else 1 + height(node.left)",
    "test_list": ["assert height(root) == 2"],
    "test_setup_code": "root = Node()\nroot.left = Node()",
}


def answered(problem: Problem, text: str) -> str:
    """What is left of a model's text, as the generator stops it."""
    found = []
    for size in (1, 7, len(text) or 1):
        matcher = StopMatcher(problem.stop, problem.is_over)
        parts = []
        for start in range(0, len(text), size):
            if not matcher.stopped:
                parts.append(matcher.push(text[start : start + size]))
        found.append("".join(parts) + matcher.flush())
    assert found[1:] == found[:-1]
    return found[0]


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
        ("math", {"problem": "a", "answer": 5}, "1", None, "5"),
        ("math", {"problem": "a", "answer": 0}, "1", None, "0"),
        ("math", {"problem": "a", "answer": 0.5}, "1", None, "0.5"),
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
        ("humaneval", HUMANEVAL, f"```python\n{WHOLE}```\nDone."),
        ("mbpp", MBPP, MBPP["code"]),
        ("mbpp", SANITIZED, SANITIZED["code"] + "\n"),
        ("mbpp", MBPP, "Here:\n```\ndef add(a, b): return a + b\n"),
    ],
)
def test_programs(tmp_path: Path, form: str, record: dict[str, Any], right: str) -> None:
    problem = read_one(tmp_path, form, record)
    assert isinstance(problem, CodeProblem)
    limits = Limits(namespaces=False)
    for text in {right, answered(problem, right)}:
        assert run_program(problem.program(text), limits).passed
    for wrong in (
        "",
        "    return None\n",
        right.replace("sum(", "len(").replace("a", "b"),
        "import sys\nsys.exit(0)\n",
    ):
        assert not run_program(problem.program(wrong), limits).passed


@pytest.mark.parametrize(
    ("form", "record", "text"),
    [
        ("humaneval", HUMANEVAL, f"{BODY}```\n\nThis function returns the sum.\n```python\nprint(total([1]))\n```"),
        ("humaneval", HUMANEVAL, f"    # all of them\n{BODY}\n```python\nprint(total([1])"),
        ("humaneval", HUMANEVAL, f"# all of them\n{BODY}```\nwhich it is"),
        ("humaneval", HUMANEVAL, f"{BODY}\n\ndef other():\n    return ("),
        ("humaneval", HUMANEVAL, f"Solution\n\n# In Python\n\n```\n{WHOLE}```\nThis sums the numbers:\n```\n3\n```"),
        ("humaneval", HUMANEVAL, f"Language: Python\n```python\n# It sums.\n@staticmethod\n{WHOLE}\n\n{WHOLE}"),
        ("humaneval", HUMANEVAL, f'    """In\n    ```\n    total([1])\n    ```\n    """\n{BODY}```\nDone.'),
        ("humaneval", HUMANEVAL, f"```python\n{WHOLE.rstrip()}```\nDone."),
        ("humaneval", HUMANEVAL, WHOLE),
        ("mbpp", MBPP, MBPP["code"] + "\n```\n"),
        ("mbpp", MBPP, f"{ADD}```\nIt adds:\n```python\nadd(1, 2)\n```\n"),
        ("mbpp", MBPP, f"Here is it:\n\n```python\n{ADD}[DONE]\n\nYou are an expert"),
        ("mbpp", NODES, NODES["code"]),
        ("mbpp", MBPP, f"Here's the solution:```python\n{ADD}\n```\n"),
        ("humaneval", HUMANEVAL, f"Here's `total`: ```python\n{WHOLE}```\nDone."),
        ("mbpp", MBPP, f"Note: x = 5 is used\n```python\n{ADD}```\n"),
        ("humaneval", HUMANEVAL, f"Note: x = 5 is used\n# In Python\n```python\n{WHOLE}```\n"),
        ("mbpp", MBPP, f"    - Use a list\n```python\n{ADD}```\n"),
        ("mbpp", MBPP, f"    Use a list.\n```python\n{ADD}```\n"),
        ("humaneval", HUMANEVAL, f"    Use a list.\n```python\n{WHOLE}```\n"),
        ("humaneval", HUMANEVAL, f"    - numbers\n# In Python\n```python\n{WHOLE}```\n"),
        ("mbpp", MBPP, f"- By a sum:\n\n  ```python\n{indent(ADD, '  ')}  ```\n"),
        ("humaneval", HUMANEVAL, f"1. By a sum:\n   ```python\n\n{indent(BODY, '   ')}   ```\n"),
        ("mbpp", MBPP, "  ```python\ndef add(a, b):\n  return a + b\n  ```\n"),
    ],
)
def test_programs_are_what_a_text_has_of_code(tmp_path: Path, form: str, record: dict[str, Any], text: str) -> None:
    """As the generator stops it: behind a continuation or a block, not in front of a block."""
    problem = read_one(tmp_path, form, record)
    assert isinstance(problem, CodeProblem)
    stopped = answered(problem, text)
    assert run_program(problem.program(stopped), Limits(namespaces=False)) == CodeResult("passed", "")
    assert text.startswith(stopped)


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        (f"{BODY}```\nand so on", BODY.rstrip()),
        (f"```\n{BODY}```\nand so on", f"```\n{BODY.rstrip()}"),
        (f"Here:\n\n```\n{BODY}\n# end\n```\nand so on", f"Here:\n\n```\n{BODY}\n# end"),
        ("\ndef total(numbers):\n    return 0\n", ""),
        ("    pass\n\n\nprint(total([]))", "    pass\n\n"),
        ("    if True:\n        return 5 +\n\nclass A", "    if True:\n        return 5 +\n"),
    ],
)
def test_where_a_program_is_over(tmp_path: Path, text: str, stopped: str) -> None:
    assert answered(read_one(tmp_path, "humaneval", HUMANEVAL), text) == stopped


@pytest.mark.parametrize(
    ("form", "record", "question"),
    [
        ("gsm8k", GSM8K, "What is 600 + 400?\n\nEnd with the answer as a number after ####."),
        ("math", MATH_500, "Half of one?\n\nPut the final answer in \\boxed{}."),
        (
            "humaneval",
            HUMANEVAL,
            "Complete this function. Write all of it in one block of code.\n\n```python\nfrom typing import List\n\n\n"
            'def total(numbers: List[int]) -> int:\n    """Sum.\n    """\n```',
        ),
        (
            "mbpp",
            SANITIZED,
            "Write a function to add. Write it in Python, in one block of code. It has to pass these tests:\n\n"
            "```python\nassert add(1, 2) == 3\n```",
        ),
    ],
)
def test_questions_of_a_conversation(tmp_path: Path, form: str, record: dict[str, Any], question: str) -> None:
    assert read_one(tmp_path, form, record).question == question


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
        ("math", '{"problem": "a", "answer": true}', "there is neither an answer nor a solution with a box"),
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
