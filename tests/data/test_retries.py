"""Reads that fail for a moment are tried again, and nothing is read twice or left out."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import aiohttp
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from fbt_megatron.data import retries, storage
from fbt_megatron.data.dataset import open_dataset
from fbt_megatron.data.json_lines import scan_lines
from fbt_megatron.data.loader import build_train_loader
from fbt_megatron.data.order import Span
from fbt_megatron.data.retries import MAX_RETRIES, Backoff
from fbt_megatron.data.samples import scan_samples
from fbt_megatron.data.shards import Shard
from fbt_megatron.errors import DataError, DataSetupError
from fbt_megatron.training.console import print_warnings
from tests.data.datasets import pack_ids, run_config, write_dataset, write_tar
from tests.data.range_server import serve

DOCUMENTS = [[n, n + 1, 256] for n in range(6)]
PASSING = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET]


class Failures:
    """Makes calls of a method fail: those that are due, until none is left."""

    def __init__(self, owner: type, name: str, patch: pytest.MonkeyPatch, *, number: int, left: int) -> None:
        self.left = left
        self.calls = 0
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.left and self.is_due(*arguments):
                self.left -= 1
                raise OSError(number, os.strerror(number), "somewhere")
            return original(*arguments, **options)

        patch.setattr(owner, name, call, raising=False)

    is_due: Callable[..., bool] = staticmethod(lambda *_: True)


def read(location: str, first: int = 0, count: int = len(DOCUMENTS)) -> list[list[int]]:
    dataset = open_dataset(location, tokenizer=None, vocab_size=257, key="data.train")
    return [document.tokens.tolist() for document in dataset.read(Span(0, first, count))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", [DOCUMENTS])


def test_waits_double_are_spread_and_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 1.0)
    monkeypatch.setattr("time.sleep", waits.append)
    backoff = Backoff()
    for _ in range(20):
        backoff.succeeded()
        assert [backoff.wait("a.tar: document 3", OSError("broken")) for _ in range(7)] == [True] * 5 + [False] * 2
    assert len(waits) == 20 * MAX_RETRIES
    for number in range(MAX_RETRIES):
        seconds = waits[number::MAX_RETRIES]
        assert all(0.5 * 2**number <= wait <= 1.5 * 2**number for wait in seconds)
        assert len(set(seconds)) > 1
    messages = [record.message for record in caplog.records[:MAX_RETRIES]]
    assert messages == [
        f"a.tar: document 3: OSError: broken; trying again in {wait:.1f} s ({number} of 5)"
        for number, wait in enumerate(waits[:MAX_RETRIES], start=1)
    ]


@pytest.mark.parametrize("number", PASSING)
@pytest.mark.parametrize(
    ("owner", "name"), [(LocalFileSystem, "cat_file"), (LocalFileSystem, "open"), (LocalFileSystem, "size")]
)
def test_files_that_cannot_be_opened_for_a_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, owner: type, name: str
) -> None:
    """`dataset.json`, the index and the table of bytes are read whole, the tar is opened, both are measured."""
    failures = Failures(owner, name, monkeypatch, number=number, left=MAX_RETRIES)
    assert read(str(folder)) == DOCUMENTS
    assert failures.left == 0
    failures.left = MAX_RETRIES + 1
    with pytest.raises(DataError, match=rf"cannot be read \(\w+: \[Errno {number}\]"):
        read(str(folder))


@pytest.mark.parametrize("number", PASSING)
def test_a_read_that_fails_goes_on_from_its_document(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Every fifth read fails: more failures in all than would be tried in a row."""
    documents = [[n % 256] * 5000 for n in range(30)]  # a tar is read in blocks of 10,240 bytes
    write_dataset(folder, [documents])
    dataset = open_dataset(str(folder), tokenizer=None, vocab_size=257, key="data.train")
    index = dataset.shards[0].index()
    failures = Failures(LocalFileOpener, "read", monkeypatch, number=number, left=100)
    failures.is_due = lambda *_: failures.calls % 5 == 0
    monkeypatch.setattr(Shard, "index", lambda _: index)
    assert [document.tokens.tolist() for document in dataset.read(Span(0, 0, 30))] == documents
    num_failures = 100 - failures.left
    assert num_failures > 2 * MAX_RETRIES
    lines = [record.message for record in caplog.records]
    assert len(lines) == num_failures
    assert all(f"{folder}/shard-00000.tar: from document " in line for line in lines)
    assert all(f"[Errno {number}]" in line for line in lines)


@pytest.mark.parametrize("number", PASSING)
def test_a_scan_that_fails_for_a_moment_starts_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """In the middle of the headers of a tar that nothing describes: no sample is found twice or left out."""
    (folder / "dataset.json").unlink()
    location = str(folder / "shard-00000.tar")
    failures = Failures(LocalFileOpener, "read", monkeypatch, number=number, left=0)
    assert len(scan_samples(location)) == len(DOCUMENTS)
    middle = failures.calls // 2
    assert middle > 2
    failures.is_due = lambda *_: failures.calls % middle == 0
    failures.calls, failures.left = 0, 1
    assert read(location) == DOCUMENTS
    assert failures.left == 0
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"{location}: ")
    assert f": [Errno {number}]" in line
    failures.calls, failures.left = 0, 1 + MAX_RETRIES
    with pytest.raises(DataError, match=rf"shard-00000\.tar: cannot be read \(\w+: \[Errno {number}\]"):
        scan_samples(location)
    assert failures.left == 0


@pytest.mark.parametrize("number", PASSING)
def test_a_tar_without_an_index_that_cannot_be_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """To open it is part of the scan: there are no more tries than for either."""
    failures = Failures(LocalFileSystem, "open", monkeypatch, number=number, left=MAX_RETRIES)
    location = str(folder / "shard-00000.tar")
    assert len(scan_samples(location)) == len(DOCUMENTS)
    assert failures.left == 0
    failures.left = 1 + MAX_RETRIES
    with pytest.raises(DataError, match=rf"cannot be read \(\w+: \[Errno {number}\]"):
        scan_samples(location)
    assert failures.left == 0


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG])
def test_what_does_not_pass_is_not_tried_again(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    failures = Failures(LocalFileSystem, "cat_file", monkeypatch, number=number, left=2)
    failures.is_due = lambda _, path: path.endswith(".index")
    with pytest.raises(DataError, match=r"shard-00000\.index: (not found|cannot be read)"):
        read(str(folder))
    assert failures.left == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_limits_of_the_process_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    failures = Failures(LocalFileSystem, "open", monkeypatch, number=number, left=2)
    failures.is_due = lambda _, path, *__: path.endswith(".tar")
    with pytest.raises(DataSetupError, match=r"shard-00000\.tar: cannot be opened .*ulimit -n"):
        read(str(folder))
    assert failures.left == 1


def _response(status: int) -> aiohttp.ClientResponseError:
    return aiohttp.ClientResponseError(cast(Any, None), (), status=status)


@pytest.mark.parametrize(
    ("location", "error", "expected"),
    [
        ("https://host/a.tar", _response(500), True),
        ("https://host/a.tar", _response(503), True),
        ("https://host/a.tar", _response(429), True),
        ("https://host/a.tar", _response(403), False),
        ("https://host/a.tar", aiohttp.ClientConnectionError(), True),
        ("https://host/a.tar", TimeoutError(), True),
        ("https://host/a.tar", FileNotFoundError(), False),
        ("s3://bucket/a.tar", OSError("SlowDown"), True),
        ("s3://bucket/a.tar", PermissionError(), False),
        ("s3://bucket/a.tar", OSError(errno.EMFILE, "x"), False),
        ("pipe:curl https://host/a.tar", OSError("the command exited with status 56"), True),
        ("pipe:curl https://host/a.tar", OSError(errno.EMFILE, "x"), False),
        ("/data/a.tar", OSError(errno.EIO, "x"), True),
        ("file:///data/a.tar", OSError(errno.ESTALE, "x"), True),
        ("/data/a.tar", OSError("no number"), False),
        ("/data/a.tar", OSError(errno.ENOENT, "x"), False),
    ],
)
def test_what_may_pass(location: str, error: BaseException, expected: bool) -> None:
    assert storage.is_transient(location, error) is expected


def test_a_server_that_fails_while_the_data_set_is_opened(folder: Path) -> None:
    """The first request is that of `dataset.json`, which asks for no range."""
    with serve(folder) as server:
        server.failures_left, server.fails_whole_files = 3, True
        assert read(server.url) == DOCUMENTS
        assert server.failures_left == 0


def test_a_command_that_breaks_off_is_run_again(tmp_path: Path) -> None:
    """It is read from the front up to the document where it broke off."""
    write_tar(tmp_path / "a.tar", [(f"{n}.tokens", pack_ids([n, 256], "uint16")) for n in range(50)])
    runs = tmp_path / "runs"
    script = f"echo >> {runs}; case $(wc -l < {runs}) in 2|3) head -c 30720 {tmp_path}/a.tar; exit 5;; esac; "
    assert read(f"pipe:{script} cat {tmp_path}/a.tar", 20, 20) == [[n, 256] for n in range(20, 40)]
    assert len(runs.read_text().splitlines()) == 4  # one scan, two that broke off, one whole


def test_a_command_that_breaks_off_in_its_first_run_is_run_again(tmp_path: Path) -> None:
    """That run is the scan, which finds every sample once."""
    write_tar(tmp_path / "a.tar", [(f"{n}.tokens", pack_ids([n, 256], "uint16")) for n in range(50)])
    runs = tmp_path / "runs"
    script = f"echo >> {runs}; case $(wc -l < {runs}) in 1|2) head -c 30720 {tmp_path}/a.tar; exit 5;; esac; "
    assert len(scan_samples(f"pipe:{script} cat {tmp_path}/a.tar")) == 50
    assert len(runs.read_text().splitlines()) == 3
    with pytest.raises(DataError, match=r"cannot be read \(OSError: the command exited with status 5\)"):
        scan_samples(f"pipe:echo >> {runs}; head -c 30720 {tmp_path}/a.tar; exit 5")
    assert len(runs.read_text().splitlines()) == 3 + 1 + MAX_RETRIES


def test_a_server_that_fails_during_a_scan(folder: Path) -> None:
    """The tar is asked for by a range."""
    (folder / "dataset.json").unlink()
    with serve(folder) as server:
        server.failures_left = 3
        assert read(f"{server.url}/shard-00000.tar") == DOCUMENTS
        assert server.failures_left == 0


def test_a_scan_of_lines_that_breaks_off_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(f'{{"number": {n}}}\n' for n in range(50)))
    expected = scan_lines(str(path))
    real, tries = storage.open_once, []

    def breaks_off(location: str, offset: int) -> BinaryIO:
        tries.append(location)
        lines = real(location, offset).readlines()
        return cast(BinaryIO, _Lines(lines, left=20 if len(tries) <= 2 else len(lines)))

    monkeypatch.setattr(storage, "open_once", breaks_off)
    found = scan_lines(str(path))
    assert len(tries) == 3
    assert (found.scanned == expected.scanned).all()
    assert (len(found.scanned), found.sha256) == (50, expected.sha256)


class _Lines:
    """The first `left` lines of a file; then it cannot be read."""

    def __init__(self, lines: list[bytes], *, left: int) -> None:
        self._lines, self._left = lines, left

    def __iter__(self) -> Iterator[bytes]:
        yield from self._lines[: self._left]
        if self._left < len(self._lines):
            raise OSError(errno.EIO, "Input/output error")

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("size", [20480, 30720, 31232, 31500])
def test_a_command_that_always_breaks_off_is_named(tmp_path: Path, size: int) -> None:
    """In a header, in tokens, between two."""
    write_tar(tmp_path / "a.tar", [(f"{n}.tokens", pack_ids([n, 256], "uint16")) for n in range(50)])
    runs = tmp_path / "runs"
    script = f"echo >> {runs}; test $(wc -l < {runs}) = 1 || {{ head -c {size} {tmp_path}/a.tar; exit 5; }}; "
    with pytest.raises(DataError, match=r"cannot be read \(OSError: the command exited with status 5\)"):
        read(f"pipe:{script} cat {tmp_path}/a.tar", 20, 20)
    assert len(runs.read_text().splitlines()) == 2 + MAX_RETRIES


def test_readers_say_what_they_try_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the words of the rank they belong to; the rows are those of a disk that never failed."""
    config = run_config(folder, seq_length=3, streams=2, global_batch_size=2, workers=2)
    package = logging.getLogger("fbt_megatron")
    monkeypatch.setattr(package, "propagate", True)
    monkeypatch.setattr(package, "handlers", [])
    print_warnings("[rank 3] ")
    expected = _first_rows(config)
    assert capfd.readouterr().err == ""
    failures = Failures(LocalFileOpener, "read", monkeypatch, number=errno.EIO, left=3)
    failures.is_due = lambda *_: failures.calls % 3 == 0
    assert _first_rows(config) == expected
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 * 3  # each reader is a process with failures of its own
    assert all(line.startswith(f"[rank 3] {folder}/shard-00000.") for line in lines)
    assert all("trying again in 0.0 s (1 of 5)" in line for line in lines)


def _first_rows(config: Any) -> list[list[int]]:
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    rows = [row for _ in range(8) for batch in loader.next_step() for row in batch.tokens.tolist()]
    loader.close()
    return rows
