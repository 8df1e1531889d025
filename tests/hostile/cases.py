"""What is attacked: a kind of file, how a good one is made, and how raydist reads it."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import raydist as rd
from tests.hostile.mutants import Mutant
from tests.pipelines.formats.test_tar_samples import write_tar
from tests.pipelines.sources.saved_hub_dataset import save_to_disk

__all__ = ["CASES", "FileCase"]

ROWS = 60


@final
@dataclass(frozen=True)
class FileCase:
    """A kind of file.

    Attributes:
        name: Of the file (or of the directory), with its ending.
        write: Makes a good one at a path.
        read: What raydist makes of it, element after element. Errors of elements are raised at their places.
        sealed: The ranges of bytes of a file that a checksum protects.
        unknowable: Damage of which no reader of the format can know.
    """

    name: str
    write: Callable[[Path], None]
    read: Callable[[str], Iterator[Any]]
    sealed: Callable[[bytes], list[range]] = lambda content: []
    unknowable: Callable[[bytes, Mutant], bool] = lambda content, mutant: False


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


def _read_parquet(path: str) -> Iterator[Any]:
    return rd.Dataset.from_parquet(path).as_numpy_iterator()


def _read_parquet_filtered(path: str) -> Iterator[Any]:
    return rd.Dataset.from_parquet(path, columns=["text", "list"], filters=[("id", ">=", 10)]).as_numpy_iterator()


def _write_arrow(path: Path) -> None:
    with pa.ipc.new_file(path, _table().schema) as writer:
        for batch in _table().to_batches(max_chunksize=20):
            writer.write_batch(batch)


def _write_arrow_compressed(path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
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


def _write_npz_compressed(path: Path) -> None:
    np.savez_compressed(path, x=_numbers(), y=np.arange(ROWS))


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


def _read_saved(path: str) -> Iterator[Any]:
    return rd.Dataset.load(path).as_numpy_iterator()


def _saved() -> rd.Dataset:
    return rd.Dataset.from_tensor_slices({"x": _numbers(), "y": np.arange(ROWS)}).shuffle(20, seed=1)


def _picture() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)


def _write_png(path: Path) -> None:
    import PIL.Image

    PIL.Image.fromarray(_picture()).save(path, "png")


def _write_jpeg(path: Path) -> None:
    import simplejpeg

    path.write_bytes(simplejpeg.encode_jpeg(_picture()))


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


def _read_json(path: str, compression_type: str | None = None) -> Iterator[Any]:
    return rd.Dataset.from_json(path, compression_type=compression_type).as_numpy_iterator()


def _read_arrow(path: str) -> Iterator[Any]:
    return rd.Dataset.from_arrow(path).as_numpy_iterator()


def _write_tar(path: Path) -> None:
    names = [(f"d/{i}.{member}", f"{member} {i}".encode()) for i in range(ROWS) for member in ("txt", "cls")]
    write_tar(path, names)


def _read_tar(path: str) -> Iterator[Any]:
    return rd.Dataset.from_tar(path, members=["txt", "cls"]).as_numpy_iterator()


def _write_hub(path: Path) -> None:
    save_to_disk(path, _table(), batch_rows=20)


def _read_hub(path: str) -> Iterator[Any]:
    return rd.Dataset.from_huggingface(path).as_numpy_iterator()


def _read_numpy(path: str) -> Iterator[Any]:
    return rd.Dataset.from_numpy(path).as_numpy_iterator()


CASES = {
    case.name: case
    for case in (
        FileCase("a.parquet", _write_parquet, _read_parquet, _parquet_pages),
        FileCase("filtered.parquet", _write_parquet, _read_parquet_filtered),
        FileCase("a.arrow", _write_arrow, _read_arrow),
        FileCase("zstd.arrow", _write_arrow_compressed, _read_arrow),
        FileCase("a.jsonl", lambda path: _put(path, _json_lines()), _read_json),
        FileCase(
            "a.jsonl.gz",
            lambda path: _put(path, gzip.compress(_json_lines(), mtime=0)),
            lambda path: _read_json(path, "GZIP"),
        ),
        FileCase("a.tar", _write_tar, _read_tar),
        FileCase("a.tar.gz", _write_tar, _read_tar),
        FileCase("hub", _write_hub, _read_hub),
        FileCase("a.npy", lambda path: np.save(path, _numbers()), _read_numpy),
        FileCase("a.npz", _write_npz, _read_numpy, _npz_members),
        FileCase("compressed.npz", _write_npz_compressed, _read_numpy, _npz_members),
        FileCase("a.png", _write_png, _read_image, _everything),
        FileCase("a.jpeg", _write_jpeg, _read_image),
        FileCase(
            "a.tfrecord",
            _write_records,
            lambda path: rd.TFRecordDataset(path).as_numpy_iterator(),
            _everything,
            _at_a_border,
        ),
        FileCase("saved", lambda path: _saved().save(str(path)), _read_saved, _everything),
        FileCase("saved.zstd", lambda path: _saved().save(str(path), compression="ZSTD"), _read_saved, _everything),
        FileCase("model.safetensors", _write_model, _read_model, _everything),
        FileCase("checkpoint", _write_checkpoint, _read_checkpoint, _everything),
    )
}


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
