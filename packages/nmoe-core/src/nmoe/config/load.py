# SPDX-License-Identifier: Apache-2.0
"""TOML file plus `--set` overrides -> checked `Config`.

The reader follows the dataclasses of `nmoe.config.schema`: types, ranges and choices are taken from the annotations, so
a new key needs no code here. Every message names the file (or the override), the key, what was found and what fits.
"""

import difflib
import math
import tomllib
import typing
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from nmoe.config.rules import violations
from nmoe.config.schema import Bound, Config
from nmoe.config.tokens import in_steps
from nmoe.errors import ConfigError
from nmoe.words import MOST_INT

__all__ = ["config_from_tables", "describe", "load_config", "parse_config"]

_TEXTS = tuple[str, ...]
"""What may also be written as one text: a list of one, or of none where it is empty."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a config.

    Args:
        path: a TOML file.
        overrides: texts `section.key=value`, applied in order over the file. The value is TOML; for keys that hold
            text the quotes may be left out (`run.name=trial`).

    Returns:
        The resolved config; `run.name` is the file's stem unless given.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown or missing, a value has the wrong type or is out
            of range, or two keys contradict each other.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")  # editors on Windows begin a file with a mark
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, expected a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}), expected a TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_config(text, where=str(path), name=path.stem, overrides=overrides)


def parse_config(text: str, *, where: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` for TOML text; `where` is named in messages, `name` is the default of `run.name`."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    return config_from_tables(tables, where=where, name=name, overrides=overrides)


def config_from_tables(tables: dict[str, Any], *, where: str, name: str, overrides: Sequence[str] = ()) -> Config:
    """`load_config` for tables that were read already, such as those in the manifest of a checkpoint."""
    origins: dict[str, str] = {}
    for override in overrides:
        _apply_override(tables, override, origins)
    _refuse_unknown(tables, _names(Config), where, kind="section", prefix="")
    types = typing.get_type_hints(Config, include_extras=True)
    sections = {}
    for section, kind in types.items():
        table = tables.get(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section} = {table!r} is not a section; write [{section}]")
        sections[section] = _build(kind, table, where=where, prefix=f"{section}.", origins=origins)
    config = Config(**sections)
    if not config.run.name:
        config = replace(config, run=replace(config.run, name=name))
    try:
        config = in_steps(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    for message in violations(config):
        raise ConfigError(f"{where}: {message}")
    return config


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _apply_override(tables: dict[str, Any], override: str, origins: dict[str, str]) -> None:
    """Writes one `section.key=value` into `tables` and notes in `origins` where the key's value came from."""
    where = f"--set {override}"
    dotted, equals, text = override.partition("=")
    section, dot, key = dotted.strip().partition(".")
    if not (equals and dot and section and key):
        raise ConfigError(f"{where}: expected section.key=value, such as train.steps=100")
    _refuse_unknown([section], _names(Config), where, kind="section", prefix="")
    kind = typing.get_type_hints(Config)[section]
    _refuse_unknown([key], _names(kind), where, kind="key", prefix=f"{section}.")
    hint = typing.get_type_hints(kind, include_extras=True)[key]
    text = text.strip()
    is_text = hint is str or (get_origin(hint) is Literal) or hint == _TEXTS
    if is_text and not text.startswith(('"', "'", "[") if hint == _TEXTS else ('"', "'")):
        value: Any = text
    else:
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except ValueError:
            raise ConfigError(f"{where}: {text!r} is not a TOML value; expected {describe(hint)}") from None
    table = tables.setdefault(section, {})
    if isinstance(table, dict):
        table[key] = value
        origins[f"{section}.{key}"] = where


def _refuse_unknown(found: Any, known: Sequence[str], where: str, *, kind: str, prefix: str) -> None:
    for name in found:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown {kind} {prefix}{name}; {hint}")


def _build(kind: Any, table: Mapping[str, Any], *, where: str, prefix: str, origins: Mapping[str, str]) -> Any:
    """An instance of the dataclass `kind` from TOML values."""
    hints = typing.get_type_hints(kind, include_extras=True)
    _refuse_unknown(table, list(hints), where, kind="key", prefix=prefix)
    values = {}
    for field in fields(kind):
        name = f"{prefix}{field.name}"
        if field.name in table:
            values[field.name] = _convert(table[field.name], hints[field.name], origins.get(name, where), name)
        elif _is_required(field):
            raise ConfigError(f"{where}: {name} is missing; expected {describe(hints[field.name])}")
    return kind(**values)


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _convert(value: Any, hint: Any, where: str, name: str) -> Any:
    """`value` as read from TOML, checked against the annotation `hint` and brought to its type."""
    problem = ConfigError(f"{where}: {name} = {_shown(value)}: expected {describe(hint)}")
    origin = get_origin(hint)
    if origin is Annotated:
        kind, bound = get_args(hint)
        number = _convert_plain(value, kind, problem)
        if not bound.admits(number):
            raise problem
        return number
    if origin is Literal:
        if value not in get_args(hint) or not isinstance(value, str):
            raise problem
        return value
    if origin is tuple:
        items = get_args(hint)
        if hint == _TEXTS and isinstance(value, str):
            value = [value] if value else []
        if not isinstance(value, list):
            raise problem
        if items[-1] is Ellipsis:
            return tuple(_convert(item, items[0], where, f"{name}[{i}]") for i, item in enumerate(value))
        if len(value) != len(items):
            raise problem
        return tuple(_convert(item, kind, where, name) for item, kind in zip(value, items, strict=True))
    if is_dataclass(hint):
        # A source may be given by its path alone.
        table = {"path": value} if isinstance(value, str) else value
        if not isinstance(table, dict):
            raise problem
        return _build(hint, table, where=where, prefix=f"{name}.", origins={})
    return _convert_plain(value, hint, problem)


def _convert_plain(value: Any, kind: Any, problem: ConfigError) -> Any:
    """bool, int, float or str, never one for another; an integer where a float is expected is the float."""
    if type(value) is int and value > MOST_INT:
        raise ConfigError(f"{problem}, at most {MOST_INT}")
    if type(value) is int and value < -MOST_INT:
        raise problem
    if type(value) is str and not _is_writable(value):
        raise ConfigError(
            f"{problem} of whole characters, without NUL, line ends or other controls: it may name a file"
        )
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if kind is not float and type(value) is kind:
        return value
    raise problem


def _is_writable(text: str) -> bool:
    """Whether a text can be stored, can name a file and stands in one line: no control, no half of a surrogate pair."""
    return not any(unicodedata.category(character) in ("Cc", "Cs") for character in text)


def _shown(value: Any) -> str:
    return "true" if value is True else "false" if value is False else repr(value)


def describe(hint: Any) -> str:
    """What a value of this annotation looks like, in words, for messages and the manual."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}
    origin = get_origin(hint)
    if origin is Annotated:
        kind, bound = get_args(hint)
        assert isinstance(bound, Bound)
        return f"{words[kind]} {bound}"
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in get_args(hint))
    if hint == _TEXTS:
        return "a text or a list of texts"
    if origin is tuple:
        items = get_args(hint)
        if items[-1] is Ellipsis:
            return f"a list, each {describe(items[0])}"
        return "a list of " + ", ".join(describe(item) for item in items)
    if is_dataclass(hint):
        return "a path or {path = ..., weight = ...}"
    return words[hint]
