"""Tokenizers with chat templates, and files of conversations, for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, processors

from tests.data.bpe import byte_level_bpe

CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHIPPED = (Path(__file__).parents[2] / "configs" / "chat_templates" / "chatml.jinja").read_text()
# As of Llama 3: BOS, content without surrounding white space, alternating roles.
HEADER_TOKENS = ("<|begin|>", "<|eot|>", "<|head|>", "<|/head|>")
HEADERS = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'user' %}
        {{- raise_exception('two questions in a row') }}
    {%- endif %}
    {{- '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|/head|>\\n\\n' }}
{%- endif %}
"""
# The part of Qwen3's for text: what follows the last question begins with what was thought, and nothing else does.
QWEN3 = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(open=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" %}
        {%- set ns.open = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TEXT = "What is two plus two? Four.\n\n\nAnd the capital of France?\n\n\nParis. naïve → 日本語 🙂\n\n\n"


def chat(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turns."""
    start = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*start, *({"role": roles[n % 2], "content": text} for n, text in enumerate(texts))]


def bpe(specials: Sequence[str | AddedToken], *, vocab_size: int = 300) -> Tokenizer:
    """A byte-level tokenizer with these special tokens, whose post-processor would add the first one in front."""
    tokenizer = byte_level_bpe(specials, TEXT, vocab_size=vocab_size)
    first = str(specials[0])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)]),
        ]
    )
    return tokenizer


def masked_tokens(messages: list[dict[str, str]], tokenizer: Tokenizer | None = None) -> list[tuple[int, bool]]:
    """Tokens of a conversation in ChatML, and whether all bytes of each belong to an answer with its end of turn."""
    tokenizer = tokenizer or bpe(CHATML_TOKENS)
    text, answer_bytes = b"", set[int]()
    for message in messages:
        text += f"<|im_start|>{message['role']}\n".encode()
        end = text + f"{message['content']}<|im_end|>".encode()
        if message["role"] == "assistant":
            answer_bytes |= set(range(len(text), len(end)))
        text = end + b"\n"
    tokens, place = [], 0
    for token in tokenizer.encode(text.decode(), add_special_tokens=False).ids:
        stop = place + len(tokenizer.id_to_token(token))  # byte-level tokens have a character for each byte
        tokens.append((token, answer_bytes.issuperset(range(place, stop))))
        place = stop
    assert place == len(text)
    return tokens


def write_tokenizer(folder: Path, tokenizer: Tokenizer, template: Any = None, **config: Any) -> str:
    """The folder of a tokenizer with a template and its special tokens; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = dict(config) if template is None else {"chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return str(folder)


def write_chatml(folder: Path, template: Any = CHATML) -> str:
    """A ChatML tokenizer, whose end of a turn is its EOS."""
    return write_tokenizer(folder, bpe(CHATML_TOKENS), template, eos_token="<|im_end|>")


def write_lines(path: Path, conversations: Sequence[Any]) -> Path:
    """A `.jsonl` file; what is text already is written as it is."""
    lines = [
        line if isinstance(line, str) else json.dumps({"messages": line}, ensure_ascii=False) for line in conversations
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
