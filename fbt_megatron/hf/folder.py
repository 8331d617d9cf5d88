"""Writes a model as a folder that `transformers` loads: there whole, or not there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fbt_megatron.errors import CheckpointError
from fbt_megatron.files import sync_folder, write_durably
from fbt_megatron.hf.safetensors_files import DTYPES, Entry, write_tensors
from fbt_megatron.hf.tokenizer_files import GENERATION_FILE, ModelTokenizer, SpecialIds, special_ids, tokenizer_files

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ModelFolder:
    """What a folder holds. Nothing in it tells when, where or from which layout it was made."""

    config: Mapping[str, Any]
    """Keys of `config.json`, but for the special ids and the type."""
    entries: Sequence[Entry]
    dtype: str
    """Key of `safetensors_files.DTYPES`."""
    card: str
    """Text of `README.md`."""
    code: Mapping[str, str]
    """Name -> text of the Python files that the model needs."""
    seq_length: int
    tokenizer: ModelTokenizer | None = None

    def with_tokenizer(self, tokenizer: ModelTokenizer | None) -> ModelFolder:
        """The same with a tokenizer, or without one."""
        return replace(self, tokenizer=tokenizer)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's `config.json`; raises CheckpointError where there is none or it cannot be read."""
    path = folder / CONFIG_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {CONFIG_FILE}. Name the folder of a model.") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). Copy the model again.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must be an object. Copy the model again.")
    return content


def check_free(out: Path) -> None:
    """Raise CheckpointError where the folder `out` exists and is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: is there already. Name a folder that does not exist, or is empty.")


def write_folder(out: Path, content: ModelFolder, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> int:
    """Write `content` to the folder `out`, which must not exist or be empty; gives the number of bytes.

    Raises CheckpointError where `out` is in use or cannot be written.
    """
    check_free(out)
    temporary = out.with_name(out.name + ".partial")
    try:
        if temporary.exists():  # of an export that was stopped
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        _write_texts(temporary, content)
        write_tensors(temporary, content.entries, dtype=DTYPES[content.dtype], max_shard_bytes=max_shard_bytes)
        _publish(temporary, out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{out} cannot be written: {error.strerror or error}. Free the disk, or name another folder."
        ) from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return sum(path.stat().st_size for path in out.iterdir())


def _write_texts(folder: Path, content: ModelFolder) -> None:
    files, ids = dict(content.code), SpecialIds()
    if content.tokenizer is not None:
        of_tokenizer = tokenizer_files(content.tokenizer, seq_length=content.seq_length)
        ids = special_ids(content.tokenizer, of_tokenizer)
        files |= of_tokenizer
    files[CONFIG_FILE] = _json({**content.config, **ids.as_config(), "dtype": content.dtype})
    files[GENERATION_FILE] = _json(ids.as_config())
    files[CARD_FILE] = content.card
    for name, text in sorted(files.items()):
        write_durably(folder / name, text)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _publish(temporary: Path, out: Path) -> None:
    sync_folder(temporary)
    if out.exists():
        out.rmdir()
    temporary.rename(out)
    sync_folder(out.parent)
