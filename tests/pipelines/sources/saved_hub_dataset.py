"""A directory as `datasets.Dataset.save_to_disk` writes it, without that package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["save_to_disk"]


def save_to_disk(
    path: Path,
    table: pa.Table,
    features: dict[str, Any] | None = None,
    *,
    num_shards: int = 2,
    batch_rows: int = 3,
    **state: Any,
) -> str:
    """Write `table` into `path`, which does not exist; `state` goes into state.json."""
    path.mkdir()
    size = -(-table.num_rows // num_shards) if table.num_rows else 0
    names = [f"data-{number:05d}-of-{num_shards:05d}.arrow" for number in range(num_shards)]
    for number, name in enumerate(names):
        with pa.OSFile(str(path / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(number * size, size), max_chunksize=batch_rows)
    files = [{"filename": name} for name in names]
    usual: dict[str, Any] = {
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
    }
    (path / "state.json").write_text(json.dumps({"_data_files": files, "_split": None, **usual, **state}))
    (path / "dataset_info.json").write_text(json.dumps({"description": "", "features": features or {}}))
    return str(path)
