"""The few SVG elements that our drawings are made of, as text. Coordinates are pixels."""

from html import escape

#: Colours that read on our own light ground. For each kind, those of a rank's first and last chunk.
KINDS = {
    "F": ("#6aa5f2", "#b9d6fb"),
    "B": ("#f2a65e", "#fad7b0"),
    "I": ("#45bfae", "#a9e4da"),
    "W": ("#9ccb5c", "#d5eab3"),
    "S": ("#b497e0", "#dccdf3"),
}
OTHER_KINDS = ("#b4bcc8", "#dde2e9")
INK, FAINT_INK, RULE, GROUND = "#1d2733", "#6b7785", "#e3e7ec", "#ffffff"
CURVE, CURVE_AREA, TRANSFER = "#5b6ee1", "#e4e8fb", "#46566b"
IDLE, EXPOSED = "url(#idle)", "url(#exposed)"

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_STYLE = f"""\
text {{ font-family: {_FONT}; font-size: 11px; fill: {INK}; }}
.title {{ font-size: 17px; font-weight: 600; }}
.faint {{ fill: {FAINT_INK}; }}
.middle {{ text-anchor: middle; }}
.end {{ text-anchor: end; }}
.rule {{ stroke: {RULE}; stroke-width: 1; }}
.transfer {{ stroke: {TRANSFER}; stroke-width: 0.8; stroke-opacity: 0.55; }}
.curve {{ fill: none; stroke: {CURVE}; stroke-width: 1.4; }}
.area {{ fill: {CURVE_AREA}; }}
"""


def colour_of(kind: str, chunk: int, num_chunks: int) -> str:
    """The later the chunk, the lighter."""
    dark, light = KINDS.get(kind, OTHER_KINDS)
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    mixed = [
        round(int(dark[place : place + 2], 16) * (1 - share) + int(light[place : place + 2], 16) * share)
        for place in (1, 3, 5)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def number(value: float) -> str:
    """Hundredths of a pixel are enough, and keep the file small."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, width: float, height: float, fill: str, *, radius: float = 0) -> str:
    extra = f' rx="{number(radius)}"' if radius else ""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect{extra} {place} fill="{fill}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"/>'


def text(x: float, y: float, words: str, *, kind: str = "") -> str:
    extra = f' class="{kind}"' if kind else ""
    return f'<text{extra} x="{number(x)}" y="{number(y)}">{escape(words, quote=False)}</text>'


def path(commands: str, kind: str) -> str:
    return f'<path class="{kind}" d="{commands}"/>'


def group(kind: str, tip: str, *elements: str) -> str:
    """Elements that belong together; a reader who points at them sees the tip."""
    return f'<g class="{kind}"><title>{escape(tip, quote=False)}</title>{"".join(elements)}</g>'


def page(width: float, height: float, title: str, elements: list[str]) -> str:
    """A whole file on its own ground, so that it reads the same on a white and on a dark page."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>\n{_STYLE}</style>",
        f"<defs>{_hatch('idle', '#f3f5f7', '#e1e5ea')}{_hatch('exposed', '#fdeeee', '#f3bcbc')}</defs>",
        f'<rect x="0.5" y="0.5" width="{number(width - 1)}" height="{number(height - 1)}" rx="10" '
        f'fill="{GROUND}" stroke="{RULE}"/>',
    ]
    return "\n".join([*head, *elements, "</svg>", ""])


def _hatch(name: str, ground: str, stroke: str) -> str:
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{ground}"/><rect width="2" height="6" fill="{stroke}"/></pattern>'
    )
