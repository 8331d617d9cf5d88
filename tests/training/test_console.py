"""Lines on the terminal and in the log, and how numbers are written."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

import pytest

from fbt_megatron.errors import DataError
from fbt_megatron.training.console import Console, format_count, format_duration

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def test_a_line_goes_to_both_and_a_log_entry_to_the_file_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Console(enabled=True) as console:
        console.line("before the log")
        console.open_log(tmp_path / "log.txt")
        console.line("two\nlines")
        console.log("a table\nof two rows")
    assert capsys.readouterr().out == "before the log\ntwo\nlines\n"
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(re.match(STAMP, line) for line in lines)
    assert [re.sub(STAMP, "", line) for line in lines] == ["two", "lines", "a table", "of two rows"]


def test_the_log_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with Console(enabled=True) as console:
            console.open_log(tmp_path / "log.txt")
            console.line(text)
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_what_ends_a_run_is_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(DataError), Console(enabled=True) as console:
        console.open_log(tmp_path / "log.txt")
        raise DataError("shard 3 is short")
    assert (tmp_path / "log.txt").read_text().endswith(" the run ends: DataError: shard 3 is short\n")
    assert capsys.readouterr() == ("", "")


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Console(enabled=False) as console:
        console.open_log(tmp_path / "log.txt")
        console.line("unseen")
        console.log("unseen")
        console.start_progress(done=0, total=3)
        console.advance()
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_progress_bar_only_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Console(enabled=True) as console:
        console.start_progress(done=0, total=3)
        console.advance()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Console(enabled=True) as console:
        console.start_progress(done=1, total=3)
        console.line("above the bar")
        console.advance()
    shown = capsys.readouterr()
    assert shown.out == "above the bar\n"
    assert "2/3" in shown.err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (425, "7m05s"),
        (3599.7, "1h00m"),
        (11520, "3h12m"),
        (86400, "1d00h"),
        (187200, "2d04h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (812, "812"),
        (9830, "9.83k"),
        (1_200_000, "1.20M"),
        (3.25e9, "3.25B"),
        (2e12, "2.00T"),
        (999_999, "1.00M"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text
