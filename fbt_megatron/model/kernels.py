"""Which implementation of norm, attention and Adam runs: PyTorch's, NVIDIA Apex's or Transformer Engine's.

| part      | CPU                          | GPU                                                                     |
|-----------|------------------------------|-------------------------------------------------------------------------|
| norm      | PyTorch                      | RMSNorm of Transformer Engine, else FusedRMSNorm of Apex, else PyTorch  |
| Adam      | PyTorch                      | `multi_tensor_adam` of the same library, else PyTorch's fused AdamW     |
| attention | scaled_dot_product_attention | flex attention                                                          |

Attention on a GPU is flex attention whatever is asked for: its block mask states packed documents, causality and window
exactly, and a test holds it against the dense mask. Transformer Engine's attention is not used: for packed documents it
takes another layout (`thd` with cumulative lengths) and picks one of several back ends by GPU, version, dtype and
window, and a back end that saw too much would show in no error and in no test without that GPU.

Apex and Transformer Engine are built from source on GPU machines and looked for at run time. The project named `apex`
on the package index is another one, so a found `apex` counts only with NVIDIA's fused norm and its `amp_C` extension.
`norm.py` and `optim/fused_adam.py` make use of what is selected here.
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
AdamKernel = Literal["torch", "torch_fused", "apex", "te"]

_PROJECTS = {
    "apex": "NVIDIA Apex (https://github.com/NVIDIA/apex; the `apex` of the package index is an unrelated project)",
    "te": "Transformer Engine (https://github.com/NVIDIA/TransformerEngine)",
}

_REQUIRED = {
    "apex": (
        ("apex.normalization", "FusedRMSNorm"),
        ("apex.multi_tensor_apply", "multi_tensor_applier"),
        ("amp_C", "multi_tensor_adam"),
    ),
    "te": (
        ("transformer_engine.pytorch", "RMSNorm"),
        ("transformer_engine.pytorch.optimizers", "multi_tensor_applier"),
        ("transformer_engine.pytorch.optimizers", "multi_tensor_adam"),
    ),
}
"""What a library must have to be used at all."""


@dataclass(frozen=True)
class Kernels:
    """The implementations in use."""

    norm: NormKernel = "torch"
    attention: AttentionKernel = "sdpa"
    adam: AdamKernel = "torch"

    def describe(self) -> str:
        """One line for the log."""
        names = {
            "torch": "PyTorch",
            "torch_fused": "PyTorch (fused)",
            "apex": "NVIDIA Apex",
            "te": "Transformer Engine",
        }
        attentions = {"sdpa": "scaled_dot_product_attention", "flex": "flex_attention"}
        attention = attentions[self.attention]
        return f"kernels: norm {names[self.norm]}, attention {attention}, Adam {names[self.adam]}"


def select_kernels(requested: Literal["auto", "torch", "apex", "te"], *, device: torch.device) -> Kernels:
    """Kernels for `model.kernels` on `device`: `auto` takes Transformer Engine, else Apex, else PyTorch.

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
        parts = ", ".join(f"{module}.{name}" for module, name in _REQUIRED[requested])
        remedy = f"Build it from source, with {parts}, or use kernels: auto."
        problem = f"kernels={requested}: {_PROJECTS[requested]} is not installed. {remedy}"
        raise ConfigError("model", [problem])
    candidates: tuple[NormKernel, ...] = ("te", "apex") if requested == "auto" else (requested,)
    library: NormKernel = next((name for name in candidates if name in available), "torch")
    return Kernels(norm=library, attention="flex", adam="torch_fused" if library == "torch" else library)


def fused_libraries() -> frozenset[str]:
    """Those of `apex` and `te` that are installed and have all the parts used here."""
    complete = [
        library for library, parts in _REQUIRED.items() if all(hasattr(_import(module), name) for module, name in parts)
    ]
    return frozenset(complete)


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
