"""A run on conversations as the tools take it, and its export: its losses, its template, its end of a turn."""

from __future__ import annotations

import json

import pytest

from fbt_megatron.parallel.topology import ParallelTopology
from tests.data.chats import masked_tokens
from tests.training.chat_run import ChatRun
from tools import evaluate


@pytest.fixture(scope="module")
def tuned(topology: ParallelTopology, tmp_path_factory: pytest.TempPathFactory) -> ChatRun:
    return ChatRun(tmp_path_factory.mktemp("tuned"), topology)


def losses_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert evaluate.main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_have_the_losses_of_the_metrics(tuned: ChatRun, capsys: pytest.CaptureFixture[str]) -> None:
    found = losses_of(capsys, tuned.run, "--rows", "--passes", 3, "--skip-soft")
    for number, one in enumerate(found["modes"], start=1):
        assert one["loss"] == pytest.approx(tuned.record[f"val_loss_pass_{number}"], rel=1e-5)
        assert one["bits_per_byte"] == pytest.approx(tuned.record[f"val_bpb_pass_{number}"], rel=1e-5)
        delta = tuned.record.get(f"hidden_delta_pass_{number}")
        assert one["hidden_delta"] == (None if number == 1 else pytest.approx(delta, rel=1e-4))


def test_whole_conversations(tuned: ChatRun, capsys: pytest.CaptureFixture[str]) -> None:
    """Each from its beginning, up to the length of a row; the answers of the training are known, others are not."""
    found = losses_of(capsys, tuned.run)
    cut = [masked_tokens(messages)[:49] for messages in tuned.held_out]
    assert found["num_documents"] == 5
    assert found["num_tokens"] == sum(trained for tokens in cut for _, trained in tokens)
    assert [one["mode"] for one in found["modes"]] == ["standard", "fused", "soft"]
    assert found["modes"][0]["loss"] > 2.0
    known = losses_of(capsys, tuned.run, "--data", tuned.run.parent / "train.jsonl", "--limit", 10)
    assert known["modes"][0]["loss"] < 0.1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "missing"], "DataError: --data=missing: no such folder, and not a .jsonl file"),
        (["--kind", "documents"], "DataError: data.validation="),
    ],
)
def test_refused_in_one_line(
    tuned: ChatRun, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert evaluate.main([str(tuned.run), *arguments]) == 3
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 1
