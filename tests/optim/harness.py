"""One rank of the hand-written model under the optimizer, with flat partitions as ZeRO makes them, or without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fbt_megatron.config.schema import OptimizerConfig
from fbt_megatron.optim.adam import AdamUpdate, adam_update
from fbt_megatron.optim.optimizer import NorMuonAdam, StepSettings
from fbt_megatron.parallel.logical_tensor import Fragment, ParameterLayout
from tests.optim import world


def whole_tensors(shape: world.Shape, seed: int) -> dict[str, Tensor]:
    """A random value of every logical tensor."""
    draw = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randn(tensor.shape, generator=draw) for tensor in world.logical_tensors(shape)}


def settings(*, uses_feedback: bool = True, lr: float = 0.02, decay: float = 0.1) -> StepSettings:
    """Rates that differ between the groups."""
    return StepSettings(lr, lr / 4, decay, decay / 5, uses_feedback)


class Rank:
    """The optimizer of one rank. `bounds` cuts each group's concatenated parameters over data-parallel ranks."""

    def __init__(
        self,
        layouts: dict[str, ParameterLayout],
        weights: dict[str, Tensor],
        config: OptimizerConfig,
        *,
        dp_rank: int,
        bounds: tuple[list[int], list[int]] | None,
        group: dist.ProcessGroup | None,
        adam: AdamUpdate = adam_update,
    ) -> None:
        self.groups = [
            [layout for layout in layouts.values() if world.is_matrix(layout)],
            [layout for layout in layouts.values() if not world.is_matrix(layout)],
        ]
        self.ends = None if bounds is None else [(b[dp_rank], b[dp_rank + 1]) for b in bounds]
        params = [[Parameter(world.store(layout, weights)) for layout in members] for members in self.groups]
        self.optimizer = NorMuonAdam(*params, config, adam=adam)
        if self.ends is not None:
            for index, group_options in enumerate(self.optimizer.param_groups):
                group_options["params"] = [Parameter(self.partition(index, weights))]
        topology: Any = SimpleNamespace(dp_rank=dp_rank, tp_dp_group=group)
        self.optimizer.bind(*self.fragments(), topology=topology, replicated_over_dp=bounds is None)

    def partition(self, index: int, whole: dict[str, Tensor]) -> Tensor:
        """This rank's flat range of a group, padded with zeros where the range goes past the end."""
        start, stop = self.ends[index]
        flat = torch.cat([world.store(layout, whole).view(-1) for layout in self.groups[index]])
        return torch.nn.functional.pad(flat, (0, max(0, stop - len(flat))))[start:stop]

    def fragments(self) -> list[list[Fragment]]:
        """The fragments of both groups."""
        if self.ends is None:
            return [[Fragment(layout, 0, layout.numel, 0) for layout in members] for members in self.groups]
        return [world.cut(members, *ends) for members, ends in zip(self.groups, self.ends, strict=True)]

    def step(self, gradients: dict[str, Tensor], how: StepSettings) -> None:
        """One optimizer step with whole gradients, group by group as ZeRO-1 does it."""
        self.optimizer.prepare(how)
        both = self.optimizer.param_groups
        for index, group_options in enumerate(both):
            params = group_options["params"]
            if self.ends is not None:
                params[0].grad = self.partition(index, gradients)
            else:
                for layout, param in zip(self.groups[index], params, strict=True):
                    param.grad = world.store(layout, gradients)
            self.optimizer.param_groups = [group_options]
            self.optimizer.step()
        self.optimizer.param_groups = both

    def weights(self) -> list[np.ndarray]:
        """A copy of the optimizer's tensors, flat, one array for each group."""
        return [
            torch.cat([param.detach().reshape(-1) for param in group["params"]]).numpy().copy()
            for group in self.optimizer.param_groups
        ]

    def state(self) -> list[tuple[str, str, int, int, np.ndarray]]:
        """Every rectangle of state: (state, tensor, row, column, values)."""
        return [
            (state, tensor.name, rect.row, rect.col, view.numpy().copy())
            for state, tensor, pieces in self.optimizer.state_tensors()
            for rect, view in pieces
        ]


def assemble_state(shape: world.Shape, ranks: list[Any]) -> dict[tuple[str, str], np.ndarray]:
    """Whole state tensors from the rectangles of all ranks; ranks that hold the same elements must agree on them."""
    tensors = {tensor.name: tensor for tensor in world.logical_tensors(shape)}
    whole: dict[tuple[str, str], np.ndarray] = {}
    for state, name, row, col, values in (entry for rank in ranks for entry in rank):
        size = (1, tensors[name].rows) if state == "row_moment" else (tensors[name].rows, tensors[name].cols)
        target = whole.setdefault((state, name), np.full(size, np.nan, dtype=np.float32))
        place = target[row : row + values.shape[0], col : col + values.shape[1]]
        known = ~np.isnan(place)
        np.testing.assert_array_equal(place[known], values[known])
        place[...] = values
    return whole
