"""Data sets are found wherever they are, read in place, and refused with a reason."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO, cast

import pytest

from fbt_megatron.data import storage
from fbt_megatron.data.dataset import DocumentDataset, open_dataset
from fbt_megatron.data.order import Span
from fbt_megatron.errors import DataError
from tests.data.datasets import pack_ids, write_dataset, write_tar
from tests.data.range_server import serve

SHARDS = [[[1, 2, 256], [3, 256], [4, 5, 6, 256]], [[7, 256]], [[8, 256], [9, 10, 256]]]
BYTES_OF_HI = [104, 105]


def open_ids(spec: str | tuple[str, ...], *, tokenizer: str | None = None, vocab_size: int = 257) -> DocumentDataset:
    return open_dataset(spec, tokenizer=tokenizer, vocab_size=vocab_size, key="data.train")


def read_all(dataset: DocumentDataset) -> list[list[list[int]]]:
    return [read(dataset, shard, 0, info.num_documents) for shard, info in enumerate(dataset.shards)]


def read(dataset: DocumentDataset, shard: int, first: int, count: int) -> list[list[int]]:
    return [document.tokens.tolist() for document in dataset.read(Span(shard, first, count))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", SHARDS)


def test_a_folder(folder: Path) -> None:
    dataset = open_ids(str(folder))
    assert read_all(dataset) == SHARDS
    assert dataset.num_documents == 6
    assert dataset.num_tokens == 16
    assert dataset.pad_id == 256
    assert dataset.token_bytes is not None
    assert dataset.token_bytes.tolist() == [1] * 256 + [0]


def test_reading_starts_at_any_document(folder: Path) -> None:
    dataset = open_ids(str(folder))
    assert read(dataset, 0, 1, 2) == SHARDS[0][1:]
    assert read(dataset, 2, 1, 1) == SHARDS[2][1:]
    assert [document.key for document in dataset.read(Span(0, 2, 1))] == ["0-2"]


def test_brace_expansion_and_lists_find_the_description_beside_the_tars(folder: Path) -> None:
    by_braces = open_ids(f"{folder}/shard-{{00000..00001}}.tar")
    assert read_all(by_braces) == SHARDS[:2]
    assert by_braces.pad_id == 256
    by_list = open_ids((f"{folder}/shard-00002.tar", f"{folder}/shard-00000.tar"))
    assert read_all(by_list) == [SHARDS[2], SHARDS[0]]


def test_several_folders_are_one_data_set(folder: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path / "more", [[[42, 256]]])
    assert read_all(open_ids((str(folder), str(tmp_path / "more")))) == [*SHARDS, [[42, 256]]]


def test_the_fingerprint_is_that_of_the_data_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    other = write_dataset(tmp_path / "other", [*SHARDS[:2], [[8, 256], [9, 11, 256]]])
    fingerprint = open_ids(str(folder)).fingerprint
    assert open_ids(str(tmp_path / "copy")).fingerprint == fingerprint
    assert open_ids(str(other)).fingerprint != fingerprint


def test_tars_of_text_are_tokenised_on_the_fly(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_tar(tmp_path / "set" / "a.tar", [("x/0.txt", b"hi"), ("x/1.json", b'{"text": "hihi", "n": 1}')])
    write_tar(tmp_path / "set" / "b.tar", [("2.jpg", b"no"), ("3.txt", b"h"), ("3.json", b'{"text": "unused"}')])
    expected = [[[*BYTES_OF_HI, 256], [*BYTES_OF_HI * 2, 256]], [[104, 256]]]
    dataset = open_ids(str(tmp_path / "set"), tokenizer="bytes")
    assert read_all(dataset) == expected
    assert read(dataset, 0, 1, 1) == expected[0][1:]
    assert dataset.pad_id == 256
    assert read_all(open_ids(f"{tmp_path}/set/{{a,b}}.tar", tokenizer="bytes")) == expected


def test_tars_of_tokens_from_elsewhere_use_the_type_of_the_vocabulary(tmp_path: Path) -> None:
    ids = [0, 65535, 65536, 100276]
    write_tar(tmp_path / "wide.tar", [("0.tokens", pack_ids(ids, "uint32")), ("0.json", b"{}")])
    assert read_all(open_ids(str(tmp_path / "wide.tar"), vocab_size=100277)) == [[ids]]
    write_tar(tmp_path / "narrow.tar", [("0.tokens", pack_ids([40000, 65535], "uint16"))])
    assert read_all(open_ids(str(tmp_path / "narrow.tar"), vocab_size=65536)) == [[[40000, 65535]]]


def test_pipes_are_read_up_to_the_document(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{n}.tokens", pack_ids([n, 256], "uint16")) for n in range(50)])
    dataset = open_ids(f"pipe:cat {tmp_path}/{{a,a}}.tar")
    assert len(dataset.shards) == 2
    assert read(dataset, 1, 30, 3) == [[30, 256], [31, 256], [32, 256]]


def test_a_failing_pipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pipe:exit 7.*status 7"):
        open_ids("pipe:exit 7")


def test_compressed_tars(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for number in range(4):
            (tmp_path / f"{number}.txt").write_text(f"h{number}")
            tar.add(tmp_path / f"{number}.txt", f"{number}.txt")
    assert read(open_ids(str(tmp_path / "a.tar.gz"), tokenizer="bytes"), 0, 2, 2) == [[104, 50, 256], [104, 51, 256]]


def test_http_reads_ranges(tmp_path: Path) -> None:
    documents = [[number % 256] * 300_000 for number in range(40)]  # 24 MB: larger than any read-ahead
    write_dataset(tmp_path, [documents])
    with serve(tmp_path) as server:
        dataset = open_ids(server.url)
        assert read(dataset, 0, 37, 2) == documents[37:39]
        assert 0 < server.bytes_asked_for(".tar") < 12_000_000
        assert read_all(open_ids(f"{server.url}/shard-{{00000..00000}}.tar")) == [documents]


def test_http_failures_are_tried_again(tmp_path: Path) -> None:
    write_dataset(tmp_path, SHARDS)
    with serve(tmp_path) as server:
        dataset = open_ids(server.url)
        server.failures_left = 3
        assert read(dataset, 0, 1, 2) == SHARDS[0][1:]
        server.failures_left = 100
        with pytest.raises(DataError, match=r"shard-00000\.tar: cannot be read.*503"):
            read(dataset, 0, 0, 1)


def test_http_without_a_data_set(tmp_path: Path) -> None:
    with serve(tmp_path) as server, pytest.raises(DataError, match=r"data\.train=http://127.*no such folder"):
        open_ids(f"{server.url}/nothing")


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(DataError, match="nosuch://x"):
        open_ids("nosuch://x")


def compressed(path: Path) -> bytes:
    """A tar of noise, which does not compress, so that its middle is the middle of the samples."""
    noise = random.Random(1)
    with tarfile.open(path, "w:gz") as tar:
        for number in range(8):
            header = tarfile.TarInfo(f"{number}.tokens")
            header.size = 60_000
            tar.addfile(header, io.BytesIO(noise.randbytes(header.size)))
    return path.read_bytes()


@pytest.mark.parametrize("damage", ["cut short", "changed"])
def test_a_compressed_tar_that_breaks_later_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.tar.gz"
    content = compressed(path)
    dataset = open_ids(str(path))
    middle = len(content) // 2
    path.write_bytes(
        content[:middle] if damage == "cut short" else content[:middle] + bytes(64) + content[middle + 64 :]
    )
    with pytest.raises(DataError, match=r"a\.tar\.gz: "):
        read_all(dataset)


def test_a_read_that_fails_in_the_middle_names_the_shard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_ids(str(folder))
    original = storage.open_at

    def break_off(location: str, offset: int) -> BinaryIO:
        stream = original(location, offset)
        reads = iter([stream.read(2048)])

        def read(size: int = -1) -> bytes:
            for data in reads:
                return data
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        return cast(BinaryIO, SimpleNamespace(read=read, close=stream.close))

    monkeypatch.setattr(storage, "open_at", break_off)
    with pytest.raises(DataError, match=r"shard-00000\.tar: cannot be read \(OSError: \[Errno 5\] Input/output error"):
        read(dataset, 0, 0, 3)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove_data(path: Path) -> None:
    path.unlink()


def spoil(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_tokens(path: Path) -> None:
    """Flip one bit in the middle of the tokens of document [4, 5, 6, 256]: 5 becomes 7."""
    content = bytearray(path.read_bytes())
    content[content.index(pack_ids([4, 5, 6, 256], "uint16")) + 2] ^= 2
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (
            "shard-00000.tar",
            spoil_tokens,
            r"shard-00000\.tar: sample 0-2: the tokens do not match their checksum.*again",
        ),
        ("shard-00000.tar", truncate, r"shard-00000\.tar: has 5120 bytes, but dataset\.json asks for 10240"),
        ("shard-00001.tar", remove_data, r"shard-00001\.tar: not found"),
        ("shard-00002.index", remove_data, r"shard-00002\.index: not found"),
        ("shard-00002.index", spoil, r"shard-00002\.index: does not match its checksum"),
        ("token_bytes.bin", spoil, r"token_bytes\.bin: does not match its checksum"),
        ("dataset.json", truncate, r"dataset\.json: not JSON"),
    ],
)
def test_damage_is_named(folder: Path, file: str, damage: Callable[[Path], None], message: str) -> None:
    damage(folder / file)
    with pytest.raises(DataError, match=message):
        read_all(open_ids(str(folder)))


def test_a_tar_cut_short_behind_a_true_size_is_found_while_reading(folder: Path) -> None:
    tar = folder / "shard-00000.tar"
    for size in (512 * 7, 512 * 8, 512 * 9 + 3):  # inside a member, between two, inside a header
        content = (write_dataset(folder, SHARDS) / tar.name).read_bytes()
        tar.write_bytes(content[:size])
        dataset = open_with_stated_size(folder, size)
        with pytest.raises(DataError, match=r"shard-00000\.tar: not a tar file, or damaged"):
            read(dataset, 0, 0, 3)


def open_with_stated_size(folder: Path, size: int) -> DocumentDataset:
    """The data set with the description changed to the size of a damaged first shard."""
    description = json.loads((folder / "dataset.json").read_text())
    description["shards"][0]["bytes"] = size
    (folder / "dataset.json").write_text(json.dumps(description))
    return open_ids(str(folder))


def test_a_file_that_is_no_tar(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match=r"a\.tar: not a tar file, or damaged"):
        open_ids(str(tmp_path / "a.tar"))
    (tmp_path / "b.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"b\.tar: not a tar file, or damaged"):
        open_ids(str(tmp_path / "b.tar"))


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.train=.*nowhere: no such folder"):
        open_ids(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"a\.tar: not found"):
        open_ids(str(tmp_path / "a.tar"))
    with pytest.raises(DataError, match=r"neither dataset\.json nor tar files"):
        open_ids(str(tmp_path))
    with pytest.raises(DataError, match="zero documents"):
        open_ids(str(write_dataset(tmp_path / "empty", [[]])))
    write_tar(tmp_path / "none.tar", [("a.jpg", b"x")])
    with pytest.raises(DataError, match="zero documents"):
        open_ids(str(tmp_path / "none.tar"))


def test_unbalanced_braces_are_named() -> None:
    with pytest.raises(DataError, match=r"data\.train=a\{b\.tar"):
        open_ids("a{b.tar")


def test_an_id_outside_the_vocabulary_names_shard_and_sample(tmp_path: Path) -> None:
    write_dataset(tmp_path / "set", [[[1, 256]], [[1, 256], [1, 257, 2]]])
    with pytest.raises(DataError, match=r"shard-00001\.tar: sample 1-1: token id 257 .* vocabulary of 257"):
        read_all(open_ids(str(tmp_path / "set")))
    write_tar(tmp_path / "a.tar", [("k7.tokens", pack_ids([3, 300], "uint16"))])
    with pytest.raises(DataError, match=r"a\.tar: sample k7: token id 300"):
        read_all(open_ids(str(tmp_path / "a.tar")))


def test_ids_stored_in_another_type_are_found(tmp_path: Path) -> None:
    """The type is stated with the data, and the index states the number of ids."""
    write_dataset(tmp_path / "set", [[[1, 2, 256]]], stated_dtype="uint32")
    with pytest.raises(DataError, match=r"sample 0-0: 12 bytes of tokens, but 3 tokens of uint16"):
        read_all(open_ids(str(tmp_path / "set")))
    write_tar(tmp_path / "a.tar", [("0.tokens", pack_ids([5, 0, 7, 8], "uint32"))])
    with pytest.raises(DataError, match=r"sample 0: every other id is 0"):
        read_all(open_ids(str(tmp_path / "a.tar")))


def test_another_vocabulary_or_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocabulary of 257 ids, but model\.vocab_size=4096"):
        open_ids(str(folder), vocab_size=4096)
    with pytest.raises(DataError, match=r"data\.tokenizer is not the tokenizer"):
        open_ids(str(folder), tokenizer="bytes")  # the test's data sets have a made-up fingerprint
    write_tar(tmp_path / "a.tar", [("0.txt", b"hi")])
    with pytest.raises(DataError, match=r"data\.tokenizer has 257 ids, but model\.vocab_size=300"):
        open_ids(str(tmp_path / "a.tar"), tokenizer="bytes", vocab_size=300)


def test_data_sets_of_different_tokenizers_do_not_mix(folder: Path, tmp_path: Path) -> None:
    other = write_dataset(tmp_path / "other", [[[1, 2]]], vocab_size=300)
    with pytest.raises(DataError, match="different tokenizers or settings"):
        open_ids((str(folder), str(other)))
    write_tar(tmp_path / "a.tar", [("0.tokens", pack_ids([1], "uint16"))])
    with pytest.raises(DataError, match=r"described by a dataset\.json and others are not"):
        open_ids((str(folder), str(tmp_path / "a.tar")))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("k.txt", b"\xff\xfe", r"a\.tar: sample k: not UTF-8"),
        ("k.json", b"{", r"a\.tar: sample k: not UTF-8 text or JSON"),
        ("k.json", b'{"content": "x"}', r'a\.tar: sample k: holds neither .* "text"'),
    ],
)
def test_samples_without_text_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    write_tar(tmp_path / "a.tar", [("j.txt", b"hi"), (name, content)])
    with pytest.raises(DataError, match=message):
        read_all(open_ids(str(tmp_path / "a.tar"), tokenizer="bytes"))


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("k.txt", b"hi")])
    with pytest.raises(DataError, match=r"sample k: holds text\. Set data\.tokenizer"):
        read_all(open_ids(str(tmp_path / "a.tar")))
