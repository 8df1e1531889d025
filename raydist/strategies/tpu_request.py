"""What a user asks for in TPUs: by names, a cluster resolver, or what Ray Train calls a ScalingConfig. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from raydist.context.cluster_resolver import ClusterResolver
from raydist.errors import InvalidArgumentError
from raydist.tpu_slices.shape import SliceShape, check_names

__all__ = ["TpuRequest"]


@final
@dataclass(frozen=True, slots=True)
class TpuRequest:
    """What was said; None: left open.

    Attributes:
        topology: Of the slice, as Ray writes it.
        version: Of its chips, as Ray writes it.
        num_hosts: Of the slice.
        chips: Of each host.
    """

    topology: str | None = None
    version: str | None = None
    num_hosts: int | None = None
    chips: int | None = None

    @staticmethod
    def of(topology: str | None, accelerator_version: str | None, cluster_resolver: Any) -> TpuRequest:
        """What the arguments of the strategy say together.

        Raises:
            InvalidArgumentError: One is nothing that there is, or they contradict each other.

        >>> TpuRequest.of("2x2x2", "TPU-V4", None)
        TpuRequest(topology='2x2x2', version='v4', num_hosts=None, chips=None)
        """
        request = TpuRequest(*check_names(topology, accelerator_version))
        if cluster_resolver is None:
            return request
        if isinstance(cluster_resolver, ClusterResolver):
            return request._with_resolver(cluster_resolver)
        return request._with_scaling_config(cluster_resolver)

    def _with_resolver(self, resolver: ClusterResolver) -> TpuRequest:
        spec = resolver.cluster_spec()
        hosts = sum(len(spec.as_dict().get(job, ())) for job in ("chief", "worker"))
        return replace(self, num_hosts=hosts or None, chips=resolver.num_accelerators().get("TPU"))

    def _with_scaling_config(self, config: Any) -> TpuRequest:
        if not getattr(config, "use_tpu", False):
            raise InvalidArgumentError(
                "cluster_resolver must be an rd.ClusterResolver, or a ray.train.ScalingConfig with use_tpu=True, got "
                f"{config!r:.300}."
            )
        topology, version = check_names(getattr(config, "topology", None), getattr(config, "accelerator_type", None))
        for mine, theirs, name in ((self.topology, topology, "topology"), (self.version, version, "version")):
            if None not in (mine, theirs) and mine != theirs:
                raise InvalidArgumentError(
                    f"The {name} of the slice is {mine!r}, but the ScalingConfig says {theirs!r}. Leave one out."
                )
        count = getattr(config, "num_workers", None)
        return replace(
            self,
            topology=self.topology or topology,
            version=self.version or version,
            num_hosts=count if isinstance(count, int) else None,  # or (least, most), which says little
        )

    def require(self, shape: SliceShape) -> SliceShape:
        """The slice that was found.

        Raises:
            InvalidArgumentError: The resolver says something else.
        """
        for name, said, found in (
            ("hosts", self.num_hosts, shape.num_hosts),
            ("chips on each host", self.chips, shape.chips_per_host),
        ):
            if said not in (None, found):
                raise InvalidArgumentError(
                    f"The cluster resolver says {said} {name}, but a {shape} has {found}. Name the hosts of one slice, "
                    "or leave cluster_resolver out."
                )
        return shape
