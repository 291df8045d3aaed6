"""The page at `/`: a chat, and the engine's live state. One self-contained file."""

import json
from functools import lru_cache
from html import escape
from importlib.resources import files


@lru_cache(maxsize=1)
def _parts() -> tuple[str, str, str]:
    assets = files("shardwise.serving.http") / "assets"
    colours = (files("shardwise.explain.report") / "assets" / "colours.css").read_text(encoding="utf-8")
    page, style, script = ((assets / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    return page, colours + style, script


def make_page(model: str, *, needs_key: bool) -> str:
    """Return the page for one model. Each `@name@` in its text is filled in once."""
    page, style, script = _parts()
    # `</script>` in a name would end the element that contains the data.
    data = json.dumps({"model": model, "needsKey": needs_key}).replace("<", "\\u003c")
    values = {"model": escape(model), "style": style, "script": script, "data": data}
    filled = [values[piece] if place % 2 else piece for place, piece in enumerate(page.split("@"))]
    return "".join(filled)
