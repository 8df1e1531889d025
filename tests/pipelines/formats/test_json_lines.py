from __future__ import annotations

import pyarrow as pa
import pytest

from raydist.pipelines.formats.json_lines import MAX_JSON_DEPTH, JsonParser, infer_json_types


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


def nested(depth: int, opens: bytes = b"[", closes: bytes = b"]") -> bytes:
    return b'{"a": ' + opens * (depth - 1) + b"1" + closes * (depth - 1) + b"}"


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"b": ', b"}")])
def test_deep_nesting_is_not_handed_over(pair: tuple[bytes, bytes]) -> None:
    """5,000 deep was a RecursionError, and 20,000 deep ended the process."""
    assert infer_json_types([nested(MAX_JSON_DEPTH, *pair)]).names == ["a"]
    for depth in (MAX_JSON_DEPTH + 1, 5_000, 20_000):
        with pytest.raises(ValueError, match="100 deep"):
            infer_json_types([b'{"a": 1}', nested(depth, *pair)])


def test_brackets_in_text_are_no_nesting() -> None:
    line = b'{"a": "' + b'[{\\"' * 20_000 + b'", "b": [' + b"[1], " * 200 + b"[2]]}"
    assert infer_json_types([line]).names == ["a", "b"]
    with pytest.raises(ValueError, match="100 deep"):
        infer_json_types([b'{"a": "', nested(20_000)])


def test_text_must_be_utf_8() -> None:
    parser = JsonParser(pa.schema({"a": pa.string()}))
    with pytest.raises(pa.ArrowInvalid, match="UTF8"):
        parser.parse([b'{"a": "x"}', b'{"a": "\xff"}'])
