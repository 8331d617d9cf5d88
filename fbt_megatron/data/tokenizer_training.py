"""Trains a byte-level BPE tokenizer: every text has ids, and every sequence of bytes can be spelled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fbt_megatron.data.hashing import hash64
from fbt_megatron.data.sources import Document, Inputs, find_inputs, plan_chunks, read_documents
from fbt_megatron.data.tokenizer import TOKENIZER_FILE
from fbt_megatron.data.tokenizer_config import TOKENIZER_CONFIG_FILE
from fbt_megatron.errors import DataError
from fbt_megatron.files import write_durably

END_OF_TEXT = "<|endoftext|>"
TRAINING_FILE = "training.json"
_CHUNK_BYTES = 1 << 26
_NUM_BYTES = 256


@dataclass(frozen=True)
class TokenizerTraining:
    """What decides the tokenizer."""

    inputs: tuple[str, ...]
    """Files, folders or `python-stdlib`."""
    vocab_size: int
    """Number of ids, the 256 bytes and the special tokens included."""
    text_key: str = "text"
    """Key of JSON lines and column of Parquet that hold the text."""
    max_bytes: int = 1 << 30
    """Larger inputs are sampled by document to about this size on disk."""
    special_tokens: tuple[str, ...] = ()
    """Beside `<|endoftext|>`, such as those of a chat template; no text gets their ids."""

    def check(self) -> None:
        """Raises DataError for settings that no text can satisfy."""
        for place, token in enumerate(self.special_tokens):
            if len(token) < 2 or token != token.strip():
                rule = "must have at least two characters, and no white space around them"
            elif token == END_OF_TEXT:
                rule = "is there already"
            elif token in self.special_tokens[:place]:
                rule = "is named twice"
            else:
                continue
            raise DataError(f"--special-tokens {token!r}: {rule}. Leave it out or write it differently.")
        specials = f"{1 + len(self.special_tokens)} special tokens" if self.special_tokens else END_OF_TEXT
        smallest = _NUM_BYTES + 1 + len(self.special_tokens)
        if self.vocab_size < smallest:
            raise DataError(
                f"--vocab-size {self.vocab_size}: must be at least {smallest}: {_NUM_BYTES} bytes and {specials}."
            )
        if self.max_bytes < 1:
            raise DataError(f"--max-bytes {self.max_bytes}: must be at least 1.")


@dataclass(frozen=True)
class TrainedTokenizer:
    """Outcome of a training."""

    file: str
    vocab_size: int
    num_documents: int
    num_bytes: int
    """Text that was learned from, in UTF-8."""
    already_complete: bool = False
    """Whether an earlier run had made it."""


@dataclass
class _Seen:
    num_documents: int = 0
    num_bytes: int = 0


def train_tokenizer(training: TokenizerTraining, out: Path, *, restart: bool = False) -> TrainedTokenizer:
    """Train a tokenizer and write `tokenizer.json` and `tokenizer_config.json` into the folder `out`.

    The same inputs give the same file. A tokenizer that an earlier run made with the same settings is kept.

    Args:
        training: what to train on.
        out: folder; is created.
        restart: replace a tokenizer that is already there.

    Raises:
        DataError: the inputs cannot be read or are too small for the vocabulary, or `out` holds another tokenizer.
    """
    training.check()
    inputs = find_inputs(training.inputs)
    identity = _identity(training, inputs)
    if (out / TOKENIZER_FILE).exists() and not restart:
        return _earlier(out, identity)
    seen = _Seen()
    definition = _learn(_texts(training, inputs, seen), training)
    outcome = TrainedTokenizer(str(out / TOKENIZER_FILE), training.vocab_size, seen.num_documents, seen.num_bytes)
    _write(out, definition, {"settings": identity, "num_documents": seen.num_documents, "num_bytes": seen.num_bytes})
    return outcome


def _learn(texts: Iterator[str], training: TokenizerTraining) -> str:
    vocab_size = training.vocab_size
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *training.special_tokens],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise DataError(
            f"--vocab-size {vocab_size}: the text gives only {tokenizer.get_vocab_size()} tokens. "
            "Give more text or a smaller vocabulary."
        )
    return str(tokenizer.to_str())


def _texts(training: TokenizerTraining, inputs: Inputs, seen: _Seen) -> Iterator[str]:
    """Yield the texts to learn from; which ones are in the sample depends on each text alone."""
    threshold = training.max_bytes / max(inputs.num_bytes, 1)
    for chunk in plan_chunks(inputs, training.text_key, _CHUNK_BYTES):
        for document in read_documents(chunk, training.text_key):
            if not isinstance(document, Document):
                raise DataError(document.message)
            text = document.text.encode()
            if threshold < 1 and hash64(text) / 2**64 >= threshold:
                continue
            seen.num_documents += 1
            seen.num_bytes += len(text)
            yield document.text


def _identity(training: TokenizerTraining, inputs: Inputs) -> dict[str, Any]:
    identity = {
        "inputs": list(training.inputs),
        "input fingerprint": inputs.fingerprint,
        "vocab_size": training.vocab_size,
        "text_key": training.text_key,
        "max_bytes": training.max_bytes,
    }
    return identity | ({"special_tokens": list(training.special_tokens)} if training.special_tokens else {})


def _earlier(out: Path, identity: dict[str, Any]) -> TrainedTokenizer:
    path = out / TRAINING_FILE
    earlier = json.loads(path.read_bytes()) if path.exists() else None
    if earlier is None or earlier["settings"] != identity:
        raise DataError(
            f"{out}: holds another tokenizer, or one trained with other settings or inputs. "
            "Choose another --out, or replace it with --restart."
        )
    return TrainedTokenizer(
        str(out / TOKENIZER_FILE), identity["vocab_size"], earlier["num_documents"], earlier["num_bytes"], True
    )


def _write(out: Path, definition: str, record: dict[str, Any]) -> None:
    """Write the folder; `tokenizer.json` is last, so that a tokenizer that is there is whole."""
    config = {
        "eos_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / TOKENIZER_FILE).unlink(missing_ok=True)
        write_durably(out / TRAINING_FILE, json.dumps(record, indent=1) + "\n")
        write_durably(out / TOKENIZER_CONFIG_FILE, json.dumps(config, indent=1) + "\n")
        write_durably(out / TOKENIZER_FILE, definition)
    except OSError as error:
        raise DataError(f"{out}: cannot write ({error}).") from error
