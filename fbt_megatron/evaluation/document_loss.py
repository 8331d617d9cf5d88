"""Loss of documents after each pass and in mode soft, for a model that decodes in one process.

A piece is as much of a document as a row of the training holds: S tokens that are read, and the one after them. Its
first token is the prompt: it is plain, has no context and is not predicted. Pass 1 is mode standard, pass N mode fused
with N passes; in mode soft every token but the first is fused with the state before it, however many there are.

Of a conversation only what is trained counts: the tokens of its answers. The others are context.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.data.dataset import DocumentDataset
from fbt_megatron.data.order import Span
from fbt_megatron.errors import DataError
from fbt_megatron.evaluation.statistics import ratio_error
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.model import DecoderModel
from fbt_megatron.inference.scoring import Pair, Score, score, score_each_pass
from fbt_megatron.parallel.collectives import agree_on_errors, gather_objects

Value = TypeVar("Value")

_SORTED_BATCHES = 16
"""Batches whose pieces are sorted by length together, so that little is computed on padding."""


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one document: the first is given, the others are predicted, or those of them that count."""

    document: int
    """Its number, from 0; pieces of a document have the same."""
    tokens: tuple[int, ...]
    """2 to S + 1 ids."""
    counted: tuple[bool, ...] | None = None
    """Whether each token but the first is among the predicted ones, one of them at least; None: all of them."""

    @classmethod
    def counting(cls, document: int, tokens: Sequence[int], counted: Sequence[bool]) -> Piece | None:
        """The piece of which these tokens behind the first count; None where none does."""
        assert len(counted) == len(tokens) - 1, (len(counted), len(tokens))
        if not any(counted):
            return None
        return cls(document, tuple(tokens), None if all(counted) else tuple(counted))

    def pick(self, values: Sequence[Value]) -> list[Value]:
        """Of `values`, one for each token but the first, those of the predicted tokens."""
        return list(values if self.counted is None else compress(values, self.counted))


@dataclass(frozen=True)
class ModeLoss:
    """Means over the predicted tokens in one mode."""

    mode: DecodeMode
    loss: float
    """Cross entropy per token, in nats."""
    bits_per_byte: float | None
    """None where the data set does not know the bytes of its tokens."""
    difference: float
    """Of the loss to that of mode standard."""
    difference_error: float
    """Standard error of the difference, with documents as the independent cases; NaN for a single one."""
    hidden_delta: float | None
    """Mean of `||h^(k) - h^(k-1)||_2 / sqrt(H)` between the last two passes; None with one pass."""


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of the same tokens in several modes; `modes[0]` is standard."""

    num_documents: int
    num_tokens: int
    """Predicted ones."""
    num_bytes: int | None
    """Of the text of the predicted tokens."""
    modes: tuple[ModeLoss, ...]


def document_pieces(dataset: DocumentDataset, *, seq_length: int, limit: int | None = None) -> Iterator[Piece]:
    """Pieces of the first `limit` documents in stored order, each document cut from its own start at stride S.

    So every token of a document but its first is predicted once. Of a conversation it is every trained token, and what
    is behind its first S + 1 tokens is left out, because answers without their question are not trained.
    """
    spans = (Span(number, 0, shard.num_documents) for number, shard in enumerate(dataset.shards) if shard.num_documents)
    documents = (read for span in spans for read in dataset.read(span))
    for number, document in enumerate(islice(documents, limit)):
        tokens = document.tokens.tolist()
        if document.trained is not None:
            counted = document.trained[1 : seq_length + 1].tolist()
            piece = Piece.counting(number, tokens[: seq_length + 1], counted)
            yield from () if piece is None else (piece,)
            continue
        for start in range(0, len(tokens) - 1, seq_length):
            yield Piece(number, tuple(tokens[start : start + seq_length + 1]))


def row_pieces(batches: Iterable[Sequence[TrainBatch]]) -> Iterator[Piece]:
    """Pieces of packed rows: a document begins with each row, so one that goes over a row's end counts as two.

    What is no label is not predicted, and padding never is one. They give the losses of the rows themselves where
    attention stays inside documents.
    """
    number = 0
    for micro_batches in batches:
        for batch in micro_batches:
            for row in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.document_ids.tolist(), strict=True):
                for tokens, counted in _documents_of(*row):
                    piece = Piece.counting(number, tokens, counted)
                    if piece is not None:
                        yield piece
                        number += 1


def document_losses(
    model: DecoderModel,
    pieces: Iterable[Piece],
    *,
    num_passes: int,
    soft: bool,
    token_bytes: Tensor | None,
    batch_size: int,
    process: int = 0,
    num_processes: int = 1,
    progress: Callable[[int], object] = lambda num_tokens: None,
) -> DocumentLosses:
    """Losses after passes 1 to `num_passes`, and with `soft` in that mode, `batch_size` pieces at a time.

    `token_bytes` [V] are the bytes that each id stands for; `progress` is told how many tokens have been predicted
    since it was last called. Of several processes, which torch.distributed must know, each computes a share of the
    batches of the same pieces; all get the same result, which is that of a single one to the last bit. Raises
    DecodeError where the model has no feedback and it is needed, DataError where there is nothing to predict; what one
    process raises, all do.
    """
    fused = Decoder(model, _mode_of_pass(num_passes))
    modes = [_mode_of_pass(number) for number in range(1, num_passes + 1)]
    decoder = Decoder(model, DecodeMode.of("soft")) if soft else None
    if decoder is not None:
        modes.append(decoder.mode)
    batches = _share(_batches(pieces, batch_size), process, num_processes)

    def compute() -> dict[int, _Sums]:
        return dict(_sums_of_batches(batches, fused, decoder, num_passes, token_bytes, progress))

    found = [compute()] if num_processes == 1 else gather_objects(agree_on_errors(compute))
    sums = _Sums.joined({number: one for share in found for number, one in share.items()}, num_passes)
    return sums.result(modes, knows_bytes=token_bytes is not None)


def _sums_of_batches(
    batches: Iterable[tuple[int, list[Piece]]],
    fused: Decoder,
    decoder: Decoder | None,
    num_passes: int,
    token_bytes: Tensor | None,
    progress: Callable[[int], object],
) -> Iterator[tuple[int, _Sums]]:
    """Number and sums of each batch; `decoder` is that of mode soft."""
    for batch_number, batch in batches:
        sums = _Sums(num_passes)
        pairs: list[Pair] = [(piece.tokens[:1], piece.tokens[1:]) for piece in batch]
        columns = []
        for number, after in enumerate(score_each_pass(fused, pairs)):
            columns.append(_totals(batch, after.scores))
            if after.hidden_deltas is not None:
                of_pieces = zip(batch, after.hidden_deltas, strict=True)
                sums.deltas[number] += math.fsum(delta for piece, own in of_pieces for delta in piece.pick(own))
        if decoder is not None:
            columns.append(_totals(batch, score(decoder, pairs)))
        sums.add(batch, columns, token_bytes)
        progress(sum(len(continuation) for _, continuation in pairs))
        yield batch_number, sums


class _Sums:
    """Nats of each piece in each mode, and what is summed over all of them."""

    def __init__(self, num_passes: int) -> None:
        self.deltas = np.zeros(num_passes)
        self._documents: list[NDArray[np.int64]] = []
        self._sizes: list[NDArray[np.float64]] = []
        self._nats: list[NDArray[np.float64]] = []
        self._num_bytes = 0

    @classmethod
    def joined(cls, batches: Mapping[int, _Sums], num_passes: int) -> _Sums:
        """Those of all batches, added in the order of their numbers: whoever has computed them, the same sums."""
        whole = cls(num_passes)
        for _, one in sorted(batches.items()):
            whole.deltas += one.deltas
            whole._documents += one._documents
            whole._sizes += one._sizes
            whole._nats += one._nats
            whole._num_bytes += one._num_bytes
        return whole

    def add(self, batch: Sequence[Piece], columns: list[list[float]], token_bytes: Tensor | None) -> None:
        """Count pieces with their log-likelihoods, a column for each mode."""
        self._documents.append(np.array([piece.document for piece in batch]))
        predicted = [piece.pick(piece.tokens[1:]) for piece in batch]
        self._sizes.append(np.array([len(tokens) for tokens in predicted], dtype=np.float64))
        self._nats.append(-np.array(columns))
        if token_bytes is not None:
            self._num_bytes += sum(int(token_bytes[tokens].sum()) for tokens in predicted)

    def result(self, modes: list[DecodeMode], *, knows_bytes: bool) -> DocumentLosses:
        """Means of all that was added."""
        if not self._documents:
            raise DataError("the data holds no document of two tokens, so there is nothing to predict.")
        numbers, places = np.unique(np.concatenate(self._documents), return_inverse=True)
        sizes = np.bincount(places, weights=np.concatenate(self._sizes), minlength=len(numbers))
        columns = np.concatenate(self._nats, axis=1)
        nats = np.stack([np.bincount(places, weights=own, minlength=len(numbers)) for own in columns])
        num_tokens, num_bytes = int(sizes.sum()), self._num_bytes if knows_bytes else None
        losses = tuple(
            ModeLoss(
                mode,
                loss=float(own.sum()) / num_tokens,
                bits_per_byte=float(own.sum()) / math.log(2) / num_bytes if num_bytes else None,
                difference=float((own - nats[0]).sum()) / num_tokens,
                difference_error=ratio_error(own - nats[0], sizes),
                hidden_delta=float(self.deltas[number]) / num_tokens if 0 < number < len(self.deltas) else None,
            )
            for number, (mode, own) in enumerate(zip(modes, nats, strict=True))
        )
        return DocumentLosses(len(numbers), num_tokens, num_bytes, losses)


def _mode_of_pass(number: int) -> DecodeMode:
    return DecodeMode.of("standard") if number == 1 else DecodeMode.of("fused", prefill_passes=number)


def _totals(batch: Sequence[Piece], scores: Sequence[Score]) -> list[float]:
    """Log-likelihood of the predicted tokens of each piece."""
    return [math.fsum(piece.pick(found.logprobs)) for piece, found in zip(batch, scores, strict=True)]


def _documents_of(tokens: list[int], labels: list[int], documents: list[int]) -> Iterator[tuple[list[int], list[bool]]]:
    """The documents of one packed row [S], each with the label after its last token, and which tokens are labels."""
    start = 0
    for end in range(1, len(tokens) + 1):
        if end < len(tokens) and documents[end] == documents[start]:
            continue
        after = [label for label in labels[end - 1 : end] if label != IGNORE_INDEX]
        counted = [label != IGNORE_INDEX for label in labels[start : end - 1]]
        yield [*tokens[start:end], *after], [*counted, *(True for _ in after)]
        start = end


def _share(batches: Iterable[list[Piece]], process: int, num_processes: int) -> Iterator[tuple[int, list[Piece]]]:
    """Number and pieces of the batches of one process: every `num_processes`-th.

    From window to window another process begins, because the batches that are sorted together grow in length.
    """
    for number, batch in enumerate(batches):
        if (number + number // _SORTED_BATCHES) % num_processes == process:
            yield number, batch


def _batches(pieces: Iterable[Piece], batch_size: int) -> Iterator[list[Piece]]:
    source = iter(pieces)
    while window := list(islice(source, batch_size * _SORTED_BATCHES)):
        window.sort(key=lambda piece: len(piece.tokens))
        yield from (window[start : start + batch_size] for start in range(0, len(window), batch_size))
