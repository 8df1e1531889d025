"""Printing, logging, breakpoints and notebooks, in programs of their own: this process shows no logs of replicas."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NOTEBOOK = '''
import json, logging, os, socket, sys, threading, time
import ray, torch
from ray._private import ray_constants
from ray.experimental import internal_kv
import raydist as rd

CELL = """
strategy = rd.MirroredStrategy(2, timeouts=rd.Timeouts(start_s=100))
with strategy.scope():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())

def step(batch):
    loss = model(batch.float()[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("printed by", rd.get_replica_context().replica_id_in_sync_group)
    logging.getLogger("mine").info("logged")
    logging.getLogger("mine").debug("not logged")
    return loss

batches = strategy.distribute_dataset(rd.Dataset.range(8).batch(4))
for batch in batches:
    loss = strategy.run(step, args=(batch,))
print("loss", strategy.reduce("MEAN", loss).item())
"""

def run(cell, **names):
    began = time.monotonic()
    space.update(names)
    try:
        exec(compile(cell, "<cell>", "exec"), space)
        said = ""
    except rd.RaydistError as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - began

def debug():
    """Attach to the debugger, as `ray debug` does."""
    keys = []
    while not keys:
        keys = internal_kv._internal_kv_list("RAY_PDB_", namespace=ray_constants.KV_NAMESPACE_PDB)
        time.sleep(0.05)
    known = json.loads(internal_kv._internal_kv_get(keys[0], namespace=ray_constants.KV_NAMESPACE_PDB))
    host, _, port = known["pdb_address"].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(b"p secret * 2\\nc\\n")
        while data := connection.recv(1000):
            seen.append(data.decode())

logging.basicConfig(level=logging.INFO)
ray.init("local", num_cpus=2, include_dashboard=False)
space, seen, told = {"rd": rd, "torch": torch, "logging": logging}, [], {}
told["first"], told["again"] = run(CELL), run(CELL)
told["breakpoint"] = run("strategy.local_results(strategy.run(lambda: breakpoint()))")
kept = space["strategy"]
told["held"] = run(CELL)
rd.close_all()
os.environ["RAY_DEBUG"] = "legacy"
threading.Thread(target=debug, daemon=True).start()
told["debugger"] = run("""
strategy = rd.MirroredStrategy(1)
def step():
    secret = 21
    breakpoint()
    return secret
print(strategy.run(step))
""")
told["seen"] = "".join(seen)
time.sleep(1)  # Ray brings what was printed
rd.close_all()
print("TOLD", json.dumps(told))
'''

ONE_DEVICE = """
import raydist as rd

def step(x):
    secret = x * 2
    breakpoint()
    return secret

print(rd.OneDeviceStrategy("cpu").run(step, args=(21,)))
print(rd.OneDeviceStrategy("cpu").run(step, args=(1,)))
print("went on")
"""


def environment() -> dict[str, str]:
    """Of a program of its own. A Ray that this process started may have set PYTHONBREAKPOINT."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONBREAKPOINT"}
    return {**kept, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}


def run(program: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, input=typed, env=environment(), capture_output=True, text=True, timeout=280)


@pytest.mark.long
def test_a_notebook_shows_ranks_names_what_is_in_the_way_and_has_rays_debugger() -> None:
    done = run(NOTEBOOK)
    output = done.stdout + done.stderr
    found = re.search(r"^TOLD (.*)$", output, flags=re.MULTILINE)
    assert done.returncode == 0, output
    assert found is not None, output
    told = json.loads(found[1])
    assert [told[name][0] for name in ("first", "again", "debugger")] == [""] * 3, output
    for rank in (0, 1):
        assert re.search(rf"\(replica {rank} of MirroredStrategy-\w+ pid=\d+\) printed by {rank}", output), output
        assert re.search(rf"\(replica {rank} of .*\) \[replica {rank}\] INFO:mine:logged", output), output
    assert "not logged" not in output
    said, _ = told["breakpoint"]
    assert re.search("FailedPreconditionError: .*OneDeviceStrategy.*RAY_DEBUG=legacy .*`ray debug`", said)
    said, seconds = told["held"]
    assert re.search(r"DeadlineExceededError: .*MirroredStrategy made at <cell>:2, [\d:]+, holds 2 x .*close_all", said)
    assert seconds < 60  # of 100
    assert "42" in told["seen"]


def test_a_breakpoint_on_one_device_is_pdb_and_leaving_it_ends_the_step() -> None:
    done = run(ONE_DEVICE, typed="p secret\nc\nq\n")
    assert re.search(r"step\(\).*\(Pdb\) 42.*\(Pdb\) 42", done.stdout, flags=re.DOTALL)
    assert done.returncode == 1
    assert "bdb.BdbQuit" in done.stderr
    assert "went on" not in done.stdout
