from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raydist.errors import FailedPreconditionError
from raydist.mirroring.origin import Origin, title
from raydist.mirroring.scope import Scope
from raydist.parameter_servers.rows.sharded_embedding import ShardedEmbedding


def origin(known: tuple[Any, ...] = ()) -> Origin:
    return Origin("Mine", Scope(), lambda: ("cuda",), lambda obj: any(obj is one for one in known), lambda: known)


def test_a_new_parameter_is_named_where_it_is_and_where_that_is() -> None:
    model: Any = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(1, 1)))
    linear = model[1][0]
    weight = linear.weight
    with pytest.raises(FailedPreconditionError, match=r"'weight' of module Linear \(parameter '1.0.weight' of"):
        origin(known=(model,)).require([linear, weight])
    with pytest.raises(FailedPreconditionError, match="Mine; parameter '1.0.weight' of module Sequential was not"):
        origin(known=(model,)).require([weight])
    with pytest.raises(FailedPreconditionError, match="a parameter of shape"):
        origin().require([weight])


def test_modules_that_share_themselves_end() -> None:
    model: Any = nn.Sequential(nn.ReLU())
    model[0].parent = model
    with pytest.raises(FailedPreconditionError, match="a parameter of shape"):
        origin(known=(model,)).require([nn.Parameter(torch.ones(1))])


def test_titles() -> None:
    assert title(nn.ReLU()) == "a ReLU"
    assert title(torch.ones(2)) == "a buffer of shape (2,)"
    assert title(nn.Parameter(torch.ones(2))) == "a parameter of shape (2,)"


def test_variables_stay_where_their_strategy_is() -> None:
    model = nn.BatchNorm1d(1, device="meta")
    with pytest.raises(
        FailedPreconditionError, match=r"\(cpu or cuda\); parameter 'weight' of module .* moved to meta"
    ):
        origin().require([model, model.weight])
    with pytest.raises(FailedPreconditionError, match="buffer 'running_mean' of module BatchNorm1d was moved to meta"):
        origin().require([model, model.running_mean])


def test_rows_of_embeddings_lie_on_parameter_servers_only() -> None:
    embedding = ShardedEmbedding(10, 2)
    with pytest.raises(FailedPreconditionError, match=r"Mine has none\. Use rd\.ParameterServerStrategy"):
        origin().require([embedding, embedding.weight])
