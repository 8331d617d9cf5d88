"""Initial weights, drawn per whole matrix, so that they are the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fbt_megatron.model.seeding import derive_seed
from fbt_megatron.parallel.logical_tensor import LogicalTensor, ParameterLayout, ParamKind, pieces_of


@torch.no_grad()
def initialize_weights(model: nn.Module, layouts: Mapping[str, ParameterLayout], *, seed: int, init_std: float) -> None:
    """Matrices, embedding and head from normal(0, init_std), norms 1, padding of the vocabulary 0.

    A tensor's values are a function of `seed` and its canonical name. They are drawn on the CPU, whole, on every rank
    that holds a part: a matrix drawn per shard or per device would change the run with the layout.
    """
    parameters = dict(model.named_parameters())
    for name, layout in layouts.items():
        values = torch.zeros(layout.numel)
        whole = {tensor.name: draw_tensor(tensor, seed=seed, init_std=init_std) for tensor in layout.tensors}
        for piece in pieces_of(layout):
            place = piece.place
            source = whole[piece.tensor.name].view(piece.tensor.rows, piece.tensor.cols)
            part = source[place.row : place.row + place.rows, place.col : place.col + place.cols]
            piece.view(values).copy_(part)
        parameters[name].copy_(values.view(layout.shape))


def draw_tensor(tensor: LogicalTensor, *, seed: int, init_std: float) -> Tensor:
    """Initial values of one whole tensor, fp32 on the CPU."""
    if tensor.kind is ParamKind.VECTOR:
        return torch.ones(tensor.shape)
    generator = torch.Generator().manual_seed(derive_seed(seed, "init", tensor.name))
    return torch.empty(tensor.shape).normal_(0.0, init_std, generator=generator)
