"""Runs one Python program with limits, and with namespaces where asked; started by `code_runner` as a script.

Needs the standard library alone and knows nothing of this package, so that the program finds nothing of it in memory.

With namespaces (Linux; no privileges needed where the kernel lets users make them) the program has

- no network, not even the loopback interface;
- a read-only view of the file system without devices, and an empty, small work folder in memory;
- a process tree of its own, which ends with it, whatever it has started.

Exit status: that of the program (128 + the signal that ended it), or `UNAVAILABLE` where the limits cannot be set up.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

UNAVAILABLE = 113

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


def main() -> int:
    """`argv[1]` are the limits as JSON, `argv[2]` the program; the current folder is its work folder."""
    limits, program = json.loads(sys.argv[1]), sys.argv[2]
    with open(program, encoding="utf-8") as file:  # noqa: PTH123 (few imports: they stay in the program's memory)
        text = file.read()
    if not limits["namespaces"]:
        return _run(text, limits)
    try:
        _unshare()
        init = os.fork()
        if not init:
            _be_init(text, limits)
    except OSError as error:
        print(f"namespaces: {error}", file=sys.stderr)
        return UNAVAILABLE
    return _status(os.waitpid(init, 0)[1])


def _be_init(text: str, limits: dict[str, Any]) -> None:
    """First process of the new tree: when it ends, for whatever reason, the kernel ends all others."""
    status = UNAVAILABLE
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _hide_the_system(limits["file_mib"])
        status = _run(text, limits)
    except OSError as error:
        print(f"namespaces: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _unshare() -> None:
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC)
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
    child = os.fork()
    if not child:
        try:
            _limit(limits)
            environment = {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "OMP_NUM_THREADS": "1"}  # noqa: PTH109
            os.execve(sys.executable, [sys.executable, "-I", "-B", "program.py"], environment)
        except (OSError, ValueError) as error:
            print(f"limits: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(UNAVAILABLE)
    while True:  # an init process also inherits what the program leaves behind
        pid, status = os.wait()
        if pid == child:
            return _status(status)


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
