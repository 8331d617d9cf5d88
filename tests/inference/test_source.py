"""Models from a real run, its checkpoints and its export; and the tool on top of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from torch import Tensor

from fbt_megatron.data.tokenizer import HuggingFaceTokenizer
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.hf.tokenizer_files import ModelTokenizer
from fbt_megatron.inference.decoder import DecodeMode, Decoder
from fbt_megatron.inference.generation import Generator, Request
from fbt_megatron.inference.source import LoadedModel, load_model
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.build import open_trainer
from fbt_megatron.training.resilience import StopSignal
from tests.model.toy import whole_tensors
from tests.training.tiny_run import tiny_run, write_data
from tools import generate

PROMPT = "def f(x):"


class Trained:
    """A run of two steps with feedback, one without a fusion, and one before its first step with feedback."""

    def __init__(self, folder: Path, topology: ParallelTopology) -> None:
        data = write_data(folder / "data")
        self.run, self.plain_run, self.early_run = folder / "run", folder / "plain", folder / "early"
        config = tiny_run(self.run, data, mix={2: 1.0}, steps=2)
        with open_trainer(config, topology, allowed_changes=[]) as trainer:
            trainer.train(StopSignal())
            self.weights = whole_tensors(trainer.model)
        for other in (tiny_run(self.plain_run, data, steps=1, fusion="none"), tiny_run(self.early_run, data, steps=1)):
            with open_trainer(other, topology, allowed_changes=[]) as trainer:
                trainer.train(StopSignal())
        self.exported = folder / "exported"
        export_checkpoint(self.run, self.exported, dtype="float32")


@pytest.fixture(scope="module")
def trained(topology: ParallelTopology, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"), topology)


def copy_folder(source: Path, target: Path) -> None:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def fused_logits(loaded: LoadedModel) -> Tensor:
    hidden, _ = Decoder(loaded.model, DecodeMode("fused", 2)).run_passes([loaded.encode(PROMPT)])
    return loaded.model.logits(hidden)


def test_weights_are_those_of_the_run(trained: Trained) -> None:
    """All 257 ids and no padding, from any way to name the checkpoint, and the same through an export."""
    step = trained.run / "checkpoints" / "step_00000002"
    loaded = load_model(trained.run)
    assert loaded.path == step
    targets = loaded.model._targets()
    assert targets.keys() == trained.weights.keys()
    for name, values in trained.weights.items():
        assert torch.equal(targets[name].double(), values), name
    assert targets["embedding.weight"].shape == (257, 16)
    expected = fused_logits(loaded)
    for source in (step, step.parent, trained.exported):
        assert torch.equal(fused_logits(load_model(source)), expected)


@pytest.mark.parametrize(
    "mode", [DecodeMode("standard", 1), DecodeMode("soft", 1), DecodeMode("fused", 2), DecodeMode("fused", 3)], ids=str
)
def test_transformers_continues_the_export_alike(trained: Trained, mode: DecodeMode) -> None:
    """8 greedy tokens of two prompts, the shorter one padded, by the code that goes with the export."""
    from transformers import AutoModelForCausalLM

    loaded = load_model(trained.exported)
    prompts = [loaded.encode("def f(x)"), loaded.encode("a = b")]
    generator = Generator(Decoder(loaded.model, mode))
    expected = generator.generate([Request(tuple(prompt), max_tokens=8) for prompt in prompts])
    exported = AutoModelForCausalLM.from_pretrained(trained.exported, trust_remote_code=True)
    passes = {"prefill_passes": mode.prefill_passes} if mode.name == "fused" else {}
    found = exported.generate(
        torch.tensor([prompts[0], [0] * 3 + prompts[1]]),
        attention_mask=torch.tensor([[1] * 8, [0] * 3 + [1] * 5]),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        feedback_mode=mode.name,
        **passes,
    )
    assert found[:, 8:].tolist() == [list(done.tokens) for done in expected]


def test_tokenizer_and_end_of_text_are_those_of_the_data(trained: Trained) -> None:
    for source in (trained.run, trained.exported):
        loaded = load_model(source)
        assert loaded.encode(PROMPT) == list(PROMPT.encode())
        assert (loaded.decode([65, 256]), loaded.eos_ids, loaded.num_ids) == ("A", {256}, 257)


def test_several_ids_may_end_a_text(trained: Trained, tmp_path: Path) -> None:
    copy_folder(trained.exported, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [256, 10]}')
    assert load_model(tmp_path).eos_ids == {10, 256}


def test_the_ids_that_end_a_text_need_no_export_of_the_tokenizer(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds for a large vocabulary, at every start."""
    loaded = load_model(trained.exported)
    monkeypatch.setattr("fbt_megatron.hf.tokenizer_files._for_prompts", None)
    assert loaded.eos_ids == {256}


@pytest.mark.parametrize("add_bos", [True, False])
def test_a_prompt_starts_as_the_documents_do(trained: Trained, add_bos: bool) -> None:
    words = tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "a")
    definition = tokenizers.Tokenizer(words)
    definition.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = HuggingFaceTokenizer(definition.to_str(), "here", "</s>", "<s>")
    loaded = replace(load_model(trained.run), tokenizer=ModelTokenizer(tokenizer, add_bos, None))
    assert loaded.encode("b a") == ([0, 3, 2] if add_bos else [3, 2])
    assert loaded.encode("") == ([0] if add_bos else [])
    assert (loaded.eos_ids, loaded.num_ids) == ({1}, 4)


def test_the_computing_type(trained: Trained) -> None:
    assert load_model(trained.run).model.dtype == torch.float32
    loaded = load_model(trained.run, dtype="bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    torch.testing.assert_close(fused_logits(loaded), fused_logits(load_model(trained.run)), rtol=0.1, atol=0.1)


def test_feedback_that_has_not_been_trained_is_noted(trained: Trained) -> None:
    for source, expected in [(trained.run, []), (trained.plain_run, []), (trained.early_run, ["up to step 1"])]:
        notes: list[str] = []
        load_model(source, log=notes.append)
        assert len(notes) == len(expected)
        assert all(part in note for part, note in zip(expected, notes, strict=True))


def test_sources_that_are_no_model(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: must be an object"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="--tokenizer none: texts need a tokenizer"):
        load_model(trained.run, tokenizer="none")


def test_a_folder_of_another_shape(trained: Trained, tmp_path: Path) -> None:
    copy_folder(trained.exported, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 25}))
    with pytest.raises(CheckpointError, match=r"mlp.gate_proj.weight has shape \[24, 16\], but config.json asks for"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"model.layers.2.\S+ is missing"):
        load_model(tmp_path)


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    assert generate.main([*map(str, arguments), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_tool_prints_what_the_generator_gives(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(trained.run)
    found = lines_of(
        capsys, trained.run, "--prompt", PROMPT, "--prompt", "x", "--max-tokens", 5, "--mode", "fused",
        "--prefill-passes", 3, "--ignore-eos",
    )  # fmt: skip
    generator = Generator(Decoder(loaded.model, DecodeMode("fused", 3)), tokenizer=loaded)
    for line, prompt in zip(found, (PROMPT, "x"), strict=True):
        (done,) = generator.generate([Request(tuple(loaded.encode(prompt)), max_tokens=5)])
        assert line["tokens"] == list(done.tokens)
        assert line["logprobs"] == pytest.approx(done.logprobs, abs=1e-5)
        assert (line["prompt"], line["mode"], line["prefill_passes"]) == (prompt, "fused", 3)
        assert (line["text"], line["finish"]) == (done.text, done.finish)


def test_the_tool_compares_modes(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    found = lines_of(capsys, trained.exported, "--prompt", PROMPT, "--compare", "--max-tokens", 6)
    assert [line["mode"] for line in found] == ["standard", "soft", "fused"]
    assert found[0]["tokens"][0] == found[1]["tokens"][0]
    assert generate.main([str(trained.run), "--prompt", PROMPT, "--compare", "--max-tokens", "6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == PROMPT
    assert [title.strip() for title in lines[1].split("|")] == ["standard", "soft", "fused, 2 passes"]


def test_columns_hold_every_character() -> None:
    text = generate.side_by_side({"a": "12345678901\n\tx", "b": ""}, width=19)
    assert text.splitlines() == ["a        | b", "-------- | --------", "12345678 |", "901      |", "    x    |"]


def test_the_tool_reads_prompts(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('"a\\nb"\n\n{"prompt": "c", "id": 3}\n')
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    options = ["--max-tokens", 4, "--temperature", 1, "--top-k", 50, "--seed", 3, "--ignore-eos"]
    found = lines_of(capsys, trained.run, "--prompts", tmp_path / "prompts.jsonl", *options)
    assert [(line["prompt"], line["seed"]) for line in found] == [("a\nb", 3), ("c", 4)]
    again = lines_of(capsys, trained.run, "--prompts", tmp_path / "prompts.jsonl", *options, "--batch-size", 1)
    assert [line["tokens"] for line in again] == [line["tokens"] for line in found]
    found = lines_of(capsys, trained.run, "--prompts", tmp_path / "prompts.txt", *options)
    assert [line["prompt"] for line in found] == ["a", "b"]


def test_which_ids_end_a_text(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--ignore-eos leaves out the ids of the tokenizer's folder, and not those of --eos-id."""
    copy_folder(trained.exported, tmp_path)

    def tokens_of(*options: object) -> tuple[list[int], str]:
        (line,) = lines_of(capsys, tmp_path, "--prompt", PROMPT, "--max-tokens", 6, *options)
        return line["tokens"], line["finish"]

    whole, _ = tokens_of("--ignore-eos")
    early, late = whole[0], next(token for token in whole if token != whole[0])
    until_late = whole[: whole.index(late) + 1]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, early]}))
    assert tokens_of() == ([early], "eos")
    assert tokens_of("--ignore-eos") == (whole, "length")
    assert tokens_of("--ignore-eos", "--eos-id", 255, "--eos-id", late) == (until_late, "eos")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": late}))
    assert tokens_of() == (until_late, "eos")
    assert tokens_of("--eos-id", early) == ([early], "eos")


def _next_line(typed: Iterator[str]) -> str:
    for line in typed:
        return line
    raise EOFError


def test_the_tool_answers_lines(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["x", "", "y" * 40, "z"])

    monkeypatch.setattr("builtins.input", lambda prompt: _next_line(typed))
    assert generate.main([str(trained.run), "--interactive", "--max-tokens", "3", "--ignore-eos"]) == 0
    captured = capsys.readouterr()
    assert "prompt 1 has 40 tokens" in captured.err
    expected = lines_of(capsys, trained.run, "--prompt", "z", "--max-tokens", 3, "--ignore-eos")[0]["text"]
    assert captured.out.endswith(f"{expected}\n\n")


def test_the_tool_chats(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next prompt holds the first answer, in the form of the tokenizer's template, and no line that was refused."""
    copy_folder(trained.exported, tmp_path)
    template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    typed = iter(["x", "z" * 40, "y"])
    monkeypatch.setattr("builtins.input", lambda prompt: _next_line(typed))
    assert generate.main([str(tmp_path), "--chat", "--mode", "soft", "--max-tokens", "3", "--ignore-eos"]) == 0
    output, errors = capsys.readouterr()
    assert "tokens, but the model was trained on rows of 16" in errors
    assert errors.count("\n") == 1

    def continued(prompt: str) -> str:
        options = ["--mode", "soft", "--max-tokens", 3, "--ignore-eos"]
        return lines_of(capsys, trained.run, "--prompt", prompt, *options)[0]["text"]

    first = continued("ux:")
    assert output == f"{first}\n{continued(f'uxa{first}uy:')}\n\n"


@pytest.mark.parametrize(
    ("arguments", "status", "expected"),
    [
        (["--prompt", ""], 2, "DecodeError: prompt 1 has no tokens"),
        (["--prompt", "a" * 20], 2, "prompt 1 has 20 tokens, but the model was trained on rows of 16"),
        (["--prompt", "a", "--top-p", "0"], 2, "DecodeError: top_p=0.0"),
        (["--prompt", "a", "--prefill-passes", "2"], 2, "mode standard takes one pass"),
        (["--prompts", "missing.txt"], 2, "--prompts missing.txt: cannot be read"),
        (["--prompt", "a", "--device", "foo"], 2, "DecodeError: --device foo: PyTorch cannot compute there"),
        (["--prompt", "a", "--device", "cuda:99"], 2, "DecodeError: --device cuda:99: PyTorch cannot compute there"),
        (["--prompt", "a", "--device", "meta"], 2, "DecodeError: --device meta: PyTorch cannot compute there"),
        (["--prompt", "a", "--tokenizer", "missing"], 3, "tokenizer=missing: not found"),
        (["--chat"], 2, "has no chat template"),
    ],
)
def test_the_tool_refuses_in_one_line(
    trained: Trained, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, expected: str
) -> None:
    assert generate.main([str(trained.run), *arguments]) == status
    captured = capsys.readouterr()
    assert expected in captured.err
    assert "Traceback" not in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--device", "foo"], ["--prompts", "missing.txt"], ["--top-p", "0"], ["--max-tokens", "0"]],
    ids=lambda arguments: arguments[0],
)
def test_wrong_settings_are_said_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    prompt = [] if "--prompts" in arguments else ["--prompt", "a"]
    assert generate.main(["nowhere", *prompt, *arguments]) == 2
    assert capsys.readouterr().err.startswith("DecodeError: ")


def test_a_model_without_feedback(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(trained.plain_run), "--prompt", "a", "--mode", "soft"]) == 2
    assert "mode=soft: the model was trained without feedback" in capsys.readouterr().err
    assert lines_of(capsys, trained.plain_run, "--prompt", "a", "--max-tokens", 2)[0]["mode"] == "standard"
    assert generate.main(["nowhere", "--prompt", "a"]) == 4
