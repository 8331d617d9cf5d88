"""NorMuon and Adam as one torch optimizer over flat partitions, as DeepSpeed's ZeRO hands them out.

Exactly two groups: matrices, then everything else. Momentum and Adam's moments are elementwise, so they are flat
tensors beside the flat weights; only the orthogonalisation needs whole matrices, and `exchange.py` brings those
together. A parameter that a step does not use (`StepSettings.uses_feedback`) keeps weights and state bit for bit.

The order of one step: `prepare(settings)`, then `step()` once for both groups, or once for each with `param_groups`
narrowed to it, as ZeRO-1 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fbt_megatron.config.schema import OptimizerConfig
from fbt_megatron.optim.adam import AdamUpdate, adam_update
from fbt_megatron.optim.exchange import MatrixExchange
from fbt_megatron.optim.flat import BoundFragment, Span, bind_fragments, join_fragments
from fbt_megatron.optim.param_groups import ADAM, NORMUON
from fbt_megatron.optim.partition import RankFragments, build_exchange_plan
from fbt_megatron.parallel.collectives import gather_objects
from fbt_megatron.parallel.logical_tensor import Fragment, LogicalTensor, ParamKind, Rect, pieces_of

if TYPE_CHECKING:  # importing it loads megatron-core, which nothing here needs
    from fbt_megatron.parallel.topology import ParallelTopology

STATE_NAMES = {NORMUON: ("momentum",), ADAM: ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class StepSettings:
    """What changes from step to step; rates and decays are those of this step, the schedule already applied."""

    lr_normuon: float
    lr_adam: float
    weight_decay_normuon: float
    weight_decay_adam: float
    uses_feedback: bool


class StateTensor(NamedTuple):
    """What this rank holds of one state of one logical tensor: rectangles, and [rows, cols] views of the state.

    `state` is `momentum`, `row_moment`, `exp_avg` or `exp_avg_sq`. Copying into a view loads the state.
    """

    state: str
    tensor: LogicalTensor
    pieces: list[tuple[Rect, Tensor]]


class NorMuonAdam(torch.optim.Optimizer):
    """NorMuon on matrices, Adam on the rest; the update rules are in `normuon.py` and `adam.py`.

    Gradients have to be finite, reduced and clipped. Life: construct; let DeepSpeed replace the parameters by its flat
    fp32 partitions (or not); `bind`; then `prepare` and `step` for each optimizer step.
    """

    def __init__(
        self,
        matrices: list[Parameter],
        others: list[Parameter],
        config: OptimizerConfig,
        *,
        adam: AdamUpdate = adam_update,
    ) -> None:
        """`adam` is the implementation of Adam; see `fused_adam.adam_with` for others."""
        groups = [
            {"params": matrices, "rule": NORMUON, "lr": config.normuon.lr, "weight_decay": config.normuon.weight_decay},
            {"params": others, "rule": ADAM, "lr": config.adam.lr, "weight_decay": config.adam.weight_decay},
        ]
        super().__init__(groups, defaults={})
        self.config = config
        self._adam = adam
        self._settings: StepSettings | None = None
        self._refuses: Callable[[], bool] | None = None
        self._due: set[str] = set()
        self._fragments: dict[str, list[BoundFragment]] = {}
        self._spans: dict[str, list[Span]] = {}
        self._exchange: MatrixExchange | None = None
        self._adam_updates = {"adam": 0, "adam_feedback": 0}

    def bind(
        self,
        matrix_fragments: Sequence[Fragment],
        other_fragments: Sequence[Fragment],
        *,
        topology: ParallelTopology,
        replicated_over_dp: bool,
    ) -> None:
        """Create all state and the exchange plan; call it once on all ranks, after `deepspeed.initialize`.

        With ZeRO each group has one flat fp32 tensor, and the fragments say where in it what lies. With
        `replicated_over_dp` (stage 0) fragment i is the whole of parameter i of its group. Raises ValueError where
        groups and fragments do not fit, or the ranks together do not hold whole matrices.
        """
        fragments = {NORMUON: matrix_fragments, ADAM: other_fragments}
        for group in self.param_groups:
            rule, params = group["rule"], group["params"]
            self._fragments[rule] = bind_fragments(fragments[rule], params, whole_parameters=replicated_over_dp)
            self._spans[rule] = join_fragments(self._fragments[rule])
            for param in params:
                self.state[param] = {name: torch.zeros_like(param).view(-1) for name in STATE_NAMES[rule]}
        self._exchange = self._build_exchange(matrix_fragments, topology, replicated_over_dp=replicated_over_dp)

    def _build_exchange(
        self, fragments: Sequence[Fragment], topology: ParallelTopology, *, replicated_over_dp: bool
    ) -> MatrixExchange:
        config, ranks = self.config.normuon, topology.tp_dp_group
        held = gather_objects(RankFragments(topology.dp_rank, tuple(fragments)), group=ranks)
        plan = build_exchange_plan(held, replicated_over_dp=replicated_over_dp, ns_steps=config.ns_steps)
        device = self.param_groups[0]["params"][0].device
        return MatrixExchange(plan, config=config, group=ranks, rank=dist.get_rank(ranks), device=device)

    @property
    def exchange(self) -> MatrixExchange:
        """The exchange of matrices; raises RuntimeError before `bind`."""
        if self._exchange is None:
            raise RuntimeError("NorMuonAdam: call bind() first.")
        return self._exchange

    def prepare(self, settings: StepSettings, *, refuses: Callable[[], bool] | None = None) -> None:
        """Set what the next optimizer step does.

        `refuses` is asked when the gradients are complete, once for each call of `step`; where it says True, nothing
        changes. It has to say the same on every rank and for both groups.
        """
        self._settings = settings
        self._refuses = refuses
        self._due = {NORMUON, ADAM}
        for group in self.param_groups:
            is_normuon = group["rule"] == NORMUON
            group["lr"] = settings.lr_normuon if is_normuon else settings.lr_adam
            group["weight_decay"] = settings.weight_decay_normuon if is_normuon else settings.weight_decay_adam

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update the groups in `param_groups`; raises RuntimeError where `prepare` was not called for this step."""
        if closure is not None:
            raise RuntimeError("NorMuonAdam: step() takes no closure; compute the gradients before.")
        for group in self.param_groups:
            rule = group["rule"]
            if self._settings is None or rule not in self._due:
                raise RuntimeError(f"NorMuonAdam: step() of the {rule} group without prepare() for this step.")
            self._due.remove(rule)
            if self._refuses is not None and self._refuses():
                continue
            if rule == NORMUON:
                self._step_normuon(self._settings)
            else:
                self._step_adam(self._settings)

    def _step_normuon(self, settings: StepSettings) -> None:
        momentum_decay = self.config.normuon.momentum
        for span in self._active_spans(NORMUON, settings):
            momentum = span.of(self.state[span.param]["momentum"])
            momentum.mul_(momentum_decay).add_(span.gradient(), alpha=1 - momentum_decay)
            span.of(span.param).mul_(1 - settings.lr_normuon * settings.weight_decay_normuon)
        fragments = self._fragments[NORMUON]
        directions = [self._direction(part, settings) for part in fragments]
        for holding, update in self.exchange.updates(directions, uses_feedback=settings.uses_feedback):
            part = fragments[holding.fragment]
            holding.piece.view(part.of(part.param)).add_(update, alpha=-settings.lr_normuon)

    def _direction(self, part: BoundFragment, settings: StepSettings) -> Tensor:
        """What is orthogonalised: the momentum, or with Nesterov (1 - mu) G + mu M."""
        momentum = part.of(self.state[part.param]["momentum"])
        used = settings.uses_feedback or not part.fragment.layout.feedback
        if not (used and self.config.normuon.nesterov):
            return momentum
        momentum_decay = self.config.normuon.momentum
        return (momentum_decay * momentum).add_(part.gradient(), alpha=1 - momentum_decay)

    def _step_adam(self, settings: StepSettings) -> None:
        self._adam_updates["adam"] += 1
        self._adam_updates["adam_feedback"] += settings.uses_feedback
        for span in self._active_spans(ADAM, settings):
            state = self.state[span.param]
            self._adam(
                span.of(span.param),
                span.gradient(),
                span.of(state["exp_avg"]),
                span.of(state["exp_avg_sq"]),
                num_updates=self._adam_updates["adam_feedback" if span.feedback else "adam"],
                lr=settings.lr_adam,
                weight_decay=settings.weight_decay_adam if span.decays else 0.0,
                config=self.config.adam,
            )

    def _active_spans(self, rule: str, settings: StepSettings) -> Iterator[Span]:
        for span in self._spans[rule]:
            if settings.uses_feedback or not span.feedback:
                yield span

    def state_tensors(self, *, tied_copies: bool = True) -> Iterator[StateTensor]:
        """All state of this rank by logical tensor, for checkpoints that do not depend on the layout.

        Several ranks may hold the same rectangle: tensor-parallel ranks of a replicated parameter, data-parallel
        replicas without ZeRO. The stages with a tied embedding hold it twice, cut differently; without `tied_copies`
        the last stage leaves its own out. A `row_moment` is a vector with the name of its matrix, on the
        owner's rank alone.
        """
        for rule, fragments in self._fragments.items():
            for part in fragments:
                if part.fragment.layout.tied_copy and not tied_copies:
                    continue
                for name in STATE_NAMES[rule]:
                    yield from _by_tensor(name, part.fragment, part.of(self.state[part.param][name]))
        for matrix, row_moment in self.exchange.row_moments():
            vector = LogicalTensor(matrix.name, (matrix.rows,), ParamKind.VECTOR, matrix.feedback)
            yield StateTensor("row_moment", vector, [(Rect(0, 0, 1, matrix.rows), row_moment)])

    def counters(self) -> dict[str, int]:
        """Number of Adam's updates: `adam` of what every step uses, `adam_feedback` of what feedback steps use."""
        return dict(self._adam_updates)

    def load_counters(self, counters: dict[str, int]) -> None:
        """Restore what `counters` gave; raises KeyError where one is missing."""
        self._adam_updates = {name: counters[name] for name in self._adam_updates}


def _by_tensor(state: str, fragment: Fragment, flat: Tensor) -> Iterator[StateTensor]:
    """The logical tensors in one fragment, with their views of the state `flat` of that fragment."""
    tensors: dict[str, StateTensor] = {}
    for piece in pieces_of(fragment.layout, start=fragment.start, stop=fragment.stop):
        entry = tensors.setdefault(piece.tensor.name, StateTensor(state, piece.tensor, []))
        entry.pieces.append((piece.place, piece.view(flat)))
    yield from tensors.values()
