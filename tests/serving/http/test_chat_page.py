"""The page at `/`, in a real browser: a chat that answers, and what the engine does."""

import time
from typing import Any

from tests.explain.report.browser import Browser
from tests.serving.http.repeating import RepeatingEngine
from tests.serving.http.serving_here import running


def wait_for(browser: Browser, script: str) -> Any:
    deadline = time.monotonic() + 30
    while not (found := browser.run(f"return {script}")):
        assert time.monotonic() < deadline, f"{script} does not come to hold"
        time.sleep(0.05)
    return found


def test_one_chats_and_sees_what_the_engine_does(browser: Browser) -> None:
    with running(RepeatingEngine(step_seconds=0.01)) as here:
        browser.visit(here.url)
        wait_for(browser, "document.getElementById('state').textContent === 'ready'")
        # One that goes on is shown as a bar, and stopped. It comes first: what was said once is said again.
        browser.type_into("#text", "letters\ue007")
        wait_for(browser, "document.querySelector('#requests li.writing') !== null")
        wait_for(browser, "document.getElementById('running').textContent === '1'")
        assert here.engine.load().num_used_blocks > 0
        browser.run("document.getElementById('stop').click()")
        wait_for(browser, "document.getElementById('more').textContent === 'none'")
        assert here.engine.load().num_used_blocks == 0
        browser.type_into("#text", "say: Grüße <b>\ue007")
        said = "[...document.querySelectorAll('.message.assistant span')].at(-1)?.textContent"
        wait_for(browser, f"{said} === 'Grüße <b>'")
        assert browser.complaints() == []


def test_a_conversation_that_is_too_long_begins_later(browser: Browser) -> None:
    with running(RepeatingEngine(max_length=64)) as here:
        browser.visit(here.url)
        wait_for(browser, "document.getElementById('state').textContent === 'ready'")
        answers = "[...document.querySelectorAll('.message.assistant span')].map((each) => each.textContent).join()"
        browser.type_into("#text", "say: one, and not more\ue007")
        wait_for(browser, f"{answers} === 'one, and not more'")
        browser.type_into("#text", "say: two, and not more\ue007")
        wait_for(browser, f"{answers} === 'one, and not more,two, and not more'")
        assert browser.run("return document.querySelectorAll('.message.note').length") == 1
        # What is too long by itself is refused, and the next message is answered.
        browser.type_into("#text", "say: " + "much " * 20 + "\ue007")
        wait_for(browser, "document.querySelector('.message.error') !== null")
        browser.type_into("#text", "say: three\ue007")
        wait_for(browser, f"{answers}.endsWith(',three')")


def test_with_a_key_the_page_asks_for_it(browser: Browser) -> None:
    with running(RepeatingEngine(), key="sesame") as here:
        browser.visit(here.url)
        wait_for(browser, "document.getElementById('state').textContent === 'wants a key'")
        browser.type_into("#key", "sesame\ue007")
        wait_for(browser, "document.getElementById('state').textContent === 'ready'")
        browser.type_into("#text", "say: open\ue007")
        wait_for(browser, "document.querySelector('.message.assistant span')?.textContent === 'open'")
