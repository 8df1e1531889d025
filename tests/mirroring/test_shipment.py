"""Shipments."""

from __future__ import annotations

import pickle

from raydist.mirroring.shipment import Shipment
from raydist.values import PerReplica


def test_parts_stay_with_the_driver() -> None:
    shipment = Shipment(bundle=b"12", arguments=b"345", digest=b"d", per_replica=(PerReplica([1]),))
    received = pickle.loads(pickle.dumps(shipment))
    assert received == shipment.without_parts()
    assert received.per_replica == ()
    assert shipment.num_bytes == received.num_bytes == 5
