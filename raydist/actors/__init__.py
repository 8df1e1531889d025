"""All Ray actors, and the handles by which the driver and other actors call them.

A class `...Host`, `InputPipeline` or `InputWorker` runs inside an actor. A class `...Actors` (`ReplicaActors`,
`ServerActors`, `InputPipelineActors`, `WorkerActors`) is the driver's set of handles. Links (`PipelineLink`) and
connections (`RayConnection`) carry calls. Code inside an actor that is not about Ray lies in other packages: the steps
of a replica in `replicas/`, a server's state in `parameter_servers/`, the input engine in `pipelines/`.

"Worker" has three meanings: an *input worker* (`workers/`) runs functions of a dataset; a *worker* of a strategy is a
group of replicas that are placed on one node (`epochs/merged_epoch.py`); a worker of the coordinator
(`worker_actors.py`) is one replica that goes at its own pace.

Begin with `epochs/input_pipeline.py`. A batch passes `epochs/epoch_producer.py`, `epochs/served_epoch.py` (queues),
then `readers/step_reader.py` and `readers/replica_iterator.py`. Blocks of the pipeline pass `workers/pool.py` and
`workers/worker.py`.
"""
