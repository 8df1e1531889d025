from __future__ import annotations

import pyarrow as pa
import pytest

from raydist.pipelines.formats.json_lines import JsonParser, infer_json_types


def test_types() -> None:
    lines = [b'{"d": "2020-01-01", "l": ["2020-01-01"], "s": {"d": "2020-01-01 10:00:00"}, "n": 1}', b'{"n": 2}']
    types = infer_json_types(lines)
    assert types.field("d").type == pa.string()
    assert types.field("l").type == pa.list_(pa.string())
    assert types.field("s").type == pa.struct({"d": pa.string()})
    assert types.field("n").type == pa.int64()


def test_parses_the_fields_of_the_schema() -> None:
    schema = pa.schema({"x": pa.int64()})
    assert JsonParser(schema).parse([b'{"x": 1}', b"{}"]).to_pydict() == {"x": [1, None]}
    assert JsonParser(schema, others_allowed=True).parse([b'{"y": 2, "x": 1}']).to_pydict() == {"x": [1]}
    with pytest.raises(pa.ArrowInvalid, match="unexpected field"):
        JsonParser(schema).parse([b'{"y": 2, "x": 1}'])
    long = b'{"x": 1' + b" " * (3 << 20) + b"}"
    assert JsonParser(schema).parse([long, long]).num_rows == 2
    assert JsonParser(schema).check_header(b"anything") is None
