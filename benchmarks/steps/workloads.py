"""What is measured, and who takes part."""

from __future__ import annotations

from dataclasses import dataclass

DDP, RAY_TRAIN, TENSORFLOW = "DDP", "Ray Train", "TensorFlow"
ONE_REPLICA = "raydist, one replica, 2 threads"
STOCK, OWN, COMMUNICATOR = "Ray's GLOO", "raydist, Ray's functions", "raydist, communicator"
FLOOR = "torch alone, nothing exchanged"
BARE, STRATEGY = "bare loop", "OneDeviceStrategy"
PEERS = ("tf_mirrored", "tf_servers")
"""Contenders that need the peers' environment. The others get along with what raydist needs itself."""


@dataclass(frozen=True)
class Line:
    """One way to do a workload.

    Attributes:
        label: As the table shows it.
        contender: Name of its module; lines of the same contender share its process.
        run: Name of what it makes for this line.
        variant: What it does it with, where a workload has several; compared with lines of the same variant.
        package: Where that module lies.
    """

    label: str
    contender: str
    run: str
    variant: str = ""
    package: str = "benchmarks.steps.peers"

    @property
    def module(self) -> str:
        """Its module's full name."""
        return f"{self.package}.{self.contender}"

    @property
    def name(self) -> str:
        """Label and variant."""
        return f"{self.label}: {self.variant}" if self.variant else self.label

    @property
    def is_peer(self) -> bool:
        """Whether it runs in the peers' environment instead of raydist's."""
        return self.contender in PEERS


@dataclass(frozen=True)
class Workload:
    """One table.

    Attributes:
        name: What `--only` takes.
        description: In words.
        lines: All ways to do it.
        references: Labels of the lines that the others are compared with.
        ranks: Replicas, or members of a group.
        target_s: Seconds of a pass; 0 for a single repetition.
        most_repeats: Passes at most, where one takes long.
        tells_cpu: Whether the table has columns for the CPU time by kind of process.
        servers: Parameter servers; the table tells their CPU time then.
        unit: What a repetition is, where the table is to tell how many there are a second.
    """

    name: str
    description: str
    lines: tuple[Line, ...]
    references: tuple[str, ...]
    ranks: int = 2
    target_s: float = 2.0
    most_repeats: int = 99
    tells_cpu: bool = True
    servers: int = 0
    unit: str = ""


_STEP_LINES = (
    Line("raydist, same batch", "raydist_replicas", "same"),
    Line("raydist, loop", "raydist_replicas", "loop"),
    Line("raydist, run", "raydist_replicas", "run"),
    Line("raydist, read", "raydist_replicas", "read"),
    Line(ONE_REPLICA, "raydist_one", "run"),
    Line(DDP, "ddp", "step"),
    Line(RAY_TRAIN, "ray_train", "step"),
    Line(TENSORFLOW, "tf_mirrored", "step"),
    Line(FLOOR, "ddp", "alone"),
)
_NODES_LINES = (
    *(Line(f"raydist, {way}", "raydist_nodes", way.split()[0]) for way in ("same batch", "loop", "run", "read")),
    Line("raydist, drawing alone", "raydist_nodes", "draw"),
    Line(DDP, "ddp", "step"),
    Line(FLOOR, "ddp", "alone"),
)
_DRAWING = Line("raydist, drawing alone", "raydist_replicas", "draw")
_LIBRARIES = (DDP, RAY_TRAIN, TENSORFLOW)


def _all_reduce(ranks: int) -> Workload:
    lines = tuple(
        line
        for size in ("4 KB", "1 MB", "10 MB", "100 MB")
        for line in (
            Line(OWN, "ray_collective", f"raydist {size}", size),
            Line(COMMUNICATOR, "ray_collective", f"communicator {size}", size),
            Line(STOCK, "ray_collective", f"gloo {size}", size),
            Line("torch.distributed gloo", "torch_gloo", size, size),
        )
    )
    return Workload(
        f"allreduce_{ranks}",
        f"all-reduce of float32 between {ranks} processes of one host",
        lines,
        (STOCK,),
        ranks,
        target_s=0.6,
        tells_cpu=False,
    )


WORKLOADS = (
    Workload("mlp16", "MLP of 13k parameters, 128 rows a step", (*_STEP_LINES, _DRAWING), _LIBRARIES),
    Workload("mlp1024", "MLP of 1.9M parameters, 256 rows a step", _STEP_LINES, _LIBRARIES),
    Workload("mlp1024_nodes", "MLP of 1.9M parameters, 256 rows a step, 2 nodes of 1 replica", _NODES_LINES, (DDP,)),
    Workload("cnn", "CNN of 421k parameters, 256 rows a step", _STEP_LINES, _LIBRARIES),
    Workload(
        "start",
        "from making a strategy (or trainer) to its first step, 2 replicas",
        (
            Line("raydist, Ray is up", "raydist_replicas", "start"),
            Line("raydist, from nothing", "raydist_from_nothing", "start"),
            Line("Ray Train, Ray is up", "ray_train", "start"),
        ),
        ("Ray Train, Ray is up",),
        target_s=0.0,
        most_repeats=3,
        tells_cpu=False,
    ),
    _all_reduce(2),
    _all_reduce(4),
    Workload(
        "one_device",
        "CPU outside of the step itself, steps of 0.5 ms and 5 ms in this process",
        tuple(
            line
            for step in ("0.5 ms", "5 ms")
            for line in (
                Line(STRATEGY, "one_device", f"strategy {step}", step),
                Line(BARE, "one_device", f"bare {step}", step),
            )
        ),
        (BARE,),
        tells_cpu=False,
    ),
)
