"""Conversations through the loader: which labels count, for every number of ranks and readers, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import DataConfig, EvaluationConfig, ModelConfig, RunConfig, TrainConfig
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.data.loader import TrainLoader, build_train_loader, build_validation_loader
from fbt_megatron.data.loader_state import merge_loader_states
from fbt_megatron.data.order import DocumentOrder
from fbt_megatron.errors import ConfigError, DataError, DataSetupError
from tests.data.chats import CHATML, TEXT, chat, masked_tokens, write_chatml, write_lines
from tests.data.range_server import serve

Masked = list[tuple[int, bool]]

VOCAB = 320  # more than the tokenizer has
SIZE = 148  # two of the conversations have one token more, and several have many more
END = 2  # <|im_end|>: of a turn, EOS, and what rows are padded with


def conversations(number: int, seed: int) -> list[list[dict[str, str]]]:
    """Some of one turn and some of three, from a fifth of a row to longer than one."""
    draw = random.Random(seed)
    texts = [TEXT[draw.randrange(40) :][: draw.randrange(60)] for _ in range(6 * number)]
    return [chat(*texts[6 * n : 6 * n + draw.choice((2, 4, 6))]) for n in range(number)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_chatml(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 13 and 10 conversations, with blank lines."""
    folder = tmp_path_factory.mktemp("chats")
    first = conversations(13, 1)
    write_lines(folder / "a.jsonl", ["", first[0], "  ", "", *first[1:], ""])
    write_lines(folder / "b.jsonl", conversations(10, 2))
    return folder


def config_of(train: Path | str, tokenizer: str | None, **data: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=VOCAB, seq_length=SIZE),
        data=DataConfig(kind="chat", train=str(train), tokenizer=tokenizer, **{"streams": 4, **data}),
        train=TrainConfig(global_batch_size=4, micro_batch_size=1, seed=3),
        evaluation=EvaluationConfig(batches=2),
    )


def rows(steps: Iterable[list[TrainBatch]]) -> dict[int, dict[str, list[int]]]:
    """Everything of each row, by its number."""
    found = {}
    for batch in (batch for step in steps for batch in step):
        for place, number in enumerate(batch.rows.tolist()):
            names = ("tokens", "labels", "positions", "document_ids")
            found[number] = {name: getattr(batch, name)[place].tolist() for name in names}
    return found


def read(loader: TrainLoader, num_steps: int) -> dict[int, dict[str, list[int]]]:
    found = rows(loader.next_step() for _ in range(num_steps))
    loader.close()
    return found


@dataclass(frozen=True)
class OracleRow:
    """A row by the rule: whole conversations one after another, then padding."""

    content: dict[str, list[int]]
    keys: tuple[str, ...]
    cut: int
    cut_tokens: int


def packed(conversations: Iterable[tuple[str, Masked]]) -> Iterator[OracleRow]:
    """Rows of conversations in order, place by place.

    A row has a place for each of its inputs and one for its last label. A conversation goes into a row if all of it has
    a place there and its first token is an input; one that has no row with so many places begins a row and is cut.
    """
    row: list[tuple[str, Masked]] = []
    for key, tokens in conversations:
        taken = sum(len(other) for _, other in row)
        if row and (taken + len(tokens) > SIZE + 1 or taken >= SIZE):
            yield _oracle_row(row)
            row = []
        row.append((key, tokens))
    yield _oracle_row(row)


def _oracle_row(row: list[tuple[str, Masked]]) -> OracleRow:
    flat = [(number, offset, *token) for number, (_, tokens) in enumerate(row) for offset, token in enumerate(tokens)]
    left_out = len(flat[SIZE + 1 :])
    assert not left_out or len(row) == 1
    flat = flat[: SIZE + 1]
    num_filled = len(flat)
    flat += [(len(row), place, END, False) for place in range(SIZE + 1 - num_filled)]
    content = {
        "tokens": [token for _, _, token, _ in flat[:SIZE]],
        "labels": [
            after[2] if after[0] == before[0] and after[3] else IGNORE_INDEX for before, after in pairwise(flat)
        ],
        "positions": [offset for _, offset, _, _ in flat[:SIZE]],
        "document_ids": [number for number, _, _, _ in flat[:SIZE]],
    }
    return OracleRow(content, tuple(key for key, _ in row), int(left_out > 0), left_out)


def lines_of(order: DocumentOrder, stream: int, num_streams: int) -> Iterator[tuple[int, int, int]]:
    """Epoch, file and number in the file of what a stream reads, epoch after epoch."""
    start, stop = order.stream_range(stream, num_streams=num_streams)
    for epoch in count():
        for span in order.epoch(epoch).spans(start, stop):
            yield from ((epoch, span.shard, number) for number in range(span.first, span.first + span.count))


def test_rows_of_a_validation(folder: Path, tokenizer: str) -> None:
    """One stream in stored order, and then rows without labels."""
    both = [*conversations(13, 1), *conversations(10, 2)]
    expected = list(packed(("", masked_tokens(messages)) for messages in both))
    config = config_of(folder, tokenizer, streams=1, validation=str(folder))
    config = replace(config, train=replace(config.train, global_batch_size=1))
    config = replace(config, evaluation=EvaluationConfig(batches=len(expected) + 3))
    loader = build_validation_loader(config, dp_rank=0, dp_size=1)
    assert loader is not None
    found = rows(loader)
    assert [found[number] for number in range(len(expected))] == [row.content for row in expected]
    assert [set(found[len(expected) + more]["labels"]) for more in range(3)] == [{IGNORE_INDEX}] * 3
    ends = sum(messages["role"] == "assistant" for chat in both for messages in chat)
    labels = [label for row in found.values() for label in row["labels"]]
    assert 0 < labels.count(END) < ends  # of answers alone, and not of those that were left out
    assert sum(row.cut for row in expected) > 2
    assert sum(len(row.keys) for row in expected) == len(both) > len(expected) + 3
    assert any(row.content["document_ids"][-1] == len(row.keys) for row in expected)
    assert SIZE + 1 in [len(masked_tokens(chat)) for chat in both]


def test_rows_of_training_and_what_is_counted(folder: Path, tokenizer: str) -> None:
    """Each of four streams over several epochs: rows, names, how many conversations were cut, and where it goes on."""
    order = DocumentOrder([13, 10], seed=3)
    chats = {0: conversations(13, 1), 1: conversations(10, 2)}
    numbers = {0: [2, *range(5, 17)], 1: [*range(1, 11)]}
    tokens = {(file, n): masked_tokens(chat) for file in chats for n, chat in enumerate(chats[file])}
    oracles = [
        packed((f"{'ab'[file]}.jsonl:{numbers[file][n]}", tokens[file, n]) for _, file, n in lines_of(order, stream, 4))
        for stream in range(4)
    ]
    read = [0] * 4
    loader = build_train_loader(config_of(folder, tokenizer), dp_rank=0, dp_size=1)
    cut, cut_tokens = 0, 0
    for step in range(30):
        found = rows([loader.next_step()])
        expected = {4 * step + stream: next(oracles[stream]) for stream in range(4)}
        assert found == {number: row.content for number, row in expected.items()}
        assert loader.last_documents == {number: row.keys for number, row in expected.items()}
        cut += sum(row.cut for row in expected.values())
        cut_tokens += sum(row.cut_tokens for row in expected.values())
        assert loader.cut == (cut, cut_tokens)
        for stream, row in enumerate(expected.values()):
            read[stream] += len(row.keys)
            start, stop = order.stream_range(stream, num_streams=4)
            cursor = loader.state_dict()["cursors"][str(stream)]
            assert (cursor["epoch"], cursor["document"]) == divmod(read[stream], stop - start)
            assert cursor["offset"] == 0
    assert loader.epoch > 2
    assert cut > 20


@pytest.mark.parametrize(("dp_size", "workers"), [(1, 2), (2, 0), (2, 1), (4, 0)])
def test_rows_do_not_depend_on_ranks_or_readers(folder: Path, tokenizer: str, dp_size: int, workers: int) -> None:
    alone = build_train_loader(config_of(folder, tokenizer), dp_rank=0, dp_size=1)
    expected = read(alone, 30)
    config = config_of(folder, tokenizer, workers=workers)
    found: dict[int, dict[str, list[int]]] = {}
    loaders = [build_train_loader(config, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    for loader in loaders:
        found |= read(loader, 30)
    assert found == expected
    assert tuple(map(sum, zip(*(loader.cut for loader in loaders), strict=True))) == alone.cut


@pytest.mark.parametrize("done", [1, 7, 20])
def test_resuming_is_exact(folder: Path, tokenizer: str, done: int) -> None:
    config = config_of(folder, tokenizer)
    straight = build_train_loader(config, dp_rank=0, dp_size=1)
    expected = read(straight, 30)
    first = build_train_loader(config, dp_rank=0, dp_size=1)
    found = rows(first.next_step() for _ in range(done))
    state = json.loads(json.dumps(merge_loader_states([first.state_dict()])))
    rest = [build_train_loader(config, dp_rank=rank, dp_size=2, state=state) for rank in range(2)]
    for loader in rest:
        found |= read(loader, 30 - done)
    assert found == expected
    assert merge_loader_states([loader.state_dict() for loader in rest]) == straight.state_dict()


def test_documents_are_named_by_line(folder: Path, tokenizer: str) -> None:
    loader = build_train_loader(config_of(folder, tokenizer), dp_rank=0, dp_size=1)
    named: set[str] = set()
    for _ in range(60):
        loader.next_step()
        named |= {key for keys in loader.last_documents.values() for key in keys}
    numbers = [2, *range(5, 17)]
    assert named == {f"a.jsonl:{n}" for n in numbers} | {f"b.jsonl:{n}" for n in range(1, 11)}


def test_another_content_or_template_is_another_data_set(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    config = config_of(folder, tokenizer)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    state = merge_loader_states([loader.state_dict()])
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    moved = replace(config, data=replace(config.data, train=str(tmp_path / "{a,b}.jsonl")))
    build_train_loader(moved, dp_rank=0, dp_size=1, state=state)
    (tmp_path / "other.jinja").write_text(CHATML + " ")
    other = replace(moved, data=replace(moved.data, chat_template=str(tmp_path / "other.jinja")))
    with pytest.raises(DataError, match="not the data set that the checkpoint was made with"):
        build_train_loader(other, dp_rank=0, dp_size=1, state=state)
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.jsonl").write_bytes(content.replace(b"plus", b"less"))
    with pytest.raises(DataError, match="not the data set that the checkpoint was made with"):
        build_train_loader(moved, dp_rank=0, dp_size=1, state=state)


def test_files_behind_http(folder: Path, tokenizer: str) -> None:
    expected = read(build_train_loader(config_of(folder, tokenizer), dp_rank=0, dp_size=1), 12)
    with serve(folder) as server:
        config = config_of(f"{server.url}/{{a,b}}.jsonl", tokenizer)
        assert read(build_train_loader(config, dp_rank=0, dp_size=1), 12) == expected


def skips(config: RunConfig, num_lines: int, bad: set[int]) -> int:
    """Read three epochs of one file in one stream, of which some lines are bad, with exact counts after every row.

    Returns how many were passed over.
    """
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    lines, read, skipped = lines_of(DocumentOrder([num_lines], seed=config.train.seed), 0, 1), 0, 0
    while loader.epoch < 3:
        loader.next_step()
        cursor = loader.state_dict()["cursors"]["0"]
        while read < num_lines * cursor["epoch"] + cursor["document"]:
            skipped += next(lines)[2] in bad
            read += 1
        assert loader.skipped == (skipped, 0)
    return skipped


BAD = [
    ("{", "not UTF-8 text with one JSON object"),
    ('{"text": "a"}', 'no list "messages"'),
    ('{"messages": {}}', 'no list "messages"'),
    ('{"messages": []}', "no message has the role assistant"),
    ([{"role": "user", "content": "a"}], "no message has the role assistant"),
    (["a"], r"messages\[0\] is no object"),
    ([{"role": "tool", "content": "a"}], r"messages\[0\]: role 'tool' is not supported. Known are system, "),
    ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\]: content is list, and only text is supported"),
    ([{"role": "assistant", "content": None, "tool_calls": []}], r"messages\[0\]: content is null"),
    ([{"role": "assistant", "content": "", "tool_calls": [1]}], r"messages\[0\]: tool_calls is not supported"),
    ('{"messages": [{"role": "assistant", "content": "a"}], "tools": [1]}', "has tools"),
    ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', "half of a surrogate pair"),
    ([{"role": "assistant", "content": "\ufdd0"}], "U\\+FDD0"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_what_is_no_conversation_is_refused_or_passed_over(
    tokenizer: str, tmp_path: Path, line: Any, message: str
) -> None:
    good = conversations(12, 3)
    file = write_lines(tmp_path / "chats.jsonl", [*good[:5], "", line, *good[5:]])
    config = config_of(file, tokenizer, streams=1)
    config = replace(config, train=replace(config.train, global_batch_size=1))
    with pytest.raises(DataError, match=rf"chats\.jsonl: line 7.*{message}") as caught:
        read(build_train_loader(config, dp_rank=0, dp_size=1), 60)
    assert type(caught.value) is DataError
    config = replace(config, data=replace(config.data, on_error="skip", max_skipped=0.5))
    assert skips(config, 13, {5}) > 1


def test_neighbours_that_are_no_conversations(tokenizer: str, tmp_path: Path) -> None:
    """Two in the middle, two at the beginning and one at the end, which are neighbours where reading wraps around."""
    good = [conversation for conversation in conversations(30, 3) if len(masked_tokens(conversation)) < SIZE][:9]
    bad = BAD[2][0]
    file = write_lines(tmp_path / "chats.jsonl", [bad, bad, *good[:5], bad, BAD[0][0], *good[5:], bad])
    config = config_of(file, tokenizer, streams=1, on_error="skip", max_skipped=0.5)
    config = replace(config, train=replace(config.train, global_batch_size=1))
    assert skips(config, 14, {0, 1, 7, 8, 13}) > 10


def test_a_file_that_changes_under_a_run(tokenizer: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "chats.jsonl", conversations(12, 3))
    config = config_of(file, tokenizer)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"user", b"uses"))
    with pytest.raises(DataError, match=r"chats\.jsonl: line \d+: has changed since"):
        read(loader, 20)
    loader = build_train_loader(config, dp_rank=0, dp_size=1)
    file.write_bytes(content[:-200])
    with pytest.raises(DataError, match=r"chats\.jsonl: .*has changed since"):
        read(loader, 60)


def test_data_sets_that_are_refused(folder: Path, tokenizer: str, tmp_path: Path) -> None:
    def problem(train: Path | str, name: str = tokenizer, **model: Any) -> str:
        config = config_of(train, name)
        with pytest.raises(DataError) as caught:
            build_train_loader(replace(config, model=replace(config.model, **model)), dp_rank=0, dp_size=1)
        return str(caught.value)

    (tmp_path / "empty").mkdir()
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    write_lines(tmp_path / "none.jsonl", ["", " "])
    assert "holds no .jsonl files" in problem(tmp_path / "empty")
    assert "not a .jsonl file" in problem(tmp_path / "c.json")
    assert "nowhere.jsonl: not found" in problem(tmp_path / "nowhere.jsonl")
    assert "Decompress the file" in problem(tmp_path / "c.jsonl.gz")
    assert "store the output of the command" in problem("pipe:cat x.jsonl")
    assert "holds no conversations" in problem(tmp_path / "none.jsonl")
    assert "has no special tokens" in problem(folder, "bytes")
    assert "has 300 ids, but model.vocab_size=299" in problem(folder, vocab_size=299)
    assert "data.streams=4: the training data has only 1" in problem(
        write_lines(tmp_path / "one.jsonl", conversations(1, 1))
    )


def test_a_template_that_does_not_tell_answers_is_no_matter_of_skipping(tmp_path: Path, folder: Path) -> None:
    tokenizer = write_chatml(tmp_path, "{{ messages | length }}{{ messages[0].content }}")
    loader = build_train_loader(config_of(folder, tokenizer, on_error="skip", max_skipped=1.0), dp_rank=0, dp_size=1)
    with pytest.raises(DataSetupError, match=r"jsonl: line \d+: the text of messages\[\d\] cannot be told"):
        loader.next_step()


def test_settings_that_do_not_fit_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: {kind: chat, train: x}\n")
    (tmp_path / "b.yaml").write_text("data: {chat_template: x, train: x}\n")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=null: kind chat needs"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"data\.chat_template=x: is for kind: chat only"):
        load_config(tmp_path / "b.yaml")
