"""The table of docs/models.md. `python -m tests.model.page` writes it; a test says if it is not as the catalogue is."""

from pathlib import Path

from shardwise.model.catalogue import ALIASES, CATALOGUE, get_model

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "## The catalogue\n"

_INTRODUCTION = """
Parameters are counted once where they are tied. Those that are active are the ones a token meets. Blocks in a stack are
layers. `tests/model/test_parameters.py` holds totals of most families against totals printed elsewhere; the other rows
rest on the sizes in `model/tables/`. This table is written by `python -m tests.model.page`.

"""


def table() -> str:
    """The catalogue as a table, and the other names that it knows."""
    rows = [["name", "parameters", "active", "layers", "width", "vocabulary", "configuration"], ["---"] * 7]
    for name, values in CATALOGUE.items():
        model = get_model(name)
        active = "" if model.num_active_parameters == model.num_parameters else f"{model.num_active_parameters:,}"
        rows.append(
            [
                f"`{name}`",
                f"{model.num_parameters:,}",
                active,
                str(model.num_layers),
                str(model.hidden),
                str(model.vocabulary),
                f"`{values['model_type']}`",
            ]
        )
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    others = ", ".join(f"`{alias}` ({name})" for alias, name in ALIASES.items())
    return f"{HEADING}{_INTRODUCTION}{lines}\nOther names: {others}.\n"


def page(text: str) -> str:
    """A page with its table made anew."""
    return text[: text.index(HEADING)] + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
