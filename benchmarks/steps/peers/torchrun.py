"""Starting ranks under torchrun, one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack, suppress

from benchmarks.steps.ranks import Ranks
from benchmarks.steps.scene import Scene

END_S = 10.0


def launch(scene: Scene, module: str) -> Ranks:
    """Ranks that run `benchmarks.steps.peers.<module> ADDRESS`; they end when the scene is closed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={scene.ranks}"]
    waiting = scene.resources.enter_context(ExitStack())  # closed after the ranks' connections
    ranks = Ranks(scene, scene.ranks)
    command += ["-m", f"benchmarks.steps.peers.{module}", ranks.address]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603 - the command above
    waiting.callback(end, process)
    ranks.accept()
    return ranks


def end(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)  # its ranks see that the connection is closed
    process.terminate()
    process.wait()
