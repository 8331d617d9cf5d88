"""Text to token ids and back: raw bytes, or a Hugging Face `tokenizer.json`.

`encode` gives the ids of the text alone. BOS and EOS are added in one place, `encode_document`, so that it does not
matter what a tokenizer's own post-processor would add, and text that spells a special token stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from fbt_megatron.data.tokenizer_config import named_tokens
from fbt_megatron.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
COMMON_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What the rest of the project asks of a tokenizer."""

    @property
    def kind(self) -> Literal["bytes", "huggingface"]:
        """Which class made the ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids: the largest plus one."""

    @property
    def bos_id(self) -> int | None:
        """Id that may start a document."""

    @property
    def eos_id(self) -> int:
        """Id that ends a document."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides which ids a text gets."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without BOS and EOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, leaving special tokens out."""

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        """Return the bytes of UTF-8 text that each id stands for, [vocab_size]; 0 for special tokens."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes of UTF-8, 256 ends a document."""

    kind: Literal["bytes", "huggingface"] = "bytes"
    vocab_size = 257
    bos_id: int | None = None
    eos_id = 256
    fingerprint = hashlib.sha256(b"raw bytes, 256 ends a document").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        return np.array([1] * 256 + [0], dtype=np.uint16)


class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library."""

    kind: Literal["bytes", "huggingface"] = "huggingface"

    def __init__(self, definition: str, where: str, eos_token: str | None, bos_token: str | None = None) -> None:
        """Build the tokenizer.

        Args:
            definition: text of `tokenizer.json`.
            where: names the tokenizer in messages.
            eos_token: token that ends a document; `None` takes a common name if the vocabulary has exactly one.
            bos_token: token that starts a document, if there is one.

        Raises:
            DataError: not a tokenizer, no EOS can be determined, or BOS or EOS is not in the vocabulary.
        """
        self.definition = definition
        self._where = where
        parsed = _parse_definition(definition, where)
        self._ids = _vocabulary(parsed, where)
        self._eos_token = _only_common_eos(self._ids, where) if eos_token is None else eos_token
        self._bos_token = bos_token
        self._reserved = {
            token: _id_of(token, name, self._ids, where)
            for name, token in (("--eos-token", self._eos_token), ("--bos-token", bos_token))
            if token is not None
        }
        self.eos_id = self._reserved[self._eos_token]
        self.bos_id = None if bos_token is None else self._reserved[bos_token]
        self.vocab_size = max(self._ids.values()) + 1
        self.fingerprint = _fingerprint(parsed, self.bos_id, self.eos_id)
        self._parsed = parsed
        self._tokenizer = _load_definition(_as_plain_encoder(parsed, set(self._reserved)), where)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names of EOS and BOS as `tokenizer_config.json` states them."""
        names = {"eos_token": self._eos_token, "bos_token": self._bos_token}
        return {key: token for key, token in names.items() if token is not None}

    def encode(self, text: str) -> list[int]:
        ids = self._encode_text(text)
        reserved = set(self._reserved.values())
        if reserved.isdisjoint(ids):
            return ids
        # Models that look whole words up in the vocabulary find a spelled-out special token there: cut it in two.
        ids = [token for part in _cut_inside(text, self._reserved) for token in self._encode_text(part)]
        if reserved.isdisjoint(ids):
            return ids
        raise DataError(
            f"{self._where}: gives ordinary text the id of BOS or EOS ({sorted(self._reserved)}), so documents would "
            "end inside their text. Name other tokens with --eos-token and --bos-token, or use another tokenizer."
        )

    def _encode_text(self, text: str) -> list[int]:
        # The batch call without offsets is the fastest one, for one text as well.
        encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
        return list(encoding.ids)

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the special tokens: BOS, EOS, and what the tokenizer's definition calls special."""
        added = self._parsed.get("added_tokens") or []
        return frozenset(self._reserved) | {entry["content"] for entry in added if entry["special"]}

    def encode_with_controls(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text in which special tokens count as such, and each id's range (start, stop) of its characters.

        The range of a special token is its own text, also where the token takes white space beside it with it.
        """
        encoding = self._control_encoder.encode(text, add_special_tokens=False)
        ids, ranges = list(encoding.ids), list(encoding.offsets)
        controls = self.control_ids
        for place, token in enumerate(ids):
            if token in controls:
                own = text.find(controls[token], *ranges[place])
                if own >= 0:
                    ranges[place] = (own, own + len(controls[token]))
        return ids, ranges

    @cached_property
    def control_ids(self) -> Mapping[int, str]:
        """Ids of the special tokens and their texts."""
        return {self._ids[token]: token for token in self.control_tokens}

    @cached_property
    def _control_encoder(self) -> tokenizers.Tokenizer:
        # A post-processor would not add anything, but take white space out of the ranges.
        plain = _as_plain_encoder(self._parsed, set(self._reserved)) | {"post_processor": None}
        tokenizer = _load_definition(plain, self._where)
        tokenizer.encode_special_tokens = False
        added = {entry["content"] for entry in plain["added_tokens"]}
        tokenizer.add_special_tokens(sorted(set(self._reserved) - added))
        return tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self) -> npt.NDArray[np.uint16]:
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        added = {entry["content"]: bool(entry["special"]) for entry in self._parsed.get("added_tokens") or []}
        style = _token_style(self._parsed)
        for token, token_id in self._ids.items():
            if token in self._reserved or added.get(token, False):
                continue
            sizes[token_id] = len(token.encode()) if token in added else _text_bytes(token, style)
        if sizes.max() > np.iinfo(np.uint16).max:
            raise DataError(f"{self._where}: a token stands for more than 65535 bytes of text, which is not supported.")
        return sizes.astype(np.uint16)


def load_tokenizer(spec: str, *, eos_token: str | None = None, bos_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.

    Args:
        spec: `bytes`, a `tokenizer.json`, or a folder that holds one. `tokenizer_config.json` and
            `special_tokens_map.json` beside it are read for the names of BOS and EOS.
        eos_token: token that ends a document, in place of the one found.
        bos_token: token that starts a document, in place of the one found.

    Raises:
        DataError: missing or unreadable, EOS cannot be determined, BOS or EOS is not in the vocabulary, or `bytes`
            with a token named.
    """
    if spec == "bytes":
        for option, token in (("--eos-token", eos_token), ("--bos-token", bos_token)):
            if token is not None:
                raise DataError(f"{option} {token}: tokenizer bytes has tokens of its own. Leave {option} out.")
        return ByteTokenizer()
    path = Path(spec)
    if path.is_dir():
        path = path / TOKENIZER_FILE
    if not path.is_file():
        raise DataError(f"tokenizer={spec}: not found. Give bytes, a {TOKENIZER_FILE} or a folder with one.")
    configured = named_tokens(path.parent)
    return HuggingFaceTokenizer(
        _read_text(path),
        str(path),
        configured.get("eos_token") if eos_token is None else eos_token,
        configured.get("bos_token") if bos_token is None else bos_token,
    )


def starts_with_bos(tokenizer: Tokenizer, add_bos: bool | None) -> bool:
    """Decide whether documents start with BOS.

    `None` means: where the tokenizer names a BOS that is not also its EOS, because one token in both places
    would stand twice between two documents.

    Raises:
        DataError: BOS is asked for and the tokenizer has none.
    """
    if add_bos is None:
        return tokenizer.bos_id is not None and tokenizer.bos_id != tokenizer.eos_id
    if add_bos and tokenizer.bos_id is None:
        raise DataError("--bos: the tokenizer names no BOS token. Name one with --bos-token or leave --bos out.")
    return add_bos


def encode_document(tokenizer: Tokenizer, text: str, *, add_bos: bool) -> list[int]:
    """Return a document ready to train on: BOS if asked for, its text, EOS; nothing for a document without text.

    `add_bos` is what `starts_with_bos` decided for the data set.
    """
    if not text.strip():
        return []
    ids = tokenizer.encode(text)
    if not ids:
        return []
    start = [tokenizer.bos_id] if add_bos and tokenizer.bos_id is not None else []
    return [*start, *ids, tokenizer.eos_id]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}).") from error


def _parse_definition(definition: str, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(definition)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}). Give a Hugging Face {TOKENIZER_FILE}.") from error
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model"), dict):
        raise DataError(f"{where}: has no model section. Give a Hugging Face {TOKENIZER_FILE}.")
    return parsed


def _load_definition(parsed: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    except Exception as error:  # The library raises this very class.
        raise DataError(f"{where}: not a tokenizer of the tokenizers library ({error}).") from error
    tokenizer.encode_special_tokens = True  # Their names in a text are text.
    return tokenizer


def _vocabulary(parsed: Mapping[str, Any], where: str) -> dict[str, int]:
    """Return token -> id, added tokens included."""
    vocabulary = parsed["model"].get("vocab")
    if isinstance(vocabulary, list):  # Unigram: [[piece, score], ...]
        ids = {entry[0]: token_id for token_id, entry in enumerate(vocabulary)}
    else:
        ids = dict(vocabulary or {})
    ids.update({entry["content"]: entry["id"] for entry in parsed.get("added_tokens") or []})
    if not ids:
        raise DataError(f"{where}: the vocabulary is empty. Give the {TOKENIZER_FILE} of a trained tokenizer.")
    return ids


def _only_common_eos(ids: Mapping[str, int], where: str) -> str:
    found = [token for token in COMMON_EOS_TOKENS if token in ids]
    if len(found) == 1:
        return found[0]
    seen = f"it has several of the usual ones: {', '.join(found)}" if found else "it has none of the usual ones"
    raise DataError(f"{where}: names no EOS token ({seen}). Name the token that ends a document with --eos-token.")


def _id_of(token: str, option: str, ids: Mapping[str, int], where: str) -> int:
    if token not in ids:
        raise DataError(f"{where}: {token!r} is not in the vocabulary. Name a token that is with {option}.")
    return ids[token]


def _fingerprint(parsed: Mapping[str, Any], bos_id: int | None, eos_id: int) -> str:
    described = {"tokenizer": parsed, "bos_id": bos_id, "eos_id": eos_id}
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _as_plain_encoder(parsed: Mapping[str, Any], reserved: set[str]) -> dict[str, Any]:
    """Return a definition that neither cuts, pads nor varies a text, and knows the reserved tokens as special."""
    plain = {**parsed, "truncation": None, "padding": None}
    plain["model"] = {**parsed["model"], **({"dropout": None} if "dropout" in parsed["model"] else {})}
    plain["added_tokens"] = [
        {**entry, "special": bool(entry["special"]) or entry["content"] in reserved}
        for entry in parsed.get("added_tokens") or []
    ]
    return plain


def _cut_inside(text: str, tokens: Mapping[str, int]) -> Iterator[str]:
    """Yield `text` in parts, divided after the first character of every occurrence of one of `tokens`."""
    start = 0
    for match in re.finditer("|".join(re.escape(token) for token in tokens), text):
        yield text[start : match.start() + 1]
        start = match.start() + 1
    yield text[start:]


def _token_style(parsed: Mapping[str, Any]) -> Literal["byte_level", "word_piece", "plain"]:
    """Tell how tokens spell text: a character per byte, `##` for continuations, or text with markers."""
    if '"ByteLevel"' in json.dumps([parsed.get("decoder"), parsed.get("pre_tokenizer")]):
        return "byte_level"
    return "word_piece" if parsed["model"].get("type") == "WordPiece" else "plain"


def _text_bytes(token: str, style: Literal["byte_level", "word_piece", "plain"]) -> int:
    """Return the bytes of text that an ordinary token stands for."""
    if style == "byte_level":
        return len(token)
    if style == "word_piece":
        return len(token.removeprefix("##").encode())
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return 1
    return len(token.replace("\u2581", " ").encode())
