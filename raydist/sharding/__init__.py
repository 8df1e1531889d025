"""Modules whose parameters are divided among replicas, by `torch.distributed.fsdp.fully_shard`.

`units` decides, without processes, which submodules are gathered together; `sharded_modules` shards on a replica.
"""
