"""Start on this machine, or on hosts over ssh: a script that continues when this command has ended."""

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.copies.detached import start_detached
from shardwise.errors import ShardwiseError
from shardwise.launch.at_node import is_free, judge, write_mark
from shardwise.launch.layout import Layout
from shardwise.launch.shell_script import hosts_script, local_script
from shardwise.launch.target import Submitted
from shardwise.launch.tools import try_asking
from shardwise.launch.work import Work
from shardwise.output import save_output


@dataclass(frozen=True, slots=True, kw_only=True)
class OnHosts:
    """Hosts, one node each; none means this machine alone."""

    work: Work
    layout: Layout
    python: str
    hosts: tuple[str, ...] = ()
    ssh: str = "ssh"
    port: int | None = None
    restarts: int = 3
    save_seconds: int = 120
    least: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def on(self) -> str:
        return "hosts" if self.hosts else "local"

    @property
    def path(self) -> Path:
        return self.work.launch_folder / f"{self.on}.sh"

    @property
    def _port(self) -> int:
        return self.port or 29500

    def text(self) -> str:
        directory = str(Path.cwd())
        if not self.hosts:
            return local_script(
                self.work, self.layout, python=self.python, directory=directory, port=self.port,
                restarts=self.restarts, variables=self.variables, save_seconds=self.save_seconds,
            )  # fmt: skip
        return hosts_script(
            self.work, self.layout, self.hosts, python=self.python, directory=directory, ssh=self.ssh,
            port=self._port, restarts=self.restarts, variables=self.variables, least=self.least,
            save_seconds=self.save_seconds,
        )  # fmt: skip

    def check(self) -> None:
        """Check that hosts answer, see the folder, have the same versions, and have a free port."""
        if self.hosts:
            self._check_hosts()
        elif shutil.which(self.python) is None:
            raise ShardwiseError(f"--python {self.python} cannot be run here", remedy="leave --python out")
        elif self.port is not None and not is_free(self.port):
            raise ShardwiseError(f"port {self.port} is taken", remedy="another --port, or none: a free one is taken")
        elif self.work.port is not None and not is_free(self.work.port):
            raise ShardwiseError(f"port {self.work.port} is taken", remedy="serve ... --port with another")

    def submit(self) -> Submitted:
        save_output(self.path, self.text())
        log = self.work.launch_folder / f"{self.on}.out"
        process = _start_apart(self.path, log)
        return Submitted(
            job=str(process),
            log=log,
            state=lambda: _state_of(process),
            is_over=lambda state: state != "RUNNING",
            is_good=lambda state: state == "COMPLETED",
            stop=f"kill {process}",
        )

    def _check_hosts(self) -> None:
        mark = write_mark(self.work.folder)
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            told = list(pool.map(lambda host: self._report(host, mark), self.hosts))
        judge(told, self.work.folder)
        if not told[0].get("is_port_free", True):
            raise ShardwiseError(f"port {self._port} of {self.hosts[0]} is taken", remedy=f"--port {self._port + 1}")

    def _report(self, host: str, mark: str) -> dict[str, object]:
        port = f" --port {self._port}" if host == self.hosts[0] else ""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.variables.items())
        report = f"report --folder {shlex.quote(str(self.work.folder))} --mark {mark}{port}"
        asked = (
            f"cd {shlex.quote(str(Path.cwd()))} && env {variables} NODE_NAME={shlex.quote(host)}"
            f" {shlex.quote(self.python)} -m shardwise.launch.at_node {report}"
        )
        answer = try_asking([*shlex.split(self.ssh), host, asked])
        if answer.returncode == 255:
            said = answer.stderr.strip().splitlines() or ["it does not answer"]
            raise ShardwiseError(f"{host} cannot be reached: {said[-1]}", remedy=f"{self.ssh} {host}, until that works")
        if answer.returncode != 0:
            said = answer.stderr.strip().splitlines() or [f"status {answer.returncode}"]
            raise ShardwiseError(
                f"{host} cannot run {self.python} in {Path.cwd()}: {said[-1]}",
                remedy="--python with an environment that all hosts have, in a directory that they share",
            )
        told: dict[str, object] = json.loads(answer.stdout)
        return told


def _start_apart(script: Path, log: Path) -> int:
    """Start a shell that survives this process and its terminal."""
    bash = shutil.which("bash")
    if bash is None:
        raise ShardwiseError("bash is not found here", remedy="shardwise train itself, without launch")
    return start_detached([bash, str(script)], log, mode=0o644)


def _state_of(process: int) -> str:
    """Return the state of a shell that this process started."""
    try:
        ended, status = os.waitpid(process, os.WNOHANG)
    except ChildProcessError:
        return "COMPLETED"
    if not ended:
        return "RUNNING"
    code = os.waitstatus_to_exitcode(status)
    return "COMPLETED" if code == 0 else f"FAILED ({code})"
