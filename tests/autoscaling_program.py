"""A program on an autoscaling cluster, in a process of its own; prints one line of JSON."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch

import raydist as rd

TRAIN, INPUT = {"CPU": 1.0, "train": 1.0}, {"CPU": 1.0, "input": 1.0}
LIMITS = rd.Timeouts(start_s=60, idle_s=2.0, element_s=60)
GONE_S = 30.0
ELASTIC_S = 150.0


def living() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def until_one_is_left() -> int:
    """Return the number of nodes once the idle ones have gone."""
    end = time.monotonic() + GONE_S
    while len(living()) > 1 and time.monotonic() < end:
        time.sleep(0.2)
    return len(living())


def node_of(x: Any) -> Any:
    time.sleep(0.1)
    return int(ray.get_runtime_context().get_node_id()[-5:])


def train_on_two_more_nodes() -> dict[str, Any]:
    with rd.MultiWorkerMirroredStrategy(2, 1, resources_per_replica=TRAIN, timeouts=LIMITS) as strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.nn.init.zeros_(model.weight)

        def step(batch: torch.Tensor) -> tuple[torch.Tensor, str]:
            optimizer.zero_grad()
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            return loss, ray.get_runtime_context().get_node_id()

        nodes: set[str] = set()
        for batch in strategy.distribute_dataset(rd.Dataset.from_tensor_slices(torch.ones(16, 2)).batch(4)):
            _, node = strategy.run(step, args=(batch,))
            nodes.update(strategy.local_results(node))
        weights = model.weight.detach().tolist()
        during = len(living())
    return {"weights": weights, "trained_on": len(nodes), "nodes": during, "left": until_one_is_left()}


def lose_a_node() -> dict[str, Any]:
    """The node of replica 1 is lost once; the autoscaler adds another one in its place."""
    with (
        tempfile.TemporaryDirectory() as folder,
        rd.MultiWorkerMirroredStrategy(2, 1, resources_per_replica=TRAIN, timeouts=LIMITS) as strategy,
    ):
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.nn.init.zeros_(model.weight)
        lost = Path(folder) / "lost"

        def step(number: int) -> str:
            optimizer.zero_grad()
            model(torch.ones(1, 2)).mean().backward()
            if number == 3 and rd.get_replica_context().replica_id_in_sync_group == 1 and not lost.exists():
                lost.touch()
                os.kill(os.getppid(), signal.SIGKILL)  # the node's raylet
                time.sleep(60)
            optimizer.step()
            node: str = ray.get_runtime_context().get_node_id()
            return node

        steps = [strategy.run(step, args=(number,)) for number in range(6)]
        nodes = [strategy.local_results(each)[-1] for each in (steps[0], steps[-1])]
        weights = model.weight.detach().tolist()
        ranks = [failure.ranks for failure in strategy.failures()]
    return {"weights": weights, "moved": nodes[0] != nodes[1], "ranks": ranks, "left": until_one_is_left()}


def lose_a_node_of_an_elastic_strategy() -> dict[str, Any]:
    """Training goes on with one replica, and with two once the autoscaler has added a node."""
    elastic = rd.Elastic(min_replicas=1, max_replicas=2, grow_after_s=1)
    options = rd.FailureOptions(replace_s=1, elastic=elastic)
    strategy = rd.MultiWorkerMirroredStrategy(
        2, 1, resources_per_replica=TRAIN, timeouts=LIMITS, failure_options=options
    )
    with strategy:
        with strategy.scope():
            model = torch.nn.Linear(2, 1, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.nn.init.zeros_(model.weight)

        def step(batch: torch.Tensor) -> tuple[list[int], str, int]:
            optimizer.zero_grad()
            model(torch.ones(len(batch), 2)).mean().backward()
            optimizer.step()
            time.sleep(0.05)
            return batch.tolist(), ray.get_runtime_context().get_node_id(), os.getppid()

        nodes: list[tuple[str, ...]] = []  # of the replicas
        rows: list[int] = []
        end = time.monotonic() + ELASTIC_S
        for number, batch in enumerate(strategy.distribute_dataset(rd.Dataset.range(100_000).batch(4))):
            results = strategy.local_results(strategy.run(step, args=(batch,)))
            rows += [row for part, *_ in results for row in part]
            if number == 10:
                os.kill(results[1][2], signal.SIGKILL)  # the node's raylet
            present = tuple(node for _, node, _ in results)
            if len(present) == strategy.num_replicas_in_sync and nodes[-1:] != [present]:
                nodes.append(present)
            if (len({*present}) == 2 and present != nodes[0]) or time.monotonic() > end:
                break
        steps = number + 1
        weight = float(model.weight.detach()[0, 0])
        lost = sum(failure.num_lost_results for failure in strategy.failures())
    return {
        "first": len({*nodes[0]}),
        "last": len({*nodes[-1]} - {nodes[0][1]}),
        "changes": len(nodes) - 1,
        "weight_differs": abs(weight + 0.1 * steps) / steps,
        "doubled": len(rows) - len(set(rows)),
        "absent": 4 * steps - len(rows) - 2 * lost,
        "left": until_one_is_left(),
    }


def read_on_nodes_that_come() -> dict[str, Any]:
    """No node has room for the input workers."""
    options = rd.InputOptions(num_input_workers=2, resources_per_input_worker=INPUT)
    with rd.MirroredStrategy(1, timeouts=LIMITS) as strategy:
        numbers = rd.Dataset.range(4000).map(node_of, num_parallel_calls=rd.AUTOTUNE).batch(4)
        seen: set[int] = set()
        end = time.monotonic() + 90
        for batch in strategy.distribute_dataset(numbers, options):
            seen.update(strategy.local_results(batch)[0].tolist())
            if len(seen) > 1 or time.monotonic() > end:
                break
        del batch
        left = until_one_is_left()
    return {"read_on": len(seen), "left": left}


def ask_for_too_much() -> dict[str, Any]:
    began = time.monotonic()
    limits = rd.Timeouts(start_s=50)
    with rd.MirroredStrategy(1, resources_per_replica={"CPU": 16.0}, timeouts=limits) as strategy:
        try:
            with strategy.scope():
                pass
        except rd.FailedPreconditionError as error:
            return {"error": str(error), "seconds": time.monotonic() - began}
    return {}


if __name__ == "__main__":
    os.environ["RAY_SCHEDULER_EVENTS"] = "0"
    programs = [ask_for_too_much, train_on_two_more_nodes, read_on_nodes_that_come, lose_a_node]
    programs.append(lose_a_node_of_an_elastic_strategy)
    print(json.dumps({program.__name__: program() for program in programs}))
