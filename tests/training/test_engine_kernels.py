"""The engine trains with the Adam that `model.kernels` selects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fbt_megatron.model.kernels import Kernels
from fbt_megatron.optim import fused_adam
from fbt_megatron.training import engine
from tests.training.toy import EACH_COMBINATION, assert_same_training, train_net


@EACH_COMBINATION
def test_selected_adam_is_used(topology: Any, zero_stage: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = train_net(topology, zero_stage, precision)
    calls = []
    adamw = fused_adam.adamw

    def counted(*lists: Any, **options: Any) -> None:
        calls.append(options["fused"])
        adamw(*lists, **options)

    def selected(requested: str, *, device: torch.device) -> Kernels:
        assert (requested, device) == ("auto", topology.device)
        return Kernels(adam="torch_fused")

    monkeypatch.setattr(fused_adam, "adamw", counted)
    monkeypatch.setattr(engine, "select_kernels", selected)
    fused = train_net(topology, zero_stage, precision)
    assert len(calls) > 5
    assert all(calls)
    assert_same_training(fused, plain, tolerance=1e-4)
