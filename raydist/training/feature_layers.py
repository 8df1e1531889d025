"""`rd.DenseFeatures` and `rd.LinearModel`: modules that take what `rd.feature.FeatureSpace.transform` gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from raydist.core.errors import InvalidArgumentError
from raydist.feature.columns import (
    COMBINERS,
    BucketizedColumn,
    CategoricalColumn,
    EmbeddingColumn,
    FeatureColumn,
    IndicatorColumn,
    NumericColumn,
)
from raydist.feature.feature_space import FeatureSpace
from raydist.parameter_servers.sharded_embedding import ShardedEmbedding

Features = Mapping[str, Any]


@final
class DenseFeatures(nn.Module):
    """One row of numbers for each row of a batch: numbers, one-hot buckets, indicators and embeddings side by side.

    Columns are in the order of their names, as in TensorFlow. A numeric column gives its values, a bucketized one a one
    among the buckets of each value, an indicator column its counts, an embedding column its combined rows. The result
    has the dtype to which torch promotes these: that of the embeddings, float32 by default.

    Args:
        columns: Such columns, or a `FeatureSpace` of such columns. Vocabularies and boundaries must be known.

    Attributes:
        out_features: Number of values in a row of the result.
        embeddings: The tables of embedding columns, by the column's name, in which "." is replaced by "_".

    Raises:
        InvalidArgumentError: A column is of another kind, not adapted, or named like another one.

    Source: tf.keras.layers.DenseFeatures.

    >>> user = rd.feature.categorical_column_with_identity("user", 100)
    >>> space = rd.feature.FeatureSpace([rd.feature.numeric_column("age"), rd.feature.embedding_column(user, 4)])
    >>> inputs = rd.DenseFeatures(space)
    >>> model = torch.nn.Sequential(inputs, torch.nn.Linear(inputs.out_features, 1))
    >>> people = rd.Dataset.from_tensor_slices({"age": [20.0, 30.0], "user": [7, 8]}).batch(2).map(space.transform)
    >>> [model(batch).shape for batch in people]
    [torch.Size([2, 1])]
    """

    def __init__(self, columns: FeatureSpace | Sequence[FeatureColumn]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict()
        self._parts: list[tuple[str, str, int]] = []
        self.out_features = 0
        for column in _sorted(columns):
            kind, width = _dense_part(column)
            if isinstance(column, EmbeddingColumn):
                settings = {name: getattr(column, name) for name in ("initializer", "max_norm", "trainable", "sharded")}
                table = IdTable(column.categorical_column.num_buckets, width, column.combiner, **settings)
                _add(self.embeddings, column.name, table)
            self._parts.append((column.name, kind, width))
            self.out_features += width if not isinstance(column, BucketizedColumn) else column.num_buckets

    def forward(self, features: Features) -> torch.Tensor:
        """Return the row of each example.

        Args:
            features: A batch from `FeatureSpace.transform`, as tensors.

        Returns:
            A tensor (rows, out_features).

        Raises:
            InvalidArgumentError: The batch lacks a column.
        """
        pieces = []
        for name, kind, width in self._parts:
            value = _entry(features, name)
            if kind == "embedding":
                pieces.append(self.embeddings[_module_name(name)](value))
            elif kind == "one-hot":
                pieces.append(functional.one_hot(value.long(), width).flatten(1).to(torch.get_default_dtype()))
            else:
                pieces.append(value.flatten(1))
        return torch.cat(pieces, 1)


def _dense_part(column: FeatureColumn) -> tuple[str, int]:
    """Return how DenseFeatures treats a column, and the number of values; for one-hot that of the classes."""
    match column:
        case NumericColumn():
            return "values", math.prod(column.shape)
        case BucketizedColumn():
            return "one-hot", column.num_buckets // column.source_column.shape[0]
        case IndicatorColumn():
            return "values", column.categorical_column.num_buckets
        case EmbeddingColumn():
            return "embedding", column.dimension
    raise InvalidArgumentError(
        f"Columns of DenseFeatures must give numbers, {column.name!r} gives ids. Put it into "
        "rd.feature.indicator_column or rd.feature.embedding_column."
    )


@final
class LinearModel(nn.Module):
    """A weight for each number, each bucket and each id, added up over a row, and a bias. All begin as zeros.

    Args:
        columns: Numeric, bucketized, categorical, crossed, weighted and indicator columns, or a `FeatureSpace` of such.
        units: Number of outputs.
        sparse_combiner: How several ids of a row are combined: "sum", "mean" or "sqrtn", see `embedding_column`.

    Attributes:
        weights: By the column's name with "_weights", "." replaced by "_": a `torch.nn.Linear` for numbers, else a
            module whose `weight` has a row for each id.
        bias: The bias, (units,).

    Raises:
        InvalidArgumentError: A column is of another kind, not adapted, or named like another one.

    Source: tf.compat.v1.feature_column.linear_model, tf.keras.experimental.LinearModel.

    >>> job = rd.feature.categorical_column_with_vocabulary_list("job", ["cook", "baker"])
    >>> space = rd.feature.FeatureSpace([job, rd.feature.numeric_column("age")])
    >>> model = rd.LinearModel(space)
    >>> with torch.no_grad():
    ...     _ = model.weights["job_weights"].weight.copy_(torch.tensor([[1.0], [10.0]]))
    >>> batch = space.transform({"job": ["baker", "cook"], "age": [30, 40]})
    >>> model({name: torch.tensor(value) for name, value in batch.items()}).tolist()
    [[10.0], [1.0]]
    """

    def __init__(
        self, columns: FeatureSpace | Sequence[FeatureColumn], units: int = 1, sparse_combiner: str = "sum"
    ) -> None:
        super().__init__()
        self.weights = nn.ModuleDict()
        self.bias = nn.Parameter(torch.zeros(units))
        self._parts: list[tuple[str, int]] = []
        for column in _sorted(columns):
            if isinstance(column, EmbeddingColumn):
                raise InvalidArgumentError(f"Columns of LinearModel must have no table, got {column.name!r}. Drop it.")
            weights: nn.Module
            if isinstance(column, CategoricalColumn):
                weights = IdTable(column.num_buckets, units, sparse_combiner, initializer=nn.init.zeros_)
            else:
                weights = nn.Linear(_dense_part(column)[1], units, bias=False)
                nn.init.zeros_(weights.weight)
            _add(self.weights, f"{column.name}_weights", weights)
            self._parts.append((column.name, _dense_part(column)[1] if isinstance(column, BucketizedColumn) else 0))

    def forward(self, features: Features) -> torch.Tensor:
        """Return the weighted sum of each example.

        Args:
            features: A batch from `FeatureSpace.transform`, as tensors.

        Returns:
            A tensor (rows, units).

        Raises:
            InvalidArgumentError: The batch lacks a column.
        """
        result: torch.Tensor = self.bias
        for name, num_buckets in self._parts:
            value, weights = _entry(features, name), self.weights[_module_name(f"{name}_weights")]
            if num_buckets:  # each value of a bucketized column has buckets of its own
                value = value + num_buckets * torch.arange(value.shape[1], device=value.device)
            if isinstance(weights, nn.Linear):
                value = value.flatten(1).to(weights.weight.dtype)
            result = result + weights(value)
        return result


@final
class IdTable(nn.Module):
    """A table of rows, which are combined over the ids of an example; see `embedding_column`.

    Attributes:
        weight: The rows, (num_rows, dim); a sharded table is the ShardedEmbedding `rows` instead.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        combiner: str,
        *,
        initializer: Callable[[Any], Any] | None = None,
        max_norm: float | None = None,
        trainable: bool = True,
        sharded: bool = False,
    ) -> None:
        super().__init__()
        if combiner not in COMBINERS:
            raise InvalidArgumentError(f"The combiner must be one of {', '.join(COMBINERS)}, got {combiner!r}.")
        self.combiner, self.max_norm, self.num_rows = combiner, max_norm, num_rows
        deviation = 1 / math.sqrt(dim)
        self.rows: ShardedEmbedding | None = None
        if sharded:  # one more row, which does not exist, stands for no id
            self.rows = ShardedEmbedding(num_rows + 1, dim, padding_idx=num_rows, scale=deviation)
            self.rows.weight.requires_grad_(trainable)
            return
        self.weight = nn.Parameter(torch.empty(num_rows, dim), requires_grad=trainable)
        if initializer is None:
            nn.init.trunc_normal_(self.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        else:
            with torch.no_grad():
                initializer(self.weight)

    def forward(self, entry: Any) -> torch.Tensor:
        """Return the combined rows of ids, with weights if there are any, as FeatureSpace.transform gives them."""
        ids, weights = (entry["ids"], entry["weights"]) if isinstance(entry, Mapping) else (entry, None)
        ids, is_known = ids.long(), ids >= 0
        if self.rows is None:
            found = functional.embedding(ids.clamp(min=0), self.weight)
        else:
            found = self.rows(torch.where(is_known, ids, self.num_rows))
        if self.max_norm is not None:
            found = found * (self.max_norm / found.norm(dim=-1, keepdim=True).clamp(min=self.max_norm))
        factors = (is_known if weights is None else weights * is_known).to(found.dtype).unsqueeze(-1)
        if self.combiner == "sum":
            total: torch.Tensor = (found * factors).sum(1)
            return total
        factors = factors.clamp(min=0)  # TensorFlow drops weights that are not positive
        divisor = factors.sum(1) if self.combiner == "mean" else factors.square().sum(1).sqrt()
        mean: torch.Tensor = (found * factors).sum(1) / torch.where(divisor > 0, divisor, 1)
        return mean


def _sorted(columns: FeatureSpace | Sequence[FeatureColumn]) -> list[FeatureColumn]:
    space = columns if isinstance(columns, FeatureSpace) else FeatureSpace(tuple(columns))
    return sorted(space.columns, key=lambda column: column.name)


def _module_name(name: str) -> str:
    return name.replace(".", "_")


def _add(modules: nn.ModuleDict, name: str, module: nn.Module) -> None:
    if _module_name(name) in modules:
        raise InvalidArgumentError(f"Columns must have different names also with '_' for '.', got {name!r} again.")
    modules[_module_name(name)] = module


def _entry(features: Features, name: str) -> Any:
    if name not in features:
        found = ", ".join(map(repr, features))
        raise InvalidArgumentError(f"The batch must be of FeatureSpace.transform and have {name!r}, got {found}.")
    return features[name]
