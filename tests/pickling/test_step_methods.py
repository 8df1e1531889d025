from __future__ import annotations

from typing import Any

import pytest
import torch

from raydist.errors import FailedPreconditionError
from raydist.pickling.pickler import dumps
from raydist.pickling.step_methods import require_step_of_class


def optimizer() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def test_what_a_program_puts_in_place_of_step_is_told() -> None:
    own: Any = optimizer()
    own.step = lambda *args: None
    told = r"this SGD was given another: <function .*register_step_pre_hook"
    for ask in (require_step_of_class, lambda it: dumps(it, lambda _: None, to_replica=False)):
        with pytest.raises(FailedPreconditionError, match=told):
            ask(own)
    del own.step
    require_step_of_class(own)


def test_a_scheduler_s_wrapper_is_none() -> None:
    scheduled = optimizer()
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    require_step_of_class(scheduled)
    dumps(scheduled, lambda _: None, to_replica=False)
