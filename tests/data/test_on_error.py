"""`data.on_error: skip`: what cannot be read is passed over and counted, and nothing else changes its place.

What a run must read is defined by a data set in which the lost documents are empty from the beginning.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.data import document_reader
from fbt_megatron.data.dataset import DocumentDataset, open_dataset
from fbt_megatron.data.document_reader import ReadDocument
from fbt_megatron.data.loader import TrainLoader, build_train_loader, build_validation_loader
from fbt_megatron.data.loader_state import merge_loader_states
from fbt_megatron.data.order import Span
from fbt_megatron.errors import DataError, DataSetupError
from tests.data.datasets import pack_ids, run_config, spoil_document, write_dataset, write_tar
from tests.data.range_server import serve

EOS = 256
SHARDS = [[[10 * shard + number] * (3 + number) + [EOS] for number in range(5)] for shard in range(3)]
Lost = set[tuple[int, int]]


def open_skipping(location: Path | str, *, tokenizer: str | None = None) -> DocumentDataset:
    return open_dataset(str(location), tokenizer=tokenizer, vocab_size=257, key="data.train", on_error="skip")


def read_all(dataset: DocumentDataset) -> list[ReadDocument]:
    return [
        document
        for number, shard in enumerate(dataset.shards)
        for document in dataset.read(Span(number, 0, shard.num_documents))
    ]


def without(lost: Lost) -> list[list[list[int]]]:
    """The data set with the lost documents empty."""
    return [
        [[] if (shard, number) in lost else tokens for number, tokens in enumerate(documents)]
        for shard, documents in enumerate(SHARDS)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "set", SHARDS)


def edit(path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def spoil_header(path: Path, member: str) -> None:
    """Change a byte of a member's name, so that the checksum of its header is wrong."""

    def flip(content: bytearray) -> None:
        content[content.index(member.encode()) + 100] ^= 1

    edit(path, flip)


def bit_flips(folder: Path) -> None:
    spoil_document(folder / "shard-00001.tar", SHARDS[1][0])
    spoil_document(folder / "shard-00001.tar", SHARDS[1][4])
    spoil_document(folder / "shard-00002.tar", SHARDS[2][3])


def first_header(folder: Path) -> None:
    spoil_header(folder / "shard-00000.tar", "0-2.json")


def second_header(folder: Path) -> None:
    spoil_header(folder / "shard-00000.tar", "0-2.tokens")


def cut_short(folder: Path) -> None:
    edit(folder / "shard-00000.tar", lambda content: content.__delitem__(slice(512 * 13, None)))


def no_shard(folder: Path) -> None:
    (folder / "shard-00001.tar").unlink()


def no_index(folder: Path) -> None:
    (folder / "shard-00001.index").unlink()


def spoiled_index(folder: Path) -> None:
    edit(folder / "shard-00001.index", lambda content: content.__setitem__(9, content[9] ^ 1))


def not_a_tar(folder: Path) -> None:
    (folder / "shard-00001.tar").write_bytes(os.urandom(20_000))


WHOLE_SHARD = {(1, number) for number in range(5)}
DAMAGES: list[tuple[Callable[[Path], None], Lost]] = [
    (bit_flips, {(1, 0), (1, 4), (2, 3)}),
    (first_header, {(0, 2)}),
    (second_header, {(0, 2)}),
    (cut_short, {(0, 3), (0, 4)}),
    (no_shard, WHOLE_SHARD),
    (no_index, WHOLE_SHARD),
    (spoiled_index, WHOLE_SHARD),
    (not_a_tar, WHOLE_SHARD),
]


@pytest.mark.parametrize(("damage", "lost"), DAMAGES)
@pytest.mark.parametrize("remote", [False, True])
def test_exactly_what_is_damaged_is_passed_over(
    folder: Path, damage: Callable[[Path], None], lost: Lost, *, remote: bool
) -> None:
    damage(folder)
    with serve(folder) as server:
        documents = read_all(open_skipping(server.url if remote else folder))
    assert [document.tokens.tolist() for document in documents] == [text for shard in without(lost) for text in shard]
    places = [(shard, number) for shard in range(3) for number in range(5)]
    assert {place for place, document in zip(places, documents, strict=True) if document.skipped} == lost
    for (shard, number), document in zip(places, documents, strict=True):
        known = document.skipped and not damage.__name__.endswith("index")
        assert document.skipped_tokens == (len(SHARDS[shard][number]) if known else 0)


def test_ids_outside_the_vocabulary_and_wrong_lengths(tmp_path: Path) -> None:
    texts = [[[1, EOS], [1, 257, 2], [3, EOS]]]
    assert [d.skipped for d in read_all(open_skipping(write_dataset(tmp_path / "ids", texts)))] == [False, True, False]
    folder = write_dataset(tmp_path / "type", [[[1, 2, EOS]]], stated_dtype="uint32")
    assert [d.skipped for d in read_all(open_skipping(folder))] == [True]


def test_a_lost_shard_is_one_line_and_a_lost_document_another(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    no_shard(folder)
    spoil_document(folder / "shard-00002.tar", SHARDS[2][3])
    read_all(open_skipping(folder))
    shard, document = (record.message for record in caplog.records)
    tokens = sum(len(text) for text in SHARDS[1])
    assert shard == (
        f"data.on_error=skip passes over documents 0 to 4 ({tokens} tokens): {folder}/shard-00001.tar: not found. "
        "Check the path or URL."
    )
    assert document.startswith(
        f"data.on_error=skip passes over document 3 (7 tokens): {folder}/shard-00002.tar: sample 2-3: the tokens do not"
    )


def test_lines_are_bounded(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_reader, "_MAX_REPORTS", 2)
    bit_flips(folder)
    assert sum(document.skipped for document in read_all(open_skipping(folder))) == 3
    lines = [record.message for record in caplog.records]
    assert len(lines) == 3
    assert "only counts what it passes over from now on" in lines[2]


def test_a_place_on_the_disk_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two neighbours are lost, for which the waits are made once; a later one is tried again anew."""
    documents = [[n] * 30_000 for n in range(12)]
    folder = write_dataset(tmp_path, [documents])
    dataset = open_skipping(folder)
    bad = [_place(dataset, number) for number in (4, 5, 9)]
    original = LocalFileOpener.read

    def read(file: LocalFileOpener, size: int = -1) -> bytes:
        start = file.tell()
        data = bytes(original(file, size))
        if file.path.endswith(".tar") and any(start <= place < start + len(data) for place in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return data

    monkeypatch.setattr(LocalFileOpener, "read", read, raising=False)
    read_documents = read_all(dataset)
    assert [number for number, document in enumerate(read_documents) if document.skipped] == [4, 5, 9]
    assert all(d.tokens.tolist() == text for d, text in zip(read_documents, documents, strict=True) if not d.skipped)
    tries = [record.message for record in caplog.records if "trying again" in record.message]
    assert [line.partition(" on: ")[0].rpartition(" ")[2] for line in tries] == ["3"] * 5 + ["8"] * 5


def _place(dataset: DocumentDataset, number: int) -> int:
    """A byte in the middle of a document."""
    return int(dataset.shards[0].index()[number, 0]) + 30_000


def test_settings_and_limits_stop_the_run_all_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "text.tar", [("k.txt", b"hi")])
    with pytest.raises(DataSetupError, match=r"Set data\.tokenizer"):
        read_all(open_skipping(tmp_path / "text.tar"))
    write_tar(tmp_path / "wide.tar", [("0.tokens", pack_ids([5, 0, 7, 8], "uint32"))])
    with pytest.raises(DataSetupError, match="every other id is 0"):
        read_all(open_skipping(tmp_path / "wide.tar"))
    dataset = open_skipping(folder)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(LocalFileSystem, "open", fail)
    with pytest.raises(DataSetupError, match="Too many open files"):
        read_all(dataset)


@pytest.mark.parametrize("name", ["dataset.json", "token_bytes.bin"])
def test_a_data_set_without_its_description_is_refused(folder: Path, name: str) -> None:
    edit(folder / name, lambda content: content.__delitem__(slice(len(content) // 2, None)))
    with pytest.raises(DataError, match=name):
        open_skipping(folder)


def test_damage_that_a_tar_without_a_description_has_at_the_start_is_refused(tmp_path: Path) -> None:
    """The number of its documents, and with it the order of all, is not known."""
    (tmp_path / "a.tar").write_bytes(b"hello" * 1000)
    with pytest.raises(DataError, match=r"a\.tar: not a tar file, or damaged"):
        open_skipping(tmp_path / "a.tar")


def test_tars_made_elsewhere(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.txt", b"hi"), ("1.txt", b"\xff"), ("2.json", b"{"), ("3.txt", b"ho")])
    documents = read_all(open_skipping(tmp_path / "a.tar", tokenizer="bytes"))
    assert [(d.tokens.tolist(), d.skipped) for d in documents] == [
        ([104, 105, EOS], False),
        ([], True),
        ([], True),
        ([104, 111, EOS], False),
    ]


def test_a_command_or_compressed_tar_ends_where_it_breaks(tmp_path: Path) -> None:
    """What does not decode is lost alone; nothing can be read behind a break."""
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for number in range(40):
            content = os.urandom(6000) if number != 3 else b"\xff" * 6000
            content = bytes(byte & 0x7F for byte in content) if number != 3 else content
            header = tarfile.TarInfo(f"{number}.txt")
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    whole = path.read_bytes()
    dataset = open_skipping(path, tokenizer="bytes")
    piped = open_skipping(f"pipe:cat {path}", tokenizer="bytes")
    path.write_bytes(whole[: len(whole) // 2])
    for broken in (dataset, piped):
        skipped = [document.skipped for document in read_all(broken)]
        assert len(skipped) == 40
        assert [number for number in range(10) if skipped[number]] == [3]
        first = skipped.index(True, 4)
        assert 15 < first < 25
        assert all(skipped[first:])


# The loader


def skipping(config: RunConfig, **changes: Any) -> RunConfig:
    return replace(config, data=replace(config.data, on_error="skip", **({"max_skipped": 1.0} | changes)))


def rows_of(loader: TrainLoader, num_steps: int) -> dict[int, tuple[list[int], list[int], tuple[str, ...]]]:
    """Tokens, labels and document keys of each row."""
    rows = {}
    for _ in range(num_steps):
        for batch in loader.next_step():
            for number, tokens, labels in zip(
                batch.rows.tolist(), batch.tokens.tolist(), batch.labels.tolist(), strict=True
            ):
                rows[number] = tokens, labels, loader.last_documents[number]
    return rows


LENGTHS = [3 + 7 * n % 23 for n in range(60)]
TEXTS = [[n] * length + [EOS] for n, length in enumerate(LENGTHS)]
DAMAGED = (2, 3, 11, 29, 30, 31, 44, 59)
PARTS = (slice(0, 20), slice(20, 27), slice(27, 60))


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Path, Path]:
    """A data set with damaged documents, and one in which they are empty."""
    folder = write_dataset(tmp_path / "damaged", [TEXTS[part] for part in PARTS])
    for number in DAMAGED:
        shard = next(shard for shard, part in enumerate(PARTS) if part.start <= number < part.stop)
        spoil_document(folder / f"shard-{shard:05d}.tar", TEXTS[number])
    texts = [[] if number in DAMAGED else text for number, text in enumerate(TEXTS)]
    return folder, write_dataset(tmp_path / "empty", [texts[part] for part in PARTS])


OPTIONS: dict[str, Any] = {"streams": 8, "micro_batch_size": 2, "global_batch_size": 8}
NUM_STEPS = 30


@pytest.mark.parametrize(("dp_size", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (4, 1)])
def test_rows_and_counts_do_not_depend_on_ranks_or_readers(
    damaged: tuple[Path, Path], dp_size: int, workers: int
) -> None:
    folder, empty = damaged
    expected = rows_of(build_train_loader(run_config(empty, **OPTIONS), dp_rank=0, dp_size=1), NUM_STEPS)
    config = skipping(run_config(folder, **OPTIONS, workers=workers))
    rows, skipped, epochs = {}, [0, 0], []
    for dp_rank in range(dp_size):
        loader = build_train_loader(config, dp_rank=dp_rank, dp_size=dp_size)
        rows |= rows_of(loader, NUM_STEPS)
        skipped = [total + own for total, own in zip(skipped, loader.skipped, strict=True)]
        epochs.append(loader.epoch)
        loader.close()
    assert rows == expected
    assert max(epochs) >= 2
    assert skipped == _expected_skips(empty)


def _expected_skips(empty: Path) -> list[int]:
    """Documents and tokens passed over, from the cursors of the data set without damage."""
    loader = build_train_loader(run_config(empty, **OPTIONS), dp_rank=0, dp_size=1)
    rows_of(loader, NUM_STEPS)
    order = loader._reader.order
    found = [0, 0]
    for stream, cursor in loader._state.cursors.items():
        for epoch in range(cursor.epoch + 1):
            start, stop = order.stream_range(stream, num_streams=8)
            stop = start + cursor.document if epoch == cursor.epoch else stop
            for span in order.epoch(epoch).spans(start, stop):
                for number in range(span.first, span.first + span.count):
                    document = PARTS[span.shard].start + number
                    if document in DAMAGED:
                        found[0] += 1
                        found[1] += len(TEXTS[document])
    return found


@pytest.mark.parametrize(("before", "after", "readers"), [(1, 1, (0, 0)), (2, 4, (0, 1)), (4, 1, (1, 2))])
def test_a_resumed_run_counts_on(damaged: tuple[Path, Path], before: int, after: int, readers: tuple[int, int]) -> None:
    folder, empty = damaged
    old, new = (skipping(run_config(folder, **OPTIONS, workers=workers)) for workers in readers)
    straight = build_train_loader(skipping(run_config(folder, **OPTIONS)), dp_rank=0, dp_size=1)
    expected = rows_of(straight, NUM_STEPS)
    first = [build_train_loader(old, dp_rank=rank, dp_size=before) for rank in range(before)]
    rows = {}
    for loader in first:
        rows |= rows_of(loader, 13)
        loader.close()
    state = json.loads(json.dumps(merge_loader_states([loader.state_dict() for loader in first])))
    then = [build_train_loader(new, dp_rank=rank, dp_size=after, state=state) for rank in range(after)]
    for loader in then:
        rows |= rows_of(loader, NUM_STEPS - 13)
        loader.close()
    assert rows == expected
    assert merge_loader_states([loader.state_dict() for loader in then]) == straight.state_dict()
    assert list(straight.skipped) == _expected_skips(empty)


def test_the_counts_are_those_of_the_rows_handed_out(damaged: tuple[Path, Path]) -> None:
    """Readers that run ahead do not count, and going on from any step gives the same numbers."""
    config = skipping(run_config(damaged[0], streams=2, micro_batch_size=2, global_batch_size=2))
    straight = build_train_loader(config, dp_rank=0, dp_size=1)
    counts = []
    for _ in range(60):
        state = straight.state_dict()
        straight.next_step()
        counts.append(straight.skipped)
        resumed = build_train_loader(config, dp_rank=0, dp_size=1, state=state)
        resumed.next_step()
        assert resumed.state_dict() == straight.state_dict()
    ahead = build_train_loader(
        skipping(run_config(damaged[0], streams=2, micro_batch_size=1, global_batch_size=2, workers=2)),
        dp_rank=0,
        dp_size=1,
    )
    for expected in counts:
        ahead.next_step()
        assert ahead.skipped == expected
    ahead.close()
    assert counts[-1][0] > len(DAMAGED)
    assert len(set(counts)) > 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_loses_too_much_stops(damaged: tuple[Path, Path], workers: int) -> None:
    folder, _ = damaged
    for tar in folder.glob("*.tar"):
        tar.unlink()
    for share, allowed in ((0.0, 0), (0.05, 3)):
        loader = build_train_loader(
            skipping(run_config(folder, **OPTIONS, workers=workers), max_skipped=share), dp_rank=0, dp_size=1
        )
        with pytest.raises(
            DataError, match=rf"{allowed + 1} of the 60 documents .* data\.max_skipped={share:g} allows {allowed}\."
        ):
            loader.next_step()
        loader.close()
    loader = build_train_loader(skipping(run_config(folder, **OPTIONS, workers=workers)), dp_rank=0, dp_size=1)
    with pytest.raises(DataError, match="found no tokens in epoch 0: its documents are empty or cannot be read"):
        loader.next_step()
    loader.close()


def test_what_all_ranks_lost_is_measured_against_the_epochs_begun(folder: Path) -> None:
    config = skipping(run_config(folder, streams=1, micro_batch_size=1, global_batch_size=1), max_skipped=0.2)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    loader.check_skipped(3, 0)
    loader.check_skipped(6, 1)
    with pytest.raises(DataError, match=r"4 of the 15 documents of the epochs begun so far were passed over"):
        loader.check_skipped(4, 0)
    with pytest.raises(DataError, match=r"7 of the 30 documents .* allows 6"):
        loader.check_skipped(7, 1)


@pytest.mark.parametrize("damage", [cut_short, bit_flips])
def test_validation_data_stops_the_run(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A loss over fewer documents could not be compared with the one before."""
    shutil.copytree(folder, tmp_path / "train")
    damage(folder)
    config = skipping(run_config(tmp_path / "train", validation=folder, streams=1, global_batch_size=1, batches=40))
    with pytest.raises(DataError, match=r"shard-0000\d\.tar"):
        _read_validation(config)


def _read_validation(config: RunConfig) -> list[Any]:
    loader: Iterator[Any] | Any = build_validation_loader(config, dp_rank=0, dp_size=1)
    return list(loader)
