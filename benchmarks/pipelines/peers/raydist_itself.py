"""raydist."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.pipelines.peers import (
    raydist_distributed,
    raydist_files,
    raydist_images,
    raydist_numbers,
    raydist_process,
)
from benchmarks.pipelines.scene import MakePass

PASSES: Mapping[str, MakePass] = {
    **raydist_numbers.PASSES,
    **raydist_images.PASSES,
    **raydist_files.PASSES,
    **raydist_distributed.PASSES,
    **raydist_process.PASSES,
}
