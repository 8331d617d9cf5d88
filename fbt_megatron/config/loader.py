"""A configuration file and `section.key=value` overrides to a checked `RunConfig`, and back to a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fbt_megatron.config.document import read_document, read_text
from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.typed_values import field_values, is_section
from fbt_megatron.config.validation import config_problems
from fbt_megatron.config.yaml_text import dump_yaml
from fbt_megatron.files import write_durably


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides in order, and check the result.

    Values of overrides are YAML (`true`, `0.02`, `null`, `[a, b]`). A key that is absent has its default.
    Raises `ConfigError` with every problem found: a file that cannot be read or parsed, unknown or repeated keys, wrong
    types, values outside their range, rules between sections.
    """
    return parse_config(read_text(Path(path)), source=str(path), overrides=overrides)


def parse_config(text: str, *, source: str, overrides: list[str] | None = None, check_rules: bool = True) -> RunConfig:
    """`load_config` of the text of a file; `source` names it in errors.

    Without `check_rules` only keys and types count: for the configuration of a run that another version began.
    """
    check = config_problems if check_rules else None
    return read_document(RunConfig, text, source=source, overrides=overrides, check=check)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write the resolved configuration; `load_config` of the file gives an equal one. Raises `OSError`."""
    write_durably(Path(path), format_config(config))


def format_config(config: RunConfig) -> str:
    """The resolved configuration as the text of a configuration file."""
    return dump_yaml(config_to_dict(config))


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts and lists of plain values, ready for YAML or JSON."""
    return _plain(config)


def config_diff(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, as (full key, old value, new value), in the order of the schema.

    Values are plain (lists, dicts, scalars). A step number and a fraction differ even where Python has 1 == 1.0.
    """
    old_values, new_values = _leaves(old), _leaves(new)
    return [
        (key, value, new_values[key])
        for key, value in old_values.items()
        if json.dumps(value, sort_keys=True) != json.dumps(new_values[key], sort_keys=True)
    ]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {key: _plain(item) for key, item in field_values(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _leaves(section: Any, *, prefix: str = "") -> dict[str, Any]:
    """Full key -> plain value of every key that is not a section."""
    leaves = {}
    for key, value in field_values(section).items():
        if is_section(type(value)):
            leaves.update(_leaves(value, prefix=f"{prefix}{key}."))
        else:
            leaves[prefix + key] = _plain(value)
    return leaves
