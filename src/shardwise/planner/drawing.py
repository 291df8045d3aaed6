"""Plans as text: seconds with their interval and parts, memory as bars, reasons as sentences.

And the findings of a search, as text and as data.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from shardwise.answer import Canvas
from shardwise.cluster.cluster import Cluster
from shardwise.cost.host import link_rate
from shardwise.model.flops import flops
from shardwise.model.share import Share
from shardwise.planner.account import Account, RankBytes
from shardwise.planner.search.reasons import PART_WORDS
from shardwise.units import format_bytes, format_percent, format_seconds

if TYPE_CHECKING:  # `fit` draws accounts without loading the search.
    from shardwise.planner.search.findings import Findings
    from shardwise.planner.search.tally import Tally

#: Parts of a rank's memory, grouped for display: name, its parts, a mark, a colour.
GROUPS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("weights", ("weights", "gathered"), "█", "blue"),
    ("gradients", ("gradients",), "▓", "cyan"),
    ("optimizer", ("optimizer", "masters"), "▒", "magenta"),
    ("activations", ("activations", "recomputed", "loss", "scores"), "░", "yellow"),
    ("other", ("buffers", "workspace", "context", "fragments"), "·", "white"),
)
_BAR = 48
# Characters drawn of memory that does not fit.
_BEYOND = 12
_TIME_BAR = 24
# Number of reasons shown for candidates that do not fit.
_SHOWN = 3
_REFUSED = {
    "divisibility": "do not divide heads, layers, sequence or batch",
    "topology": "have tensor parallel groups that straddle nodes",
    "model": "split layers that cannot be split",
    "engines": "are not run by the engines yet",
}


def in_groups(parts: Mapping[str, float]) -> dict[str, float]:
    """Return a rank's bytes by group."""
    return {name: sum(parts.get(part, 0.0) for part in members) for name, members, _, _ in GROUPS}


def interval_text(account: Account) -> str:
    """Return a text such as `4.31 s (3.8 s to 4.9 s)`."""
    return f"{format_seconds(account.seconds)} ({format_seconds(account.low)} to {format_seconds(account.high)})"


def utilisation(account: Account) -> float:
    """Return the model FLOPs utilisation: unmasked attention counts, and gradients of frozen weights, which nobody
    computes, and recomputation do not."""
    question, share = account.question, Share(sequence=account.question.sequence, microbatch=1)
    counted = 0.0
    for block, count in question.model.kinds:
        for passes in (flops(operation, share) for operation in block.operations):
            # Flash kernels multiply scores twice.
            counted += count * min(float(passes.total), 3.0 * float(passes.forward))
    peak = sum(pool.num_devices * pool.device.peak(account.plan.precision) for pool in question.cluster.pools)
    return counted * question.batch / (account.seconds * peak)


def draw_head(account: Account, canvas: Canvas) -> None:
    """What is asked, and the answer in four lines."""
    question, fullest = account.question, account.fullest
    cluster, devices = question.cluster, question.cluster.num_devices
    canvas.print(
        f"{canvas.paint(question.model.name, 'bold')} on {cluster}: {devices} "
        f"{'device' if devices == 1 else 'devices'}, batch {question.batch} x {question.sequence}"
    )
    canvas.print()
    rate, unit = account.tokens_per_second, "samples" if question.sequence == 1 else "tokens"
    canvas.print(f"  plan    {canvas.paint(account.text, 'bold green')}")
    canvas.print(
        f"  step    {canvas.paint(interval_text(account), 'bold')}   {rate:,.0f} {unit}/s, {rate / devices:,.0f} on "
        f"each device, {format_percent(utilisation(account))} of its peak"
    )
    left = f"{format_bytes(fullest.headroom)} left" if fullest.headroom >= 0 else _short_text(fullest, canvas)
    canvas.print(
        f"  memory  {format_bytes(fullest.total)} of {format_bytes(fullest.capacity)} on the fullest rank "
        f"(stage {fullest.place}), {left}; fits {_odds_text(account)}"
    )
    canvas.print(canvas.paint(f"  assumes {assumptions(account)}", "dim"))


def _odds_text(account: Account) -> str:
    """Return how often such a plan fits, by the errors of our predictions."""
    tenths = round(10 * account.odds)
    return {0: "hardly ever", 10: "nearly always"}.get(tenths, f"{tenths} times in 10")


def assumptions(account: Account) -> str:
    """Return what an answer assumes: precision and optimizer; links and the host, which a file can change."""
    told = [f"precision={account.plan.precision}"]
    if account.plan.precision != "fp32":
        software = account.question.software_in(account.plan.precision)
        if software.saves_casts:
            told.append("weights in fp32")
        elif software.shards_both:
            told.append("weights in 16 bits with masters in fp32")
    if account.question.model.is_partly_frozen:
        told.append(f"frozen weights in {account.plan.precision}, not in 8 or 4 bits")
    if account.question.device.architecture != "cpu":
        told.append("AdamW(fused=True)")  # Without temporary tensors of the size of what it updates.
    machine = list(dict.fromkeys(_assumed_machine(account.question.cluster)))
    return ", ".join(told) + (f"; {', '.join(machine)} (a cluster.toml can change these)" if machine else "")


def _assumed_machine(cluster: Cluster) -> Iterator[str]:
    """Yield the links and the host of each pool."""
    for pool in cluster.pools:
        host, node = pool.node.host, pool.node
        if pool.domain > 1:
            within = "node" if pool.domain <= node.devices_per_node else "domain"
            yield f"{node.link.name} {node.link.bytes_per_second / 1e9:g} GB/s in a {within} of {pool.domain}"
        if pool.num_devices > pool.domain:
            yield f"{8 * node.fabric.bytes_per_second / 1e9:g} Gb/s per device between nodes"
        if pool.device.architecture != "cpu":
            rate = link_rate(host, node.devices_per_node) / 1e9
            yield f"a host with {format_bytes(host.memory_bytes)} and {rate:.3g} GB/s to each device"


def _short_text(rank: RankBytes, canvas: Canvas) -> str:
    return canvas.paint(f"{format_bytes(-rank.headroom)} short", "bold red")


def draw_seconds(account: Account, canvas: Canvas) -> None:
    """Draw where the seconds of a step go."""
    canvas.print(canvas.paint("where a step goes", "bold"))
    width = max(map(len, PART_WORDS.values()))
    for name, seconds in sorted(account.parts.items(), key=lambda item: -item[1]):
        share = seconds / account.seconds
        if share >= 0.001:
            bar = canvas.paint("█" * max(round(share * _TIME_BAR), 1), "blue")
            canvas.print(
                f"  {PART_WORDS[name].ljust(width)}  {format_percent(share):>7}  {format_seconds(seconds):>8}  {bar}"
            )


def draw_memory(account: Account, canvas: Canvas) -> None:
    """The memory of each stage as a bar; stages that hold the same share a line."""
    legend = "  ".join(f"{canvas.paint(mark, colour)} {name}" for name, _, mark, colour in GROUPS)
    canvas.print(f"{canvas.paint('memory of a rank', 'bold')}   {legend}")
    capacity = account.fullest.capacity
    runs = list(same_ranks(account.ranks))
    labels = [_places(run) for run in runs]
    width = max(map(len, labels))
    for label, run in zip(labels, runs, strict=True):
        canvas.print(f"  {label.ljust(width)}  {_bar(run[0], capacity, canvas)}  {format_bytes(run[0].total):>9}")
        if run[0].on_host:
            canvas.print(f"  {' ' * width}  and {format_bytes(run[0].on_host)} on the host")
    if account.host_bytes:
        there, room = format_bytes(account.host_bytes), format_bytes(account.host_capacity)
        canvas.print(f"  {there} on the host of a node, of {room} that it has for them")


def same_ranks(ranks: Sequence[RankBytes]) -> Iterator[list[RankBytes]]:
    """Neighbouring places whose ranks hold the same, to a hundredth."""
    run: list[RankBytes] = []
    for rank in ranks:
        if run and abs(rank.total - run[0].total) > 0.01 * run[0].total:
            yield run
            run = []
        run.append(rank)
    yield run


def _places(run: Sequence[RankBytes]) -> str:
    first, last = run[0].place, run[-1].place
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def _bar(rank: RankBytes, capacity: float, canvas: Canvas) -> str:
    """Return a bar as long as the device's memory; what exceeds it is drawn after its end."""
    groups = in_groups(rank.parts)
    bar, drawn, total = "", 0, 0.0
    for name, _, mark, colour in GROUPS:
        total += groups[name]
        end = min(round(total / capacity * _BAR), _BAR + _BEYOND)
        bar += canvas.paint(mark * (end - drawn), colour)
        drawn = max(drawn, end)
    room = " " * (_BAR - drawn)
    return f"▏{bar}{room}▕" if drawn <= _BAR else f"▏{bar}!"


def draw_reasons(account: Account, canvas: Canvas) -> None:
    """Draw each choice with its reason."""
    reasons = account.plan.reasons
    if not reasons:
        return
    canvas.print(canvas.paint("why", "bold"))
    named = {key: f"{key}={_value(account, key)}" for key in reasons}
    width = min(max(map(len, named.values())), 24)
    for key, why in reasons.items():
        canvas.print(f"  {named[key].ljust(width)}  {why}")


def _value(account: Account, key: str) -> str:
    value = attrgetter(key)(account.plan)
    if isinstance(value, float):
        return f"{value:g}"
    return "uneven" if isinstance(value, tuple) else str(value).lower()


def draw_others(best: Account, others: Sequence[Account], canvas: Canvas) -> None:
    """Plans of other kinds, and what each would gain or lose."""
    if not others:
        return
    canvas.print(canvas.paint("of other kinds", "bold"))
    for each in others:
        longer, memory, words = compared(best, each)
        canvas.print(f"  {longer:>8}  {interval_text(each)}  {each.text}")
        canvas.print(canvas.paint(f"            memory {memory}; {words}", "dim"))


def compared(best: Account, other: Account) -> list[str]:
    """Compare another plan with the best: time, memory, and the parts that grow and shrink most."""
    longer = other.seconds / best.seconds - 1.0
    differences = {name: other.parts[name] - best.parts[name] for name in best.parts}
    least = 0.005 * best.seconds
    grown = [name for name in sorted(differences, key=lambda name: -differences[name]) if differences[name] > least]
    shrunk = [name for name in sorted(differences, key=lambda name: differences[name]) if differences[name] < -least]
    words = [f"{PART_WORDS[name]} +{format_seconds(differences[name])}" for name in grown[:2]]
    words += [f"{PART_WORDS[name]} -{format_seconds(-differences[name])}" for name in shrunk[:2]]
    memory = other.fullest.total - best.fullest.total
    sign = "+" if memory >= 0 else "-"
    percent = round(longer * 100, 1) + 0.0  # Not -0.0.
    return [f"{percent:+.1f} %", f"{sign}{format_bytes(abs(memory))}", ", ".join(words) or "much the same"]


def account_data(account: Account) -> dict[str, object]:
    """Return an account as plain data, for `--json`."""
    return {
        "plan": account.text,
        "seconds": account.seconds,
        "interval": [account.low, account.high],
        "tokens_per_second": account.tokens_per_second,
        "utilisation": utilisation(account),
        "microbatch": account.microbatch,
        "layers": list(account.layers),
        "parts": dict(account.parts),
        "fits": account.fits,
        "odds_of_fitting": account.odds,
        "assumes": assumptions(account),
        "host_bytes": round(account.host_bytes),
        "host_room_bytes": round(account.host_capacity),
        "reasons": dict(account.plan.reasons),
        "ranks": [
            {
                "stage": rank.place,
                "num_ranks": rank.num_ranks,
                "bytes": {name: round(part) for name, part in rank.parts.items()},
                "total_bytes": round(rank.total),
                "host_bytes": round(rank.on_host),
                "capacity_bytes": round(rank.capacity),
                "headroom_bytes": round(rank.headroom),
            }
            for rank in account.ranks
        ],
    }


def draw_findings(found: "Findings", canvas: Canvas) -> None:
    """The best plan with everything about it, and what was not chosen."""
    for part in (draw_head, draw_seconds, draw_memory, draw_reasons):
        part(found.best, canvas)
        canvas.print()
    if found.fastest is not None:
        gain = 1.0 - found.fastest.seconds / found.best.seconds
        canvas.print(
            f"{found.fastest.text} is predicted to be {format_percent(gain)} faster, but is less simple. The answer is "
            "the simplest plan within 3 %; data on the host and contexts shorter than any published must gain more.\n"
        )
    draw_others(found.best, found.others, canvas)
    canvas.print()
    for line in tally_lines(found.tally):
        canvas.print(canvas.paint(line, "dim"))


def draw_pool(best: Account, alone: Account, canvas: Canvas) -> None:
    """Draw that one of several pools is faster without the others, and its plan."""
    gain = 1.0 - alone.seconds / best.seconds
    canvas.print(
        f"\n{alone.question.cluster} alone is {format_percent(gain)} faster: {interval_text(alone)} with {alone.text}. "
        "A step on several pools takes as long as on the slowest, each rank with as much of the batch."
    )


def tally_lines(tally: "Tally") -> list[str]:
    """Return how many candidates were rejected and why, as sentences."""
    lines = [f"{tally.considered:,} candidates, {tally.priced:,} priced, {tally.fitting:,} of them fit."]
    fallen = [f"{count:,} {_REFUSED[reason]}" for reason, count in tally.refused.most_common()]
    if tally.slower:
        fallen.append(f"{tally.slower:,} are slower by a bound")
    if fallen:
        lines.append(f"Of the others {', '.join(fallen)}.")
    total = sum(tally.memory.values())
    if total:
        parts = [
            f"{part} on the {place} stage ({count:,})" for (place, part), count in tally.memory.most_common(_SHOWN)
        ]
        lines.append(f"{total:,} do not fit, most for {', '.join(parts)}.")
    return lines


def tally_data(tally: "Tally") -> dict[str, object]:
    """Return the same for `--json`."""
    return {
        "considered": tally.considered,
        "priced": tally.priced,
        "fitting": tally.fitting,
        "slower": tally.slower,
        "refused": dict(tally.refused),
        "memory": [
            {"stage": place, "part": part, "count": count} for (place, part), count in tally.memory.most_common()
        ],
    }
