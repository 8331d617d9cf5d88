"""Where final answers stand, and which are the same."""

from __future__ import annotations

import pytest

from fbt_megatron.evaluation.answers import final_expression, final_number, is_equal, last_boxed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
        ("#### 1,234,567", "1234567"),
        ("#### $-3.50", "-3.50"),
        ("#### 5 and then 6", "5"),
        ("first #### 1\nthen #### 2", "2"),
        ("#### none, but 9", "9"),
        ("so \\boxed{12} of 30", "12"),
        ("The answer is $18. Next 4", "18"),
        ("Answer: 5 apples, 6 pears", "5"),
        ("10-5=5 and 12-7", "7"),
        ("it fell to -4", "-4"),
        ("pi is 3.14.", "3.14"),
        ("about .5", ".5"),
        ("1,2,3", "3"),
        ("The answer is 20 - 5 = 15.", "15"),
        ("#### 20 - 5 = 15", "15"),
        ("The answer is $20 - $5 = $15.", "15"),
        ("The answer is:\n\\[\n20 - 5 = 15\n\\]\nas 15 + 5 = 20", "15"),
        ("The answer is $18.\nShe had $4", "18"),
        ("#### 15\nCheck: 15 + 5 = 20", "15"),
        ("The answer is 20 apples - 5 apples = 15 apples, since 15 + 5 = 20", "15"),
        ("The answer is 12. Check: 12 + 3 = 15", "12"),
        ("The answer is 12 because 12 + 3 = 15", "12"),
        (r"\boxed{x = 5}", "5"),
        ("Answer:\nStep 1: 3+4=7\nSo 7", "7"),
        ("The answer is 5. After 6 checks, the answer is clear.", "5"),
        ("**Answer:** 5 of 6", "5"),
        (r"\boxed{1{,}000}", "1000"),
        (r"it is 1,\!000", "1000"),
        (r"The answer is \frac{1}{2}", "1/2"),
        (r"The answer is -\dfrac12 of 3", "-1/2"),
        (r"\boxed{3\frac{1}{2}}", "7/2"),
        ("The answer is 10/2 apples", "5"),
        ("#### 1/0", "0"),
        pytest.param(f"#### 1/{'2' * 5000}", "2" * 5000, id="too long for Python"),
        ("The answer is:\n42\n\nCheck: 40+2", "42"),
        ("### Answer:\n$\\frac{1}{2}$\nCheck: 1 - 1/2 = 1/2 of 2", "1/2"),
        ("**The answer is:**\n\n**-1,000**.\nCheck: 5", "-1000"),
        ("**Answer: **\n\\(3\\frac12\\).\nCheck: 5", "7/2"),
        ("The answer is:\n$18.\nShe had $4", "18"),
        ("Answer:\n3 1/2\nCheck: 5", "7/2"),
        ("Answer:\n3 of 4 left", "4"),
        ("Answer:\n\\(2\\) and \\(3\\)", "3"),
        (r"it is \frac12", "1/2"),
        ("one of 7\n\\frac12", "1/2"),
        ("7\n-3/6 is left", "-1/2"),
        ("it is 1/0", "0"),
        (r"\frac{a}{4}", "4"),
        (r"\boxed{\frac{}{2}}", "2"),
        ("####", None),
        ("no number", None),
        ("", None),
    ],
)
def test_final_numbers(text: str, number: str | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        (r"so $\boxed{\frac{1}{2}}$ and so on", r"\frac{1}{2}"),
        (r"\boxed{1} and not \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{x + {y}}", "x + {y}"),
        (r"\boxed 7.", "7"),
        (r"\boxed{1} then \boxed{2", None),
        ("Final Answer: The final answer is $x^2$. I hope it is correct.", "x^2"),
        ("The answer is 5. So there.", "5"),
        ("the answer is 0.5.", "0.5"),
        ("The answer is **5**.", "5"),
        ("**Final answer**: 2**3 + 4**5", "2**3 + 4**5"),
        (r"The answer is: \[ x^2 \]", "x^2"),
        ("The answer is\n$$\nx^2\n$$\nas wanted", "x^2"),
        (r"The answer is \(\frac{1}{2}\).", r"\frac{1}{2}"),
        ("The answer is $5$. Check it: the answer is clear.", "5"),
        ("The answer is $5$.\nThe answer is clear.", "5"),
        ("The answer is x. The answer is clear.", "x"),
        ("The answer is odd. No, the answer is even.", "even"),
        ("Answer:\nStep 1: we add", None),
        ("Answer:\n$2$ and $3$ are added", None),
        ("The answer is:\n42\n\nCheck: 40+2", "42"),
        ("### Answer:\n$\\frac{1}{2}$", r"\frac{1}{2}"),
        ("The final answer is\n\n$x^2$.", "x^2"),
        ("The answer is:\n\\(x^2\\)\nas wanted", "x^2"),
        ("The answer is:\n3.5%\nas wanted", "3.5%"),
        ("Answer:\n\\(2\\) and \\(3\\)", None),
        ("Answer:\nStep 1: 3+4=7\nSo 7", None),
        ("nothing", None),
    ],
)
def test_final_expressions(text: str, expression: str | None) -> None:
    assert final_expression(text) == expression


def test_a_box_without_content() -> None:
    assert last_boxed(r"\boxed{}") == ""
    assert last_boxed(r"\boxed") is None


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("42", "42.0", True),
        ("1000", "1,000", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", "1/2", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"90^\circ", "90", True),
        ("5", "x = 5", True),
        ("17", r"17\text{ cm}", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{(A)}", "A", True),
        ("even", "Even", True),
        (r"\text{two words}", "Two  words.", True),
        ("5", "6", False),
        (r"\frac{11}{2}", r"\frac{1}{12}", False),
        ("3 1/2", "31/2", False),
        ("2^{10}", "2^{1}0", False),
        (r"\text{east}", "west", False),
        ("-1", "1", False),
        ("(3,4)", "(4,3)", False),
        (r"\frac{1}{3}", "0.33", False),
        ("5", "5, 6", False),
        (r"\text{Evelyn}", "Evenly", False),
        ("even", "neve", False),
        ("3", "", False),
    ],
)
def test_which_answers_are_the_same(expected: str, found: str, same: bool) -> None:
    pytest.importorskip("math_verify", reason="requirements-eval.txt is not installed")
    assert is_equal(expected, found) == same
