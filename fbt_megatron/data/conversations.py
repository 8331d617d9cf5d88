"""Conversations as documents: lines of JSON with `messages` -> token ids, of which those of the assistant are trained.

A document is what the chat template makes of the messages and nothing else: BOS or EOS are in it where the template
writes them. Its special tokens count as such; text of a message that spells one stays text.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from fbt_megatron.config.schema import DataConfig
from fbt_megatron.data.chat_template import (
    ASSISTANT,
    CUT,
    RESERVED,
    ChatTemplate,
    Messages,
    RenderedChat,
    load_chat_template,
)
from fbt_megatron.data.dataset import DocumentDataset
from fbt_megatron.data.document_reader import DocumentReader
from fbt_megatron.data.json_lines import find_line_shards
from fbt_megatron.data.samples import Decoded, Sample
from fbt_megatron.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from fbt_megatron.errors import DataError, DataSetupError

_LINE = "jsonl"
_SHOWN = 60
"""Characters of an answer that a message quotes."""
_ROLES = ("system", "developer", "user", ASSISTANT)

IntArray = NDArray[np.int64]

_SOME_ANSWER = "A"


class ConversationLines:
    """Reads and decodes the lines of `json_lines`."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        # Text that spells a special token is cut after its first character.
        short = sorted(token for token in tokenizer.control_tokens if len(token) < 2)
        if short:
            raise DataError(
                f"data.tokenizer: the special token {short[0]!r} has one character, which is not supported."
            )

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides which ids a conversation gets."""
        parts = [self._tokenizer.fingerprint, self._template.source, self._template.variables]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def read(self, stream: BinaryIO, location: str, entries: IntArray, *, skip: int) -> Iterator[Sample]:
        assert not skip, location  # files are opened at the line
        name = location.rpartition("/")[2]
        place = int(entries[0, 0])
        for offset, size, _, number in entries.tolist():
            stream.read(offset - place)  # blank lines
            line = stream.read(size)
            if len(line) < size:
                return
            place = offset + size
            yield Sample(f"{name}:{number}", f"{location}: line {number}", {_LINE: line})

    def decode(self, sample: Sample, entry: IntArray) -> Decoded:
        line, where = sample.members[_LINE], sample.where
        if zlib.crc32(line) != entry[2]:
            raise DataError(f"{where}: has changed since the data set was opened. Start the run again.")
        return self.encode(_parse_line(line, where), where)

    def damaged(self, location: str, reason: str) -> DataError:
        return DataError(f"{location}: has changed since the data set was opened ({reason}). Start the run again.")

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Ids of the special tokens that end an answer."""
        return frozenset(self.encode_text(token)[-1] for token in self._template.ends_of_turn())

    @property
    def template_source(self) -> str:
        """Text of the template."""
        return self._template.source

    def render_prompt(self, messages: Messages, where: str, *, begun: str = "") -> str:
        """A conversation up to the answer that comes next and begins with `begun`, for the two functions below.

        Raises:
            DataError: a message is not of the kind that is trained, or the template does not take the conversation.
        """
        parsed = [_parse_message(message, f"{where}: messages[{number}]") for number, message in enumerate(messages)]
        kept = [{name: self._as_text(text) for name, text in message.items()} for message in parsed]
        return self._template.render_prompt(kept, where) + self._as_text(begun)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a rendered text, in which special tokens count as such where there is no cut."""
        return [token for part in text.split(CUT) for token in self._tokenizer.encode_with_controls(part)[0]]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text of `render_prompt`: those that come in training before an answer that begins with a letter.

        Tokenizers may divide white space in front of a word in another way than at the end of a text. An answer that
        has begun with more than white space gets the ids that its beginning has by itself.
        """
        before, cut, last = text.rpartition(CUT)
        ids, ranges = self._tokenizer.encode_with_controls(last + _SOME_ANSWER)
        kept = next((place for place, (_, stop) in enumerate(ranges) if stop > len(last)), len(ids))
        if kept < len(ids) and last[ranges[kept][0] :].strip():
            return self.encode_text(text)
        return (self.encode_text(before) if cut else []) + ids[:kept]

    def encode(self, messages: Messages, where: str) -> Decoded:
        """Token ids of a conversation, trained where all text of a token is the assistant's.

        Raises:
            DataError: the template does not take it, or no token of it would be trained.
        """
        kept = [{name: self._as_text(text) for name, text in message.items()} for message in messages]
        chat = self._template.render(kept, where)
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        start = 0
        for part in chat.text.split(CUT):
            part_ids, part_ranges = self._tokenizer.encode_with_controls(part)
            ids += part_ids
            ranges += [(start + first, start + stop) for first, stop in part_ranges]
            start += len(part) + len(CUT)
        bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        trained = np.zeros(len(ids), dtype=np.bool_)
        for first, stop in chat.answers:
            trained |= (bounds[:, 0] >= first) & (bounds[:, 1] <= stop) & (bounds[:, 0] < bounds[:, 1])
        self._check_ends(chat, bounds[trained & np.isin(ids, list(self._tokenizer.control_ids))], where)
        if not trained.any():
            raise DataError(f"{where}: the chat template leaves no token of the assistant's. Leave it out.")
        return Decoded(np.array(ids, dtype=np.int64), trained)

    def _check_ends(self, chat: RenderedChat, controls: IntArray, where: str) -> None:
        """That each answer that ends with a special token trains it; `controls` [tokens, 2] are ranges of trained ones.

        Raises:
            DataSetupError: the tokenizer takes that text for something else.
        """
        spelled, ends = tuple(self._tokenizer.control_tokens), set(controls[:, 1].tolist())
        for first, stop in chat.answers:
            answer = chat.text[first:stop].rstrip()
            if answer.endswith(spelled) and first + len(answer) not in ends:
                raise DataSetupError(
                    f"{where}: the special token that ends the answer {_shortened(answer)!r} is text to the "
                    "tokenizer there, so a model would not learn to end its turn. Declare it in the tokenizer without "
                    "conditions such as single_word, or name another tokenizer (data.tokenizer) or template "
                    "(data.chat_template)."
                )

    def _as_text(self, text: str) -> str:
        """`text` with a cut inside everything in it that spells a special token."""
        spelled = [token for token in self._tokenizer.control_tokens if token in text]
        if not spelled:
            return text
        pattern = "|".join(f"(?={re.escape(token)})" for token in spelled)
        places = [match.start() + 1 for match in re.finditer(pattern, text)]
        return CUT.join(text[start:stop] for start, stop in zip([0, *places], [*places, len(text)], strict=True))


def open_conversations(
    data: DataConfig,
    section: Literal["train", "validation"],
    *,
    vocab_size: int,
    on_error: Literal["stop", "skip"],
    key: str | None = None,
) -> DocumentDataset:
    """Find the conversations of `data.train` or `data.validation`; reads all files once.

    `key` names the setting in messages, where it is not that of the configuration.

    Raises:
        DataError: none are there, or the tokenizer has no chat template or more ids than the model.
    """
    key = key or f"data.{section}"
    assert data.tokenizer is not None, key  # the configuration is checked before this
    tokenizer = load_tokenizer(data.tokenizer)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise DataError(
            f"data.tokenizer={data.tokenizer}: has no special tokens to divide a conversation with. Name a "
            "tokenizer.json for data.kind: chat."
        )
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer has {tokenizer.vocab_size} ids, but model.vocab_size={vocab_size}. Name the tokenizer of "
            "the model."
        )
    decoder = ConversationLines(
        tokenizer, load_chat_template(data.chat_template, spec=data.tokenizer, tokenizer=tokenizer)
    )
    shards = find_line_shards(getattr(data, section), key=key)
    if not sum(shard.num_documents for shard in shards):
        raise DataError(f"{key}={getattr(data, section)}: holds no conversations. Name files with a line for each.")
    token_bytes = np.zeros(vocab_size, dtype=np.int64)  # a model may have more ids than its tokenizer
    token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    return DocumentDataset(
        shards=tuple(shards),
        reader=DocumentReader(decoder, on_error=on_error),
        pad_id=tokenizer.eos_id,
        token_bytes=token_bytes,
        encoding=decoder.fingerprint,
    )


def _shortened(answer: str) -> str:
    """The end of an answer, for messages."""
    text = answer.replace(CUT, "")
    return text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"


def _parse_line(line: bytes, where: str) -> Messages:
    """The messages of a conversation.

    Raises:
        DataError: the line is not one, or has something else than text in it.
    """
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise DataError(f"{where}: not UTF-8 text with one JSON object ({error}). Repair or remove it.") from None
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        raise DataError(f'{where}: has no list "messages" of objects with "role" and "content".')
    if record.get("tools") is not None:
        raise DataError(f"{where}: has tools, and calls of tools are not supported. Remove it.")
    parsed = [_parse_message(message, f"{where}: messages[{number}]") for number, message in enumerate(messages)]
    if not any(message["role"] == ASSISTANT for message in parsed):
        raise DataError(f"{where}: no message has the role {ASSISTANT}, so nothing of it would be trained. Remove it.")
    return parsed


def _parse_message(message: Any, where: str) -> Mapping[str, str]:
    if not isinstance(message, dict):
        raise DataError(f'{where} is no object. Write it with "role" and "content".')
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise DataError(f"{where}: role {role!r} is not supported. Known are {', '.join(_ROLES)}.")
    if not isinstance(content, str):
        kind = "null" if content is None else type(content).__name__
        raise DataError(f"{where}: content is {kind}, and only text is supported. Write it as a string.")
    other = sorted(name for name, value in message.items() if name not in ("role", "content") and value is not None)
    if other:
        raise DataError(f"{where}: {other[0]} is not supported, only role and content are. Remove it.")
    try:
        content.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: content holds half of a surrogate pair (character {error.start}).") from None
    if not RESERVED.isdisjoint(content):
        raise DataError(f"{where}: content holds one of the characters U+FDD0 to U+FDD2, which are no text. Remove it.")
    return {"role": role, "content": content}
