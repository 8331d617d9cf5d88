"""The stored form of a data set: types of ids, the index, dataset.json."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbt_megatron.data.format import (
    DATASET_FILE,
    DatasetInfo,
    ShardInfo,
    TokenizerInfo,
    check_tokens,
    dataset_from_json,
    dataset_to_json,
    decode_index,
    decode_token_bytes,
    decode_tokens,
    encode_index,
    encode_tokens,
    token_dtype,
    tokens_checksum,
    write_dataset,
)
from fbt_megatron.errors import DataError

LARGE_VOCABULARY = 100_277


def make_shard(**changes):
    index = encode_index([0, 2048], [3, 4], [5, 6])
    shard = ShardInfo("shard-00000.tar", 4096, "0" * 64, 2, 7, "shard-00000.index", hashlib.sha256(index).hexdigest())
    return replace(shard, **changes)


def make_info(**changes):
    info = DatasetInfo(
        tokenizer=TokenizerInfo("bytes", None, "f" * 64),
        dtype="uint16",
        vocab_size=257,
        bos_id=None,
        eos_id=256,
        add_bos=False,
        num_documents=2,
        num_tokens=7,
        num_bytes=5,
        token_bytes="token_bytes.bin",
        token_bytes_sha256=hashlib.sha256(bytes(2 * 257)).hexdigest(),
        shards=(make_shard(),),
    )
    return replace(info, **changes)


@pytest.mark.parametrize(
    ("vocab_size", "expected"),
    [(1, "uint16"), (257, "uint16"), (65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (2**32, "uint32")],
)
def test_smallest_type_that_holds_the_vocabulary(vocab_size, expected):
    assert token_dtype(vocab_size) == expected
    # The largest id survives, which the next smaller type could not guarantee.
    assert np.array([vocab_size - 1], dtype=np.uint64).astype(expected)[0] == vocab_size - 1


@pytest.mark.parametrize("vocab_size", [0, -1, 2**32 + 1])
def test_impossible_vocabulary_is_refused(vocab_size):
    with pytest.raises(DataError, match=f"vocab_size={vocab_size}"):
        token_dtype(vocab_size)


def test_ids_beyond_16_bits_come_back():
    ids = [0, 65_535, 65_536, 100_276]
    data = encode_tokens(ids, LARGE_VOCABULARY, "here")
    assert data == b"".join(value.to_bytes(4, "little") for value in ids)
    assert decode_tokens(data, "uint32", LARGE_VOCABULARY, 4, "here").tolist() == ids


def test_16_bit_ids_are_unsigned_and_little_endian():
    data = encode_tokens([40_000, 1], 65_536, "here")
    assert data == bytes([0x40, 0x9C, 1, 0])
    assert decode_tokens(data, "uint16", 65_536, 2, "here").tolist() == [40_000, 1]


def test_32_bit_ids_read_as_16_bit_are_noticed():
    data = encode_tokens([0, 65_535, 65_536, 100_276], LARGE_VOCABULARY, "here")
    with pytest.raises(DataError, match="16 bytes of tokens, but 4 tokens of uint16 take 8"):
        decode_tokens(data, "uint16", 65_536, 4, "here")


@pytest.mark.parametrize("bad", [257, 300, 65_535])
def test_stored_id_outside_the_vocabulary_is_named(bad):
    data = np.array([5, bad, 6], dtype="<u2").tobytes()
    with pytest.raises(DataError, match=rf"shard-3 key 7: token id {bad} at position 1 .* vocabulary of 257"):
        decode_tokens(data, "uint16", 257, 3, "shard-3 key 7")


@pytest.mark.parametrize("bad", [-1, 257, 70_000])
def test_id_outside_the_vocabulary_is_not_stored(bad):
    with pytest.raises(DataError, match=f"a.txt: token id {bad} at position 2"):
        encode_tokens([0, 256, bad], 257, "a.txt")


@given(st.integers(1, 200_000), st.data())
def test_round_trip_of_any_ids(vocab_size, data):
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1), max_size=50))
    stored = encode_tokens(ids, vocab_size, "here")
    assert decode_tokens(stored, token_dtype(vocab_size), vocab_size, len(ids), "here").tolist() == ids


def test_index_is_three_int64_per_document():
    data = encode_index([0, 2**40], [3, 4], np.array([5, 2**32 - 1], dtype=np.uint32))
    assert data == b"".join(value.to_bytes(8, "little") for value in (0, 3, 5, 2**40, 4, 2**32 - 1))


def test_index_is_checked():
    data = encode_index([0, 2048], [3, 4], [5, 6])
    assert decode_index(data, make_shard(), "here").tolist() == [[0, 3, 5], [2048, 4, 6]]
    for damaged in (data[:-8], data[:-1] + b"\x01"):
        with pytest.raises(DataError, match=r"shard-00000\.index: does not match its checksum"):
            decode_index(damaged, make_shard(), "shard-00000.index")


def test_the_checksum_of_tokens_is_crc_32():
    assert tokens_checksum(b"123456789") == 0xCBF43926  # the check value that defines the polynomial and its bit order


@given(st.binary(min_size=1, max_size=200), st.data())
def test_every_flipped_bit_of_stored_tokens_is_noticed(data, draw):
    checksum = tokens_checksum(data)
    check_tokens(data, checksum, "here")
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DataError, match="shard-3 key 7: the tokens do not match their checksum"):
        check_tokens(bytes(damaged), checksum, "shard-3 key 7")


def test_token_bytes_are_checked():
    data = bytes(2 * 257)
    assert decode_token_bytes(data, make_info(), "here").shape == (257,)
    with pytest.raises(DataError, match="checksum"):
        decode_token_bytes(b"\x01" + data[1:], make_info(), "here")


def test_dataset_round_trip(tmp_path):
    info = make_info(tokenizer=TokenizerInfo("huggingface", "../tokenizer/tokenizer.json", "a" * 64), bos_id=1)
    write_dataset(tmp_path, info)
    text = (tmp_path / DATASET_FILE).read_text()
    assert dataset_from_json(text, "here") == info
    assert json.loads(text)["format_version"] == 2


def _remove(document, key):
    del document[key]


DAMAGES = {
    "version": (lambda document: document.update(format_version=1), "format_version is 1, .* with --restart"),
    "missing key": (lambda document: _remove(document, "vocab_size"), "vocab_size is missing"),
    "missing key of a shard": (lambda document: _remove(document["shards"][0], "sha256"), r"shards\[0\]: sha256"),
    "wrong type": (lambda document: document.update(num_tokens="7"), "num_tokens='7' has the wrong type"),
    "boolean as number": (lambda document: document.update(eos_id=True), "eos_id=True has the wrong type"),
    "unknown key": (lambda document: document.update(compression="zstd"), "unknown key 'compression'"),
    "shards": (lambda document: document.update(shards={}), "shards={} has the wrong type"),
    "shard": (lambda document: document.update(shards=[1]), r"shards\[0\]: must be an object"),
    "dtype": (lambda document: document.update(dtype="uint32"), "stored as uint16"),
    "tokenizer": (lambda document: document["tokenizer"].update(kind="words"), "'words' is unknown"),
    "eos": (lambda document: document.update(eos_id=257), "eos_id=257 is outside"),
    "bos": (lambda document: document.update(bos_id=-1), "bos_id=-1 is outside"),
    "documents": (lambda document: document.update(num_documents=3), "num_documents=3, but its shards add up to 2"),
    "tokens": (lambda document: document.update(num_tokens=8), "num_tokens=8, but its shards add up to 7"),
    "path": (lambda document: document["shards"][0].update(name="../x.tar"), "not a plain file name"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_dataset_json_is_refused(damage):
    change, message = DAMAGES[damage]
    document = json.loads(dataset_to_json(make_info()))
    change(document)
    with pytest.raises(DataError, match=f"x/dataset.json: .*{message}"):
        dataset_from_json(json.dumps(document), "x/dataset.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", b"\xff\xfe"])
def test_no_json_object_is_refused(text):
    with pytest.raises(DataError, match=r"x/dataset\.json"):
        dataset_from_json(text, "x/dataset.json")
