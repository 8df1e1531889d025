"""Who takes part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

RAYDIST = "raydist"


@dataclass(frozen=True)
class Contender:
    """A library in one setting.

    Attributes:
        label: As the table shows it.
        module: Of `benchmarks.pipelines.peers`.
        distribution: The installed package whose version is told.
        num_workers: Worker processes.
        num_calls: Parallel calls set by hand; None for the library's own choice.
        is_peer: Runs in the peers' environment instead of raydist's.
    """

    label: str
    module: str
    distribution: str
    num_workers: int = 0
    num_calls: int | None = None
    is_peer: bool = True


def _raydist(label: str, *, num_workers: int = 0, num_calls: int | None = None) -> Contender:
    return Contender(label, "raydist_itself", "raydist", num_workers, num_calls, is_peer=False)


_ALL = (
    _raydist(RAYDIST),
    _raydist("raydist, 1 input worker", num_workers=1),
    _raydist("raydist, 2 input workers", num_workers=2),
    _raydist("raydist, 1 call by hand", num_calls=1),
    _raydist("raydist, 2 calls by hand", num_calls=2),
    _raydist("raydist, 4 calls by hand", num_calls=4),
    Contender("raydist, zero_copy", "raydist_zero_copy", "raydist", is_peer=False),
    Contender("ray.put + ray.get", "bare_ray", "ray", is_peer=False),
    Contender("tf.data", "tf_data", "tensorflow-cpu"),
    Contender("tf.data service, 2 workers", "tf_data_service", "tensorflow-cpu", num_workers=2),
    Contender("DataLoader", "dataloader", "torch"),
    Contender("DataLoader, 2 workers", "dataloader", "torch", num_workers=2),
    Contender("Ray Data", "ray_data", "ray", num_workers=2),
    Contender("grain", "grain_pipelines", "grain"),
    Contender("SPDL", "spdl_pipelines", "spdl"),
)
CONTENDERS: Mapping[str, Contender] = MappingProxyType({contender.label: contender for contender in _ALL})
