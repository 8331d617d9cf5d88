"""Which implementation of norm and attention runs: PyTorch's, NVIDIA Apex's or Transformer Engine's.

Apex and Transformer Engine are built from source on GPU machines and looked for at run time. The project named `apex`
on the package index is another one, so a found `apex` counts only with NVIDIA's fused norm and its `amp_C` extension.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch

from fbt_megatron.errors import ConfigError

NormKernel = Literal["torch", "apex", "te"]
AttentionKernel = Literal["sdpa", "flex"]

_PROJECTS = {
    "apex": "NVIDIA Apex (https://github.com/NVIDIA/apex; the `apex` of the package index is an unrelated project)",
    "te": "Transformer Engine (https://github.com/NVIDIA/TransformerEngine)",
}


@dataclass(frozen=True)
class Kernels:
    """The implementations in use."""

    norm: NormKernel = "torch"
    attention: AttentionKernel = "sdpa"

    def describe(self) -> str:
        """One line for the log."""
        norms = {"torch": "PyTorch", "apex": "NVIDIA Apex", "te": "Transformer Engine"}
        attentions = {"sdpa": "scaled_dot_product_attention", "flex": "flex_attention"}
        return f"kernels: norm {norms[self.norm]}, attention {attentions[self.attention]}"


def select_kernels(requested: Literal["auto", "torch", "apex", "te"], *, device: torch.device) -> Kernels:
    """Kernels for `model.kernels` on `device`: `auto` takes the fastest that is installed.

    Masked attention has no fast kernel with a dense mask on a GPU, so there it is flex attention, whose block mask
    skips what is masked. Raises ConfigError when a library that was asked for cannot be used.
    """
    if device.type != "cuda":
        if requested in _PROJECTS:
            problem = f"kernels={requested}: {_PROJECTS[requested]} needs a GPU. Use kernels: auto or torch."
            raise ConfigError("model", [problem])
        return Kernels()
    available = fused_libraries()
    if requested in _PROJECTS and requested not in available:
        remedy = "Build it from source, or use kernels: auto."
        problem = f"kernels={requested}: {_PROJECTS[requested]} is not installed. {remedy}"
        raise ConfigError("model", [problem])
    candidates: tuple[NormKernel, ...] = ("te", "apex") if requested == "auto" else (requested,)
    norm: NormKernel = next((name for name in candidates if name in available), "torch")
    return Kernels(norm=norm, attention="flex")


def fused_libraries() -> frozenset[str]:
    """Those of `apex` and `te` that are installed and are what they should be."""
    found = set()
    if hasattr(_import("apex.normalization"), "FusedRMSNorm") and _import("amp_C") is not None:
        found.add("apex")
    if hasattr(_import("transformer_engine.pytorch"), "RMSNorm"):
        found.add("te")
    return frozenset(found)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
