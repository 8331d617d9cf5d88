"""A data set as the loader sees it: documents by shard and number, checked against the model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.data import storage
from fbt_megatron.data.document_reader import DocumentReader, ReadDocument
from fbt_megatron.data.format import DATASET_FILE, decode_token_bytes
from fbt_megatron.data.order import Span
from fbt_megatron.data.samples import PlainSamples, StoredTokens
from fbt_megatron.data.shards import Described, Shard, find_shards
from fbt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from fbt_megatron.errors import DataError

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class DocumentDataset:
    """Documents of a list of shards."""

    shards: tuple[Shard, ...]
    reader: DocumentReader
    pad_id: int
    """Token that fills rows without data: the end-of-document id, or 0 where it is not known."""
    token_bytes: IntArray | None
    """[vocabulary] bytes of text per token id, where the tokenizer is known."""
    encoding: str = ""
    """SHA-256 (hex) of what turns text into ids, where that is no part of the shards."""
    described: Described | None = None
    """Its `dataset.json`, where there is one."""
    tokenizer: Tokenizer | None = None
    """`data.tokenizer`, where there is no `dataset.json` that tells of another."""

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards; see `Shard.num_tokens` for those that were scanned."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what the order of documents depends on; the same wherever the shards lie."""
        lines = [f"{shard.identity} {shard.num_documents}" for shard in self.shards]
        encoding = [self.encoding] if self.encoding else []
        return hashlib.sha256("\n".join([*lines, *encoding]).encode()).hexdigest()

    def read(self, span: Span) -> Iterator[ReadDocument]:
        """The documents of `span`, in order; see `DocumentReader.read`."""
        return self.reader.read(self.shards[span.shard], span.first, span.count)


def open_dataset(
    spec: str | Sequence[str],
    *,
    tokenizer: str | None,
    vocab_size: int,
    key: str,
    on_error: Literal["stop", "skip"] = "stop",
) -> DocumentDataset:
    """Find a data set and check what can be checked without reading it.

    Args:
        spec: value of `data.train` or `data.validation`.
        tokenizer: value of `data.tokenizer`: for tars that hold text.
        vocab_size: value of `model.vocab_size`.
        key: which setting `spec` is, for messages.
        on_error: what to do with documents that cannot be read.

    Raises:
        DataError: missing, empty, of other sizes than described, or made for another vocabulary or tokenizer.
    """
    shards, described = find_shards(spec, key=key, check_sizes=on_error == "stop")
    if not sum(shard.num_documents for shard in shards):
        raise DataError(f"{key}={spec}: the data set has zero documents. Build it from inputs that hold text.")
    text_tokenizer = load_tokenizer(tokenizer) if tokenizer else None
    if text_tokenizer:
        _check_tokenizer(text_tokenizer, described, vocab_size, key)
    if described is None:
        return DocumentDataset(
            shards=tuple(shards),
            reader=DocumentReader(PlainSamples(text_tokenizer, vocab_size), on_error=on_error),
            pad_id=text_tokenizer.eos_id if text_tokenizer else 0,
            token_bytes=text_tokenizer.token_bytes().astype(np.int64) if text_tokenizer else None,
            tokenizer=text_tokenizer,
        )
    if described.info.vocab_size != vocab_size:
        raise DataError(
            f"{key}={spec}: built for a vocabulary of {described.info.vocab_size} ids, but model.vocab_size="
            f"{vocab_size}. Set model.vocab_size={described.info.vocab_size} or build the data set with the model's "
            "tokenizer."
        )
    return DocumentDataset(
        shards=tuple(shards),
        reader=DocumentReader(StoredTokens(described.info), on_error=on_error),
        pad_id=described.info.eos_id,
        token_bytes=_read_token_bytes(described),
        described=described,
    )


def _check_tokenizer(tokenizer: Tokenizer, described: Described | None, vocab_size: int, key: str) -> None:
    if described and tokenizer.fingerprint != described.info.tokenizer.fingerprint:
        raise DataError(
            f"data.tokenizer is not the tokenizer that {key} ({described.folder}/{DATASET_FILE}) was built with. "
            "Leave data.tokenizer out, or build the data set again with it."
        )
    if not described and tokenizer.vocab_size != vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size={vocab_size}. "
            f"Set model.vocab_size={tokenizer.vocab_size} or name the model's tokenizer."
        )


def _read_token_bytes(described: Described) -> IntArray:
    location = storage.join(described.folder, described.info.token_bytes)
    return decode_token_bytes(storage.read_bytes(location), described.info, location)
