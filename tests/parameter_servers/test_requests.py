from __future__ import annotations

import pickle

from raydist.parameter_servers.requests import Push, PushKey, Sender, ServerAnswer, ServerRequest


def test_requests_travel() -> None:
    push = Push(Sender(1, 2), PushKey(3, 0), optimizer=4, slices=(5, 6), forms=("dense", "rows"))
    assert isinstance(push, ServerRequest)
    assert pickle.loads(pickle.dumps(push)) == push
    assert pickle.loads(pickle.dumps(ServerAnswer(version=7, verdict="late"))) == ServerAnswer(7, "late")
