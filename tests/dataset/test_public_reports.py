"""Programs of bug reports about other frameworks: data and state. What is right is what plain Python or torch gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.data
import torch

import raydist as rd
from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from tests.pipelines.formats.test_tar_samples import write_tar


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def test_members_of_a_tar_file_that_are_no_neighbours(tmp_path: Path) -> None:
    """ray-project/ray 65044 (44068): a shard whose samples are torn apart gives halves, or samples twice."""
    torn = write_tar(tmp_path / "torn.tar", [(name, b"1") for name in ("0.a", "1.a", "0.b", "1.b", "2.a")])
    iterator = iter(rd.Dataset.from_tar(torn))
    assert [next(iterator)["__key__"], next(iterator)["__key__"]] == ["0", "1"]
    for key in "01":
        with pytest.raises(DataLossError, match=rf"neighbours in a tar file, but '{key}' has.*tar --sort=name"):
            next(iterator)
    assert next(iterator)["__key__"] == "2"
    twice = write_tar(tmp_path / "twice.tar", [("0.a", b"old"), ("1.a", b"1"), ("0.a", b"new")])
    with pytest.raises(DataLossError, match="neighbours"):
        list(rd.Dataset.from_tar(twice))
    folders = write_tar(tmp_path / "v1.0.tar", [(f"train.v1/{name}", b"") for name in ("1.a", "1.b", "2.a", "2.b")])
    assert [sample["__key__"] for sample in rd.Dataset.from_tar(folders)] == ["train.v1/1", "train.v1/2"]


def test_fields_of_json_lines_that_some_objects_have_not(tmp_path: Path) -> None:
    """A field that is null in the first lines, or missing in some.

    windmill-labs/windmill 10728, im-anishraj/arnio 1743.
    """
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": null, "b": 1}\n{"b": 2}\n{"a": "2023-11-30", "b": null}\n')
    with pytest.raises(SpecError, match=r"'a' has no value in line 1.*fill_null={'a': value}"):
        next(iter(rd.Dataset.from_json(path)))
    filled = rd.Dataset.from_json(path, fill_null={"a": "", "b": -1})
    assert plain(list(filled)) == [{"a": "", "b": 1}, {"a": "", "b": 2}, {"a": "2023-11-30", "b": -1}]
    masked = rd.Dataset.from_json(path, columns=["b"], null_masks=True)
    assert plain(list(masked.map(lambda row: row["b_is_null"]))) == [False, False, True]


def test_a_first_file_without_rows(tmp_path: Path) -> None:
    """huggingface/datasets 8006: an empty shard among files, here the first, from which columns are learned."""
    texts = {"0.csv": "a,b\n", "1.csv": "a,b\n1,x\n", "0.jsonl": "", "1.jsonl": '{"a": 1}\n'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in texts]
    assert plain(list(rd.Dataset.from_csv(paths[:2]))) == [{"a": 1, "b": "x"}]
    assert plain(list(rd.Dataset.from_csv(paths[1::-1]))) == [{"a": 1, "b": "x"}]
    assert plain(list(rd.Dataset.from_json(paths[2:]))) == [{"a": 1}]
    with pytest.raises(InvalidArgumentError, match="must have a line"):
        rd.Dataset.from_json(paths[2])


def test_an_optimizer_goes_on_with_the_types_that_it_had(tmp_path: Path) -> None:
    """Moments of another type than their parameter are cast when a checkpoint is restored.

    pytorch/torchtitan 4615, vllm-project/speculators 899.
    """

    def made(value: int) -> tuple[torch.optim.Optimizer, rd.Checkpoint]:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 1).bfloat16()])
        optimizer = torch.optim.SGD(model.parameters())
        for parameter in model.parameters():
            other = torch.bfloat16 if parameter.dtype == torch.float32 else torch.float32
            codes = torch.full((3,), value, dtype=torch.uint8)
            optimizer.state[parameter] = {"moment": torch.full_like(parameter, value, dtype=other), "codes": codes}
        return optimizer, rd.Checkpoint(model=model, optimizer=optimizer)

    optimizer, checkpoint = made(3)
    restored, other = made(0)
    other.restore(checkpoint.save(tmp_path / "x"))
    assert str(restored.state_dict()) == str(optimizer.state_dict())


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray Data's own
def test_blocks_of_ray_data_of_differing_sizes(two: rd.MirroredStrategy) -> None:
    """Batches that are short before the end, so that replicas take different numbers of steps.

    ray-project/ray 66085. The pipeline, in a process of its own, gets blocks that the driver has put.
    """
    ends = [1, 14, 16, 37]
    blocks = [pa.table({"a": list(range(start, end))}) for start, end in zip([0, *ends], ends, strict=False)]
    rows = rd.Dataset.from_ray(ray.data.from_arrow(blocks)).map(lambda row: row["a"]).shuffle(8, seed=0)
    parts = [plain(two.local_results(batch)) for batch in two.distribute_dataset(rows.batch(4))]
    assert [sum(map(len, step)) for step in parts] == [4] * 9 + [1]
    assert sorted(sum((part for step in parts for part in step), [])) == list(range(37))
    reference = ray.put(7)
    assert two.local_results(two.run(lambda: ray.get(reference, timeout=60))) == (7, 7)
