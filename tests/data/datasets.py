"""Small data sets for the tests of the reading side, written with the standard library."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from fbt_megatron.config.schema import DataConfig, EvaluationConfig, ModelConfig, RunConfig, TrainConfig
from fbt_megatron.data.format import DatasetInfo, ShardInfo, TokenizerInfo, dataset_to_json

Documents = Sequence[Sequence[int]]


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> list[int]:
    """Write a USTAR file; return the offset of each member's header."""
    offsets = []
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            offsets.append(tar.offset)
            tar.addfile(header, io.BytesIO(content))
    return offsets


def pack_ids(ids: Sequence[int], dtype: str) -> bytes:
    """Little-endian ids."""
    return struct.pack(f"<{len(ids)}{'H' if dtype == 'uint16' else 'I'}", *ids)


def write_dataset(
    folder: Path,
    shards: Sequence[Documents],
    *,
    vocab_size: int = 257,
    eos_id: int = 256,
    bos_id: int | None = None,
    stated_dtype: str = "uint16",
    tokenizer: TokenizerInfo | None = None,
) -> Path:
    """Write a complete data set: document d of shard s has the key `s-d`, shards are `shard-00000.tar`, ...

    `tokenizer` is what made the ids (default: raw bytes, with a fingerprint that is made up).
    """
    folder.mkdir(parents=True, exist_ok=True)
    infos = [_write_shard(folder, number, documents, stated_dtype) for number, documents in enumerate(shards)]
    token_bytes = struct.pack(f"<{vocab_size}H", *([1] * (vocab_size - 1)), 0)
    (folder / "token_bytes.bin").write_bytes(token_bytes)
    info = DatasetInfo(
        tokenizer=tokenizer or TokenizerInfo(kind="bytes", file=None, fingerprint="0" * 64),
        dtype="uint16" if vocab_size <= 65536 else "uint32",
        vocab_size=vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=False,
        num_documents=sum(shard.num_documents for shard in infos),
        num_tokens=sum(shard.num_tokens for shard in infos),
        num_bytes=0,
        token_bytes="token_bytes.bin",
        token_bytes_sha256=hashlib.sha256(token_bytes).hexdigest(),
        shards=tuple(infos),
    )
    (folder / "dataset.json").write_text(dataset_to_json(info))
    return folder


def spoil_document(path: Path, ids: Sequence[int], dtype: str = "uint16") -> None:
    """Flip a bit of the second id of a document that occurs once in a shard."""
    content, stored = bytearray(path.read_bytes()), pack_ids(ids, dtype)
    assert content.count(stored) == 1
    content[content.index(stored) + len(stored) // len(ids)] ^= 1
    path.write_bytes(content)


def run_config(
    train: Path | str | tuple[str, ...],
    *,
    validation: Path | str | None = None,
    seq_length: int = 8,
    streams: int = 4,
    micro_batch_size: int = 1,
    global_batch_size: int = 4,
    workers: int = 0,
    seed: int = 1,
    vocab_size: int = 257,
    tokenizer: str | None = None,
    batches: int = 2,
) -> RunConfig:
    """A configuration of which only the data matters."""
    return RunConfig(
        model=ModelConfig(vocab_size=vocab_size, seq_length=seq_length),
        data=DataConfig(
            train=train if isinstance(train, tuple) else str(train),
            validation=None if validation is None else str(validation),
            streams=streams,
            workers=workers,
            tokenizer=tokenizer,
        ),
        train=TrainConfig(global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, seed=seed),
        evaluation=EvaluationConfig(batches=batches),
    )


def _write_shard(folder: Path, number: int, documents: Documents, dtype: str) -> ShardInfo:
    members = []
    for place, ids in enumerate(documents):
        key = f"{number}-{place}"
        members += [(f"{key}.json", b'{"source": "test"}'), (f"{key}.tokens", pack_ids(ids, dtype))]
    tar = folder / f"shard-{number:05d}.tar"
    offsets = write_tar(tar, members)[::2]
    index = b"".join(
        struct.pack("<qqq", offset, len(ids), zlib.crc32(pack_ids(ids, dtype)))
        for offset, ids in zip(offsets, documents, strict=True)
    )
    tar.with_suffix(".index").write_bytes(index)
    content = tar.read_bytes()
    return ShardInfo(
        name=tar.name,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        num_documents=len(documents),
        num_tokens=sum(len(ids) for ids in documents),
        index=f"{tar.stem}.index",
        index_sha256=hashlib.sha256(index).hexdigest(),
    )
