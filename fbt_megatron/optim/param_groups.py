"""Which parameter is updated by NorMuon and which by Adam.

Membership follows the kind that a parameter's layout states, never its name: a parameter without a layout, or one whose
shape contradicts its kind, is an error and not a silent change of group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.nn import Parameter

from fbt_megatron.config.schema import OptimizerConfig
from fbt_megatron.errors import TopologyError
from fbt_megatron.parallel.logical_tensor import LogicalTensor, ParameterLayout, ParamKind

NORMUON = "normuon"
ADAM = "adam"


def update_rule(kind: ParamKind) -> str:
    """`normuon` for matrices of the stack and the fusion, `adam` for everything else."""
    return NORMUON if kind is ParamKind.MATRIX else ADAM


def decays(kind: ParamKind) -> bool:
    """Weight decay acts on everything two-dimensional and on no vector."""
    return kind is not ParamKind.VECTOR


def split_parameters(
    layouts: Mapping[str, ParameterLayout], params: Mapping[str, Parameter]
) -> tuple[list[Parameter], list[Parameter]]:
    """The parameters of this rank for NorMuon and for Adam, in the order of `params`.

    `layouts` and `params` have the same keys. Raises ValueError where they differ, where a shape contradicts its layout
    or its kind, where a parameter mixes kinds or feedback with other tensors, or where one object has two names.
    Raises TopologyError where one of the lists would be empty.
    """
    problems = list(_problems(layouts, params))
    if problems:
        raise ValueError("Parameters and layouts do not fit:\n" + "\n".join(f"  {problem}" for problem in problems))
    groups: dict[str, list[Parameter]] = {NORMUON: [], ADAM: []}
    for name, param in params.items():
        groups[update_rule(layouts[name].tensors[0].kind)].append(param)
    for rule, members in groups.items():
        if not members:
            raise TopologyError(
                f"This rank stores no parameter that {rule} updates. Every pipeline stage needs at least one "
                "transformer layer: use a smaller parallel.pipeline or a larger model.num_layers."
            )
    return groups[NORMUON], groups[ADAM]


def _problems(layouts: Mapping[str, ParameterLayout], params: Mapping[str, Parameter]) -> Iterator[str]:
    for name in sorted(params.keys() - layouts.keys()):
        yield f"{name} {tuple(params[name].shape)}: no layout says what it stores."
    for name in sorted(layouts.keys() - params.keys()):
        yield f"{name}: has a layout but no parameter."
    if len({id(param) for param in params.values()}) != len(params):
        yield "one parameter has two names."
    for name in sorted(params.keys() & layouts.keys()):
        layout, shape = layouts[name], tuple(params[name].shape)
        if shape != layout.shape:
            yield f"{name} {shape}: its layout says {layout.shape}."
        if len({(tensor.kind, tensor.feedback) for tensor in layout.tensors}) != 1:
            yield f"{name}: must store tensors of exactly one kind, all with feedback or all without."
        for tensor in layout.tensors:
            dimensions = 1 if tensor.kind is ParamKind.VECTOR else 2
            if {len(tensor.shape), len(shape)} != {dimensions}:
                yield f"{name} {shape}: {tensor.name} {tensor.shape} is a {tensor.kind.value}, which is {dimensions}-D."


@dataclass(frozen=True)
class GroupEntry:
    """One logical tensor in the listing of the groups."""

    tensor: LogicalTensor
    group: str
    weight_decay: float


def list_groups(layouts: Iterable[ParameterLayout], config: OptimizerConfig) -> list[GroupEntry]:
    """Every logical tensor that the layouts store, once, with its group and peak weight decay; the same in any layout.

    The copy of a tied embedding on the last pipeline stage is not listed again.
    """
    peak_decay = {NORMUON: config.normuon.weight_decay, ADAM: config.adam.weight_decay}
    tensors = {tensor.name: tensor for layout in layouts if not layout.tied_copy for tensor in layout.tensors}
    entries = []
    for tensor in tensors.values():
        group = update_rule(tensor.kind)
        entries.append(GroupEntry(tensor, group, peak_decay[group] if decays(tensor.kind) else 0.0))
    return entries


def format_groups(entries: Iterable[GroupEntry]) -> str:
    """The listing as a table: name, kind, shape, group, weight decay, and whether only steps with feedback use it."""
    rows = [("name", "kind", "shape", "group", "decay", "steps")]
    for entry in entries:
        tensor = entry.tensor
        shape = " x ".join(str(size) for size in tensor.shape)
        steps = "feedback" if tensor.feedback else "all"
        rows.append((tensor.name, tensor.kind.value, shape, entry.group, f"{entry.weight_decay:g}", steps))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
