from __future__ import annotations

import pickle
from typing import Any

import pytest

from raydist.core.errors import InvalidArgumentError
from raydist.options import CommunicationOptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be a number of bytes >= 0, got -1"),
        ({"timeout_seconds": 0}, "timeout_seconds must be a finite number of seconds > 0, or None, got 0"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds must be .* got inf"),
        ({"implementation": "mpi"}, "implementation must be one of auto, shm, .* got 'mpi'"),
        ({"compression": "int8"}, "compression must be None, .* got 'int8'"),
    ],
)
def test_communication_options_refuse(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        CommunicationOptions(**arguments)


def test_defaults_are_the_documented_ones_and_travel() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds) == (0, None)
    assert (options.implementation, options.compression) == ("auto", None)
    assert pickle.loads(pickle.dumps(options)) == options


def test_what_a_call_says_wins_over_what_the_strategy_says() -> None:
    strategy = CommunicationOptions(bytes_per_pack=8, compression="bf16")
    call = CommunicationOptions(bytes_per_pack=4)
    assert strategy.merged(call) == CommunicationOptions(bytes_per_pack=4, compression="bf16")
