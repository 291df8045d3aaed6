"""Imports point the way docs/structure.md says, and never in a circle.

An import inside a function counts like any other: it is knowledge all the same.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.promises.lines import read_rows, room_of, row_of
from tests.promises.sources import PACKAGE, Source, all_sources, read_source

# Modules that need torch in a room that has none. Nobody loads them before somebody gives a module.
LATE = ("shardwise.model.trace", "shardwise.model.tracing")

every_source = pytest.mark.parametrize("source", all_sources(), ids=lambda source: source.name)


def imported_names(source: Source, nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Every dotted name that the nodes import, relative ones made absolute. `from a import b` gives `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = source.module.split(".")
            above = here[: len(here) - node.level + source.is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def known_modules(source: Source) -> set[str]:
    """The modules of Shardwise that a source imports, anywhere in it."""
    modules = {other.module for other in all_sources()}
    known = set()
    for name in imported_names(source, ast.walk(source.tree)):
        if name.split(".")[0] == "shardwise":
            # `from shardwise.units import format_bytes` is knowledge of `shardwise.units`.
            known.add(name if name in modules else name.rpartition(".")[0])
    return known


def module_level_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs at import: everything but the bodies of functions, and of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield node
        yield from module_level_nodes(node)


def test_the_table_of_lines_is_read_whole_and_in_order() -> None:
    rows = read_rows()
    lines = [row.line for row in rows]
    rooms = [room for row in rows for room in row.rooms]
    assert lines == sorted(lines)
    assert set(lines) == set(range(max(lines) + 1))
    assert len(rooms) == len(set(rooms))
    assert {"errors", "trace", "schedule", "engine", "cli", "__main__"} <= set(rooms)


def test_every_room_is_in_the_table_and_the_table_says_which_are_here() -> None:
    here = {room for source in all_sources() if (room := room_of(source.module)) is not None}
    assert {room for row in read_rows() if row.is_here for room in row.rooms} == here


@every_source
def test_a_package_imports_only_from_lines_above_its_own(source: Source) -> None:
    room = room_of(source.module)
    if room is None:
        return  # The root names what it offers by string; see the next test.
    row = row_of(room)
    assert row is not None, f"{source.name} is in no row of docs/structure.md"
    for module in known_modules(source):
        other = room_of(module)
        if other is None:
            assert room == "cli", f"{source.name} imports the root of the package; only cli.py may, for the version"
            continue
        other_row = row_of(other)
        assert other_row is not None, f"{source.name} imports {module}, which is in no row of docs/structure.md"
        assert other_row == row or other_row.line < row.line, (
            f"{source.name} on line {row.line} imports {module} of line {other_row.line}"
        )


def test_the_root_of_the_package_imports_no_room_when_it_is_loaded() -> None:
    root = read_source(PACKAGE / "__init__.py")
    names = list(imported_names(root, module_level_nodes(root.tree)))
    assert [name for name in names if name.startswith("shardwise")] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {source.module: known_modules(source) - {source.module} for source in all_sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports go in a circle: " + " -> ".join(reversed(error.args[1])))


@every_source
def test_a_package_that_says_no_to_torch_imports_none_when_it_is_loaded(source: Source) -> None:
    room = room_of(source.module)
    row = None if room is None else row_of(room)
    if is_late(source.module) or (row is not None and row.may_use_torch):
        return
    roots = {name.split(".")[0] for name in imported_names(source, module_level_nodes(source.tree))}
    assert roots.isdisjoint({"torch", "triton"})


@every_source
def test_nobody_loads_what_needs_torch_before_it_is_needed(source: Source) -> None:
    if not is_late(source.module):
        assert [name for name in imported_names(source, module_level_nodes(source.tree)) if is_late(name)] == []


def is_late(module: str) -> bool:
    return any(module == late or module.startswith(f"{late}.") for late in LATE)
