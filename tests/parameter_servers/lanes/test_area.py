from __future__ import annotations

import torch

from raydist.parameter_servers.lanes.area import ReadArea, WriteArea


def test_how_tensors_lie_is_said_once() -> None:
    writer, reader = WriteArea(), ReadArea()
    first = writer.put([torch.ones(3), torch.zeros(2, 2, dtype=torch.int64)])
    views = reader.views(first)
    assert (views[0].tolist(), views[1].shape) == ([1, 1, 1], (2, 2))
    again = writer.put([torch.full((3,), 2.0), torch.zeros(2, 2, dtype=torch.int64)])
    assert (again.form, again.address) == (None, None)
    assert reader.views(again)[0] is views[0]
    assert views[0].tolist() == [2, 2, 2]
    other = writer.put([torch.ones(())])
    assert (other.form is None, other.address) == (False, None)
    assert reader.views(other)[0].item() == 1
    writer.close()
    reader.close()


def test_it_grows_with_what_is_put() -> None:
    writer, reader = WriteArea(), ReadArea()
    small = reader.views(writer.put([torch.ones(10)]))
    block = writer.put([torch.ones(10_000)])
    assert block.address is not None
    assert block.address.size < 50_000
    assert reader.views(block)[0].sum() == 10_000
    assert small[0].sum() == 10, "what was in use stays"
    assert reader.views(writer.put([torch.zeros(10)]))[0].sum() == 0
    writer.close()
    reader.close()


def test_shapes_that_never_come_again_are_forgotten() -> None:
    writer, reader = WriteArea(), ReadArea()
    for size in range(300):
        assert len(reader.views(writer.put([torch.ones(size)]))[0]) == size
    assert len(writer._known) < 100
    assert len(reader._known) < 100
    writer.close()
    reader.close()


def test_closed_memory_is_not_used_again() -> None:
    writer, reader = WriteArea(), ReadArea()
    kept = reader.views(writer.put([torch.ones(3)]))[0]
    writer.close()
    assert reader.views(writer.put([torch.zeros(3)]))[0].sum() == 0
    assert kept.sum() == 3
    writer.close()
    reader.close()
