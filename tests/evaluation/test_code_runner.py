"""Programs with limits: what passes, what ends them, and what they cannot reach."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fbt_megatron.errors import EvaluationError
from fbt_megatron.evaluation import code_runner, sandbox_child
from fbt_megatron.evaluation.code_runner import CodeResult, Limits, check_isolation, run_program, run_programs

SHUT_OFF, LIMITED = Limits(), Limits(namespaces=False)


def why_no_namespaces() -> str:
    try:
        check_isolation(SHUT_OFF)
    except EvaluationError as error:
        return str(error)
    return ""


REASON = why_no_namespaces()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=REASON)
both = pytest.mark.parametrize(
    "limits", [pytest.param(SHUT_OFF, marks=needs_namespaces), LIMITED], ids=["shut off", ""]
)


@both
@pytest.mark.parametrize(
    ("program", "outcome", "reason"),
    [
        ("def f(x):\n    return x + 1\n\nassert f(1) == 2", "passed", ""),
        ("from __future__ import annotations\nimport math, random, re, typing, collections", "passed", ""),
        ("print('x' * 1_000_000)", "passed", ""),
        ("open('a', 'w').write('b')\nassert open('a').read() == 'b'", "passed", ""),
        ("assert 1 == 2, 'not equal'", "failed", "AssertionError: not equal"),
        ("def f(:", "failed", "SyntaxError: invalid syntax"),
        ("text = '''", "failed", "SyntaxError: unterminated triple-quoted string literal"),
        ("import sys\nsys.exit(0)\nassert False", "failed", "it left before its end"),
        ("import os\nos._exit(0)", "failed", "it left before its end"),
        ("import os\nos.abort()", "failed", "exit status 134"),
        ("import sys\nsys.exit(3)", "failed", "exit status 3"),
        ("input()", "failed", "EOFError: EOF when reading a line"),
        ("x = bytearray(3 << 30)", "failed", "MemoryError"),
        ("with open('a', 'wb') as f:\n    for _ in range(40): f.write(bytes(1 << 20))", "failed", "OSError: "),
        ("import subprocess, sys; subprocess.run(['sudo', '-n', 'true'], check=True)", "failed", ""),
    ],
)
def test_how_programs_end(program: str, outcome: str, reason: str, limits: Limits) -> None:
    found = run_program(program, limits)
    assert found.outcome == outcome
    assert found.reason.startswith(reason)
    assert bool(found.reason) == (outcome != "passed")


@both
def test_time_is_limited(limits: Limits) -> None:
    busy = run_program("while True: pass", Limits(cpu_seconds=1, namespaces=limits.namespaces))
    assert busy == CodeResult("timeout", "ended after 1 seconds of processor time")
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert run_program(stubborn, Limits(cpu_seconds=1, namespaces=limits.namespaces)).outcome == "failed"
    asleep = run_program("import time\ntime.sleep(500)", Limits(wall_seconds=2, namespaces=limits.namespaces))
    assert asleep == CodeResult("timeout", "ended after 2 seconds")


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_network_is_out_of_reach(listener: int) -> None:
    """The control shows that the program would reach it otherwise."""
    connect = f"import socket\nsocket.create_connection(('127.0.0.1', {listener}), 10)"
    assert run_program(connect, LIMITED).passed
    if REASON:
        pytest.skip(REASON)
    assert "unreachable" in run_program(connect, SHUT_OFF).reason
    assert "unreachable" in run_program(connect.replace("127.0.0.1", "192.0.2.1"), SHUT_OFF).reason


@needs_namespaces
def test_files_outside_stay_as_they_are(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("old")
    for program in (f"open({str(kept)!r}, 'w').write('new')", f"import os\nos.remove({str(kept)!r})"):
        assert "Read-only file system" in run_program(program, SHUT_OFF).reason
        assert kept.read_text() == "old"
    assert run_program(f"open({str(kept)!r}, 'w').write('new')", LIMITED).passed
    assert kept.read_text() == "new"


@needs_namespaces
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os\nassert sorted(p for p in os.listdir('/proc') if p.isdigit()) in ([], ['1', '2'])", ""),
        ("import os\nassert os.listdir('/run') == []", ""),
        ("import os\nassert os.getuid() != 0", ""),
        ("open('/dev/zero', 'rb')", "PermissionError"),
        (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.mount(b'none', b'/', None, 4128, None) == 0, ctypes.get_errno()",
            "AssertionError: 1",
        ),
        (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "assert libc.unshare(0x10000000) == 0, ctypes.get_errno()",
            "AssertionError: ",
        ),
    ],
)
def test_the_system_is_out_of_reach(program: str, reason: str) -> None:
    found = run_program(program, SHUT_OFF)
    assert found.reason.startswith(reason)
    assert found.passed == (not reason)


@needs_namespaces
def test_nothing_stays_behind() -> None:
    """Neither of a program that ends nor of one that is ended, though its children have left its group."""
    leave = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    os.execlp('sleep', 'sleep', '{mark}')\n"
    for number, end, limits in [(1, "", SHUT_OFF), (2, "time.sleep(500)", Limits(wall_seconds=2))]:
        mark = f"5123.{time.time_ns()}{number}"
        run_program(leave.format(mark=mark) + end, limits)
        deadline = time.monotonic() + 60
        while mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_several_at_once_come_in_order() -> None:
    programs = [f"assert {number} % 2" for number in range(8)]
    found = run_programs(programs, LIMITED, at_once=3)
    assert [result.passed for result in found] == [False, True] * 4


def test_a_machine_without_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As where the kernel says no: the call names a namespace that does not exist."""
    script = Path(sandbox_child.__file__).read_text().replace("0x10000000", "0x00000001")
    (tmp_path / "child.py").write_text(script)
    monkeypatch.setattr(code_runner.sandbox_child, "__file__", str(tmp_path / "child.py"))
    with pytest.raises(EvaluationError, match=r"does not let .* unshare: Invalid argument.*--isolation limits"):
        run_program("pass", SHUT_OFF)
    assert run_program("pass", LIMITED).passed
    with pytest.raises(EvaluationError, match="an empty program did not run within the limits"):
        check_isolation(Limits(memory_mib=1, namespaces=False))
