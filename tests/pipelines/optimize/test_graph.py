from __future__ import annotations

from dataclasses import replace

from raydist.dataset import Dataset
from raydist.pipelines.engine.build import name_operations
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.ops.take import TakeOp
from raydist.pipelines.optimize.graph import named_like, rewrite_each, settings_of, with_inputs


def test_nothing_changes_where_nothing_is_changed() -> None:
    op = Dataset.zip(Dataset.range(3), Dataset.range(4).batch(2))._op
    assert rewrite_each(op, name_operations(op), lambda node: node) is op


def test_what_changes_keeps_its_name() -> None:
    op = Dataset.range(9).take(3).batch(2)._op
    names = name_operations(op)

    def take_more(node: DatasetOp) -> DatasetOp:
        return named_like(node, replace(node, count=5), names) if isinstance(node, TakeOp) else node

    new = rewrite_each(op, names, take_more)
    assert [names[id(node)] for node in (new, new.inputs[0])] == ["batch-2", "take-1"]
    assert (new.inputs[0].label, op.inputs[0].label) == ("take(5)", "take(3)")


def test_what_stands_at_two_places_stays_one() -> None:
    numbers = Dataset.range(9).take(3)
    op = Dataset.zip(numbers.batch(2), numbers)._op
    names = name_operations(op)
    taken = numbers._op
    new = rewrite_each(op, names, lambda node: node.inputs[0] if node is taken else node)
    assert new.inputs[0].inputs[0] is new.inputs[1] is taken.inputs[0]


def test_inputs_in_tuples_are_found() -> None:
    op = Dataset.choose_from_datasets([Dataset.range(3), Dataset.range(4)], Dataset.range(2))._op
    other = Dataset.range(7)._op
    new = with_inputs(op, name_operations(op), lambda source: other)
    assert new.inputs == (other, other, other)


def test_settings_are_all_but_inputs() -> None:
    assert settings_of(Dataset.range(3).batch(2, drop_remainder=True)._op) == (2, True)
    assert settings_of(Dataset.zip(Dataset.range(3), Dataset.range(3))._op)[1:] == ((0, 1),)
