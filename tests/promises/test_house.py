"""How the source is kept: no ambient state, nothing that has outgrown its name, no name that says nothing."""

from collections.abc import Callable

import pytest

from tests.promises import house
from tests.promises.sources import PACKAGE, Source, all_sources, parse_source

Promise = Callable[[house.Sources], house.Offenders]

#: What all of the source is held to.
HELD: tuple[Promise, ...] = (
    house.global_statements,
    house.readers_of_the_environment,
    house.long_files,
    house.files_that_know_too_many,
    house.long_functions,
    house.long_classes,
    house.modules_that_do_not_say_what_they_are,
    house.names_that_say_nothing,
    house.class_names_of_two,
    house.large_rooms_without_a_drawing,
    house.private_names_of_others,
)


@pytest.mark.parametrize("offenders", HELD, ids=lambda each: each.__name__)
def test_the_house_has_no(offenders: Promise) -> None:
    found = list(offenders(all_sources()))
    assert not found, "\n".join(["", *found])


def lines(opening: str, count: int) -> str:
    return "\n".join([opening, *["    a = 1"] * (count - 1)])


#: A promise, a source that breaks it by the least there is, one that just holds it, and what is said.
EXAMPLES: list[tuple[Promise, str, str, str]] = [
    (house.global_statements, "def f():\n    global a\n", "def f():\n    a = 1\n", "x.py:2 has a global statement"),
    (house.readers_of_the_environment, "import os\nos.environ['A']", "import os\nos.getcwd()", "x.py uses environ"),
    (house.readers_of_the_environment, "from os import getenv", "from os import getcwd", "x.py uses getenv"),
    (house.long_files, "a\n" * 451, "a\n" * 450, "x.py has 451 lines"),
    (house.long_functions, lines("def f():", 71), lines("def f():", 70), "x.py:1 f has 71 lines"),
    (house.long_functions, lines("async def f():", 71), lines("async def f():", 70), "x.py:1 f has 71 lines"),
    (house.long_classes, lines("class A:", 251), lines("class A:", 250), "x.py:1 A has 251 lines"),
    (house.private_names_of_others, "from shardwise.a import _b", "from shardwise.a import b", "x.py imports _b"),
    (house.modules_that_do_not_say_what_they_are, "a = 1", '"""What it is."""', "x.py has no docstring"),
]


@pytest.mark.parametrize(("offenders", "broken", "kept", "said"), EXAMPLES)
def test_a_promise_that_is_broken_is_found(offenders: Promise, broken: str, kept: str, said: str) -> None:
    (found,) = offenders([made("x.py", broken)])
    assert found.startswith(said)
    assert list(offenders([made("x.py", kept)])) == []


def test_a_name_that_says_nothing_is_found_in_any_part_of_a_path() -> None:
    named = [made(name, "") for name in ("cost/utils.py", "core/a.py", "cost/my_helpers.py", "cost/scores.py")]
    assert [text.split()[0] for text in house.names_that_say_nothing(named)] == [each.name for each in named[:3]]


def test_a_class_name_is_of_two_only_where_both_are_public_and_in_one_room() -> None:
    text = "class A: ...\nclass _B: ...\n"
    (found,) = house.class_names_of_two([made(name, text) for name in ("one/a.py", "one/deep/b.py", "two/a.py")])
    assert found == "A is the name of 2 classes: one/a.py, one/deep/b.py"


def test_a_large_room_draws_files_that_are_there() -> None:
    files = [made(f"a/{name}.py", "") for name in ("one", "two", "three", "four_more", *map(str, range(11)))]

    def found(docstring: str) -> list[str]:
        return list(house.large_rooms_without_a_drawing([made("a/__init__.py", f'"""{docstring}"""'), *files]))

    assert found("What it is.\n\none -> two -> three\nfour_more   the last\n") == []
    assert found("What it is.") == ["a/ has 16 files, and no drawing in its __init__.py"]
    assert found("What it is.\n\none -> two\n") == ["a/ has a drawing with fewer than 4 of its files"]
    lost = "one -> two -> three\nfour_more   the last, five_more\nin/    more\n"
    assert found(f"What it is.\n\n{lost}") == [
        "a/ draws five_more, which is not there",
        "a/ draws in/, which is not there",
    ]
    assert found("What it is.\n\n" + "one -> two -> three -> four_more\n" * 13) == [
        "a/ has a drawing of 13 lines, more than 12"
    ]
    del files[0]
    assert found("What it is.") == []


def test_a_module_of_ours_counts_once_however_often_it_is_imported() -> None:
    modules = [source.module for source in all_sources() if source.name.startswith("cost/")][1:17]
    text = "".join(f"import {name}\nfrom {name} import a, b\n" for name in modules)
    (found,) = house.files_that_know_too_many([made("x.py", text)])
    assert found == "x.py imports 16 modules of ours, more than 15"
    assert list(house.files_that_know_too_many([made("x.py", text.replace(modules[0], "json"))])) == []


def made(name: str, text: str) -> Source:
    return parse_source(PACKAGE / name, text)
