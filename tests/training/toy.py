"""Small modules with hand-written layouts, and the training of one, for tests of the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fbt_megatron.config.schema import NorMuonConfig, OptimizerConfig, ParallelConfig, RunConfig
from fbt_megatron.optim.optimizer import StepSettings
from fbt_megatron.parallel.logical_tensor import Block, LogicalTensor, ParameterLayout, ParamKind, Rect
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.engine import TrainEngine, build_engine

COMBINATIONS = [(0, "fp32"), (1, "fp32"), (1, "bf16")]
EACH_COMBINATION = pytest.mark.parametrize(("zero_stage", "precision"), COMBINATIONS)

TILTED = torch.tensor([[8.0, -0.5], [8.0, 0.5]])
"""Singular values 11.314 and 0.7071; its polar factor is 0.7071 [[1, -1], [1, 1]]."""

PASSES = (1, 2, 1, 3, 2)
"""Number of passes of each step of `train_net`."""


def layout(
    name: str, shape: tuple[int, ...], kind: ParamKind, *, feedback: bool = False, **options: bool
) -> ParameterLayout:
    """A parameter that stores one logical tensor, whole."""
    tensor = LogicalTensor(name, shape, kind, feedback)
    block = Block(Rect(0, 0, tensor.rows, tensor.cols), 0, 0)
    return ParameterLayout(name, shape, ((tensor, (block,)),), **options)


class Bag(nn.Module):
    """Parameters without a network: gradients are given, not computed."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def send(self, **gradients: Tensor) -> None:
        """One backward pass that leaves exactly these gradients."""
        parameters = dict(self.named_parameters())
        sum((parameters[name] * value.to(parameters[name])).sum() for name, value in gradients.items()).backward()


class Net(nn.Module):
    """Embedding, two matrices around a norm, and a fusion matrix that only steps with feedback use."""

    VOCAB, HIDDEN = 7, 6

    def __init__(self) -> None:
        super().__init__()
        shapes = {"embedding": (self.VOCAB, self.HIDDEN), "norm": (self.HIDDEN,), "up": (10, self.HIDDEN)}
        shapes |= {"down": (self.HIDDEN, 10), "fusion": (self.HIDDEN, self.HIDDEN)}
        draw = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draw) * 0.5))

    def forward(self, tokens: Tensor, num_passes: int) -> Tensor:
        """Sum over rows and passes of a loss of each row; tokens [rows, length]."""
        inputs, total = self.embedding[tokens], 0.0
        hidden = inputs
        for pass_idx in range(num_passes):
            if pass_idx:
                hidden = inputs + hidden @ self.fusion.T
            hidden = hidden + torch.tanh((hidden * self.norm) @ self.up.T) @ self.down.T
            logits = hidden @ self.embedding.T
            total = total + nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten(), reduction="sum")
        return total

    @classmethod
    def layouts(cls) -> dict[str, ParameterLayout]:
        """Layouts at one rank per replica."""
        kinds = {"embedding": ParamKind.EMBEDDING, "norm": ParamKind.VECTOR}
        return {
            name: layout(name, tuple(p.shape), kinds.get(name, ParamKind.MATRIX), feedback=name == "fusion")
            for name, p in cls().named_parameters()
        }


def run_config(
    zero_stage: int, precision: str, *, grad_clip: float = 0.0, tensor: int = 1, pipeline: int = 1, **normuon: Any
) -> RunConfig:
    """A configuration with the given engine options; betas and momenta are those of the defaults unless given."""
    return RunConfig(
        optimizer=OptimizerConfig(normuon=NorMuonConfig(**normuon), grad_clip=grad_clip),
        parallel=ParallelConfig(tensor=tensor, pipeline=pipeline, zero_stage=zero_stage, precision=precision),
    )


def settings(
    *, lr_normuon: float = 0.1, lr_adam: float = 0.01, weight_decay: float = 0.0, uses_feedback: bool = True
) -> StepSettings:
    """Settings of one step; `weight_decay` is that of NorMuon."""
    return StepSettings(
        lr_normuon=lr_normuon,
        lr_adam=lr_adam,
        weight_decay_normuon=weight_decay,
        weight_decay_adam=0.0,
        uses_feedback=uses_feedback,
    )


def state_pieces(engine: TrainEngine, state: str, name: str) -> list[tuple[Rect, Tensor]]:
    """This rank's pieces of one optimizer state of one logical tensor, copied."""
    return [
        (place, view.clone())
        for state_name, tensor, pieces in engine.optimizer.state_tensors()
        if state_name == state and tensor.name == name
        for place, view in pieces
    ]


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    """The module's parameters as fp32 copies."""
    return {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}


def momentum_of(engine: TrainEngine, name: str = "matrix") -> Tensor:
    """All elements of the momentum that this rank holds, flat."""
    pieces = state_pieces(engine, "momentum", name)
    return torch.cat([view.reshape(-1) for _, view in pieces]) if pieces else torch.zeros(0)


BAG_LAYOUTS = {
    "matrix": layout("matrix", (2, 2), ParamKind.MATRIX),
    "fusion": layout("fusion", (2, 2), ParamKind.MATRIX, feedback=True),
    "vector": layout("vector", (2,), ParamKind.VECTOR),
}


def bag_engine(topology: ParallelTopology, zero_stage: int, precision: str, **options: Any) -> TrainEngine:
    """An engine over a zero 2x2 matrix, a feedback matrix of ones and a zero vector."""
    bag = Bag(matrix=torch.zeros(2, 2), fusion=torch.ones(2, 2), vector=torch.zeros(2))
    return build_engine(bag, BAG_LAYOUTS, run_config(zero_stage, precision, **options), topology)


def global_batches() -> Tensor:
    """[steps, rows, length] token ids of `train_net`."""
    return torch.randint(0, Net.VOCAB, (len(PASSES), 4, 5), generator=torch.Generator().manual_seed(7))


def train_net(topology: ParallelTopology, zero_stage: int, precision: str) -> dict[str, list]:
    """Train `Net` over global batches of four rows, micro-batches of one; norms and weights after each step."""
    engine = build_engine(Net(), Net.layouts(), run_config(zero_stage, precision, grad_clip=1.0), topology)
    norms, weights = [], []
    for batch, num_passes in zip(global_batches(), PASSES, strict=True):
        for row in batch.chunk(topology.dp_size)[topology.dp_rank]:
            (engine.module(row[None], num_passes) * topology.dp_size / batch.numel()).backward()
        result = engine.step(settings(weight_decay=0.1, uses_feedback=num_passes > 1))
        norms.append(result.grad_norm)
        weights.append(weights_of(engine))
    return {"norms": norms, "weights": weights}


def assert_same_training(actual: dict[str, list], expected: dict[str, list], *, tolerance: float) -> None:
    """Norms, and weights by Frobenius norm, agree after each step to a relative tolerance."""
    assert actual["norms"] == pytest.approx(expected["norms"], rel=tolerance)
    for step, (ours, theirs) in enumerate(zip(actual["weights"], expected["weights"], strict=True)):
        for name in theirs:
            distance = (ours[name] - theirs[name]).norm() / theirs[name].norm()
            assert distance <= tolerance, f"step {step} {name}: {distance:.2e}"
