"""Frames of videos, for `map`: `rd.video.sample_frames`. Needs the extra `raydist[video]`, which is PyAV (FFmpeg)."""

from __future__ import annotations

from raydist.video.frames import sample_frames as sample_frames

__all__ = ["sample_frames"]
