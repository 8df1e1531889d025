"""Saves to a disk of 4 MB that gets full, read-only and full of names while it trains, in a mount namespace of its own.

bad_disk.py FOLDER
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import raydist as rd

INODES = 100


def mount(folder: str, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


class Training:
    """Half a megabyte that each step changes."""

    def __init__(self, folder: Path) -> None:
        self.weight, self.progress = torch.nn.Parameter(torch.zeros(131072)), rd.State(step=0)
        self.checkpoint = rd.Checkpoint(weight=torch.nn.ParameterList([self.weight]), progress=self.progress)
        self.manager = rd.CheckpointManager(self.checkpoint, str(folder), max_to_keep=2)
        self.safe = 0

    def step(self) -> rd.SaveHandle | None:
        with torch.no_grad():
            self.weight.add_(1)
        self.progress.step += 1
        return self.manager.save()

    def steps_well(self, count: int = 1) -> None:
        for _ in range(count):
            handle = self.step()
            assert handle is not None
            handle.wait()
            self.safe = self.progress.step

    def step_fails(self, kind: type[Exception]) -> None:
        """Training goes on, and what was safe is."""
        handle = self.step()
        assert handle is not None
        try:
            handle.wait()
        except kind as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("nothing can be saved")
        self.is_safe()

    def is_safe(self) -> None:
        found = Training(Path("unused"))
        latest = rd.latest_checkpoint(self.manager.directory)
        assert latest is not None
        found.checkpoint.restore(latest)
        assert (found.progress.step, found.weight.unique().tolist()) == (self.safe, [self.safe])


@contextmanager
def full(folder: Path) -> Iterator[None]:
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass
    yield
    ballast.unlink()


@contextmanager
def full_of_names(folder: Path) -> Iterator[None]:
    """There is room, but for no further file."""
    ballast = folder / "ballast"
    ballast.mkdir()
    with contextlib.suppress(OSError):
        for number in range(2 * INODES):
            (ballast / str(number)).touch()
    yield
    shutil.rmtree(ballast)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    mount(str(folder), "remount,ro")
    yield
    mount(str(folder), "remount,rw,size=4m")


def nobody_else_begins(folder: Path) -> None:
    """A program that starts where nothing can be written is told so at once; what is there can be read."""
    for manager in (rd.CheckpointManager(Training(Path("unused")).checkpoint, str(folder / name), 1) for name in "ab"):
        try:
            manager.restore_or_initialize()
        except rd.FailedPreconditionError as error:
            print(f"refused: {error}")
        else:
            raise AssertionError("nothing can be saved")
        manager.close()


def main() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # that a save has failed
    folder = Path(sys.argv[1])
    mount(str(folder), f"size=4m,nr_inodes={INODES}")
    (folder / "a").mkdir()
    training = Training(folder)
    training.steps_well(3)
    for bad, kind in ((full, OSError), (full_of_names, OSError), (read_only, Exception)):
        with bad(folder):
            training.step_fails(kind)
            training.step_fails(kind)
            if bad is read_only:
                nobody_else_begins(folder)
        training.steps_well(2)
        left = sorted(path.name for path in folder.glob("ckpt-*") if path.is_dir())
        assert left == [f"ckpt-{training.safe - 1}", f"ckpt-{training.safe}"], left
        training.is_safe()
    training.manager.close()


if __name__ == "__main__":
    main()
