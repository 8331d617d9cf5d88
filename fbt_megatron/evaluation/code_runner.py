"""Runs programs that a model has written: each in processes of its own, with limits, and without network.

What this does not stop is listed in docs/evaluation.md. A program has passed when its last line has run, not when it
has ended without error: one that leaves before its tests has not passed them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation import sandbox_child

_POLL_SECONDS = 0.02
_REASON_BYTES = 4096
_REASON_CHARACTERS = 300
_NO_SANDBOX = (
    "this machine does not let a program be shut off from network and files: {reason}. Allow user namespaces "
    "(sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a container its seccomp "
    "profile), or run on a machine that has nothing to lose with --isolation limits."
)
_NOT_STARTED = (
    "a program could not be started: {reason}. Look after free memory, processes and space in {folder}; what has been "
    "answered is kept."
)


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_seconds: int = 10
    """Of each of its processes; a busy machine does not shorten it."""
    wall_seconds: int = 60
    """After which it is ended, busy or asleep."""
    memory_mib: int = 2048
    """Address space of each of its processes."""
    file_mib: int = 16
    """Of each file that it writes, and with namespaces of all of them."""
    namespaces: bool = True
    """Whether it is shut off from network, devices, other processes, and writing outside its work folder."""


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    outcome: Literal["passed", "failed", "timeout"]
    reason: str
    """Last line that it wrote to standard error, or why it was ended; empty where it passed."""

    @property
    def passed(self) -> bool:
        """Whether its last line has run."""
        return self.outcome == "passed"


def run_program(text: str, limits: Limits) -> CodeResult:
    """Run a Python program. Raises EvaluationError where it cannot be started with these limits on this machine."""
    token = secrets.token_hex(16)
    try:
        with (
            _pipe() as (passed, passing),
            _pipe() as (failure, failing),
            tempfile.TemporaryDirectory(prefix="program_", ignore_cleanup_errors=True) as folder,
            tempfile.TemporaryFile() as errors,
        ):
            program, work = Path(folder, "program"), Path(folder, "work")
            program.write_text(f"{text}\n\n__import__('os').write({passing}, {token.encode()!r})\n", encoding="utf-8")
            work.mkdir()
            start = vars(limits) | {"parent": os.getpid(), "report": failing}
            deadline = time.monotonic() + limits.wall_seconds
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", sandbox_child.__file__, json.dumps(start), str(program)],
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[passing, failing],
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", "")},
            )
            status = _wait(process, deadline)
            reached_end, (kind, _, reason) = _read(passed) == token, _read(failure).partition(": ")
            last_line = _last_line(errors.fileno())
    except OSError as error:
        kind, reason = sandbox_child.NOT_STARTED, str(error)
    if kind:
        message = _NO_SANDBOX if kind == sandbox_child.NO_NAMESPACES else _NOT_STARTED
        raise EvaluationError(message.format(reason=reason, folder=tempfile.gettempdir()))
    return _judge(status, reached_end, last_line, limits)


def run_programs(texts: Sequence[str], limits: Limits, *, at_once: int) -> list[CodeResult]:
    """Run programs, `at_once` at a time; results in their order. Raises as `run_program` does."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda text: run_program(text, limits), texts))


def check_isolation(limits: Limits) -> None:
    """Raise EvaluationError where programs cannot be run with these limits on this machine."""
    found = run_program("", limits)
    if not found.passed:
        raise EvaluationError(
            f"an empty program did not run within the limits ({found.outcome}: {found.reason}). Allow it more memory "
            "or time."
        )


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Both ends of a pipe, to be read without waiting."""
    ends = os.pipe()
    try:
        os.set_blocking(ends[0], False)
        yield ends
    finally:
        for end in ends:
            os.close(end)


def _read(reader: int) -> str:
    with contextlib.suppress(BlockingIOError):
        return os.read(reader, _REASON_BYTES).decode(errors="replace")
    return ""


def _wait(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Exit status; None where the time was over. No process of its group is left."""
    ended = None
    try:
        # Its number must stay its own until the group has been ended, so it is looked at and not yet taken away.
        while ended is None and time.monotonic() < deadline:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                time.sleep(_POLL_SECONDS)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
    ended_itself = status < 0 and time.monotonic() >= deadline
    return None if ended is None or ended_itself else status


def _judge(status: int | None, reached_end: bool, last_line: str, limits: Limits) -> CodeResult:
    if status is None:
        return CodeResult("timeout", f"ended after {limits.wall_seconds} seconds")
    if status == 128 + signal.SIGXCPU:
        return CodeResult("timeout", f"ended after {limits.cpu_seconds} seconds of processor time")
    if status == 0 and reached_end:
        return CodeResult("passed", "")
    if status == 0:
        return CodeResult("failed", "it left before its end")
    return CodeResult("failed", last_line or f"exit status {status}")


def _last_line(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    text = os.pread(descriptor, _REASON_BYTES, max(0, size - _REASON_BYTES)).decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_REASON_CHARACTERS] if lines else ""
