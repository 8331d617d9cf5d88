"""Final answers of mathematical texts: where they stand, and whether two of them are the same.

Equality is that of math-verify (sums are sums, 1/2 is 0.5, sets have no order), with a comparison of the bare texts
before it for answers that are no mathematics.
"""

from __future__ import annotations

import importlib.util
import re

from fbt_megatron.errors import EvaluationError

_NUMBER = re.compile(r"(?:(?<![\w.)\]])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+")
_ANNOUNCED = re.compile(r".*\banswer\s*(?:is|:)\s*:?\s*(.+)", re.IGNORECASE)
_BOXES = ("\\boxed", "\\fbox")
_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*[A-Za-z][^{}]*\}")
_WORD_LENGTH = 4
"""Letters from which on they are taken for a word: as a product of letters it would equal its anagrams."""
_WORDING = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}")
_LEFT_OUT = re.compile(r"\\(?:left|right)(?![a-z])|\\[,!;:$]|\$")


def check_math_verify() -> None:
    """Raise EvaluationError where answers cannot be compared."""
    if importlib.util.find_spec("math_verify") is None:
        raise EvaluationError("math-verify is not installed. Install it with `pip install -r requirements-eval.txt`.")


def final_number(text: str) -> str | None:
    """The number that a text ends up with: after `####` (as in GSM8K), in a box, announced, or else the last one.

    Without thousands separators; None where there is none.
    """
    marked = text.rpartition("####")[2] if "####" in text else None
    announced = _ANNOUNCED.findall(text)
    for part in (marked, last_boxed(text), announced[-1] if announced else None):
        if part is not None and (numbers := _NUMBER.findall(part)):
            return _plain(numbers[0])
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def final_expression(text: str) -> str | None:
    """The expression that a solution ends up with: in its last box, or else announced by `answer is`."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    announced = _ANNOUNCED.findall(text)
    if not announced:
        return None
    line = announced[-1].strip()
    # A formula in dollars is the answer; otherwise all up to the end of the sentence.
    formula = re.match(r"\$([^$]+)\$", line)
    return formula.group(1) if formula else re.split(r"\.(?:\s|$)", line, maxsplit=1)[0].strip() or None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}`, with braces inside it; None where there is none, or it does not end."""
    start, name = max((text.rfind(name), name) for name in _BOXES)
    if start < 0:
        return None
    rest = text[start + len(name) :].lstrip()
    if not rest.startswith("{"):  # \boxed 5
        return re.split(r"[\s$.,;]", rest, maxsplit=1)[0] or None
    depth = 0
    for place, character in enumerate(rest):
        if character in "{}" and (place == 0 or rest[place - 1] != "\\"):
            depth += 1 if character == "{" else -1
            if not depth:
                return rest[1:place].strip()
    return None


def is_equal(expected: str, found: str) -> bool:
    """Whether two answers, in LaTeX or plain, are the same. Must run in the main thread, which bounds its time."""
    from math_verify import parse, verify

    words, others = _bare(expected), _bare(found)
    if words == others:
        return True
    if _WORDS.fullmatch(expected.strip()) or (words.isalpha() and len(words) >= _WORD_LENGTH):
        return words.strip("()").casefold() == others.strip("()").casefold()
    return bool(verify(parse(_as_formula(expected)), parse(_as_formula(found))))


def _plain(number: str) -> str:
    return number.replace(",", "")


def _bare(text: str) -> str:
    """The text without what only changes its looks. Braces and spaces may separate numbers, so they stay."""
    return " ".join(_LEFT_OUT.sub("", _WORDING.sub(r"\1", text)).split()).rstrip(".")


def _as_formula(text: str) -> str:
    return f"${text.strip().strip('$')}$"
