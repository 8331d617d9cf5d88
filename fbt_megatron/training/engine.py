"""From accumulated gradients to new weights: DeepSpeed around the NorMuon/Adam optimizer.

The caller runs every backward pass of the step itself, with a loss that is divided by the global number of trained
tokens and multiplied by the data-parallel size, because gradients are averaged over data parallel here. No other
factor is applied anywhere. Then it calls `TrainEngine.step` once.

This is the only file that imports DeepSpeed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.errors import ConfigError
from fbt_megatron.model.kernels import select_kernels
from fbt_megatron.optim.fused_adam import adam_with
from fbt_megatron.optim.optimizer import NorMuonAdam, StepSettings
from fbt_megatron.optim.param_groups import split_parameters
from fbt_megatron.parallel.collectives import agree_on_errors, any_rank_true, max_across
from fbt_megatron.parallel.logical_tensor import Fragment, ParameterLayout
from fbt_megatron.parallel.topology import ParallelTopology
from fbt_megatron.training.deepspeed_config import ModelParallelUnit, deepspeed_config
from fbt_megatron.training.gradients import (
    accumulated_gradient,
    all_finite,
    average_across,
    clip,
    copy_tied_weight,
    global_norm,
    sum_partial_gradients,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

_WATCHED_STEPS = 3
"""First steps on which a gradient norm of zero stops the run: it means that gradients do not reach the optimizer."""

_WRAPPERS = {(0, "fp32"): "NorMuonAdam", (1, "fp32"): "DeepSpeedZeroOptimizer", (1, "bf16"): "BF16_Optimizer"}
"""The optimizer class that DeepSpeed must choose for each covered (ZeRO stage, precision)."""


@dataclass(frozen=True)
class StepResult:
    """What one call of `TrainEngine.step` did."""

    grad_norm: float | None
    """Global 2-norm of the raw gradient, before clipping; None where it is not finite."""
    skipped: bool
    """True where a gradient was not finite on some rank, or the caller refused the step: no rank changed weights,
    optimizer state or counters."""


class TrainEngine:
    """Owns gradients -> data-parallel mean -> clipping -> NorMuon/Adam of one optimizer step.

    `module` is the model, `layouts` what each of its parameters stores, by name, `optimizer` the client optimizer, and
    `fragments` the ranges of parameters whose optimizer state this rank holds. Built by `build_engine`.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        optimizer: NorMuonAdam,
        layouts: Mapping[str, ParameterLayout],
        config: RunConfig,
        topology: ParallelTopology,
        masters: list[tuple[Fragment, Tensor]],
    ) -> None:
        self.module: nn.Module = engine.module
        self.layouts = layouts
        self.optimizer = optimizer
        self.fragments = [fragment for fragment, _ in masters]
        self._engine = engine
        self._parameters = dict(self.module.named_parameters())
        self._config = config
        self._topology = topology
        self._masters = masters
        self._steps_applied = 0

    def step(self, settings: StepSettings, *, refuses: Callable[[float], bool] | None = None) -> StepResult:
        """Apply the gradients accumulated since the last call, and clear them. Every rank calls it.

        `refuses` is asked once, on all ranks together, with the finite norm of the raw gradient; where it says True, as
        it must on all of them, the step is skipped like one whose gradient is not finite.

        Raises RuntimeError where a parameter that the step uses has no gradient, or where the first steps have a norm
        of zero: training would go on without learning.
        """
        gradients = self._used_gradients(settings)
        sum_partial_gradients(
            gradients,
            self._parameters,
            self.layouts,
            tie_embeddings=self._config.model.tie_embeddings,
            topology=self._topology,
        )
        if any_rank_true(not all_finite(list(gradients.values())), device=self._topology.device):
            self.zero_grad()
            return StepResult(grad_norm=None, skipped=True)
        verdict = _Verdict(refuses)
        if self._config.parallel.zero_stage:
            norm = self._apply_with_zero(settings, verdict)
        else:
            norm = self._apply_replicated(gradients, settings, verdict)
        self.zero_grad()
        if norm is None or verdict.refused:
            return StepResult(grad_norm=norm, skipped=True)
        self._check_norm(norm)
        copy_tied_weight(
            self._parameters, self.layouts, tie_embeddings=self._config.model.tie_embeddings, topology=self._topology
        )
        self._steps_applied += 1
        return StepResult(grad_norm=norm, skipped=False)

    def zero_grad(self) -> None:
        """Drop all accumulated gradients, the fp32 ones of bf16 training included."""
        self._engine.optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters.values():
            # DeepSpeed leaves this attribute on its (zeroed) buffer, which would look like a gradient that arrived.
            if hasattr(parameter, "_hp_grad"):
                del parameter._hp_grad

    def master_fragments(self) -> list[tuple[Fragment, Tensor]]:
        """Each fragment of this rank with its fp32 weights, a flat [numel] view that the optimizer updates in place."""
        return list(self._masters)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters, and the fp32 weights behind them, from full local fp32 tensors by parameter name.

        Raises ValueError where names or shapes differ from the model's.
        """
        if weights.keys() != self._parameters.keys():
            raise ValueError(f"weights do not fit the model: {sorted(weights.keys() ^ self._parameters.keys())}")
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if weights[name].shape != parameter.shape:
                    raise ValueError(f"{name}: shape {tuple(weights[name].shape)} is not {tuple(parameter.shape)}")
                parameter.copy_(weights[name])
            for fragment, master in self._masters:
                flat = weights[fragment.layout.name].reshape(-1)
                master.copy_(flat[fragment.start : fragment.stop])

    def _used_gradients(self, settings: StepSettings) -> dict[str, Tensor]:
        """Accumulated gradients of the parameters that the step uses, by name; raises on every rank where one has none.

        One rank that went its own way would leave the others waiting in the next sum.
        """
        gradients, missing = {}, []
        for name, parameter in self._parameters.items():
            if settings.uses_feedback or not self.layouts[name].feedback:
                gradient = accumulated_gradient(parameter)
                if gradient is None:
                    missing.append(name)
                else:
                    gradients[name] = gradient
        most_missing = int(max_across(torch.tensor(float(len(missing)), device=self._topology.device)))
        if most_missing:
            names = ", ".join(missing) or f"{most_missing} on another rank"
            raise RuntimeError(f"no gradient reached parameters that this step uses: {names}")
        return gradients

    def _apply_with_zero(self, settings: StepSettings, verdict: _Verdict) -> float | None:
        """DeepSpeed reduces, takes the norm over all ranks, clips, steps and gathers. None: the norm overflowed.

        The norm is known only in there, before DeepSpeed calls the client optimizer, which is therefore what asks.
        """
        self.optimizer.prepare(settings, refuses=lambda: verdict.ask(float(self._engine.optimizer._global_grad_norm)))
        self._engine.step()
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else None

    def _apply_replicated(
        self, gradients: Mapping[str, Tensor], settings: StepSettings, verdict: _Verdict
    ) -> float | None:
        """Stage 0, where DeepSpeed has neither norm nor overflow check: reduce and clip here, then let it step."""
        everything = list(gradients.values())
        average_across(everything, group=self._topology.pg.dp)
        own = [gradient for name, gradient in gradients.items() if self._counts_in_norm(self.layouts[name])]
        norm = global_norm(own, device=self._topology.device, group=self._topology.pg.mp)
        if not math.isfinite(norm):
            return None
        if verdict.ask(norm):
            return norm
        self.optimizer.prepare(settings)
        clip(everything, norm=norm, max_norm=self._config.optimizer.grad_clip)
        self._engine.step()
        return norm

    def _counts_in_norm(self, layout: ParameterLayout) -> bool:
        return not layout.tied_copy and (self._topology.tp_rank == 0 or not layout.replicated)

    def _check_norm(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise RuntimeError(f"a step with a gradient norm of {norm} was applied: optimizer state is damaged")
        if norm == 0.0 and self._steps_applied < _WATCHED_STEPS:
            raise RuntimeError("the gradient norm of one of the first steps is 0: gradients do not reach the optimizer")


class _Verdict:
    """What the caller says of one step, asked once: DeepSpeed may call the client optimizer once for each group."""

    def __init__(self, refuses: Callable[[float], bool] | None) -> None:
        self._refuses = refuses
        self._answer: bool | None = None

    @property
    def refused(self) -> bool:
        """True where the caller was asked and refused."""
        return bool(self._answer)

    def ask(self, norm: float) -> bool:
        """Whether the step of this gradient norm is refused."""
        if self._answer is None:
            self._answer = self._refuses is not None and self._refuses(norm)
        return self._answer


def build_engine(
    model: nn.Module, layouts: Mapping[str, ParameterLayout], config: RunConfig, topology: ParallelTopology
) -> TrainEngine:
    """Wrap a model in DeepSpeed with NorMuon and Adam. Every rank calls it.

    `layouts` has one entry per parameter name of `model`. Parameters are broadcast from the first data-parallel rank.
    Raises ConfigError for a combination of ZeRO stage and precision that is not covered and for `model.kernels` that
    cannot be used, TopologyError on every rank where some rank has no matrix or nothing but matrices, and ValueError
    where layouts and parameters do not fit.
    """
    parallel = config.parallel
    if (parallel.zero_stage, parallel.precision) not in _WRAPPERS:
        raise ConfigError("parallel", list(parallel.problems()))
    parameters = dict(model.named_parameters())
    # Both groups exist on every rank or nobody goes on: ZeRO does one model-parallel reduction per group.
    matrices, others = agree_on_errors(lambda: split_parameters(layouts, parameters))
    layout_of = {parameter: layouts[name] for name, parameter in parameters.items()}
    _mark_for_norm(layout_of)
    kernels = select_kernels(config.model.kernels, device=topology.device)
    adam = adam_with(kernels.adam, device=topology.device)
    optimizer = NorMuonAdam(matrices, others, config.optimizer, adam=adam)
    engine = _initialize_deepspeed(model, optimizer, config, topology)
    masters = [_master_fragments(group, layout_of, parallel.zero_stage) for group in (matrices, others)]
    fragments = [[fragment for fragment, _ in group] for group in masters]
    optimizer.bind(*fragments, topology=topology, replicated_over_dp=parallel.zero_stage == 0)
    return TrainEngine(engine, optimizer, layouts, config, topology, [*masters[0], *masters[1]])


def _mark_for_norm(layout_of: Mapping[Parameter, ParameterLayout]) -> None:
    """The marks by which DeepSpeed's norm counts replicated parameters on one tensor rank, and tied copies never."""
    for parameter, layout in layout_of.items():
        vars(parameter).update(model_parallel=not layout.replicated, ds_pipe_replicated=layout.tied_copy)


def _initialize_deepspeed(
    model: nn.Module, optimizer: NorMuonAdam, config: RunConfig, topology: ParallelTopology
) -> DeepSpeedEngine:
    _quiet_deepspeed()
    import deepspeed  # here, because the import itself takes seconds and logs; dry runs and tools go without

    # On a CPU DeepSpeed would compile its shared-memory collectives, which needs a compiler and ninja.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # BF16_Optimizer prints memory reports at every log level.
    with _local_rank_variable(topology.local_rank), contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            mpu=ModelParallelUnit(topology),
            dist_init_required=False,
            config=deepspeed_config(config),
        )
    expected, chosen = _WRAPPERS[config.parallel.zero_stage, config.parallel.precision], type(engine.optimizer).__name__
    if chosen != expected:
        raise RuntimeError(f"DeepSpeed {deepspeed.__version__} chose {chosen}, expected {expected}")
    # Stage 0 reduces in `TrainEngine`, which needs the mean before the update; ZeRO reduces inside `engine.step`.
    engine.enable_backward_allreduce = config.parallel.zero_stage > 0
    return engine


def _quiet_deepspeed() -> None:
    """Keep DeepSpeed's errors and drop the rest: it logs warnings as soon as it is imported."""
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor` is deprecated", category=FutureWarning)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def _local_rank_variable(local_rank: int) -> Iterator[None]:
    """LOCAL_RANK in the environment, where DeepSpeed reads it at start-up; only torchrun sets it for the whole run."""
    if "LOCAL_RANK" in os.environ:
        yield
        return
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        del os.environ["LOCAL_RANK"]


def _master_fragments(
    parameters: list[Parameter], layout_of: Mapping[Parameter, ParameterLayout], zero_stage: int
) -> list[tuple[Fragment, Tensor]]:
    """The fragments of one parameter group on this rank, and their fp32 weights."""
    if zero_stage == 0:
        return [(Fragment(layout_of[p], 0, p.numel(), offset=0), p.detach().view(-1)) for p in parameters]
    masters = []
    for parameter in parameters:
        mapping = vars(parameter)["_hp_mapping"]
        if mapping is not None:  # None: another data-parallel rank holds all of it
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            fragment = Fragment(layout_of[parameter], start, start + numel, mapping.hp_fragment_address.start)
            masters.append((fragment, mapping.hp_fragment.detach()))
    return masters
