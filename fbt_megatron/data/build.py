"""Turns text into data sets: tokenise into chunks, then write shards in shuffled order.

    OUT/.build/         chunks and finished shards of a build under way; removed at the end
    OUT/tokenizer/      copy of the tokenizer
    OUT/train/, OUT/validation/
    OUT/build.json      settings and counts; written last

A build that was stopped goes on where it was: finished chunks and shards are kept, and are only used by a build with
the same settings and inputs.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fbt_megatron.data.arrangement import IntArray, shard_boundaries, shuffled, validation_mask
from fbt_megatron.data.build_folder import (
    TOKENIZER_FOLDER,
    TRAIN,
    VALIDATION,
    Identity,
    close_work_folder,
    copy_tokenizer,
    finished_summary,
    locked,
    open_work_folder,
    remove_build,
    work_folder,
)
from fbt_megatron.data.chunks import (
    MAX_REPORTED,
    ChunkSummary,
    ChunkTask,
    TokenizerSpec,
    finished_chunk,
    read_table,
    tokenize_chunk,
)
from fbt_megatron.data.format import (
    FORMAT_VERSION,
    TOKEN_BYTES_FILE,
    DatasetInfo,
    ShardInfo,
    TokenizerInfo,
    token_dtype,
    write_dataset,
)
from fbt_megatron.data.pool import run_tasks
from fbt_megatron.data.progress import Progress
from fbt_megatron.data.shard_writer import ShardTask, finished_shard, write_shard
from fbt_megatron.data.sources import Inputs, Part, find_inputs, plan_chunks
from fbt_megatron.data.tokenizer import TOKENIZER_FILE, Tokenizer, starts_with_bos
from fbt_megatron.errors import DataError
from fbt_megatron.files import write_durably

_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 26
_CHUNKS_PER_BUILD = 64


@dataclass(frozen=True)
class BuildSettings:
    """What decides the bytes of the result."""

    inputs: tuple[str, ...]
    """Files, folders or `python-stdlib`."""
    tokenizer: TokenizerSpec
    add_bos: bool | None = None
    """Start documents with BOS; `None`: where the tokenizer has one that is not its EOS."""
    text_key: str = "text"
    """Key of JSON lines and column of Parquet that hold the text."""
    on_error: Literal["stop", "skip"] = "stop"
    """What to do where the input gives no document."""
    validation_fraction: float = 0.01
    """Share of the documents for validation; 0: no validation data."""
    shard_tokens: int = 100_000_000
    """Tokens per shard, about."""
    num_shards: int | None = None
    """Number of training shards, in place of `shard_tokens`."""
    seed: int = 1234
    """Seed of the split and the shuffle."""

    def check(self) -> None:
        """Raise DataError for a value outside its range."""
        if not 0 <= self.validation_fraction < 1:
            raise DataError(f"--validation-fraction {self.validation_fraction}: must be at least 0 and below 1.")
        if self.shard_tokens < 1:
            raise DataError(f"--shard-tokens {self.shard_tokens}: must be at least 1.")
        if self.num_shards is not None and self.num_shards < 1:
            raise DataError(f"--shards {self.num_shards}: must be at least 1.")


@dataclass(frozen=True)
class SplitSummary:
    """Counts of one data set."""

    num_documents: int
    num_tokens: int
    num_bytes: int
    num_shards: int


@dataclass(frozen=True)
class BuildSummary:
    """What a build made."""

    train: SplitSummary
    validation: SplitSummary | None
    vocab_size: int
    dtype: str
    num_input_files: int
    num_ignored_files: int
    num_empty_documents: int
    num_skipped_documents: int
    skipped: tuple[str, ...]
    """The first few places that were skipped."""
    already_complete: bool = False
    """Whether an earlier run had made it."""


@dataclass(frozen=True)
class _Build:
    """A build under way."""

    settings: BuildSettings
    out: Path
    workers: int
    tokenizer: Tokenizer
    add_bos: bool
    inputs: Inputs

    @property
    def work_folder(self) -> Path:
        return work_folder(self.out)

    def identity(self) -> Identity:
        """Everything that decides the result, as JSON: two builds with equal identities give equal bytes."""
        described = asdict(self.settings)
        described["format_version"] = FORMAT_VERSION
        described["inputs"] = list(self.settings.inputs)
        described["tokenizer"] = self.tokenizer.fingerprint
        described["add_bos"] = self.add_bos
        described["input files"] = f"{len(self.inputs.files)} files, {self.inputs.num_bytes} bytes"
        described["input fingerprint"] = self.inputs.fingerprint
        return described


@dataclass(frozen=True)
class _Corpus:
    """All tokenised documents in reading order."""

    chunks: npt.NDArray[np.int32]
    documents: npt.NDArray[Any]


def build_dataset(settings: BuildSettings, out: Path, *, workers: int = 1, restart: bool = False) -> BuildSummary:
    """Make the training and validation data sets under `out`; progress goes to standard error.

    Args:
        settings: what to make.
        out: folder; is created.
        workers: processes. The result does not depend on it.
        restart: throw away what an earlier build with other settings left in `out`.

    Raises:
        DataError: bad settings or input, `out` holds something else, or the disk is full.
    """
    settings.check()
    if workers < 1:
        raise DataError(f"--workers {workers}: must be at least 1.")
    tokenizer = settings.tokenizer.load()
    add_bos = starts_with_bos(tokenizer, settings.add_bos)
    build = _Build(settings, out, workers, tokenizer, add_bos, find_inputs(settings.inputs))
    try:
        with locked(out):
            if restart:
                remove_build(out)
            summary = finished_summary(out, build.identity())
            return _run(build) if summary is None else _already_complete(summary)
    except OSError as error:
        raise DataError(
            f"{out}: the build had to stop ({error}). Finished work is kept: run again to go on."
        ) from error


def _run(build: _Build) -> BuildSummary:
    open_work_folder(build.out, build.identity())
    copy_tokenizer(build.tokenizer, build.settings.tokenizer.spec, build.out)
    chunks = _tokenize(build)
    corpus = _load_corpus(build.work_folder, chunks)
    mask = _validation_documents(build.settings, corpus)
    train = _write_split(build, TRAIN, _select(corpus, ~mask), None)
    validation = None
    if mask.any():
        tokens_per_shard = train.num_tokens / len(train.shards)
        validation = _write_split(build, VALIDATION, _select(corpus, mask), tokens_per_shard)
    summary = _summary(build, chunks, train, validation)
    close_work_folder(build.out, build.identity(), asdict(summary))
    return summary


def _already_complete(summary: dict[str, Any]) -> BuildSummary:
    splits = {name: SplitSummary(**summary[name]) if summary[name] else None for name in (TRAIN, VALIDATION)}
    return BuildSummary(**{**summary, **splits, "skipped": tuple(summary["skipped"]), "already_complete": True})


# First half: documents to tokens.


def _tokenize(build: _Build) -> list[ChunkSummary]:
    """Tokenise the chunks that are not finished and return the counts of all, in order."""
    tasks = [_chunk_task(build, number, parts) for number, parts in enumerate(_plan(build))]
    earlier = [finished_chunk(build.work_folder, task.number) for task in tasks]
    summaries = {summary.number: summary for summary in earlier if summary is not None}
    done_bytes = sum(summary.input_bytes for summary in summaries.values())
    total_bytes = sum(task.input_bytes for task in tasks)
    todo = [task for task in tasks if task.number not in summaries]
    with Progress("tokenize", total_bytes, done_bytes, sys.stderr) as progress:
        for summary in run_tasks(tokenize_chunk, todo, build.workers):
            summaries[summary.number] = summary
            progress.advance(summary.input_bytes, summary.num_tokens)
    return [summaries[task.number] for task in tasks]


def _plan(build: _Build) -> list[tuple[Part, ...]]:
    chunk_bytes = min(max(build.inputs.num_bytes // _CHUNKS_PER_BUILD, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
    return plan_chunks(build.inputs, build.settings.text_key, chunk_bytes)


def _chunk_task(build: _Build, number: int, parts: tuple[Part, ...]) -> ChunkTask:
    return ChunkTask(
        number=number,
        parts=parts,
        folder=build.work_folder,
        tokenizer=build.settings.tokenizer,
        add_bos=build.add_bos,
        text_key=build.settings.text_key,
        on_error=build.settings.on_error,
    )


def _load_corpus(folder: Path, summaries: list[ChunkSummary]) -> _Corpus:
    if not any(summary.num_documents for summary in summaries):
        empty = sum(summary.num_empty for summary in summaries)
        skipped = sum(summary.num_skipped for summary in summaries)
        raise DataError(f"the inputs hold no document with text ({empty} empty, {skipped} skipped). Give other inputs.")
    counts = [summary.num_documents for summary in summaries]
    chunks = np.repeat(np.array([summary.number for summary in summaries], dtype=np.int32), counts)
    return _Corpus(chunks, np.concatenate([read_table(folder, summary.number) for summary in summaries]))


# Second half: tokens to shards.


def _validation_documents(settings: BuildSettings, corpus: _Corpus) -> npt.NDArray[np.bool_]:
    return validation_mask(corpus.documents["text_hash"], settings.validation_fraction, settings.seed)


def _select(corpus: _Corpus, mask: npt.NDArray[np.bool_]) -> _Corpus:
    return _Corpus(corpus.chunks[mask], corpus.documents[mask])


def _write_split(build: _Build, name: str, corpus: _Corpus, tokens_per_shard: float | None) -> DatasetInfo:
    """Write one data set; `tokens_per_shard` of `None` follows the settings."""
    folder = build.out / name
    folder.mkdir(exist_ok=True)
    order = shuffled(len(corpus.chunks), build.settings.seed)
    corpus = _Corpus(corpus.chunks[order], corpus.documents[order])
    boundaries = shard_boundaries(corpus.documents["num_tokens"], _num_shards(build.settings, corpus, tokens_per_shard))
    shards = _write_shards(build, name, corpus, boundaries)
    token_bytes = build.tokenizer.token_bytes().astype("<u2").tobytes()
    write_durably(folder / TOKEN_BYTES_FILE, token_bytes)
    info = _describe(build, corpus, shards, hashlib.sha256(token_bytes).hexdigest())
    write_dataset(folder, info)
    return info


def _num_shards(settings: BuildSettings, corpus: _Corpus, tokens_per_shard: float | None) -> int:
    num_documents, num_tokens = len(corpus.chunks), int(corpus.documents["num_tokens"].sum())
    if tokens_per_shard is None and settings.num_shards is not None:
        if settings.num_shards > num_documents:
            raise DataError(
                f"--shards {settings.num_shards}: a shard needs a document, and there are {num_documents} to train on. "
                f"Use at most {num_documents}."
            )
        return settings.num_shards
    return min(num_documents, max(1, round(num_tokens / (tokens_per_shard or settings.shard_tokens))))


def _write_shards(build: _Build, name: str, corpus: _Corpus, boundaries: IntArray) -> tuple[ShardInfo, ...]:
    tasks = [_shard_task(build, name, corpus, boundaries, number) for number in range(len(boundaries) - 1)]
    shards = {task.name: finished for task in tasks if (finished := finished_shard(task))}
    todo = [task for task in tasks if task.name not in shards]
    sizes = {task.name: _stored_bytes(task.documents) for task in tasks}
    total = sum(sizes.values())
    done = total - sum(sizes[task.name] for task in todo)
    with Progress(f"write {name}", total, done, sys.stderr) as progress:
        for shard in run_tasks(write_shard, todo, build.workers):
            shards[shard.name] = shard
            progress.advance(sizes[shard.name], shard.num_tokens)
    return tuple(shards[task.name] for task in tasks)


def _stored_bytes(documents: npt.NDArray[Any]) -> int:
    return int((documents["metadata_bytes"] + documents["token_bytes"]).sum())


def _shard_task(build: _Build, name: str, corpus: _Corpus, boundaries: IntArray, number: int) -> ShardTask:
    start, stop = int(boundaries[number]), int(boundaries[number + 1])
    return ShardTask(
        folder=build.out / name,
        number=number,
        chunk_folder=build.work_folder,
        marker=build.work_folder / f"{name}-{number:05d}.json",
        first_key=start,
        key_width=max(8, len(str(len(corpus.chunks)))),
        chunks=corpus.chunks[start:stop],
        documents=corpus.documents[start:stop],
    )


def _describe(build: _Build, corpus: _Corpus, shards: tuple[ShardInfo, ...], token_bytes_sha256: str) -> DatasetInfo:
    tokenizer = build.tokenizer
    file = None if tokenizer.kind == "bytes" else f"../{TOKENIZER_FOLDER}/{TOKENIZER_FILE}"
    return DatasetInfo(
        tokenizer=TokenizerInfo(tokenizer.kind, file, tokenizer.fingerprint),
        dtype=token_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        add_bos=build.add_bos,
        num_documents=len(corpus.chunks),
        num_tokens=int(corpus.documents["num_tokens"].sum()),
        num_bytes=int(corpus.documents["text_bytes"].sum()),
        token_bytes=TOKEN_BYTES_FILE,
        token_bytes_sha256=token_bytes_sha256,
        shards=shards,
    )


def _summary(
    build: _Build, chunks: list[ChunkSummary], train: DatasetInfo, validation: DatasetInfo | None
) -> BuildSummary:
    return BuildSummary(
        train=_split_summary(train),
        validation=None if validation is None else _split_summary(validation),
        vocab_size=train.vocab_size,
        dtype=train.dtype,
        num_input_files=len(build.inputs.files),
        num_ignored_files=build.inputs.num_ignored,
        num_empty_documents=sum(chunk.num_empty for chunk in chunks),
        num_skipped_documents=sum(chunk.num_skipped for chunk in chunks),
        skipped=tuple(message for chunk in chunks for message in chunk.skipped)[:MAX_REPORTED],
    )


def _split_summary(info: DatasetInfo) -> SplitSummary:
    return SplitSummary(info.num_documents, info.num_tokens, info.num_bytes, len(info.shards))
