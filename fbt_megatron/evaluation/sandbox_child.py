"""Runs one Python program with limits, and with namespaces where asked; started by `code_runner` as a script.

Needs the standard library alone and knows nothing of this package, so that the program finds nothing of it in memory.

With namespaces (Linux; no privileges needed where the kernel lets users make them) the program has

- no network, not even the loopback interface;
- a read-only view of the file system without devices, and an empty, small work folder in memory;
- a process tree of its own, which ends with it, whatever it has started.

Exit status: that of the program (128 + the signal that ended it). Why a program could not be started is written to a
pipe that it has not.

When the process that started this one ends, or the time by the clock is over, it ends all of them by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

NO_NAMESPACES, NOT_STARTED = "namespaces", "start"
"""Which part of the work has failed: what the report begins with."""

_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 1 << 14, 1 << 18
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65534
_HIDDEN_FOLDERS = ("/run", "/dev/shm")
"""Sockets of services, and memory that processes share."""
_MAX_PROCESSES, _MAX_OPEN_FILES = 64, 64
_MIB = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_children: list[int] = []


def main() -> int:
    """`argv[1]` are the limits as JSON, `argv[2]` the program; the current folder is its work folder.

    With the limits come `parent`, the process that has started this one, and `report`, the pipe's descriptor.
    """
    limits, program = json.loads(sys.argv[1]), sys.argv[2]
    os.set_inheritable(limits["report"], False)
    failing = NOT_STARTED
    try:
        with open(program, encoding="utf-8") as file:  # noqa: PTH123 (few imports, as it starts for each program)
            text = file.read()
        if limits["namespaces"]:
            failing = NO_NAMESPACES
            _unshare()
            failing = NOT_STARTED
        _end_by_itself(os.path.dirname(program), limits)  # noqa: PTH120
        if not limits["namespaces"]:
            return _run(text, limits)
        init = _fork()
        if not init:
            _be_init(text, limits)
        return _status(os.waitpid(init, 0)[1])
    except OSError as error:
        return _report(failing, error, limits)


def _end_by_itself(folder: str, limits: dict[str, Any]) -> None:
    """End all processes and remove their folder if the tool does not live to do it, or does not come to it in time."""

    def end(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGALRM):  # another comes when the tool's next thread ends
            signal.signal(number, signal.SIG_IGN)
        import shutil

        for child in _children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, end)
    signal.alarm(limits["wall_seconds"])
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != limits["parent"]:  # it has ended before this was set
        end()


def _be_init(text: str, limits: dict[str, Any]) -> None:
    """First process of the new tree: when it ends, for whatever reason, the kernel ends all others."""
    status, failing = 1, NO_NAMESPACES
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC)
        _hide_the_system(limits["file_mib"])
        failing = NOT_STARTED
        status = _run(text, limits)
    except OSError as error:
        status = _report(failing, error, limits)
    finally:
        os._exit(status)


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    # The other namespaces come in the new tree: this process has to remove what it can no longer write in there.
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID)
    # As somebody who is not root inside, the program loses all rights over the namespaces when it starts.
    for name, line in (("setgroups", "deny"), ("uid_map", f"{_NOBODY} {uid} 1"), ("gid_map", f"{_NOBODY} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:  # noqa: PTH123
            file.write("0")  # in these namespaces: the program has no use for more of them
    except OSError:
        pass  # kept from it in some containers; what is set up below holds in nested ones too


def _hide_the_system(file_mib: int) -> None:
    work = os.getcwd()  # noqa: PTH109
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes), ctypes.c_size_t(32))
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    for folder in _HIDDEN_FOLDERS:
        if os.path.isdir(folder):  # noqa: PTH112
            _mount("tmpfs", folder, "tmpfs", flags | _MS_RDONLY)
    try:
        _mount("proc", "/proc", "proc", flags)
    except OSError:  # where parts of /proc are covered, as in containers, none of it may be shown again
        _mount("tmpfs", "/proc", "tmpfs", flags | _MS_RDONLY)
    _mount("tmpfs", work, "tmpfs", flags, f"size={file_mib}m,nr_inodes=1024,mode=700")
    os.chdir(work)


def _run(text: str, limits: dict[str, Any]) -> int:
    """Run the program in a process of its own and wait for it; returns its exit status."""
    with open("program.py", "w", encoding="utf-8") as file:  # noqa: PTH123
        file.write(text)
    child = _fork()
    if not child:
        try:
            _limit(limits)
            environment = {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "OMP_NUM_THREADS": "1"}  # noqa: PTH109
            os.execve(sys.executable, [sys.executable, "-I", "-B", "program.py"], environment)
        except (OSError, ValueError) as error:
            _report(NOT_STARTED, error, limits)
        finally:
            os._exit(1)
    while True:  # an init process also inherits what the program leaves behind
        pid, status = os.wait()
        if pid == child:
            return _status(status)


def _fork() -> int:
    """As `os.fork`; the new process ends as processes do."""
    child = os.fork()
    if child:
        _children.append(child)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return child


def _limit(limits: dict[str, Any]) -> None:
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    memory, files = limits["memory_mib"] * _MIB, limits["file_mib"] * _MIB
    bounds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: _MAX_OPEN_FILES,
    }
    if limits["namespaces"]:  # outside of them all processes of the user count
        bounds[resource.RLIMIT_NPROC] = _MAX_PROCESSES
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))
    # First a signal that tells what happened, then one that cannot be ignored.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))


def _report(failing: str, error: Exception, limits: dict[str, Any]) -> int:
    os.write(limits["report"], f"{failing}: {error}".encode())
    return 1


def _status(status: int) -> int:
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _call("mount", texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main())
