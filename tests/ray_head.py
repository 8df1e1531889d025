"""A Ray head node of a test's own: `ray start --head`, on free ports, with a token and files of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")
START_S = 90.0
STOP_S = 20.0


@dataclass(frozen=True)
class RayHome:
    """The folder in which a Ray keeps its files, and the environment of processes that use this Ray."""

    folder: Path
    environment: Mapping[str, str]

    @property
    def token(self) -> str:
        return (self.folder / "auth_token").read_text()

    def run(self, program: str) -> str:
        """Return the output of a Python program that uses this Ray; it must end well, within 140 s."""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def processes(self) -> dict[int, str]:
        """Living processes that belong to it: their command lines name the folder."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(self.folder) in command:
                    found[int(entry.parent.name)] = command[:100]
        return found

    def processes_left(self, within_s: float) -> dict[int, str]:
        """Those that are still there after so many seconds."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left


@dataclass(frozen=True)
class RayHead:
    """A running head node."""

    home: RayHome  # `RAY_ADDRESS=auto` with its environment finds it
    dashboard: str  # URL that `ray job submit --address` takes

    @property
    def address(self) -> str:
        """The value for `RAY_ADDRESS` and `ray start --address`."""
        return _address_file(self.home).read_text().strip()


@contextlib.contextmanager
def ray_home() -> Iterator[RayHome]:
    """A place for Ray's files, with a token; at the end no process of it may be left."""
    folder = Path(tempfile.mkdtemp(prefix="rdtest-", dir="/tmp"))  # short: socket paths end at 107 characters
    (folder / "auth_token").write_text(secrets.token_hex(32))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    own = {
        "PATH": f"{RAY.parent}{os.pathsep}{os.environ['PATH']}",  # as in an activated environment: jobs call `python`
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "auth_token"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # with Ray's own 15 they starve beside whatever else runs the tests
    }
    home = RayHome(folder, {**inherited, **own})
    try:
        yield home
    finally:
        for pid in home.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; distinct, because all are held until the last is found."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


@contextlib.contextmanager
def running_head(
    home: RayHome, *, port: int | None = None, flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[RayHead]:
    """Start a head node with a dashboard; stop it, and only it, at the end. `environment`: for it alone."""
    own_port, dashboard_port, agent_port, client_port = free_ports(4)
    command = [
        *(str(RAY), "start", "--head", "--block", f"--port={port or own_port}", *flags),
        *(f"--dashboard-port={dashboard_port}", f"--dashboard-agent-listen-port={agent_port}"),
        *(f"--ray-client-server-port={client_port}", "--min-worker-port=0", "--max-worker-port=0"),
        f"--object-store-memory={300 * 2**20}",
    ]
    log = (home.folder / "ray_start.log").open("wb")
    with (
        log,
        subprocess.Popen(
            command, env={**home.environment, **(environment or {})}, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        try:
            head = RayHead(home, f"http://127.0.0.1:{dashboard_port}")
            wait_until_up(head, process)
            yield head
        finally:
            stop(process)


@contextlib.contextmanager
def running_node(head: RayHead) -> Iterator[None]:
    """Let another node join, as `ray start` on a second machine does; stop it, and only it, at the end."""
    (agent_port,) = free_ports(1)
    command = [
        *(str(RAY), "start", f"--address={head.address}", "--block", f"--dashboard-agent-listen-port={agent_port}"),
        *("--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={100 * 2**20}"),
    ]
    log_file = head.home.folder / "ray_start_node.log"
    with (
        log_file.open("wb") as log,
        subprocess.Popen(command, env=head.home.environment, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + START_S
            while b"Ray runtime started" not in log_file.read_bytes():
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"a second node did not come up:\n{log_file.read_text()}")
                time.sleep(0.2)
            yield
        finally:
            stop(process)


def wait_until_up(head: RayHead, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(
        f"{head.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {head.home.token}"}
    )
    address_file = _address_file(head.home)  # where "auto" looks; written after all is started
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            urllib.request.urlopen(request, timeout=5).close()
            if address_file.is_file():
                return
        time.sleep(0.2)
    log = (head.home.folder / "ray_start.log").read_text()
    raise RuntimeError(f"ray start did not come up within {START_S} s (exit status {process.poll()}):\n{log}")


def _address_file(home: RayHome) -> Path:
    return home.folder / "ray" / "ray_current_cluster"


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # `ray start --block` then ends what it has started
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
