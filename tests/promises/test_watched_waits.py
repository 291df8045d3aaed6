"""Nothing waits for other ranks unwatched: who adds a collective says here how it ends when a rank fails."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shardwise"
#: Of `torch.distributed`, what waits for other ranks, or begins what will be waited for.
WAITS = {
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "init_process_group", "irecv", "isend", "monitored_barrier", "new_group", "new_subgroups", "recv",
    "recv_object_list", "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send", "send_object_list", "split_group",
}  # fmt: skip
MET = "all ranks have met just before, in a wait that is watched, and nothing of a user's is run in between"
GUARDED = "the group is guarded, so that the watch ends the wait; it is called inside of `telling`"
BEGUN = "only begun here; its work is waited for by the watch, or in a guarded group"
SPAWNED = "of ranks that one process has started: when one fails, it ends them all"
#: By file and function, how the wait ends.
KNOWN = {
    ("serving/ranked.py", "*"): SPAWNED,
    ("serving/shards.py", "*"): SPAWNED,
    ("probing/collectives.py", "*"): GUARDED,
    ("probing/devices.py", "_crowd"): GUARDED,
    ("probing/links.py", "*"): GUARDED,
    ("probing/measure.py", "probe_rank"): MET,
    ("ranks/backend_exchange.py", "_start_shards"): BEGUN,
    ("ranks/backend_exchange.py", "_start_gather"): BEGUN,
    ("ranks/clocks.py", "_compare_machines"): BEGUN,
    ("ranks/collectives.py", "all_reduce"): BEGUN,
    ("ranks/collectives.py", "all_gather"): BEGUN,
    ("ranks/collectives.py", "reduce_scatter"): BEGUN,
    ("ranks/collectives.py", "all_to_all"): BEGUN,
    ("ranks/links.py", "_add_up"): "a thread's, and the watch waits for the thread (`first_talk.py`)",
    ("ranks/links.py", "make_groups"): MET,
    ("ranks/links.py", "make_links"): MET,
    ("ranks/mesh.py", "_make_groups"): MET,
    ("ranks/mesh.py", "_join"): MET,
    ("ranks/objects.py", "*"): GUARDED,
    ("ranks/wires.py", "__init__"): MET,
    ("ranks/wires.py", "broadcast"): BEGUN,
    ("ranks/wires.py", "start_sum"): BEGUN,
    ("ranks/worker.py", "_join"): "the pulse has begun, and who has started the ranks looks whether they live",
    ("ranks/worker.py", "join_if_launched"): "the pulse has begun, and torchrun looks whether they live",
    ("sharding/context/ring.py", "*"): GUARDED,
    ("states/buckets/ties.py", "make_ties"): MET,
    ("training/profile.py", "_measure_link"): MET,
    ("training/profile.py", "_way_seconds"): GUARDED,
    ("training/world.py", "__init__"): MET,
    ("training/world.py", "highest"): BEGUN,
}


def waits_in(path: Path) -> Iterator[tuple[str, str, int]]:
    """Calls that wait, or begin to: the function that they stand in, what is called, the line."""

    def look(node: ast.AST, inside: str) -> Iterator[tuple[str, str, int]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            inside = node.name
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            if name in WAITS and (owner in ("dist", "torch.distributed") or (called.endswith("_single") and not owner)):
                yield inside, called, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from look(child, inside)

    text = path.read_text(encoding="utf-8")
    if any(word in text for word in ("dist.", "torch.distributed", "_single")):  # Most files call none of them.
        yield from look(ast.parse(text), "the file")


def test_every_wait_for_other_ranks_is_known_to_end_when_one_fails() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for inside, called, line in waits_in(path):
            key = (file, inside) if (file, inside) in KNOWN else (file, "*")
            assert key in KNOWN, (
                f"{file}:{line}: {called} in {inside} waits for other ranks, and nothing ends it when one fails:"
                " wires.gather, wires.sum, world.gather or Watch.exchange do; else say in KNOWN how it ends"
            )
            found.add(key)
    assert found == set(KNOWN), "no longer there: take it out of KNOWN"


def test_a_collective_that_nobody_knows_is_found(tmp_path: Path) -> None:
    file = tmp_path / "new.py"
    file.write_text("import torch.distributed as dist\n\n\ndef wait():\n    dist.barrier()\n")
    assert list(waits_in(file)) == [("wait", "dist.barrier", 5)]
