"""The checkpoints of one run: their order, which of them stay, what is removed, and when the next one is due."""

from __future__ import annotations

import errno
import gc
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import raydist as rd
from raydist.checkpoints.checkpoint import Checkpoint, contents_of, start_save
from raydist.checkpoints.directory_lock import LOCK_FILE, DirectoryLock, Holder, judge_holder, read_holder, this_process
from raydist.checkpoints.listing import (
    DETAILS,
    Best,
    KeptCheckpoint,
    Retention,
    checkpoints_iterator,
    find_checkpoints,
)
from raydist.checkpoints.manager import CheckpointManager
from raydist.checkpoints.manifest import open_checkpoint
from raydist.checkpoints.object_state import State
from raydist.checkpoints.run_directory import RunDirectory, remove_checkpoint, remove_leftovers
from raydist.checkpoints.tensor_file import MANIFEST_NAME
from raydist.core.errors import FailedPreconditionError
from raydist.core.failpoints import installed
from raydist.pipelines.stored.directory_files import DirectoryFiles, LocalFiles, directory_files


@pytest.fixture
def roots(tmp_path: Path) -> list[DirectoryFiles]:
    """One on this machine and one that is not."""
    found = [directory_files(str(tmp_path / "run")), directory_files(f"memory://{uuid.uuid4().hex}/run")]
    for each in found:
        each.make()
    return found


class KilledError(BaseException):
    """Stands for SIGKILL: what runs behind it in this process is none of the killed one's."""


def saved(root: DirectoryFiles, name: str, number: int) -> DirectoryFiles:
    contents = contents_of(rd.Checkpoint(progress=rd.State(number=number), net=rd.Mean()))
    start_save(contents, root.inside(name), {}).write()
    return root.inside(name)


def kill_at(point: str) -> Callable[[str], None]:
    def die(name: str) -> None:
        if name == point:
            raise KilledError

    return die


def test_removal_begins_with_the_manifest_and_is_completed_after_a_kill(roots: list[DirectoryFiles]) -> None:
    for root in roots:
        directory = saved(root, "ckpt-1", 1)
        seen: list[tuple[str, bool, int]] = []

        def look(point: str, directory: DirectoryFiles = directory, seen: list[Any] = seen) -> None:
            seen.append((point, directory.exists("manifest.json"), len(directory.names())))

        with installed(look):
            remove_checkpoint(directory)
        assert seen == [
            ("retention.before_manifest", True, 2),
            ("retention.after_manifest", False, 1),
            ("retention.within_files", False, 0),
            ("retention.after_files", False, 0),
        ]
        assert root.folders() == []
        remove_checkpoint(directory)
        saved(root, "ckpt-1", 1)
        saved(root, "ckpt-2", 2)
        with installed(kill_at("retention.after_manifest")), pytest.raises(KilledError):
            remove_checkpoint(root.inside("ckpt-1"))
        with pytest.raises(rd.NotFoundError, match="did not come to its end"):
            open_checkpoint(root.inside("ckpt-1"))
        remove_leftovers(root, root.folders())
        assert root.folders() == ["ckpt-2"]
        assert open_checkpoint(root.inside("ckpt-2")).state("progress") == {"number": 2}


def test_files_that_no_manifest_names_are_removed(roots: list[DirectoryFiles]) -> None:
    for root in roots:
        directory = saved(root, "ckpt-1", 1)
        before = directory.names()
        directory.write("progress.r0123456789ab.safetensors", lambda file: file.write(b"of a killed save"))
        remove_leftovers(root, ["ckpt-1"])
        assert directory.names() == before
        with installed(kill_at("checkpoint.after_rename")), pytest.raises(KilledError):
            saved(root, "ckpt-1", 2)
        remove_leftovers(root, ["ckpt-1"])
        assert len(directory.names()) == 2, "the checkpoint that was replaced is gone"
        assert open_checkpoint(directory).state("progress") == {"number": 2}


def test_damaged_checkpoints_are_kept(tmp_path: Path) -> None:
    root = directory_files(str(tmp_path))
    saved(root, "ckpt-1", 1)
    (tmp_path / "ckpt-1" / "manifest.json").write_text("{}")
    remove_leftovers(root, ["ckpt-1"])
    assert len(os.listdir(tmp_path / "ckpt-1")) == 2


def test_files_of_others_are_kept(tmp_path: Path) -> None:
    root = directory_files(str(tmp_path))
    for name in ("ckpt-1", "ckpt-2"):
        directory = saved(root, name, 1)
        for theirs in ("notes.txt", "merged.safetensors"):
            directory.write(theirs, lambda file: file.write(b"a user's"))
    (tmp_path / "ckpt-2" / "tokenizer").mkdir()
    foreign = {"ckpt-3": ["model.safetensors", "optimizer.pt"], "ckpt-4": ["model.safetensors", "shards"]}
    for name, (file, other) in foreign.items():  # other programs call their checkpoints so
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
        (tmp_path / name / other).mkdir() if name == "ckpt-4" else (tmp_path / name / other).write_text("")
    remove_leftovers(root, root.folders())
    assert all(os.listdir(tmp_path / name) for name in root.folders())
    assert {name: sorted(os.listdir(tmp_path / name)) for name in foreign} == foreign
    remove_checkpoint(root.inside("ckpt-1"))
    remove_checkpoint(root.inside("ckpt-2"))
    assert os.listdir(tmp_path / "ckpt-1") == ["notes.txt"]
    assert sorted(os.listdir(tmp_path / "ckpt-2")) == ["notes.txt", "tokenizer"]


KEEPS_TWO = Retention(2, None, Best.parse(("loss", "min")))


def save(run: RunDirectory, number: int, loss: float) -> KeptCheckpoint:
    kept = run.begin(number, {"loss": loss})
    contents = Checkpoint(state=State(number=number))._contents
    run.save(kept, start_save(contents, run.files_of(kept), {DETAILS: run.details_of(kept)}).write)
    return kept


def names(paths: list[str]) -> list[str]:
    return [path.rpartition("/")[2] for path in paths]


def test_a_failed_removal_is_retried_by_a_later_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    run.acquire()
    for number in range(2):
        save(run, number, 1.0)
    with mock.patch.object(LocalFiles, "remove", side_effect=PermissionError("the store takes, but removes nothing")):
        for number in (2, 3, 4):
            save(run, number, 0.5)
    assert names(run.newest()) == ["ckpt-3", "ckpt-4"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3  # one try a save
    assert all("could not be removed: PermissionError: the store takes" in each for each in said)
    save(run, 1, 2.0)  # this one is kept now
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    run.release()


def test_a_checkpoint_whose_save_failed_is_removed_by_a_later_save(tmp_path: Path) -> None:
    run = RunDirectory(str(tmp_path), "ckpt", KEEPS_TWO)
    run.acquire()

    def fail(point: str) -> None:
        if point == "checkpoint.after_rename":
            raise OSError("the answer was lost")

    save(run, 1, 1.0)
    for number in (1, 2):
        with installed(fail), pytest.raises(OSError, match="lost"):
            save(run, number, 2.0)
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-2"]
    save(run, 3, 3.0)
    assert sorted(path.name for path in tmp_path.glob("ckpt-*")) == ["ckpt-1", "ckpt-3"]
    run.release()


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    with CheckpointManager(Checkpoint(state=State(a=1)), tmp_path, None) as manager:
        for number in (5, 100, 7):
            manager.save(checkpoint_number=number, metrics={"loss": number})
    return tmp_path


def names_in(path: Path, name: str | None = None) -> list[str]:
    return [each.kept.name for each in find_checkpoints(directory_files(str(path)), name)]


def test_checkpoints_are_listed_in_the_order_of_their_saves_or_by_number(filled: Path) -> None:
    Checkpoint(state=State(a=1)).save(filled / "other-1")
    (filled / "ckpt-9").mkdir()
    (filled / "ckpt-x").mkdir()
    (filled / "ckpt-8").symlink_to(filled / "ckpt-7")
    assert names_in(filled) == ["other-1", "ckpt-5", "ckpt-100", "ckpt-7"]
    assert names_in(filled, "ckpt") == ["ckpt-5", "ckpt-100", "ckpt-7"]
    assert find_checkpoints(directory_files(str(filled)), "ckpt")[0].kept.metrics == {"loss": 5.0}
    manifest = filled / "ckpt-7" / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes()[:-9])
    found = find_checkpoints(directory_files(str(filled)), "ckpt")
    assert [each.kept.name for each in found] == ["ckpt-5", "ckpt-7", "ckpt-100"]
    assert [each.damage is not None for each in found] == [False, True, False]


def test_the_iterator_yields_each_new_checkpoint_once_and_waits_for_the_next(tmp_path: Path) -> None:
    with rd.CheckpointManager(rd.Checkpoint(progress=rd.State(a=1)), tmp_path, 1) as manager:
        asked: list[int] = []

        def save_then() -> bool:
            asked.append(1)
            if len(asked) == 1:
                manager.save()
                manager.sync()
            return len(asked) > 1

        found = checkpoints_iterator(tmp_path, timeout=0.05, timeout_fn=save_then)
        assert next(found) == str(tmp_path / "ckpt-1")
        manager.save()
        manager.save()
        manager.sync()
        assert list(found) == [str(tmp_path / "ckpt-3")]
        assert len(asked) == 2


def test_the_best_stays_beside_the_newest() -> None:
    losses = {1: float("nan"), 2: 0.5, 3: 2.0, 4: 1.0}
    found = [KeptCheckpoint(f"ckpt-{n}", n, n, 0.0, {"loss": loss}) for n, loss in losses.items()]
    cases = [(Best("loss", "min"), [1, 3]), (Best("loss", "max"), [1, 2]), (Best("accuracy", "max"), [1, 2, 3])]
    for best, expected in cases:
        assert [each.number for each in Retention(1, best=best).to_remove(found, began=0.0)] == expected, best


def test_checkpoints_kept_for_good_do_not_change() -> None:
    rules = Retention(1, keep_every_s=120)
    found: list[KeptCheckpoint] = []
    for number in range(8):
        found = [*found, KeptCheckpoint(f"ckpt-{number}", number, number, 60.0 * number, {})]
        gone = rules.to_remove(found, began=0.0)
        found = [other for other in found if other not in gone]
    assert [each.number for each in found] == [2, 4, 6, 7]


# --- one process may write into a directory ---------------------------------------------------------------------------

ELSEWHERE = Holder("other", "another-host", 7, "2026-11-22 10:00:00 +0000", machine="another", started="1")


def test_a_read_only_directory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):

        def refuse(path: str, *_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number), path)

        monkeypatch.setattr(os, "mkdir", refuse)
        lock = DirectoryLock(LocalFiles(str(tmp_path / "new")))
        expected = OSError if number == errno.ENOSPC else FailedPreconditionError
        with pytest.raises(expected, match="permission is denied|Read-only file system|No space left"):
            lock.acquire()
        assert not lock.is_acquired


@pytest.mark.parametrize("failing", ["remove", "alone"])  # nobody else may take it while it is removed
def test_a_lock_file_that_could_not_be_removed_does_not_block_this_process(failing: str, tmp_path: Path) -> None:
    first, second = DirectoryLock(LocalFiles(str(tmp_path))), DirectoryLock(LocalFiles(str(tmp_path)))
    first.acquire()
    with mock.patch.object(LocalFiles, failing, side_effect=OSError("the store is down")):
        first.release()
    assert (tmp_path / LOCK_FILE).exists()
    second.acquire()
    with pytest.raises(FailedPreconditionError, match="belongs to process"):
        first.acquire()
    second.release()


def test_a_dropped_lease_is_released(tmp_path: Path) -> None:
    lock = DirectoryLock(LocalFiles(str(tmp_path)))
    lock.acquire()
    del lock
    gc.collect()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lease_of_another_machine_is_held_while_its_counter_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = directory_files(f"memory://{tmp_path}")
    files.make()
    files.replace(LOCK_FILE, ELSEWHERE.to_bytes())
    lock = DirectoryLock(files, beat_s=0.02, lapse_s=0.1)
    lock.acquire()
    lock.release()
    looks = iter([ELSEWHERE, replace(ELSEWHERE, beat=1)])
    monkeypatch.setattr("raydist.checkpoints.directory_lock.read_holder", lambda files: next(looks))
    with pytest.raises(FailedPreconditionError, match="process 7 on another-host"):
        DirectoryLock(LocalFiles(str(tmp_path)), beat_s=0.01, lapse_s=10).acquire()


def test_a_process_that_lost_its_lease_stops_writing(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    lock = DirectoryLock(files)
    lock.acquire()
    files.replace(LOCK_FILE, ELSEWHERE.to_bytes())
    with pytest.raises(FailedPreconditionError, match="another-host"):
        lock.require()
    lock.release()
    assert read_holder(files) == ELSEWHERE


def test_the_counter_grows_while_the_lease_is_held(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    lock = DirectoryLock(files, beat_s=0.01)
    lock.acquire()
    first = read_holder(files)
    while (now := read_holder(files)) == first:
        pass
    lock.release()
    assert first is not None
    assert now is not None
    assert now.beat > first.beat


def test_a_reused_process_number_and_a_file_that_is_no_lease_are_free() -> None:
    me = this_process()
    assert judge_holder(replace(me, token="x"), me) == "held"
    assert judge_holder(replace(me, token="x", started="1"), me) == "free"
    assert judge_holder(replace(me, token="x", pid=1 << 30), me) == "free", "there is no such process"
    assert judge_holder(replace(me, token="x", machine="another"), me) == "unknown"
    for content in (b"", b"{", b"[]", b'{"token": 1}', b"[" * 100_000):
        assert Holder.of_bytes(content) is None, content[:20]


def test_one_of_two_simultaneous_processes_gets_the_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = DirectoryLock(LocalFiles(str(tmp_path))), DirectoryLock(LocalFiles(str(tmp_path)))
    original = DirectoryLock._await_free

    def await_free(self: DirectoryLock, me: Holder) -> Holder | None:
        free = original(self, me)
        if self is first:
            second.acquire()
        return free

    with monkeypatch.context() as patched:
        patched.setattr(DirectoryLock, "_await_free", await_free)
        with pytest.raises(FailedPreconditionError, match="belongs to process"):
            first.acquire()
    second.require()
    assert (first.is_acquired, second.is_acquired) == (False, True)
    second.release()
    first.acquire()
    first.release()
