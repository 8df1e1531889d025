"""Modules whose parameters are divided among replicas, by `fully_shard`, or by stages of a pipeline.

`units` decides, without processes, which submodules are gathered together; `sharded_modules` shards on a replica.
`stages` decides which parts of a module belong to which stage; `pipelined_module` computes one, `pipelines` all.
"""
