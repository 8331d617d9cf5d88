"""Parameter counts, pass plans and token equivalents against numbers worked out by hand, and the tool."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fbt_megatron.config.loader import load_config
from fbt_megatron.config.schema import FeedbackConfig, ModelConfig, SchedulePhase
from fbt_megatron.errors import ConfigError, TopologyError
from fbt_megatron.parallel.logical_tensor import ParamKind
from fbt_megatron.planner import (
    count_parameters,
    format_dry_run,
    logical_tensors,
    plan_budget,
    plan_run,
    schedule_of_shares,
)
from tools import plan_passes

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("name", "count"), [("fbt_1b", 1_122_198_528), ("baseline_1b", 1_117_479_936)])
def test_parameters_of_the_paper_model(name, count):
    assert count_parameters(load_config(ROOT / f"configs/{name}.yaml")) == count


@pytest.mark.parametrize("name", ["fbt_125m", "fbt_350m"])
def test_the_comment_of_a_shipped_file_states_its_parameters(name):
    path = ROOT / f"configs/{name}.yaml"
    assert f"{count_parameters(load_config(path)):,} parameters" in path.read_text()


def test_tensors_of_a_small_model_by_hand():
    model = ModelConfig(
        num_layers=1,
        hidden_size=6,
        ffn_hidden_size=10,
        num_attention_heads=4,
        num_query_groups=2,
        head_dim=2,
        vocab_size=7,
    )
    found = {tensor.name: tensor for tensor in logical_tensors(model, FeedbackConfig())}
    layer = {
        "attention_norm": (6,),
        "attention.q": (8, 6),
        "attention.k": (4, 6),
        "attention.v": (4, 6),
        "attention.gate": (4, 6),
        "attention.q_norm": (2,),
        "attention.k_norm": (2,),
        "attention.output": (6, 8),
        "attention_post_norm": (6,),
        "mlp_norm": (6,),
        "mlp.gate": (10, 6),
        "mlp.up": (10, 6),
        "mlp.down": (6, 10),
        "mlp_post_norm": (6,),
    }
    expected = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"embedding.weight": (7, 6), "embedding_norm.weight": (6,), "final_norm.weight": (6,)}
    expected |= {"fusion.w_u.weight": (6, 6), "fusion.w_g.weight": (6, 6)}
    assert {name: tensor.shape for name, tensor in found.items()} == expected
    kinds = {name: ParamKind.MATRIX if len(shape) == 2 else ParamKind.VECTOR for name, shape in expected.items()}
    kinds["embedding.weight"] = ParamKind.EMBEDDING
    assert {name: tensor.kind for name, tensor in found.items()} == kinds
    assert {name for name, tensor in found.items() if tensor.feedback} == {"fusion.w_u.weight", "fusion.w_g.weight"}


@pytest.mark.parametrize(
    ("fusion", "embedding_norm", "expected"),
    [
        ("none", False, {}),
        ("none", True, {"embedding_norm.weight": False}),
        ("glu", True, {"embedding_norm.weight": False, "fusion.w_u.weight": True, "fusion.w_g.weight": True}),
        ("glu", False, {"embedding_norm.weight": True, "fusion.w_u.weight": True, "fusion.w_g.weight": True}),
        ("add", True, {"embedding_norm.weight": False, "fusion.w_u.weight": True, "fusion.w_e.weight": True}),
        ("concat", True, {"embedding_norm.weight": False, "fusion.w.weight": True}),
    ],
)
def test_which_tensors_only_feedback_uses(fusion, embedding_norm, expected):
    tensors = logical_tensors(ModelConfig(embedding_norm=embedding_norm), FeedbackConfig(fusion=fusion))
    found = {tensor.name: tensor.feedback for tensor in tensors if tensor.name.startswith(("embedding_norm", "fusion"))}
    assert found == expected
    assert not any(tensor.feedback for tensor in tensors if tensor.name not in expected)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tie_embeddings": False}, {"head.weight"}),
        ({"attention_gate": False}, {"layers.0.attention.gate.weight"}),
        ({"qk_norm": False}, {"layers.0.attention.q_norm.weight", "layers.0.attention.k_norm.weight"}),
        ({"post_norm": False}, {"layers.0.attention_post_norm.weight", "layers.0.mlp_post_norm.weight"}),
    ],
)
def test_optional_parts_come_and_go(change, names):
    base = ModelConfig(num_layers=1)
    before, after = (
        {tensor.name for tensor in logical_tensors(model, FeedbackConfig())}
        for model in (base, dataclasses.replace(base, **change))
    )
    assert before ^ after == names


@pytest.mark.parametrize(
    ("tokens", "shares", "equivalents"),
    [
        (200_000_000_000, [75, 22, 3], 256_000_000_000),
        (400_000_000_000, [75, 22, 3], 512_000_000_000),
        (100_000_000_000, [75, 0, 25], 150_000_000_000),
        (10_000_000_000, [0, 0, 100], 30_000_000_000),
        (1_000_000, [100], 1_000_000),
    ],
)
def test_token_equivalents_of_a_budget(tokens, shares, equivalents):
    budget = plan_budget(tokens, shares, batch_tokens=300_000)
    assert budget.token_equivalents == equivalents
    assert sum(budget.tokens.values()) == tokens
    steps = round(tokens / 300_000)
    assert sum(budget.steps.values()) == steps
    for passes, share in enumerate(shares, start=1):
        assert abs(budget.steps[passes] - steps * share / 100) < 1.5
    assert [phase.first for phase in budget.phases] == [1, *(phase.last + 1 for phase in budget.phases[:-1])]
    assert budget.phases[-1].last == steps


def test_shares_become_the_phases_of_a_configuration():
    assert schedule_of_shares([75, 22, 3]) == (SchedulePhase(0.75, {1: 1.0}), SchedulePhase(1.0, {2: 0.88, 3: 0.12}))
    assert schedule_of_shares([0, 0, 100]) == (SchedulePhase(1.0, {3: 1.0}),)
    assert schedule_of_shares([100]) == (SchedulePhase(1.0, {1: 1.0}),)


@pytest.mark.parametrize(
    ("tokens", "shares", "batch", "fragment"),
    [
        (10**9, [75, 22], 1000, "shares=75/22: must not be negative and must add up to 100"),
        (10**9, [150, -50], 1000, "must not be negative"),
        (999, [100], 1000, "tokens=999: must be at least one batch"),
        (999, [100], 0, "batch tokens=0: must be at least 1"),
    ],
)
def test_impossible_budgets(tokens, shares, batch, fragment):
    with pytest.raises(ConfigError, match=fragment):
        plan_budget(tokens, shares, batch_tokens=batch)


def test_plan_of_the_paper_run():
    budget = plan_run(load_config(ROOT / "configs/fbt_1b.yaml"))
    assert budget.batch_tokens == 327_680
    assert sum(budget.steps.values()) == 610_352
    assert budget.token_equivalents == pytest.approx(256e9, rel=1e-5)
    assert [(phase.first, phase.last) for phase in budget.phases] == [(1, 457_764), (457_765, 610_352)]


def test_quickstart_runs_one_two_and_three_passes():
    steps = plan_run(load_config(ROOT / "configs/quickstart.yaml")).steps
    assert set(steps) == {1, 2, 3}
    assert min(steps.values()) >= 5


def test_dry_run_names_layout_parameters_and_passes():
    text = format_dry_run(load_config(ROOT / "configs/fbt_1b.yaml"), 8)
    for fragment in (
        "1,122,198,528",
        "8 processes = tensor 1 x pipeline 1 x data 8",
        "per rank and step: 5 micro-batches of 1 rows",
        "40 streams, 5 on each data-parallel rank",
        "457,764",
        "full_attention_every: 6",
    ):
        assert fragment in text


def test_dry_run_refuses_a_layout_that_does_not_fit():
    with pytest.raises(TopologyError, match="data 3"):
        format_dry_run(load_config(ROOT / "configs/fbt_1b.yaml"), 3)


def run_tool(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `tools/plan_passes.py`."""
    try:
        status = plan_passes.main(list(arguments))
    except SystemExit as stop:  # how argparse refuses arguments
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_tool_prints_one_json_object(capsys):
    status, out, _ = run_tool(capsys, "--tokens", "200e9", "--shares", "75/22/3", "--batch-tokens", "300000", "--json")
    assert status == 0
    plan = json.loads(out)
    assert plan["token_equivalents"] == 256_000_000_000
    assert plan["tokens"] == {"1": 150_000_000_000, "2": 44_000_000_000, "3": 6_000_000_000}
    assert plan["steps"] == {"1": 500_000, "2": 146_667, "3": 20_000}


@pytest.mark.parametrize(("name", "start"), [("plan.png", b"\x89PNG"), ("plan.PDF", b"%PDF"), ("plan.svg", b"<?xml")])
def test_tool_plans_a_configuration_and_draws_it(capsys, tmp_path, name, start):
    picture = tmp_path / name
    config = str(ROOT / "configs/quickstart.yaml")
    status, out, _ = run_tool(capsys, "--config", config, "train.steps=100", "--plot", str(picture))
    assert status == 0
    assert picture.read_bytes().startswith(start)
    assert "token equivalents" in out


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--tokens", "1e9", "--shares", "75/22"], "must add up to 100"),
        (["--tokens", "many", "--shares", "100"], "'many' is not a number"),
        (["--tokens", "1.5", "--shares", "100"], "must be a whole number"),
        (["--tokens", "1e9", "--shares", "75/nan"], "'nan' is not a number"),
        (["--tokens", "1e9"], "--tokens needs --shares"),
        (["--tokens", "1e9", "--shares", "100", "train.steps=3"], "takes no section.key=value"),
        (["--config", "x.yaml", "--shares", "100"], "--shares goes with --tokens"),
        (["--config", "x.yaml", "--batch-tokens", "300000"], "--batch-tokens goes with --tokens"),
        (["--config", "missing.yaml"], "No such file"),
        (["--config", "missing.yaml", "--plot", "x.foo"], "x.foo: the name must end in .png or .pdf or .svg"),
        (["--config", "missing.yaml", "--plot", "x"], "x: the name must end in"),
        (["--tokens", "1e9", "--shares", "100", "--plot", "/nonexistent/p.png"], "cannot be written"),
    ],
)
def test_tool_refuses_bad_input(capsys, arguments, fragment):
    status, out, err = run_tool(capsys, *arguments)
    assert status != 0
    assert fragment in err
    assert out == ""
