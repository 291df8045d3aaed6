"""The public names: one screen, and every one of them there."""

import ast

import pytest

import shardwise
from tests.promises.sources import PACKAGE, read_source

LINES_OF_A_SCREEN = 24


@pytest.mark.parametrize("name", shardwise.__all__)
def test_every_public_name_is_there(name: str) -> None:
    value = getattr(shardwise, name)
    assert value.__name__ == name


def test_the_public_names_are_listed_in_order_and_fit_one_screen() -> None:
    assert shardwise.__all__ == sorted(set(shardwise.__all__))
    assert dir(shardwise) == sorted([*shardwise.__all__, "__version__"])
    assert len(dir(shardwise)) <= LINES_OF_A_SCREEN


def test_type_checkers_and_programs_are_told_the_same_homes() -> None:
    tree = read_source(PACKAGE / "__init__.py").tree
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if str(node.module).startswith("shardwise")
    }
    assert {name: getattr(shardwise, name).__module__ for name in shardwise.__all__} == told


def test_a_name_that_is_not_there_is_an_attribute_error_as_in_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'shardwise' has no attribute 'shedule'"):
        _ = shardwise.shedule  # type: ignore[attr-defined]
