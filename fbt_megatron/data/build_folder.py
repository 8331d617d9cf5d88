"""The output folder of a build: one build at a time, of one set of settings, removed without touching anything else.

A build is identified by a JSON object of everything that decides its bytes. It is written at the start beside the
unfinished work and at the end beside the data; finding another one there is an error that says what differs.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fbt_megatron.data.format import DATASET_FILE, TOKEN_BYTES_FILE
from fbt_megatron.data.tokenizer import TOKENIZER_FILE, HuggingFaceTokenizer, Tokenizer, load_tokenizer
from fbt_megatron.data.tokenizer_config import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    named_tokens,
    read_json,
    tokenizer_folder,
)
from fbt_megatron.errors import DataError
from fbt_megatron.files import write_durably

TRAIN = "train"
VALIDATION = "validation"
TOKENIZER_FOLDER = "tokenizer"
BUILD_FILE = "build.json"

_WORK_FOLDER = ".build"
_LOCK_FILE = ".lock"
_MANIFEST_FILE = "manifest.json"

Identity = dict[str, Any]


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create `out` and hold a lock on it, which ends with the process however that ends.

    Raises:
        DataError: another process holds it.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{out}: another build is writing here. Wait for it or choose another --out.") from None
        yield


def work_folder(out: Path) -> Path:
    """Return where unfinished work lies."""
    return out / _WORK_FOLDER


def open_work_folder(out: Path, identity: Identity) -> None:
    """Make the work folder, or check that the one that is there belongs to the same build.

    Raises:
        DataError: it belongs to another build, or the data folders hold something that no build left there.
    """
    manifest = work_folder(out) / _MANIFEST_FILE
    if manifest.exists():
        _check_identity(out, identity, json.loads(manifest.read_bytes()))
        return
    for name in (TRAIN, VALIDATION):
        if (out / name).exists() and any((out / name).iterdir()):
            raise DataError(f"{out / name}: is not empty, and not from an unfinished build. Choose another --out.")
    work_folder(out).mkdir(exist_ok=True)
    write_durably(manifest, json.dumps(identity))


def close_work_folder(out: Path, identity: Identity, summary: dict[str, Any]) -> None:
    """Declare the build complete and remove its unfinished work."""
    finished = {"settings": identity, "summary": summary}
    write_durably(out / BUILD_FILE, json.dumps(finished, indent=1) + "\n")
    shutil.rmtree(work_folder(out))


def finished_summary(out: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the summary of a complete build, or `None` where there is none.

    Raises:
        DataError: the complete build is another one, or its data is gone.
    """
    path = out / BUILD_FILE
    if not path.exists():
        return None
    finished = json.loads(path.read_bytes())
    _check_identity(out, identity, finished["settings"])
    summary: dict[str, Any] = finished["summary"]
    for name in (TRAIN, VALIDATION):
        if summary[name] is not None and not (out / name / DATASET_FILE).exists():
            raise DataError(f"{out / name}: was built, but {DATASET_FILE} is gone. Build it again with --restart.")
    return summary


def remove_build(out: Path) -> None:
    """Remove what a build wrote, and nothing else; a folder without signs of a build is left as it is."""
    if not (out / BUILD_FILE).exists() and not (work_folder(out) / _MANIFEST_FILE).exists():
        return
    for name in (TRAIN, VALIDATION):
        for pattern in (DATASET_FILE, TOKEN_BYTES_FILE, "shard-*.tar", "shard-*.index", "*.tmp"):
            for path in (out / name).glob(pattern):
                path.unlink()
    (out / BUILD_FILE).unlink(missing_ok=True)
    shutil.rmtree(work_folder(out), ignore_errors=True)


def copy_tokenizer(tokenizer: Tokenizer, spec: str, out: Path) -> None:
    """Put the tokenizer that `spec` names beside the data, in a form that loads with the same BOS and EOS.

    The chat template comes with it, and the names of the other special tokens, which a template may use.

    Raises:
        DataError: another tokenizer is there.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return
    folder = out / TOKENIZER_FOLDER
    if (folder / TOKENIZER_FILE).exists():
        if load_tokenizer(str(folder)).fingerprint != tokenizer.fingerprint:
            raise DataError(f"{folder}: holds another tokenizer. Choose another --out, or move it away.")
        return
    source = tokenizer_folder(spec)
    config: dict[str, Any] = named_tokens(source) | tokenizer.special_tokens
    template = read_json(source, TOKENIZER_CONFIG_FILE).get("chat_template")
    if template is not None:
        config["chat_template"] = template
    folder.mkdir(exist_ok=True)
    if (source / CHAT_TEMPLATE_FILE).is_file():
        write_durably(folder / CHAT_TEMPLATE_FILE, (source / CHAT_TEMPLATE_FILE).read_bytes())
    write_durably(folder / TOKENIZER_CONFIG_FILE, json.dumps(config, indent=1) + "\n")
    write_durably(folder / TOKENIZER_FILE, tokenizer.definition)


def _check_identity(out: Path, current: Identity, earlier: Identity) -> None:
    changed = [key for key in current if current[key] != earlier.get(key)]
    if changed:
        listed = "; ".join(f"{key}: {earlier.get(key)} -> {current[key]}" for key in changed)
        raise DataError(
            f"{out}: holds a build with other settings or inputs ({listed}). "
            "Choose another --out, or start again with --restart."
        )
