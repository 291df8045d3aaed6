"""Draw a placement: ranks on their devices, neighbours together, and the traffic of every link."""

from shardwise.answer import Canvas, table
from shardwise.planner.placement.seats import Seats
from shardwise.units import format_bytes, format_seconds

#: At most this many links and groups are drawn; the others are counted.
_MOST = 12


def draw_seats(seats: Seats, canvas: Canvas) -> None:
    """Draw neighbours in a row each, then the links that take longest."""
    canvas.print(canvas.paint(str(seats), "bold"))
    rank_on = {device: rank for rank, device in enumerate(seats.devices)}
    groups: dict[int, list[int]] = {}
    for device, domain in enumerate(seats.domains):
        groups.setdefault(domain, []).append(device)
    for devices in list(groups.values())[:_MOST]:
        ranks = " ".join(str(rank_on[device]) for device in devices)
        canvas.print(f"  devices {_span(devices)}: ranks {ranks}")
    if len(groups) > _MOST:
        canvas.print(f"  and {len(groups) - _MOST} groups of neighbours more")
    if not seats.uses:
        return
    canvas.print()
    rows = [
        [
            f"  {use.sender} to {use.receiver}",
            "neighbours" if seats.domains[use.sender] == seats.domains[use.receiver] else "apart",
            ", ".join(f"{axis} {format_bytes(count, decimal=True)}" for axis, count in use.num_bytes.items()),
            format_seconds(use.seconds),
        ]
        for use in seats.uses[:_MOST]
    ]
    table(["  link", "kind", "bytes a step", "longest"], rows, canvas)
    if len(seats.uses) > _MOST:
        canvas.print(f"  and {len(seats.uses) - _MOST} links more")


def seats_data(seats: Seats) -> dict[str, object]:
    """Return the placement as plain data, for `--json`."""
    return {
        "devices": list(seats.devices),
        "seconds": seats.seconds,
        "plain_seconds": seats.plain_seconds,
        "exact": seats.is_exact,
        "links": [
            {"from": use.sender, "to": use.receiver, "bytes": use.num_bytes, "seconds": use.seconds}
            for use in seats.uses
        ],
    }


def _span(devices: list[int]) -> str:
    is_run = devices == list(range(devices[0], devices[0] + len(devices)))
    return f"{devices[0]}-{devices[-1]}" if is_run and len(devices) > 1 else " ".join(map(str, devices))
