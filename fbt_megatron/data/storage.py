"""Bytes by location: a local path, a URL of any file system that fsspec knows, or `pipe:` and a shell command.

Files are read in place (a remote one in ranges), so starting in the middle costs no more than starting at the front.
The output of a command can only be read from its beginning.
"""

from __future__ import annotations

import errno
import io
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeVar

import aiohttp
import fsspec
from fsspec.implementations.local import LocalFileSystem

from fbt_megatron.data.retries import Backoff
from fbt_megatron.errors import DataError, DataSetupError

T = TypeVar("T")

PIPE_PREFIX = "pipe:"
COMPRESSED_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
SHARD_SUFFIXES = (".tar", *COMPRESSED_SUFFIXES)
_FORBIDDEN = 403
_TOO_MANY_REQUESTS = 429
_SERVER_ERROR = 500

READ_ERRORS = (OSError, aiohttp.ClientError, TimeoutError)
"""What file systems raise when bytes cannot be had."""

# What a disk or a network file system says for a moment: while a connection breaks, a server moves or is busy.
_PASSING = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EBUSY,
    errno.EPIPE,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
}
_OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}


def is_pipe(location: str) -> bool:
    """Whether `location` is a command to run."""
    return location.startswith(PIPE_PREFIX)


def is_sequential(location: str) -> bool:
    """Whether reading must start at the front: the output of a command, or a compressed file."""
    return is_pipe(location) or location.endswith(COMPRESSED_SUFFIXES)


def is_remote(location: str) -> bool:
    """Whether a read goes over a network, by a protocol of its own."""
    return "://" in location and not location.startswith(("file://", PIPE_PREFIX))


def join(folder: str, name: str) -> str:
    """`name` inside `folder`, both as locations."""
    return f"{folder.rstrip('/')}/{name}"


def parent(location: str) -> str:
    """The folder that `location` lies in."""
    folder, slash, _ = location.rpartition("/")
    return folder if slash else "."


@contextmanager
def naming_errors(location: str) -> Iterator[None]:
    """Turn what a file system raises into a `DataError` that names `location`."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{location}: not found. Check the path or URL.") from None
    except READ_ERRORS as error:
        raise read_failure(location, error) from error


def read_failure(location: str, error: BaseException) -> DataError:
    """The `DataError` for an exception of `READ_ERRORS`."""
    if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
        return DataSetupError(
            f"{location}: cannot be opened ({error}). Raise the limits of this process (ulimit -n), or lower "
            "data.workers or data.streams."
        )
    return DataError(
        f"{location}: cannot be read ({type(error).__name__}: {error}). Check that it exists and may be read."
    )


def is_transient(location: str, error: BaseException) -> bool:
    """Whether the same read may succeed a little later."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= _SERVER_ERROR or error.status == _TOO_MANY_REQUESTS
    if isinstance(error, OSError) and error.errno in _OWN_LIMITS:
        return False
    if is_remote(location) or is_pipe(location):
        return not isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError)
    return isinstance(error, OSError) and error.errno in _PASSING


def size_of(location: str) -> int:
    """Size of a file in bytes.

    Raises:
        DataError: it does not exist or cannot be read.
    """
    file_system, path = _file_system(location)
    with naming_errors(location):
        return int(persistently(location, lambda: file_system.size(path)))


def read_bytes(location: str) -> bytes:
    """The contents of a small file.

    Raises:
        DataError: it does not exist or cannot be read.
    """
    file_system, path = _file_system(location)
    with naming_errors(location):
        return bytes(persistently(location, lambda: file_system.cat_file(path)))


def read_bytes_if_there(location: str) -> bytes | None:
    """The contents of a small file, or `None` where there is none.

    Raises:
        DataError: it exists but cannot be read.
    """
    file_system, path = _file_system(location)
    with naming_errors(location):
        try:
            return bytes(persistently(location, lambda: file_system.cat_file(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except aiohttp.ClientResponseError as error:
            # Object stores say "forbidden" for a missing object where they do not let the reader list the bucket.
            if error.status == _FORBIDDEN:
                return None
            raise


def is_folder(location: str) -> bool:
    """Whether `location` is a folder that can be listed."""
    file_system, path = _file_system(location)
    with naming_errors(location):
        return bool(persistently(location, lambda: file_system.isdir(path)))


def list_files(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """Locations of the files in `folder` that end in one of `suffixes`, sorted.

    Raises:
        DataError: it cannot be listed.
    """
    file_system, path = _file_system(folder)
    with naming_errors(folder):
        names = sorted(str(name) for name in persistently(folder, lambda: file_system.ls(path, detail=False)))
    found = [name for name in names if name.endswith(suffixes)]
    if isinstance(file_system, LocalFileSystem):
        return found
    return [str(file_system.unstrip_protocol(name)) for name in found]


def open_at(location: str, offset: int) -> BinaryIO:
    """A stream of the bytes from `offset` on; for a command or compressed file `offset` must be 0.

    Raises:
        DataError: the scheme is unknown or its driver is missing. Other failures raise one of `READ_ERRORS`.
    """
    return persistently(location, lambda: open_once(location, offset))


def open_once(location: str, offset: int) -> BinaryIO:
    """The same without a second try, for those who try again what they do with the stream as well."""
    if is_pipe(location):
        return io.BufferedReader(_CommandOutput(location.removeprefix(PIPE_PREFIX)))
    file_system, path = _file_system(location)
    stream: BinaryIO = file_system.open(path, "rb")
    stream.seek(offset)
    return stream


def persistently(location: str, read: Callable[[], T]) -> T:
    """The result of `read`, which is tried again where it fails for a reason that may pass.

    Raises what `read` raises when there have been enough tries, or at once where another would fail as well.
    """
    backoff = Backoff()
    while True:
        try:
            return read()
        except READ_ERRORS as error:
            if not (is_transient(location, error) and backoff.wait(location, error)):
                raise


def _file_system(location: str) -> tuple[Any, str]:
    try:
        return fsspec.core.url_to_fs(location)
    except (ImportError, ValueError) as error:
        raise DataError(
            f"{location}: {error}. Use a path, http(s)://, or a scheme whose fsspec driver is installed."
        ) from error


class _CommandOutput(io.RawIOBase):
    """What a shell command writes. Closing it before its end stops the command."""

    def __init__(self, command: str) -> None:
        super().__init__()
        self._process = subprocess.Popen(command, shell=True, stdout=subprocess.PIPE)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        data = self._process.stdout.read(len(buffer))
        if not data and self._process.wait() != 0:
            raise OSError(f"the command exited with status {self._process.returncode}")
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process.kill()
            self._process.wait()
        super().close()
