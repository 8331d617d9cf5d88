"""Strict YAML: what a configuration file may say, and how one is written.

PyYAML follows YAML 1.1, which reads `off` as false, `010` as eight and `1e-5` as text. Here only `true` and `false` are
booleans, whole numbers are decimal, `1e-5` is a number, dates are text, and a key given twice is a problem rather than
the last one winning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(?:~|null|Null|NULL|)$")
_INT = re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_NUMBER_STARTS = list("-+.0123456789")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above, which also notes duplicate keys."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first_line: dict[object, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                if key_node.value in first_line:
                    first = first_line[key_node.value]
                    self.duplicates.append(f"line {line}: {key_node.value} was already set on line {first}. Keep one.")
                first_line.setdefault(key_node.value, line)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {}
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfF"))
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _NUMBER_STARTS)


class _QuotingDumper(yaml.SafeDumper):
    """SafeDumper that quotes text either dialect would read as something else, and escapes what is not printable."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # Only double quotes escape: plain and single-quoted text turns some line separators into spaces.
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_QuotingDumper.add_representer(str, _QuotingDumper.represent_text)
_QuotingDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _NUMBER_STARTS)


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """The value of a YAML document and the problems found: broken syntax (the value is then None), duplicate keys."""
    try:
        loader = _StrictLoader(text)
        value = loader.get_single_data()
    except yaml.YAMLError as error:
        return None, [_syntax_problem(error)]
    return value, loader.duplicates


def dump_yaml(value: object) -> str:
    """`value` (mappings, lists, scalars) as a block-style YAML document; `parse_yaml` gives back an equal value."""
    return yaml.dump(value, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=True, width=120)


def show_value(value: object) -> str:
    """`value` on one line, as it would stand in a configuration file; long values are cut."""
    if isinstance(value, str):
        text = f'"{value}"'
    else:
        text = yaml.dump(value, Dumper=_QuotingDumper, sort_keys=False, default_flow_style=True, width=2**31)
        text = text.removesuffix("...\n").strip()
    return text if len(text) <= 80 else f"{text[:77]}..."


def _syntax_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        what = " ".join(_parts(error))
        return f"line {mark.line + 1}, column {mark.column + 1}: {what}." if mark else f"{what}."
    return f"not valid YAML: {' '.join(str(error).split())}."


def _parts(error: yaml.MarkedYAMLError) -> Iterator[str]:
    if error.context:
        yield f"{error.context},"
    yield error.problem or "not valid YAML"
