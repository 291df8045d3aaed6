"""`cluster.toml`: a cluster as a file, to describe a device that the catalogue lacks, or to change one that it has.

[[pool]]
device = "h100-80g"            # a name of the catalogue; or any name, with a whole [pool.device_is] table
num_nodes = 2
devices_per_node = 8

[pool.fabric]                  # keys that are left out have the catalogue's values
bytes_per_second = 25e9

`shardwise probe` also writes its measurements: [[pool.kernel]] for operations on a CPU, [[pool.curve]] for collectives,
and [pairs].
"""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from shardwise.cluster.catalogue import DEVICES, NODES, get_device
from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cluster.curve import COLLECTIVES, SCOPES, Curve
from shardwise.cluster.device import PRECISIONS, Device
from shardwise.cluster.kernel import KINDS, Kernel
from shardwise.cluster.pairs import Pairs
from shardwise.cluster.topology import Fabric, Host, Link, NodeKind
from shardwise.errors import ShardwiseError, unknown

_KEYS = ("device", "num_nodes", "devices_per_node", "domain", "device_is", "link", "fabric", "host", "kernel", "curve")
_DESCRIBED = Device(
    name="",
    memory_bytes=0,
    flops_per_second={},
    memory_bytes_per_second=0.0,
    num_units=0,
    matmul_efficiency=0.8,
)
_Part = TypeVar("_Part", Device, Link, Fabric, Host)


def to_toml(cluster: Cluster) -> str:
    """Return the text of a file with all values, which `from_toml` reads back."""
    lines = [f"# {cluster}"]
    for pool in cluster.pools:
        lines += [
            "",
            "[[pool]]",
            f"device = {_value(pool.device.name)}",
            f"num_nodes = {pool.num_nodes}",
            f"devices_per_node = {pool.node.devices_per_node}",
            f"domain = {pool.node.domain}",
        ]
        for name, part in (
            ("device_is", pool.device),
            ("link", pool.node.link),
            ("fabric", pool.node.fabric),
            ("host", pool.node.host),
        ):
            entries = {field.name: getattr(part, field.name) for field in fields(part)}
            if name == "device_is":
                entries.pop("name")
                entries.pop("kernels")
            lines += [f"[pool.{name}]", *(f"{key} = {_value(value)}" for key, value in entries.items())]
        for table, measured in (("kernel", pool.device.kernels), ("curve", pool.node.curves)):
            for one in measured:
                lines += [f"[[pool.{table}]]", *_entries(one)]
    if cluster.pairs is not None:
        lines += ["", "[pairs]", *_entries(cluster.pairs)]
    return "\n".join(lines) + "\n"


def _entries(part: Kernel | Curve | Pairs) -> list[str]:
    return [f"{each.name} = {_value(getattr(part, each.name))}" for each in fields(part)]


def from_toml(text: str, *, source: str = "the cluster file") -> Cluster:
    """Read the text of a file. `source` is its name in error messages."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ShardwiseError(
            f"{source} is not valid TOML: {error}", remedy='[[pool]] and device = "h100-80g"'
        ) from None
    for key in tree:
        if key not in ("pool", "pairs"):
            raise unknown(f"key in {source}", key, ["pool", "pairs"])
    pools = tree.get("pool", [])
    if not isinstance(pools, list) or not pools:
        raise ShardwiseError(f"{source} names no pool of devices", remedy='[[pool]] and device = "h100-80g"')
    cluster = Cluster(pools=tuple(_read_pool(entry, source) for entry in pools))
    return replace(cluster, pairs=_read_pairs(tree["pairs"], cluster, source)) if "pairs" in tree else cluster


def load(path: Path) -> Cluster:
    """Read a cluster from a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ShardwiseError(f"the cluster file {path} cannot be read: {why}", remedy="a name like 8xh100") from None
    return from_toml(text, source=path.name)


def find_cluster(text: str) -> Cluster:
    """Return a cluster from a user's text: a name, or the path of a file that ends in .toml."""
    return load(Path(text)) if text.endswith(".toml") else Cluster.parse(text)


def _read_pool(entry: Any, source: str) -> Pool:
    if not isinstance(entry, dict):
        raise ShardwiseError(f"a pool in {source} is not a table: {entry!r}", remedy="[[pool]]")
    for key in entry:
        if key not in _KEYS:
            raise unknown(f"key of a pool in {source}", key, _KEYS)
    name = entry.get("device")
    if not isinstance(name, str):
        raise ShardwiseError(f"a pool in {source} names no device", remedy='device = "h100-80g"')
    device = _with_kernels(_read_device(name, entry, source), entry, source)
    usual = NODES[device.name] if device.name in NODES else NODES["a100-80g"]
    sized = usual.resized(_read_count(entry, "devices_per_node", usual.devices_per_node, source))
    node = NodeKind(
        devices_per_node=sized.devices_per_node,
        domain=_read_count(entry, "domain", sized.domain, source),
        link=_read_part(usual.link, entry, "link", source),
        fabric=_read_part(usual.fabric, entry, "fabric", source),
        host=_read_part(usual.host, entry, "host", source),
        curves=tuple(_read_curve(each, source) for each in _tables(entry, "curve", source)),
    )
    return Pool(device=device, num_nodes=_read_count(entry, "num_nodes", 1, source), node=node)


def _read_device(name: str, entry: Mapping[str, Any], source: str) -> Device:
    if "device_is" not in entry:
        return get_device(name)
    known = DEVICES.get(name, replace(_DESCRIBED, name=name))
    device = _read_part(known, entry, "device_is", source)
    for precision in device.flops_per_second:
        if precision not in PRECISIONS:
            raise unknown(f"precision of {name} in {source}", precision, PRECISIONS)
    missing = [
        field.name
        for field in fields(Device)
        if field.default is MISSING and getattr(device, field.name) in (0, 0.0, {})
    ]
    if missing:
        raise ShardwiseError(
            f"the device {name!r} in {source} is not in the catalogue, and its table says no {', '.join(missing)}",
            remedy=f"[pool.device_is] with {missing[0]} = ...",
        )
    return device


def _read_part(usual: _Part, entry: Mapping[str, Any], name: str, source: str) -> _Part:
    """Return the usual part with the values that a table replaces."""
    table = entry.get(name, {})
    if not isinstance(table, dict):
        raise ShardwiseError(f"{name} = {table!r} in {source} is not a table", remedy=f"[pool.{name}]")
    known = asdict(usual)
    if name == "device_is":
        known = {key: value for key, value in known.items() if key not in ("name", "kernels")}
    for key, value in table.items():
        if key not in known:
            raise unknown(f"key of {name} in {source}", key, known)
        wanted = type(known[key])
        alike = isinstance(value, (int, float)) and wanted in (int, float) and not isinstance(value, bool)
        if not alike and not isinstance(value, wanted):
            raise ShardwiseError(
                f"{name}.{key} = {value!r} in {source} wants a {wanted.__name__}",
                remedy=f"{key} = {_value(known[key])}",
            )
    return replace(usual, **table)


def _tables(entry: Mapping[str, Any], key: str, source: str) -> list[dict[str, Any]]:
    found = entry.get(key, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ShardwiseError(f"{key} in {source} is not a list of tables", remedy=f"[[pool.{key}]]")
    return found


def _with_kernels(device: Device, entry: Mapping[str, Any], source: str) -> Device:
    """Return the device with the file's measured kernels, or with the catalogue's if the file has none."""
    tables = _tables(entry, "kernel", source)
    if not tables:
        return device
    found = tuple(_read_kernel(each, source) for each in tables)
    if "elementwise" not in [kernel.kind for kernel in found]:
        raise ShardwiseError(
            f"kernels of {device.name} in {source} have no elementwise, which stands for all that is not named",
            remedy="shardwise probe, which writes such files",
        )
    return replace(device, kernels=found)


def _read_kernel(table: Mapping[str, Any], source: str) -> Kernel:
    """Read a measured kind of operation."""
    names = [each.name for each in fields(Kernel)]
    for key in table:
        if key not in names:
            raise unknown(f"key of a kernel in {source}", key, names)
    if table.get("kind") not in KINDS:
        raise unknown(f"kind of a kernel in {source}", str(table.get("kind")), KINDS)
    rates = _numbers([table.get(key) for key in names[1:3]], "a kernel", source)
    calls = _numbers([table.get(key, 0.0) for key in names[3:]], "a kernel", source, least=0.0)
    return Kernel(
        kind=table["kind"], forward=rates[0], backward=rates[1], forward_call=calls[0], backward_call=calls[1]
    )


def _read_curve(table: Mapping[str, Any], source: str) -> Curve:
    """Read a measured collective."""
    names = [each.name for each in fields(Curve)]
    for key in table:
        if key not in names:
            raise unknown(f"key of a curve in {source}", key, names)
    for key, known in (("collective", COLLECTIVES), ("scope", SCOPES)):
        if table.get(key) not in known:
            raise unknown(f"{key} of a curve in {source}", str(table.get(key)), known)
    sizes, seconds = (_numbers(table.get(key), f"{key} of a curve", source) for key in ("sizes", "seconds"))
    if len(sizes) != len(seconds) or len(sizes) < 2 or list(sizes) != sorted(set(sizes)):
        raise ShardwiseError(
            f"a curve in {source} has {len(sizes)} sizes and {len(seconds)} seconds: as many of each, at least 2, and"
            " sizes that rise",
            remedy="shardwise probe, which writes such files",
        )
    return Curve(
        collective=table["collective"],
        scope=table["scope"],
        num_devices=max(_read_count(table, "num_devices", 2, source), 2),
        sizes=tuple(map(int, sizes)),
        seconds=seconds,
    )


def _read_pairs(table: Any, cluster: Cluster, source: str) -> Pairs:
    """Read the measurements of all pairs: a square matrix with a row for each device."""
    count, names = cluster.num_devices, [each.name for each in fields(Pairs)]
    if not isinstance(table, dict):
        raise ShardwiseError(f"pairs in {source} is not a table", remedy="[pairs]")
    for key in table:
        if key not in names:
            raise unknown(f"key of pairs in {source}", key, names)
    for key in names:
        found = table.get(key)
        rows = found if isinstance(found, list) else []
        if len(rows) != count or (key not in ("hosts", "devices") and any(len(row) != count for row in rows)):
            raise ShardwiseError(
                f"pairs.{key} in {source} is not of the {count} devices of {cluster}: {len(rows)} are there",
                remedy="shardwise probe --save, of all of them; or no [pairs]",
            )
    numbers = {
        key: tuple(_numbers(row, f"a row of pairs.{key}", source, least=0.0) for row in table[key])
        for key in ("bytes_per_second", "latency_seconds")
    }
    return Pairs(hosts=tuple(map(str, table["hosts"])), devices=tuple(map(str, table["devices"])), **numbers)


def _numbers(values: Any, what: str, source: str, *, least: float = 1e-12) -> tuple[float, ...]:
    wrong = [each for each in values if not isinstance(each, (int, float)) or each < least] if values else [values]
    if wrong:
        raise ShardwiseError(f"{what} in {source} has {wrong[0]!r}: numbers above 0", remedy="shardwise probe --save")
    return tuple(float(each) for each in values)


def _read_count(entry: Mapping[str, Any], key: str, usual: int, source: str) -> int:
    value = entry.get(key, usual)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShardwiseError(f"{key} = {value!r} in {source} wants a whole number of at least 1", remedy=f"{key} = 8")
    return value


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
