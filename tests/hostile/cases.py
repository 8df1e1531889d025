"""What is attacked: a kind of file, how a good one is made, and how raydist reads it."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import raydist as rd
from tests.datasets.image_files import write_idx
from tests.hostile.mutants import Mutant
from tests.pipelines.formats.test_tar_samples import write_tar
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

__all__ = ["CASES", "FileCase"]

ROWS = 60


@final
@dataclass(frozen=True)
class FileCase:
    """A kind of file or directory.

    `sealed` gives the ranges of bytes that a checksum protects; `unknowable` is damage that no reader can see.
    """

    name: str
    write: Callable[[Path], Any]
    read: Callable[[str], Iterator[Any] | rd.Dataset]
    sealed: Callable[[bytes], list[range]] = lambda content: []
    unknowable: Callable[[bytes, Mutant], bool] = lambda content, mutant: False

    def elements(self, path: str) -> Iterator[Any]:
        """What raydist makes of a file, element after element."""
        found = self.read(path)
        return found.as_numpy_iterator() if isinstance(found, rd.Dataset) else found


def _everything(content: bytes) -> list[range]:
    return [range(len(content) + 1)]


def _numbers() -> np.ndarray[Any, Any]:
    return np.arange(ROWS * 4, dtype=np.float32).reshape(ROWS, 4)


def _table() -> pa.Table:
    return pa.table(
        {
            "id": pa.array(range(ROWS), pa.int64()),
            "x": pa.array(np.linspace(0, 1, ROWS)),
            "even": pa.array([i % 2 == 0 for i in range(ROWS)]),
            "text": pa.array([f"row {i}" for i in range(ROWS)]),
            "kind": pa.array(["a", "b", "c"] * (ROWS // 3)).dictionary_encode(),
            "list": pa.array([[float(i)] * (i % 3) for i in range(ROWS)], pa.list_(pa.float32())),
        }
    )


def _write_parquet(path: Path) -> None:
    pq.write_table(_table(), path, row_group_size=20, write_page_checksum=True)


def _parquet_pages(content: bytes) -> list[range]:
    """Of the data pages the bodies are protected, their headers are not."""
    metadata = pq.read_metadata(io.BytesIO(content))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    return [range(chunk.data_page_offset + 60, chunk.data_page_offset + chunk.total_compressed_size) for chunk in chunks
            if chunk.dictionary_page_offset is None]  # fmt: skip


def _write_arrow(path: Path, compression: str | None = None) -> None:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(path, _table().schema, options=options) as writer:
        for batch in _table().to_batches(max_chunksize=20):
            writer.write_batch(batch)


def _json_lines() -> bytes:
    rows = [{"id": i, "x": i / 7, "name": f"row {i}", "in": {"a": [1.5, i], "b": "c"}} for i in range(ROWS)]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _write_npz(path: Path) -> None:
    np.savez(
        path, x=np.repeat(_numbers(), 40, axis=1), y=np.arange(ROWS), name=np.array([f"row {i}" for i in range(ROWS)])
    )


def _npz_members(content: bytes) -> list[range]:
    """The data of each member: a zip file protects nothing else."""
    ranges = []
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            ranges.append(range(start, start + info.compress_size))
    return ranges


def _write_records(path: Path) -> None:
    with rd.TFRecordWriter(path) as writer:
        for number in range(ROWS):
            writer.write(f"record {number} ".encode() * (number % 5))


def _at_a_border(content: bytes, mutant: Mutant) -> bool:
    """A file of whole records: the format does not say how many there are, nor which."""
    at = 0
    while at < len(mutant.content):
        if at + 12 > len(mutant.content):
            return False
        at += 16 + int.from_bytes(mutant.content[at : at + 8], "little")
    return at == len(mutant.content) and (mutant.end is None)


def _saved() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices({"x": _numbers(), "y": np.arange(ROWS)}).shuffle(20, seed=1)


def _picture() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)


def _write_image(path: Path) -> None:
    import PIL.Image

    PIL.Image.fromarray(_picture()).save(path)


def _read_image(path: str) -> Iterator[Any]:
    data = rd.image.read_file(path)
    yield np.array(rd.image.image_shape(data))
    yield rd.image.decode_image(data)


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _write_model(path: Path) -> None:
    model = rd.Model(_model())
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.1, momentum=0.9), torch.nn.functional.mse_loss)
    model.save(path)


def _read_model(path: str) -> Iterator[Any]:
    model = rd.Model.load(path)
    for name, value in model.module.state_dict().items():
        yield {name: value.numpy()}
    module = _model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
    rd.Model.load(path, module=module, optimizer=optimizer)
    yield np.array([optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]])


def _write_export(path: Path) -> None:
    version = rd.Model(_model()).export(path, torch.zeros(1, 4))
    os.rename(version, path / "whole")
    for file in (path / "whole").iterdir():  # the case is the version itself
        file.rename(path / file.name)
    (path / "whole").rmdir()


def _read_export(path: str) -> Iterator[Any]:
    yield rd.load_exported(path)(torch.ones(2, 4)).numpy()


def _write_features(path: Path) -> None:
    age = rd.feature.numeric_column("age", normalizer_fn=rd.feature.Normalization(40.5, 9.25))
    job = rd.feature.categorical_column_with_vocabulary_list("job", ["cook", "baker", "pilot"], num_oov_buckets=2)
    ages = rd.feature.bucketized_column(age, [18, 40, 65])
    crossed = rd.feature.crossed_column([ages, job], 100)
    rd.feature.FeatureSpace([age, ages, job, rd.feature.embedding_column(crossed, 4)]).save(path)


def _read_features(path: str) -> Iterator[Any]:
    space = rd.feature.FeatureSpace.load(path)
    yield from map(repr, space.columns)
    yield space.transform({"age": np.array([17.0, 65.0]), "job": ["baker", "nurse"]})


def _trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, rd.State]:
    module = _model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return module, optimizer, rd.State(epoch=3, seen=[1, 2, 3])


def _write_checkpoint(path: Path) -> None:
    module, optimizer, progress = _trained()
    rd.Checkpoint(module=module, optimizer=optimizer, progress=progress).save(path)


def _read_checkpoint(path: str) -> Iterator[Any]:
    module = _model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.5)
    progress = rd.State(epoch=0, seen=[])
    rd.Checkpoint(module=module, optimizer=optimizer, progress=progress).restore(path)
    for name, value in module.state_dict().items():
        yield {name: value.numpy()}
    for state in optimizer.state.values():
        yield {name: value.numpy() for name, value in state.items()}
    yield np.array([progress.epoch, *progress.seen])
    yield torch.get_rng_state().numpy()


def _write_tar(path: Path) -> None:
    names = [(f"d/{i}.{member}", f"{member} {i}".encode()) for i in range(ROWS) for member in ("txt", "cls")]
    write_tar(path, names)


def _read_tar(path: str) -> rd.Dataset:
    return rd.Dataset.from_tar(path, members=["txt", "cls"])


def _write_idx_files(path: Path, suffix: str = "") -> None:
    write_idx(path, "train", ROWS, suffix)


def _read_idx(path: str) -> rd.Dataset:
    found: rd.Dataset = rd.load("mnist", "train", data_dir=path)
    return found


class _Squares(rd.DatasetBuilder):
    """Numbers."""

    name = "hostile_squares"

    def splits(self) -> Mapping[str, Callable[[], Any]]:
        return {"train": lambda: [{"x": x, "rows": np.arange(x % 3), "text": f"row {x}"} for x in range(ROWS)]}


def _prepare(path: Path) -> None:
    _Squares(path).prepare()


CASES = {
    case.name: case
    for case in (
        FileCase("a.parquet", _write_parquet, rd.Dataset.from_parquet, _parquet_pages),
        FileCase(
            "filtered.parquet",
            _write_parquet,
            lambda path: rd.Dataset.from_parquet(path, columns=["text", "list"], filters=[("id", ">=", 10)]),
        ),
        FileCase("a.arrow", _write_arrow, rd.Dataset.from_arrow),
        FileCase("zstd.arrow", lambda path: _write_arrow(path, "zstd"), rd.Dataset.from_arrow),
        FileCase("a.jsonl", lambda path: path.write_bytes(_json_lines()), rd.Dataset.from_json),
        FileCase(
            "a.jsonl.gz",
            lambda path: path.write_bytes(gzip.compress(_json_lines(), mtime=0)),
            lambda path: rd.Dataset.from_json(path, compression_type="GZIP"),
        ),
        FileCase("a.tar", _write_tar, _read_tar),
        FileCase("a.tar.gz", _write_tar, _read_tar),
        FileCase("hub", lambda path: save_to_disk(path, _table(), batch_rows=20), rd.Dataset.from_huggingface),
        FileCase("a.npy", lambda path: np.save(path, _numbers()), rd.Dataset.from_numpy),
        FileCase("a.npz", _write_npz, rd.Dataset.from_numpy, _npz_members),
        FileCase(
            "compressed.npz",
            lambda path: np.savez_compressed(path, x=_numbers(), y=np.arange(ROWS)),
            rd.Dataset.from_numpy,
            _npz_members,
        ),
        FileCase("idx", _write_idx_files, _read_idx),
        FileCase("idx.gz", lambda path: _write_idx_files(path, ".gz"), _read_idx, _everything),
        FileCase("prepared", _prepare, lambda path: _Squares(path).as_dataset("train"), _everything),
        FileCase("a.png", _write_image, _read_image, _everything),
        FileCase("a.jpeg", _write_image, _read_image),
        FileCase("a.tfrecord", _write_records, rd.TFRecordDataset, _everything, _at_a_border),
        FileCase("saved", lambda path: _saved().save(str(path)), rd.Dataset.load, _everything),
        FileCase("saved.zstd", lambda path: _saved().save(str(path), compression="ZSTD"), rd.Dataset.load, _everything),
        FileCase("model.safetensors", _write_model, _read_model, _everything),
        FileCase("exported", _write_export, _read_export, _everything),
        FileCase("features.json", _write_features, _read_features, _everything),
        FileCase("checkpoint", _write_checkpoint, _read_checkpoint, _everything),
    )
}
