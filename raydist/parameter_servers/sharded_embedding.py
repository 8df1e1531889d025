"""`rd.ShardedEmbedding`: an embedding whose rows lie on servers or several replicas, and its rows as a saved state."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from torch import nn
from torch.nn import functional

from raydist.compat.torch_internals import disable_compiler, module_table
from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.parameter_servers.local_rows import (
    LocalRows,
    access_to,
    add_row_gradient,
    held_rows,
    hold_rows,
    mark_of,
    mark_table,
    row_access,
)
from raydist.parameter_servers.table_spec import EmbeddingTableSpec

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@final
@dataclass(frozen=True, slots=True)
class UniqueRows:
    """The different rows among some numbers."""

    rows: torch.Tensor  # row numbers, rising, on the CPU; without the padding
    # For each number, on its device, its position in `rows`. The padding's position is `len(rows)`.
    places: torch.Tensor
    padded: bool  # True if the padding is among the numbers

    @staticmethod
    def of(numbers: torch.Tensor, num_rows: int, padding: int | None = None) -> UniqueRows:
        """Find the different rows.

        Args:
            padding: A number that stands for no row.

        >>> found = UniqueRows.of(torch.tensor([[7, 3], [3, 0]]), 10, padding=0)
        >>> found.rows.tolist(), found.places.tolist()
        ([3, 7], [[1, 0], [0, 2]])
        """
        if numbers.dtype not in _INTEGERS:
            raise InvalidArgumentError(
                f"Rows of an embedding must be given as integers, got {numbers.dtype}. Cast them: .long()."
            )
        unique, places = torch.unique(numbers.long(), return_inverse=True)
        rows = unique.cpu()
        if len(rows) and (int(rows[0]) < 0 or int(rows[-1]) >= num_rows):
            raise _out_of_range(numbers, num_rows)
        at = len(rows) if padding is None else int(torch.searchsorted(rows, padding))
        if at == len(rows) or int(rows[at]) != padding:
            return UniqueRows(rows, places, padded=False)
        behind = len(rows) - 1
        places = torch.where(places == at, behind, places - (places > at).long())
        return UniqueRows(torch.cat([rows[:at], rows[at + 1 :]]), places, padded=True)


def _out_of_range(numbers: torch.Tensor, num_rows: int) -> InvalidArgumentError:
    where = tuple(torch.nonzero((numbers < 0) | (numbers >= num_rows))[0].tolist())
    return InvalidArgumentError(
        f"Rows of an embedding must be between 0 and {num_rows - 1} (num_embeddings={num_rows}), got "
        f"{int(numbers[where])} at {list(where)}. Look for what made the number, or make the embedding larger."
    )


_MODES = ("none", "sum", "mean")
_INITIALIZERS = ("normal", "uniform", "zeros")
_HELD = "_held_rows"


@final
class ShardedEmbedding(torch.nn.Module):
    """An embedding that may be larger than a machine: its rows lie on parameter servers, or on all replicas together.

    A row exists once it was touched, so a table of 10^9 rows costs only the memory of touched rows. On a
    `ParameterServerStrategy` a step pulls the rows that it needs, and an optimizer's step pushes their gradients alone.
    On `MirroredStrategy`, `MultiWorkerMirroredStrategy` and `ShardedStrategy` each replica holds some of the rows:
    `forward` exchanges numbers and rows, `backward` brings gradients, which are means over the global batch, to the
    replicas that hold the rows. There all replicas must call `forward` equally often, in the same order. On one device,
    and without a strategy, the rows lie in the process.

    Any elementwise optimizer of torch fits (SGD, Adagrad, SparseAdam, Adam, RMSprop, ...); it steps on the rows that
    have a gradient only, so momentum and weight decay leave other rows alone ("lazy", as in `torch.optim.SparseAdam`).

    `state_dict()` does not contain the rows: see `export_rows`. An `rd.Checkpoint` of a module contains the touched
    rows; the `seed` makes the others again.

    Args:
        num_embeddings: Number of rows that could exist.
        embedding_dim: Number of values in a row.
        mode: "none": one row for each number, as in `torch.nn.Embedding`. "sum" and "mean": the rows of a bag of
            numbers are combined into one, as in `torch.nn.EmbeddingBag`.
        padding_idx: A number that stands for no row: zeros, which are never learned, and do not count in a mean.
        initializer: Initial values: "normal" (mean 0, variance 1), "uniform" (between -1 and 1), "zeros".
        scale: Factor of the initial values.
        seed: Initial values depend only on the seed and the row's number. Drawn from torch's generator by default.
        dtype: Dtype of the rows.
        device: Device of the results.

    Attributes:
        weight: A parameter of shape (0, dim) that stands for the table: optimizers take it, `requires_grad` freezes
            the rows, and its `.grad` has the gradients of rows, for clipping and scaling. Where replicas divide the
            rows, each has the gradients of those that it holds; torch's `clip_grad_norm_` takes the norm of all.

    Raises:
        InvalidArgumentError: An argument is out of its range.

    Source: tf.nn.embedding_lookup_sparse, tf.keras.layers.Embedding on a parameter server.

    >>> embedding = rd.ShardedEmbedding(10**9, 4, mode="mean", seed=1)
    >>> optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    >>> bags = torch.tensor([[7, 123_456_789], [7, 7]])
    >>> before = embedding(bags)
    >>> before.sum().backward()
    >>> optimizer.step()
    >>> (before - embedding(bags)).detach()
    tensor([[0.1000, 0.1000, 0.1000, 0.1000],
            [0.1000, 0.1000, 0.1000, 0.1000]])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: Literal["none", "sum", "mean"] = "none",
        *,
        padding_idx: int | None = None,
        initializer: Literal["normal", "uniform", "zeros"] = "normal",
        scale: float = 1.0,
        seed: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        _require_choice("mode", mode, _MODES)
        _require_choice("initializer", initializer, _INITIALIZERS)
        _require_sizes(num_embeddings, embedding_dim, padding_idx, dtype)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mode = mode
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        seed = int(torch.randint(2**63 - 1, (), device="cpu")) if seed is None else seed
        self._spec = EmbeddingTableSpec(num_embeddings, embedding_dim, dtype, seed, initializer, scale)
        self.weight = torch.nn.Parameter(torch.empty((0, embedding_dim), dtype=dtype, device=device))
        mark_table(self.weight, self._spec)

    def forward(
        self,
        input: torch.Tensor,  # noqa: A002  # as torch.nn.Embedding calls it
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Look rows up.

        Args:
            input: Row numbers, of any shape. For bags: 2-D, a bag in each row, or 1-D with `offsets`.
            offsets: Where each bag begins in a 1-D `input`.
            per_sample_weights: Factors of `input`'s shape, with mode "sum".

        Returns:
            With mode "none" of `input`'s shape and `embedding_dim`; else one row for each bag, zeros for an empty bag.

        Raises:
            InvalidArgumentError: A number is out of range, or arguments do not fit the mode.
        """
        found = UniqueRows.of(input, self.num_embeddings, self.padding_idx)
        table = self._pulled(found.rows)
        padding = len(found.rows) if found.padded else None
        if padding is not None:
            table = torch.cat([table, table.new_zeros((1, self.embedding_dim))])
        if self.mode == "none":
            if offsets is not None or per_sample_weights is not None:
                raise InvalidArgumentError(
                    "offsets and per_sample_weights must be given with bags only, this ShardedEmbedding has "
                    'mode="none". Make it with mode="sum".'
                )
            return functional.embedding(found.places, table)
        self._require_bags(input, offsets, per_sample_weights)
        return functional.embedding_bag(
            found.places,
            table,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            padding_idx=padding,
        )

    @disable_compiler  # requests to servers cannot be traced
    def _pulled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return values of rows, whose gradients are added to the weight's."""
        weight = self.weight
        values = access_to(weight).pull(weight, rows).to(weight.device, weight.dtype)
        if weight.requires_grad and torch.is_grad_enabled():
            values.requires_grad_().register_post_accumulate_grad_hook(functools.partial(_keep, weight, rows))
        return values

    def _require_bags(self, numbers: torch.Tensor, offsets: torch.Tensor | None, factors: torch.Tensor | None) -> None:
        if numbers.dim() not in (1, 2) or (numbers.dim() == 1) == (offsets is None):
            raise InvalidArgumentError(
                f'Bags (mode="{self.mode}") must be 2-D, or 1-D with offsets; got shape {tuple(numbers.shape)} '
                f"{'without' if offsets is None else 'with'} offsets. Give a bag in each row, or say where bags begin."
            )
        if factors is not None and self.mode != "sum":
            raise InvalidArgumentError(
                f'per_sample_weights must be given with mode="sum" only, got mode="{self.mode}". Leave them out.'
            )

    def export_rows(self) -> list[dict[str, Any]]:
        """Return all touched rows, and their optimizer states. Blocks until all servers or replicas have answered.

        Returns:
            One state for each server or replica: dicts, strings, numbers and tensors, as `torch.save` takes them. The
            states take as much memory here as the rows take on all of them.

        Raises:
            UnavailableError: A server is gone.

        >>> embedding = rd.ShardedEmbedding(100, 2, seed=1)
        >>> _ = embedding(torch.tensor([7, 3]))
        >>> embedding.export_rows()[0]["rows"].tolist()
        [3, 7]
        """
        return access_to(self.weight).export_rows(self.weight)

    def import_rows(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Replace all rows, on any number of servers or replicas.

        Args:
            states: The `export_rows` of an embedding of the same sizes. Other rows are made from this embedding's
                seed when they are touched.

        Raises:
            InvalidArgumentError: The states are of another table.

        >>> embedding, other = rd.ShardedEmbedding(100, 2, seed=1), rd.ShardedEmbedding(100, 2, seed=2)
        >>> row = embedding(torch.tensor([7]))
        >>> other.import_rows(embedding.export_rows())
        >>> torch.equal(other(torch.tensor([7])), row)
        True
        """
        access_to(self.weight).import_rows(self.weight, states)

    def extra_repr(self) -> str:
        """Return the arguments that `print` shows."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{padding}"

    def __getstate__(self) -> dict[str, Any]:
        mark = mark_of(self.weight)
        elsewhere = None if mark is None else mark.access
        if mark is not None and isinstance(mark.local, LocalRows) and mark.local.exchange is not None:
            held = []  # a copy for another replica, which holds other rows
        else:
            held = held_rows(self.weight) if elsewhere is None else elsewhere.export_rows(self.weight)
        return {**self.__dict__, _HELD: held}

    def __setstate__(self, state: dict[str, Any]) -> None:
        held = state.pop(_HELD, [])
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's has no annotations
        mark_table(self.weight, self._spec)
        hold_rows(self.weight, held)


def _keep(weight: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add the gradient of pulled rows, which a backward pass has computed, to the weight's gradient."""
    gradient, values.grad = values.grad, None
    mark = mark_of(weight)
    if mark is not None and mark.access is not None and row_access() is None:
        raise FailedPreconditionError(
            "Gradients of a ShardedEmbedding must be computed where its strategy runs steps, this backward() ran on "
            "the driver. Call it in a function given to strategy.run or schedule."
        )
    if gradient is not None:
        add_row_gradient(weight, rows, gradient.detach())


def _require_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(choices)}, got {value!r}. Choose one of them.")


def _require_sizes(num_embeddings: int, dim: int, padding: int | None, dtype: torch.dtype) -> None:
    for name, value in (("num_embeddings", num_embeddings), ("embedding_dim", dim)):
        if not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} must be an integer >= 1, got {value!r}.")
    if padding is not None and not -num_embeddings <= padding < num_embeddings:
        raise InvalidArgumentError(f"padding_idx must be one of the {num_embeddings} rows, got {padding}.")
    if not dtype.is_floating_point:
        raise InvalidArgumentError(f"dtype must be a floating point one, got {dtype}. Use torch.float32.")


def row_entry(path: str, part: int) -> str:
    """Return the name of the entry of a table's rows on one server.

    >>> row_entry("words", 0)
    'words/0'
    """
    return f"{path}/{part}"


def parts_by_table(state: Mapping[str, Any], paths: Iterable[str]) -> dict[str, list[Any]]:
    """Return, by path of a table, a state's parts: one for each server that had rows.

    >>> parts_by_table({"words/0": 1, "words/1": 2, "tags/0": 3}, ["words", "more"])
    {'words': [1, 2], 'more': []}
    """
    return {path: [part for entry, part in state.items() if _path_of(entry) == path] for path in paths}


def require_known(state: Mapping[str, Any], paths: Collection[str]) -> None:
    """Raise InvalidArgumentError if a state has rows of tables with other paths."""
    strange = next((path for path in map(_path_of, state) if path not in paths), None)
    if strange is not None:
        raise InvalidArgumentError(
            f"Saved rows must be of the module's embeddings, which are {', '.join(paths)}, got {strange!r:.100}. "
            "Restore into a module like the one that was saved."
        )


def _path_of(entry: str) -> str:
    return entry.rpartition("/")[0]


@final
class SavedRows:
    """The `ShardedEmbedding`s of a module, with all touched rows.

    >>> import torch
    >>> model = torch.nn.ModuleDict({"words": ShardedEmbedding(100, 2, seed=1)})
    >>> _ = model["words"](torch.tensor([7]))
    >>> list(SavedRows(model).state_dict())
    ['words/0']
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __bool__(self) -> bool:
        return bool(self.tables())

    def tables(self) -> dict[str, ShardedEmbedding]:
        """Return the embeddings by path, each once. Never blocks: reads no attribute of a mirrored object."""
        first: dict[int, str] = {}
        return {path: each for path, each in _embeddings(self.module, "") if first.setdefault(id(each), path) == path}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of each table on each server."""
        return {
            row_entry(path, part): state
            for path, table in self.tables().items()
            for part, state in enumerate(table.export_rows())
        }

    def part(self, number: int) -> dict[str, Any]:
        """Return the rows that this process holds, as the part of this number; other processes hold the rest."""
        return {row_entry(path, number): table.export_rows()[0] for path, table in self.tables().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all rows by these, on any number of servers."""
        tables = self.tables()
        require_known(state, tables)
        found = parts_by_table(state, tables)
        for path, table in tables.items():
            table.import_rows(found[path])


def _embeddings(module: Any, path: str) -> Iterator[tuple[str, ShardedEmbedding]]:
    if isinstance(module, ShardedEmbedding):
        yield path, module
    for name, child in module_table(module).items():
        if child is not None:
            yield from _embeddings(child, f"{path}.{name}" if path else name)
