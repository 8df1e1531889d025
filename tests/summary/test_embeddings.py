from __future__ import annotations

from pathlib import Path

import pytest
import torch

import raydist as rd


def test_points_are_in_the_directory_of_the_writer(tmp_path: Path) -> None:
    with rd.summary.create_file_writer(tmp_path) as writer, writer.as_default(step=2):
        assert rd.summary.embedding("words", torch.eye(2), metadata=["a", "b"], images=torch.zeros(2, 1, 2, 2))
        with rd.summary.record_if(False):
            assert not rd.summary.embedding("others", torch.eye(2))
    folder = tmp_path / "projector" / "words-00002"
    assert sorted(path.name for path in folder.iterdir()) == ["metadata.tsv", "sprite.png", "tensors.tsv"]


def test_it_is_for_the_driver() -> None:
    with pytest.raises(rd.FailedPreconditionError, match="rd.summary.embedding is for the driver"):
        rd.OneDeviceStrategy("cpu").run(rd.summary.embedding, args=("words", torch.eye(2)))
