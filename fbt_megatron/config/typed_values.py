"""Plain values from a file to typed dataclasses, checked against the annotations of the dataclass.

Reading never stops at the first fault: each one is noted, and the default stands in for the
value. A whole number is accepted where a number is wanted; true and false never are numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import keyword
import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fbt_megatron.config.schema import REFUSED_KEYS
from fbt_megatron.config.yaml_text import show_value

_SectionT = TypeVar("_SectionT")
_SCALARS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
}


@dataclass
class Reading:
    """What came of reading a file: the problems, and the full names of keys that could not be read.

    `known` are the full names of all keys of the file, for suggestions.
    """

    known: list[str]
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)

    def fail(self, key: str, value: object, rule: str) -> None:
        """Note that `value` breaks `rule`."""
        self.problems.append(f"{key}={show_value(value)}: {rule}.")


def is_section(annotation: object) -> bool:
    """True for a dataclass type, i.e. a section of the file rather than a value."""
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def attribute_name(key: str) -> str:
    """Name of a key's field: that of the key, with an underscore where the key is a word of Python (`async`)."""
    return f"{key}_" if keyword.iskeyword(key) else key


def field_types(section: type) -> dict[str, Any]:
    """Key -> annotation of each field of a dataclass; the key is the field's name as a file writes it."""
    hints = get_type_hints(section).items()
    return {name.removesuffix("_"): annotation for name, annotation in hints}


def field_values(section: Any) -> dict[str, Any]:
    """Key -> value of each field of a dataclass instance."""
    return {key: getattr(section, attribute_name(key)) for key in field_types(type(section))}


def describe_type(annotation: Any) -> str:
    """What a value of this type is, in the words of an error message or of the documentation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in args)
    if origin is tuple and args[-1] is Ellipsis:
        return f"a list with each entry {describe_type(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {describe_type(args[0])}"
    if origin is dict:
        return f"a mapping of {describe_type(args[0])} to {describe_type(args[1])}"
    if is_section(annotation):
        return "a mapping with " + ", ".join(field_types(annotation))
    return _SCALARS[annotation]


def known_keys(section: type, *, prefix: str = "") -> Iterator[str]:
    """Full names of all keys of a section and of the sections in it, the sections' own names included."""
    for name, annotation in field_types(section).items():
        yield prefix + name
        if is_section(annotation):
            yield from known_keys(annotation, prefix=f"{prefix}{name}.")


def read_section(section: type[_SectionT], values: object, *, key: str, reading: Reading) -> _SectionT:
    """An instance of the dataclass `section` from a mapping; `key` is the section's own full name.

    Faults are noted in `reading`; the default stands in for a value with a fault.
    """
    if not isinstance(values, dict):
        reading.fail(key, values, f"must be {describe_type(section)}")
        reading.unread.add(key)
        return section()
    hints = field_types(section)
    accepted = {}
    for name, value in values.items():
        full = f"{key}.{name}"
        before = len(reading.problems)
        if name not in hints:
            reading.problems.append(unknown_key(full, known=reading.known, siblings=list(hints)))
        elif is_section(hints[name]):
            written = {} if value is None else value  # null: all its keys are commented out
            accepted[attribute_name(name)] = read_section(hints[name], written, key=full, reading=reading)
        else:
            result = _read(hints[name], value, key=full, reading=reading)
            if len(reading.problems) == before:
                accepted[attribute_name(name)] = result
        if len(reading.problems) > before:
            reading.unread.add(full)
    return section(**accepted)


def unknown_key(key: str, *, known: list[str], siblings: list[str]) -> str:
    """The problem of a key that does not exist, with the key that was probably meant.

    `siblings` are the names that exist beside it. Tried in turn: the same name in other sections, a similar sibling,
    and where the section does not exist either, a similar full name. A key that is left out on purpose says why.
    """
    if key in REFUSED_KEYS:
        return f"{key}: {REFUSED_KEYS[key]}"
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    namesakes = [other for other in known if other.rpartition(".")[2] == name]
    near = [prefix + sibling for sibling in difflib.get_close_matches(name, siblings, n=1)]
    guess = namesakes or near
    if not guess and section not in known:
        guess = difflib.get_close_matches(key, known, n=1)
    if guess:
        return f"{key}: unknown key. Did you mean {' or '.join(guess[:3])}?"
    return f"{key}: unknown key. Known here: {', '.join(siblings)}."


def _read(annotation: Any, value: object, *, key: str, reading: Reading) -> Any:
    """`value` as `annotation`; on a mismatch a problem is appended and the result means nothing."""
    origin, args = get_origin(annotation), get_args(annotation)
    if is_section(annotation):
        return read_section(annotation, value, key=key, reading=reading)
    if origin in (Union, types.UnionType):
        return _read_union(annotation, value, key=key, reading=reading)
    if origin is tuple and isinstance(value, list) and (args[-1] is Ellipsis or len(args) == len(value)):
        entries = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(
            _read(entry, item, key=f"{key}[{index}]", reading=reading)
            for index, (entry, item) in enumerate(zip(entries, value, strict=True))
        )
    if origin is dict and isinstance(value, dict):
        return _read_mapping(args, value, key=key, reading=reading)
    if origin is Literal and any(type(option) is type(value) and option == value for option in args):
        return value
    if annotation is float and type(value) is int:
        return float(value)
    if isinstance(value, float) and annotation is float and not math.isfinite(value):
        reading.fail(key, value, "must be finite")
        return None
    if type(value) is annotation:
        return value
    reading.fail(key, value, f"must be {describe_type(annotation)}")
    return None


def _read_mapping(types_: Any, values: dict[Any, Any], *, key: str, reading: Reading) -> dict[Any, Any]:
    """A mapping whose keys and values have the two types of `types_`."""
    result = {}
    for name, value in values.items():
        typed_name = _read(types_[0], name, key=f"{key} key", reading=reading)
        result[typed_name] = _read(types_[1], value, key=f"{key}.{name}", reading=reading)
    return result


def _read_union(annotation: Any, value: object, *, key: str, reading: Reading) -> Any:
    """`value` as the member that has exactly its type, else as the first member that accepts it."""
    members = get_args(annotation)
    for member in sorted(members, key=lambda member: type(value) is not member):
        attempt = Reading(reading.known)
        result = _read(member, value, key=key, reading=attempt)
        if not attempt.problems:
            return result
    reading.fail(key, value, f"must be {describe_type(annotation)}")
    return None
