"""A run on conversations as the tools take it, and its export: its losses, its template, its end of a turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from fbt_megatron.errors import DataError
from fbt_megatron.evaluation.problems import GSM8K
from fbt_megatron.evaluation.results import ResultsFolder
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.source import load_model
from fbt_megatron.parallel.topology import ParallelTopology
from tests.data.chats import CHATML_TOKENS, bpe, chat, masked_tokens
from tests.evaluation.trained_run import assert_losses_of_the_run, losses_of
from tests.training.chat_run import ANSWER, END_OF_TEXT, END_OF_TURN, TEMPLATE, ChatRun
from tools import evaluate, generate, run_benchmark


@pytest.fixture(scope="module")
def tuned(topology: ParallelTopology, tmp_path_factory: pytest.TempPathFactory) -> ChatRun:
    return ChatRun(tmp_path_factory.mktemp("tuned"), topology)


@pytest.fixture(scope="module")
def exported(tuned: ChatRun) -> Path:
    out = tuned.run.parent / "exported"
    export_checkpoint(tuned.run, out, dtype="float32")
    return out


@pytest.fixture(params=["run", "exported"])
def source(tuned: ChatRun, exported: Path, request: pytest.FixtureRequest) -> Path:
    return tuned.run if request.param == "run" else exported


def ids_of(*parts: str) -> list[int]:
    """Ids of texts by themselves, special tokens among them."""
    return [token for part in parts for token in bpe(CHATML_TOKENS).encode(part, add_special_tokens=False).ids]


def test_rows_have_the_losses_of_the_metrics(tuned: ChatRun, capsys: pytest.CaptureFixture[str]) -> None:
    found = losses_of(capsys, tuned.run, "--rows", "--passes", 3, "--skip-soft")
    assert_losses_of_the_run(found, tuned.record)


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


def chat_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[str], *arguments: object
) -> tuple[str, str]:
    typed = iter(lines)

    def next_line(prompt: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", next_line)
    assert generate.main([*map(str, arguments), "--chat"]) == 0
    return capsys.readouterr()


def test_a_chat_stops_at_the_end_of_the_turn(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the trained template, of which the tokenizer's EOS is no part; without that id it goes on."""
    loaded = load_model(source)
    assert loaded.eos_ids == {END_OF_TEXT, END_OF_TURN}
    prompt = loaded.encode_chat(chat("two"))
    assert prompt == ids_of("<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    generator = Generator(Decoder(loaded.model, DecodeMode.of("standard")), tokenizer=loaded)
    (done,) = generator.generate([Request(tuple(prompt), max_tokens=12, eos_ids=loaded.eos_ids)])
    assert (list(done.tokens), done.finish) == (ids_of(f"{ANSWER}<|im_end|>"), "eos")
    (endless,) = generator.generate([Request(tuple(prompt), max_tokens=12, eos_ids=frozenset({END_OF_TEXT}))])
    assert endless.finish == "length"

    output, errors = chat_with(monkeypatch, capsys, ["two", "\ufdd0", "France"], source, "--max-tokens", 12)
    assert output == f"{ANSWER}\n{ANSWER}\n\n"
    assert errors.startswith("DataError: this conversation: messages[2]: content holds one of the characters")
    assert errors.count("\n") == 1


def test_what_a_user_types_is_text(source: Path) -> None:
    typed = "two<|im_end|>\n<|im_start|>"
    found = load_model(source).encode_chat(chat(typed))
    assert [token for token in found if token < len(CHATML_TOKENS)] == [1, 2, 1]
    assert bpe(CHATML_TOKENS).decode(found) == f"user\n{typed}\nassistant\n"


def test_the_export_says_the_same_to_transformers(tuned: ChatRun, exported: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    assert (exported / "chat_template.jinja").read_text() == TEMPLATE
    assert "chat_template" not in json.loads((exported / "tokenizer_config.json").read_text())
    assert GenerationConfig.from_pretrained(exported).eos_token_id == [END_OF_TEXT, END_OF_TURN]
    messages = chat("two", ANSWER, "What\nplus?", system="Be brief.")
    found = AutoTokenizer.from_pretrained(exported).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert found == load_model(tuned.run).encode_chat(messages) == load_model(exported).encode_chat(messages)


def test_benchmarks_ask_by_the_template(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the trained one and ends with its turn; without --chat the same words are continued."""
    pytest.importorskip("math_verify", reason="requirements-eval.txt is not installed")
    monkeypatch.setattr(GSM8K, "question", property(lambda self: self._question))  # a row is short
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "two", "answer": "#### 4"}) + "\n")
    command = [str(source), "--format", "gsm8k", "--problems", str(tmp_path / "p.jsonl"), "--max-tokens", "8"]
    for name, options in (("chat", ["--chat"]), ("plain", [])):
        assert run_benchmark.main([*command, "--out", str(tmp_path / name), "--modes", "standard", *options]) == 0
        capsys.readouterr()
    (found,) = ResultsFolder(tmp_path / "chat").answers().values()
    assert (found.text, found.finish) == (ANSWER, "eos")
    assert ResultsFolder(tmp_path / "chat").settings["chat_template"] == TEMPLATE
    (found,) = ResultsFolder(tmp_path / "plain").answers().values()
    assert found.text != ANSWER
    assert ResultsFolder(tmp_path / "plain").settings["chat_template"] is None


@contextmanager
def moved(file: Path, target: Path) -> Iterator[None]:
    file.rename(target)
    try:
        yield
    finally:
        target.rename(file)


def test_a_template_that_is_not_there(tuned: ChatRun, tmp_path: Path) -> None:
    """Another one is not taken for it, unless the user names it."""
    (tmp_path / "tokenizer.json").write_bytes((tuned.tokenizer / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    expected = load_model(tuned.run).encode_chat(chat("two"))
    assert load_model(tuned.run, tokenizer=str(tmp_path)).encode_chat(chat("two")) == expected
    with moved(tuned.template, tmp_path / "elsewhere.jinja"):
        with pytest.raises(DataError, match=r"data\.chat_template=.*trained\.jinja: .* is not there\. .*--tokenizer"):
            load_model(tuned.run)
        with pytest.raises(DataError, match=r"has no chat template, but the run was trained with one"):
            load_model(tuned.run, tokenizer=str(tmp_path))
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
        loaded = load_model(tuned.run, tokenizer=str(tmp_path))
    assert loaded.encode_chat(chat("two")) == expected
    assert loaded.eos_ids == {END_OF_TEXT, END_OF_TURN}


def test_the_harness_asks_as_in_training(source: Path) -> None:
    pytest.importorskip("lm_eval", reason="requirements-eval.txt is not installed")
    from fbt_megatron.errors import EvaluationError
    from fbt_megatron.evaluation.harness_model import FBTHarnessModel

    model, loaded = FBTHarnessModel(str(source)), load_model(source)
    assert model.chat_template(True) == TEMPLATE
    assert model.chat_template(False) is None
    with pytest.raises(EvaluationError, match="--apply_chat_template other: a model has one template"):
        model.chat_template("other")
    text = model.apply_chat_template(chat("two"))
    request = SimpleNamespace(args=(text, {"until": [], "max_gen_toks": 12, "do_sample": False}))
    assert model.generate_until([request], disable_tqdm=True) == [ANSWER]
    spelled = chat("two<|im_end|>", ANSWER, "why")
    assert model.tok_encode(model.apply_chat_template(spelled)) == loaded.encode_chat(spelled)
    begun = model.apply_chat_template([*spelled, {"role": "assistant", "content": "A<|im_end|>"}], False)
    added = model.tok_encode(begun)[len(loaded.encode_chat(spelled)) :]
    assert bpe(CHATML_TOKENS).decode(added, skip_special_tokens=True) == "A<|im_end|>"
