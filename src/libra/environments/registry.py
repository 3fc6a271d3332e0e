"""Loads the environment that a configuration names. It imports only names from the user's configuration, and calls only
classes with the methods of the protocol.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from libra.config.run import ConfigError, EnvironmentConfig
from libra.environments.protocol import Environment

METHODS = ("prompts", "parse", "reward", "demonstration")
ATTRIBUTES = tuple(name for name, member in vars(Environment).items() if isinstance(member, property))
BUILT_IN = {"calculator": "libra.environments.calculator:Calculator"}


def load_environment(config: EnvironmentConfig, beside: Path) -> Environment:
    """The environment of `config.kind`: a built-in name, or `module:Class` importable from the directory `beside`."""
    module_name, colon, class_name = BUILT_IN.get(config.kind, config.kind).partition(":")
    if not colon:
        raise ConfigError(
            f"environment.kind: unknown environment {config.kind!r}; use {', '.join(BUILT_IN)} or your own module:Class"
        )
    if config.kind not in BUILT_IN and str(beside) not in sys.path:
        sys.path.insert(0, str(beside))
    try:
        factory: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # noqa: BLE001 - the module is somebody else's code: any failure is bad input
        raise ConfigError(
            f"environment.kind: {config.kind!r} cannot be imported ({type(error).__name__}: {error});"
            f" give module:Class with the module in {beside}"
        ) from None
    lacking = [name for name in METHODS if not callable(getattr(factory, name, None))]
    if not isinstance(factory, type) or lacking:
        what = f"has no {', '.join(lacking)}" if isinstance(factory, type) else "is not a class"
        raise ConfigError(
            f"environment.kind: {config.kind!r} {what}; give a class with the members of"
            " libra.environments.protocol.Environment"
        )
    try:
        environment: Environment = factory(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.options: {error}") from None
    if missing := [name for name in ATTRIBUTES if not hasattr(environment, name)]:
        raise ConfigError(
            f"environment.kind: {config.kind!r} has no {', '.join(missing)}; all of Environment's members are needed"
        )
    for tool in config.tools:
        if tool not in environment.tools:
            raise ConfigError(
                f"environment.tools: unknown tool {tool!r}; {config.kind} has {', '.join(sorted(environment.tools))}"
            )
    if not config.tools:
        raise ConfigError(f"environment.tools: empty; name at least one of {', '.join(environment.tools)}")
    return environment
