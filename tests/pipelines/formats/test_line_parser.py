from __future__ import annotations

import pickle

import pyarrow as pa
import pytest

from raydist.pipelines.formats.csv_lines import CsvParser
from raydist.pipelines.formats.json_lines import JsonParser
from raydist.pipelines.formats.line_parser import LineParser

SCHEMA = pa.schema({"x": pa.int64()})


@pytest.mark.parametrize(
    ("parser", "lines"), [(CsvParser(SCHEMA, ("x",)), [b"1", b"2"]), (JsonParser(SCHEMA), [b'{"x": 1}', b'{"x": 2}'])]
)
def test_one_row_a_line(parser: LineParser, lines: list[bytes]) -> None:
    copied = pickle.loads(pickle.dumps(parser))
    batch = copied.parse(lines)
    assert batch.schema == parser.schema == SCHEMA
    assert batch.to_pydict() == {"x": [1, 2]}
    with pytest.raises(pa.ArrowInvalid):
        parser.parse([b"[not a row"])
