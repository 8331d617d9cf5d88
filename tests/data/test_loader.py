"""Order, exact resume and equal work of the loaders, for every number of ranks and readers.

Each document is `S` copies of its own id and its end, so a token tells its document.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.local import LocalFileOpener

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.validation import config_problems
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.data.loader import TrainLoader, build_train_loader, build_validation_loader
from fbt_megatron.data.loader_state import merge_loader_states
from fbt_megatron.data.packing import Cursor
from fbt_megatron.errors import DataError
from tests.data.datasets import run_config, write_dataset, write_tar
from tests.data.range_server import serve

SEQ_LENGTH = 8
EOS = 256
UNEVEN = (5, 3, 1)


def numbered_documents(counts: tuple[int, ...], length: int = SEQ_LENGTH) -> list[list[list[int]]]:
    """Shards of so many documents; document d of the data set is `length - 1` times d, then EOS."""
    numbers = iter(range(sum(counts)))
    return [[[next(numbers)] * (length - 1) + [EOS] for _ in range(count)] for count in counts]


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Three shards of 5, 3 and 1 documents, each document exactly one row long."""
    return write_dataset(tmp_path / "uneven", numbered_documents(UNEVEN))


def rows_by_number(steps: list[list[TrainBatch]]) -> dict[int, list[int]]:
    """Tokens of each global row."""
    rows: dict[int, list[int]] = {}
    for batch in (batch for step in steps for batch in step):
        for number, tokens in zip(batch.rows.tolist(), batch.tokens.tolist(), strict=True):
            assert number not in rows, "a row was read twice"
            rows[number] = tokens
    return rows


def read_rows(config: RunConfig, num_steps: int, dp_size: int = 1) -> dict[int, list[int]]:
    """Tokens of each row of the first steps, read by all ranks."""
    rows: dict[int, list[int]] = {}
    for dp_rank in range(dp_size):
        loader = build_train_loader(config, dp_rank=dp_rank, dp_size=dp_size)
        mine = rows_by_number(read_steps(loader, num_steps))
        loader.close()
        assert not rows.keys() & mine.keys()
        rows |= mine
    return rows


def read_steps(loader: TrainLoader, num_steps: int) -> list[list[TrainBatch]]:
    return [loader.next_step() for _ in range(num_steps)]


def as_lists(steps: list[list[TrainBatch]]) -> list[list[dict[str, Any]]]:
    return [[{name: tensor.tolist() for name, tensor in vars(batch).items()} for batch in step] for step in steps]


def test_shapes_types_and_row_numbers(uneven: Path) -> None:
    config = run_config(uneven, streams=8, micro_batch_size=2, global_batch_size=16)
    loader = build_train_loader(config, dp_rank=1, dp_size=2)
    steps = read_steps(loader, 2)
    # 8 streams, 2 ranks: rank 1 owns streams 4 to 7, in groups of 2; a step has 2 cycles.
    assert [[batch.rows.tolist() for batch in step] for step in steps] == [
        [[4, 5], [6, 7], [12, 13], [14, 15]],
        [[20, 21], [22, 23], [28, 29], [30, 31]],
    ]
    batch = steps[0][0]
    for name in ("tokens", "labels", "positions", "document_ids"):
        assert getattr(batch, name).shape == (2, SEQ_LENGTH)
        assert getattr(batch, name).dtype == torch.int64
    assert batch.num_trained_tokens == 2 * (SEQ_LENGTH - 1)
    assert batch.to("cpu").tokens.equal(batch.tokens)


@pytest.mark.parametrize("workers", [0, 2])
def test_uneven_shards_give_every_rank_the_same_work(uneven: Path, workers: int) -> None:
    """Ids come at most once per epoch and rank work is equal, however many steps are run."""
    config = run_config(uneven, streams=8, micro_batch_size=2, global_batch_size=8, workers=workers)
    loaders = [build_train_loader(config, dp_rank=rank, dp_size=2) for rank in range(2)]
    seen: Counter[int] = Counter()
    for max_steps in range(1, 13):
        steps = [loader.next_step() for loader in loaders]
        assert [len(step) for step in steps] == [2, 2], max_steps
        seen.update(int(tokens[0]) for step in steps for batch in step for tokens in batch.tokens)
        # 9 ids in 8 streams: a stream has one or two per epoch, so n steps read an id between n // 2 and n times.
        assert set(seen) <= set(range(9))
        assert max(seen.values()) <= max_steps
        assert max_steps < 2 or min(seen[number] for number in range(9)) >= max_steps // 2
    for loader in loaders:
        loader.close()


def test_each_document_once_per_epoch_and_epochs_differ(uneven: Path) -> None:
    """With one stream the epochs are visible one after the other."""
    config = run_config(uneven, streams=1, global_batch_size=1)
    rows = read_rows(config, 9 * 4)
    epochs = [[rows[n][0] for n in range(9 * e, 9 * e + 9)] for e in range(4)]
    for ids in epochs:
        assert sorted(ids) == list(range(9))
    assert all(a != b for a, b in pairwise(epochs))


def test_streams_partition_an_epoch(tmp_path: Path) -> None:
    """12 documents in 4 streams: 3 rows of each stream are one epoch."""
    folder = write_dataset(tmp_path, numbered_documents((5, 3, 1, 3)))
    rows = read_rows(run_config(folder, streams=4, global_batch_size=4), 6)
    for epoch in range(2):
        ids = [rows[n][0] for n in range(12 * epoch, 12 * epoch + 12)]
        assert sorted(ids) == list(range(12))


@pytest.mark.parametrize("counts", [UNEVEN, (9,), (1,) * 9, (17, 0, 2)])
def test_a_document_is_read_by_one_rank_and_reader_in_a_pass(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Two ranks of two readers: in each pass every document once, over all of them, and in another order each time."""
    folder = write_dataset(tmp_path, numbered_documents(counts))
    config = run_config(folder, streams=8, micro_batch_size=2, global_batch_size=8, workers=2)
    rows = read_rows(config, 12, dp_size=2)
    num_documents = sum(counts)
    sizes = [(v + 1) * num_documents // 8 - v * num_documents // 8 for v in range(8)]
    passes = []
    for epoch in range(12 // max(sizes)):
        read = {
            v: [rows[n * 8 + v][0] for n in range(epoch * size, (epoch + 1) * size)] for v, size in enumerate(sizes)
        }
        # Streams 0 to 3 are those of rank 0, and each two of them, a group, those of one reader.
        readers = [[i for v in (2 * r, 2 * r + 1) for i in read[v]] for r in range(4)]
        assert sorted(i for reader in readers for i in reader) == list(range(num_documents))
        passes.append(readers)
    assert len(passes) >= 4
    assert all(one != other for one, other in pairwise(passes)) or max(counts) == 1


def test_one_shard_serves_two_ranks(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, numbered_documents((8,)))
    rows = read_rows(run_config(folder, streams=4, global_batch_size=4), 2, dp_size=2)
    assert sorted(tokens[0] for tokens in rows.values()) == list(range(8))


def test_the_order_does_not_depend_on_ranks_or_readers(tmp_path: Path) -> None:
    """Documents of many lengths, so that rows cut them."""
    texts = [[n] * (3 + 7 * n % 23) + [EOS] for n in range(50)]
    folder = write_dataset(tmp_path, [texts[:20], texts[20:27], texts[27:]])
    base = run_config(folder, streams=8, micro_batch_size=2, global_batch_size=16)
    expected = read_rows(base, 12)
    assert len(expected) == 12 * 16
    for dp_size in (2, 4):
        assert read_rows(base, 12, dp_size) == expected
    for workers in (1, 2, 4):
        config = run_config(folder, streams=8, micro_batch_size=2, global_batch_size=16, workers=workers)
        assert read_rows(config, 12) == expected
    assert read_rows(run_config(folder, streams=8, micro_batch_size=1, global_batch_size=8), 24) == expected


def test_seeds(uneven: Path) -> None:
    rows = [read_rows(run_config(uneven, seed=seed), 6) for seed in (1, 1, 2)]
    assert rows[0] == rows[1]
    assert rows[0] != rows[2]


@pytest.mark.parametrize(
    ("before", "after", "readers"), [(1, 1, (0, 0)), (2, 4, (0, 0)), (4, 1, (1, 2)), (1, 2, (4, 2))]
)
def test_resume_is_exact_with_other_ranks_and_readers(
    tmp_path: Path, before: int, after: int, readers: tuple[int, int]
) -> None:
    texts = [[n] * (3 + 7 * n % 23) + [EOS] for n in range(50)]
    folder = write_dataset(tmp_path, [texts[:20], texts[20:27], texts[27:]])
    whole = run_config(folder, streams=8, micro_batch_size=2, global_batch_size=16)
    expected = read_rows(whole, 20)
    old, new = (
        run_config(folder, streams=8, micro_batch_size=2, global_batch_size=16, workers=workers) for workers in readers
    )
    first = [build_train_loader(old, dp_rank=rank, dp_size=before) for rank in range(before)]
    rows: dict[int, list[int]] = {}
    for loader in first:
        rows |= rows_by_number(read_steps(loader, 11))
    state = json.loads(json.dumps(merge_loader_states([loader.state_dict() for loader in first])))
    for rank in range(after):
        loader = build_train_loader(new, dp_rank=rank, dp_size=after, state=state)
        rows |= rows_by_number(read_steps(loader, 9))
        loader.close()
    for loader in first:
        loader.close()
    assert rows == expected


def test_resume_repeats_everything_in_a_batch(tmp_path: Path) -> None:
    texts = [[n] * (1 + 5 * n % 17) + [EOS] for n in range(30)]
    config = run_config(write_dataset(tmp_path, [texts]), streams=2, micro_batch_size=2, global_batch_size=2)
    straight = build_train_loader(config, dp_rank=0, dp_size=1)
    for _ in range(40):
        state = straight.state_dict()
        step = straight.next_step()
        resumed = build_train_loader(config, dp_rank=0, dp_size=1, state=state)
        assert as_lists([resumed.next_step()]) == as_lists([step])
        assert resumed.last_documents == straight.last_documents
    assert straight.epoch > 1


@pytest.mark.parametrize("workers", [0, 2])
def test_cycles_that_are_passed_over(uneven: Path, workers: int) -> None:
    """The others have the rows that they have without it, two cycles to a step; so has a loader that goes on."""
    config = run_config(uneven, streams=4, global_batch_size=8, workers=workers)
    plain = rows_by_number(read_steps(build_train_loader(config, dp_rank=0, dp_size=1), 8))
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    read_steps(loader, 1)
    state = merge_loader_states([loader.state_dict()])
    read_steps(loader, 3)
    loader.rewind(state, pass_over=(4, 7))  # an odd number, as after a change of the batch size
    found = rows_by_number(read_steps(loader, 2))
    state = merge_loader_states([loader.state_dict()])
    loader.close()
    assert list(found) == [*range(8, 16), *range(28, 36)]
    assert (state["cycle"], state["passed_over"]) == (9, [[4, 7]])
    resumed = build_train_loader(config, dp_rank=0, dp_size=1, state=state)
    found |= rows_by_number(read_steps(resumed, 1))
    assert resumed.state_dict()["passed_over"] == [[4, 7]]
    resumed.close()
    assert found == {number: plain[number] for number in found}
    assert max(found) == 43


def test_the_state_is_that_of_the_batches_handed_out(uneven: Path) -> None:
    """Readers that run ahead do not move it."""
    states = []
    for workers in (0, 2):
        config = run_config(uneven, streams=4, global_batch_size=4, workers=workers)
        loader = build_train_loader(config, dp_rank=0, dp_size=1)
        assert loader.state_dict()["cursors"]["0"] == asdict(Cursor())
        loader.next_step()
        time.sleep(0.2)
        states.append(loader.state_dict())
        loader.close()
    assert states[0] == states[1]
    assert states[0]["cycle"] == 1


def test_epochs_are_counted_by_the_stream_that_is_furthest(tmp_path: Path) -> None:
    """Documents of one row each: 3 in the first stream's part, 4 in the second's."""
    config = run_config(write_dataset(tmp_path, numbered_documents((7,))), streams=2, global_batch_size=2)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    seen = []
    for _ in range(7):
        seen.append(loader.epoch)
        loader.next_step()
    assert seen == [0, 0, 0, 1, 1, 1, 2]
    later = build_train_loader(config, dp_rank=0, dp_size=1, state=loader.state_dict())
    assert later.epoch == loader.epoch == 2


def test_closing_and_going_on_loses_nothing(uneven: Path) -> None:
    config = run_config(uneven, workers=2)
    expected = read_rows(config, 6)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    steps = []
    for _ in range(6):
        steps.append(loader.next_step())
        loader.close()
    assert rows_by_number(steps) == expected


def test_documents_of_a_step_are_named(uneven: Path) -> None:
    loader = build_train_loader(run_config(uneven), dp_rank=0, dp_size=1)
    step = loader.next_step()
    shard_starts = {0: 0, 1: 5, 2: 8}
    rows = rows_by_number([step])
    assert list(loader.last_documents) == list(rows)
    for number, keys in loader.last_documents.items():
        shard, _, document = keys[0].partition("-")
        assert rows[number][0] == shard_starts[int(shard)] + int(document)


def test_reading_draws_nothing_from_the_global_generator(uneven: Path) -> None:
    for workers in (0, 2):
        torch.manual_seed(3)
        loader = build_train_loader(run_config(uneven, workers=workers), dp_rank=0, dp_size=1)
        loader.next_step()
        loader.close()
        drawn = torch.rand(4)
        torch.manual_seed(3)
        assert drawn.equal(torch.rand(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_reader_is_the_error_of_the_loader(tmp_path: Path, workers: int) -> None:
    documents = numbered_documents((16,))
    documents[0][11][2] = 300
    config = run_config(write_dataset(tmp_path, documents), workers=workers)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    with pytest.raises(DataError, match=r"^/.*shard-00000\.tar: sample 0-11: token id 300 at position 2 .*$"):
        read_steps(loader, 5)
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_changed_tokens_are_never_trained_on(tmp_path: Path, workers: int) -> None:
    folder = write_dataset(tmp_path, numbered_documents((16,)))
    flip_bit(folder / "shard-00000.tar", bytes([11, 0] * (SEQ_LENGTH - 1)))
    loader = build_train_loader(run_config(folder, workers=workers), dp_rank=0, dp_size=1)
    with pytest.raises(DataError, match=r"shard-00000\.tar: sample 0-11: the tokens do not match their checksum"):
        read_steps(loader, 5)
    with pytest.raises(DataError, match="sample 0-11"):  # another try is no way around it
        read_steps(loader, 5)
    loader.close()


def flip_bit(path: Path, tokens: bytes) -> None:
    """Change the lowest bit in the middle of a document that is stored as `tokens`; the id stays a valid one."""
    content = bytearray(path.read_bytes())
    assert content.count(tokens) == 1
    content[content.index(tokens) + len(tokens) // 4 * 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_disk_that_fails_later_is_an_error_of_the_data(
    uneven: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    loader = build_train_loader(run_config(uneven, workers=workers), dp_rank=0, dp_size=1)
    reads = iter(range(20))
    original = LocalFileOpener.read

    def failing(file: LocalFileOpener, *arguments: int) -> bytes:
        if next(reads, None) is None:
            raise OSError(errno.EIO, "Input/output error")
        return bytes(original(file, *arguments))

    monkeypatch.setattr(LocalFileOpener, "read", failing, raising=False)
    with pytest.raises(DataError, match=r"^/.*shard-0000\d\.\w+: cannot be read \(OSError: .*Input/output error"):
        read_steps(loader, 50)
    loader.close()


def signals(process: int, kind: str) -> set[int]:
    """Signals that a process catches (`SigCgt`) or ignores (`SigIgn`)."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = int(next(line for line in status if line.startswith(kind)).split()[1], 16)
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def child_processes() -> set[int]:
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(child) for child in children.read_text().split()}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the list of child processes of Linux")
def test_readers_end_with_the_loader_and_outlive_signals_to_the_group(uneven: Path) -> None:
    before = child_processes()
    previous = signal.signal(signal.SIGTERM, lambda *_: None)  # as the trainer does
    try:
        loader = build_train_loader(run_config(uneven, workers=2), dp_rank=0, dp_size=1)
        loader.next_step()
        readers = child_processes() - before
        assert len(readers) == 2
        assert all(os.getpgid(reader) != os.getpgid(0) for reader in readers)
        for reader in readers:
            assert {signal.SIGINT, signal.SIGUSR1} <= signals(reader, "SigIgn")
            assert signal.SIGTERM not in signals(reader, "SigCgt") | signals(reader, "SigIgn")
        loader.next_step()
        loader.close()
        assert not child_processes() & readers
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads the list of child processes of Linux")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_reader_is_an_error_of_the_data(tmp_path: Path, workers: int) -> None:
    """Its pipe is full of messages larger than the pipe, so that it dies in the middle of one."""
    length = 40_000
    folder = write_dataset(tmp_path, numbered_documents((16,), length=length))
    config = run_config(folder, seq_length=length, workers=workers)
    before = child_processes()
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    loader.next_step()
    state = loader.state_dict()
    time.sleep(0.2)
    readers = child_processes() - before
    victim = min(readers)
    os.kill(victim, signal.SIGKILL)
    time.sleep(0.2)  # nothing happens until data is wanted: ranks can only agree on an error there
    message = rf"data\.workers={workers}: reader process \d \(pid {victim}\) was killed by SIGKILL, .*memory"
    with pytest.raises(DataError, match=message):
        loader.next_step()
    assert loader.state_dict() == state
    assert not child_processes() & readers
    loader.next_step()  # a later try has new readers
    loader.close()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes as Linux lists them")
def test_readers_end_with_a_trainer_that_is_killed(uneven: Path) -> None:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    trainer = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(uneven, sending))
    trainer.start()
    readers = receiving.recv()
    assert len(readers) == 2
    assert all(Path(f"/proc/{reader}").exists() for reader in readers)
    trainer.kill()
    trainer.join()
    deadline = time.monotonic() + 10
    while any(is_running(reader) for reader in readers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(is_running(reader) for reader in readers)


def train_until_killed(folder: Path, sending: Connection) -> None:
    loader = build_train_loader(run_config(folder, workers=2), dp_rank=0, dp_size=1)
    loader.next_step()
    sending.send(child_processes())
    time.sleep(60)


def is_running(process: int) -> bool:
    """Whether a process is there and not only a record of its exit."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_readers_fetch_over_http(uneven: Path) -> None:
    with serve(uneven) as server:
        rows = read_rows(run_config(server.url, workers=2), 6)
    assert rows == read_rows(run_config(uneven), 6)


def test_readers_that_do_not_share_the_groups_evenly_are_refused(uneven: Path) -> None:
    """By the configuration's rules in the user's words; a program that goes around them gets no other order."""
    config = run_config(uneven, streams=6, global_batch_size=6, workers=4)
    assert any("data.workers=4: must divide" in problem for problem in config_problems(config))
    with pytest.raises(AssertionError):
        build_train_loader(config, dp_rank=0, dp_size=1)


def test_training_data_that_is_too_small_is_refused(tmp_path: Path) -> None:
    few = write_dataset(tmp_path / "few", numbered_documents((2, 1), length=100))
    with pytest.raises(DataError, match=r"data\.streams=4: the training data has only 3 documents"):
        build_train_loader(run_config(few), dp_rank=0, dp_size=1)
    short = write_dataset(tmp_path / "short", numbered_documents((8,)))
    with pytest.raises(DataError, match=r"model\.seq_length=16: a row takes 17 tokens, .* share 64 .* about 16 each"):
        build_train_loader(run_config(short, seq_length=16), dp_rank=0, dp_size=1)
    build_train_loader(run_config(short, seq_length=15), dp_rank=0, dp_size=1)


def test_text_without_content_is_refused(tmp_path: Path) -> None:
    blank = [(f"{n}.txt", b" " * 100) for n in range(4)]
    write_tar(tmp_path / "a.tar", blank)
    config = run_config(tmp_path / "a.tar", tokenizer="bytes")
    with pytest.raises(DataError, match=r"stream 0 of data\.streams=4 found no tokens in epoch 0"):
        build_train_loader(config, dp_rank=0, dp_size=1).next_step()


def test_a_state_of_other_streams_or_data_is_refused(uneven: Path, tmp_path: Path) -> None:
    state = build_train_loader(run_config(uneven), dp_rank=0, dp_size=1).state_dict()
    with pytest.raises(DataError, match=r"data\.streams=2: the checkpoint was made with 4"):
        build_train_loader(run_config(uneven, streams=2), dp_rank=0, dp_size=1, state=state)
    other = write_dataset(tmp_path / "other", numbered_documents((4, 5)))
    with pytest.raises(DataError, match=r"data\.train: not the data set that the checkpoint was made with"):
        build_train_loader(run_config(other), dp_rank=0, dp_size=1, state=state)
    with pytest.raises(DataError, match="format 99"):
        build_train_loader(run_config(uneven), dp_rank=0, dp_size=1, state={**state, "version": 99})


def test_token_bytes(uneven: Path, tmp_path: Path) -> None:
    config = run_config(uneven, validation=uneven)
    for loader in (
        build_train_loader(config, dp_rank=0, dp_size=1),
        build_validation_loader(config, dp_rank=0, dp_size=1),
    ):
        assert loader is not None
        assert loader.token_bytes is not None
        assert loader.token_bytes.tolist() == [1] * 256 + [0]


def validation_steps(config: RunConfig, dp_size: int) -> list[list[list[TrainBatch]]]:
    """Global batches of each rank."""
    loaders = [build_validation_loader(config, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    return [list(loader) for loader in loaders if loader is not None]


def trained_labels(batches: list[list[TrainBatch]]) -> Counter[int]:
    labels = torch.cat([batch.labels.flatten() for step in batches for batch in step])
    return Counter(labels[labels != IGNORE_INDEX].tolist())


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_validation_reads_everything_once_and_then_nothing(tmp_path: Path, dp_size: int) -> None:
    texts = [[n] * (1 + 5 * n % 17) + [EOS] for n in range(9)]
    folder = write_dataset(tmp_path, [texts[:5], texts[5:8], texts[8:]])
    config = run_config(folder, validation=folder, streams=4, global_batch_size=8, batches=4)
    ranks = validation_steps(config, dp_size)
    assert [[len(step) for step in rank] for rank in ranks] == [[8 // dp_size] * 4] * dp_size
    total = sum((trained_labels(rank) for rank in ranks), Counter())
    assert total == Counter(token for text in texts for token in text[1:])
    assert ranks[0][-1][-1].num_trained_tokens == 0
    rows = {n: t for rank in ranks for n, t in rows_by_number(rank).items()}
    assert rows == rows_by_number(validation_steps(config, 1)[0])


def test_validation_is_the_same_each_time_in_stored_order(uneven: Path) -> None:
    config = run_config(uneven, validation=uneven, streams=1, global_batch_size=1, batches=9)
    loader = build_validation_loader(config, dp_rank=0, dp_size=1)
    assert loader is not None
    assert len(loader) == 9
    first = as_lists(list(loader))
    assert as_lists(list(loader)) == first
    assert [step[0]["tokens"][0][0] for step in first] == list(range(9))


def test_validation_may_have_fewer_documents_than_streams(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path, [[[1, 2, 3, EOS]]])
    config = run_config(folder, validation=folder, streams=4, batches=1)
    ranks = validation_steps(config, 2)
    assert sum(batch.num_trained_tokens for rank in ranks for step in rank for batch in step) == 3


def test_no_validation_data_is_no_loader(uneven: Path) -> None:
    assert build_validation_loader(run_config(uneven), dp_rank=0, dp_size=1) is None
