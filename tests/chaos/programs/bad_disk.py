"""Saves to a disk of 4 MB that gets full, read-only and full of names while it trains, in a namespace of its own."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import raydist as rd
from tests.chaos.training import Training

INODES = 100
SIZE = 360  # half a megabyte a save


def mount(folder: str, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


def fails(training: Training, kind: type[Exception]) -> None:
    """A step that cannot be saved: training goes on, and what was safe is."""
    try:
        training.step().wait()
    except kind as error:
        print(f"{type(error).__name__}: {error}")
    else:
        raise AssertionError("nothing can be saved")
    is_safe(training)


def is_safe(training: Training) -> None:
    found = Training("unused", SIZE)
    latest = rd.latest_checkpoint(training.manager.directory)
    assert latest is not None
    found.checkpoint.restore(latest)
    assert (found.progress.step, found.module.weight.unique().tolist()) == (training.safe, [training.safe])


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
    for name in "ab":
        manager = Training(folder / name, SIZE).manager
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
    training = Training(folder, SIZE)
    assert training.saves()
    for bad, kind in ((full, OSError), (full_of_names, OSError), (read_only, Exception)):
        assert training.saves()
        with bad(folder):
            fails(training, kind)
            fails(training, kind)
            if bad is read_only:
                nobody_else_begins(folder)
        assert training.saves()
        assert training.saves()
        left = sorted(path.name for path in folder.glob("ckpt-*") if path.is_dir())
        assert left == [f"ckpt-{training.safe - 1}", f"ckpt-{training.safe}"], left
        is_safe(training)
    training.manager.close()


if __name__ == "__main__":
    main()
