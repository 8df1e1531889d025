"""Dataset.snapshot: a cache in files whose name depends on the pipeline and, optionally, in shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.foreign_errors import annotate
from raydist.pipelines.elements.items import Item, IteratorState
from raydist.pipelines.engine.op import DatasetOp, IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import UnaryOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer, read_item
from raydist.pipelines.ops.nested import graph_of, open_nested
from raydist.pipelines.stored.containers import MAX_CHUNK_BYTES, Container
from raydist.pipelines.stored.fingerprint import fingerprint
from raydist.pipelines.stored.manifest import Manifest
from raydist.pipelines.stored.pass_over import Store, StoredPass, StoredPassSettings
from raydist.pipelines.stored.read import saved_op, shards_op
from raydist.pipelines.stored.write import ShardFunction
from raydist.values import INFINITE_CARDINALITY

__all__ = ["SnapshotOp"]

_AUTO = "LZ4"  # reads about as fast as uncompressed data
_ROWS = 4096  # elements read at a time while writing


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
        settings = StoredPassSettings(store, lambda: first.build(self.input), ctx.seed, self.label, True)
        if self.reader_func is None and self.shard_func is None:
            return BorderIterator(StoredPass(settings))

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

    def __init__(self, settings: StoredPassSettings, open_reader: Callable[[Manifest], OpIterator], name: str) -> None:
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
