"""The tasks of a cluster and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from raydist.errors import InvalidArgumentError

__all__ = ["ClusterSpec"]


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
