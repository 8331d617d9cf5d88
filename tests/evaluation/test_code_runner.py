"""Programs with limits: what passes, what ends them, and what they cannot reach."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
        ("import sys\nsys.exit(113)", "failed", "exit status 113"),
        ("import ctypes\nassert ctypes.CDLL(None).prctl(39, 0, 0, 0, 0) == 1, 'new privileges'", "passed", ""),
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
        wait_until(lambda mark=mark: not is_running(mark))


def is_running(mark: str) -> bool:
    return mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Tool:
    """A process that runs a program which only waits, in a thread as the benchmark does."""

    def __init__(self, limits: Limits, folder: Path) -> None:
        self.mark = f"5124.{time.time_ns()}"
        self.folder = folder
        folder.mkdir()
        script = (
            "import sys\nfrom fbt_megatron.evaluation.code_runner import Limits, run_programs\n"
            f"print(run_programs([sys.stdin.read()], {limits!r}, at_once=1)[0])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(folder)},
            text=True,
        )
        assert self.process.stdin is not None
        self.process.stdin.write(f"import subprocess\nsubprocess.run(['sleep', '{self.mark}'])")
        self.process.stdin.close()

    def has_left_nothing(self) -> bool:
        return not is_running(self.mark) and not list(self.folder.iterdir())

    def __enter__(self) -> Tool:
        wait_until(lambda: is_running(self.mark))
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_behind_a_tool_that_is_ended(limits: Limits, number: signal.Signals, tmp_path: Path) -> None:
    with Tool(limits, tmp_path / "tool") as tool:
        assert not tool.has_left_nothing()
        tool.process.send_signal(number)
        assert tool.process.wait(60) == -number
        wait_until(tool.has_left_nothing)


@both
def test_time_is_limited_without_the_tool(limits: Limits, tmp_path: Path) -> None:
    """It stands still, and finds the program ended when it goes on."""
    with Tool(Limits(wall_seconds=8, namespaces=limits.namespaces), tmp_path / "tool") as tool:
        tool.process.send_signal(signal.SIGSTOP)
        wait_until(tool.has_left_nothing)
        tool.process.send_signal(signal.SIGCONT)
        assert tool.process.stdout is not None
        assert tool.process.stdout.read().strip() == str(CodeResult("timeout", "ended after 8 seconds"))


def test_a_program_that_outlives_its_tool_at_once(tmp_path: Path) -> None:
    """The tool ends before its child can ask to be told: the child sees that it has another parent."""
    folder = tmp_path / "program_1"
    (folder / "work").mkdir(parents=True)
    (folder / "program").write_text("import time\ntime.sleep(500)")
    reader, writer = os.pipe()
    start = vars(LIMITED) | {"parent": 1, "report": writer}
    try:
        found = subprocess.run(
            [sys.executable, "-I", "-S", sandbox_child.__file__, json.dumps(start), str(folder / "program")],
            cwd=folder / "work",
            pass_fds=[writer],
            start_new_session=True,
            timeout=60,
        )
    finally:
        os.close(reader)
        os.close(writer)
    assert found.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


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


@both
def test_what_keeps_a_program_from_its_start_is_not_its_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limits: Limits
) -> None:
    script = Path(sandbox_child.__file__).read_text()
    for old, new in [('open("program.py"', 'open("missing/program.py"'), ("[sys.executable,", "['missing',")]:
        assert old in script
        (tmp_path / "child.py").write_text(
            script.replace(old, new).replace("execve(sys.executable", "execve('missing'")
        )
        monkeypatch.setattr(code_runner.sandbox_child, "__file__", str(tmp_path / "child.py"))
        with pytest.raises(EvaluationError, match=r"a program could not be started: .*No such file"):
            run_program("pass", limits)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(EvaluationError, match=r"a program could not be started: .*No such file"):
        run_program("pass", limits)
