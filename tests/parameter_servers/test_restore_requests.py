from __future__ import annotations

import pickle

import pytest

from raydist.parameter_servers.requests import BeginRestore, CommitRestore, DiscardRestore, ReadReport, ServerRequest


@pytest.mark.parametrize("request_", [BeginRestore("order"), ReadReport("a"), CommitRestore("a"), DiscardRestore()])
def test_requests_travel(request_: ServerRequest) -> None:
    assert pickle.loads(pickle.dumps(request_)) == request_
