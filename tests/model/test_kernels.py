"""Choice of implementations, and the masks of both attention kernels."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fbt_megatron.config.schema import ModelConfig
from fbt_megatron.errors import ConfigError, TopologyError
from fbt_megatron.model.attention import CoreAttention
from fbt_megatron.model.kernels import Kernels, fused_libraries, select_kernels
from fbt_megatron.model.masks import build_masks, layer_window
from fbt_megatron.parallel.mcore_compat import check_mcore_version

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: object) -> None:
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def install_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex")
    install(monkeypatch, "apex.normalization", FusedRMSNorm=torch.nn.RMSNorm)
    install(monkeypatch, "apex.multi_tensor_apply", multi_tensor_applier=None)
    install(monkeypatch, "amp_C", multi_tensor_adam=None)


def install_te(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "transformer_engine")
    install(monkeypatch, "transformer_engine.pytorch", RMSNorm=torch.nn.RMSNorm)
    parts = {"multi_tensor_applier": None, "multi_tensor_adam": None}
    install(monkeypatch, "transformer_engine.pytorch.optimizers", **parts)


def test_cpu_uses_pytorch() -> None:
    expected = Kernels("torch", "sdpa", "torch")
    assert select_kernels("auto", device=CPU) == select_kernels("torch", device=CPU) == expected
    assert expected.describe() == "kernels: norm PyTorch, attention scaled_dot_product_attention, Adam PyTorch"
    with pytest.raises(ConfigError, match=r"kernels=apex: NVIDIA Apex .* needs a GPU"):
        select_kernels("apex", device=CPU)


@pytest.mark.parametrize("requested", ["apex", "te"])
def test_asking_for_a_missing_library(requested: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"kernels={requested}: .* is not installed. Build it from source"):
        select_kernels(requested, device=GPU)
    without = Kernels("torch", "flex", "torch_fused")
    assert select_kernels("auto", device=GPU) == select_kernels("torch", device=GPU) == without
    assert without.describe() == "kernels: norm PyTorch, attention flex_attention, Adam PyTorch (fused)"


def test_installed_libraries_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("apex", "transformer_engine"):
        monkeypatch.setitem(sys.modules, name, None)
    install_apex(monkeypatch)
    apex = Kernels("apex", "flex", "apex")
    assert select_kernels("auto", device=GPU) == select_kernels("apex", device=GPU) == apex
    assert select_kernels("torch", device=GPU) == Kernels("torch", "flex", "torch_fused")
    install_te(monkeypatch)
    te = Kernels("te", "flex", "te")
    assert select_kernels("auto", device=GPU) == select_kernels("te", device=GPU) == te
    assert select_kernels("apex", device=GPU) == apex
    assert te.describe() == "kernels: norm Transformer Engine, attention flex_attention, Adam Transformer Engine"


def test_a_library_without_fused_adam_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install_apex(monkeypatch)
    install_te(monkeypatch)
    assert fused_libraries() == {"apex", "te"}
    install(monkeypatch, "amp_C")
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.optimizers", None)
    assert fused_libraries() == frozenset()


def test_the_unrelated_apex_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "apex")
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    assert fused_libraries() == frozenset()


@pytest.mark.parametrize(
    ("window", "every", "expected"),
    [(None, None, [None] * 6), (4, None, [4] * 6), (4, 3, [4, 4, None, 4, 4, None]), (4, 1, [None] * 6)],
)
def test_window_of_each_layer(window: int | None, every: int | None, expected: list[int | None]) -> None:
    model = ModelConfig(sliding_window=window, full_attention_every=every)
    assert [layer_window(model, number) for number in range(1, 7)] == expected


def test_one_mask_per_distinct_window() -> None:
    one_document = torch.zeros(2, 9, dtype=torch.int64)
    assert build_masks(one_document, windows=[None, 20], reset=True, kernel="sdpa") == {None: None, 20: None}
    packed = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0] * 9])
    masks = build_masks(packed, windows=[None, 9, 3], reset=True, kernel="sdpa")
    assert masks[9] is masks[None]
    assert masks[3].shape == (2, 1, 9, 9)
    assert build_masks(packed, windows=[None], reset=False, kernel="sdpa") == {None: None}
    assert build_masks(packed, windows=[3], reset=False, kernel="sdpa")[3].shape == (1, 1, 9, 9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_flex_attention_equals_dense_attention(window: int | None, reset: bool) -> None:
    """Forward only: flex attention has no backward on a CPU."""
    generator = torch.Generator().manual_seed(0)
    documents = torch.randint(0, 2, (2, 40), generator=generator).cumsum(dim=1)
    query, key, value = (torch.randn(40, 2, heads, 16, generator=generator) for heads in (4, 2, 2))
    heads = [
        CoreAttention()(query, key, value, build_masks(documents, windows=[window], reset=reset, kernel=kernel)[window])
        for kernel in ("sdpa", "flex")
    ]
    torch.testing.assert_close(heads[0], heads[1], rtol=1e-5, atol=1e-5)


def test_other_versions_of_megatron_core_are_refused() -> None:
    check_mcore_version((0, 16, 1, ""))
    with pytest.raises(TopologyError, match=r"megatron-core 0\.17 is installed; this project needs 0\.16"):
        check_mcore_version((0, 17, 0, ""))
