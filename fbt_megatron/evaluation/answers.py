"""Final answers of mathematical texts: where they stand, and whether two of them are the same.

Equality is that of math-verify (sums are sums, 1/2 is 0.5, sets have no order), with a comparison of the bare texts
before it for answers that are no mathematics.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from fractions import Fraction

from fbt_megatron.errors import EvaluationError

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?"
_FRACTION = rf"(?P<minus>(?<![\w.)\]])-)?(?:(?P<whole>\d+)[ \t]+)?(?P<top>{_DIGITS})[ \t]*/[ \t]*(?P<bottom>{_DIGITS})"
_NUMBER = re.compile(rf"{_FRACTION}|(?:(?<![\w.)\]])-)?{_DIGITS}|(?<![\d.])\.\d+")
_LATEX_FRACTION = re.compile(r"((?<=\d)[ \t]*)?\\[dt]?frac\s*(?:\{([^{}]+)\}|(\d))\s*(?:\{([^{}]+)\}|(\d))")
_CLAUSE_END = re.compile(r"[.,;](?:\s|$)|\n|\b(?:because|since)\b")
_ANNOUNCEMENT = re.compile(r"\banswer[ \t]*(?:is|:)[ \t]*:?", re.IGNORECASE)
_FORMULA = re.compile(r"\s*(?:\$\$(.+?)\$\$|\\\[(.+?)\\\])|[ \t]*(?:\$([^$\n]+)\$|\\\((.+?)\\\))", re.DOTALL)
_BELOW = re.compile(
    r"[ \t*_`]*\n[\s*_`>]*"
    rf"(?P<answer>\$[^$\n]+\$|\\\((?:(?!\\\)).)+\\\)"
    rf"|[-+]?(?:\\?\$)?-?(?:(?:\d+[ \t]+)?{_DIGITS}[ \t]*/[ \t]*{_DIGITS}|{_DIGITS}|\.\d+)[ \t]*(?:\\?%)?)"
    r"[ \t.,;:!*_`]*$",
    re.MULTILINE,
)
"""An answer that has a line below its announcement to itself: a formula or a number. Boxes are found anywhere."""
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)(.*?\S)\*\*(?!\w)")
_MATHEMATICS = re.compile(r"[\d\\$^=+*/<>{}()\[\]]|^[A-Za-z]$")
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

    Without thousands separators; a fraction in lowest terms. None where there is none.
    """
    marked = text.rpartition("####")[2] if "####" in text else ""
    for part in (marked, last_boxed(text) or "", *_announced(text)):
        number = _number_of(part)
        if number is not None:
            return number
    numbers = list(_NUMBER.finditer(_without_marks(text)))
    return (_value(numbers[-1]) or _plain(numbers[-1]["bottom"])) if numbers else None


def final_expression(text: str) -> str | None:
    """The expression that a solution ends up with: in its last box, or else announced by `answer is`.

    Of several announcements it is the last one of something mathematical, or where none is, the last one.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    announced = [expression for part in _announced(text) if (expression := _expression_of(part))]
    return next(filter(_MATHEMATICS.search, announced), announced[0] if announced else None)


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


def _announced(text: str) -> Iterator[str]:
    """What follows each `answer is` or `answer:` in its line, or an answer alone below it; the last one first."""
    text = _BOLD.sub(r"\1", text)
    for found in reversed(list(_ANNOUNCEMENT.finditer(text))):
        below = _BELOW.match(text, found.end())
        if below:
            yield below["answer"]
            continue
        formula = _FORMULA.match(text, found.end())
        end = text.find("\n", formula.end() if formula else found.end())
        yield text[found.end() : end if end >= 0 else None]


def _expression_of(part: str) -> str:
    """The formula, or all up to the end of the sentence."""
    formula = _FORMULA.match(part)
    if formula:
        return next(group for group in formula.groups() if group is not None).strip()
    return re.split(r"\.(?:\s|$)", part, maxsplit=1)[0].strip()


def _number_of(part: str) -> str | None:
    """The first number of a part, or in `20 - 5 = 15` what all that is equal to."""
    for clause in _CLAUSE_END.split(_without_marks(part)):
        for side in reversed(clause.split("=")):
            number = _NUMBER.search(side)
            if number:
                return _value(number)
    return None


def _value(found: re.Match[str]) -> str | None:
    """A number as it is, a fraction in lowest terms; None for a fraction without a value."""
    if found["bottom"] is None:
        return _plain(found.group())
    try:
        top, bottom = (Fraction(_plain(found[name])) for name in ("top", "bottom"))
        value = int(found["whole"] or 0) + top / bottom
        return str(-value if found["minus"] else value)
    except (ValueError, ZeroDivisionError):  # more digits than Python reads as a number, or a division by zero
        return None


def _without_marks(text: str) -> str:
    r"""The text without LaTeX in and between its numbers: `1{,}000` and `1,\!000` are 1,000, `\frac12` is 1/2."""
    text = text.replace("{,}", ",").replace("\\!", "")
    return _LATEX_FRACTION.sub(
        lambda found: f"{' ' * (found[1] is not None)}{found[2] or found[3]}/{found[4] or found[5]} ", text
    )


def _plain(number: str) -> str:
    return number.replace(",", "")


def _bare(text: str) -> str:
    """The text without what only changes its looks. Braces and spaces may separate numbers, so they stay."""
    return " ".join(_LEFT_OUT.sub("", _WORDING.sub(r"\1", text)).split()).rstrip(".")


def _as_formula(text: str) -> str:
    return f"${text.strip().strip('$')}$"
