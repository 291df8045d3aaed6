"""Imports point the way docs/structure.md says, and never in a circle: not of files, and not of rooms."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import product

import pytest

import shardwise
from tests.promises.imports import imported_names, known_modules, module_level_nodes
from tests.promises.lines import Row, child_of, read_rows, read_sub_rows, room_of, row_of, rows_in, sub_rows_in
from tests.promises.sources import PACKAGE, ROOT, Source, all_sources, parse_source, read_source

# Modules that need torch in a room that has none. Nobody loads them before somebody gives a module.
LATE = ("shardwise.model.trace", "shardwise.model.tracing")


def test_the_table_of_lines_is_read_whole_and_in_order() -> None:
    rows = read_rows()
    lines = [row.line for row in rows]
    rooms = [room for row in rows for room in row.rooms]
    assert lines == sorted(lines)
    assert set(lines) == set(range(max(lines) + 1))
    assert len(rooms) == len(set(rooms))
    assert {"errors", "trace", "schedule", "planner", "engine", "training", "cli", "__main__"} <= set(rooms)


def test_every_room_is_in_the_table_and_the_table_says_which_are_here() -> None:
    here = {room for source in all_sources() if (room := room_of(source.module)) is not None}
    assert {room for row in read_rows() for room in row.rooms} == here


def test_every_sub_room_of_a_room_that_has_lines_is_in_the_table_and_here() -> None:
    named = [room for row in read_sub_rows() for room in row.rooms]
    assert len(named) == len(set(named))
    paths = {source.module.replace(".", "/").removeprefix("shardwise/") for source in all_sources()}
    assert set(named) <= paths
    packages = {path for path in paths if (PACKAGE / path).is_dir()}
    parents = {name.rpartition("/")[0] for name in named}
    assert {each for each in packages if each.rpartition("/")[0] in parents} <= set(named)


def imports_that_do_not_point_up(sources: Iterable[Source], rows: tuple[Row, ...]) -> list[str]:
    """What a file imports of a room that is not above its own. The root names what it offers by string."""
    found = []
    for source in sources:
        room = room_of(source.module)
        if room is None:
            continue
        row = row_of(room, rows)
        if row is None:
            found.append(f"{source.name} is in no row of docs/structure.md")
            continue
        for module in sorted(known_modules(source)):
            other = room_of(module)
            other_row = None if other is None else row_of(other, rows)
            if other is None:
                if room != "cli":
                    found.append(f"{source.name} imports the root of the package; only cli.py may, for the version")
            elif other_row is None:
                found.append(f"{source.name} imports {module}, which is in no row of docs/structure.md")
            elif other_row != row and other_row.line >= row.line:
                found.append(f"{source.name} on line {row.line} imports {module} of line {other_row.line}")
    return found


def imports_between_sub_rooms_that_do_not_point_up(sources: Iterable[Source], rows: tuple[Row, ...]) -> list[str]:
    """The same among the sub-rooms of one parent. What no row names may know, and be known by, all of them."""
    found = []
    parents = sorted({room.rpartition("/")[0] for row in rows for room in row.rooms})
    for source, parent in product(sources, parents):
        row = row_of(child_of(parent, source.module) or "", rows)
        if row is None:
            continue
        for module in sorted(known_modules(source)):
            other = row_of(child_of(parent, module) or "", rows)
            if other is not None and other != row and other.line >= row.line:
                found.append(f"{source.name} on line {row.line} of {parent}/ imports {module} of line {other.line}")
    return found


def test_a_package_imports_only_from_lines_above_its_own() -> None:
    found = imports_that_do_not_point_up(all_sources(), read_rows())
    assert not found, "\n".join(["", *found])


def test_a_sub_room_imports_only_from_lines_above_its_own_among_its_siblings() -> None:
    found = imports_between_sub_rooms_that_do_not_point_up(all_sources(), read_sub_rows())
    assert not found, "\n".join(["", *found])


TABLE = """
| line | package | one sentence | torch? |
|---|---|---|---|
| 0 | `errors.py` `units.py` | what all use | no |
| 1 | `model/` | what is computed | no |
| 1 | `cluster/` | what it runs on | no |
| 2 | `cost/` | what it costs | yes |

| line | sub-room | one sentence |
|---|---|---|
| 0 | `cost/step.py` | the step |
| 1 | `cost/one/` | one |
| 1 | `cost/two/` `cost/play.py` | two, which know each other |
"""


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("model/model.py", "errors", True),
        ("cost/step.py", "model.model", True),
        ("units.py", "errors", True),
        ("model/model.py", "model.shape", True),
        ("model/model.py", "cluster.device", False),
        ("model/model.py", "cost.step", False),
        ("errors.py", "model.model", False),
        ("dataflow/data.py", "errors", False),
        ("errors.py", "dataflow.data", False),
        ("cost/one/a.py", "cost.step", True),
        ("cost/one/a.py", "cost.one.b", True),
        ("cost/two/a.py", "cost.play", True),
        ("cost/play.py", "cost.two.a", True),
        # What no row names is bound by circles alone.
        ("cost/bounds.py", "cost.two.a", True),
        ("cost/one/a.py", "cost.bounds", True),
        ("cost/one/a.py", "cost.two.a", False),
        ("cost/play.py", "cost.one.a", False),
        ("cost/step.py", "cost.one.a", False),
    ],
)
def test_an_import_that_points_down_or_sideways_is_found(importer: str, imported: str, is_allowed: bool) -> None:
    rows, sub_rows = rows_in(TABLE), sub_rows_in(TABLE)
    assert [row.line for row in (*rows, *sub_rows)] == [0, 1, 1, 2, 0, 1, 1]
    for text in (f"from shardwise.{imported} import a", f"def f():\n    import shardwise.{imported}.a"):
        source = parse_source(PACKAGE / importer, text)
        found = [
            *imports_that_do_not_point_up([source], rows),
            *imports_between_sub_rooms_that_do_not_point_up([source], sub_rows),
        ]
        assert bool(found) == (not is_allowed), found


def test_the_root_of_the_package_imports_no_room_when_it_is_loaded() -> None:
    root = read_source(PACKAGE / "__init__.py")
    names = list(imported_names(root, module_level_nodes(root.tree)))
    assert [name for name in names if name.startswith("shardwise")] == []


def circle_in(graph: Mapping[str, Iterable[str]]) -> str | None:
    """A way from something back to itself."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle_in({source.module: known_modules(source) - {source.module} for source in all_sources()}) is None


def test_no_rooms_know_each_other_in_a_circle() -> None:
    graph = defaultdict[str, set[str]](set)
    for source in all_sources():
        room = room_of(source.module)
        if room is not None:
            graph[room] |= {other for module in known_modules(source) if (other := room_of(module)) not in (None, room)}
    assert circle_in(graph) is None


def children_graph(parent: str) -> dict[str, set[str]]:
    """Who knows whom directly below a package: its own packages and its single files."""
    graph = defaultdict[str, set[str]](set)
    for source in all_sources():
        child = child_of(parent, source.module)
        if child is not None:
            graph[child] |= {
                other for module in known_modules(source) if (other := child_of(parent, module)) not in (None, child)
            }
    return graph


def test_no_parts_of_a_package_know_each_other_in_a_circle() -> None:
    packages = [source.path.parent.relative_to(PACKAGE).as_posix() for source in all_sources() if source.is_package]
    circles = {package: circle_in(children_graph(package)) for package in packages if package != "."}
    found = [f"in {package}/: {circle}" for package, circle in circles.items() if circle is not None]
    assert not found, "\n".join(["", *found])


def test_a_package_that_says_no_to_torch_imports_none_when_it_is_loaded() -> None:
    found = []
    for source in all_sources():
        room = room_of(source.module)
        row = None if room is None else row_of(room, read_rows())
        if is_late(source.module) or (row is not None and row.may_use_torch):
            continue
        roots = {name.split(".")[0] for name in imported_names(source, module_level_nodes(source.tree))}
        found += [f"{source.name} imports {root}" for root in sorted(roots & {"torch", "triton"})]
    assert not found, "\n".join(["", *found])


def test_nobody_loads_what_needs_torch_before_it_is_needed() -> None:
    found = [
        f"{source.name} imports {name}"
        for source in all_sources()
        if not is_late(source.module)
        for name in imported_names(source, module_level_nodes(source.tree))
        if is_late(name)
    ]
    assert not found, "\n".join(["", *found])


def is_late(module: str) -> bool:
    return any(module == late or module.startswith(f"{late}.") for late in LATE)


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_benchmarks_and_examples_import_names_that_are_there(folder: str) -> None:
    """No test runs most of them, and the type checker does not read them: a name that moves would be missed.

    Read, and not imported: kernels that are imported here are not those of Triton's interpreter in later tests."""
    sources = {source.module: source for source in all_sources()}
    gone = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shardwise":
                home = sources.get(node.module or "")
                known = set[str]() if home is None else {*_names_in(home.tree), *shardwise.__all__}
                names = [f"{node.module}.{each.name}" for each in node.names if each.name not in known]
                gone += [f"{path.name}: {name}" for name in names if name not in sources]
    assert gone == []


def _names_in(node: ast.AST) -> Iterator[str]:
    """The names that a module has: what it defines, assigns and imports, also under conditions."""
    for each in ast.iter_child_nodes(node):
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield each.name
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name for alias in each.names)
        else:
            yield from _names_in(each)
