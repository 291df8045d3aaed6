"""docs/models.md shows the catalogue as it is."""

from textwrap import indent

from shardwise.model.catalogue import get_model
from tests.model.page import PAGE, page


def test_the_page_shows_the_catalogue_as_it_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "python -m tests.model.page writes it anew"


def test_the_page_shows_a_model_as_it_prints() -> None:
    assert indent(str(get_model("llama3.1-405b")), "    ") in PAGE.read_text(encoding="utf-8")
