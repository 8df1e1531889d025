from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import raydist as rd
from raydist.failpoints import installed
from raydist.training.saving import ModelManifest, digests, read_model_file, snapshot, write_model_file

TENSORS = {
    "module.a": torch.arange(100, dtype=torch.float64).reshape(10, 10),
    "module.b": torch.ones(3, dtype=torch.bfloat16),
    "module.none": torch.empty(0, 4),
    "module.count": torch.tensor(7),
}


def manifest(**changes: object) -> ModelManifest:
    fields: dict[str, object] = {
        "module_class": "m:N",
        "config": {"width": 2},
        "extra": {},
        "optimizer": None,
        "sha256": digests(TENSORS),
    }
    return ModelManifest(**(fields | changes))  # type: ignore[arg-type]  # one dict for fields of several types


def written(path: Path) -> Path:
    write_model_file(path, TENSORS, manifest())
    return path


def test_round_trip(tmp_path: Path) -> None:
    tensors, found = read_model_file(written(tmp_path / "new" / "model.safetensors"))
    assert found == manifest()
    assert tensors.keys() == TENSORS.keys()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    assert tensors["module.b"].dtype is torch.bfloat16


def test_an_old_file_is_replaced_and_no_temporary_one_is_left(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_text("old")
    written(path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_model_file(path)[1].module_class == "m:N"


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "model")
    before = path.read_bytes()

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("raydist.training.saving.write_safetensors", full_disk)
    with pytest.raises(OSError, match="No space left"):
        written(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(rd.NotFoundError, match="none at .*absent"):
        read_model_file(tmp_path / "absent")


@pytest.mark.parametrize("length", [0, 4, 50, 600, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = written(tmp_path / "model")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(rd.DataLossError, match="truncated, damaged") as caught:
        read_model_file(path)
    assert caught.value.path == str(path)


def test_any_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    whole = path.read_bytes()
    for position in range(0, len(whole), 5):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(rd.DataLossError, match="damaged|has no raydist manifest"):
            read_model_file(path)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": torch.ones(2)}, path)
    with pytest.raises(rd.DataLossError, match="has no raydist manifest"):
        read_model_file(path)


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    write_model_file(tmp_path / "model", TENSORS, manifest(version=2))
    with pytest.raises(rd.InvalidArgumentError, match="has format version 2, this raydist reads version 1"):
        read_model_file(tmp_path / "model")


def test_what_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(rd.InvalidArgumentError, match="JSON values only.*config"):
        write_model_file(tmp_path / "model", TENSORS, manifest(config={"fn": print}))
    assert not list(tmp_path.iterdir())


def test_a_snapshot_shares_no_memory() -> None:
    shared = torch.zeros(3)
    copies = snapshot({"a": shared, "b": shared[:2], "c": "text"})
    shared.fill_(1.0)
    assert copies["a"].tolist() == [0.0] * 3
    assert copies["b"].tolist() == [0.0] * 2
    assert copies["c"] == "text"


def test_a_uri_is_written_and_read(tmp_path: Path) -> None:
    uri = "memory://models/new/model.safetensors"
    write_model_file(uri, TENSORS, manifest())
    tensors, found = read_model_file(uri)
    assert found == manifest()
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
    write_model_file(f"file://{tmp_path}/model", TENSORS, manifest())
    assert read_model_file(tmp_path / "model")[1] == manifest()
    with pytest.raises(rd.NotFoundError, match="memory://models/new/absent"):
        read_model_file("memory://models/new/absent")
    with pytest.raises(rd.InvalidArgumentError, match="memory://models/' names none"):
        write_model_file("memory://models/", TENSORS, manifest())


def test_other_readers_of_safetensors_find_tensors_and_manifest(tmp_path: Path) -> None:
    with safe_open(written(tmp_path / "model"), framework="pt") as content:
        assert content.metadata().keys() == {"raydist.model", "raydist.sha256"}
        assert all(torch.equal(content.get_tensor(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("moment", ["within_file", "before_flush", "after_flush", "before_rename"])
def test_a_death_at_any_moment_leaves_the_old_file(moment: str, tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    before = path.read_bytes()

    def die(name: str) -> None:
        if name == f"checkpoint.{moment}":
            raise KeyboardInterrupt

    with installed(die), pytest.raises(KeyboardInterrupt):
        write_model_file(path, {**TENSORS, "module.a": torch.zeros(10, 10)}, manifest())
    assert path.read_bytes() == before
