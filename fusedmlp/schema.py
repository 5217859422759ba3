"""The machinery of the configuration: collecting what is wrong, and turning composed YAML into dataclasses.

What the keys are is in :mod:`fusedmlp.config`. A composed Hydra config is converted once, by :func:`load`; no
``DictConfig`` travels further inward. What is wrong with a config is reported before any data is read, as one
:class:`ConfigError`: first all unset and broken values, then all sections, then what concerns several of them.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A configuration that cannot be run. ``problems`` holds one line for each thing that is wrong."""

    def __init__(self, problems: list[str] | str) -> None:
        self.problems = [problems] if isinstance(problems, str) else problems
        super().__init__("\n".join(self.problems))


class Checks:
    """Collects what is wrong with one section, so that all of it is reported at once."""

    def __init__(self, section: Any, prefix: str) -> None:
        self.section, self.prefix = section, prefix
        self.problems: list[str] = []

    def choice(self, key: str, *allowed: str | None) -> None:
        """``key`` must be one of ``allowed``; the closest one is suggested."""
        self._one_of(key, getattr(self.section, key), allowed)

    def choices(self, key: str, *allowed: str) -> None:
        """``key``, a list, must hold at least one item, each of ``allowed`` and each once."""
        values = getattr(self.section, key)
        for value in values:
            self._one_of(key, value, allowed)
        self._a_set(key, values)

    def numbers(self, key: str, *, ge: int) -> None:
        """``key``, a list of integers, must hold at least one, each at least ``ge`` and each once."""
        values = getattr(self.section, key)
        self.problems += [f"{self.prefix}{key} holds {v}, which must be >= {ge}" for v in values if v < ge]
        self._a_set(key, values)

    def _a_set(self, key: str, values: list[Any]) -> None:
        self.that(bool(values), f"{self.prefix}{key} is empty; give at least one")
        self.that(len(set(values)) == len(values), f"{self.prefix}{key} holds an item twice")

    def _one_of(self, key: str, value: Any, allowed: tuple[str | None, ...]) -> None:
        if value in allowed:
            return
        words = ["null" if a is None else a for a in allowed]
        near = difflib.get_close_matches(str(value), words, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        self.problems.append(f"{self.prefix}{key}={value!r} is not one of {', '.join(words)}{hint}")

    def number(
        self,
        *keys: str,
        ge: float | None = None,
        gt: float | None = None,
        le: float | None = None,
        lt: float | None = None,
    ) -> None:
        """Each of ``keys`` must be a finite number within the bounds, or None where its type allows that."""
        for key in keys:
            value = getattr(self.section, key)
            if value is None:
                continue
            bounds = [
                (ge is None or value >= ge, f">= {ge}"),
                (gt is None or value > gt, f"> {gt}"),
                (le is None or value <= le, f"<= {le}"),
                (lt is None or value < lt, f"< {lt}"),
            ]
            broken = [text for holds, text in bounds if not holds]
            if isinstance(value, float) and not math.isfinite(value):
                self.problems.append(f"{self.prefix}{key}={value} is not a finite number")
            elif broken:
                self.problems.append(f"{self.prefix}{key}={value} must be {' and '.join(broken)}")

    def that(self, holds: bool, message: str) -> None:
        """``message`` (which names the key) is a problem unless ``holds``."""
        if not holds:
            self.problems.append(message)

    def done(self) -> None:
        """Raise :class:`ConfigError` when anything was wrong."""
        if self.problems:
            raise ConfigError(self.problems)


def schema_keys(schema: type, prefix: str = "") -> list[str]:
    """All dotted keys of a config dataclass, sections included."""
    keys: list[str] = []
    for f in fields(schema):
        keys.append(prefix + f.name)
        if isinstance(f.type, type) and is_dataclass(f.type):
            keys += schema_keys(f.type, prefix + f.name + ".")
    return keys


def nearest_key(key: str, schema: type) -> str | None:
    """The existing dotted key that looks most like ``key``: the same last word elsewhere, else similar spelling."""
    keys = schema_keys(schema)
    last = key.lower().rpartition(".")[2]
    by_word: dict[str, str] = {}
    for k in keys:
        by_word.setdefault(k.rpartition(".")[2], k)
    if last in by_word and by_word[last] != key:
        return by_word[last]
    close = difflib.get_close_matches(key.lower(), keys, n=1, cutoff=0.75)
    if close:
        return close[0]
    close = difflib.get_close_matches(last, list(by_word), n=1, cutoff=0.6)
    return by_word[close[0]] if close else None


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[DictConfig, str, str]]:
    for key in node:
        name = str(key)
        if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
            yield node, name, prefix + name
            continue
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not child._is_none():
            yield from _leaves(child, prefix + name + ".")
        else:
            yield node, name, prefix + name


def load(cfg: DictConfig, schema: type) -> Any:
    """Convert a composed config into an instance of ``schema``, the dataclass it was typed with.

    Raises:
        ConfigError: listing every unset value, every broken ``${...}`` and every invalid value at once.
    """
    problems: list[str] = []
    for node, name, key in _leaves(cfg):
        if OmegaConf.is_missing(node, name):
            problems.append(f"{key} is not set; give it as {key}=VALUE")
            continue
        try:
            _ = node[name]
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {str(error).splitlines()[0]}")
    if problems:
        raise ConfigError(problems)
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return _build(schema, plain, problems)


def _build(
    schema: type, values: dict[Any, Any], problems: list[str], prefix: str = "", root: type | None = None
) -> Any:
    """Build ``schema`` bottom-up; sections report before the whole, and the whole is built only from sound sections."""
    root = root or schema
    known = {f.name: f for f in fields(schema)}
    for name in values:
        if name not in known:
            problems.append(unknown_key(prefix + str(name), root))
    arguments: dict[str, Any] = {}
    for name, f in known.items():
        if name not in values:
            continue
        nested = isinstance(f.type, type) and is_dataclass(f.type)
        arguments[name] = (
            _build(f.type, values[name], problems, prefix + name + ".", root)  # type: ignore[arg-type]
            if nested and isinstance(values[name], dict)
            else values[name]
        )
    if prefix == "" and problems:
        raise ConfigError(problems)
    try:
        return schema(**arguments)
    except ConfigError as error:
        if prefix == "":
            raise
        problems.extend(error.problems)
        return None


def unknown_key(key: str, schema: type) -> str:
    """The sentence for a key that does not exist."""
    near = nearest_key(key, schema)
    return f"{key} is not a config key" + (f"; did you mean {near}?" if near else "")


def to_dict(config: Any) -> dict[str, Any]:
    """A config dataclass as plain nested dicts, lists and scalars (for YAML, JSON, W&B and checkpoints)."""
    return asdict(config)


def from_dict(values: dict[str, Any], schema: type) -> Any:
    """The inverse of :func:`to_dict`.

    Raises:
        ConfigError: for unknown keys or invalid values.
    """
    return _build(schema, values, [])
