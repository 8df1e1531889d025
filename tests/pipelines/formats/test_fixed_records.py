from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raydist as rd
from raydist.pipelines.formats import fixed_records
from raydist.pipelines.formats.byte_streams import open_stream
from raydist.pipelines.formats.fixed_records import FixedRecordReader


@given(
    num=st.integers(0, 5),
    sizes=st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 6)),
    chunk=st.integers(1, 7),
    limit=st.integers(1, 4),
    extra=st.integers(0, 1),
)
def test_records_between_header_and_footer(
    tmp_path_factory: pytest.TempPathFactory,
    num: int,
    sizes: tuple[int, int, int],
    chunk: int,
    limit: int,
    extra: int,
) -> None:
    record, header, footer = sizes
    path = tmp_path_factory.mktemp("records") / "x"
    records = [bytes([65 + i]) * record for i in range(num)]
    path.write_bytes(b"h" * header + b"".join(records) + b"f" * (footer + extra))
    found: list[bytes] = []
    error = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_records, "_CHUNK_BYTES", chunk)
        reader = FixedRecordReader(open_stream(str(path), None), *sizes)
        while not reader.ended:
            part, error = reader.read(limit)
            found += part
        reader.close()
    if extra and record == 1:  # nothing tells the extra byte from a record
        records.append(found[-1])
    assert found == records
    assert (error is None) == (not extra or record == 1)
    if error is not None:
        assert isinstance(error, rd.DataLossError)
        assert error.offset == header + num * record
        assert f"{footer + 1} bytes are left" in str(error)
