from __future__ import annotations

import pytest

from raydist.collectives.base import Membership
from raydist.collectives.translation import describe_operation, is_slice_over, translate_torch_error
from raydist.errors import CancelledError, DeadlineExceededError, InvalidArgumentError, RaydistError, UnavailableError

MEMBERSHIP = Membership("g", generation=3, rank=1, world_size=4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[pair.cc:553] Connection closed by peer [10.0.0.1]:2294. GLHF!", UnavailableError),
        ("[pair.cc:537] Read error [127.0.0.1]:9: Connection reset by peer", UnavailableError),
        ("writev [127.0.0.1]:9: Broken pipe", UnavailableError),
        ("Failed to recv, got 0 bytes. Did the remote server shutdown or crash?", UnavailableError),
        ("Timed out waiting 2000ms for recv operation to complete", DeadlineExceededError),
        ("Application timeout caused pair closure", DeadlineExceededError),
        ("NCCL communicator was aborted on rank 0.", CancelledError),
        ("Invalid scalar type", InvalidArgumentError),
        ("all_reduce does not supporton complex tensors", InvalidArgumentError),
        ("something new", UnavailableError),
    ],
)
def test_known_messages(text: str, kind: type[RaydistError]) -> None:
    error = translate_torch_error(
        RuntimeError(f"{text}\nException raised from somewhere"), MEMBERSHIP, "all_reduce(SUM)"
    )
    assert type(error) is kind
    assert str(error) == f"all_reduce(SUM) by rank 1 of 4 (group 'g', generation 3) failed: {text}"


def test_own_errors_pass() -> None:
    error = CancelledError("x")
    assert translate_torch_error(error, MEMBERSHIP, "barrier") is error


def test_the_end_of_a_slice_is_no_failure() -> None:
    assert is_slice_over(RuntimeError("Operation timed out!"))
    assert not is_slice_over(RuntimeError("Timed out waiting 2000ms for recv operation to complete"))


def test_describe() -> None:
    assert describe_operation(MEMBERSHIP, "barrier") == "barrier by rank 1 of 4 (group 'g', generation 3)"
