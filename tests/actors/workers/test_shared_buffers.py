from __future__ import annotations

import gc
import os
import sys
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydist.actors.workers.shared_buffers import HEADER_BYTES, BufferLease, BufferShelf, SharedBuffer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without a name are Linux's")


def test_a_lease_that_is_dropped_gives_its_buffer_back() -> None:
    shelf = BufferShelf(most=1)
    lease = shelf.lease()
    assert lease is not None
    token = lease.address.token
    assert shelf.lease() is None, "all are in use"
    del lease
    again = shelf.lease()
    assert again is not None
    assert again.address.token == token


def test_a_buffer_is_in_use_as_long_as_any_view_of_it_lives() -> None:
    shelf = BufferShelf(most=1)
    lease = shelf.lease()
    assert lease is not None
    view = lease.open().data[HEADER_BYTES : HEADER_BYTES + 64]
    del lease
    array = np.frombuffer(view, np.float32).reshape(4, 4)
    row = array[1:2, ::2]
    del view, array
    gc.collect()
    assert shelf.lease() is None
    row[:] = 7.0
    del row
    assert shelf.lease() is not None


def test_a_tensor_of_a_view_keeps_the_buffer() -> None:
    torch = pytest.importorskip("torch")
    shelf = BufferShelf(most=1)
    lease = shelf.lease()
    assert lease is not None
    tensor = torch.from_numpy(np.frombuffer(lease.open().data[64:128], np.float32))[3:].view(1, -1)
    del lease
    assert shelf.lease() is None
    del tensor
    assert shelf.lease() is not None


@given(st.lists(st.tuples(st.sampled_from(["take", "open", "drop", "view", "fork"]), st.integers(0, 5)), max_size=40))
def test_what_is_viewed_is_never_handed_out_again(steps: list[tuple[str, int]]) -> None:
    shelf = BufferShelf(most=3)
    leases: list[tuple[BufferLease, bytes]] = []
    arrays: list[tuple[np.ndarray[Any, Any], bytes]] = []
    for step, which in steps:
        if step == "take" and (lease := shelf.lease()) is not None:
            held = {token for _, token in leases} | {token for _, token in arrays}
            assert lease.address.token not in held
            leases.append((lease, lease.address.token))
        elif step == "open" and leases:
            lease, token = leases.pop(which % len(leases))
            arrays.append((np.frombuffer(lease.open().data[64:], np.uint8), token))
        elif step == "view" and arrays:
            array, token = arrays[which % len(arrays)]
            arrays.append((array[which : which + 9], token))
        elif step == "drop" and leases + arrays:
            group: list[Any] = arrays if arrays and (which % 2 or not leases) else leases
            group.pop(which % len(group))
        elif step == "fork":
            shelf._give_up_lent()
        lease = None


def test_what_a_forked_child_can_see_is_not_written_again() -> None:
    shelf = BufferShelf(most=1)
    lease = shelf.lease()
    assert lease is not None
    token = lease.address.token
    array = lease.open()
    array[100] = 1
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:  # no test framework, no finalizers: only look, once the parent has gone on, or ended
        os.close(tell)
        os.read(told, 1)
        os._exit(int(array[100] != 1))
    try:
        del array, lease
        fresh = shelf.lease()
        assert fresh is not None, "there is room for another one"
        assert fresh.address.token != token
        fresh.open()[100] = 2
    finally:
        os.close(told)
        os.close(tell)
        status = os.waitpid(child, 0)[1]
    assert status == 0


def test_buffers_end_with_their_shelf_and_what_is_held() -> None:
    shelf = BufferShelf(most=2)
    lease, idle = shelf.lease(), shelf.lease()
    assert lease is not None
    assert idle is not None
    files = {lease.address.fd, idle.address.fd}
    del idle
    array = lease.open()
    gone = weakref.ref(shelf)
    del shelf, lease
    assert gone() is None
    assert len([fd for fd in files if os.path.exists(f"/proc/self/fd/{fd}")]) == 1
    array[-1] = 3  # still there
    del array
    assert not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in files)


def test_where_no_buffer_can_be_made_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    shelf = BufferShelf(most=2)
    assert shelf.lease() is None
    assert shelf.lease() is None
    with pytest.raises(OSError, match="without a name must be"):
        SharedBuffer.create()


def test_a_buffer_is_opened_once() -> None:
    lease = BufferShelf(most=1).lease()
    assert lease is not None
    memory = lease.open()
    with pytest.raises(AssertionError, match="opened twice"):
        lease.open()
    del memory
