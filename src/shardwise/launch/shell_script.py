"""A shell script for a run on this machine, or on given hosts over ssh."""

import re
import shlex
from collections.abc import Mapping, Sequence

from shardwise.launch.layout import Layout
from shardwise.launch.torchrun import SHUTDOWN, module_words, torchrun_module, torchrun_options
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

#: Placeholders for what only the shell knows of a host that it starts: its name, its number, how many there are, and
#: the rendezvous address. No text of a user contains such characters.
_HOST, _NUMBER, _COUNT, _ADDRESS = (f"\0{name}\0" for name in ("host", "number", "count", "address"))
_KNOWN = {
    _HOST: '"$(printf %q "$1")"',
    _NUMBER: '"$number"',
    _COUNT: '"${#nodes[@]}"',
    _ADDRESS: '"${nodes[0]##*@}"',
}

#: Every node's processes run in the background. The first that fails ends the others, and all are started again, on the
#: hosts that remain. `exec` makes the process that is signalled the one that was started, with no shell around it.
#: Restarting to include hosts that are back is not a failure, and does not count as one.
_TRAIN = """at_node() {{ "$python" -m shardwise.launch.at_node "$@" --folder "$folder"; }}
start() {{ {start}; }}
started=()
stop() {{ [ ${{#started[@]}} = 0 ] || kill -TERM "${{started[@]}}" 2>/dev/null; started=(); }}
told= watcher=
trap 'told=1; stop' TERM INT HUP

restart=0 failed=0
while :; do
    begun=$(at_node begin --nodes {nodes} --job $$ --restart "$restart"{asked}) || exit 1
    read -r port mark taking <<<"$begun"
    read -ra nodes <<<"${{taking:-localhost}}"
    export SHARDWISE_ATTEMPT="{on} process $$, restarted $restart"
    started=()
    for number in "${{!nodes[@]}}"; do
        start "${{nodes[$number]}}" &
        started+=($!)
    done{watch}
    status=0
    # 127: nobody is left. A signal ends a wait too, and `stop` has been called by then.
    while wait -n; ended=$?; [ "$ended" != 127 ]; do
        if [ "$ended" != 0 ] && [ "$status" = 0 ]; then status=$ended; stop; fi
    done
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null
    watcher=
    next=$(at_node end --status "$status"{left})
    [ "$next" = more ] || failed=$((failed + 1))
    case "$next" in more|again) ;; *) break ;; esac
    [ "$failed" -le {restarts} ] && [ -z "$told" ] || break
    restart=$((restart + 1))
done
exit "$status"
"""


#: If some hosts do not take part: a process that polls them, which no `wait` waits for.
_WATCH = """
    "$python" -m shardwise.launch.at_node watch --nodes {nodes} --taking "${{nodes[*]}}" --job $$ \\
        --mark "$mark" --ssh {ssh} --report {report} --folder "$folder" </dev/null &
    watcher=$!
    disown "$watcher" """


def local_script(
    work: Work, layout: Layout, *,
    python: str, directory: str, port: int | None, restarts: int, variables: Mapping[str, str], save_seconds: int = 120,
) -> str:  # fmt: skip
    """Return the script for all ranks on this machine."""
    head = _head(work, "this machine", python, directory)
    if work.kind == "serve":
        given = _assigned(variables)
        return head + _SERVE.format(start=f'{f"env {given} " if given else ""}"$python" {module_words(work)}')
    options = torchrun_options(layout, address="127.0.0.1", port='"$port"')
    torchrun = f'"$python" {torchrun_module(work)} --node-rank 0 {options} {module_words(work)}'
    return head + _TRAIN.format(
        start=f"exec env {_assigned({SHUTDOWN: str(save_seconds), **variables})} {torchrun}",
        restarts=restarts, nodes="localhost", asked="" if port is None else f" --port {port}", on="local", left="",
        watch="",
    )  # fmt: skip


def hosts_script(
    work: Work, layout: Layout, hosts: Sequence[str], *,
    python: str, directory: str, ssh: str, port: int, restarts: int, variables: Mapping[str, str], least: int = 1,
    save_seconds: int = 120,
) -> str:  # fmt: skip
    """Return the script for one node per participating host, in the order given. A host that loses this shell ends its
    ranks.

    Ranks rendezvous at a port of the first host, the same in every attempt.
    """
    given = _assigned({SHUTDOWN: str(save_seconds), **variables})
    options = torchrun_options(layout, address=_ADDRESS, port=port, num_nodes=_COUNT)
    inner = (
        f"cd {shlex.quote(directory)} && exec env {given} NODE_NAME={_HOST} {shlex.quote(python)}"
        f" {torchrun_module(work)} --node-rank {_NUMBER} {options} {module_words(work)}"
    )
    report = (
        f"cd {shlex.quote(directory)} && env {given} {shlex.quote(python)} -m shardwise.launch.at_node report"
        f" --folder {shlex.quote(str(work.folder))}"
    )
    # With a terminal of its own (-tt), the remote process is signalled when the connection is lost.
    start = f'exec {ssh} -tt "$1" {_filled(inner)} </dev/null'
    return _head(work, ", ".join(hosts), python, directory) + _TRAIN.format(
        start=start,
        restarts=restarts,
        nodes=shlex.quote(" ".join(hosts)),
        asked=f" --ssh {shlex.quote(ssh)} --least {least}",
        on="hosts",
        left=' --nodes "${nodes[*]}"',
        watch=_WATCH.format(nodes=shlex.quote(" ".join(hosts)), ssh=shlex.quote(ssh), report=shlex.quote(report)),
    )


def _assigned(variables: Mapping[str, str]) -> str:
    """Return variables as words of `env`."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())


def _filled(text: str) -> str:
    """Quote a text for another shell as one word of this one, with the placeholders filled in."""
    parts = re.split("(" + "|".join(map(re.escape, _KNOWN)) + ")", text)
    return "".join(_KNOWN.get(part) or (shlex.quote(part) if part else "") for part in parts)


def _head(work: Work, where: str, python: str, directory: str) -> str:
    return _HEAD.format(
        command=as_comment(work),
        where=where,
        directory=shlex.quote(directory),
        python=shlex.quote(python),
        folder=shlex.quote(str(work.folder)),
    )
