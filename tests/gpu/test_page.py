"""The page of what was run on GPUs says what the record has, and the record is of every plan that is proven."""

from tests.gpu.page import PAGE, page, read
from tests.parity.cases import CASES


def test_the_page_is_made_from_the_record() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read())


def test_every_plan_was_run_on_a_gpu_and_was_the_same_model() -> None:
    rows = {(row["ranks"], row["model"], row["plan"]): row for row in read()["rows"]}
    assert rows.keys() == {(count, model, plan) for count, cases in CASES.items() for model, plan in cases}
    assert all(row["problem"] is None and max(row["errors"].values()) < 1e-5 for row in rows.values())
