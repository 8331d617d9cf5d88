"""The samples of a tar and the token ids in them.

webdataset reads the tars: its iterator runs over a file that stands at the wanted sample, and groups members of one
key. Two kinds of samples are known: those of `tools/build_shards.py`, whose type and counts `dataset.json` states, and
those of tars made elsewhere.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray
from webdataset.tariterators import base_plus_ext, group_by_keys, tar_file_expander

from fbt_megatron.data import storage
from fbt_megatron.data.format import (
    METADATA_SUFFIX,
    TOKENS_SUFFIX,
    DatasetInfo,
    check_tokens,
    decode_tokens,
    storage_dtype,
    token_dtype,
)
from fbt_megatron.data.tokenizer import Tokenizer, encode_document, starts_with_bos
from fbt_megatron.errors import DataError, DataSetupError

TEXT_SUFFIX = "txt"
PLAIN_SUFFIXES = frozenset({TOKENS_SUFFIX, TEXT_SUFFIX, METADATA_SUFFIX})
_NUM_SPECIAL_TOKENS = 2  # BOS and EOS

_METADATA_NAME = re.compile(r"__[^/]*__($|/)")  # webdataset passes over such members

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One document as a shard holds it."""

    key: str
    """Its name in the data set."""
    where: str
    """Names shard and sample in messages."""
    members: dict[str, Any]
    """Contents by suffix."""


@dataclass(frozen=True)
class Decoded:
    """One document as it is trained."""

    tokens: IntArray
    """[tokens] ids, int64; none for a document without text."""
    trained: NDArray[np.bool_] | None = None
    """[tokens] whether a token is trained where it is a label; `None`: all of them."""


class SampleDecoder(Protocol):
    """Reads the samples of one kind of shard and turns them into token ids."""

    def read(self, stream: BinaryIO, location: str, entries: IntArray, *, skip: int) -> Iterator[Sample]:
        """Consecutive samples.

        Args:
            stream: a shard, from the beginning of a sample on.
            location: where it lies.
            entries: the rows of its index for the samples to yield; fewer come if the shard ends.
            skip: samples to pass over first.

        Raises:
            DataError: the shard is of another kind, or damaged. Failures to read raise one of `storage.READ_ERRORS`.
        """

    def decode(self, sample: Sample, entry: IntArray) -> Decoded:
        """The token ids of a sample.

        Args:
            sample: what `read` gave.
            entry: its row of the shard's index.

        Raises:
            DataError: the sample holds no tokens or text, an id outside the vocabulary, or not what the index states.
                DataSetupError where another setting is needed to decode it.
        """

    def damaged(self, location: str, reason: str) -> DataError:
        """The error for a shard that cannot be what it should be."""


class _TarSamples:
    """What the samples of all tars have in common."""

    suffixes: frozenset[str]
    """Suffixes of the members that are read."""

    def read(self, stream: BinaryIO, location: str, entries: IntArray, *, skip: int) -> Iterator[Sample]:
        for key, members in read_samples(stream, location, skip=skip, count=len(entries), suffixes=self.suffixes):
            yield Sample(key, f"{location}: sample {key}", members)

    def damaged(self, location: str, reason: str) -> DataError:
        return damaged(location, reason)


class StoredTokens(_TarSamples):
    """Samples of a built data set."""

    suffixes = frozenset({TOKENS_SUFFIX})

    def __init__(self, info: DatasetInfo) -> None:
        self._info = info

    def decode(self, sample: Sample, entry: IntArray) -> Decoded:
        data, (_, num_tokens, checksum) = sample.members[TOKENS_SUFFIX], entry.tolist()
        check_tokens(data, checksum, sample.where)
        return Decoded(decode_tokens(data, self._info.dtype, self._info.vocab_size, num_tokens, sample.where))


class PlainSamples(_TarSamples):
    """Samples of tars made elsewhere: `.tokens`, else `.txt`, else the `text` of `.json`."""

    suffixes = PLAIN_SUFFIXES

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """`tokenizer` is for text; samples of text without one are refused."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._add_bos = tokenizer is not None and starts_with_bos(tokenizer, None)

    def decode(self, sample: Sample, entry: IntArray) -> Decoded:
        members, where = sample.members, sample.where
        if TOKENS_SUFFIX in members:
            return Decoded(self._decode_tokens(members[TOKENS_SUFFIX], where))
        text = _text_of(members, where)
        if self._tokenizer is None:
            raise DataSetupError(f"{where}: holds text. Set data.tokenizer to turn it into tokens.")
        return Decoded(np.asarray(encode_document(self._tokenizer, text, add_bos=self._add_bos), dtype=np.int64))

    def _decode_tokens(self, data: bytes, where: str) -> IntArray:
        """Ids of the type that the vocabulary asks for, as nothing beside the sample states it."""
        dtype = token_dtype(self._vocab_size)
        ids = decode_tokens(data, dtype, self._vocab_size, len(data) // storage_dtype(dtype).itemsize, where)
        if dtype == "uint16" and len(ids) >= 8 and not len(ids) % 2 and not ids[1::2].any():
            raise DataSetupError(
                f"{where}: every other id is 0, so these are 32-bit ids, but a vocabulary of {self._vocab_size} is "
                "stored in 16 bits. Store them as uint16 or build the shards with tools/build_shards.py."
            )
        return ids


def read_samples(
    stream: BinaryIO, location: str, *, skip: int, count: int, suffixes: frozenset[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and members of consecutive samples.

    Args:
        stream: a tar, from the header of a sample on.
        location: where it lies, for messages.
        skip: samples to pass over first.
        count: samples to yield; fewer come if the tar ends.
        suffixes: members to read; the others are passed over.

    Raises:
        DataError: this is no tar, or it is damaged. Failures to read raise one of `storage.READ_ERRORS`.
    """
    source = [{"url": location, "stream": stream}]
    files = tar_file_expander(source, select_files=lambda name: base_plus_ext(name)[1] in suffixes)
    try:
        for sample in islice(group_by_keys(files), skip, skip + count):
            yield sample["__key__"], sample
    except storage.READ_ERRORS as error:
        _restore_message(error)
        raise
    except (tarfile.TarError, ValueError) as error:
        raise damaged(location, str(error.args[0] if error.args else error).split(" @ ")[0]) from error


def scan_samples(location: str) -> IntArray:
    """Index of a tar that has none: [samples, 2], header offset and an upper bound of the number of tokens.

    Reads the headers alone where the file can be sought in, else everything. A scan that fails for a reason that may
    pass starts anew.

    Raises:
        DataError: it cannot be read, or is no tar, or is damaged.
    """
    with storage.naming_errors(location):
        return storage.persistently(location, lambda: _scan(location))


def damaged(location: str, reason: str) -> DataError:
    """The error for a tar that cannot be what it should be."""
    return DataError(f"{location}: not a tar file, or damaged ({reason}). Copy or build the shard again.")


def _scan(location: str) -> IntArray:
    """One try of `scan_samples`; a failure to read raises one of `storage.READ_ERRORS`."""
    offsets, sizes, last_key = [], [], None
    with closing(storage.open_once(location, 0)) as stream:
        try:
            for name, offset, num_tokens in _selected_members(stream, sequential=storage.is_sequential(location)):
                key = base_plus_ext(name)[0]
                if key != last_key:
                    offsets.append(offset)
                    sizes.append(0)
                    last_key = key
                sizes[-1] = max(sizes[-1], num_tokens)
        except (tarfile.TarError, ValueError) as error:
            raise damaged(location, str(error)) from error
    return np.stack([np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)], axis=1)


def _selected_members(stream: Any, *, sequential: bool) -> Iterator[tuple[str, int, int]]:
    """Name, header offset and largest possible number of tokens of the members that webdataset would yield."""
    with tarfile.open(fileobj=stream, mode="r|*" if sequential else "r:") as tar:
        for member in tar:
            suffix = base_plus_ext(member.name)[1]
            if member.isreg() and suffix in PLAIN_SUFFIXES and not _METADATA_NAME.match(member.name):
                tokens = member.size // 2 if suffix == TOKENS_SUFFIX else member.size + _NUM_SPECIAL_TOKENS
                yield member.name, member.offset, tokens


def _restore_message(error: BaseException) -> None:
    """Take away what webdataset adds to an exception: stream and URL, and often ` @ <stream>` to its first argument."""
    own = error.args[:-2]
    error.args = (str(own[0]).rsplit(" @ <", 1)[0], *own[1:]) if own else ()


def _text_of(sample: dict[str, Any], where: str) -> str:
    """The text of a sample.

    Raises:
        DataError: there is none, or it is not UTF-8 or JSON.
    """
    try:
        if TEXT_SUFFIX in sample:
            return str(sample[TEXT_SUFFIX].decode())
        content = json.loads(sample[METADATA_SUFFIX])
    except ValueError as error:
        raise DataError(f"{where}: not UTF-8 text or JSON ({error}). Build the shard again.") from error
    text = content.get("text") if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where}: holds neither .tokens nor .txt, and its .json has no string "text".')
    return text
