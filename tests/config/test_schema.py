"""The surface of the configuration: defaults that are valid, keys that cannot vanish, and their documentation."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.typed_values import known_keys
from tools import write_config_docs

ROOT = Path(__file__).parents[2]

# Other programs read and set these; a key is renamed or dropped only on purpose, here as well.
KEYS = {
    "model": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim vocab_size "
    "seq_length rope_theta norm_eps init_std qk_norm attention_gate sliding_window full_attention_every post_norm "
    "residual_scale embedding_norm tie_embeddings kernels",
    "feedback": "fusion jitter loss_weight loss_reduction prefix_mixin schedule",
    "optimizer": "normuon adam grad_clip",
    "optimizer.normuon": "lr weight_decay momentum beta2 nesterov scale ns_steps coefficients row_norm",
    "optimizer.adam": "lr betas eps weight_decay",
    "lr_schedule": "warmup_steps cooldown_fraction cooldown_shape min_lr_ratio",
    "loss": "z_loss z_loss_when",
    "parallel": "tensor pipeline sequence zero_stage precision recompute",
    "data": "train validation streams reset_attention_mask on_error",
    "train": "steps global_batch_size micro_batch_size seed run_dir",
    "checkpoint": "every keep keep_every async load",
    "evaluation": "every batches extra_passes",
}


def test_keys_that_other_programs_use_exist():
    known = set(known_keys(RunConfig))
    used = {f"{section}.{key}" for section, keys in KEYS.items() for key in keys.split()}
    assert used <= known


@pytest.mark.parametrize("section", [field.name for field in dataclasses.fields(RunConfig)])
def test_defaults_of_a_section_are_valid(section):
    problems = list(getattr(RunConfig(), section).problems())
    assert problems == (["train is empty: name a data set folder or shards."] if section == "data" else [])


def test_documentation_is_up_to_date():
    page = ROOT / "docs/configuration.md"
    assert page.read_text(encoding="utf-8") == write_config_docs.render(), "run python tools/write_config_docs.py"


def test_documentation_of_launch_files_is_up_to_date():
    page = ROOT / "docs/slurm_configuration.md"
    expected = write_config_docs.render_launch()
    assert page.read_text(encoding="utf-8") == expected, "run python tools/write_config_docs.py ... --launch"


def test_documentation_covers_every_key():
    page = write_config_docs.render()
    assert all(f"`{key.rpartition('.')[2]}`" in page or f"## `{key}`" in page for key in known_keys(RunConfig))


def test_documentation_tool_writes_and_checks(tmp_path, capsys):
    page = tmp_path / "page.md"
    assert write_config_docs.main([str(page), "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert not page.exists()
    assert write_config_docs.main([str(page)]) == 0
    assert write_config_docs.main([str(page), "--check"]) == 0
    page.write_text(page.read_text() + "x")
    assert write_config_docs.main([str(page), "--check"]) == 1
