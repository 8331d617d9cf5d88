"""The README's file list is the code's own docstrings, and the commands and files it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fbt_megatron import errors
from fbt_megatron.training.stop_signal import STOP_SIGNALS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def file_table() -> str:
    """The table as it should be: each module with the first paragraph of its docstring."""
    rows = ["| file | subject |", "|---|---|"]
    for path in sorted((ROOT / "fbt_megatron").rglob("*.py")):
        if path.name != "__init__.py":
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            subject = " ".join(docstring.split("\n\n")[0].split())
            rows.append(f"| `{path.relative_to(ROOT / 'fbt_megatron')}` | {subject} |")
    return "\n".join(rows)


def test_file_table_is_the_docstrings() -> None:
    table = file_table()
    assert table in README, f"README.md: replace the table of files by\n{table}"


def test_named_files_exist() -> None:
    named = re.findall(r"(?:python|pytest|--config) ((?:tools|tests|configs|docs)/[\w./]+)", README)
    named += re.findall(r"\]\(((?:docs|configs)/[\w./]+)\)", README)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z-]+)`?", README))
    assert {"pretrain", "test"} <= named <= targets | {"a"}


def test_every_exit_status_is_in_the_table() -> None:
    table = README.partition("### Exit status")[2].partition("\n\n`torchrun`")[0]
    listed = [
        int(number) for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for number in cell.split(",")
    ]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FBTError)]
    statuses = {kind.exit_status for kind in kinds} | {128 + number for number in STOP_SIGNALS}
    assert sorted(listed) == sorted(statuses | {0})
