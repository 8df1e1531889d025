from __future__ import annotations

from raydist.dataset import Dataset
from tests.contracts.op import collect, iterate

A, B = Dataset.range(3), Dataset.range(10, 13)


def choose(*choices: int, stop: bool = True) -> list[int]:
    numbers = Dataset.from_tensor_slices(list(choices))
    return [int(x) for x in Dataset.choose_from_datasets([A, B], numbers, stop_on_empty_dataset=stop)]


def test_choices_name_the_datasets() -> None:
    assert choose(1, 1, 0, 1, 0) == [10, 11, 0, 12, 1]
    assert choose(0, 0, 0, 0, 1) == [0, 1, 2]
    assert choose(0, 0, 0, 0, 1, stop=False) == [0, 1, 2, 10]


def test_a_choice_out_of_range_is_an_error_in_its_place() -> None:
    for wrong in (2, -1):
        numbers = Dataset.from_tensor_slices([0, wrong, 1])
        items = collect(iterate(Dataset.choose_from_datasets([A, B], numbers)))
        assert [item[0] if isinstance(item, tuple) else int(item) for item in items] == [0, "InvalidArgumentError", 10]
        assert f"0 .. 1, got {wrong}" in items[1][1]
    for numbers in (Dataset.from_tensors(0.5), Dataset.from_tensors([0]), Dataset.from_tensors("a"), Dataset.zip(A, A)):
        first = collect(iterate(Dataset.choose_from_datasets([A, B], numbers)))[0]
        assert "must be one whole number" in first[1]


def test_all_elements_are_sampled_once() -> None:
    elements = [int(x) for x in Dataset.sample_from_datasets([A, B], seed=5)]
    assert sorted(elements) == [0, 1, 2, 10, 11, 12]
    assert [x for x in elements if x < 10] == [0, 1, 2]
    endless = Dataset.from_tensors(7).repeat()
    dataset = Dataset.sample_from_datasets([A, endless], seed=1, stop_on_empty_dataset=True)
    assert [x for x in map(int, dataset) if x != 7] == [0, 1, 2], "an empty dataset may end it"


def test_weights_are_shares() -> None:
    parts = [Dataset.from_tensors(number).repeat() for number in range(4)]
    (batch,) = Dataset.sample_from_datasets(parts, [1, 0, 2, 1], seed=2).batch(4000).take(1)
    counts = [int((batch == number).sum()) for number in range(4)]
    assert counts[1] == 0
    assert [abs(count - 1000 * share) < 120 for count, share in zip(counts, [1, 0, 2, 1], strict=True)] == [True] * 4
    assert [int(x) for x in Dataset.sample_from_datasets([A, B], [0, 1])] == [10, 11, 12]
    assert [int(x) for x in Dataset.sample_from_datasets([A, B], [0.5, -1])] == [0, 1, 2]


def test_choices_change_with_the_epoch_only_if_asked() -> None:
    for again in (False, True):
        parts = [Dataset.range(20), Dataset.range(20, 40)]
        dataset = Dataset.sample_from_datasets(parts, seed=1, rerandomize_each_iteration=again)
        assert ([int(x) for x in dataset] == [int(x) for x in dataset]) is not again
