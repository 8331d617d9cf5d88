"""Small models, packed rows, and whole matrices read out of a model of one rank by hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fbt_megatron.config.schema import (
    DataConfig,
    FeedbackConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulePhase,
    TrainConfig,
)
from fbt_megatron.model.fbt_model import FBTModel, MicroBatch, PassOutput
from fbt_megatron.model.noise import FeedbackNoise
from tests.model.reference import Row, Weights

TINY = ModelConfig(
    num_layers=3,
    hidden_size=24,
    ffn_hidden_size=40,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=8,
    vocab_size=60,
    seq_length=14,
    init_std=0.2,
)


def tiny_config(*, fusion: str = "glu", reset: bool = True, parallel: ParallelConfig | None = None, **model: object):
    """A three-layer model in fp32; keyword arguments change `ModelConfig`."""
    return RunConfig(
        model=replace(TINY, **model),
        feedback=FeedbackConfig(fusion=fusion, schedule=(SchedulePhase(1.0, {1: 1.0}),)),
        parallel=parallel or ParallelConfig(precision="fp32"),
        data=DataConfig(train="unused", reset_attention_mask=reset),
        train=TrainConfig(seed=7),
    )


def packed_row(*documents: list[int]) -> Row:
    """Documents one after the other; labels do not cross their ends."""
    row = Row([], [], [])
    for index, document in enumerate(documents):
        row.tokens += document
        row.documents += [index] * len(document)
        row.labels += [*document[1:], -100]
    return row


def random_rows(generator: torch.Generator, *lengths_of_rows: list[int]) -> list[Row]:
    """Rows of random documents of the given lengths."""
    return [
        packed_row(*(torch.randint(0, TINY.vocab_size, (n,), generator=generator).tolist() for n in lengths))
        for lengths in lengths_of_rows
    ]


def batch_of(model: FBTModel, rows: list[Row], numbers: list[int] | None = None) -> MicroBatch:
    documents = torch.tensor([row.documents for row in rows])
    positions = [[row.documents[:t].count(d) for t, d in enumerate(row.documents)] for row in rows]
    return model.micro_batch(
        tokens=torch.tensor([row.tokens for row in rows]),
        labels=torch.tensor([row.labels for row in rows]),
        positions=torch.tensor(positions),
        document_ids=documents,
        rows=torch.tensor(numbers or list(range(len(rows)))),
    )


def run_passes(
    model: FBTModel, batch: MicroBatch, num_passes: int, noise: FeedbackNoise | None = None
) -> list[PassOutput]:
    outputs: list[PassOutput] = []
    for k in range(num_passes):
        outputs.append(model.forward_pass(batch, k, outputs[-1].hidden if outputs else None, noise))
    return outputs


def whole_tensors(model: FBTModel, *, gradients: bool = False) -> Weights:
    """Every whole matrix of a one-rank model (or its gradient) by canonical name, cut out by hand."""
    shape = model.model
    found: Weights = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is None:
            continue
        parts = name.split(".")
        if parts[:2] != ["stack", "layers"]:
            whole = tensor[: shape.vocab_size] if name in ("embedding.weight", "head.weight") else tensor
            found["final_norm.weight" if name == "stack.final_layernorm.weight" else name] = whole
            continue
        found.update(_layer_tensors(f"layers.{parts[2]}", ".".join(parts[3:-1]), tensor, shape))
    return {name: tensor.double().clone() for name, tensor in found.items()}


_SIMPLE = {
    "input_layernorm": "attention_norm",
    "self_attention.gate": "attention.gate",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "self_attention.linear_proj": "attention.output",
    "self_attn_bda.norm": "attention_post_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc2": "mlp.down",
    "mlp_bda.norm": "mlp_post_norm",
}


def _layer_tensors(layer: str, name: str, tensor: Tensor, shape: ModelConfig) -> Weights:
    if name in _SIMPLE:
        return {f"{layer}.{_SIMPLE[name]}.weight": tensor}
    if name == "mlp.linear_fc1":
        gate, up = tensor.chunk(2)
        return {f"{layer}.mlp.gate.weight": gate, f"{layer}.mlp.up.weight": up}
    assert name == "self_attention.linear_qkv", name
    groups, width = shape.num_query_groups, shape.head_dim
    grouped = tensor.view(groups, -1, width, shape.hidden_size)
    queries, keys, values = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
    names = [f"{layer}.attention.{part}.weight" for part in "qkv"]
    return {
        name: part.reshape(-1, shape.hidden_size) for name, part in zip(names, (queries, keys, values), strict=True)
    }
