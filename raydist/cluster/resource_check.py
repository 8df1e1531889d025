"""Check if nodes can hold bundles of resources, from the amounts alone. Does no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Amounts = Mapping[str, float]


def why_never(bundles: Sequence[Amounts], nodes: Sequence[Amounts], strategy: str) -> str | None:
    """Return why these nodes could not hold the bundles even if they were empty; None if they could.

    Args:
        bundles: Resources of each bundle.
        nodes: Total resources of each node, in use or not.
        strategy: Ray's placement strategy: STRICT_PACK needs one node, STRICT_SPREAD a node for each bundle.

    >>> why_never([{"GPU": 1.0}], [{"CPU": 8.0}], "PACK")
    'no node has 1 GPU: the most is 0'
    >>> why_never([{"CPU": 2.0}] * 3, [{"CPU": 4.0}], "STRICT_PACK")
    'no node has 6 CPU, for 3 together: the most is 4'
    >>> why_never([{"CPU": 2.0}] * 3, [{"CPU": 4.0}, {"CPU": 4.0}], "STRICT_SPREAD")
    '3 nodes are needed, one for each, and 2 could hold one'
    >>> why_never([{"CPU": 2.0}] * 3, [{"CPU": 4.0}, {"CPU": 4.0}], "PACK")
    """
    for bundle in bundles:
        if not any(_fits(bundle, node) for node in nodes):
            return _too_much(bundle, nodes, "")
    if strategy == "STRICT_PACK":
        together = _sum(bundles)
        fits = any(_fits(together, node) for node in nodes)
        return None if fits else _too_much(together, nodes, f", for {len(bundles)} together")
    if strategy == "STRICT_SPREAD":
        held = _most_apart(bundles, nodes)
        needed = f"{len(bundles)} nodes are needed, one for each, and {held} could hold one"
        return None if held == len(bundles) else needed
    return _too_many(bundles, nodes)


def _fits(bundle: Amounts, node: Amounts) -> bool:
    return all(amount <= node.get(name, 0.0) + 1e-9 for name, amount in bundle.items())


def _sum(amounts: Sequence[Amounts]) -> dict[str, float]:
    names = dict.fromkeys(name for one in amounts for name in one)
    return {name: sum(one.get(name, 0.0) for one in amounts) for name in names}


def _too_much(wanted: Amounts, nodes: Sequence[Amounts], what_for: str) -> str:
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in wanted}
    lacking = [name for name, amount in wanted.items() if amount > most[name] + 1e-9] or list(wanted)
    asked = " and ".join(f"{wanted[name]:g} {name}" for name in lacking)
    there = " and ".join(f"{most[name]:g}" for name in lacking)
    together = " on one node" if len(lacking) > 1 else ""
    return f"no node has {asked}{together}{what_for}: the most is {there}"


def _too_many(bundles: Sequence[Amounts], nodes: Sequence[Amounts]) -> str | None:
    """Return what is lacking in all nodes together: exact for equal bundles, else a comparison of the sums."""
    kinds = {tuple(sorted(bundle.items())) for bundle in bundles}
    if len(kinds) == 1:
        room = sum(_how_many(bundles[0], node, len(bundles)) for node in nodes)
        return None if room >= len(bundles) else f"all nodes together have room for {room}, not {len(bundles)}"
    wanted, there = _sum(bundles), _sum(nodes)
    lacking = [name for name, amount in wanted.items() if amount > there.get(name, 0.0) + 1e-9]
    said = " and ".join(f"{there.get(name, 0.0):g} {name}, not {wanted[name]:g}" for name in lacking)
    return f"all nodes together have {said}" if lacking else None


def _how_many(bundle: Amounts, node: Amounts, most: int) -> int:
    counts = [int((node.get(name, 0.0) + 1e-9) / amount) for name, amount in bundle.items() if amount > 0]
    return min([most, *counts])


def _most_apart(bundles: Sequence[Amounts], nodes: Sequence[Amounts]) -> int:
    """Return how many bundles can have a node of their own, by augmenting paths of a bipartite matching."""
    holder: dict[int, int] = {}

    def place(bundle: int, tried: set[int]) -> bool:
        for node in range(len(nodes)):
            if node not in tried and _fits(bundles[bundle], nodes[node]):
                tried.add(node)
                if node not in holder or place(holder[node], tried):
                    holder[node] = bundle
                    return True
        return False

    return sum(place(bundle, set()) for bundle in range(len(bundles)))
