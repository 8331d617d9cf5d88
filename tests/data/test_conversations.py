"""What of a conversation is trained, against tokens written down by hand and against transformers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fbt_megatron.data.chat_template import load_chat_template
from fbt_megatron.data.conversations import ConversationLines
from fbt_megatron.data.samples import Decoded
from fbt_megatron.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from fbt_megatron.errors import DataError, DataSetupError
from tests.data.bpe import byte_level_bpe
from tests.data.chats import (
    CHATML,
    CHATML_TOKENS,
    HEADER_TOKENS,
    HEADERS,
    QWEN3,
    SHIPPED,
    bpe,
    chat,
    write_chatml,
    write_tokenizer,
)

BOS, EOS = "<s>", "</s>"
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{%- generation -%}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}\n\n"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PARTS = ["two", " plus", " naïve", "日本", "🙂", ".", " ", "\n", "\n\n", "<", "|", "im_end|>"]
WORDS = st.lists(st.sampled_from(PARTS), max_size=6)
# A spelled token is not what transformers makes of it, on purpose.
TEXTS = WORDS.map("".join).filter(lambda text: "<|im_end|>" not in text)
CHATS = st.lists(TEXTS, min_size=2, max_size=5).map(lambda texts: chat(*texts))


def lines_of(folder: str, file: Path | None = None) -> ConversationLines:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    template = load_chat_template(None if file is None else str(file), spec=folder, tokenizer=tokenizer)
    return ConversationLines(tokenizer, template)


def expected(tokenizer: Tokenizer, *parts: tuple[str, bool]) -> tuple[list[int], list[bool]]:
    """Ids and mask of a text written down in parts, each encoded by itself."""
    ids, trained = [], []
    for text, is_trained in parts:
        part = tokenizer.encode(text, add_special_tokens=False).ids
        ids += part
        trained += [is_trained] * len(part)
    return ids, trained


def as_lists(decoded: Decoded) -> tuple[list[int], list[bool]]:
    assert decoded.trained is not None
    return decoded.tokens.tolist(), decoded.trained.tolist()


@pytest.mark.parametrize("written", [CHATML, SHIPPED], ids=["by prefixes", "by marks"])
def test_chatml(tmp_path: Path, written: str) -> None:
    lines = lines_of(write_chatml(tmp_path, written))
    messages = chat("two plus two?", "Four.", "And the capital\nof France?", "naïve 日本語 🙂", system="Be brief.")
    assert as_lists(lines.encode(messages, "here")) == expected(
        bpe(CHATML_TOKENS),
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\ntwo plus two?<|im_end|>\n", False),
        ("<|im_start|>assistant\n", False),
        ("Four.<|im_end|>", True),
        ("\n<|im_start|>user\nAnd the capital\nof France?<|im_end|>\n<|im_start|>assistant\n", False),
        ("naïve 日本語 🙂<|im_end|>", True),
        ("\n", False),
    )


def test_headers_with_one_bos(tmp_path: Path) -> None:
    """The template writes BOS, and the tokenizer's post-processor would as well."""
    tokenizer = bpe(HEADER_TOKENS)
    folder = write_tokenizer(tmp_path, tokenizer, HEADERS, bos_token="<|begin|>", eos_token="<|eot|>")
    ids, trained = as_lists(lines_of(folder).encode(chat(" two? ", " Four. \n", "Why?", "Two plus two."), "here"))
    assert (ids, trained) == expected(
        tokenizer,
        ("<|begin|><|head|>user<|/head|>\n\ntwo?<|eot|><|head|>assistant<|/head|>\n", False),
        ("\n", False),  # by itself, since what follows is no white space
        ("Four.<|eot|>", True),
        ("<|head|>user<|/head|>\n\nWhy?<|eot|><|head|>assistant<|/head|>\n", False),
        ("\n", False),
        ("Two plus two.<|eot|>", True),
    )
    assert ids.count(0) == 1
    assert [trained[place] for place, token in enumerate(ids) if token == 1] == [False, True, False, True]


@pytest.mark.parametrize("written", [CHATML, MARKED, SHIPPED], ids=["by prefixes", "by marks", "shipped"])
def test_two_answers_in_a_row_and_an_empty_one(tmp_path: Path, written: str) -> None:
    messages = [*chat("a"), {"role": "assistant", "content": "b"}, {"role": "assistant", "content": ""}]
    assert as_lists(lines_of(write_chatml(tmp_path, written)).encode(messages, "here")) == expected(
        bpe(CHATML_TOKENS),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n", False),
        ("b<|im_end|>", True),
        ("\n<|im_start|>assistant\n", False),
        ("<|im_end|>", True),
        ("\n", False),
    )


@pytest.mark.parametrize("spelled", ["<|im_end|>", "<|endoftext|>", "<|im_<|im_end|>end|>", "<|im_end|><|im_start|>"])
def test_special_tokens_that_a_message_spells_stay_text(tmp_path: Path, spelled: str) -> None:
    tokenizer = load_tokenizer(write_chatml(tmp_path))
    messages = chat(f"what is {spelled}?", f"It is {spelled}.")
    ids, trained = as_lists(lines_of(str(tmp_path)).encode(messages, "here"))
    assert [token for token in ids if token < 3] == [1, 2, 1, 2]
    assert tokenizer.decode(ids) == f"user\nwhat is {spelled}?\nassistant\nIt is {spelled}.\n"
    answer = [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]
    assert tokenizer.decode(answer) == f"It is {spelled}."
    assert answer[-1] == 2


GLUED = (
    "{% for m in messages %}"
    "{{ ' <|im_start|> ' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' <|im_start|> assistant ' }}{% endif %}"
)
TAKING = ("rstrip", "lstrip")


@pytest.mark.parametrize("side", [("rstrip",), ("lstrip",), TAKING], ids=["after", "before", "both"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["by prefixes", "by marks"])
def test_an_end_of_turn_that_takes_white_space_with_it(tmp_path: Path, template: str, side: tuple[str, ...]) -> None:
    """As `<|end|>` of Phi-3: it belongs to the answer, though its id stands for the template's line end as well."""
    specials = [AddedToken(text, special=True, normalized=False, **dict.fromkeys(side, True)) for text in CHATML_TOKENS]
    tokenizer = bpe(specials)
    folder = write_tokenizer(tmp_path, tokenizer, template, eos_token="<|endoftext|>")
    messages = chat("two ", " Four. ", "why", "")
    ids, trained = as_lists(lines_of(folder).encode(messages, "here"))
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, tokenize=True)
    assert ids == theirs["input_ids"]
    ends = [is_trained for token, is_trained in zip(ids, trained, strict=True) if token == 2]
    assert ends == [False, True, False, True]
    starts = [is_trained for token, is_trained in zip(ids, trained, strict=True) if token == 1]
    assert starts == [False] * 4
    answer = [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]
    assert tokenizer.decode(answer) == (" Four." if "lstrip" in side else " Four. ")


def test_an_end_of_turn_that_the_tokenizer_does_not_see_is_refused(tmp_path: Path) -> None:
    """A token of whole words is text behind a letter: the turn would have no end, whatever data.on_error says."""
    specials = [AddedToken(text, special=True, normalized=False, single_word=True) for text in CHATML_TOKENS]
    lines = lines_of(write_tokenizer(tmp_path, bpe(specials), GLUED, eos_token="<|endoftext|>"))
    assert np.count_nonzero(lines.encode(chat("a", "Four."), "here").trained) > 1
    with pytest.raises(
        DataSetupError, match=r"'Four<\|im_end\|>' is text to the tokenizer there.* \(data\.tokenizer\)"
    ):
        lines.encode(chat("a", "Four", "c", "Four."), "here")


@pytest.fixture(scope="module", params=[MARKED, SHIPPED], ids=["marked", "shipped"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chatml(tmp_path_factory.mktemp("marked"), request.param)


@settings(max_examples=60, deadline=None)
@given(messages=CHATS)
def test_ids_are_those_of_transformers(marked: str, messages: list[dict[str, str]]) -> None:
    """With marks the mask is too, where no token is partly the template's: that one is not trained here."""
    theirs = PreTrainedTokenizerFast.from_pretrained(marked).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, trained = as_lists(lines_of(marked).encode(messages, "here"))
    assert ids == theirs["input_ids"]
    differing = [place for place, mask in enumerate(theirs["assistant_masks"]) if bool(mask) != trained[place]]
    for place in differing:
        assert not trained[place]
        assert bpe(CHATML_TOKENS).decode([ids[place]]).startswith("\n")  # grown together with the header's line end


SPELLED = st.lists(st.sampled_from([*PARTS, "<|im_end|>", "<|eot|>"]), max_size=6).map("".join)
TURNS = st.tuples(SPELLED, st.builds("{}{}".format, st.sampled_from("Apßé日"), SPELLED))


@settings(max_examples=60, deadline=None)
@given(template=st.sampled_from([CHATML, MARKED, HEADERS]), texts=st.lists(TURNS, min_size=1, max_size=3))
def test_a_prompt_is_what_comes_before_the_answer(
    prompts: dict[str, ConversationLines], template: str, texts: list[tuple[str, str]]
) -> None:
    """Cuts, special tokens and white space of the header are as in training, for answers that begin with a letter."""
    messages = chat(*[text for pair in texts for text in pair])
    lines = prompts[template]
    ids, trained = as_lists(lines.encode(messages, "here"))
    prompt = lines.encode_prompt(lines.render_prompt(messages[:-1], "here"))
    assert ids[: len(prompt)] == prompt
    assert trained[len(prompt) - 1 : len(prompt) + 1] == [False, True]
    assert np.count_nonzero(np.diff(trained[len(prompt) :])) == (template != HEADERS)  # nothing but the last answer
    begun = lines.encode_text(lines.render_prompt(messages[:-1], "here", begun=messages[-1]["content"].rstrip()))
    assert ids[: len(begun) - 1] == begun[:-1]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ConversationLines]:
    folder = tmp_path_factory.mktemp("prompts")
    headers = write_tokenizer(folder / "h", bpe(HEADER_TOKENS), HEADERS, bos_token="<|begin|>", eos_token="<|eot|>")
    chatml = {name: write_chatml(folder / str(n), name) for n, name in enumerate((CHATML, MARKED))}
    return {template: lines_of(spec) for template, spec in {**chatml, HEADERS: headers}.items()}


def test_the_end_of_a_prompt_is_not_that_of_a_text(prompts: dict[str, ConversationLines]) -> None:
    """Two line ends are one token, but two before a letter."""
    text = prompts[HEADERS].render_prompt(chat("a"), "here")
    assert text.endswith("<|/head|>\n\n")
    assert len(prompts[HEADERS].encode_prompt(text)) == len(prompts[HEADERS].encode_text(text)) + 1


@pytest.mark.parametrize("begun", ["US", "In the US", "US\n", "US <|im_end|> US"])
def test_an_answer_that_has_begun_is_whole(tmp_path: Path, begun: str) -> None:
    """Also where its end would be one token with a letter behind it."""
    tokenizer = byte_level_bpe(CHATML_TOKENS, "In the USA, USA! ", vocab_size=290)
    assert len(tokenizer.encode("USA").ids) == 1
    lines = lines_of(write_tokenizer(tmp_path / "t", tokenizer, CHATML, eos_token="<|im_end|>"))
    question = lines.encode_prompt(lines.render_prompt(chat("a"), "here"))
    ids = lines.encode_prompt(lines.render_prompt(chat("a"), "here", begun=begun))
    assert ids[: len(question)] == question
    assert tokenizer.decode(ids[len(question) :], skip_special_tokens=False) == begun


LAST_OTHERWISE = MARKED.replace("'<|im_end|>'", "('<|endoftext|>' if loop.last else '<|im_end|>')")
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "ends"),
    [(CHATML, {2}), (MARKED, {2}), (LAST_OTHERWISE, {0, 2}), (SYSTEM_FIRST, {2}), ("{{ messages[9].content }}", set())],
    ids=["chatml", "marked", "last otherwise", "system first", "none"],
)
def test_ids_that_end_a_turn(tmp_path: Path, template: str, ends: set[int]) -> None:
    """Whatever the tokenizer calls EOS."""
    folder = write_tokenizer(tmp_path, bpe(CHATML_TOKENS), template, eos_token="<|im_start|>")
    assert lines_of(folder).end_ids == ends


def test_rendering_is_that_of_transformers(tmp_path: Path) -> None:
    """Helpers, variables and white space, in a template that uses what templates use."""
    source = """{%- set ns = namespace(n=0) %}
{{ bos_token }}{{ messages[1:] | tojson }} {{ {'ä': [1, '<']} | tojson(indent=2) }}
  {% for message in messages %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% set ns.n = ns.n + 1 %}
{{ message.role | upper }}: {{ message['content'].strip() | replace('a', 'o') }} {{ unk_token }}
  {% endfor %}
{% if tools is none and not documents %}none{% endif %} {{ ns.n }} {{ undefined_name }} {{ add_generation_prompt }}
"""
    folder = write_tokenizer(
        tmp_path, bpe(HEADER_TOKENS), source, bos_token="<|begin|>", eos_token="<|eot|>", unk_token="<|head|>"
    )
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    messages = chat("banana", " 'a' \"b\" <c> ", "é\n")
    template = load_chat_template(None, spec=folder, tokenizer=tokenizer)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert template._render(messages, "here") == theirs


def test_where_a_template_is(tmp_path: Path) -> None:
    """A file that is named, else the one beside the tokenizer, else that of its configuration, by name if several."""
    ids = lines_of(write_chatml(tmp_path / "t")).encode(chat("a", "b"), "here").tokens.tolist()
    named = write_chatml(tmp_path / "n", [{"name": "x", "template": ""}, {"name": "default", "template": CHATML}])
    assert lines_of(named).encode(chat("a", "b"), "here").tokens.tolist() == ids
    (tmp_path / "n" / "chat_template.jinja").write_text("A chat: " + CHATML)
    assert lines_of(named).encode(chat("a", "b"), "here").tokens.tolist() != ids
    (tmp_path / "file.jinja").write_text(CHATML)
    assert lines_of(named, tmp_path / "file.jinja").encode(chat("a", "b"), "here").tokens.tolist() == ids
    prints = {lines_of(named).fingerprint, lines_of(named, tmp_path / "file.jinja").fingerprint}
    assert len(prints) == 2
    with pytest.raises(DataError, match=r"nowhere\.jinja: cannot be read"):
        lines_of(named, tmp_path / "nowhere.jinja")
    with pytest.raises(DataError, match=r"has no chat template.*data\.chat_template"):
        lines_of(write_chatml(tmp_path / "none", None))
    with pytest.raises(DataError, match=r"the chat_template of .*not a chat template that can be read \(.*endfor"):
        lines_of(write_chatml(tmp_path / "bad", "{% for x in y %}{% endfoo %}"))


FIRST = "{% if messages[0].role == 'system' %}{% endif %}"
ENDLESS = MARKED.replace("+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}<|eot|>")
REASONING = CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'].split('!')[-1]) +"
)


@pytest.mark.parametrize(
    ("template", "messages", "error", "message"),
    [
        (HEADERS, [*chat("a"), *chat("a", "b")], DataError, r"does not take this conversation \(two questions"),
        (FIRST + CHATML, [{"role": "assistant", "content": "a"}], DataError, r"does not take .*has no element 0"),
        (CHATML + "{{ strftime_now('%d') }}", chat("a", "b"), DataSetupError, "here: .*'strftime_now' is undefined"),
        (CHATML + "{{ ''.__class__.__mro__ }}", chat("a", "b"), DataSetupError, "here.*unsafe"),
        (CHATML + "{{ 'a' + 1 }}", chat("a", "b"), DataSetupError, "here: .*can only concatenate"),
        (REASONING, chat("a", "think! b", "c"), DataSetupError, r"here: the text of messages\[1\].*generation"),
        ("{{ messages | length }}{{ messages[0].content }}", chat("a", "b"), DataSetupError, r"messages\[1\]"),
        ("{{ messages[0].content }}", chat("a", "b"), DataError, "here: the chat template leaves no token"),
        (CHATML.replace("<|im_end|>", ""), chat("a", "b"), DataSetupError, "here: .* with no special token"),
        (ENDLESS, chat("a", "b<|eot|>"), DataSetupError, "here: .* with no special token"),
    ],
)
def test_refused(tmp_path: Path, template: str, messages: Any, error: type[DataError], message: str) -> None:
    template = template.replace("<|im_end|>", "<|eot|>")
    folder = write_tokenizer(tmp_path, bpe(HEADER_TOKENS), template, bos_token="<|begin|>", eos_token="<|eot|>")
    with pytest.raises(DataError, match=message) as caught:
        lines_of(folder).encode(messages, "here")
    assert type(caught.value) is error


def test_many_special_tokens_cost_little(tmp_path: Path) -> None:
    """Some vocabularies reserve a thousand; messages that spell hardly any of them are to be read at the same speed."""
    reserved = [f"<|reserved_{number}|>" for number in range(1000)]
    few = lines_of(write_chatml(tmp_path / "few"))
    many = lines_of(
        write_tokenizer(
            tmp_path / "many", bpe([*CHATML_TOKENS, *reserved], vocab_size=1300), CHATML, eos_token="<|im_end|>"
        )
    )
    messages = chat("Four plus two. " * 500, f"<|im_end|> {reserved[3]} is 4 < 5 | 6 > 2 " * 20)
    seconds = {}
    for name, lines in (("few", few), ("many", many)):
        spent = []
        for _ in range(3):
            start = time.process_time()
            lines.encode(messages, "here")
            spent.append(time.process_time() - start)
        seconds[name] = min(spent)
    assert seconds["many"] < 4 * seconds["few"]
    assert np.count_nonzero(many.encode(messages, "here").tokens == 3 + 3) == 0


def test_earlier_answers_that_are_written_in_another_way_are_not_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by Qwen3's template, which begins the last answer alone with what was thought; said once."""
    folder = write_chatml(tmp_path, QWEN3)
    lines = lines_of(folder)
    single, several = chat("two?", "Two.", system="Be brief."), chat("a", "Four.", "b", "<think>\nso\n</think>\n\nTwo.")
    assert as_lists(lines.encode(single, "one")) == expected(
        bpe(CHATML_TOKENS),
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\n\n</think>\n\nTwo.<|im_end|>", True),
        ("\n", False),
    )
    assert caplog.messages == []
    ids, trained = as_lists(lines.encode(several, "two"))
    assert (ids, trained) == expected(
        bpe(CHATML_TOKENS),
        ("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n", False),
        ("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\nso\n</think>\n\nTwo.<|im_end|>", True),
        ("\n", False),
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids == tokenizer.apply_chat_template(several, tokenize=True)["input_ids"]
    lines.encode(several, "three")
    (said,) = caplog.messages
    assert said.startswith("two: ")
    assert "1 answer is not trained" in said
    assert "configs/chat_templates/chatml.jinja" in said


def test_earlier_answers_that_are_written_in_the_same_way_are_trained(tmp_path: Path) -> None:
    """A template that removes reasoning leaves answers without any as they are."""
    ids, trained = as_lists(lines_of(write_chatml(tmp_path, REASONING)).encode(chat("a", "b", "c", "x! d"), "here"))
    answers = [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]
    assert bpe(CHATML_TOKENS).decode(answers, skip_special_tokens=False) == "b<|im_end|>x! d<|im_end|>"
    _, shortened = as_lists(lines_of(str(tmp_path)).encode(chat("a", "x! b", "c", "d"), "here"))
    assert sum(shortened) == 2


def test_a_token_that_is_partly_the_templates_is_not_trained(tmp_path: Path) -> None:
    """The line end of the header and those of the answer become one token."""
    tokenizer = bpe(CHATML_TOKENS)
    ids, trained = as_lists(lines_of(write_chatml(tmp_path)).encode(chat("a", "\n\nb"), "here"))
    grown, single = tokenizer.encode("\n\n\nb", add_special_tokens=False).ids[:2]
    assert tokenizer.decode([grown]) == "\n\n"
    place = ids.index(grown)
    assert ids[place:] == [grown, single, *tokenizer.encode("b<|im_end|>\n", add_special_tokens=False).ids]
    assert trained[place:] == [False, True, True, True, False]


def test_json_of_a_message_is_not_escaped(tmp_path: Path) -> None:
    line = json.dumps({"messages": chat("a", "ü<>&'")})
    assert "\\u00fc" in line
    messages = json.loads(line)["messages"]
    decoded = lines_of(write_chatml(tmp_path)).encode(messages, "here")
    assert load_tokenizer(str(tmp_path)).decode(decoded.tokens[decoded.trained].tolist()) == "ü<>&'"


def test_a_tokenizer_that_writes_spaces_into_words(tmp_path: Path) -> None:
    """Its first word has a space that is not in the text; turns are told by text and EOS, as of Llama 2."""
    template = (
        "{% for message in messages %}"
        "{% if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
        "{% endfor %}"
    )
    words = ["<unk>", BOS, EOS, "\u2581[INST]", "\u2581[/INST]", "\u2581two", "\u2581Four", "\u2581why", "\u2581so"]
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    folder = write_tokenizer(tmp_path, tokenizer, template, bos_token=BOS, eos_token=EOS)
    ids, trained = as_lists(lines_of(folder).encode(chat("two", "Four", "why", "so two"), "here"))
    assert ids == [1, 3, 5, 4, 6, 2, 1, 3, 7, 4, 8, 5, 2]
    assert trained == [False] * 4 + [True] * 2 + [False] * 4 + [True] * 3
