"""Imports: an export comes back bit for bit; Llama and Qwen3 models become checkpoints with the same logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fbt_megatron.checkpoint.reading import open_weights
from fbt_megatron.errors import CheckpointError, ConfigError
from fbt_megatron.hf.export import export_checkpoint
from fbt_megatron.hf.importing import import_model
from fbt_megatron.hf.model_config import exported_config, model_config
from fbt_megatron.planner import logical_tensors
from tests.hf.models import (
    ARCHITECTURES,
    config_of,
    draw_model,
    load_model,
    random_tokens,
    rows_of,
    save_model,
    trainer_logits,
)
from tools.convert_from_hf import main

SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 91,
    "rms_norm_eps": 2e-4,
    "initializer_range": 0.2,
}


def same_files(first: Path, second: Path) -> bool:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    return [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_export_import_export(topology, tmp_path: Path, name: str, dtype: str) -> None:
    config = config_of(name, vocab_size=257 if name == "windowed" else 131)
    run = save_model(tmp_path / "run", draw_model(config, topology), config, topology)
    named = None if name == "windowed" else "none"
    export_checkpoint(run, tmp_path / "out", dtype=dtype, tokenizer=named, max_shard_bytes=20_000)
    import_model(tmp_path / "out", tmp_path / "again")
    export_checkpoint(tmp_path / "again", tmp_path / "out2", tokenizer=named, max_shard_bytes=20_000)
    assert same_files(tmp_path / "out", tmp_path / "out2")
    before, after = open_weights(run), open_weights(tmp_path / "again")
    assert after.config.model == before.config.model
    assert after.config.feedback.fusion == before.config.feedback.fusion
    assert after.manifest.step == 0
    for tensor in logical_tensors(config.model, config.feedback):
        expected = before.read(tensor).to(getattr(torch, dtype)).float()
        assert torch.equal(after.read(tensor), expected)


def stock_model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(5)
    config_class, model_class = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }[kind]
    model: Any = model_class(config_class(**(SMALL | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 733.0}}),
    "llama tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 6}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3 with windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_models(topology, tmp_path: Path, name: str) -> None:
    kind, changes = STOCK[name]
    model = stock_model(kind, **changes)
    model.save_pretrained(tmp_path / "model")
    summary = import_model(tmp_path / "model", tmp_path / "run")
    assert summary.fresh == ("embedding_norm.weight", "fusion.w_u.weight", "fusion.w_g.weight")
    trainer = load_model(tmp_path / "run", topology)
    tokens = random_tokens(60, 40, 40)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits
    assert float((trainer_logits(trainer, rows_of(tokens)) - expected).abs().max()) < 1e-4
    assert trainer.model.seq_length == 91
    # A second pass is the new fusion's; its inputs are as large as plain ones.
    scale = float(model.get_input_embeddings().weight.detach().square().mean().sqrt())
    weights = open_weights(tmp_path / "run")
    config = weights.config
    drawn = {tensor.name: weights.read(tensor) for tensor in logical_tensors(config.model, config.feedback)}
    assert torch.allclose(drawn["embedding_norm.weight"], torch.tensor(scale))
    assert float(drawn["fusion.w_u.weight"].std()) == pytest.approx(0.2, rel=0.1)
    assert not torch.equal(trainer_logits(trainer, rows_of(tokens), 2), trainer_logits(trainer, rows_of(tokens)))


def test_a_stock_model_there_and_back(topology, tmp_path: Path) -> None:
    """The plain export of an imported model has the stock model's weights again, bit for bit."""
    model = stock_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "run", fusion="add")
    export_checkpoint(tmp_path / "run", tmp_path / "out", kind="qwen3", tokenizer="none")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)


@pytest.mark.parametrize(
    ("kind", "changes", "key"),
    [
        ("llama", {"model_type": "mistral"}, "model_type='mistral'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling="),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rope_type='llama3'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers=None: must be a number"),
        ("llama", {"hidden_size": "24"}, "hidden_size='24': must be a number"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention"),
        ("llama", {"head_dim": 7}, "model.head_dim=7"),
        ("llama", {"dtype": "float64"}, "dtype='float64'"),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            },
            "layer_types=",
        ),
        ("qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, "layer_types="),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_this_project_has_not(tmp_path: Path, kind: str, changes: dict[str, Any], key: str) -> None:
    """Each is refused by name before a weight is read: the folder has none."""
    base = SMALL | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(base | changes))
    with pytest.raises(ConfigError) as caught:
        import_model(tmp_path, tmp_path / "run")
    assert any(key in problem for problem in caught.value.problems)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fusion": "sum"}, 'feedback.fusion="sum": must be one of glu, concat, add, none'),
        ({"fusion": None}, "feedback.fusion=null: must be one of glu, concat, add, none"),
        ({"residual_scale": "sum"}, 'model.residual_scale="sum": must be one of depth, none'),
        ({"sliding_window": 0}, "model.sliding_window=0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_values_that_no_fbt_has(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    config = config_of("windowed")
    exported = exported_config(config.model, config.feedback.fusion)
    assert model_config(exported, source="it") == (replace(config.model, kernels="auto"), "glu")
    (tmp_path / "config.json").write_text(json.dumps(exported | changes))
    with pytest.raises(ConfigError) as caught:
        import_model(tmp_path, tmp_path / "run")
    assert any(problem in found for found in caught.value.problems), caught.value.problems
    assert not (tmp_path / "run").exists()


def test_folders_that_are_not_their_configuration(topology, tmp_path: Path) -> None:
    config = config_of("bare")
    run = save_model(tmp_path / "run", draw_model(config, topology), config, topology)
    export_checkpoint(run, tmp_path / "out", tokenizer="none")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)

    def refused(changed: dict[str, torch.Tensor], match: str) -> None:
        save_file(changed, file)
        with pytest.raises(CheckpointError, match=match):
            import_model(tmp_path / "out", tmp_path / "again")
        assert not (tmp_path / "again").exists()

    refused({name: value for name, value in tensors.items() if "w_u" not in name}, r"lacks model\.fusion\.w_u\.weight")
    refused({**tensors, "more": torch.ones(2)}, "beside what its config.json says, more")
    refused({**tensors, "model.norm.weight": torch.ones(5)}, r"model\.norm\.weight has shape \(5,\) instead of \(24,\)")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_model(tmp_path / "out", tmp_path / "again")
    file.unlink()
    with pytest.raises(CheckpointError, match="holds neither"):
        import_model(tmp_path / "out", tmp_path / "again")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        import_model(tmp_path / "none", tmp_path / "again")
    with pytest.raises(ConfigError, match="Leave --fusion out"):
        import_model(tmp_path / "out", tmp_path / "again", fusion="glu")


def test_a_tied_head_that_is_stored_as_well(topology, tmp_path: Path) -> None:
    """It is taken where it is the embedding, and refused where it is not."""
    stock_model("qwen3", tie_word_embeddings=True).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, file)
    import_model(tmp_path / "model", tmp_path / "run")
    save_file({**tensors, "lm_head.weight": head + 1.0}, file)
    with pytest.raises(CheckpointError, match=r"beside what its config\.json says, lm_head\.weight"):
        import_model(tmp_path / "model", tmp_path / "run2")


def test_the_tool(topology, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stock_model("llama").save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "model"), str(tmp_path / "run")]
    assert main([*arguments, "--fusion", "concat", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["model_type"], summary["fresh"]) == ("llama", ["embedding_norm.weight", "fusion.w.weight"])
    assert main(arguments) == 4
    assert "is there already" in capsys.readouterr().err
    assert main([arguments[0], str(tmp_path / "two"), "--fusion", "none"]) == 0
    assert "checkpoint.load=" in capsys.readouterr().out


def test_precision_of_a_half_precision_model(tmp_path: Path) -> None:
    model = stock_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    import_model(tmp_path / "model", tmp_path / "run")
    weights = open_weights(tmp_path / "run")
    assert weights.config.parallel.precision == "bf16"
    embedding = logical_tensors(weights.config.model, replace(weights.config.feedback))[0]
    assert torch.equal(weights.read(embedding), model.get_input_embeddings().weight.float())
