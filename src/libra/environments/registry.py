"""Loads the environment that a configuration names. Only modules named in the user's configuration are imported, and
only classes with the protocol's methods are called.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from libra.config.run import ConfigError, EnvironmentConfig
from libra.environments.protocol import Environment
from libra.environments.served import ServedEnvironment

METHODS = ("prompts", "parse", "reward", "demonstration")
SERVED_METHODS = ("prompts", "opened", "play")
ATTRIBUTES = tuple(name for name, member in vars(Environment).items() if isinstance(member, property))
SERVED_ATTRIBUTES = ("name", "turn_tokens")
BUILT_IN = {
    "calculator": "libra.environments.calculator:Calculator",
    "command": "libra.environments.command:CommandEnvironment",
    "openenv": "libra.environments.openenv:OpenEnvEnvironment",
    "verifiers": "libra.integrations.verifiers:VerifiersEnvironment",
}
_ALONE = ("calculator", "command", "openenv")  # built-in kinds, for which no module of the user is imported


def load_environment(config: EnvironmentConfig, beside: Path) -> Environment | ServedEnvironment:
    """The environment of `config.kind`: a built-in name, or `module:Class` importable from the directory `beside`."""
    module_name, colon, class_name = BUILT_IN.get(config.kind, config.kind).partition(":")
    if not colon:
        raise ConfigError(
            f"environment.kind: unknown environment {config.kind!r}; use {', '.join(BUILT_IN)} or your own module:Class"
        )
    if config.kind not in _ALONE and str(beside) not in sys.path:
        sys.path.insert(0, str(beside))
    try:
        factory: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # noqa: BLE001 - the module is somebody else's code: any failure is bad input
        why = f"environment.kind: {config.kind!r} cannot be imported ({type(error).__name__}: {error})"
        remedy = "" if config.kind in BUILT_IN else f"; give module:Class with the module in {beside}"
        raise ConfigError(why + remedy) from None
    served = callable(getattr(factory, "play", None))
    methods, attributes = (SERVED_METHODS, SERVED_ATTRIBUTES) if served else (METHODS, ATTRIBUTES)
    lacking = [name for name in methods if not callable(getattr(factory, name, None))]
    if not isinstance(factory, type) or lacking:
        what = f"has no {', '.join(lacking)}" if isinstance(factory, type) else "is not a class"
        raise ConfigError(
            f"environment.kind: {config.kind!r} {what}; give a class with the members of"
            f" {'libra.environments.served.ServedEnvironment' if served else 'libra.environments.protocol.Environment'}"
        )
    try:
        if config.kind in BUILT_IN:
            _check_options(config, factory)
        environment: Any = factory(**config.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"environment.options: {error}") from None
    if missing := [name for name in attributes if not hasattr(environment, name)]:
        raise ConfigError(
            f"environment.kind: {config.kind!r} has no {', '.join(missing)}; all members of its protocol are needed"
        )
    if isinstance(environment, ServedEnvironment):
        if config.tools:
            raise ConfigError(f"environment.tools: {config.kind} has its own tools: remove this key")
        return environment
    made: Environment = environment
    _check_tools(config, made)
    return made


def _check_options(config: EnvironmentConfig, factory: Any) -> None:
    """Raises ValueError if a built-in kind does not take the options."""
    known = inspect.signature(factory).parameters
    lacking = [name for name, it in known.items() if it.default is it.empty and name not in config.options]
    if lacking:
        them = "it" if len(lacking) == 1 else "them"
        raise ValueError(f"{config.kind} needs {' and '.join(lacking)}; add {them}")
    if unknown := [name for name in config.options if name not in known]:
        raise ValueError(f"{config.kind} has no option {unknown[0]!r}; its options are {', '.join(known)}")


def _check_tools(config: EnvironmentConfig, environment: Environment) -> None:
    for tool in config.tools:
        if tool not in environment.tools:
            raise ConfigError(
                f"environment.tools: unknown tool {tool!r}; {config.kind} has {', '.join(sorted(environment.tools))}"
            )
    if not config.tools:
        raise ConfigError(f"environment.tools: empty; name at least one of {', '.join(environment.tools)}")
