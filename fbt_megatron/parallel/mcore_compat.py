"""The only place that adapts megatron-core: the version this project is written for, and running without a GPU.

megatron-core assumes CUDA in a few calls (the current device, the state of the CUDA random number generator). Without a
GPU those calls are answered by the CPU; with one nothing is replaced. No layer of this project draws random numbers, so
the trackers of CUDA generators have nothing to keep here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from megatron.core import package_info, tensor_parallel
from megatron.core.tensor_parallel import random as mcore_random
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fbt_megatron.errors import TopologyError

_SUPPORTED_VERSION = (0, 16)


def prepare_megatron_core(*, seed: int) -> None:
    """Make megatron-core's layers usable in this process; may be called again. Groups must exist where there is a GPU.

    Raises TopologyError when the installed megatron-core is not the one this project is written for.
    """
    check_mcore_version(package_info.VERSION)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)  # sequence parallelism forks this tracker
        return
    for module, name, replacement in _cpu_replacements():
        setattr(module, name, replacement)


def on_cpu_without_gpu() -> contextlib.AbstractContextManager[object]:
    """While megatron-core's schedules run without a GPU: what they make on "cuda" is made on the CPU."""
    return contextlib.nullcontext() if torch.cuda.is_available() else _CudaToCpu()


def check_mcore_version(version: tuple[Any, ...]) -> None:
    """Raise TopologyError unless `version` (major, minor, ...) is the supported release line."""
    if tuple(version[:2]) != _SUPPORTED_VERSION:
        found, wanted = (".".join(str(part) for part in parts[:2]) for parts in (version, _SUPPORTED_VERSION))
        raise TopologyError(
            f"megatron-core {found} is installed; this project needs {wanted}, because it relies on internals of that "
            "release. Install the versions of requirements.txt."
        )


def _cpu_replacements() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    return [
        (torch.cuda, "current_device", _cpu_device),
        (torch.cuda, "set_device", _ignore_device),
        (torch.cuda, "synchronize", _ignore_synchronize),
        (mcore_random, "_get_cuda_rng_state", _get_cpu_rng_state),
        (mcore_random, "_set_cuda_rng_state", _set_cpu_rng_state),
        (tensor_parallel, "get_cuda_rng_tracker", _StatelessTracker),
    ]


class _CudaToCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _cpu_device()
        return func(*args, **kwargs)


class _StatelessTracker:
    """Stands for megatron-core's tracker of CUDA generators where there are none."""

    def fork(self, name: str = "") -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _cpu_device() -> torch.device:
    return torch.device("cpu")


# One function per name: torch._dynamo refuses one function object under two names.
def _ignore_device(device: object) -> None:
    pass


def _ignore_synchronize(device: object = None) -> None:
    pass


def _get_cpu_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)
