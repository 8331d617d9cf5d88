"""From a Hugging Face model to fine-tuning on conversations and back, as docs/fine_tuning.md has it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from tests.data.chats import CHATML_TOKENS, QWEN3, bpe, chat, write_lines, write_tokenizer
from tests.pretrain.runs import pretrain, records, write_config
from tools import convert_from_hf, convert_to_hf

pytestmark = pytest.mark.training

ANSWERS = {"two plus two?": "Four.", "the capital of France?": "Paris, of course."}


def stock_model(folder: Path) -> Path:
    """A Qwen3 with random weights, its tokenizer and template, with more ids than that has, as all of them."""
    torch.manual_seed(5)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_tokenizer(folder, bpe(CHATML_TOKENS), QWEN3, **names)
    return folder


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Of one and two answers."""
    draw = random.Random(seed)
    asked = [[draw.choice(list(ANSWERS)) for _ in range(draw.choice((1, 2)))] for _ in range(count)]
    return [chat(*[text for question in questions for text in (question, ANSWERS[question])]) for questions in asked]


def test_from_hugging_face_and_back(tmp_path: Path) -> None:
    model = stock_model(tmp_path / "model")
    assert convert_from_hf.main([str(model), str(tmp_path / "start")]) == 0
    imported = yaml.safe_load((tmp_path / "start" / "config.yaml").read_text())["model"]
    write_lines(tmp_path / "chats.jsonl", conversations(200, 1))
    write_lines(tmp_path / "held_out.jsonl", conversations(10, 2))
    config = write_config(tmp_path / "run.yaml", tmp_path, {"model": {**imported, "seq_length": 128}})
    tuned = pretrain(
        config,
        tmp_path / "tuned",
        "data.kind=chat",
        f"data.train={tmp_path}/chats.jsonl",
        f"data.validation={tmp_path}/held_out.jsonl",
        f"data.tokenizer={tmp_path}/start/tokenizer",
        f"checkpoint.load={tmp_path}/start",
        "checkpoint.load_weights_only=true",
        "checkpoint.every=80",
        "feedback.schedule=[{until: 1.0, mix: {2: 0.5, 3: 0.5}}]",
        "train.steps=80",
        "optimizer.adam.lr=0.01",
        "optimizer.normuon.lr=0.02",
        "evaluation.every=80",
        timeout=600.0,
    ).check()
    assert "weights alone from " in tuned.output
    assert tuned.output.count("1 answer is not trained") <= 2  # by the readers of training and of validation
    assert "1 answer is not trained" in tuned.output
    validations = [record for record in records(tmp_path / "tuned") if record.get("kind") == "validation"]
    for name in ("val_loss_pass_1", "val_loss_pass_2"):
        assert validations[-1][name] < 0.2 * validations[0][name]

    answers: dict[str, list[str]] = {}
    for name, options in (("fbt", []), ("qwen3", ["--as", "qwen3"])):
        assert convert_to_hf.main([str(tmp_path / "tuned"), str(tmp_path / name), *options]) == 0
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=name == "fbt")
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name, trust_remote_code=name == "fbt")
        for question in ANSWERS:
            prompt = tokenizer.apply_chat_template(
                chat(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = exported.generate(**prompt, max_new_tokens=60, do_sample=False)[0]
            answers.setdefault(question, []).append(tokenizer.decode(ids[prompt["input_ids"].shape[1] :]))
    assert answers == {
        question: [f"<think>\n\n</think>\n\n{answer}<|im_end|>"] * 2 for question, answer in ANSWERS.items()
    }
