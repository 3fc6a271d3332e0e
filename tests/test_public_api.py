"""`libra`'s public names: type checkers and the running program find each in the module that defines it."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import libra


def imported_for_type_checkers() -> dict[str, str]:
    tree = ast.parse(Path(libra.__file__).read_bytes())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_see_the_names_that_the_program_loads() -> None:
    assert imported_for_type_checkers() == libra._HOME


@pytest.mark.parametrize("name", libra.__all__)
def test_a_name_is_loaded_from_the_module_that_defines_it(name: str) -> None:
    home = libra._HOME[name]
    defined = getattr(import_module(home), name).__module__
    assert defined == home or defined.startswith(f"{home}.")  # a package may have it in a module of its own
