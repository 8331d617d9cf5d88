"""A configuration file and `section.key=value` overrides to a checked `RunConfig`, and back to a file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from fbt_megatron.config.schema import RunConfig
from fbt_megatron.config.typed_values import (
    Reading,
    field_types,
    field_values,
    is_section,
    known_keys,
    read_section,
    unknown_key,
)
from fbt_megatron.config.validation import config_problems
from fbt_megatron.config.yaml_text import dump_yaml, parse_yaml
from fbt_megatron.errors import ConfigError
from fbt_megatron.files import write_durably


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides in order, and check the result.

    Values of overrides are YAML (`true`, `0.02`, `null`, `[a, b]`). A key that is absent has its default.
    Raises `ConfigError` with every problem found: a file that cannot be read or parsed, unknown or repeated keys, wrong
    types, values outside their range, rules between sections.
    """
    return parse_config(_read_text(Path(path)), source=str(path), overrides=overrides)


def parse_config(text: str, *, source: str, overrides: list[str] | None = None, check_rules: bool = True) -> RunConfig:
    """`load_config` of the text of a file; `source` names it in errors.

    Without `check_rules` only keys and types count: for the configuration of a run that another version began.
    """
    values, problems = parse_yaml(text)
    if values is None and problems:
        raise ConfigError(source, problems)
    if not isinstance(values, dict | None):
        raise ConfigError(source, ["the file must hold sections (`model:`, `train:`, ...), each with its keys."])
    values = dict(values or {})
    for override in overrides or []:
        problems += _apply_override(values, override)
    config = _build(values, problems, check_rules=check_rules)
    if problems:
        raise ConfigError(f"{source} with overrides" if overrides else source, problems)
    return config


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


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), [f"the file cannot be read: {error.strerror}. Check --config."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"the file is not UTF-8 text (byte {error.start}). Save it as UTF-8."]) from error


def _apply_override(values: dict[str, Any], override: str) -> list[str]:
    """Set one key of `values` in place; returns what is wrong with the override."""
    key, equals, text = override.partition("=")
    known = list(known_keys(RunConfig))
    if not equals or not key:
        return [f"override {override!r}: must be section.key=value, e.g. train.steps=100."]
    if key not in known:
        section = key.rpartition(".")[0]
        siblings = [name for parent, _, name in (other.rpartition(".") for other in known) if parent == section]
        return [unknown_key(key, known=known, siblings=siblings or list(field_types(RunConfig)))]
    inner = [other for other in known if other.startswith(f"{key}.")]
    if inner:
        return [f"override {override!r}: {key} is a section. Set one key at a time, e.g. {inner[0]}=..."]
    value, problems = parse_yaml(text)
    if problems:
        return [f"override {override!r}: the value is not valid YAML: {problem}" for problem in problems]
    *sections, name = key.split(".")
    for section in sections:
        inside = values.get(section)
        if not isinstance(inside, dict | None):
            return []  # reported where the section is read
        # Copied, because a YAML alias may have put the same mapping in two places.
        values[section] = dict(inside or {})
        values = values[section]
    values[name] = value
    return []


def _build(values: dict[str, Any], problems: list[str], *, check_rules: bool) -> RunConfig:
    """A `RunConfig` from the values of the file; problems of types, keys and rules are appended to `problems`."""
    hints = field_types(RunConfig)
    known = list(known_keys(RunConfig))
    problems += [unknown_key(str(name), known=known, siblings=list(hints)) for name in values if name not in hints]
    reading = Reading(known, problems)
    sections = {}
    for name, section in hints.items():
        written = {} if values.get(name) is None else values[name]  # null: all its keys are commented out
        sections[name] = read_section(section, written, key=name, reading=reading)
    config = RunConfig(**sections)
    if check_rules:
        problems += config_problems(config, unread=frozenset(reading.unread))
    return config


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
