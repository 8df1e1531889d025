from __future__ import annotations

from typing import Any

import pytest

import raydist as rd
from tests.training.toys import compiled, regression, small_net


def test_functions_are_called_as_hooks() -> None:
    calls: list[Any] = []
    names = ["on_epoch_begin", "on_epoch_end", "on_train_begin", "on_train_end", "on_test_begin", "on_batch_end"]
    hooks: dict[str, Any] = {name: lambda *args, name=name: calls.append((name, len(args))) for name in names}
    data = regression(4, 4)
    compiled(small_net()).fit(data, validation_data=data, callbacks=[rd.LambdaCallback(**hooks)], verbose=False)
    assert calls == [
        ("on_train_begin", 1),
        ("on_epoch_begin", 2),
        ("on_batch_end", 2),
        ("on_test_begin", 1),
        ("on_epoch_end", 2),
        ("on_train_end", 1),
    ]


@pytest.mark.parametrize(
    ("hooks", "message"),
    [({"on_epoch": print}, "no hook 'on_epoch'. Use one of on_batch_begin"), ({"on_epoch_end": 1}, "be a function")],
)
def test_bad_hooks(hooks: dict[str, Any], message: str) -> None:
    with pytest.raises(rd.InvalidArgumentError, match=message):
        rd.LambdaCallback(**hooks)
