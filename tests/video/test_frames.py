"""Frames of videos are the right ones in every container, need little decoding, and damage is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raydist as rd
from tests.hostile.mutants import mutant

COUNT = 100


def test_without_pyav_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "a.mp4").write_bytes(b"")
    with pytest.raises(rd.FailedPreconditionError, match=r"pip install 'raydist\[video\]'"):
        rd.video.sample_frames(tmp_path / "a.mp4", 1)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    pytest.importorskip("av")
    from tests.video.clips import KINDS, write_clip

    folder = tmp_path_factory.mktemp("clips")
    for name, codec, pixels, options in KINDS:
        write_clip(folder / name, codec, pixels, options, COUNT)
    write_clip(folder / "uneven.mp4", *KINDS[0][1:], COUNT, uneven=True)
    return {path.name: path for path in folder.iterdir()}


def numbers(frames: np.ndarray[Any, Any]) -> list[int]:
    from tests.video.clips import number_of

    return [number_of(frame) for frame in frames]


def test_frames_are_those_that_a_player_shows(clips: Mapping[str, Path]) -> None:
    draw = np.random.default_rng(0)
    for name, path in clips.items():
        for _ in range(12):
            num_frames, stride = int(draw.integers(1, 6)), int(draw.integers(1, 30))
            seed = int(draw.integers(1000))
            span = (num_frames - 1) * stride + 1
            last = max(0, COUNT - span)
            for rng, first in ((None, last // 2), (np.random.default_rng(seed), None)):
                if first is None:
                    first = int(np.random.default_rng(seed).integers(last + 1))
                expected = [min(first + k * stride, COUNT - 1) for k in range(num_frames)]
                found = rd.video.sample_frames(path, num_frames, stride, rng)
                assert numbers(found) == expected, (name, num_frames, stride)
                assert (found.shape, found.dtype) == ((num_frames, 64, 64, 3), np.uint8)


def test_pixels_are_exact_where_the_codec_is(clips: Mapping[str, Path]) -> None:
    from tests.video.clips import picture

    found = rd.video.sample_frames(clips["exact.mkv"], 3, 20)
    np.testing.assert_array_equal(found, [picture(29), picture(49), picture(69)])


def test_a_short_video_repeats_its_last_frame(clips: Mapping[str, Path]) -> None:
    assert numbers(rd.video.sample_frames(clips["a.mp4"], 4, 40)) == [0, 40, 80, 99]
    assert numbers(rd.video.sample_frames(str(clips["a.mp4"]), 3, 200, np.random.default_rng(1))) == [0, 99, 99]


def packets(path: Path) -> list[tuple[int, int, bool]]:
    """Position, size and whether it is a keyframe of each packet, in the order of the file."""
    import av

    with av.open(str(path)) as container:
        return [(p.pos, p.size, p.is_keyframe) for p in container.demux(container.streams.video[0]) if p.size]


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "plain.mp4"])
def test_what_lies_before_and_between_is_not_decoded(name: str, clips: Mapping[str, Path], tmp_path: Path) -> None:
    """Packets of other keyframes' groups are overwritten, which decoding them would tell."""
    content = bytearray(clips[name].read_bytes())
    found = packets(clips[name])
    starts = [place for place, (_, _, is_keyframe) in enumerate(found) if is_keyframe]
    frames = (20, 90)  # the middle of 100 frames: 20 + 70 and its mirror image
    kept: set[int] = set()
    for frame in frames:
        first = max(start for start in starts if start <= frame)
        after = [start for start in starts if start > frame]
        kept |= {*range(first, after[1] if len(after) > 1 else len(found))}  # with the group behind: read in advance
    spoilt = [place for place in range(len(found)) if place not in kept]
    assert len(spoilt) > 30
    for place in spoilt:
        position, size, _ = found[place]
        content[position + size // 2 : position + size] = b"\xff" * (size - size // 2)
    path = tmp_path / name
    path.write_bytes(content)

    class At20:
        def integers(self, end: int) -> int:
            return frames[0]

    rng: Any = At20()
    assert numbers(rd.video.sample_frames(path, 2, 70, rng)) == [*frames]
    with pytest.raises(rd.DataLossError):
        rd.video.sample_frames(path, COUNT, 1)


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.webm", "a.avi", "a.ts"])
def test_damage_is_an_error_at_its_element(name: str, clips: Mapping[str, Path], tmp_path: Path) -> None:
    content = clips[name].read_bytes()
    cut, noise = tmp_path / f"cut-{name}", tmp_path / f"noise-{name}"
    cut.write_bytes(content[: len(content) // 2] if name == "a.mp4" else content[:200])
    noise.write_bytes(np.random.default_rng(0).bytes(5000))
    paths = [str(clips[name]), str(cut), str(clips[name]), str(noise), str(tmp_path / "none.mp4"), str(clips[name])]
    dataset = rd.Dataset.from_tensor_slices(paths).map(lambda path: rd.video.sample_frames(path, 2, 10))
    iterator, found = dataset.as_numpy_iterator(), list[Any]()
    for _ in paths:
        try:
            found.append(numbers(next(iterator)))
        except rd.RaydistError as error:
            found.append([type(error), getattr(error, "path", None)])
    good = [44, 54]
    none = [rd.NotFoundError, None]
    assert found == [good, [rd.DataLossError, str(cut)], good, [rd.DataLossError, str(noise)], none, good]


def test_random_clips_depend_on_the_seed_alone(clips: Mapping[str, Path]) -> None:
    paths = [str(clips["a.mp4"])] * 6

    def read(path: str, *, rng: np.random.Generator) -> Any:
        return rd.video.sample_frames(path, 2, 3, rng)

    seen = [
        [numbers(clip) for clip in rd.Dataset.from_tensor_slices(paths).map(read, calls, seed=seed).as_numpy_iterator()]
        for calls, seed in ((1, 7), (3, 7), (1, 8))
    ]
    assert seen[0] == seen[1] != seen[2]
    assert len({first for first, _ in seen[0]}) > 1


def test_wrong_arguments(clips: Mapping[str, Path], tmp_path: Path) -> None:
    import av

    for num_frames, stride in ((0, 1), (1, 0)):
        with pytest.raises(rd.InvalidArgumentError, match="must be >= 1, got 0"):
            rd.video.sample_frames(clips["a.mp4"], num_frames, stride)
    sound = tmp_path / "sound.wav"
    with av.open(str(sound), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
    with pytest.raises(rd.InvalidArgumentError, match="must have a stream that FFmpeg can decode"):
        rd.video.sample_frames(sound, 1)


@pytest.mark.parametrize("name", ["a.mp4", "plain.mp4"])
def test_damaged_copies_are_errors_or_give_the_same_frames(
    name: str, clips: Mapping[str, Path], tmp_path: Path
) -> None:
    """FFmpeg paints over damage, unless it is told not to."""
    content, good = clips[name].read_bytes(), rd.video.sample_frames(clips[name], 4, 20)
    path, told = tmp_path / name, 0
    for number in range(200):
        damage = mutant(content, number)
        path.write_bytes(damage.content)
        try:
            found = rd.video.sample_frames(path, 4, 20)
        except (rd.DataLossError, rd.InvalidArgumentError):
            told += 1
        else:
            assert np.array_equal(found, good), damage.what
    assert told > 50
