"""What a data set looks like on disk: `dataset.json`, the index beside each shard, and the bytes of a document.

    train/
      dataset.json          this description; written last, so a data set that has it is complete
      token_bytes.bin       bytes of text each token id stands for, little-endian uint16
      shard-00000.tar       USTAR; per document `<key>.json` (metadata) and `<key>.tokens` (little-endian ids)
      shard-00000.index     int64 [num_documents, 3]: offset of the document's first tar header, number of tokens,
                            CRC-32 of the bytes of the tokens

Everything here works on bytes and text, so a reader may fetch them from anywhere.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fbt_megatron.errors import DataError
from fbt_megatron.files import write_durably

FORMAT_VERSION = 2
DATASET_FILE = "dataset.json"
TOKEN_BYTES_FILE = "token_bytes.bin"
METADATA_SUFFIX = "json"
TOKENS_SUFFIX = "tokens"
INDEX_COLUMNS = 3
INDEX_ENTRY_BYTES = 8 * INDEX_COLUMNS

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the ids."""

    kind: Literal["bytes", "huggingface"]
    file: str | None
    """Path of `tokenizer.json` relative to the folder of `dataset.json`; `None` for raw bytes."""
    fingerprint: str
    """SHA-256 (hex) of everything that decides which ids a text gets."""


@dataclass(frozen=True)
class ShardInfo:
    """One tar file and its index."""

    name: str
    bytes: int
    sha256: str
    num_documents: int
    num_tokens: int
    index: str
    index_sha256: str


@dataclass(frozen=True)
class DatasetInfo:
    """Contents of `dataset.json`."""

    tokenizer: TokenizerInfo
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    bos_id: int | None
    eos_id: int
    add_bos: bool
    """Whether each document starts with `bos_id`; every document ends with `eos_id`."""
    num_documents: int
    num_tokens: int
    """Stored tokens, BOS and EOS included."""
    num_bytes: int
    """Bytes of the documents' text in UTF-8."""
    token_bytes: str
    token_bytes_sha256: str
    shards: tuple[ShardInfo, ...]
    format_version: int = FORMAT_VERSION


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the smallest stored type whose range holds the ids `0 .. vocab_size - 1`."""
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"vocab_size={vocab_size}: must be between 1 and 2**32, the range of the stored ids.")
    return "uint16" if vocab_size <= 2**16 else "uint32"


def storage_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy type of `dtype`, little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def encode_tokens(ids: Sequence[int] | IntArray, vocab_size: int, where: str) -> bytes:
    """Return the stored bytes of one document's ids.

    Raises:
        DataError: an id is negative or not below `vocab_size`; the message names `where`.
    """
    array = np.asarray(ids, dtype=np.int64)
    _check_range(array, vocab_size, where)
    return array.astype(storage_dtype(token_dtype(vocab_size))).tobytes()


def decode_tokens(data: bytes, dtype: str, vocab_size: int, num_tokens: int, where: str) -> IntArray:
    """Return the ids of one document as int64 [num_tokens].

    Args:
        data: contents of the `.tokens` member.
        dtype: type named in `dataset.json`.
        vocab_size: ids must be below it.
        num_tokens: length that the index states; catches a file of another type.
        where: names shard and sample key in messages.

    Raises:
        DataError: wrong length, or an id outside the vocabulary.
    """
    stored = storage_dtype(dtype)
    if len(data) != num_tokens * stored.itemsize:
        raise DataError(
            f"{where}: {len(data)} bytes of tokens, but {num_tokens} tokens of {dtype} take "
            f"{num_tokens * stored.itemsize}. The shard does not belong to its index or is damaged: build it again."
        )
    array = np.frombuffer(data, dtype=stored).astype(np.int64)
    _check_range(array, vocab_size, where)
    return array


def _check_range(ids: IntArray, vocab_size: int, where: str) -> None:
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        position = int(np.argmax((ids < 0) | (ids >= vocab_size)))
        raise DataError(
            f"{where}: token id {int(ids[position])} at position {position} is outside the vocabulary of {vocab_size}. "
            "Use the tokenizer that the data set was built with, or build the data set again."
        )


def tokens_checksum(data: bytes) -> int:
    """Return the checksum that the index keeps of one document's stored bytes (CRC-32)."""
    return zlib.crc32(data)


def check_tokens(data: bytes, checksum: int, where: str) -> None:
    """Compare one document's stored bytes with the checksum that was taken when they were written.

    Raises:
        DataError: they have changed since; the message names `where`.
    """
    if tokens_checksum(data) != checksum:
        raise DataError(
            f"{where}: the tokens do not match their checksum, so they have changed since they were written. "
            "Copy or build the data set again; tools/verify_shards.py finds every damaged file."
        )


def encode_index(offsets: Sequence[int], num_tokens: npt.ArrayLike, checksums: npt.ArrayLike) -> bytes:
    """Return the bytes of a shard's index: (offset, number of tokens, checksum) as int64 per document."""
    columns = [np.asarray(column, dtype="<i8") for column in (offsets, num_tokens, checksums)]
    return np.stack(columns, axis=1).tobytes()


def decode_index(data: bytes, shard: ShardInfo, where: str) -> IntArray:
    """Return a shard's index as int64 [num_documents, 3]: header offset, number of tokens, checksum of the tokens.

    Raises:
        DataError: the index is not the one that `dataset.json` describes.
    """
    if hashlib.sha256(data).hexdigest() != shard.index_sha256:
        raise DataError(f"{where}: does not match its checksum in {DATASET_FILE}. Copy or build the data set again.")
    return np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(shard.num_documents, INDEX_COLUMNS)


def decode_token_bytes(data: bytes, info: DatasetInfo, where: str) -> IntArray:
    """Return the bytes of text per token id as int64 [vocab_size]; special tokens have 0.

    Raises:
        DataError: the table is not the one that `dataset.json` describes.
    """
    if hashlib.sha256(data).hexdigest() != info.token_bytes_sha256 or len(data) != 2 * info.vocab_size:
        raise DataError(f"{where}: does not match its checksum in {DATASET_FILE}. Copy or build the data set again.")
    return np.frombuffer(data, dtype="<u2").astype(np.int64)


def dataset_to_json(info: DatasetInfo) -> str:
    """Return the text of `dataset.json`."""
    return json.dumps(asdict(info), indent=1) + "\n"


def dataset_from_json(text: str | bytes, where: str) -> DatasetInfo:
    """Parse `dataset.json`.

    Raises:
        DataError: not JSON, another format version, a missing or unknown key, a wrong type, or counts that disagree.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}). Build the data set again.") from error
    version = document.get("format_version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{where}: format_version is {version}, this version reads {FORMAT_VERSION}. "
            "Build the data set again: the command of tools/build_shards.py that made it, with --restart."
        )
    shards = _value(document, "shards", list, where)
    info = _build(
        DatasetInfo,
        document,
        where,
        tokenizer=_build(TokenizerInfo, _value(document, "tokenizer", dict, where), f"{where}: tokenizer"),
        shards=tuple(_build(ShardInfo, shard, f"{where}: shards[{number}]") for number, shard in enumerate(shards)),
    )
    _check_dataset(info, where)
    return info


_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "str": (str,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
}


def _build(cls: type[Any], document: Any, where: str, **parsed: Any) -> Any:
    """Construct dataclass `cls` from a JSON object; `parsed` holds the fields that are objects themselves."""
    if not isinstance(document, dict):
        raise DataError(f"{where}: must be an object. Build the data set again.")
    unknown = sorted(set(document) - set(cls.__dataclass_fields__))
    if unknown:
        raise DataError(f"{where}: unknown key {unknown[0]!r}. Build the data set again.")
    for name, declared in cls.__dataclass_fields__.items():
        if name not in parsed:
            parsed[name] = _value(document, name, _JSON_TYPES.get(declared.type, (str,)), where)
    return cls(**parsed)


def _value(document: Mapping[str, Any], key: str, types: type | tuple[type, ...], where: str) -> Any:
    if key not in document:
        raise DataError(f"{where}: {key} is missing. Build the data set again.")
    value = document[key]
    accepted = types if isinstance(types, tuple) else (types,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in accepted):
        raise DataError(f"{where}: {key}={value!r} has the wrong type. Build the data set again.")
    return value


def _check_dataset(info: DatasetInfo, where: str) -> None:
    if info.tokenizer.kind not in ("bytes", "huggingface"):
        raise DataError(f"{where}: tokenizer kind {info.tokenizer.kind!r} is unknown; known are bytes and huggingface.")
    if info.dtype != token_dtype(info.vocab_size):
        raise DataError(
            f"{where}: dtype is {info.dtype}, but a vocabulary of {info.vocab_size} is stored as "
            f"{token_dtype(info.vocab_size)}. Build the data set again."
        )
    for name, special in (("bos_id", info.bos_id), ("eos_id", info.eos_id)):
        if special is not None and not 0 <= special < info.vocab_size:
            raise DataError(f"{where}: {name}={special} is outside the vocabulary of {info.vocab_size}.")
    for key in ("num_documents", "num_tokens"):
        total, stated = sum(getattr(shard, key) for shard in info.shards), getattr(info, key)
        if total != stated:
            raise DataError(f"{where}: {key}={stated}, but its shards add up to {total}. Build the data set again.")
    for shard in info.shards:
        for name in (shard.name, shard.index):
            if name != Path(name).name:
                raise DataError(f"{where}: {name!r} is not a plain file name; shards lie beside {DATASET_FILE}.")


def write_dataset(folder: Path, info: DatasetInfo) -> None:
    """Write `folder/dataset.json` in one step; everything it describes must already be on disk."""
    write_durably(folder / DATASET_FILE, dataset_to_json(info))
