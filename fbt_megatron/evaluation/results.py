"""The folder of a benchmark's results: what it is about, and a line per answer, written by any number of processes.

    settings.json         what was asked; a run with other settings is refused
    part_00000.jsonl      answers of process 0, one JSON object per line; a line is complete or not counted

Every process reads all parts when it starts and answers what is missing, so a run that was interrupted goes on, also
with another number of processes. An answer counts once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from fbt_megatron.errors import EvaluationError

SETTINGS_FILE = "settings.json"
_PARTS = "part_*.jsonl"
_LOCKED = (errno.EWOULDBLOCK, errno.EACCES)
"""What flock says of a file that another process has locked."""
_SHOWN_ENTRIES = 8
"""Of a list in a message."""


class AnswerKey(NamedTuple):
    """What an answer is an answer to."""

    mode: str
    """Name of the decode mode, with the passes where there are several: `fused-2`."""
    problem: str
    sample: int


@dataclass(frozen=True)
class Answer:
    """One answer and its grade."""

    mode: str
    problem: str
    sample: int
    text: str
    """What the model wrote."""
    num_tokens: int
    finish: str
    """Why it ended: see `generation.FinishReason`; `too_long` for a prompt that the model cannot read."""
    correct: bool
    detail: str | None
    """The answer found in the text, or why a program failed."""

    @property
    def key(self) -> AnswerKey:
        """What it answers."""
        return AnswerKey(self.mode, self.problem, self.sample)


class ResultsFolder:
    """A folder with the settings that it was made with."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def settings(self) -> dict[str, Any]:
        """What the answers are about; raises EvaluationError where there are none."""
        try:
            return dict(json.loads((self.path / SETTINGS_FILE).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise EvaluationError(f"{self.path}: holds no results of a benchmark ({error}).") from None

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Make the folder, or see that it is about the same. Raises EvaluationError where it is not.

        Of processes that start together one writes the settings, and the others find them.
        """
        target, own = self.path / SETTINGS_FILE, self.path / f".{SETTINGS_FILE}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            own.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            try:
                os.link(own, target)
            except FileExistsError:
                pass
            finally:
                own.unlink()
        except OSError as error:
            raise EvaluationError(f"{self.path}: results cannot be written there ({error}).") from None
        found = self.settings
        other = sorted(key for key in {*found, *settings} if found.get(key) != settings.get(key))
        if other:
            changes = "; ".join(_change(key, found.get(key), settings.get(key)) for key in other)
            raise EvaluationError(f"{self.path}: holds results with other settings: {changes}. Name another folder.")

    def answers(self) -> dict[AnswerKey, Answer]:
        """All answers that are complete; of one that is there twice the first."""
        found: dict[AnswerKey, Answer] = {}
        for path in sorted(self.path.glob(_PARTS)):
            for line in _complete_lines(path):
                answer = _parse(line, path)
                found.setdefault(answer.key, answer)
        return found

    def writer(self, process: int) -> AnswerWriter:
        """Where process number `process` writes. Raises EvaluationError where another one already does."""
        return AnswerWriter(self.path / f"part_{process:05d}.jsonl")


class AnswerWriter:
    """Appends answers to one file, which no other process may write meanwhile."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO = path.open("a+b")
        except OSError as error:
            raise EvaluationError(f"{path}: cannot be written ({error}).") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._drop_torn_line()
        except OSError as error:
            self._file.close()
            if error.errno in _LOCKED:
                raise EvaluationError(
                    f"{path}: another process writes it. Wait for it or name another folder."
                ) from None
            raise EvaluationError(
                f"{path}: cannot be locked and read ({error}). Name a folder of a file system with locks (flock)."
            ) from None

    def __enter__(self) -> AnswerWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        with contextlib.suppress(OSError) if kind else self._told():  # what could not be written has been told
            self._file.close()

    def write(self, answers: Sequence[Answer]) -> None:
        """Add answers; they are on the disk when this returns. Raises EvaluationError where they cannot be."""
        lines = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
        with self._told():
            self._file.write(lines.encode())
            self._file.flush()
            os.fsync(self._file.fileno())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EvaluationError(
                f"{self._file.name}: answers cannot be written ({error}). Make room or mend that, and start the same "
                "command again: it goes on."
            ) from None

    def _drop_torn_line(self) -> None:
        """What follows the last line feed was cut off when a process ended while writing."""
        self._file.seek(0)
        content = self._file.read()
        self._file.truncate(content.rfind(b"\n") + 1)


def _change(key: str, was: Any, now: Any) -> str:
    """What is different; of long lists only where they begin to be."""
    if not (isinstance(was, list) and isinstance(now, list) and max(len(was), len(now)) > _SHOWN_ENTRIES):
        return f"{key} was {was!r}, is {now!r}"
    number = next(number for number, (one, other) in enumerate(zip_longest(was, now)) if one != other)
    entries = (repr(one[number]) if number < len(one) else "none" for one in (was, now))
    return f"{key} had {len(was):,} entries, has {len(now):,}; number {number + 1:,} was {', is '.join(entries)}"


def _complete_lines(path: Path) -> Iterator[bytes]:
    content = path.read_bytes()
    return iter(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1])


def _parse(line: bytes, path: Path) -> Answer:
    try:
        return Answer(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise EvaluationError(f"{path}: holds a line that is no answer ({error}). Remove the line.") from None
