"""Losses of documents per pass and mode against the recurrence written out, and against the trainer's validation."""

from __future__ import annotations

import io
import math
import os
from argparse import Namespace
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fbt_megatron.config.schema import DataConfig
from fbt_megatron.data.batch import IGNORE_INDEX, TrainBatch
from fbt_megatron.data.conversations import open_conversations
from fbt_megatron.data.dataset import open_dataset
from fbt_megatron.data.format import TokenizerInfo
from fbt_megatron.errors import DataError, DecodeError
from fbt_megatron.evaluation.document_loss import Piece, _share, document_losses, document_pieces, row_pieces
from fbt_megatron.evaluation.statistics import ratio_error
from fbt_megatron.inference.decoder import DecodeMode
from fbt_megatron.inference.source import load_model
from fbt_megatron.parallel.launcher import Launch
from fbt_megatron.parallel.topology import ParallelTopology
from tests.data.chats import chat, masked_tokens, write_chatml, write_lines
from tests.data.datasets import write_dataset
from tests.distributed import free_port, run_distributed
from tests.evaluation.trained_run import Trained, assert_losses_of_the_run, losses_of
from tests.inference.toy import Pair, random_prompts, reference_logits
from tests.model.reference import Row, row_losses
from tools import evaluate

TOKEN_BYTES = torch.arange(60) % 4
STANDARD, SOFT = DecodeMode("standard", 1), DecodeMode("soft", 1)


def expected_nats(pair: Pair, tokens: tuple[int, ...], mode: DecodeMode, places: list[int] | None = None) -> float:
    """In fp64, each token from all before it; of the tokens at `places`, or of all but the first."""
    if mode.name == "fused":
        row = Row(list(tokens), [0] * len(tokens), [-100] * len(tokens))
        logits = row_losses(row, pair.weights, pair.config.model, num_passes=mode.prefill_passes)[-1][2][:-1]
    else:
        logits = reference_logits(pair.config, pair.weights, mode, tokens[:1], tokens[1:-1])
    wanted = torch.tensor(places or range(1, len(tokens)))
    return -float(logits.log_softmax(-1)[wanted - 1, torch.tensor(tokens)[wanted]].sum())


@pytest.mark.parametrize("batch_size", [1, 3])
def test_losses_are_those_of_the_equations(topology: ParallelTopology, batch_size: int) -> None:
    """Pieces of 2 to 8 tokens; the second and third belong to one document."""
    pair = Pair("glu, windows, untied", topology)
    texts = random_prompts(5, 8, 2, 4, seed=4)
    pieces = [Piece(number, tuple(tokens)) for number, tokens in zip((0, 1, 1, 2), texts, strict=True)]
    told: list[int] = []
    found = document_losses(
        pair.exact_model, pieces, num_passes=3, soft=True, token_bytes=TOKEN_BYTES, batch_size=batch_size,
        progress=told.append,
    )  # fmt: skip
    modes = [STANDARD, DecodeMode("fused", 2), DecodeMode("fused", 3), SOFT]
    assert [one.mode for one in found.modes] == modes
    num_bytes = sum(token % 4 for text in texts for token in text[1:])
    assert (found.num_documents, found.num_tokens, found.num_bytes) == (3, 15, num_bytes)
    assert sum(told) == 15
    nats = {mode: [expected_nats(pair, piece.tokens, mode) for piece in pieces] for mode in modes}
    for one in found.modes:
        total = sum(nats[one.mode])
        assert one.loss == pytest.approx(total / 15, rel=1e-6)
        assert one.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=1e-6)
        differences = [own - plain for own, plain in zip(nats[one.mode], nats[STANDARD], strict=True)]
        assert one.difference == pytest.approx(sum(differences) / 15, rel=1e-5, abs=1e-9)
        by_document = [differences[0], differences[1] + differences[2], differences[3]]
        assert one.difference_error == pytest.approx(ratio_error(by_document, [4, 8, 3]), rel=1e-5, abs=1e-9)
    assert len({round(one.loss, 4) for one in found.modes}) == 4


def test_only_counted_tokens_are_in_the_means(topology: ParallelTopology) -> None:
    pair = Pair("glu, windows, untied", topology)
    places = {tuple(tokens): chosen for tokens, chosen in zip(random_prompts(6, 4, seed=5), ([2, 5], [1]), strict=True)}
    pieces = [
        piece
        for number, (tokens, chosen) in enumerate(places.items())
        if (piece := Piece.counting(number, tokens, [place in chosen for place in range(1, len(tokens))])) is not None
    ]
    assert len(pieces) == 2
    found = document_losses(pair.exact_model, pieces, num_passes=2, soft=True, token_bytes=TOKEN_BYTES, batch_size=2)
    num_bytes = sum(tokens[place] % 4 for tokens, chosen in places.items() for place in chosen)
    assert (found.num_documents, found.num_tokens, found.num_bytes) == (2, 3, num_bytes)
    assert [one.mode for one in found.modes] == [STANDARD, DecodeMode("fused", 2), SOFT]
    for one in found.modes:
        nats = [expected_nats(pair, tokens, one.mode, chosen) for tokens, chosen in places.items()]
        plain = [expected_nats(pair, tokens, STANDARD, chosen) for tokens, chosen in places.items()]
        assert one.loss == pytest.approx(sum(nats) / 3, rel=1e-6)
        differences = [own - other for own, other in zip(nats, plain, strict=True)]
        assert one.difference_error == pytest.approx(ratio_error(differences, [2, 1]), rel=1e-4, abs=1e-9)


def test_what_a_model_without_feedback_has(topology: ParallelTopology) -> None:
    model = Pair("no feedback", topology).model
    options = {"token_bytes": None, "batch_size": 2}
    found = document_losses(model, [Piece(0, (1, 2, 3))], num_passes=1, soft=False, **options)
    assert [one.mode for one in found.modes] == [STANDARD]
    assert (found.num_bytes, found.modes[0].bits_per_byte, found.modes[0].hidden_delta) == (None, None, None)
    assert math.isnan(found.modes[0].difference_error)
    with pytest.raises(DecodeError, match="trained without feedback"):
        document_losses(model, [], num_passes=2, soft=False, **options)
    with pytest.raises(DecodeError, match="trained without feedback"):
        document_losses(model, [], num_passes=1, soft=True, **options)
    with pytest.raises(DataError, match="no document of two tokens"):
        document_losses(model, [], num_passes=1, soft=False, **options)


def test_every_token_but_the_first_is_predicted_once(tmp_path: Path) -> None:
    shards = [[[1, 2, 3, 4, 5, 256], [256]], [[6, 7, 8, 9, 256], [5, 6]]]
    dataset = open_dataset(str(write_dataset(tmp_path, shards)), tokenizer=None, vocab_size=257, key="--data")
    pieces = [
        Piece(0, (1, 2, 3)), Piece(0, (3, 4, 5)), Piece(0, (5, 256)),
        Piece(2, (6, 7, 8)), Piece(2, (8, 9, 256)), Piece(3, (5, 6)),
    ]  # fmt: skip
    assert list(document_pieces(dataset, seq_length=2)) == pieces
    assert list(document_pieces(dataset, seq_length=2, limit=3)) == pieces[:5]


def test_rows_fall_into_documents() -> None:
    """A document that goes on behind the row, one token alone, one that ends with its row, a row that fills up."""
    none = IGNORE_INDEX
    tokens = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 0], [0, 0, 0, 0, 0]]
    labels = [[2, none, none, 5, 6], [7, none, 9, 0, none], [none] * 5]
    documents = [[0, 0, 1, 2, 2], [0, 0, 1, 1, 1], [0] * 5]
    batch = TrainBatch(*(torch.tensor(t) for t in (tokens, labels, labels, documents)), rows=torch.arange(3))
    found = [(1, 2), (4, 5, 6), (6, 7), (8, 9, 0)]
    assert list(row_pieces([[batch]])) == [Piece(number, tokens) for number, tokens in enumerate(found)]


def test_rows_of_conversations() -> None:
    """Untrained first and last labels, a part without an answer, padding inside of a row."""
    none = IGNORE_INDEX
    tokens = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0], [1, 2, 3, 4, 5, 6]]
    labels = [[none, 3, none, none, 6, 7], [none, none, none, none, none, none], [none, none, 4, none, none, none]]
    documents = [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]]
    batch = TrainBatch(*(torch.tensor(t) for t in (tokens, labels, labels, documents)), rows=torch.arange(3))
    assert list(row_pieces([[batch]])) == [
        Piece(0, (1, 2, 3), (False, True)),
        Piece(1, (4, 5, 6, 7), (False, True, True)),
        Piece(2, (1, 2, 3, 4), (False, False, True)),
    ]
    assert Piece(1, (4, 5, 6, 7), (False, True, True)).pick("abc") == ["b", "c"]


def test_of_a_conversation_its_answers_are_predicted(tmp_path: Path) -> None:
    """Up to the length of a row, as in training."""
    conversations = [chat("two", "Four.", "why", "two"), chat("a" * 40, "b")]
    write_lines(tmp_path / "chats.jsonl", conversations)
    data = DataConfig(kind="chat", validation=str(tmp_path / "chats.jsonl"), tokenizer=write_chatml(tmp_path / "t"))
    dataset = open_conversations(data, "validation", vocab_size=300, on_error="stop")
    tokens = masked_tokens(conversations[0])
    for seq_length in (len(tokens) - 1, 30):
        (piece,) = document_pieces(dataset, seq_length=seq_length)
        read = tokens[: seq_length + 1]
        assert piece.tokens == tuple(token for token, _ in read)
        assert piece.pick(piece.tokens[1:]) == [token for token, trained in read if trained]
    assert not list(document_pieces(dataset, seq_length=30, limit=0))


def test_the_rows_have_the_losses_of_the_trainer(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = losses_of(capsys, trained.run, "--rows", "--passes", 3, "--skip-soft")
    assert [one["mode"] for one in found["modes"]] == ["standard", "fused", "fused"]
    assert_losses_of_the_run(found, trained.record)


def test_a_run_and_its_export_agree_on_documents(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = losses_of(capsys, trained.run)
    assert found["num_documents"] == 5  # one has a single token
    assert found["num_tokens"] == 30 + 3 + 17 + 25 + 40 - 5
    names = [(one["mode"], one["prefill_passes"]) for one in found["modes"]]
    assert names == [("standard", 1), ("fused", 2), ("soft", 1)]
    exported = losses_of(capsys, trained.exported, "--data", trained.validation, "--batch-size", 2)
    for one, other in zip(found["modes"], exported["modes"], strict=True):
        assert other.keys() == one.keys()
        assert (other["mode"], other["prefill_passes"]) == (one["mode"], one["prefill_passes"])
        for key in ("loss", "bits_per_byte", "difference", "difference_error"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6)
    assert losses_of(capsys, trained.run, "--limit", 1)["num_tokens"] == 29


def test_ids_of_another_tokenizer_are_refused(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many ids as the model has, but of words and not of bytes: both tokenizers are named."""
    stored = TokenizerInfo("huggingface", "../tokenizer/tokenizer.json", "1" * 64)
    write_dataset(tmp_path / "set", [[[1, 2, 256]]], tokenizer=stored)
    for model, own in ((trained.run, "raw bytes"), (trained.exported, str(trained.exported))):
        assert evaluate.main([str(model), "--data", str(tmp_path / "set")]) == 3
        error = capsys.readouterr().err
        assert "/set: its ids are those of another tokenizer, ../tokenizer/tokenizer.json" in error
        assert f"(dataset.json in {tmp_path / 'set'}), than the model's, {own}. Name data of" in error
        assert error.count("\n") == 1


def _in_ranks(rank: int, cases: list[tuple[int, list[list[str]]]]) -> list[tuple[int, str, str]]:
    """Status, output and errors of the tool in this rank for each case: a port to meet at and each rank's arguments."""
    dist.destroy_process_group()  # the tool makes its own
    found = []
    for port, arguments in cases:
        os.environ["MASTER_PORT"] = str(port)
        with redirect_stdout(io.StringIO()) as output, mock.patch.object(Launch, "report", autospec=True) as told:
            status = evaluate.main(arguments[rank])
        found.append((status, output.getvalue(), "".join(str(call.args[1]) for call in told.mock_calls)))
    return found


@pytest.mark.distributed
def test_several_processes_have_the_losses_of_one(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    """To the last digit, also where one has no batch; what one process cannot do is said by all."""
    run, fine = str(trained.run), ["--batch-size", "2", "--json"]
    alike = [[run, *fine], [run, "--rows", *fine], [run, "--limit", "1", *fine], [run]]
    missing = [run, "--data", "missing", *fine]
    pairs = [*([one, one] for one in alike), [alike[0], missing], [["missing"], alike[0]]]
    ranks = run_distributed(_in_ranks, 2, [(free_port(), pair) for pair in pairs])
    for number, arguments in enumerate(alike):
        assert evaluate.main(arguments) == 0
        assert [rank[number] for rank in ranks] == [(0, capsys.readouterr().out, ""), (0, "", "")]
    for number, status, expected in ((4, 3, "--data=missing"), (5, 4, "missing")):
        for rank in ranks:
            assert rank[number][:2] == (status, "")
            assert expected in rank[number][2]


def test_batches_are_shared_out() -> None:
    """Each to one process, and the long ones of a window to all in turn."""
    batches = [[Piece(number, (1, 2))] for number in range(64)]
    shares = [list(_share(batches, process, 4)) for process in range(4)]
    assert sorted(one for share in shares for one in share) == sorted(enumerate(batches))
    longest = [[number for number, _ in share if number % 16 == 15] for share in shares]
    assert [len(numbers) for numbers in longest] == [1, 1, 1, 1]


def test_rows_in_which_documents_see_each_other(trained: Trained) -> None:
    loaded = load_model(trained.run)
    assert loaded.config is not None
    config = replace(loaded.config, data=replace(loaded.config.data, reset_attention_mask=False))
    asked = Namespace(rows=True, passes=None, skip_soft=False, batch_size=4)
    with pytest.raises(DecodeError, match=r"--rows: the run was trained with .*: false"):
        evaluate.evaluate(replace(loaded, config=config), asked)


@pytest.mark.parametrize("option", [["--data", "d"], ["--limit", "1"], ["--kind", "chat"], ["--text-tokenizer", "t"]])
def test_rows_take_no_other_data(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        evaluate.main(["run", "--rows", *option])
    assert "--rows takes the run's validation as it is" in capsys.readouterr().err


def test_the_table(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([str(trained.run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "5 documents, 110 predicted tokens, 110 bytes of text"
    assert [line.split("  ")[0] for line in lines[3:6]] == ["pass 1 (standard)", "pass 2 (fused)", "soft"]


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["{exported}"], 3, "names no data for validation"),
        (["{exported}", "--rows"], 3, "--rows: "),
        (["{run}", "--data", "missing"], 3, "DataError: --data=missing"),
        (["{run}", "--data", "a.jsonl", "--kind", "chat", "--text-tokenizer", "bytes"], 2, "--text-tokenizer: conv"),
        (["missing"], 4, "CheckpointError"),
        (["{run}", "--device", "foo"], 2, "DecodeError: --device foo: PyTorch cannot compute there"),
        (["{run}", "--device", "cuda:99"], 2, "DecodeError: --device cuda:99: PyTorch cannot compute there"),
    ],
)
def test_the_tool_refuses_in_one_line(
    trained: Trained, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, expected: str
) -> None:
    named = [text.format(exported=trained.exported, run=trained.run) for text in arguments]
    assert evaluate.main(named) == status
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
