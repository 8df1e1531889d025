from __future__ import annotations

import pyarrow as pa
import pytest

from raydist.pipelines.formats.csv_lines import CsvParser, header_names, infer_csv_types


def test_types() -> None:
    lines = [b"1,1.5,true,2020-01-01,,x", b"2,nan,false,2020-01-02,,"]
    types = infer_csv_types(lines, list("abcdef"), ",")
    assert types.types == [pa.int64(), pa.float64(), pa.bool_(), pa.string(), pa.string(), pa.string()]
    assert infer_csv_types([], ["a"], ",").types == [pa.string()]


def test_parses_the_columns_of_the_schema() -> None:
    parser = CsvParser(pa.schema({"b": pa.int8()}), ("a", "b"), delimiter="\t", defaults={"b": 7})
    assert parser.parse([b"x\t1", b"y\t"]).to_pydict() == {"b": [1, 7]}
    for wrong in (b"x", b"x\t300", b'"x\t1', b"x\t1\t2"):
        with pytest.raises(pa.ArrowInvalid):
            parser.parse([wrong])


def test_header() -> None:
    assert header_names(b'\xef\xbb\xbfa;"b;c"', ";") == ("a", "b;c")
    parser = CsvParser(pa.schema({"a": pa.int8()}), ("a",))
    assert parser.check_header(b"a") is None
    assert parser.check_header(b"a,b") == "must have the names ['a'], got ['a', 'b']"
