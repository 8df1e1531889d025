"""Disks that get full or read-only, and stores that fail: training goes on, and what was safe stays safe."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import raydist as rd
from raydist.pipelines.formats import remote_file
from tests.chaos.training import Training, resumed
from tests.object_store.file_system import register
from tests.object_store.server import ObjectStore, serve_objects

ROOT = Path(__file__).parents[2]
SECRET = "hunter2"


def can_mount() -> bool:
    command = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_disk_that_gets_full_or_read_only(tmp_path: Path) -> None:
    if not can_mount():
        pytest.skip("needs the program unshare, and the right to mount in a namespace of its own")
    program = "tests.chaos.programs.bad_disk"  # in the folder of the repository
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-m", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("No space left on device") == 4  # two saves without room, two without a name
    assert "Read-only file system" in done.stdout
    refused = [line for line in done.stdout.splitlines() if line.startswith("refused: ")]
    assert len(refused) == 2
    for line, name in zip(refused, "ab", strict=True):  # a directory that is there, and one that is to be made
        assert f"must be able to write into its directory '{tmp_path}/{name}', but may not: [Errno 30]" in line


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    register()
    with serve_objects(login=f"me:{SECRET}") as served:
        yield served


def test_a_store_that_fails_now_and_then_lists_late_and_is_slow(store: ObjectStore) -> None:
    store.faults.failure_rate, store.faults.latency_s, store.faults.listing_delay_s = 0.05, 0.001, 0.2
    training = Training(store.uri("bucket/run"))
    with warnings.catch_warnings(record=True):  # of saves that failed six times in a row, if any did
        warnings.simplefilter("always")
        for _ in range(10):
            training.saves(rd.FailedPreconditionError)
        training.manager.close()
        store.faults.listing_delay_s = 0.0
        assert resumed(store.uri("bucket/run")) == training.safe >= 8
    assert all(SECRET.encode() not in (store.get(key) or b"") for key in store.keys(""))


@pytest.mark.parametrize("fault", ["down", "read_only", "full"])
def test_a_store_that_takes_nothing(store: ObjectStore, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_file, "ATTEMPTS", 2)
    training = Training(store.uri("bucket/run"))
    assert training.saves()
    assert training.saves()

    def break_store(*, broken: bool) -> None:
        store.faults.down = broken and fault == "down"
        store.faults.read_only = broken and fault == "read_only"
        store.faults.capacity = 1 if broken and fault == "full" else None

    break_store(broken=True)
    failed = training.step()
    with pytest.raises(Exception, match=r"bucket/run|status 507") as caught:
        failed.wait()
    assert SECRET not in f"{caught.value} {caught.value.__cause__}"
    training.step()
    with pytest.warns(RuntimeWarning, match="could not be saved.*Training goes on") as warned:
        training.manager.sync()
    assert not any(SECRET in str(each.message) for each in warned)
    break_store(broken=False)
    assert training.saves()
    training.manager.close()
    assert resumed(store.uri("bucket/run")) == 5
