"""A program with 200 MB of state whose process, job or node is to end: it saves, ends with 42, the next run goes on."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from raydist.checkpoints.listing import latest_checkpoint
from tests.ray_head import RAY, RayHead, ray_home, running_head, running_node

ROOT = Path(__file__).parent.parent
PROGRAM = str(Path(__file__).with_name("preempted_program.py"))

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(300)]


@contextlib.contextmanager
def own_head() -> Iterator[RayHead]:
    with ray_home() as home, running_head(home) as running:
        yield running


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with own_head() as running:
        yield running


def environment(head: RayHead) -> Mapping[str, str]:
    return {**head.home.environment, "RAY_ADDRESS": "auto", "PYTHONPATH": str(ROOT)}


def whole_run(head: RayHead, directory: Path, *more: str) -> str:
    command = [sys.executable, PROGRAM, str(directory), "0", *more]
    done = subprocess.run(
        command, env=environment(head), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    found = re.search(r"^digest (.*)$", done.stdout, flags=re.MULTILINE)
    assert found is not None, done.stdout + done.stderr
    return found[1]


@pytest.fixture(scope="module")
def expected(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> str:
    return whole_run(head, tmp_path_factory.mktemp("whole"))


def words(line: str, said: str) -> list[str]:
    found = re.search(rf"^{line} (.*)$", said, flags=re.MULTILINE)
    assert found is not None, said
    return found[1].split()


def wait_for_end(pids: list[str]) -> None:
    """Of replicas, whose driver has ended."""
    end = time.monotonic() + 10
    while (left := [pid for pid in pids if Path("/proc", pid).exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []


def check_saved(directory: Path, asked: float) -> None:
    saved = latest_checkpoint(directory)
    assert saved is not None
    manifest = Path(saved, "manifest.json")
    megabytes = sum(file.stat().st_size for file in Path(saved).iterdir()) / 1e6
    print(f"{megabytes:.0f} MB were committed {manifest.stat().st_mtime - asked:.2f} s after it was asked to end")
    assert megabytes > 200


class Running:
    """The program in a process of this one's, some steps on."""

    def __init__(self, head: RayHead, directory: Path, *more: str, at_step: int, seconds_a_step: float) -> None:
        command = [sys.executable, PROGRAM, str(directory), str(seconds_a_step), *more]
        self.process = subprocess.Popen(command, env=environment(head), cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            if line == f"step {at_step}\n":
                break
        self.said = "".join(said)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def check_end(self, began: float) -> None:
        rest = self.process.communicate(timeout=60)[0]
        assert self.process.returncode == 42, self.said + rest
        print(f"ended {time.time() - began:.2f} s after it was asked to")
        wait_for_end(words("replicas", self.said))


def drain(head: RayHead, node: str) -> None:
    """As who is going to take a machine away does."""
    command = [
        *(str(RAY), "drain-node", f"--address={head.address}", f"--node-id={node}"),
        *("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=the machine is needed elsewhere"),
        "--deadline-remaining-seconds=30",
    ]
    done = subprocess.run(command, env=environment(head), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_program_whose_node_is_drained_ends_with_42_and_the_next_run_goes_on(
    head: RayHead, expected: str, tmp_path: Path
) -> None:
    # `ray drain-node` takes seconds to start, in which the program must not end.
    with own_head() as own, Running(own, tmp_path, at_step=2, seconds_a_step=1.0) as program:
        drivers, *replicas = words("nodes", program.said)
        assert set(replicas) == {drivers}
        drain(own, drivers)
        began = time.time()
        program.check_end(began)
        check_saved(tmp_path, began)
    assert whole_run(head, tmp_path) == expected


def test_a_program_goes_on_when_the_node_of_another_replica_is_drained(expected: str, tmp_path: Path) -> None:
    with (
        own_head() as own,
        running_node(own),
        Running(own, tmp_path, "workers", at_step=2, seconds_a_step=1.0) as program,
    ):
        drivers, *replicas = words("nodes", program.said)
        drain(own, next(node for node in replicas if node != drivers))
        rest = program.process.communicate(timeout=120)[0]
        assert program.process.returncode == 0, program.said + rest
        assert words("digest", rest) == expected.split()


def job(head: RayHead, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(RAY), "job", *command], env=environment(head), capture_output=True, text=True, timeout=90, check=False
    )


def test_a_job_that_is_stopped_has_saved_and_the_next_run_goes_on(head: RayHead, expected: str, tmp_path: Path) -> None:
    """`ray job stop` kills 3 s after SIGTERM."""
    address = ("--address", head.dashboard)
    variables = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT)}})
    program = (sys.executable, PROGRAM, str(tmp_path), "0.5")
    flags = ("--no-wait", "--submission-id", "stopped", "--runtime-env-json", variables)
    submitted = job(head, "submit", *address, *flags, "--", *program)
    assert submitted.returncode == 0, submitted.stderr
    end = time.monotonic() + 60
    while "step 2\n" not in (logs := job(head, "logs", *address, "stopped").stdout) and time.monotonic() < end:
        time.sleep(0.2)
    assert "digest" not in logs, "it has ended already"
    began = time.time()
    stopped = job(head, "stop", *address, "stopped")
    assert stopped.returncode == 0, stopped.stderr
    assert "digest" not in job(head, "logs", *address, "stopped").stdout
    check_saved(tmp_path, began)
    wait_for_end(words("replicas", logs))
    assert whole_run(head, tmp_path) == expected
