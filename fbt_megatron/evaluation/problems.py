"""Problems with known answers or tests from local JSONL files, in the forms of GSM8K, MATH, HumanEval and MBPP.

A prompt is a text to be continued, with worked examples before it where the benchmark has them: models that have been
pretrained only answer no questions. A question is a message for those that do.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation.answers import final_expression, final_number, is_equal, last_boxed

_FENCE = re.compile(r"^(?P<indent> {0,3})(?P<prose>\S.*(?<!`)(?=```[A-Za-z]\w*[ \t]*$))?```[^`\n]*$", re.MULTILINE)
"""A line that opens or closes a block, as in Markdown, or that has a fence with a language at its end."""
_CLOSED = re.compile(r"^ {0,3}```|(?<=[^\s`])```[ \t]*$", re.MULTILINE)
"""Also at the end of the last line of code."""
_FENCE_STOP = "\n```"
_STATEMENT_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n@", "\nassert")
_INDENTED = re.compile(r"\s*^(?: {4}|\t)\s*(?![-*+] |\d+[.)] )\S", re.MULTILINE)
"""Text whose first line is indented, and no item of a list."""


class Problem(ABC):
    """One problem: what the model continues, and what is right."""

    stop: ClassVar[tuple[str, ...]]
    """Texts with which an answer is over."""
    max_tokens: ClassVar[int]
    """Longest answer unless said otherwise."""

    def __init__(self, record: dict[str, Any], key: str) -> None:
        """Raises KeyError, TypeError or ValueError for a record of another form."""
        self.key = key

    def is_over(self, before: str, stop: str) -> bool:
        """Whether an answer is over at a text of `stop`, given what it has before that."""
        return True

    @property
    @abstractmethod
    def prompt(self) -> str:
        """The text to be continued, without examples."""

    @property
    @abstractmethod
    def question(self) -> str:
        """What a user asks in a conversation."""

    @property
    @abstractmethod
    def solved(self) -> str | None:
        """The problem with its solution, as an example for others; None where prompts take no examples."""


class MathProblem(Problem):
    """A problem whose answer is compared with the known one."""

    expected: str

    @abstractmethod
    def extract(self, text: str) -> str | None:
        """The final answer of a continuation; None where it has none."""

    def grade(self, text: str) -> tuple[bool, str | None]:
        """Whether a continuation is right, and the answer found in it."""
        found = self.extract(text)
        return found is not None and is_equal(self.expected, found), found


class CodeProblem(Problem):
    """A problem whose answer is a program that has to pass tests.

    An answer is the program's text, or has it in a block between two fences (```) with nothing but prose before it.
    """

    _begun: str = ""
    """What stands before the program's text."""

    @abstractmethod
    def program(self, text: str) -> str:
        """The program of a continuation, with its tests at the end."""

    def is_over(self, before: str, stop: str) -> bool:
        fence = _FENCE.search(before)
        in_block = fence is not None and not self._is_code(before[: _start(fence)])
        if stop == _FENCE_STOP:
            return in_block or self._is_code(before)
        # In front of a block there may be headings, and a block may begin with what ends a continuation.
        if stop not in _STATEMENT_STOPS or not before.strip():
            return True
        return not in_block and (self._is_indented(before) or self._is_code(before))

    def _code(self, text: str) -> str:
        """The first block of a text, or all of it up to a fence that closes none."""
        fence = _FENCE.search(text)
        if fence is None or self._is_code(text[: _start(fence)]):
            return text if fence is None else text[: _start(fence)]
        block = text[fence.end() + 1 :]
        closed = _CLOSED.search(block)
        return _dedented(block if closed is None else block[: closed.start()], fence["indent"])

    def _is_indented(self, text: str) -> bool:
        """Whether a text goes on inside what has begun, be it Python or not."""
        return bool(self._begun) and _INDENTED.match(text) is not None

    def _is_code(self, text: str) -> bool:
        """Whether a text can be read as Python after what has begun, and is inside of it or more than words."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in the text
                tree = ast.parse(self._begun + text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return False
        if self._is_indented(text):
            return True
        first_line = self._begun.count("\n") + 1
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node.lineno >= first_line)
        return any(not _is_words(statement) for statement in statements)


class GSM8K(MathProblem):
    """`question`, and `answer` with the number after `####`."""

    stop = ("Question:",)
    max_tokens = 256

    def __init__(self, record: dict[str, Any], key: str) -> None:
        super().__init__(record, key)
        self._question, self._answer = _text(record, "question"), _text(record, "answer")
        number = final_number(self._answer) if "####" in self._answer else None
        if number is None:
            raise ValueError("answer has no number after ####")
        self.expected = number

    @property
    def prompt(self) -> str:
        return f"Question: {self._question}\nAnswer:"

    @property
    def question(self) -> str:
        return f"{self._question}\n\nEnd with the answer as a number after ####."

    @property
    def solved(self) -> str:
        return f"{self.prompt} {self._answer}\n\n"

    def extract(self, text: str) -> str | None:
        return final_number(text)


class Math(MathProblem):
    """`problem`, `solution`, and `answer` (MATH-500) or the last box of the solution (MATH)."""

    stop = ("Problem:",)
    max_tokens = 512

    def __init__(self, record: dict[str, Any], key: str) -> None:
        super().__init__(record, str(record.get("unique_id", key)))
        self._problem, self._solution = _text(record, "problem"), record.get("solution")
        answer = record.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            answer = str(answer)
        answer = answer or (last_boxed(self._solution) if isinstance(self._solution, str) else None)
        if not isinstance(answer, str):
            raise ValueError("there is neither an answer nor a solution with a box")
        self.expected = answer

    @property
    def prompt(self) -> str:
        return f"Problem:\n{self._problem}\n\nSolution:"

    @property
    def question(self) -> str:
        return f"{self._problem}\n\nPut the final answer in \\boxed{{}}."

    @property
    def solved(self) -> str:
        solution = self._solution if isinstance(self._solution, str) else f"The answer is $\\boxed{{{self.expected}}}$."
        return f"{self.prompt} {solution}\n\n"

    def extract(self, text: str) -> str | None:
        return final_expression(text)


class HumanEval(CodeProblem):
    """`task_id`, `prompt` (a function up to its docstring), `entry_point`, and `test` with a function `check`."""

    stop = (*_STATEMENT_STOPS, _FENCE_STOP)
    max_tokens = 512

    def __init__(self, record: dict[str, Any], key: str) -> None:
        super().__init__(record, _text(record, "task_id"))
        self._begun, self._test = _text(record, "prompt"), _text(record, "test")
        self._entry_point = _text(record, "entry_point")

    @property
    def prompt(self) -> str:
        return self._begun

    @property
    def question(self) -> str:
        return (
            f"Complete this function. Write all of it in one block of code.\n\n```python\n{self._begun.rstrip()}\n```"
        )

    @property
    def solved(self) -> None:
        return None

    def program(self, text: str) -> str:
        return f"{self._begun}{self._code(text)}\n\n{self._test}\n\ncheck({self._entry_point})\n"


class MBPP(CodeProblem):
    """`task_id`, `text` or `prompt`, `code`, `test_list`; `test_setup_code` or `test_imports` where there are some."""

    stop = ("[DONE]", _FENCE_STOP)
    max_tokens = 512

    def __init__(self, record: dict[str, Any], key: str) -> None:
        super().__init__(record, str(record["task_id"]))
        self._text = _text(record, "text" if "text" in record else "prompt")
        self._solution = _text(record, "code").replace("\r\n", "\n")
        self._tests = _texts(record, "test_list")
        self._imports = _texts(record, "test_imports") if "test_imports" in record else []
        self._setup = _text(record, "test_setup_code") if record.get("test_setup_code") else ""

    @property
    def prompt(self) -> str:
        tests = "\n".join(self._tests)
        return (
            f"You are an expert Python programmer, and here is your task: {self._text} "
            f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
        )

    @property
    def question(self) -> str:
        tests = "\n".join(self._tests)
        return (
            f"{self._text} Write it in Python, in one block of code. It has to pass these tests:\n\n"
            f"```python\n{tests}\n```"
        )

    @property
    def solved(self) -> str:
        return f"{self.prompt}{self._solution}\n[DONE]\n\n"

    def program(self, text: str) -> str:
        # What the tests set up may be made of the solution's classes.
        return "\n".join([*self._imports, self._code(text), self._setup, *self._tests])


FORMATS: dict[str, type[Problem]] = {"gsm8k": GSM8K, "math": Math, "humaneval": HumanEval, "mbpp": MBPP}


def read_problems(path: Path, form: str) -> list[Problem]:
    """The problems of a file, a JSON object per line, in one of `FORMATS`.

    Raises EvaluationError for a file that cannot be read, a line of another form, and a key that occurs twice.
    """
    kind = FORMATS[form]
    problems: dict[str, Problem] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
            problem = kind(record if isinstance(record, dict) else {}, str(number))
        except KeyError as error:
            raise EvaluationError(f"{where}: {error.args[0]} is missing, which {form} has ({kind.__doc__})") from None
        except (ValueError, TypeError) as error:
            raise EvaluationError(f"{where}: is not of the form {form} ({kind.__doc__}): {error}") from None
        if problem.key in problems:
            raise EvaluationError(f"{where}: the key {problem.key} has occurred before. Every problem needs its own.")
        problems[problem.key] = problem
    if not problems:
        raise EvaluationError(f"{path}: holds no problem. Write a JSON object on each line.")
    return list(problems.values())


def read_shots(path: Path, form: str, count: int, problems: Sequence[Problem]) -> str:
    """Worked examples to put before each prompt: the first `count` problems of another file.

    Raises EvaluationError where they cannot be used, as where one of them is to be solved.
    """
    shots = read_problems(path, form)[:count]
    if len(shots) < count:
        raise EvaluationError(f"--num-shots {count}: {path} has {len(shots)} problems. Lower it or name another file.")
    known = {problem.prompt for problem in problems}
    repeated = next((shot for shot in shots if shot.prompt in known), None)
    if repeated is not None:
        raise EvaluationError(
            f"--shots {path}: problem {repeated.key} is one of those to be solved, so its answer would be in the "
            "prompt. Take examples from the training split."
        )
    solved = [shot.solved for shot in shots if shot.solved is not None]
    if len(solved) < len(shots):
        raise EvaluationError(f"--shots {path}: the prompts of {form} are complete. Leave examples out.")
    return "".join(solved)


def _is_words(statement: ast.stmt) -> bool:
    """Whether it may as well be prose, as are `Solution`, `Language: Python` and `Note: x = 5 is used`."""
    return isinstance(statement, ast.Expr | ast.AnnAssign)


def _start(fence: re.Match[str]) -> int:
    """Where the text before a fence ends: prose in its line is part of that."""
    return fence.start() if fence["prose"] is None else fence.end("prose")


def _dedented(block: str, indent: str) -> str:
    """A block without its fence's indent, as in an item of a list, where its first line has it."""
    if not indent or not block.lstrip("\n").startswith(indent):
        return block
    return re.sub(rf"^ {{1,{len(indent)}}}", "", block, flags=re.MULTILINE)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{path}: cannot be read ({error}).") from None
    # Not by `splitlines`, which also cuts at characters that JSON strings may hold.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def _texts(record: dict[str, Any], name: str) -> list[str]:
    value = record[name]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{name} is no list of texts")
    return value
