"""Reads consecutive documents of a shard: what fails is tried again, and then stops the run or is passed over.

A document that is passed over keeps its place: the ones after it come where they would have come.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.data import storage
from fbt_megatron.data.retries import Backoff
from fbt_megatron.data.samples import SampleDecoder
from fbt_megatron.data.shards import Shard
from fbt_megatron.errors import DataError, DataSetupError

logger = logging.getLogger(__name__)

_MAX_REPORTS = 100

IntArray = NDArray[np.int64]

_NO_TOKENS: IntArray = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ReadDocument:
    """One document, or the place of one that was passed over."""

    key: str
    """Name of its sample; empty where it is not known."""
    tokens: IntArray
    """[tokens] ids; none where it was passed over."""
    trained: NDArray[np.bool_] | None = None
    """[tokens] whether a token is trained where it is a label; `None`: all of them."""
    skipped: bool = False
    skipped_tokens: int = 0
    """Tokens that it has by the index, where it was passed over and there is an index."""


class DocumentReader:
    """Reads documents as `data.on_error` asks."""

    def __init__(self, decoder: SampleDecoder, *, on_error: Literal["stop", "skip"]) -> None:
        self._decoder = decoder
        self._on_error = on_error
        self._num_reports = 0

    def read(self, shard: Shard, first: int, count: int) -> Iterator[ReadDocument]:
        """The documents of `shard` from number `first` on, exactly `count`.

        A read that fails for a reason that may pass is tried again from the document where it failed.

        Raises:
            DataError: a document cannot be read or decoded, and `on_error` is `stop` or it would be of no use to go on.
        """
        document, stop = first, first + count
        try:
            index = shard.index()
        except DataError as error:
            yield from self._pass_over(shard, None, document, stop, error)
            return
        backoff, upto = Backoff(), stop
        while document < stop:
            try:
                stream = _open(shard, index, document, alone=upto == document + 1)
            except DataError as error:
                yield from self._pass_over(shard, index, document, stop, error)
                return
            with closing(stream):
                document, failure = yield from self._read_on(stream, shard, index, document, upto, backoff)
            if failure is None:
                upto = stop
            elif storage.is_sequential(shard.location):
                yield from self._pass_over(shard, index, document, stop, failure)
                return
            elif self._on_error == "skip" and upto > document + 1:
                upto = document + 1  # what was read ahead may have failed: try this document alone
            else:
                yield from self._pass_over(shard, index, document, document + 1, failure)
                document, upto = document + 1, stop

    def _read_on(
        self, stream: BinaryIO, shard: Shard, index: IntArray, first: int, stop: int, backoff: Backoff
    ) -> Generator[ReadDocument, None, tuple[int, DataError | None]]:
        """Documents `first` to `stop - 1`, up to a failure.

        Returns the document behind those that came, and what is wrong with it; `None` to read on from there.
        """
        document = first
        try:
            for read in self._documents(stream, shard, index, first, stop):
                yield read
                document += 1
                if stop > first + 1:  # one that was tried alone says nothing about the ones after it
                    backoff.succeeded()
        except storage.READ_ERRORS as error:
            where = f"{shard.location}: from document {document} on"
            if storage.is_transient(shard.location, error) and backoff.wait(where, error):
                return document, None
            return document, storage.read_failure(shard.location, error)
        except DataError as error:
            return document, error
        return document, None

    def _documents(
        self, stream: BinaryIO, shard: Shard, index: IntArray, first: int, stop: int
    ) -> Iterator[ReadDocument]:
        """Documents `first` to `stop - 1` out of the stream of `_open`."""
        skip = first if storage.is_sequential(shard.location) else 0
        document = first
        for sample in self._decoder.read(stream, shard.location, index[first:stop], skip=skip):
            try:
                decoded = self._decoder.decode(sample, index[document])
            except DataError as error:
                yield from self._pass_over(shard, index, document, document + 1, error)
            else:
                yield ReadDocument(sample.key, decoded.tokens, decoded.trained)
            document += 1
        if document < stop:
            raise self._decoder.damaged(shard.location, f"it ends after {document} of {shard.num_documents} documents")

    def _pass_over(
        self, shard: Shard, index: IntArray | None, first: int, stop: int, error: DataError
    ) -> Iterator[ReadDocument]:
        """The places of documents `first` to `stop - 1`; raises `error` if they must not be passed over."""
        if self._on_error == "stop" or isinstance(error, DataSetupError):
            raise error
        sizes = [0] * (stop - first) if index is None or shard.info is None else index[first:stop, 1].tolist()
        self._report(first, stop, sum(sizes), error)
        for num_tokens in sizes:
            yield ReadDocument("", _NO_TOKENS, skipped=True, skipped_tokens=num_tokens)

    def _report(self, first: int, stop: int, num_tokens: int, error: DataError) -> None:
        self._num_reports += 1
        if self._num_reports <= _MAX_REPORTS:
            documents = f"document {first}" if stop == first + 1 else f"documents {first} to {stop - 1}"
            tokens = f" ({num_tokens:,} tokens)" if num_tokens else ""
            logger.warning("data.on_error=skip passes over %s%s: %s", documents, tokens, error)
        if self._num_reports == _MAX_REPORTS:
            logger.warning("data.on_error=skip: this process only counts what it passes over from now on")


def _open(shard: Shard, index: IntArray, document: int, *, alone: bool) -> BinaryIO:
    """A stream from a document on (from the first one where there is no other way), which ends with it if `alone`."""
    is_sequential = storage.is_sequential(shard.location)
    offset = 0 if is_sequential else int(index[document, 0])
    with storage.naming_errors(shard.location):
        stream = storage.open_at(shard.location, offset)
    if alone and not is_sequential and document + 1 < len(index):
        return io.BufferedReader(_FirstBytes(stream, int(index[document + 1, 0]) - offset))
    return stream


class _FirstBytes(io.RawIOBase):
    """The first bytes of a stream, and then its end."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        super().__init__()
        self._stream = stream
        self._left = size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(min(len(buffer), self._left))
        self._left -= len(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
