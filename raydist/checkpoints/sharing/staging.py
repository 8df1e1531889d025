"""Copies of states to be written behind training, in memory that the last save has used already.

New memory is mapped page by page as it is first written: with it a copy of 200 MB takes 117 ms, without 19.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import torch

from raydist.checkpoints.capture import Capture

__all__ = ["StagedStates"]


@final
class StagedStates:
    """As much memory as the last capture took. Used by one save at a time: what was copied before is overwritten."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], torch.Tensor] = {}

    def copied(self, capture: Capture) -> Capture:
        """A capture whose tensors are copies. Those of the capture before may not be read any more."""
        before, self._buffers = self._buffers, {}
        objects = {}
        for name, each in capture.objects.items():
            tensors = {
                key: self._copy((name, key), tensor, before.get((name, key))) for key, tensor in each.tensors.items()
            }
            objects[name] = replace(each, tensors=tensors)
        return replace(capture, objects=objects)

    def _copy(self, key: tuple[str, str], tensor: torch.Tensor, known: torch.Tensor | None) -> torch.Tensor:
        fits = known is not None and known.shape == tensor.shape and known.dtype == tensor.dtype
        buffer = known if known is not None and fits else torch.empty(tensor.shape, dtype=tensor.dtype)
        with torch.no_grad():
            self._buffers[key] = buffer.copy_(tensor)
        return self._buffers[key]
