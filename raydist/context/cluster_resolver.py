"""Cluster resolvers: the machines of a strategy, from TF_CONFIG or from the program."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, final

from raydist.context.cluster_spec import ClusterSpec
from raydist.errors import InvalidArgumentError

__all__ = ["ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"]

_VARIABLE = "TF_CONFIG"


class ClusterResolver(ABC):
    """The workers of a strategy: a base class. Derive from it to ask a scheduler of your own.

    Source: tf.distribute.cluster_resolver.ClusterResolver.

    >>> class Rack(rd.ClusterResolver):
    ...     def cluster_spec(self):
    ...         return rd.ClusterSpec({"worker": [f"10.0.0.{number}" for number in (1, 2, 3)]})
    >>> Rack().cluster_spec().num_tasks("worker")
    3
    """

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks: those of the job "worker", and of "chief" if the first worker has that name.

        An empty ClusterSpec leaves the choice to the Ray cluster.

        Source: tf.distribute.cluster_resolver.ClusterResolver.cluster_spec.

        >>> rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1"]})).cluster_spec()
        ClusterSpec({'worker': ['a:1']})
        """

    @property
    def task_type(self) -> str | None:
        """Job of this process; None if unknown.

        Source: tf.distribute.cluster_resolver.ClusterResolver.task_type.

        >>> rd.SimpleClusterResolver(rd.ClusterSpec({}), task_type="worker", task_id=0).task_type
        'worker'
        """
        return None

    @property
    def task_id(self) -> int | None:
        """Index of this process in its job; None if unknown.

        Source: tf.distribute.cluster_resolver.ClusterResolver.task_id.

        >>> rd.SimpleClusterResolver(rd.ClusterSpec({}), task_type="worker", task_id=0).task_id
        0
        """
        return None

    def num_accelerators(self) -> dict[str, int]:
        """Return the number of GPUs of each worker, as {"GPU": 2}; an empty dict means all GPUs of the nodes.

        Source: tf.distribute.cluster_resolver.ClusterResolver.num_accelerators.

        >>> rd.SimpleClusterResolver(rd.ClusterSpec({}), num_accelerators={"GPU": 2}).num_accelerators()
        {'GPU': 2}
        """
        return {}

    def master(self) -> str:
        """Return the address of the task that runs the program: the chief, else the first worker; "" without workers.

        Source: tf.distribute.cluster_resolver.ClusterResolver.master.

        >>> rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["a:1", "b:1"]})).master()
        'a:1'
        """
        return next(iter(self._workers()), "")

    def _workers(self) -> list[str]:
        """Return the addresses of the workers, the chief first."""
        tasks = self.cluster_spec().as_dict()
        return [*tasks.get("chief", ()), *tasks.get("worker", ())]


@final
class SimpleClusterResolver(ClusterResolver):
    """A resolver with workers that the program names.

    Args:
        cluster_spec: Addresses of the workers: each must be a node of the Ray cluster.
        task_type: The job of this process.
        task_id: Index of this process in its job.
        num_accelerators: Accelerators of each worker, as {"GPU": 2}.

    Raises:
        InvalidArgumentError: `cluster_spec` is not a ClusterSpec.

    Source: tf.distribute.cluster_resolver.SimpleClusterResolver.

    >>> resolver = rd.SimpleClusterResolver(rd.ClusterSpec({"worker": ["10.0.0.1", "10.0.0.2"]}))
    >>> rd.MultiWorkerMirroredStrategy(cluster_resolver=resolver).cluster_resolver is resolver
    True
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        task_type: str | None = None,
        task_id: int | None = None,
        num_accelerators: Mapping[str, int] | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise InvalidArgumentError(
                f"SimpleClusterResolver takes an rd.ClusterSpec, got {cluster_spec!r}. Write rd.ClusterSpec(...)."
            )
        self._spec = cluster_spec
        self._task_type = task_type
        self._task_id = task_id
        self._accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    @property
    def task_type(self) -> str | None:
        return self._task_type

    @property
    def task_id(self) -> int | None:
        return self._task_id

    def num_accelerators(self) -> dict[str, int]:
        return dict(self._accelerators)


@final
class TFConfigClusterResolver(ClusterResolver):
    """A resolver with the workers of the environment variable TF_CONFIG, which the constructor reads.

    Without the variable the resolver leaves everything to the Ray cluster.

    Args:
        task_type: Job of this process; overrides TF_CONFIG.
        task_id: Index of this process in its job; overrides TF_CONFIG.

    Raises:
        InvalidArgumentError: TF_CONFIG is not a JSON object, or its parts are invalid.

    Source: tf.distribute.cluster_resolver.TFConfigClusterResolver.

    >>> import os
    >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
    >>> resolver = rd.TFConfigClusterResolver()
    >>> del os.environ["TF_CONFIG"]
    >>> resolver.cluster_spec(), resolver.task_type, resolver.task_id
    (ClusterSpec({'worker': ['a:1', 'b:1']}), 'worker', 0)
    """

    def __init__(self, task_type: str | None = None, task_id: int | None = None) -> None:
        config = _read(os.environ.get(_VARIABLE, ""))
        self._spec = ClusterSpec(config.get("cluster", {}))
        task = config.get("task", {})
        if not isinstance(task, dict) or not _is_task(task.get("type"), task.get("index")):
            raise InvalidArgumentError(
                f'The task of {_VARIABLE} must be as {{"type": "worker", "index": 0}}, got {task!r}. Set it right, or '
                "leave it out."
            )
        self._task_type: str | None = task.get("type") if task_type is None else task_type
        index = task.get("index") if task_id is None else task_id
        self._task_id = None if index is None else int(index)

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    @property
    def task_type(self) -> str | None:
        return self._task_type

    @property
    def task_id(self) -> int | None:
        return self._task_id


def _read(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"{_VARIABLE} must be JSON, got {text!r:.300}: {error}. Set it right, or unset it to take the nodes of the "
            "Ray cluster."
        ) from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{_VARIABLE} must be a JSON object, got {text!r:.300}. Set it right, or unset it.")
    return config


def _is_task(kind: Any, index: Any) -> bool:
    digits = "0" if index is None else str(index)  # launchers write a number or a string
    return (kind is None or isinstance(kind, str)) and digits.isdecimal() and len(digits) < 10
