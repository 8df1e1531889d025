"""Exports: programs that give the module's outputs without its code, for any number of rows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import raydist as rd
from raydist.core.failpoints import installed
from raydist.training.export import export_module
from tests.refused import check_refused
from tests.training.toys import compiled, regression, small_net


class Reader(nn.Module):
    """Attention and an LSTM over words; the output layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding = nn.Embedding(50, 8)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.out = nn.Linear(8, 50)
        self.out.weight = self.embedding.weight
        self.register_buffer("offset", torch.ones(50), persistent=False)

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, _ = self.lstm(self.encoder(self.embedding(ids)))
        return {"logits": self.out(hidden) * scale[:, None, None] + self.offset, "last": hidden[:, -1]}


def reader() -> rd.Model:
    torch.manual_seed(1)
    return rd.Model(Reader())


EXAMPLE = (torch.zeros(1, 5, dtype=torch.long), np.ones(1, np.float32))


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50, (rows, 5)), torch.rand(rows)


def test_a_process_without_the_code_gets_the_module_s_outputs(tmp_path: Path) -> None:
    model = reader()
    path = model.export(tmp_path / "served", EXAMPLE)
    assert model.module.training
    inputs = batch(7)
    torch.save(inputs, tmp_path / "inputs")
    (tmp_path / "program.py").write_text(
        "import sys, torch, raydist as rd\n"
        "exported = rd.load_exported('served')\n"
        "torch.save(exported(*torch.load('inputs')), 'outputs')\n"
        "assert not {'raydist.training.model', 'ray', 'tests'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True, timeout=50)
    expected, found = model.module.eval()(*inputs), torch.load(tmp_path / "outputs")
    exported = rd.load_exported(path)
    for name in ("last", "logits"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    assert exported.path == path
    assert list(exported.inputs) == ["ids", "scale"]
    assert exported.inputs["ids"] == rd.TensorSpec((None, 5), "int64")
    assert exported.outputs == {"last": rd.TensorSpec((None, 8)), "logits": rd.TensorSpec((None, 5, 50))}


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_any_number_of_rows_as_arrays_lists_or_by_name(tmp_path: Path, rows: int) -> None:
    model = rd.Model(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)))
    model.module(torch.randn(9, 1, 4, 4))  # statistics other than the first ones
    exported = rd.load_exported(model.export(tmp_path, np.zeros((1, 1, 4, 4), np.float32)))
    x = torch.randn(rows, 1, 4, 4)
    expected = model.module.eval()(x)
    for given in (x, x.numpy().astype(np.float64), x.tolist(), {"input": x}):
        torch.testing.assert_close(exported(given), expected)
    elsewhere = rd.load_exported(tmp_path, device="meta")(x)
    assert (elsewhere.device.type, elsewhere.shape) == ("meta", expected.shape)


def test_weights_are_on_disk_once_and_plain(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    compiled_module: Any = torch.compile(module, backend="eager")
    path = Path(rd.Model(compiled_module).export(tmp_path, torch.zeros(2, 300)))
    assert (path / "program.pt2").stat().st_size < 50_000 < 360_000 < (path / "model.safetensors").stat().st_size
    again = nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300))
    again.load_state_dict(load_file(path / "model.safetensors"))
    assert torch.equal(again.state_dict()["0.weight"], module.state_dict()["0.weight"])
    tied = load_file(Path(reader().export(tmp_path, EXAMPLE)) / "model.safetensors")
    assert "embedding.weight" in tied
    assert not {"out.weight", "offset"} & {*tied}


def test_versions_count_up_and_a_failed_one_leaves_nothing(tmp_path: Path) -> None:
    layer, example = nn.Linear(2, 1), torch.zeros(2, 2)
    model = rd.Model(layer)
    with pytest.raises(rd.NotFoundError, match="found none in"):
        rd.load_exported(tmp_path)
    first = model.export(tmp_path, example)
    (tmp_path / "notes").mkdir()
    (tmp_path / "9").write_text("no directory")
    (tmp_path / "11").mkdir()
    with torch.no_grad():
        layer.bias.add_(1.0)
    second = model.export(tmp_path, example)
    assert [Path(path).name for path in (first, second)] == ["1", "12"]
    difference = rd.load_exported(tmp_path)(example) - rd.load_exported(first)(example)
    torch.testing.assert_close(difference, torch.ones(2, 1))

    def fail(name: str) -> None:
        raise OSError("disk full")

    before = sorted(tmp_path.iterdir())
    with installed(fail), pytest.raises(OSError, match="disk full"):
        model.export(tmp_path, example)
    assert sorted(tmp_path.iterdir()) == before


def test_damage_is_found(tmp_path: Path) -> None:
    path = Path(rd.Model(nn.Linear(2, 1)).export(tmp_path, torch.zeros(2, 2)))
    for name in ("program.pt2", "model.safetensors", "signature.json"):
        broken = tmp_path / "broken"
        shutil.copytree(path, broken)
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 1
        (broken / name).write_bytes(content)
        with pytest.raises(rd.DataLossError, match="no whole export"):
            rd.load_exported(broken)
        shutil.rmtree(broken)
    document = json.loads((path / "signature.json").read_text())
    (path / "signature.json").write_text(json.dumps({**document, "version": 2}))
    with pytest.raises(rd.InvalidArgumentError, match="has format version 2"):
        rd.load_exported(path)


RAW: dict[str, Any] = {"age": [20, 30.5], "years": [1, 3], "job": ["cook", "x"], "words": [["a", "b"], ["c"]]}


def space() -> rd.feature.FeatureSpace:
    words = rd.feature.categorical_column_with_hash_bucket("words", 10)
    job = rd.feature.categorical_column_with_vocabulary_list("job", ["cook", "baker"])
    columns = [
        rd.feature.numeric_column("age", normalizer_fn=rd.feature.Normalization()),
        rd.feature.bucketized_column(rd.feature.numeric_column("years"), [1, 2]),
        rd.feature.embedding_column(words, 4, initializer=nn.init.normal_),
        rd.feature.indicator_column(job),
        rd.feature.embedding_column(rd.feature.crossed_column(["job", "words"], 20), 3),
    ]
    return rd.feature.FeatureSpace(columns).adapt([{"age": np.array([20.0, 40.0])}])


def test_features_are_transformed_as_in_training(tmp_path: Path) -> None:
    made = space()
    module = nn.Sequential(rd.DenseFeatures(made), nn.Linear(13, 2))
    exported = rd.load_exported(rd.Model(module).export(tmp_path, RAW, made))
    three = {"age": [20] * 3, "years": [1, 2, 3], "job": ["cook"] * 3, "words": [["a"] * 7, [], ["b"]]}
    one = {"age": [20], "years": [1], "job": [b"baker"], "words": [["c"]], "unused": [0]}
    for features in (RAW, three, one):
        expected = module({name: torch.as_tensor(value) for name, value in made.transform(features).items()})
        assert torch.equal(exported(features), expected)
    assert exported.inputs["age"] == rd.TensorSpec((None, 1))
    assert exported.inputs["words"] == rd.TensorSpec((None, None), bytes)
    with pytest.raises(rd.InvalidArgumentError, match="must have 'years'"):
        exported({"age": [1]})


class Scorer(nn.Module):
    """Computes its own loss, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layer(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "cache": SimpleNamespace()}


def test_a_module_with_a_loss_of_its_own_gets_keywords_and_gives_outputs(tmp_path: Path) -> None:
    model = rd.Model(Scorer())
    model.compile("sgd", "model")
    x = torch.randn(4, 3)
    expected = model.module(x)["logits"]
    for example in ({"x": x}, {"x": x, "labels": torch.ones(4, dtype=torch.long)}):
        exported = rd.load_exported(model.export(tmp_path, example))
        assert list(exported.outputs) == ["logits"]
        torch.testing.assert_close(exported(example)["logits"], expected)


@contextmanager
def sharded() -> Iterator[rd.Strategy]:
    with rd.ShardedStrategy(2) as strategy:
        yield strategy


@pytest.mark.ray
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["mirrored", "sharded"])
def test_values_are_those_of_the_replicas(
    kind: str, tmp_path: Path, mirrored: Callable[[int], rd.MirroredStrategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(strategy: rd.Strategy) -> torch.Tensor:
        with strategy.scope():
            model = compiled(small_net())
        model.fit(regression(12, 4), epochs=2, verbose=False)
        exported = rd.load_exported(export_module(model.module, tmp_path, torch.zeros(1, 3, dtype=torch.float64)))
        result: torch.Tensor = exported(torch.ones(2, 3, dtype=torch.float64))
        return result

    expected = trained(rd.OneDeviceStrategy("cpu"))
    if kind == "mirrored":
        found = trained(mirrored(2))
    else:
        with sharded() as strategy:
            found = trained(strategy)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    untrained = small_net()(torch.ones(2, 3, dtype=torch.float64))
    assert not torch.allclose(found, untrained, rtol=1e-3)


class Peeking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    log_age = rd.feature.FeatureSpace([rd.feature.numeric_column("age", normalizer_fn=np.log1p)])
    x = torch.zeros(2, 3)
    cases = [
        ((Peeking(), x), "cannot trace Peeking"),
        ((nn.Sequential(rd.DenseFeatures(log_age)), {"age": [1.0]}, log_age), "no functions of its own"),
        ((nn.Linear(3, 1), x, log_age), "must be a dict"),
        ((nn.Linear(3, 1), torch.zeros(0, 3)), "one number of rows, at least 1"),
        ((nn.Bilinear(3, 3, 1), (x, x[:1])), "one number of rows, at least 1, got"),
        ((rd.ShardedEmbedding(10, 2), torch.zeros(2, dtype=torch.long)), "rows of ShardedEmbeddings"),
    ]
    check_refused(lambda given: rd.Model(given[0]).export(tmp_path, *given[1:]), cases)
    check_refused(
        lambda given: rd.Model(given[0]).export(tmp_path, given[1]),
        [
            ((nn.Linear(3, 1), ["a"]), "must be tensors"),
            ((nn.Flatten(0), x), r"a row for each row of the inputs, got 'output' \(3\*"),
            ((nn.MSELoss(), (x, x)), "a row for each row of the inputs, got none"),
        ],
        rd.SpecError,
    )
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(rd.InvalidArgumentError, match="local or mounted directory"):
        rd.Model(nn.Linear(3, 1)).export("s3://bucket/model", x)


def test_inputs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    exported = rd.load_exported(rd.Model(nn.Bilinear(3, 2, 1)).export(tmp_path, (torch.zeros(1, 3), torch.zeros(1, 2))))
    good = torch.zeros(2, 2)
    check_refused(
        lambda given: exported(*given),
        [
            ((), r"Inputs must be \['input1', 'input2'\], got 0"),
            ((torch.zeros(2, 3),), "got 1: "),
            (({"input1": torch.zeros(2, 3), "other": good},), r"got 2: \['input1', 'other'\]"),
            ((torch.zeros(3, 3), good), r"one number of rows, got \[2, 3\]"),
        ],
    )
    check_refused(
        lambda given: exported(given, good),
        [
            (torch.zeros(2, 4), r"'input1' must have the shape \(None, 3\).*got \(2, 4\)"),
            (1.0, r"got \(\)"),
            ([[1, 2, 3], [4]], "'input1' must be an array of numbers"),
            ([["a", "b", "c"]], "'input1' must be an array of numbers"),
            (np.zeros((2, 3), complex), "must be of float32, got torch.complex128"),
        ],
        rd.SpecError,
    )
