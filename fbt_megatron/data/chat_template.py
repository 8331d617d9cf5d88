"""The chat template of a tokenizer: messages -> text, and which of it the assistant writes.

Templates are rendered as `transformers` renders them (sandboxed Jinja, the same helpers and variables), but for the
time of day, which would make the ids of a conversation change from one day to the next.

What the assistant writes is found exactly or not at all. A template that marks it with `{% generation %}` says so
itself. Of any other one, the text of the conversation up to an answer, with what invites the answer, must begin the
text of the conversation with it, and that again the whole text; what is between the two is the answer. An earlier
answer of which this is not true is not trained, and if it is the last one the template is refused.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from fbt_megatron.data.tokenizer import HuggingFaceTokenizer
from fbt_megatron.data.tokenizer_config import (
    CHAT_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    named_tokens,
    read_json,
    tokenizer_folder,
)
from fbt_megatron.errors import DataError, DataSetupError

logger = logging.getLogger(__name__)

CUT = "\ufdd0"
"""Put into a message where its text must not become one token with what comes before."""
_START, _STOP = "\ufdd1", "\ufdd2"
RESERVED = frozenset((CUT, _START, _STOP))
"""Characters that no message may hold: Unicode keeps them for the own use of programs."""

ASSISTANT = "assistant"
Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    """With the `CUT` characters of its messages."""
    answers: tuple[tuple[int, int], ...]
    """Ranges (start, stop) of characters of `text` that the assistant writes, its end-of-turn token included."""


_TURN = ({"role": "user", "content": "1 + 1?"}, {"role": ASSISTANT, "content": "2"})
_PROBES: Sequence[Messages] = (_TURN, ({"role": "system", "content": "Be brief."}, *_TURN))


class ChatTemplate:
    """A template and the variables that it is rendered with."""

    def __init__(
        self, source: str, where: str, *, variables: Mapping[str, str], control_tokens: frozenset[str]
    ) -> None:
        """Compile a template.

        Args:
            source: its text, in Jinja.
            where: names it in messages.
            variables: names and texts of special tokens, such as `bos_token`.
            control_tokens: texts that are special tokens of the tokenizer.

        Raises:
            DataError: it is no Jinja template.
        """
        self.source = source
        self.variables = dict(variables)
        self._where = where
        self._control_tokens = control_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise DataError(f"{where}: not a chat template that can be read ({error}).") from error
        self._has_said_untrained = False
        self._is_marked = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(self, messages: Messages, where: str) -> RenderedChat:
        """The text of a conversation.

        Args:
            messages: `role` and `content` of each.
            where: names the conversation in messages.

        Raises:
            DataError: the template refuses this conversation. DataSetupError where it fails, or does not say which text
                is the assistant's, or what ends it.
        """
        whole = self._render(messages, where)
        chat = _take_marks(whole) if self._is_marked else self._find_answers(messages, whole, where)
        start, stop = chat.answers[-1] if chat.answers else (0, 0)
        if start < stop and not chat.text[:stop].rstrip().endswith(tuple(self._control_tokens)):
            raise DataSetupError(
                f"{where}: {self._where} ends the last answer with no special token, so a model would not learn to end "
                "its turn. Use a template that does (data.chat_template), inside of {% generation %} if it has that."
            )
        return chat

    def render_prompt(self, messages: Messages, where: str) -> str:
        """The text of a conversation up to the answer that comes next, what invites the answer included.

        Raises:
            DataError: the template does not take this conversation.
        """
        return _take_marks(self._render(messages, where, invites_answer=True)).text

    def ends_of_turn(self) -> frozenset[str]:
        """The special tokens that end answers, found in conversations that most templates take; none if it takes none.

        A template with marks may end the last answer of a conversation in another way than the ones before it.
        """
        found: set[str] = set()
        for messages in (*_PROBES, _TURN * 2) if self._is_marked else _PROBES:
            try:
                chat = self.render(messages, "a conversation to find the end of a turn")
            except DataError:
                continue
            for start, stop in chat.answers:
                answer = chat.text[start:stop].rstrip()
                ends = [token for token in self._control_tokens if answer.endswith(token)]
                found.update(sorted(ends, key=len)[-1:])
        return frozenset(found)

    def _find_answers(self, messages: Messages, whole: str, where: str) -> RenderedChat:
        """The answers in the text of a conversation, by rendering what is before and up to each.

        Of those before the last one, such that are written in another way when others follow are left out: in the text
        they are not what a model is to write. The last one must be found.
        """
        numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        found = [self._find_answer(messages, number, whole, where) for number in numbers]
        if found and found[-1] is None:
            raise DataSetupError(
                f"{where}: the text of messages[{numbers[-1]}] cannot be told from the rest, because {self._where} "
                "writes the messages before it in another way when it is there, or it in another way when others "
                "follow. Use a template that marks what the assistant writes with {% generation %} and "
                "{% endgeneration %} (data.chat_template)."
            )
        answers = tuple(answer for answer in found if answer is not None)
        if len(answers) < len(found):
            self._say_untrained(len(found) - len(answers), where)
        return RenderedChat(whole, answers)

    def _find_answer(self, messages: Messages, number: int, whole: str, where: str) -> tuple[int, int] | None:
        """Where in `whole` the answer `messages[number]` is; `None` where its text is another when others follow."""
        before = self._render(messages[:number], where, invites_answer=True)
        after = self._render(messages[: number + 1], where)
        if not (after.startswith(before) and whole.startswith(after)):
            return None
        return len(before), self._end_of_turn(after, len(before))

    def _say_untrained(self, count: int, where: str) -> None:
        """Say once that earlier answers are not trained."""
        if not self._has_said_untrained:
            self._has_said_untrained = True
            logger.warning(
                "%s: %s not trained, because %s writes an answer in another way when others follow. The same goes for "
                "all such conversations, and is not said again. To train all answers name a template with "
                "{%% generation %%} blocks in data.chat_template, such as configs/chat_templates/chatml.jinja.",
                where,
                "1 answer is" if count == 1 else f"{count} answers are",
                self._where,
            )

    def _render(self, messages: Messages, where: str, *, invites_answer: bool = False) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=invites_answer,
                **self.variables,
            )
        except Exception as error:  # A template may do what Python may, and fail as it does.
            # Most templates ask for the first message, and what is before one is no fault of theirs.
            if isinstance(error, _RefusedByTemplate) or not messages:
                raise DataError(
                    f"{where}: {self._where} does not take this conversation ({error}). Change the conversation, leave "
                    "it out, or use another template (data.chat_template)."
                ) from error
            raise DataSetupError(
                f"{where}: {self._where} fails ({error}). Use another template (data.chat_template); one that is not "
                "made for a conversation says so with raise_exception."
            ) from error

    def _end_of_turn(self, text: str, start: int) -> int:
        """Where an answer from `start` to the end of `text` ends.

        White space after its last special token is not the assistant's, who has ended the turn.
        """
        ends = [found + len(token) for token in self._control_tokens if (found := text.rfind(token, start)) >= 0]
        end = max(ends, default=len(text))
        return len(text) if text[end:].strip() else end


def load_chat_template(file: str | None, *, spec: str, tokenizer: HuggingFaceTokenizer) -> ChatTemplate:
    """Load the template of a tokenizer, or another one in its place.

    Args:
        file: value of `data.chat_template`.
        spec: value of `data.tokenizer`, for the files beside `tokenizer.json`.
        tokenizer: what was loaded from there.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    folder = tokenizer_folder(spec)
    source, where = _find_source(file, folder)
    variables = named_tokens(folder) | tokenizer.special_tokens
    return ChatTemplate(source, where, variables=variables, control_tokens=tokenizer.control_tokens)


def _find_source(file: str | None, folder: Path) -> tuple[str, str]:
    """Text of the template, and what names it in messages."""
    path = folder / CHAT_TEMPLATE_FILE if file is None else Path(file)
    if file is not None or path.is_file():
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read ({error}). Name a template in data.chat_template.") from None
    where = f"the chat_template of {folder / TOKENIZER_CONFIG_FILE}"
    template = read_json(folder, TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(template, list):  # several with names
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    if not isinstance(template, str):
        raise DataError(
            f"data.tokenizer={folder}: has no chat template, neither {CHAT_TEMPLATE_FILE} nor chat_template in "
            f"{TOKENIZER_CONFIG_FILE}. Name a file with one in data.chat_template."
        )
    return template, where


def _take_marks(marked: str) -> RenderedChat:
    """Text and answers of a rendering with `_START` and `_STOP` in it."""
    text, answers, start, length = [], [], 0, 0
    for part in re.split(f"([{_START}{_STOP}])", marked):
        if part == _START:
            start = length
        elif part == _STOP:
            answers.append((start, length))
        else:
            text.append(part)
            length += len(part)
    return RenderedChat("".join(text), tuple(answers))


class _RefusedByTemplate(jinja2.TemplateError):
    """A template calls `raise_exception`, as it does with conversations that it is not made for."""


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}`: puts marks around what is in it."""

    tags = {"generation"}  # noqa: RUF012 (so it is in its base class)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return f"{_START}{caller()}{_STOP}"


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _RefusedByTemplate(message)
