"""Machines of a test's own: networks, processes and shared memory apart, with one cable between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ray_head import RayHome, ray_home

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Machine:
    """One of them. What Ray writes is in a folder that each machine has for itself."""

    name: str  # of its network namespace
    address: str
    home: RayHome

    def start(self, script: str, log: Path) -> subprocess.Popen[bytes]:
        """Run a shell script there; all that it starts ends with the process that is returned."""
        own = self.home.folder / "own"
        prelude = f"set -e; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs {own}; cd {ROOT}"
        command = ["ip", "netns", "exec", self.name, *_ENTER, "bash", "-c", f"{prelude}\n{script}"]
        environment: Mapping[str, str] = {**self.home.environment, "RAY_TMPDIR": str(own)}
        with log.open("wb") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


_ENTER = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


@contextlib.contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Two of them; skips the test where this user may not make any."""
    names = [f"rd{os.getpid()}{letter}" for letter in "ab"]
    with ray_home() as home:
        (home.folder / "own").mkdir()
        try:
            _lay_cable(names)
            yield Machine(names[0], "10.219.0.1", home), Machine(names[1], "10.219.0.2", home)
        finally:
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _lay_cable(names: list[str]) -> None:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs the programs ip and unshare")
    made = subprocess.run(["ip", "netns", "add", names[0]], check=False, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"needs to make network namespaces: {made.stderr.strip()}")
    _ip("netns", "add", names[1])
    _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
    for number, name in enumerate(names, start=1):
        _ip("-n", name, "address", "add", f"10.219.0.{number}/24", "dev", "cable")
        for device in ("lo", "cable"):
            _ip("-n", name, "link", "set", device, "up")


def unplug(machine: Machine) -> None:
    """Take the cable out."""
    _ip("-n", machine.name, "link", "set", "cable", "down")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def await_line(log: Path, line: str, process: subprocess.Popen[bytes], *, within_s: float) -> None:
    """Return once a line is in a log; fail with the whole of it where the process ends before, or time is up."""
    deadline = time.monotonic() + within_s
    while line not in log.read_text().splitlines():
        ended = process.poll() is not None
        if line not in log.read_text().splitlines() and (ended or time.monotonic() > deadline):
            pytest.fail(f"{line!r} did not come within {within_s} s:\n{log.read_text()}")
        time.sleep(0.1)
