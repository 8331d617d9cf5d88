"""Building data sets from text: what is stored, where it goes, and what happens when a build is stopped."""

import contextlib
import fcntl
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fbt_megatron.data import build, shard_writer, sources
from fbt_megatron.data.arrangement import shard_boundaries, shuffled, validation_mask
from fbt_megatron.data.build import BuildSettings, build_dataset
from fbt_megatron.data.build_folder import BUILD_FILE
from fbt_megatron.data.chat_template import load_chat_template
from fbt_megatron.data.chunks import TokenizerSpec
from fbt_megatron.data.conversations import ConversationLines
from fbt_megatron.data.format import dataset_from_json, decode_index
from fbt_megatron.data.pool import run_tasks
from fbt_megatron.data.progress import Progress, format_count
from fbt_megatron.data.tokenizer import load_tokenizer
from fbt_megatron.data.tokenizer_training import TokenizerTraining, train_tokenizer
from fbt_megatron.errors import DataError
from tests.data.chats import CHATML, CHATML_TOKENS, bpe, chat, write_tokenizer
from tools import build_shards

ROOT = Path(__file__).parents[2]
BYTES = TokenizerSpec("bytes")
EOS = 256


def settings(*inputs, **changes):
    return replace(BuildSettings(tuple(map(str, inputs)), BYTES, validation_fraction=0.2), **changes)


@pytest.fixture
def corpus(tmp_path):
    """Thirty text files of different length, none equal to another, and three that are not documents."""
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    for number in range(30):
        path = folder / ("sub" if number % 3 else ".") / f"{number:02d}.txt"
        path.write_text(f"document {number} → " + "text " * (7 * number % 11))
    (folder / "empty.md").write_text("\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / ".hidden.txt").write_text("hidden")
    return folder


def texts_of(folder):
    """The documents of a corpus folder, by the name a data set gives them."""
    paths = [path for path in folder.rglob("*.txt") if not path.name.startswith(".")]
    return {f"{folder.name}/{path.relative_to(folder)}": path.read_text() for path in paths}


def read_with_tarfile(folder):
    """All documents of a data set in stored order as (key, metadata, ids); reads the tar files only."""
    documents = []
    dtype = json.loads((folder / "dataset.json").read_text())["dtype"]
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for key in sorted({name.split(".")[0] for name in contents}):
            ids = np.frombuffer(contents[f"{key}.tokens"], np.dtype(dtype).newbyteorder("<"))
            documents.append((key, json.loads(contents[f"{key}.json"]), ids.astype(int).tolist()))
    return documents


def described(folder):
    """The description of a data set."""
    return dataset_from_json((folder / "dataset.json").read_bytes(), str(folder))


def stored_bytes(out):
    """Contents of everything that belongs to the two data sets."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for name in ("train", "validation")
        for path in sorted((out / name).iterdir())
    }


def test_every_document_is_stored_once_with_one_eos(corpus, tmp_path):
    build_dataset(settings(corpus, num_shards=3), tmp_path / "out")
    train, validation = (read_with_tarfile(tmp_path / "out" / name) for name in ("train", "validation"))
    stored = {metadata["source"]: ids for _, metadata, ids in train + validation}
    assert len(train) + len(validation) == len(stored)
    assert stored == {name: [*text.encode(), EOS] for name, text in texts_of(corpus).items()}
    assert (len(train), len(validation)) == (24, 6)
    for documents in (train, validation):
        assert [key for key, _, _ in documents] == [f"{number:08d}" for number in range(len(documents))]


def test_description_is_true(corpus, tmp_path):
    summary = build_dataset(settings(corpus, num_shards=3), tmp_path / "out")
    folder = tmp_path / "out/train"
    info, documents = described(folder), read_with_tarfile(folder)
    assert (info.dtype, info.vocab_size, info.eos_id, info.bos_id, info.add_bos) == ("uint16", 257, EOS, None, False)
    assert info.num_documents == len(documents) == summary.train.num_documents
    assert info.num_tokens == sum(len(ids) for _, _, ids in documents) == summary.train.num_tokens
    assert info.num_bytes == info.num_tokens - info.num_documents == summary.train.num_bytes
    assert (folder / info.token_bytes).read_bytes() == b"\x01\x00" * 256 + b"\x00\x00"
    assert len(info.shards) == 3
    for shard in info.shards:
        data = (folder / shard.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard.bytes, shard.sha256)
    assert (summary.num_empty_documents, summary.num_ignored_files, summary.num_input_files) == (1, 1, 31)
    assert all(metadata["num_tokens"] == len(ids) for _, metadata, ids in documents)


def test_index_points_at_the_documents(corpus, tmp_path):
    build_dataset(settings(corpus, num_shards=2), tmp_path / "out")
    folder = tmp_path / "out/train"
    documents = iter(read_with_tarfile(folder))
    for shard in described(folder).shards:
        data = (folder / shard.name).read_bytes()
        for offset, num_tokens, checksum in decode_index((folder / shard.index).read_bytes(), shard, shard.index):
            key, _, ids = next(documents)
            with tarfile.open(fileobj=io.BytesIO(data[offset:])) as tar:
                first = tar.next()
            assert (first.name, len(ids)) == (f"{key}.json", num_tokens)
            assert zlib.crc32(np.array(ids, "<u2").tobytes()) == checksum
            assert data[offset + 257 : offset + 263] == b"ustar\x00"


def test_webdataset_reads_the_shards(corpus, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    build_dataset(settings(corpus, num_shards=2), tmp_path / "out")
    shards = sorted(map(str, (tmp_path / "out/train").glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    expected = [(key, np.array(ids, "<u2").tobytes()) for key, _, ids in read_with_tarfile(tmp_path / "out/train")]
    assert [(sample["__key__"], sample["tokens"]) for sample in samples] == expected


def test_bpe_documents_equal_their_own_tokenisation(corpus, tmp_path):
    train_tokenizer(TokenizerTraining((str(corpus),), 300), tmp_path / "out/tokenizer")
    build_dataset(settings(corpus, tokenizer=TokenizerSpec(str(tmp_path / "out/tokenizer"))), tmp_path / "out")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "out/tokenizer/tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    texts = texts_of(corpus)
    for _, metadata, ids in read_with_tarfile(tmp_path / "out/train"):
        assert ids == [*tokenizer.encode(texts[metadata["source"]]).ids, eos]


def test_large_vocabulary_is_stored_in_32_bits(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"</s>": 0, **{f"w{number}": number for number in range(1, 65_537)}}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("w1 w65535 w65536")
    spec = TokenizerSpec(str(tmp_path / "tokenizer.json"))
    build_dataset(settings(tmp_path / "text.txt", tokenizer=spec, validation_fraction=0), tmp_path / "out")
    assert [ids for _, _, ids in read_with_tarfile(tmp_path / "out/train")] == [[1, 65_535, 65_536, 0]]
    assert described(tmp_path / "out/train").dtype == "uint32"


def test_tokenizer_beside_the_data_gives_the_same_ids(corpus, tmp_path):
    train_tokenizer(TokenizerTraining((str(corpus),), 300), tmp_path / "t")
    (tmp_path / "t/tokenizer_config.json").unlink()
    spec = TokenizerSpec(str(tmp_path / "t"), eos_token="t")
    build_dataset(settings(corpus, tokenizer=spec), tmp_path / "out")
    info = described(tmp_path / "out/train")
    copy = TokenizerSpec(str(tmp_path / "out/train" / info.tokenizer.file)).load()
    assert (copy.fingerprint, copy.eos_id) == (info.tokenizer.fingerprint, info.eos_id)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "both"])
def test_tokenizer_beside_the_data_has_the_chat_template(corpus, tmp_path, place):
    """And the special tokens that it may name, so that conversations get the same text and ids from either folder."""
    tokenizer = bpe(CHATML_TOKENS)
    config = {"chat_template": "other" if place == "both" else CHATML} if place != "chat_template.jinja" else {}
    folder = tmp_path / "t"
    write_tokenizer(folder, tokenizer, eos_token="<|endoftext|>", unk_token={"content": "<|im_end|>"}, **config)
    if place != "tokenizer_config.json":
        (folder / "chat_template.jinja").write_text("{{ unk_token }}" + CHATML)
    spec = TokenizerSpec(str(folder / "tokenizer.json"))
    build_dataset(settings(corpus, tokenizer=spec), tmp_path / "out")
    encoded = []
    for name in (folder, tmp_path / "out/tokenizer"):
        template = load_chat_template(None, spec=str(name), tokenizer=load_tokenizer(str(name)))
        encoded.append(ConversationLines(load_tokenizer(str(name)), template).encode(chat("a", "b"), "here"))
        assert "unk_token" in template.variables
    assert encoded[0].tokens.tolist() == encoded[1].tokens.tolist()


def test_another_tokenizer_beside_the_data_is_not_overwritten(corpus, tmp_path):
    for name, vocab_size in (("out/tokenizer", 290), ("t", 300)):
        train_tokenizer(TokenizerTraining((str(corpus),), vocab_size), tmp_path / name)
    with pytest.raises(DataError, match="another tokenizer"):
        build_dataset(settings(corpus, tokenizer=TokenizerSpec(str(tmp_path / "t"))), tmp_path / "out")
    assert TokenizerSpec(str(tmp_path / "out/tokenizer")).load().vocab_size == 290


def test_result_does_not_depend_on_workers_or_reading_batches(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_MIN_CHUNK_BYTES", 300)
    build_dataset(settings(corpus, num_shards=4), tmp_path / "two", workers=2)
    monkeypatch.setattr(shard_writer, "_READ_BATCH_BYTES", 100)
    build_dataset(settings(corpus, num_shards=4), tmp_path / "one", workers=1)
    assert stored_bytes(tmp_path / "one") == stored_bytes(tmp_path / "two")


def test_seed_decides_order_and_split(corpus, tmp_path):
    orders = []
    for seed in (1, 2):
        build_dataset(settings(corpus, seed=seed), tmp_path / f"out{seed}")
        orders.append([document[1]["source"] for document in read_with_tarfile(tmp_path / f"out{seed}/train")])
    assert orders[0] != sorted(orders[0])
    assert set(orders[0]) != set(orders[1])


def test_without_validation_there_is_no_such_folder(corpus, tmp_path):
    summary = build_dataset(settings(corpus, validation_fraction=0), tmp_path / "out")
    assert summary.validation is None
    assert not (tmp_path / "out/validation").exists()
    assert summary.train.num_documents == 30


# Inputs of other kinds.

RECORDS = [{"text": f"line {number} é\n{'x' * number}", "id": number} for number in range(40)]


def write_jsonl(path):
    data = "".join(json.dumps(record, ensure_ascii=record["id"] % 2 == 0) + "\n" for record in RECORDS).encode()
    data = data.replace(b"\n", b"\n\n", 1)  # A blank line is no document.
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        half = len(data) // 2  # Two frames, as `cat a.zst b.zst` makes them.
        data = zstandard.compress(data[:half]) + zstandard.compress(data[half:])
    path.write_bytes(data)


def write_parquet(path):
    table = pyarrow.table({"id": [1] * len(RECORDS), "text": [record["text"] for record in RECORDS]})
    pyarrow.parquet.write_table(table, path, row_group_size=7)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("chunk_bytes", [1, 50, 1 << 20])
def test_lines_and_rows_are_documents(tmp_path, name, chunk_bytes):
    path = tmp_path / name
    (write_parquet if path.suffix == ".parquet" else write_jsonl)(path)
    chunks = sources.plan_chunks(sources.find_inputs([str(path)]), "text", chunk_bytes)
    documents = [document for chunk in chunks for document in sources.read_documents(chunk, "text")]
    assert [document.text for document in documents] == [record["text"] for record in RECORDS]
    assert len({document.source for document in documents}) == len(RECORDS)
    if chunk_bytes == 1 and not name.endswith((".gz", ".zst")):
        assert len(chunks) > 5


def test_zstd_frame_that_ends_with_a_block_is_not_the_last(tmp_path, monkeypatch):
    frames = [zstandard.compress(b'{"text": "%d"}\n' % number) for number in range(3)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    monkeypatch.setattr(sources, "_ZSTD_BLOCK_BYTES", len(frames[0]))
    chunks = sources.plan_chunks(sources.find_inputs([str(tmp_path / "a.jsonl.zst")]), "text", 1 << 20)
    assert [document.text for document in sources.read_documents(chunks[0], "text")] == ["0", "1", "2"]


def test_python_standard_library_is_an_input():
    inputs = sources.find_inputs([sources.PYTHON_STDLIB])
    labels = [file.label for file in inputs.files]
    assert {"python-stdlib/abc.py", "python-stdlib/json/decoder.py"} <= set(labels)
    assert labels == sorted(labels)
    assert not [label for label in labels if "site-packages" in label or "/test/" in label]
    assert inputs.num_bytes > 5_000_000


BAD_INPUTS = {
    "latin.txt": (b"caf\xe9", r"latin\.txt: not UTF-8 \(byte 3\)"),
    "cut.jsonl": (b'{"text": "a"}\n{"text": "b"', r"cut\.jsonl: line 2: not JSON"),
    "latin.jsonl": (b'{"text": "a"}\n\n{"text": "\xe9"}\n', r"latin\.jsonl: line 3: not UTF-8"),
    "list.jsonl": (b"[]\n", r"line 1: no key 'text'; it is not an object"),
    "key.jsonl": (b'{"content": "a", "id": 1}\n', r"no key 'text'; its keys are content, id.*--text-key"),
    "null.jsonl": (b'{"text": null}\n', "line 1: 'text' is null, not text"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: 'text' is int, not text"),
    "surrogate.jsonl": (rb'{"text": "a\ud800"}', r"half of a surrogate pair \(character 1\)"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 99)[:-9], r"cut\.jsonl\.gz: cannot be read"),
    "no.jsonl.gz": (b"plain", r"no\.jsonl\.gz: cannot be read"),
    "cut.jsonl.zst": (zstandard.compress(b'{"text": "a"}\n' * 99)[:-3], r"cut\.jsonl\.zst: .*ends inside a frame"),
    "no.jsonl.zst": (b"plain", r"no\.jsonl\.zst: cannot be read"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_input_without_a_document_stops_or_is_skipped(tmp_path, name):
    content, message = BAD_INPUTS[name]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / name).write_bytes(content)
    (folder / "good.txt").write_text("good")
    plan = settings(folder, validation_fraction=0)
    with pytest.raises(DataError, match=message):
        build_dataset(plan, tmp_path / "out")
    summary = build_dataset(replace(plan, on_error="skip"), tmp_path / "other")
    assert summary.num_skipped_documents == len(summary.skipped) == 1
    assert "good.txt" in str(read_with_tarfile(tmp_path / "other/train"))


def test_bad_line_behind_a_chunk_boundary_has_its_own_number(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "aaaa"}\n' * 50 + b"bad\n")
    chunks = sources.plan_chunks(sources.find_inputs([str(path)]), "text", 100)
    documents = [document for chunk in chunks for document in sources.read_documents(chunk, "text")]
    assert len(documents) == 51
    assert "line 51" in documents[-1].message


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"content": ["a"]}, "no column 'text'; it has content"),
        ({"text": [1]}, "column 'text' is int64, not text"),
        ({"text": ["a", None]}, "row 1: 'text' is null"),
    ],
)
def test_bad_parquet_is_a_clear_error(tmp_path, table, message):
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet: .*{message}"):
        build_dataset(settings(tmp_path / "a.parquet"), tmp_path / "out")


def test_file_that_is_not_parquet_is_a_clear_error(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"text")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        build_dataset(settings(tmp_path / "a.parquet"), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_fraction": 1.0}, "--validation-fraction 1.0"),
        ({"validation_fraction": -0.1}, "--validation-fraction -0.1"),
        ({"validation_fraction": 0.99}, "all 30 documents"),
        ({"num_shards": 0}, "--shards 0"),
        ({"num_shards": 25}, "--shards 25: a shard needs a document, and there are 24"),
        ({"shard_tokens": 0}, "--shard-tokens 0"),
        ({"inputs": ("nowhere",)}, "nowhere: no such file or folder"),
        ({"add_bos": True}, "--bos"),
    ],
)
def test_impossible_settings_are_refused(corpus, tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        build_dataset(replace(settings(corpus), **changes), tmp_path / "out")


def test_inputs_without_text_are_refused(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(DataError, match="no input files"):
        build_dataset(settings(tmp_path / "in"), tmp_path / "out")
    (tmp_path / "in/a.txt").write_text("  \n")
    with pytest.raises(DataError, match="no document with text"):
        build_dataset(settings(tmp_path / "in"), tmp_path / "out")


# Stopping, going on, and folders that hold something.


def failing_after(function, calls):
    """Wrap `function` so that it fails like a full disk after some calls."""
    left = iter(range(calls))

    def wrapped(task):
        if next(left, None) is None:
            raise OSError(28, "No space left on device")
        return function(task)

    return wrapped


@pytest.mark.parametrize(("step", "calls"), [("tokenize_chunk", 3), ("write_shard", 2)])
def test_stopped_build_goes_on_and_gives_the_same_bytes(corpus, tmp_path, monkeypatch, step, calls):
    monkeypatch.setattr(build, "_MIN_CHUNK_BYTES", 300)
    plan, original = settings(corpus, num_shards=4), getattr(build, step)
    build_dataset(plan, tmp_path / "straight")
    with monkeypatch.context() as patch:
        patch.setattr(build, step, failing_after(original, calls))
        with pytest.raises(DataError, match=r"No space left on device.*run again"):
            build_dataset(plan, tmp_path / "out")
    assert not (tmp_path / "out/train/dataset.json").exists()
    repeated = []
    monkeypatch.setattr(build, step, lambda task: repeated.append(task.number) or original(task))
    build_dataset(plan, tmp_path / "out")
    assert repeated[0] == calls  # The finished ones were not done again.
    assert stored_bytes(tmp_path / "out") == stored_bytes(tmp_path / "straight")
    assert not (tmp_path / "out/.build").exists()


def test_chunk_that_changed_on_disk_is_not_made_into_shards(corpus, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(build, "write_shard", failing_after(build.write_shard, 0))
        with pytest.raises(DataError, match="No space left"):
            build_dataset(settings(corpus), tmp_path / "out")
    (chunk,) = (tmp_path / "out/.build").glob("chunk-*.data")
    chunk.write_bytes(chunk.read_bytes().replace(b"t\0e\0x\0t\0", b"t\0e\0s\0t\0", 1))
    with pytest.raises(DataError, match=r"chunk-000000\.data: tokens have changed on disk .*--restart"):
        build_dataset(settings(corpus), tmp_path / "out")


def run_tool(*arguments):
    return subprocess.Popen(
        [sys.executable, str(ROOT / "tools/build_shards.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_build_goes_on_and_gives_the_same_bytes(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number:02d}.txt").write_text(f"{number} text " * 90_000)
    arguments = [folder, "--tokenizer", "bytes", "--out", tmp_path / "out", "--workers", 1, "--json"]
    process = run_tool(*arguments)
    while process.poll() is None and not list((tmp_path / "out").glob(".build/chunk-*.json")):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not (tmp_path / "out" / BUILD_FILE).exists()
    output, errors = run_tool(*arguments).communicate()
    assert json.loads(output)["train"]["num_documents"] == 7, errors
    build_dataset(replace(settings(folder), validation_fraction=0.01), tmp_path / "straight")
    assert stored_bytes(tmp_path / "out") == stored_bytes(tmp_path / "straight")


def test_finished_build_is_left_alone(corpus, tmp_path):
    first = build_dataset(settings(corpus), tmp_path / "out")
    before = (tmp_path / "out/train/dataset.json").stat().st_mtime_ns
    again = build_dataset(settings(corpus), tmp_path / "out")
    assert again == replace(first, already_complete=True)
    assert (tmp_path / "out/train/dataset.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_or_inputs_need_restart(corpus, tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch, contextlib.nullcontext() if finished else pytest.raises(DataError):
        if not finished:
            patch.setattr(build, "write_shard", failing_after(build.write_shard, 0))
        build_dataset(settings(corpus, num_shards=4), tmp_path / "out")
    with pytest.raises(DataError, match=r"num_shards: 4 -> 2\).*--restart"):
        build_dataset(settings(corpus, num_shards=2), tmp_path / "out")
    (corpus / "new.txt").write_text("new")
    with pytest.raises(DataError, match=r"input files: 31 files.* -> 32 files"):
        build_dataset(settings(corpus, num_shards=4), tmp_path / "out")
    build_dataset(settings(corpus, num_shards=2), tmp_path / "out", restart=True)
    build_dataset(settings(corpus, num_shards=2), tmp_path / "fresh")
    assert stored_bytes(tmp_path / "out") == stored_bytes(tmp_path / "fresh")


def test_folders_of_others_are_not_touched(corpus, tmp_path):
    (tmp_path / "out/train").mkdir(parents=True)
    (tmp_path / "out/train/shard-00000.tar").write_text("precious")
    for restart in (False, True):
        with pytest.raises(DataError, match="not empty"):
            build_dataset(settings(corpus), tmp_path / "out", restart=restart)
    assert (tmp_path / "out/train/shard-00000.tar").read_text() == "precious"


def test_two_builds_cannot_write_one_folder(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another build"):
            build_dataset(settings(corpus), tmp_path / "out")


def test_lost_data_of_a_finished_build_is_noticed(corpus, tmp_path):
    build_dataset(settings(corpus), tmp_path / "out")
    (tmp_path / "out/validation/dataset.json").unlink()
    with pytest.raises(DataError, match=r"validation: was built, but dataset\.json is gone"):
        build_dataset(settings(corpus), tmp_path / "out")


def test_tool_prints_one_error_without_a_trace(tmp_path):
    process = run_tool(tmp_path / "nowhere", "--tokenizer", "bytes", "--out", tmp_path / "out")
    output, errors = process.communicate()
    assert (process.returncode, output) == (DataError.exit_status, "")
    assert errors.startswith("DataError: ")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shards", "2", "--shard-tokens", "100"], "not allowed with argument"),
        (["--eos-token", "</s>"], "--eos-token </s>: tokenizer bytes has tokens of its own"),
        (["--bos-token", "<s>"], "--bos-token <s>: tokenizer bytes has tokens of its own"),
        (["--bos"], "--bos: the tokenizer names no BOS token"),
        (["--workers", "0"], "--workers 0: must be at least 1"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(corpus, tmp_path, capsys, options, message):
    try:
        status = build_shards.main([str(corpus), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), *options])
    except SystemExit as stop:  # how argparse refuses arguments
        status = stop.code
    captured = capsys.readouterr()
    assert status != 0
    assert message in captured.err
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


# Workers.


def die(task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_is_a_clear_error():
    with pytest.raises(DataError, match="a worker process was killed"):
        list(run_tasks(die, range(3), 2))


# The arrangement of documents.


@given(st.integers(0, 500), st.integers(0, 2**40))
def test_shuffle_is_a_permutation_and_depends_on_the_seed(num_documents, seed):
    order = shuffled(num_documents, seed)
    assert sorted(order.tolist()) == list(range(num_documents))
    if num_documents > 20:
        assert order.tolist() != shuffled(num_documents, seed + 1).tolist()


def test_shuffle_spreads_documents_evenly():
    num_documents = 20_000
    positions = np.argsort(shuffled(num_documents, 7))
    # Means of tenths of a uniform permutation stay within five standard errors of the middle.
    means = positions.reshape(10, -1).mean(axis=1) / num_documents
    assert np.abs(means - 0.5).max() < 5 * np.sqrt(1 / 12 / (num_documents / 10))


def mixed(value):
    """SplitMix64's output function on a Python integer."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


def test_shuffle_is_the_same_everywhere():
    key = int.from_bytes(hashlib.sha256(b"shuffle 1234").digest()[:8], "little")
    assert shuffled(100, 1234).tolist() == sorted(range(100), key=lambda number: mixed(number ^ key))


def test_copies_of_a_text_fall_on_one_side():
    hashes = np.repeat(np.arange(1, 101, dtype=np.uint64), 3)
    mask = validation_mask(hashes, 0.1, 5)
    assert not set(hashes[mask]) & set(hashes[~mask])
    assert 30 <= mask.sum() <= 32


def test_split_does_not_depend_on_the_order_of_documents():
    hashes = np.arange(1, 201, dtype=np.uint64)
    mask = validation_mask(hashes, 0.05, 5)
    assert mask.sum() == 10
    np.testing.assert_array_equal(validation_mask(hashes[::-1], 0.05, 5), mask[::-1])
    assert (validation_mask(hashes, 0.05, 6) != mask).any()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.data())
def test_shards_are_consecutive_balanced_and_not_empty(num_tokens, data):
    num_shards = data.draw(st.integers(1, len(num_tokens)))
    boundaries = shard_boundaries(np.array(num_tokens), num_shards)
    assert (boundaries[0], boundaries[-1], len(boundaries)) == (0, len(num_tokens), num_shards + 1)
    assert (np.diff(boundaries) >= 1).all()
    if num_shards * 4 <= len(num_tokens) and max(num_tokens) <= sum(num_tokens) / num_shards / 2:
        sizes = [sum(num_tokens[start:stop]) for start, stop in pairwise(boundaries)]
        assert max(sizes) - min(sizes) <= 2 * max(num_tokens)


# Progress.


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_progress_lines_state_rate_and_time_left():
    stream, clock = io.StringIO(), Clock()
    with Progress("tokenize", 1000, 200, stream, clock) as progress:
        clock.now = 5.0
        progress.advance(100, 1000)
        assert stream.getvalue() == ""
        clock.now = 20.0
        progress.advance(300, 3000)
    line = stream.getvalue().splitlines()[0]
    # 400 of the 800 bytes that were left took 20 s, so the other 400 take 20 s.
    assert line == "tokenize: 600B of 1.00kB, 4.00k tokens, 200 tokens/s, 20s, eta 20s"


def test_bytes_of_a_progress_line_have_their_own_units():
    stream = io.StringIO()
    with Progress("write train", 2_500_000_000, 0, stream) as progress:
        progress.advance(2_500_000_000, 1)
    assert stream.getvalue().startswith("write train: 2.50GB of 2.50GB, 1 tokens, ")


def test_progress_on_a_terminal_is_a_bar():
    stream = io.StringIO()
    stream.isatty = lambda: True
    with Progress("tokenize", 1000, 0, stream) as progress:
        progress.advance(1000, 500)
    assert "100%" in stream.getvalue()
    assert "tokens/s" in stream.getvalue()


def test_counts_are_short():
    assert [format_count(value) for value in (0, 12.34, 999, 999.7, 1500, 2.5e6, 3e9, 4e12)] == [
        "0",
        "12",
        "999",
        "1.00k",
        "1.50k",
        "2.50M",
        "3.00B",
        "4.00T",
    ]
