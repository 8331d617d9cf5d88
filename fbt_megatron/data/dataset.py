"""A data set as the loader sees it: documents by shard and number, checked against the model."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.data import storage
from fbt_megatron.data.format import DATASET_FILE, decode_token_bytes
from fbt_megatron.data.order import Span
from fbt_megatron.data.samples import PlainSamples, SampleDecoder, StoredTokens, damaged, read_samples
from fbt_megatron.data.shards import Described, Shard, find_shards
from fbt_megatron.data.tokenizer import Tokenizer, load_tokenizer
from fbt_megatron.errors import DataError

logger = logging.getLogger(__name__)

_MAX_READ_FAILURES = 5
_FIRST_WAIT_SECONDS = 0.5

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class DocumentDataset:
    """Documents of a list of shards."""

    shards: tuple[Shard, ...]
    decoder: SampleDecoder
    pad_id: int
    """Token that fills rows without data: the end-of-document id, or 0 where it is not known."""
    token_bytes: IntArray | None
    """[vocabulary] bytes of text per token id, where the tokenizer is known."""

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.num_documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards; an upper bound where shards were scanned."""
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what the order of documents depends on; the same wherever the shards lie."""
        lines = (f"{shard.identity} {shard.num_documents}" for shard in self.shards)
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def read(self, span: Span) -> Iterator[tuple[str, IntArray]]:
        """Key and token ids (int64) of the documents of `span`, in order.

        A remote read that fails is tried again from the document where it failed.

        Raises:
            DataError: the shard cannot be read, is damaged, or a document does not fit the vocabulary.
        """
        shard = self.shards[span.shard]
        index = shard.index()
        document, stop, failures = span.first, span.first + span.count, 0
        while document < stop:
            try:
                for key, tokens in self._read_once(shard, index, document, stop):
                    yield key, tokens
                    document, failures = document + 1, 0
            except storage.READ_ERRORS as error:
                failures += 1
                if failures > _MAX_READ_FAILURES or not storage.is_transient(shard.location, error):
                    raise storage.read_failure(shard.location, error) from error
                logger.warning("%s: %s; trying again from document %d", shard.location, error, document)
                time.sleep(_FIRST_WAIT_SECONDS * 2**failures)

    def _read_once(self, shard: Shard, index: IntArray, first: int, stop: int) -> Iterator[tuple[str, IntArray]]:
        sequential = storage.is_sequential(shard.location)
        samples = read_samples(
            shard.location,
            offset=0 if sequential else int(index[first, 0]),
            skip=first if sequential else 0,
            count=stop - first,
            suffixes=self.decoder.suffixes,
        )
        document = first
        for key, sample in samples:
            where = f"{shard.location}: sample {key}"
            yield key, self.decoder.decode(sample, index[document], where)
            document += 1
        if document < stop:
            raise damaged(shard.location, f"it ends after {document} of {shard.num_documents} documents")


def open_dataset(spec: str | Sequence[str], *, tokenizer: str | None, vocab_size: int, key: str) -> DocumentDataset:
    """Find a data set and check what can be checked without reading it.

    Args:
        spec: value of `data.train` or `data.validation`.
        tokenizer: value of `data.tokenizer`: for tars that hold text.
        vocab_size: value of `model.vocab_size`.
        key: which setting `spec` is, for messages.

    Raises:
        DataError: missing, empty, of other sizes than described, or made for another vocabulary or tokenizer.
    """
    shards, described = find_shards(spec, key=key)
    if not sum(shard.num_documents for shard in shards):
        raise DataError(f"{key}={spec}: the data set has zero documents. Build it from inputs that hold text.")
    text_tokenizer = load_tokenizer(tokenizer) if tokenizer else None
    if text_tokenizer:
        _check_tokenizer(text_tokenizer, described, vocab_size, key)
    if described is None:
        return DocumentDataset(
            shards=tuple(shards),
            decoder=PlainSamples(text_tokenizer, vocab_size),
            pad_id=text_tokenizer.eos_id if text_tokenizer else 0,
            token_bytes=text_tokenizer.token_bytes().astype(np.int64) if text_tokenizer else None,
        )
    if described.info.vocab_size != vocab_size:
        raise DataError(
            f"{key}={spec}: built for a vocabulary of {described.info.vocab_size} ids, but model.vocab_size="
            f"{vocab_size}. Set model.vocab_size={described.info.vocab_size} or build the data set with the model's "
            "tokenizer."
        )
    return DocumentDataset(
        shards=tuple(shards),
        decoder=StoredTokens(described.info),
        pad_id=described.info.eos_id,
        token_bytes=_read_token_bytes(described),
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
