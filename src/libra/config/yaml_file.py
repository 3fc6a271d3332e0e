"""Reading YAML files of known keys.

Invariant: reading any file gives a checked value, or a `ConfigError` of one line that names the file, the key and the
remedy. Nothing in a file is executed. No key is ignored: an unknown or repeated key is an error.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Hashable, Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, field_validator
from yaml.nodes import MappingNode, ScalarNode

from libra.config.input_file import MOST, beyond_floats, read_input
from libra.config.rooms import OfRoom


class ConfigError(ValueError):
    """An invalid configuration. The message is one line: file, key, fault, remedy."""


class Section(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _is_no_flag(cls, given: object, validated: ValidatorFunctionWrapHandler) -> Any:
        made = validated(given)
        if _flag_for_number(given, made):
            raise ValueError(f"expected a number, not true or false (got {shown(given)})")
        if beyond_floats(made):
            raise ValueError(f"expected whole numbers of at most {MOST} (got {shown(given)})")
        return made


def _flag_for_number(given: object, made: object) -> bool:
    """Whether pydantic accepted a flag as 1 or 0."""
    if isinstance(given, bool):
        return isinstance(made, int | float) and not isinstance(made, bool)
    if isinstance(given, list | tuple) and isinstance(made, list | tuple):
        return any(map(_flag_for_number, given, made))
    if isinstance(given, dict) and isinstance(made, dict):
        return any(map(_flag_for_number, given.values(), made.values()))
    return False


S = TypeVar("S", bound=BaseModel)

# PyYAML raises these for texts such as `!!bool maybe`, `2024-13-01` or a thousand brackets.
_UNREADABLE = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxlist = _short.maxdict = 4
_short.maxstring = _short.maxother = _short.maxlong = 80


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_scalar(self, node: ScalarNode | MappingNode) -> Any:
        value = super().construct_scalar(node)
        if any("\ud800" <= character <= "\udfff" for character in value):  # half of a pair: no text can hold it
            raise yaml.MarkedYAMLError(problem=f"{value!r} is not text", problem_mark=node.start_mark)
        return value


def read_section(path: Path | str, schema: type[S], example: str, overrides: dict[str, Any] | None = None) -> S:
    """Read the file at `path` as a `schema`; `overrides`, by dotted key, replace its values. Raises `ConfigError`.

    `example` is a correct file, which the message names if the file is no mapping. Messages show no values of a schema
    with pydantic's `hide_input_in_errors`.
    """
    path = Path(path)
    data = _read_mapping(path, example, quoted=not schema.model_config.get("hide_input_in_errors"))
    for key, value in (overrides or {}).items():
        *parents, last = key.split(".")
        section = data
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise refusal(path, f"{parent}: expected a mapping of keys (got {shown(section)})")
        section[last] = value
    return checked(path, schema, data)


def checked(path: Path, schema: type[S], data: object) -> S:
    """Validate `data` from the file as a `schema`. Raises `ConfigError`."""
    try:
        return valid(schema, data)
    except ValueError as error:
        raise refusal(path, str(error)) from None


def valid(schema: type[S], data: object, within: str = "") -> S:
    """Validate `data`, found at the dotted key `within`, as a `schema`. Raises a ValueError whose message begins with
    the key.
    """
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        problem = _worst_problem(error, schema, within)
    except RecursionError:
        problem = "nested too deeply to be a configuration; make it flat"
    raise ValueError(problem)


def refusal(path: Path, problem: str) -> ConfigError:
    """A `ConfigError` with `problem` as one line that begins with the file."""
    return ConfigError(" ".join(f"{path}: {problem}".split()))


def shown(value: object) -> str:
    """A value in a message, shortened if it is long."""
    return _short.repr(value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` that `name` most likely means."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Message for an unknown `name` of a `what`, with the nearest known name or all known names."""
    known = list(known)
    close = nearest(name, known)
    hint = f"did you mean {close}?" if close else f"known are {', '.join(sorted(known))}"
    return f"unknown {what} {shown(name)}; {hint}"


def _read_mapping(path: Path, example: str, quoted: bool) -> dict[str, Any]:
    """Read the file as a mapping of keys. `quoted`: whether messages may quote the file."""
    try:
        text = read_input(path).decode()
    except OSError as error:
        raise refusal(path, f"{error.strerror}: give an existing YAML file") from None
    except UnicodeDecodeError as error:
        raise refusal(path, f"not UTF-8 text (byte {error.start}): give a YAML file") from None
    try:
        data = yaml.load(text, _Loader)
    except _UNREADABLE as error:
        raise refusal(path, f"not YAML: {error if quoted else _place(error)}") from None
    if not isinstance(data, dict):
        raise refusal(path, f"expected a mapping of keys, as in {example}")
    return data


def _place(error: Exception) -> str:
    """The position of an error in the file, without the text there."""
    mark = getattr(error, "problem_mark", None)
    return "it cannot be parsed" if mark is None else f"see line {mark.line + 1}, column {mark.column + 1}"


def _worst_problem(error: ValidationError, schema: type[BaseModel], within: str) -> str:
    # A misspelt key is also a missing key: report only the misspelling.
    problem = min(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
    location = [str(part) for part in problem["loc"]]
    key = ".".join([within, *location] if within else location)
    if problem["type"] == "extra_forbidden":
        return f"{key}: {unknown('key', location[-1], _keys_of(schema, location[:-1]))}"
    if problem["type"] == "missing":
        return f"{key}: this key is required; add it"
    if problem["type"] == "too_short":
        return f"{key}: give {problem['ctx']['min_length']} or more (got {problem['ctx']['actual_length']})"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("model_type", "dict_type"):
        message = "expected a mapping of keys"  # pydantic names the class
    if problem["type"] == "tuple_type":
        message = "expected a list"
    if not key:
        return message
    if problem["type"] == "value_error" or schema.model_config.get("hide_input_in_errors"):
        return f"{key}: {message}"
    return f"{key}: {message} (got {shown(problem['input'])})"


def _keys_of(schema: type[BaseModel], location: list[str]) -> list[str]:
    """The keys that the section at `location` may have."""
    section: Any = schema
    for part in location:
        section = without_null(section)
        if isinstance(section, type) and issubclass(section, BaseModel):
            section = section.model_fields[part].annotation
        elif hasattr(section, "__args__"):  # a mapping or a tuple of sections
            section = section.__args__[-1] if section.__args__[-1] is not Ellipsis else section.__args__[0]
    section = without_null(section)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []


def without_null(section: Any) -> Any:
    """The type without `None` and without annotations."""
    while get_origin(section) in (Annotated, Union, UnionType):
        kind, *about = get_args(section)
        section = next((it.kind for it in about if isinstance(it, OfRoom)), kind)
    return section
