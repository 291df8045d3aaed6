"""Small pieces of HTML. What a user wrote is escaped before, so that nothing of it is read as markup."""

from collections.abc import Iterable, Sequence

from shardwise.units import format_percent


def share_of(seconds: float, whole: float) -> str:
    """A part of a whole in per cent; nothing is a dash."""
    return format_percent(seconds / whole) if whole > 0 and seconds > 0 else "\N{EN DASH}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, in_words: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already. Columns `in_words` are read, not compared."""
    kinds = [' class="words"' if place in in_words else "" for place in range(len(head))]
    top = "".join(f"<th{kind} scope=col>{cell}</th>" for cell, kind in zip(head, kinds, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table class="data"><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def caption(text: str, *, of: str = "figure") -> str:
    """What stands under a figure or a table. The style sheet counts them."""
    return f'<p class="caption"><b class="{of}"></b> {text}</p>'


def change_of(before: float, after: float, *, more_is_worse: bool = True) -> str:
    """By how much something has changed, coloured by whether that is good."""
    if before == after:
        return "same"
    if before <= 0:
        return "new"
    change = after / before - 1
    if abs(change) < 0.0005:
        return "same"
    kind = "worse" if (change > 0) == more_is_worse else "better"
    sign = "+" if change > 0 else "\N{MINUS SIGN}"
    return f'<span class="{kind}">{sign}{abs(change) * 100:.1f} %</span>'
