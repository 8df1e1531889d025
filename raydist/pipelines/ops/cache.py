"""Dataset.cache and snapshot: the elements of a first complete pass, kept in memory or in files for later passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.core.exception_utils import annotate
from raydist.core.values import INFINITE_CARDINALITY
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, Producer, ReplayIterator, ResumableProducer, read_item
from raydist.pipelines.ops.nested import graph_of, open_nested
from raydist.pipelines.stored.cached_epoch import CachedEpoch, CachedEpochSettings, Store
from raydist.pipelines.stored.containers import MAX_CHUNK_BYTES, Container
from raydist.pipelines.stored.fingerprint import NOT_IN_FINGERPRINT, fingerprint
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.read import saved_op, shards_op
from raydist.pipelines.stored.write import ShardFunction

_AUTO = "LZ4"  # reads about as fast as uncompressed data
_ROWS = 4096  # elements read at a time while writing


@final
class Kept:
    """The cached elements of one operation, in one process; pickles as empty.

    Passes with another root seed have other elements, so the seed is stored too.
    """

    def __init__(self) -> None:
        self._found: tuple[int, tuple[Block, ...]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()

    def get(self, seed: int) -> tuple[Block, ...] | None:
        """Return the blocks of a complete pass, or None."""
        found = self._found
        return found[1] if found is not None and found[0] == seed else None

    def put(self, seed: int, blocks: Sequence[Block]) -> None:
        """Store the blocks of a complete pass; replaces any others."""
        self._found = (seed, tuple(blocks))


@final
@dataclass(frozen=True, eq=False)
class CacheOp(UnaryOp):
    """The elements of epoch 0 of `input`, read once."""

    passes_elements: ClassVar[bool] = True

    kept: Kept = field(default_factory=Kept, metadata=NOT_IN_FINGERPRINT)

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # Every pass is epoch 0 of the input, so that a new process makes the same elements.
        return ReplayIterator(_Caching(self, replace(ctx, epoch=(0,) * len(ctx.epoch))))


@final
class _Caching(Producer):
    """A producer that reads the cache, or fills it from the input. A pass with an error in it is not cached."""

    def __init__(self, op: CacheOp, ctx: IterContext) -> None:
        self._op = op
        self._ctx = ctx
        self._source: OpIterator | None = None
        self._read: list[Block] = []
        self._whole = True
        self._hits: list[Block] | None = None

    def make(self, limit: int) -> Sequence[Item]:
        if self._source is None and self._hits is None:
            self._open()
        if self._hits is not None:
            return [self._next_hit(limit)]
        return [self._next_read(limit)]

    def _open(self) -> None:
        kept = self._op.kept.get(self._ctx.seed)
        if kept is None:
            self._source = self._ctx.build(self._op.input)
        else:
            self._hits = list(reversed(kept))

    def _next_hit(self, limit: int) -> Block:
        if not self._hits:
            raise StopIteration
        block = self._hits.pop()
        if block.num_rows > limit:
            self._hits.append(block.slice(limit, block.num_rows))
            block = block.slice(0, limit)
        return block.shared()

    def _next_read(self, limit: int) -> Item:
        if self._source is None:
            raise StopIteration
        try:
            item = read_item(self._source, limit)
        except StopIteration:
            if self._whole:
                self._op.kept.put(self._ctx.seed, self._read)
                self._whole = False
            raise
        if isinstance(item, ElementError):
            self._whole = False
            return item
        self._read.append(item)
        return item.shared()

    def close(self) -> None:
        self._read = []
        self._whole = False
        if self._source is not None:
            self._source.close()


@final
@dataclass(frozen=True, eq=False)
class FileCacheOp(UnaryOp):
    """The elements of epoch 0 of `input`, read once and kept in the directory `path`."""

    passes_elements: ClassVar[bool] = True

    path: str

    @property
    def name(self) -> str:
        return "cache"

    @property
    def label(self) -> str:
        return f"cache({self.path!r})"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        # Every pass is epoch 0 of the input, so that every writer makes the same elements.
        first = replace(ctx, epoch=(0,) * len(ctx.epoch))
        store = Store(self.path, Container.of("arrow", None))
        settings = CachedEpochSettings(store, lambda: first.build(self.input), ctx.seed, self.label, False)
        return BorderIterator(CachedEpoch(settings))


@final
@dataclass(frozen=True, eq=False)
class SnapshotOp(UnaryOp):
    """The elements of epoch 0 of `input`, stored in a directory below `path` named by the fingerprint of `input`.

    `make_dataset` makes the user's dataset from an operation.
    """

    path: str
    container: Container
    make_dataset: Callable[[DatasetOp], Any]
    reader_func: Callable[[Any], Any] | None = None
    shard_func: ShardFunction | None = None
    graph: str = ""

    def __post_init__(self) -> None:
        sharded = self.reader_func is not None or self.shard_func is not None
        if sharded and self.input.cardinality() == INFINITE_CARDINALITY:
            raise InvalidArgumentError(
                "snapshot with reader_func or shard_func writes all elements before it hands out the first, and the "
                "dataset has no end. Use take(n) before it, or repeat after it."
            )
        if not self.graph:  # of the graph as written, because the graph that runs may be rewritten
            object.__setattr__(self, "graph", fingerprint(self.input, self.container, self.shard_func))

    @classmethod
    def compression(cls, name: str | None) -> Container:
        """Return the container for a compression; "AUTO" leaves the choice to raydist."""
        return Container.of("arrow", _AUTO if name == "AUTO" else name)

    @property
    def label(self) -> str:
        return f"snapshot({self.path!r})"

    def directory(self, ctx: IterContext) -> str:
        """Return the directory of the elements of a pipeline with these options."""
        name = fingerprint(self.graph, ctx.options.seed)
        return f"{self.path.rstrip('/')}/{name}"

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        first = replace(ctx, epoch=(0,) * len(ctx.epoch))
        store = Store(self.directory(ctx), self.container, self.shard_func)
        settings = CachedEpochSettings(store, lambda: first.build(self.input), ctx.seed, self.label, True)
        if self.reader_func is None and self.shard_func is None:
            return BorderIterator(CachedEpoch(settings))

        def open_reader(manifest: Manifest) -> OpIterator:
            return self._reader(store.path, manifest, ctx)

        return BorderIterator(_ShardedPass(settings, open_reader, ctx.operation_names[id(self)]))

    def _reader(self, path: str, manifest: Manifest, ctx: IterContext) -> OpIterator:
        if self.reader_func is None:
            return saved_op(path, manifest, manifest.parts, MAX_CHUNK_BYTES).iterator()
        shards = self.make_dataset(shards_op(path, manifest, self.make_dataset, MAX_CHUNK_BYTES))
        op = graph_of(self.reader_func(shards), self.label)
        return open_nested(op, ctx, ctx.operation_names[id(self)], 0)


@final
class _ShardedPass(ResumableProducer):
    """A producer that first writes all elements of the input unless they exist, then reads them through the reader.

    So the order does not depend on whether the snapshot existed. The state is the reader's state.
    """

    def __init__(self, settings: CachedEpochSettings, open_reader: Callable[[Manifest], OpIterator], name: str) -> None:
        self._settings = settings
        self._open_reader = open_reader
        self._name = name
        self._origin: str | None = None
        self._resume_at: IteratorState | None = None
        self._reader: OpIterator | None = None
        self._ended = False

    def make(self, limit: int) -> Sequence[Item]:
        if self._ended:
            raise StopIteration
        if self._reader is None:
            try:
                self._reader = self._open()
            except Exception:
                self._ended = True  # a failed write is not the error of an element: the iteration ends
                raise
        return [read_item(self._reader, limit)]

    def _open(self) -> OpIterator:
        store = self._settings.store
        if store.find() is None:
            try:
                self._write()
            except FailedPreconditionError:
                if store.find() is None:  # otherwise another writer has finished meanwhile
                    raise
        manifest = store.find()
        if manifest is None or self._origin not in (None, manifest.origin):
            raise self._settings.changed()
        self._origin = manifest.origin
        reader = self._open_reader(manifest)
        if self._resume_at is not None:
            reader.load_state_dict(self._resume_at)
        return reader

    def _write(self) -> None:
        recorder = self._settings.recorder()
        source = self._settings.read_input()
        try:
            while True:
                recorder.write(source.next_block(_ROWS))
        except StopIteration:
            recorder.commit()
        except Exception as error:
            annotate(error, f"In {self._name}: nothing was kept.")
            raise
        finally:
            recorder.close()
            source.close()

    def border(self) -> IteratorState:
        at = self._resume_at if self._reader is None else self._reader.state_dict()
        return {"origin": self._origin, "at": at}

    def restore(self, border: IteratorState) -> None:
        self._origin, self._resume_at = border["origin"], border["at"]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
