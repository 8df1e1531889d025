from __future__ import annotations

import pytest
import torch

from raydist.collectives.hierarchical.frames import FRAME_HEAD_BYTES, Head


@pytest.mark.parametrize("head", [Head(True, 0, b"barrier"), Head(False, 1 << 40, b"x" * 248), Head(True, 1, b"")])
def test_a_head_is_read_as_it_was_written(head: Head) -> None:
    written = head.encode()
    assert len(written) == FRAME_HEAD_BYTES
    assert Head.decode(torch.frombuffer(bytearray(written), dtype=torch.uint8)) == head
