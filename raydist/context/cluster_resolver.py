"""Cluster specifications, and resolvers that find them."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

from raydist.core.errors import InvalidArgumentError

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


class _KnownCluster(ClusterResolver):
    """A resolver that knows everything from its beginning."""

    def __init__(self, spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
        self._spec = spec
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        return self._spec

    @property
    def task_type(self) -> str | None:
        return self._task_type

    @property
    def task_id(self) -> int | None:
        return self._task_id


@final
class SimpleClusterResolver(_KnownCluster):
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
        super().__init__(cluster_spec, task_type, task_id)
        self._accelerators = dict(num_accelerators or {})

    def num_accelerators(self) -> dict[str, int]:
        return dict(self._accelerators)


@final
class TFConfigClusterResolver(_KnownCluster):
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
        spec = ClusterSpec(config.get("cluster", {}))
        task = config.get("task", {})
        if not isinstance(task, dict) or not _is_task(task.get("type"), task.get("index")):
            raise InvalidArgumentError(
                f'The task of {_VARIABLE} must be as {{"type": "worker", "index": 0}}, got {task!r}. Set it right, or '
                "leave it out."
            )
        index = task.get("index") if task_id is None else task_id
        kind = task.get("type") if task_type is None else task_type
        super().__init__(spec, kind, None if index is None else int(index))


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


@final
class ClusterSpec:
    """Addresses of tasks, by job. Immutable.

    Args:
        cluster: A list of addresses ("host" or "host:port") for each job name, or another ClusterSpec.

    Raises:
        InvalidArgumentError: `cluster` is something else.

    Source: tf.train.ClusterSpec.

    >>> spec = rd.ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
    >>> spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)
    (['worker'], 2, '10.0.0.2:2222')
    """

    def __init__(self, cluster: Mapping[str, Sequence[str]] | ClusterSpec) -> None:
        given = cluster.as_dict() if isinstance(cluster, ClusterSpec) else cluster
        if not isinstance(given, Mapping) or not all(_is_job(name, tasks) for name, tasks in given.items()):
            raise InvalidArgumentError(
                f'A ClusterSpec is a dict of lists of addresses, as {{"worker": ["10.0.0.1:22"]}}, got {given!r:.99}.'
            )
        self._tasks = {name: tuple(tasks) for name, tasks in given.items()}

    def as_dict(self) -> dict[str, list[str]]:
        """Return the addresses of each job. Does not block.

        Returns:
            A new dict of new lists.

        Source: tf.train.ClusterSpec.as_dict.

        >>> rd.ClusterSpec({"worker": ["a:1"]}).as_dict()
        {'worker': ['a:1']}
        """
        return {name: list(tasks) for name, tasks in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """Names of the jobs, in the given order.

        Source: tf.train.ClusterSpec.jobs.

        >>> rd.ClusterSpec({"chief": ["a:1"], "worker": ["b:1"]}).jobs
        ['chief', 'worker']
        """
        return list(self._tasks)

    def job_tasks(self, job_name: str) -> list[str]:
        """Return the addresses of one job's tasks.

        Args:
            job_name: Name of the job.

        Raises:
            InvalidArgumentError: There is no such job.

        Source: tf.train.ClusterSpec.job_tasks.

        >>> rd.ClusterSpec({"worker": ["a:1", "b:1"]}).job_tasks("worker")
        ['a:1', 'b:1']
        """
        if job_name not in self._tasks:
            raise InvalidArgumentError(f"A job must be one of {self.jobs}, got {job_name!r}.")
        return list(self._tasks[job_name])

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job.

        Args:
            job_name: Name of the job.

        Raises:
            InvalidArgumentError: There is no such job.

        Source: tf.train.ClusterSpec.num_tasks.

        >>> rd.ClusterSpec({"worker": ["a:1", "b:1"]}).num_tasks("worker")
        2
        """
        return len(self.job_tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task.

        Args:
            job_name: Name of the job.
            task_index: Index of the task in the job, from 0.

        Raises:
            InvalidArgumentError: There is no such task.

        Source: tf.train.ClusterSpec.task_address.

        >>> rd.ClusterSpec({"worker": ["a:1", "b:1"]}).task_address("worker", 0)
        'a:1'
        """
        tasks = self.job_tasks(job_name)
        if not 0 <= task_index < len(tasks):
            raise InvalidArgumentError(
                f"A task of {job_name!r} must be one of 0 .. {len(tasks) - 1}, got {task_index!r}."
            )
        return tasks[task_index]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(tuple(self._tasks.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _is_job(name: Any, tasks: Any) -> bool:
    return isinstance(name, str) and isinstance(tasks, list | tuple) and all(isinstance(task, str) for task in tasks)


def host_of(address: str) -> str:
    """Return the host of "host", "host:port", "[v6]:port" or a bare v6 address.

    >>> host_of("10.0.0.1:2222"), host_of("[::1]:5"), host_of("::1")
    ('10.0.0.1', '::1', '::1')
    """
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address
