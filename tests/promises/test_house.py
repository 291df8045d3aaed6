"""How the source is kept: no ambient state, nothing that has outgrown its name, no name that says nothing."""

import ast
from itertools import chain

import pytest

from tests.promises.sources import PACKAGE, Source, all_sources

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 70
NAMES_THAT_SAY_NOTHING = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "base",
    "core",
    "manager",
    "wrapper",
    "misc",
    "v2",
}

every_source = pytest.mark.parametrize("source", all_sources(), ids=lambda source: source.name)


@every_source
def test_no_global_statement(source: Source) -> None:
    assert [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Global)] == []


@every_source
def test_the_environment_is_read_in_one_file(source: Source) -> None:
    if source.name == "environment.py":
        return
    read = {"environ", "environb", "getenv", "putenv"}
    attributes = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    imports = {alias.name for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert read.isdisjoint(attributes | imports)


@every_source
def test_no_file_has_outgrown_its_name(source: Source) -> None:
    assert len(source.text.splitlines()) <= MOST_LINES_OF_A_FILE


@every_source
def test_no_function_has_outgrown_its_name(source: Source) -> None:
    functions = [node for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    lengths = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES_OF_A_FUNCTION} == {}


@every_source
def test_a_module_opens_with_what_it_is(source: Source) -> None:
    assert source.text == "" or ast.get_docstring(source.tree)


def test_no_module_has_a_name_that_says_nothing() -> None:
    paths = [source.path.relative_to(PACKAGE).with_suffix("") for source in all_sources()]
    words = set(chain.from_iterable(part.split("_") for path in paths for part in path.parts))
    assert words.isdisjoint(NAMES_THAT_SAY_NOTHING)
