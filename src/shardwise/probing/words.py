"""A probe in words: its subject, and its findings by host and device."""

from shardwise.cluster.pairs import levels
from shardwise.cluster.probe import Probe
from shardwise.errors import some
from shardwise.units import counted, format_bytes, format_percent

_MOST = 8


def title(probe: Probe) -> str:
    """Say what was measured, in a line."""
    kinds = ", ".join(dict.fromkeys(each.kind for each in probe.devices))
    hosts = counted(len(probe.hosts), "host")
    return f"{counted(len(probe.devices), 'device')} ({kinds}) on {hosts}, measured in {probe.seconds:.0f} s"


def findings(probe: Probe) -> list[str]:
    """Describe neighbours, slow links and slow devices, a sentence each."""
    found = []
    if probe.pairs is not None and len(probe.devices) > 1:
        inner = levels(probe.pairs)[0]
        if len(inner) == 1:
            found.append("every pair of devices is joined alike")
        else:
            told = some([" ".join(map(str, group)) for group in inner])
            found.append(f"neighbours, by number: {told}")
        for each in probe.slow_links()[:_MOST]:
            share = format_percent(each.bytes_per_second / each.usual, decimals=0)
            found.append(
                f"slow link: {probe.pairs.name(each.sender)} to {probe.pairs.name(each.receiver)} has"
                f" {format_bytes(each.bytes_per_second, decimal=True)}/s, {share} of the"
                f" {format_bytes(each.usual, decimal=True)}/s of others of its kind"
            )
        if len(probe.slow_links()) > _MOST:
            found.append(f"and {len(probe.slow_links()) - _MOST} slow links more")
    for device in probe.slow_devices():
        share = format_percent(device.rate / device.usual, decimals=0)
        found.append(
            f"slow device: {probe.devices[device.device].name} has {share} of what others have in {device.what}"
        )
    return found
