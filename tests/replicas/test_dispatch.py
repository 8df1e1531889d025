from __future__ import annotations

from raydist.replicas.dispatch import StepPlan, address_parts, batch_rows
from raydist.replicas.step import PartSource, resolve_parts
from raydist.values import Part, PerReplica, ReduceOp


class Stored(PerReplica):
    """A leaf whose parts lie in the store: `ref` names replica 0's object, `ref + 1` replica 1's."""

    def __init__(self, ref: int, leaf_index: int, rows: tuple[int, ...] | None = None) -> None:
        super().__init__(())
        self.ref = ref
        self.leaf_index = leaf_index
        self.rows = rows

    def part_on(self, rank: int, *, stand_in: bool = False) -> Part:
        return Part(
            ref=self.ref + rank + (100 if stand_in and self.rows and not self.rows[rank] else 0),
            leaf_index=self.leaf_index,
        )


class Object:
    absent = False

    def __init__(self, *leaves: object) -> None:
        self.leaves = leaves

    def leaf(self, index: int) -> object:
        return [self.leaves[index]]


def test_each_object_travels_once() -> None:
    images, labels, other = Stored(10, 0), Stored(10, 1), Stored(20, 0)
    sources, refs = address_parts([images, labels, PerReplica([5, 6]), other], 1, stand_in=True)
    assert refs == (11, 21)
    assert sources == (PartSource(0, 0), PartSource(0, 1), PartSource(None, value=6), PartSource(1, 0))


def test_a_replica_without_rows_gets_the_stand_in() -> None:
    batch = Stored(10, 0, rows=(2, 0))
    assert address_parts([batch], 1, stand_in=True)[1] == (111,)
    assert address_parts([batch], 1, stand_in=False)[1] == (11,)
    assert address_parts([batch], 0, stand_in=True)[1] == (10,)


def test_rows_are_those_of_the_first_batch() -> None:
    assert batch_rows([PerReplica([1, 2]), Stored(1, 0, (2, 1)), Stored(2, 0, (3, 3))]) == (2, 1)
    assert batch_rows([PerReplica([1, 2])]) is None


def test_one_leaf_given_twice_is_one_value() -> None:
    sources = (PartSource(0, 0), PartSource(0, 0), PartSource(0, 1), PartSource(None, value="v"))
    first, second, third, fourth = resolve_parts(sources, [Object("a", "b")])
    assert first is second
    assert (third, fourth) == (["b"], "v")


def test_a_plan_tells_every_replica_the_same_but_its_sources() -> None:
    plan = StepPlan(3, 1, "shipment", (), (2, 1), ReduceOp.SUM, False, 7)
    header = plan.header(1, (PartSource(0, 0),))
    assert (header.step, header.generation, header.rows, header.stand_in) == (3, 1, (2, 1), False)
    assert header.sources == (PartSource(0, 0),)
