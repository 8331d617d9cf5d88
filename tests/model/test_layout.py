"""Every stored parameter is the right part of the right whole matrix, in every layout, with the same initial values."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from fbt_megatron.config.schema import FeedbackConfig, ModelConfig, ParallelConfig, RunConfig
from fbt_megatron.model.builder import build_model
from fbt_megatron.model.fbt_model import FBTModel
from fbt_megatron.model.initialization import draw_tensor
from fbt_megatron.model.layout import padded_vocab_size, parameter_layouts
from fbt_megatron.model.noise import FeedbackNoise
from fbt_megatron.parallel.logical_tensor import LogicalTensor, ParamKind, Rect, pieces_of
from fbt_megatron.parallel.topology import ParallelTopology, build_topology, shutdown_distributed
from tests.distributed import run_distributed
from tests.model.toy import batch_of, random_rows, run_passes, tiny_config, whole_tensors

NOISE = FeedbackNoise(seed=5, jitter=0.1, prefix_mixin="document")
PLAIN_EMBEDDING = {"embedding_norm": False, "tie_embeddings": False, "num_layers": 2}
Part = tuple[str, tuple[int, ...], Rect, np.ndarray]


def stored_parts(model: FBTModel, config: RunConfig, topology: ParallelTopology, *, gradients: bool) -> list[Part]:
    """(name, whole shape, place, values) of each piece that this rank stores."""
    parts = []
    parameters = dict(model.named_parameters())
    for name, layout in parameter_layouts(model, config, topology).items():
        tensor = parameters[name].grad if gradients else parameters[name].detach()
        if tensor is not None:
            for piece in pieces_of(layout):
                values = piece.view(tensor.contiguous().view(-1)).numpy().copy()  # tensors do not outlive their process
                parts.append((piece.tensor.name, piece.tensor.shape, piece.place, values))
    return parts


def assemble(parts_of_ranks: list[list[Part]]) -> dict[str, Tensor]:
    """Whole tensors; fails where parts overlap with other values, or leave a gap."""
    whole: dict[str, Tensor] = {}
    for name, shape, place, array in (part for parts in parts_of_ranks for part in parts):
        values = torch.from_numpy(array)
        target = whole.setdefault(name, torch.full(shape, torch.nan))
        view = target.view(-1, shape[-1])[place.row : place.row + place.rows, place.col : place.col + place.cols]
        assert bool((view.isnan() | (view == values)).all()), f"{name}: copies differ"
        view.copy_(values)
    assert not [name for name, tensor in whole.items() if tensor.isnan().any()]
    return {name: tensor.double() for name, tensor in whole.items()}


def test_stored_matrices_are_those_cut_out_by_hand(topology: ParallelTopology) -> None:
    config = tiny_config()
    model = build_model(config, topology)
    by_hand, by_layout = whole_tensors(model), assemble([stored_parts(model, config, topology, gradients=False)])
    assert by_hand.keys() == by_layout.keys()
    assert all(torch.equal(by_hand[name], by_layout[name]) for name in by_hand)


@pytest.mark.parametrize(
    ("options", "kinds", "feedback"),
    [
        ({}, {"embedding": 1, "matrix": 26, "vector": 20}, {"fusion.w_u.weight", "fusion.w_g.weight"}),
        (
            {"fusion": "concat", "embedding_norm": False, "tie_embeddings": False},
            {"embedding": 1, "head": 1, "matrix": 25, "vector": 20},
            {"fusion.w.weight", "embedding_norm.weight"},
        ),
        ({"fusion": "none"}, {"embedding": 1, "matrix": 24, "vector": 20}, set()),
    ],
)
def test_kinds_and_feedback_marks(
    topology: ParallelTopology, options: dict[str, object], kinds: dict[str, int], feedback: set[str]
) -> None:
    """Per layer q, k, v, gate, output, gate, up, down, and six norms; two more norms outside."""
    config = tiny_config(**options)
    layouts = parameter_layouts(build_model(config, topology), config, topology)
    tensors = {tensor.name: tensor for layout in layouts.values() for tensor in layout.tensors}
    counted: dict[str, int] = defaultdict(int)
    for tensor in tensors.values():
        counted[tensor.kind.value] += 1
    assert counted == kinds
    assert {name for name, tensor in tensors.items() if tensor.feedback} == feedback
    replicated = {name for name, layout in layouts.items() if layout.replicated}
    assert replicated == {name for name, layout in layouts.items() if len(layout.shape) == 1}


def test_initial_values_depend_on_seed_and_name_only(topology: ParallelTopology) -> None:
    config = tiny_config(embedding_norm=False)
    model = build_model(config, topology)
    weights = whole_tensors(model)
    for name, weight in weights.items():
        kind = ParamKind.VECTOR if weight.ndim == 1 else ParamKind.MATRIX
        drawn = draw_tensor(LogicalTensor(name, tuple(weight.shape), kind), seed=7, init_std=0.2)
        assert torch.equal(weight, drawn.double())
    deeper = build_model(tiny_config(num_layers=5), topology)
    assert torch.equal(whole_tensors(deeper)["layers.1.mlp.up.weight"], weights["layers.1.mlp.up.weight"])
    other = build_model(replace(config, train=replace(config.train, seed=8)), topology)
    assert not torch.equal(whole_tensors(other)["layers.1.mlp.up.weight"], weights["layers.1.mlp.up.weight"])
    assert torch.count_nonzero(model.embedding.weight[60:]) == 0


def test_initial_values_have_the_configured_deviation() -> None:
    drawn = draw_tensor(LogicalTensor("layers.0.mlp.up.weight", (256, 256), ParamKind.MATRIX), seed=1, init_std=0.02)
    assert float(drawn.std()) == pytest.approx(0.02, rel=0.02)
    assert float(drawn.mean()) == pytest.approx(0.0, abs=3e-4)
    norm = draw_tensor(LogicalTensor("final_norm.weight", (8,), ParamKind.VECTOR), seed=1, init_std=0.02)
    assert torch.equal(norm, torch.ones(8))


def test_unknown_and_misshapen_parameters_are_errors(topology: ParallelTopology) -> None:
    config = tiny_config()
    model = build_model(config, topology)
    model.extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="extra is not in the tables"):
        parameter_layouts(model, config, topology)
    del model.extra
    wider = replace(config, model=replace(config.model, ffn_hidden_size=48))
    with pytest.raises(ValueError, match="covers"):
        parameter_layouts(model, wider, topology)


@pytest.mark.parametrize(
    ("vocab_size", "tp_size", "padded"), [(100352, 8, 100352), (60, 1, 128), (60, 4, 512), (257, 2, 512)]
)
def test_padded_vocabulary(vocab_size: int, tp_size: int, padded: int) -> None:
    assert padded_vocab_size(vocab_size, tp_size=tp_size) == padded


def test_parameters_of_the_paper_model(topology: ParallelTopology) -> None:
    """24 x (attention, MLP, norms) + embedding + norms + fusion, counted on the meta device and by hand."""
    model = ModelConfig(
        num_layers=24,
        hidden_size=1536,
        ffn_hidden_size=6656,
        num_attention_heads=16,
        num_query_groups=8,
        head_dim=128,
        vocab_size=100352,
        sliding_window=2048,
        full_attention_every=6,
    )
    hidden = 1536
    attention = hidden * (16 + 2 * 8) * 128 + 16 * 128 * hidden + 16 * hidden + 2 * 128
    layer = attention + 3 * hidden * 6656 + 4 * hidden
    plain = 24 * layer + 100352 * hidden + 2 * hidden
    for fusion, expected in (("glu", 1_122_198_528), ("none", 1_117_479_936)):
        config = RunConfig(model=model, feedback=FeedbackConfig(fusion=fusion))
        built = build_model(config, topology, device=torch.device("meta"))
        count = sum(parameter.numel() for parameter in built.parameters())
        assert count == expected == plain + (2 * hidden * hidden if fusion == "glu" else 0)


def _gradients_at_tp2(rank: int) -> list[tuple[float, list[Part], list[Part]]]:
    """Loss sum of two passes, weights and gradients, in each of `_tp2_layouts`."""
    results = []
    rows = random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14])
    for parallel in _tp2_layouts():
        topology = build_topology(parallel)
        config = tiny_config(parallel=parallel, vocab_size=200)
        model = build_model(config, topology)
        outputs = run_passes(model, batch_of(model, rows), 2, NOISE)
        total = sum(out.losses.ce_sum + 1e-2 * out.losses.z_sum for out in outputs)
        total.backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=topology.pg.tp)
        weights, gradients = (stored_parts(model, config, topology, gradients=flag) for flag in (False, True))
        results.append((float(total.detach()), weights, gradients))
    shutdown_distributed()
    return results


def _tp2_layouts() -> list[ParallelConfig]:
    """Tensor parallel, with sequence parallelism, and with both kinds of recomputation."""
    plain = ParallelConfig(tensor=2, precision="fp32")
    sequence = replace(plain, sequence=True)
    return [plain, sequence, replace(sequence, recompute="full"), replace(plain, recompute="selective")]


@pytest.mark.distributed
def test_two_tensor_parallel_ranks_are_one_model(topology: ParallelTopology) -> None:
    config = tiny_config(vocab_size=200)
    model = build_model(config, topology)
    rows = random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14])
    outputs = run_passes(model, batch_of(model, rows), 2, NOISE)
    total = sum(out.losses.ce_sum + 1e-2 * out.losses.z_sum for out in outputs)
    total.backward()
    weights, gradients = whole_tensors(model), whole_tensors(model, gradients=True)
    for results in zip(*run_distributed(_gradients_at_tp2, 2), strict=True):
        for loss, _, _ in results:
            assert loss == pytest.approx(total.item(), rel=1e-6)
        sharded = assemble([parts for _, parts, _ in results])
        assert sharded.keys() == weights.keys()
        assert all(torch.equal(sharded[name], weights[name]) for name in weights)
        sharded_gradients = assemble([parts for _, _, parts in results])
        for name, gradient in gradients.items():
            difference = (sharded_gradients[name] - gradient).norm() / gradient.norm()
            assert difference < 1e-5, f"{name}: {difference:.2e}"


WINDOWS = {"sliding_window": 3, "full_attention_every": 2}
"""Layers differ by their number in the whole model: one that is counted wrongly attends to other tokens."""

STAGES: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"tensor": 2, "pipeline": 2}, {"num_layers": 2}),
    ({"tensor": 2, "pipeline": 2}, PLAIN_EMBEDDING),
    ({"pipeline": 2, "pipeline_layers": (2, 1)}, WINDOWS),
    ({"pipeline": 4, "pipeline_layers": (1, 2, 1, 1)}, {"num_layers": 5, **WINDOWS}),
    ({"tensor": 4}, {"num_query_groups": 4, **WINDOWS}),
    ({"tensor": 2}, {}),
]
"""Layouts of four ranks and changes of the model."""


def _passes_over_stages(rank: int) -> list[tuple[float | None, list[Part]]]:
    """Loss of the last of three passes, where this rank has it, and weights; hidden states are handed on by hand."""
    results = []
    for layout, options in STAGES:
        parallel = ParallelConfig(precision="fp32", **layout)
        topology = build_topology(parallel)
        config = tiny_config(parallel=parallel, **options)
        model = build_model(config, topology)
        batch = batch_of(model, random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14]))
        stages = dist.get_process_group_ranks(topology.pg.pp)
        before, after = (stages[(topology.pp_rank + step) % len(stages)] for step in (-1, 1))
        loss, hidden = None, torch.empty(14, 2, config.model.hidden_size)
        for k in range(3):
            if len(stages) > 1 and (k > 0 or not topology.is_first_stage):
                dist.recv(hidden, before)
            with torch.no_grad():
                output = model.forward_pass(batch, k, hidden, NOISE)
            hidden = output.hidden
            if len(stages) > 1 and (k < 2 or not topology.is_last_stage):
                dist.send(hidden, after)
            loss = None if output.losses is None else float(output.losses.ce_sum)
        results.append((loss, stored_parts(model, config, topology, gradients=False)))
        parallel_state.destroy_model_parallel()
    shutdown_distributed()
    return results


@pytest.mark.distributed
def test_stages_and_shards_of_four_ranks_are_one_model(topology: ParallelTopology) -> None:
    by_rank = run_distributed(_passes_over_stages, 4)
    for index, (layout, options) in enumerate(STAGES):
        model = build_model(tiny_config(**options), topology)
        batch = batch_of(model, random_rows(torch.Generator().manual_seed(11), [5, 1, 6, 2], [14]))
        with torch.no_grad():
            loss = float(run_passes(model, batch, 3, NOISE)[-1].losses.ce_sum)
        first_of_last_stage = 4 - 4 // layout.get("pipeline", 1)
        expected = [None if rank < first_of_last_stage else pytest.approx(loss, rel=1e-6) for rank in range(4)]
        assert [results[index][0] for results in by_rank] == expected, layout
        weights, sharded = whole_tensors(model), assemble([results[index][1] for results in by_rank])
        assert sharded.keys() == weights.keys()
        assert all(torch.equal(sharded[name], weights[name]) for name in weights)
        assert_shards_differ([results[index][1] for results in by_rank])


def assert_shards_differ(parts_of_ranks: list[list[Part]]) -> None:
    """No two ranks hold equal values of different parts of one matrix."""
    seen: dict[str, dict[bytes, Rect]] = defaultdict(dict)
    for name, shape, place, values in (part for parts in parts_of_ranks for part in parts):
        if len(shape) == 2:
            assert seen[name].setdefault(values.tobytes(), place) == place, name
