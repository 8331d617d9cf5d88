"""A YAML file of sections and `section.key=value` overrides to one dataclass, with every fault that was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar

from fbt_megatron.config.typed_values import Reading, field_types, known_keys, read_section, unknown_key
from fbt_megatron.config.yaml_text import parse_yaml
from fbt_megatron.errors import ConfigError

_DocumentT = TypeVar("_DocumentT")
_CheckedT = TypeVar("_CheckedT", contravariant=True)


class Check(Protocol[_CheckedT]):
    """Broken rules of a whole file, each "section.key=value: rule. remedy"."""

    def __call__(self, document: _CheckedT, /, *, unread: frozenset[str]) -> list[str]:
        """`unread` are the keys that hold their default because their value could not be read."""
        ...


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), [f"the file cannot be read: {error.strerror}. Check the path."]) from error
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [f"the file is not UTF-8 text (byte {error.start}). Save it as UTF-8."]) from error


def read_document(
    root: type[_DocumentT],
    text: str,
    *,
    source: str,
    overrides: list[str] | None = None,
    check: Check[_DocumentT] | None = None,
) -> _DocumentT:
    """An instance of `root`, a dataclass whose fields are all sections, from the text of a file and overrides.

    A key that is absent has its default. `check` gives the broken rules of what was read. Raises ConfigError with every
    problem found; `source` names the file there.
    """
    values, problems = parse_yaml(text)
    if values is None and problems:
        raise ConfigError(source, problems)
    if not isinstance(values, dict | None):
        names = ", ".join(f"`{name}:`" for name in list(field_types(root))[:2])
        raise ConfigError(source, [f"the file must hold sections ({names}, ...), each with its keys."])
    values = dict(values or {})
    for override in overrides or []:
        problems += _apply_override(root, values, override)
    document = _build(root, values, problems, check=check)
    if problems:
        raise ConfigError(f"{source} with overrides" if overrides else source, problems)
    return document


def _apply_override(root: type, values: dict[str, Any], override: str) -> list[str]:
    """Set one key of `values` in place; returns what is wrong with the override."""
    key, equals, text = override.partition("=")
    known = list(known_keys(root))
    if not equals or not key:
        example = next(name for name in known if "." in name)
        return [f"override {override!r}: must be section.key=value, e.g. {example}=..."]
    if key not in known:
        section = key.rpartition(".")[0]
        siblings = [name for parent, _, name in (other.rpartition(".") for other in known) if parent == section]
        return [unknown_key(key, known=known, siblings=siblings or list(field_types(root)))]
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


def _build(
    root: type[_DocumentT], values: dict[str, Any], problems: list[str], *, check: Check[_DocumentT] | None
) -> _DocumentT:
    """A `root` from the values of the file; problems of types, keys and rules are appended to `problems`."""
    hints = field_types(root)
    known = list(known_keys(root))
    problems += [unknown_key(str(name), known=known, siblings=list(hints)) for name in values if name not in hints]
    reading = Reading(known, problems)
    sections = {}
    for name, section in hints.items():
        written = {} if values.get(name) is None else values[name]  # null: all its keys are commented out
        sections[name] = read_section(section, written, key=name, reading=reading)
    document = root(**sections)
    if check is not None:
        problems += check(document, unread=frozenset(reading.unread))
    return document
