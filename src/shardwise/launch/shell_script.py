"""A run on this machine, or on given hosts over ssh, as a script for a shell."""

import shlex
from collections.abc import Mapping, Sequence

from shardwise.launch.layout import Layout
from shardwise.launch.torchrun import module_words, torchrun_module, torchrun_options
from shardwise.launch.work import Work, as_comment

_HEAD = """#!/bin/bash
# {command}
# on {where}. Written by shardwise launch.
set -uo pipefail
cd {directory} || exit 1
python={python}
folder={folder}
"""

_SERVE = """
exec {start}
"""

#: Every host's processes in the background; the first that fails ends the others, and all are started again.
_TRAIN = """at_node() {{ "$python" -m shardwise.launch.at_node "$@" --folder "$folder"; }}
started=()
stop() {{ [ ${{#started[@]}} = 0 ] || kill -TERM "${{started[@]}}" 2>/dev/null; started=(); }}
told=
trap 'told=1; stop' TERM INT HUP

for restart in $(seq 0 {restarts}); do
    begun=$(at_node begin --nodes {nodes} --job $$ --restart "$restart"{port}) || exit 1
    read -r port mark <<<"$begun"
    export SHARDWISE_ATTEMPT="{on} process $$, restarted $restart"
    started=()
{starts}
    status=0
    # 127: nobody is left. A signal ends a wait too, and `stop` has been called by then.
    while wait -n; ended=$?; [ "$ended" != 127 ]; do
        if [ "$ended" != 0 ] && [ "$status" = 0 ]; then status=$ended; stop; fi
    done
    next=$(at_node end --status "$status")
    [ "$next" = again ] && [ -z "$told" ] || break
done
exit "$status"
"""


def local_script(work: Work, layout: Layout, *, python: str, directory: str, port: int | None, restarts: int) -> str:
    """All ranks on this machine."""
    start = f'"$python" {module_words(work)}'
    if work.kind == "train":
        options = torchrun_options(layout, address="127.0.0.1", port='"$port"')
        start = f'"$python" {torchrun_module(work)} --node-rank 0 {options} {module_words(work)}'
    return _script(work, "this machine", [start], ["localhost"], "local", python, directory, port, restarts)


def hosts_script(
    work: Work, layout: Layout, hosts: Sequence[str], *,
    python: str, directory: str, ssh: str, port: int, restarts: int, variables: Mapping[str, str],
) -> str:  # fmt: skip
    """One node for each host, numbered as they are named. A host that loses this shell ends its ranks.

    Where ranks meet is a port of the first host, which is no other in the next attempt.
    """
    address = hosts[0].rpartition("@")[2]
    options = torchrun_options(layout, address=address, port=port)
    starts = []
    for number, host in enumerate(hosts):
        given = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        inner = (
            f"cd {shlex.quote(directory)} && exec env {given} NODE_NAME={shlex.quote(host)} {shlex.quote(python)}"
            f" {torchrun_module(work)} --node-rank {number} {options} {module_words(work)}"
        )
        # With a terminal of its own, what runs there hears when the connection is gone.
        starts.append(f"{ssh} -tt {shlex.quote(host)} {shlex.quote(inner)} </dev/null")
    return _script(work, ", ".join(hosts), starts, hosts, "hosts", python, directory, None, restarts)


def _script(
    work: Work, where: str, starts: Sequence[str], nodes: Sequence[str], on: str,
    python: str, directory: str, port: int | None, restarts: int,
) -> str:  # fmt: skip
    head = _HEAD.format(
        command=as_comment(work),
        where=where,
        directory=shlex.quote(directory),
        python=shlex.quote(python),
        folder=shlex.quote(str(work.folder)),
    )
    if work.kind == "serve":
        return head + _SERVE.format(start=starts[0])
    return head + _TRAIN.format(
        restarts=restarts,
        nodes=shlex.quote(" ".join(nodes)),
        port="" if port is None else f" --port {port}",
        on=on,
        starts="\n".join(f"    {start} &\n    started+=($!)" for start in starts),
    )
