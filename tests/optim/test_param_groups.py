"""Every parameter is in exactly one group, for a reason that is stated; mistakes are errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import Parameter

from fbt_megatron.config.schema import AdamConfig, NorMuonConfig, OptimizerConfig
from fbt_megatron.errors import TopologyError
from fbt_megatron.optim.param_groups import format_groups, list_groups, split_parameters
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect
from tests.optim import world

CONFIG = OptimizerConfig(normuon=NorMuonConfig(weight_decay=0.01), adam=AdamConfig(weight_decay=0.002))


def model(tp: int = 1, tp_rank: int = 0) -> tuple[dict[str, ParameterLayout], dict[str, Parameter]]:
    layouts = world.layouts(world.Shape(), tp=tp, tp_rank=tp_rank)
    return layouts, {name: Parameter(torch.zeros(layout.shape)) for name, layout in layouts.items()}


def test_groups_are_disjoint_and_complete():
    layouts, params = model()
    matrices, others = split_parameters(layouts, params)
    assert {id(p) for p in matrices} | {id(p) for p in others} == {id(p) for p in params.values()}
    assert len(matrices) + len(others) == len(params)
    names = {id(param): name for name, param in params.items()}
    assert {names[id(p)] for p in others} == {
        "embedding.weight",
        "embedding_norm.weight",
        "final_norm.weight",
        "layers.0.attention_norm.weight",
        "layers.1.attention_norm.weight",
    }
    assert {"fusion.w_u.weight", "fusion.w_g.weight", "layers.0.attention.qkv", "layers.1.mlp.fc1"} <= {
        names[id(p)] for p in matrices
    }


def test_untied_head_belongs_to_adam():
    layouts, params = model()
    head = LogicalTensor("head.weight", (13, 12), ParamKind.HEAD)
    layouts["head.weight"] = ParameterLayout("head.weight", (16, 12), ((head, (Block(Rect(0, 0, 13, 12), 0, 0),)),))
    params["head.weight"] = Parameter(torch.zeros(16, 12))
    _, others = split_parameters(layouts, params)
    assert any(param is params["head.weight"] for param in others)
    entry = next(e for e in list_groups(layouts.values(), CONFIG) if e.tensor.name == "head.weight")
    assert (entry.group, entry.weight_decay) == ("adam", 0.002)


@pytest.mark.parametrize(("tp", "tp_rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_listing_is_the_same_in_every_layout(tp, tp_rank):
    layouts, _ = model(tp, tp_rank)
    entries = list_groups(layouts.values(), CONFIG)
    assert {e.tensor.name: e for e in entries} == {e.tensor.name: e for e in list_groups(model()[0].values(), CONFIG)}
    assert len(entries) == len({e.tensor.name for e in entries}) == 3 + 2 + 2 * 9
    hidden, ffn = 12, 20
    per_layer = hidden + (16 + 8 + 8 + 8) * hidden + hidden * 16 + 3 * ffn * hidden
    assert sum(e.tensor.numel for e in entries) == 13 * hidden + 2 * hidden + 2 * hidden**2 + 2 * per_layer


def test_vectors_never_decay_and_matrices_do():
    entries = {e.tensor.name: e for e in list_groups(model()[0].values(), CONFIG)}
    assert entries["final_norm.weight"].weight_decay == 0.0
    assert entries["embedding.weight"].weight_decay == 0.002
    assert entries["layers.0.attention.k.weight"].weight_decay == 0.01
    assert entries["fusion.w_g.weight"].group == "normuon"


def test_copy_of_a_tied_embedding_is_listed_once():
    layouts, _ = model()
    layouts["copy"] = replace(layouts["embedding.weight"], name="copy", tied_copy=True)
    assert [e.tensor.name for e in list_groups(layouts.values(), CONFIG)].count("embedding.weight") == 1


def test_table_shows_name_kind_shape_group_decay_and_use():
    lines = format_groups(list_groups(model()[0].values(), CONFIG)).splitlines()
    assert lines[0].split() == ["name", "kind", "shape", "group", "decay", "steps"]
    rows = [" ".join(line.split()) for line in lines]
    assert "fusion.w_u.weight matrix 12 x 12 normuon 0.01 feedback" in rows
    assert "final_norm.weight vector 12 adam 0 all" in rows


def test_parameter_without_a_layout_is_an_error():
    layouts, params = model()
    params["layers.0.mlp.fc_renamed"] = params.pop("layers.0.mlp.fc1")
    with pytest.raises(ValueError, match=r"fc_renamed.*no layout") as error:
        split_parameters(layouts, params)
    assert "layers.0.mlp.fc1: has a layout but no parameter" in str(error.value)


def test_shape_that_contradicts_the_kind_or_the_layout_is_an_error():
    layouts, params = model()
    wrong = LogicalTensor("final_norm.weight", (12, 1), ParamKind.MATRIX)
    layouts["final_norm.weight"] = replace(
        layouts["final_norm.weight"], blocks=((wrong, layouts["final_norm.weight"].blocks[0][1]),)
    )
    params["embedding.weight"] = Parameter(torch.zeros(13, 12))
    with pytest.raises(ValueError, match="its layout says") as error:
        split_parameters(layouts, params)
    assert "final_norm.weight" in str(error.value)


def test_parameter_that_mixes_use_is_an_error():
    layouts, params = model()
    (gate, gate_blocks), up = layouts["layers.0.mlp.fc1"].blocks
    mixed = replace(layouts["layers.0.mlp.fc1"], blocks=((replace(gate, feedback=True), gate_blocks), up))
    layouts["layers.0.mlp.fc1"] = mixed
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.fc1: must store tensors of exactly one kind"):
        split_parameters(layouts, params)


def test_one_object_under_two_names_is_an_error():
    layouts, params = model()
    params["fusion.w_u.weight"] = params["fusion.w_g.weight"]
    with pytest.raises(ValueError, match="two names"):
        split_parameters(layouts, params)


@pytest.mark.parametrize(("keep_matrices", "rule"), [(True, "adam"), (False, "normuon")])
def test_empty_group_names_the_remedy(keep_matrices, rule):
    layouts, params = model()
    layouts = {name: layout for name, layout in layouts.items() if world.is_matrix(layout) == keep_matrices}
    with pytest.raises(TopologyError, match=rf"{rule}.*parallel\.pipeline"):
        split_parameters(layouts, {name: params[name] for name in layouts})
