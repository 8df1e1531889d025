"""How steps and what they return travel between the driver and replicas."""
