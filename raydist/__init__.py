"""tf.data and tf.distribute for PyTorch, on Ray.

`import raydist as rd` provides the public names below. Each name is imported at its first use, so that importing
raydist loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist import feature as feature
    from raydist import image as image
    from raydist import ml as ml
    from raydist import serve as serve
    from raydist import summary as summary
    from raydist import text as text
    from raydist import tune as tune
    from raydist import video as video
    from raydist.checkpoints.checkpoint import Checkpoint as Checkpoint
    from raydist.checkpoints.listing import checkpoints_iterator as checkpoints_iterator
    from raydist.checkpoints.listing import latest_checkpoint as latest_checkpoint
    from raydist.checkpoints.manager import CheckpointManager as CheckpointManager
    from raydist.checkpoints.object_state import State as State
    from raydist.checkpoints.saves import SaveHandle as SaveHandle
    from raydist.context.cluster_resolver import ClusterResolver as ClusterResolver
    from raydist.context.cluster_resolver import ClusterSpec as ClusterSpec
    from raydist.context.cluster_resolver import SimpleClusterResolver as SimpleClusterResolver
    from raydist.context.cluster_resolver import TFConfigClusterResolver as TFConfigClusterResolver
    from raydist.context.current import has_strategy as has_strategy
    from raydist.context.current import in_cross_replica_context as in_cross_replica_context
    from raydist.context.replica_context import ReplicaContext as ReplicaContext
    from raydist.context.strategy import Strategy as Strategy
    from raydist.context.strategy_values import StrategyStats as StrategyStats
    from raydist.context.strategy_values import ValueContext as ValueContext
    from raydist.coordinator.remote_value import RemoteValue as RemoteValue
    from raydist.core.errors import CancelledError as CancelledError
    from raydist.core.errors import CollectiveMismatchError as CollectiveMismatchError
    from raydist.core.errors import DataLossError as DataLossError
    from raydist.core.errors import DeadlineExceededError as DeadlineExceededError
    from raydist.core.errors import FailedPreconditionError as FailedPreconditionError
    from raydist.core.errors import InvalidArgumentError as InvalidArgumentError
    from raydist.core.errors import NotFoundError as NotFoundError
    from raydist.core.errors import OutOfRangeError as OutOfRangeError
    from raydist.core.errors import Preempted as Preempted
    from raydist.core.errors import RaydistError as RaydistError
    from raydist.core.errors import SpecError as SpecError
    from raydist.core.errors import UnavailableError as UnavailableError
    from raydist.core.values import AUTOTUNE as AUTOTUNE
    from raydist.core.values import INFINITE_CARDINALITY as INFINITE_CARDINALITY
    from raydist.core.values import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
    from raydist.core.values import InputContext as InputContext
    from raydist.core.values import PerReplica as PerReplica
    from raydist.core.values import ReduceOp as ReduceOp
    from raydist.core.values import Replicated as Replicated
    from raydist.dataset import Dataset as Dataset
    from raydist.dataset.readers import FixedLengthRecordDataset as FixedLengthRecordDataset
    from raydist.dataset.readers import TextLineDataset as TextLineDataset
    from raydist.dataset.readers import TFRecordDataset as TFRecordDataset
    from raydist.datasets.builder import DatasetBuilder as DatasetBuilder
    from raydist.datasets.builder import DatasetInfo as DatasetInfo
    from raydist.datasets.loading import builder as builder
    from raydist.datasets.loading import list_builders as list_builders
    from raydist.datasets.loading import load as load
    from raydist.distributed_dataset import DistributedDataset as DistributedDataset
    from raydist.distributed_dataset import DistributedIterator as DistributedIterator
    from raydist.estimator.canned import DNNClassifier as DNNClassifier
    from raydist.estimator.canned import DNNLinearCombinedClassifier as DNNLinearCombinedClassifier
    from raydist.estimator.canned import DNNLinearCombinedRegressor as DNNLinearCombinedRegressor
    from raydist.estimator.canned import DNNRegressor as DNNRegressor
    from raydist.estimator.canned import LinearClassifier as LinearClassifier
    from raydist.estimator.canned import LinearRegressor as LinearRegressor
    from raydist.estimator.estimator import Estimator as Estimator
    from raydist.estimator.ftrl import Ftrl as Ftrl
    from raydist.estimator.model_fn_module import get_or_create as get_or_create
    from raydist.estimator.spec import EstimatorSpec as EstimatorSpec
    from raydist.estimator.spec import EvalSpec as EvalSpec
    from raydist.estimator.spec import ModeKeys as ModeKeys
    from raydist.estimator.spec import RunConfig as RunConfig
    from raydist.estimator.spec import TrainSpec as TrainSpec
    from raydist.estimator.train_and_evaluate import model_to_estimator as model_to_estimator
    from raydist.estimator.train_and_evaluate import train_and_evaluate as train_and_evaluate
    from raydist.mirroring.aggregation import set_aggregation as set_aggregation
    from raydist.options import AutoShardPolicy as AutoShardPolicy
    from raydist.options import AutotuneOptions as AutotuneOptions
    from raydist.options import CommunicationOptions as CommunicationOptions
    from raydist.options import Elastic as Elastic
    from raydist.options import FailureOptions as FailureOptions
    from raydist.options import InputOptions as InputOptions
    from raydist.options import InputReplicationMode as InputReplicationMode
    from raydist.options import OptimizationOptions as OptimizationOptions
    from raydist.options import Options as Options
    from raydist.options import RunOptions as RunOptions
    from raydist.options import ThreadingOptions as ThreadingOptions
    from raydist.options import Timeouts as Timeouts
    from raydist.parameter_servers.consistency import BoundedStaleness as BoundedStaleness
    from raydist.parameter_servers.consistency import SyncWithBackups as SyncWithBackups
    from raydist.parameter_servers.requests import ServerStats as ServerStats
    from raydist.parameter_servers.sharded_embedding import ShardedEmbedding as ShardedEmbedding
    from raydist.parameter_servers.slices import FixedShardsPartitioner as FixedShardsPartitioner
    from raydist.parameter_servers.slices import MaxSizePartitioner as MaxSizePartitioner
    from raydist.parameter_servers.slices import MinSizePartitioner as MinSizePartitioner
    from raydist.pipelines.elements.spec import DatasetSpec as DatasetSpec
    from raydist.pipelines.elements.spec import TensorSpec as TensorSpec
    from raydist.pipelines.elements.tensor_functions import with_tensors as with_tensors
    from raydist.pipelines.engine.op import DatasetOp as DatasetOp
    from raydist.pipelines.formats.tfrecord import TFRecordOptions as TFRecordOptions
    from raydist.pipelines.formats.tfrecord import TFRecordWriter as TFRecordWriter
    from raydist.pipelines.metering.stats import PipelineStats as PipelineStats
    from raydist.pipelines.metering.stats import StageStats as StageStats
    from raydist.pipelines.run.iterator import DatasetIterator as DatasetIterator
    from raydist.pipelines.run.optional import Optional as Optional
    from raydist.pipelines.run.profile import Profile as Profile
    from raydist.pipelines.tf_example.features import FixedLenFeature as FixedLenFeature
    from raydist.pipelines.tf_example.features import FixedLenSequenceFeature as FixedLenSequenceFeature
    from raydist.pipelines.tf_example.features import SparseFeature as SparseFeature
    from raydist.pipelines.tf_example.features import SparseTensorValue as SparseTensorValue
    from raydist.pipelines.tf_example.features import VarLenFeature as VarLenFeature
    from raydist.pipelines.tf_example.parse import parse_example as parse_example
    from raydist.pipelines.tf_example.parse import parse_single_example as parse_single_example
    from raydist.pipelines.tf_example.ragged_features import RaggedFeature as RaggedFeature
    from raydist.pipelines.tf_example.ragged_features import RaggedTensorValue as RaggedTensorValue
    from raydist.replicas.recovery import ReplicaFailure as ReplicaFailure
    from raydist.replicas.rules import ReplicaVariables as ReplicaVariables
    from raydist.replicas.rules import StrategyHooks as StrategyHooks
    from raydist.sharding.clipping import clip_grad_norm_ as clip_grad_norm_
    from raydist.strategies.cluster_coordinator import ClusterCoordinator as ClusterCoordinator
    from raydist.strategies.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from raydist.strategies.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
    from raydist.strategies.cross_device_ops import NcclAllReduce as NcclAllReduce
    from raydist.strategies.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
    from raydist.strategies.functions import compute_average_loss as compute_average_loss
    from raydist.strategies.functions import get_global_step as get_global_step
    from raydist.strategies.functions import get_replica_context as get_replica_context
    from raydist.strategies.functions import get_strategy as get_strategy
    from raydist.strategies.functions import materialize as materialize
    from raydist.strategies.hosted import close_all as close_all
    from raydist.strategies.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
    from raydist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from raydist.strategies.one_node import CentralStorageStrategy as CentralStorageStrategy
    from raydist.strategies.one_node import MirroredStrategy as MirroredStrategy
    from raydist.strategies.one_node import OneNodeStrategy as OneNodeStrategy
    from raydist.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
    from raydist.strategies.pipeline import PipelineStrategy as PipelineStrategy
    from raydist.strategies.profile_steps import profile_steps as profile_steps
    from raydist.strategies.sharded import MeshStrategy as MeshStrategy
    from raydist.strategies.sharded import ShardedStrategy as ShardedStrategy
    from raydist.strategies.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from raydist.strategies.tpu import TPUStrategy as TPUStrategy
    from raydist.training.callbacks.callback import Callback as Callback
    from raydist.training.callbacks.callback import History as History
    from raydist.training.callbacks.callback import LambdaCallback as LambdaCallback
    from raydist.training.callbacks.checkpoint_callbacks import BackupAndRestore as BackupAndRestore
    from raydist.training.callbacks.checkpoint_callbacks import ModelCheckpoint as ModelCheckpoint
    from raydist.training.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from raydist.training.callbacks.early_stopping import TerminateOnNaN as TerminateOnNaN
    from raydist.training.callbacks.experiment_loggers import MLflowLogger as MLflowLogger
    from raydist.training.callbacks.experiment_loggers import WandbLogger as WandbLogger
    from raydist.training.callbacks.learning_rates import LearningRateScheduler as LearningRateScheduler
    from raydist.training.callbacks.learning_rates import ReduceLROnPlateau as ReduceLROnPlateau
    from raydist.training.callbacks.log_callbacks import CSVLogger as CSVLogger
    from raydist.training.callbacks.log_callbacks import ProgressBar as ProgressBar
    from raydist.training.callbacks.step_hooks import CheckpointSaverHook as CheckpointSaverHook
    from raydist.training.callbacks.step_hooks import LoggingTensorHook as LoggingTensorHook
    from raydist.training.callbacks.step_hooks import NanTensorHook as NanTensorHook
    from raydist.training.callbacks.step_hooks import StepCounterHook as StepCounterHook
    from raydist.training.callbacks.step_hooks import StopAtStepHook as StopAtStepHook
    from raydist.training.callbacks.step_hooks import SummarySaverHook as SummarySaverHook
    from raydist.training.callbacks.tensor_board import TensorBoard as TensorBoard
    from raydist.training.exported_model import ExportedModel as ExportedModel
    from raydist.training.exported_model import load_exported as load_exported
    from raydist.training.feature_layers import DenseFeatures as DenseFeatures
    from raydist.training.feature_layers import LinearModel as LinearModel
    from raydist.training.metrics import Mean as Mean
    from raydist.training.model import Model as Model
    from raydist.training.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
    from raydist.tune import TuneReportCallback as TuneReportCallback

__version__ = "0.2.0"

# The public names and their modules. The imports above give the same list to type checkers and editors.
_MODULE_OF = {
    "checkpoints_iterator": "raydist.checkpoints.listing",
    "latest_checkpoint": "raydist.checkpoints.listing",
    "SaveHandle": "raydist.checkpoints.saves",
    "CheckpointManager": "raydist.checkpoints.manager",
    "Preempted": "raydist.core.errors",
    "AUTOTUNE": "raydist.core.values",
    "AutoShardPolicy": "raydist.options",
    "AutotuneOptions": "raydist.options",
    "BackupAndRestore": "raydist.training.callbacks.checkpoint_callbacks",
    "BoundedStaleness": "raydist.parameter_servers.consistency",
    "Callback": "raydist.training.callbacks.callback",
    "CSVLogger": "raydist.training.callbacks.log_callbacks",
    "CancelledError": "raydist.core.errors",
    "Checkpoint": "raydist.checkpoints.checkpoint",
    "ClusterCoordinator": "raydist.strategies.cluster_coordinator",
    "ClusterResolver": "raydist.context.cluster_resolver",
    "ClusterSpec": "raydist.context.cluster_resolver",
    "CentralStorageStrategy": "raydist.strategies.one_node",
    "CollectiveMismatchError": "raydist.core.errors",
    "CommunicationOptions": "raydist.options",
    "CrossDeviceOps": "raydist.strategies.cross_device_ops",
    "DataLossError": "raydist.core.errors",
    "Dataset": "raydist.dataset",
    "DatasetBuilder": "raydist.datasets.builder",
    "DatasetInfo": "raydist.datasets.builder",
    "DatasetIterator": "raydist.pipelines.run.iterator",
    "DatasetOp": "raydist.pipelines.engine.op",
    "DatasetSpec": "raydist.pipelines.elements.spec",
    "DeadlineExceededError": "raydist.core.errors",
    "DenseFeatures": "raydist.training.feature_layers",
    "DistributedDataset": "raydist.distributed_dataset",
    "DistributedIterator": "raydist.distributed_dataset",
    "EarlyStopping": "raydist.training.callbacks.early_stopping",
    "FailedPreconditionError": "raydist.core.errors",
    "Elastic": "raydist.options",
    "ExportedModel": "raydist.training.exported_model",
    "FailureOptions": "raydist.options",
    "FixedLenFeature": "raydist.pipelines.tf_example.features",
    "FixedLenSequenceFeature": "raydist.pipelines.tf_example.features",
    "FixedLengthRecordDataset": "raydist.dataset.readers",
    "FixedShardsPartitioner": "raydist.parameter_servers.slices",
    "HierarchicalCopyAllReduce": "raydist.strategies.cross_device_ops",
    "History": "raydist.training.callbacks.callback",
    "INFINITE_CARDINALITY": "raydist.core.values",
    "InputContext": "raydist.core.values",
    "InputOptions": "raydist.options",
    "InputReplicationMode": "raydist.options",
    "InvalidArgumentError": "raydist.core.errors",
    "LambdaCallback": "raydist.training.callbacks.callback",
    "LearningRateScheduler": "raydist.training.callbacks.learning_rates",
    "LinearModel": "raydist.training.feature_layers",
    "MaxSizePartitioner": "raydist.parameter_servers.slices",
    "Mean": "raydist.training.metrics",
    "MinSizePartitioner": "raydist.parameter_servers.slices",
    "MLflowLogger": "raydist.training.callbacks.experiment_loggers",
    "MeshStrategy": "raydist.strategies.sharded",
    "MirroredStrategy": "raydist.strategies.one_node",
    "Model": "raydist.training.model",
    "ModelCheckpoint": "raydist.training.callbacks.checkpoint_callbacks",
    "MultiWorkerMirroredStrategy": "raydist.strategies.multi_worker",
    "NcclAllReduce": "raydist.strategies.cross_device_ops",
    "NotFoundError": "raydist.core.errors",
    "OneDeviceStrategy": "raydist.strategies.one_device",
    "OneNodeStrategy": "raydist.strategies.one_node",
    "OptimizationOptions": "raydist.options",
    "Optional": "raydist.pipelines.run.optional",
    "Options": "raydist.options",
    "OutOfRangeError": "raydist.core.errors",
    "ParameterServerStrategy": "raydist.strategies.parameter_server",
    "PerReplica": "raydist.core.values",
    "PipelineStats": "raydist.pipelines.metering.stats",
    "PipelineStrategy": "raydist.strategies.pipeline",
    "Profile": "raydist.pipelines.run.profile",
    "ProgressBar": "raydist.training.callbacks.log_callbacks",
    "RaggedFeature": "raydist.pipelines.tf_example.ragged_features",
    "RaggedTensorValue": "raydist.pipelines.tf_example.ragged_features",
    "RaydistError": "raydist.core.errors",
    "ReductionToOneDevice": "raydist.strategies.cross_device_ops",
    "ReduceLROnPlateau": "raydist.training.callbacks.learning_rates",
    "ReduceOp": "raydist.core.values",
    "Replicated": "raydist.core.values",
    "RemoteValue": "raydist.coordinator.remote_value",
    "ReplicaContext": "raydist.context.replica_context",
    "StrategyHooks": "raydist.replicas.rules",
    "ReplicaVariables": "raydist.replicas.rules",
    "ReplicaFailure": "raydist.replicas.recovery",
    "RunOptions": "raydist.options",
    "ServerStats": "raydist.parameter_servers.requests",
    "ShardedEmbedding": "raydist.parameter_servers.sharded_embedding",
    "ShardedStrategy": "raydist.strategies.sharded",
    "SidecarEvaluator": "raydist.training.sidecar_evaluator",
    "SimpleClusterResolver": "raydist.context.cluster_resolver",
    "SparseFeature": "raydist.pipelines.tf_example.features",
    "SparseTensorValue": "raydist.pipelines.tf_example.features",
    "SpecError": "raydist.core.errors",
    "StageStats": "raydist.pipelines.metering.stats",
    "State": "raydist.checkpoints.object_state",
    "Strategy": "raydist.context.strategy",
    "SyncWithBackups": "raydist.parameter_servers.consistency",
    "TFConfigClusterResolver": "raydist.context.cluster_resolver",
    "SyncBatchNorm": "raydist.strategies.sync_batch_norm",
    "StrategyStats": "raydist.context.strategy_values",
    "TFRecordDataset": "raydist.dataset.readers",
    "TFRecordOptions": "raydist.pipelines.formats.tfrecord",
    "TFRecordWriter": "raydist.pipelines.formats.tfrecord",
    "TPUStrategy": "raydist.strategies.tpu",
    "TensorBoard": "raydist.training.callbacks.tensor_board",
    "TensorSpec": "raydist.pipelines.elements.spec",
    "TerminateOnNaN": "raydist.training.callbacks.early_stopping",
    "TextLineDataset": "raydist.dataset.readers",
    "ThreadingOptions": "raydist.options",
    "Timeouts": "raydist.options",
    "UNKNOWN_CARDINALITY": "raydist.core.values",
    "UnavailableError": "raydist.core.errors",
    "ValueContext": "raydist.context.strategy_values",
    "TuneReportCallback": "raydist.tune",
    "VarLenFeature": "raydist.pipelines.tf_example.features",
    "WandbLogger": "raydist.training.callbacks.experiment_loggers",
    "clip_grad_norm_": "raydist.sharding.clipping",
    "close_all": "raydist.strategies.hosted",
    "builder": "raydist.datasets.loading",
    "compute_average_loss": "raydist.strategies.functions",
    "feature": "raydist",
    "get_global_step": "raydist.strategies.functions",
    "get_replica_context": "raydist.strategies.functions",
    "get_strategy": "raydist.strategies.functions",
    "list_builders": "raydist.datasets.loading",
    "load": "raydist.datasets.loading",
    "load_exported": "raydist.training.exported_model",
    "materialize": "raydist.strategies.functions",
    "ml": "raydist",
    "has_strategy": "raydist.context.current",
    "image": "raydist",
    "in_cross_replica_context": "raydist.context.current",
    "parse_example": "raydist.pipelines.tf_example.parse",
    "parse_single_example": "raydist.pipelines.tf_example.parse",
    "profile_steps": "raydist.strategies.profile_steps",
    "serve": "raydist",
    "summary": "raydist",
    "set_aggregation": "raydist.mirroring.aggregation",
    "text": "raydist",
    "tune": "raydist",
    "video": "raydist",
    "CheckpointSaverHook": "raydist.training.callbacks.step_hooks",
    "LoggingTensorHook": "raydist.training.callbacks.step_hooks",
    "NanTensorHook": "raydist.training.callbacks.step_hooks",
    "StepCounterHook": "raydist.training.callbacks.step_hooks",
    "StopAtStepHook": "raydist.training.callbacks.step_hooks",
    "SummarySaverHook": "raydist.training.callbacks.step_hooks",
    "Estimator": "raydist.estimator.estimator",
    "EstimatorSpec": "raydist.estimator.spec",
    "EvalSpec": "raydist.estimator.spec",
    "ModeKeys": "raydist.estimator.spec",
    "RunConfig": "raydist.estimator.spec",
    "TrainSpec": "raydist.estimator.spec",
    "get_or_create": "raydist.estimator.model_fn_module",
    "model_to_estimator": "raydist.estimator.train_and_evaluate",
    "train_and_evaluate": "raydist.estimator.train_and_evaluate",
    "LinearClassifier": "raydist.estimator.canned",
    "LinearRegressor": "raydist.estimator.canned",
    "DNNClassifier": "raydist.estimator.canned",
    "DNNRegressor": "raydist.estimator.canned",
    "DNNLinearCombinedClassifier": "raydist.estimator.canned",
    "DNNLinearCombinedRegressor": "raydist.estimator.canned",
    "Ftrl": "raydist.estimator.ftrl",
    "with_tensors": "raydist.pipelines.elements.tensor_functions",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


if not TYPE_CHECKING:  # type checkers know the names above, and should report any other

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'raydist' has no attribute {name!r}.")
        home = _MODULE_OF[name]
        value = import_module(f"raydist.{name}") if home == "raydist" else getattr(import_module(home), name)
        globals()[name] = value  # the next access does not call `__getattr__`
        return value


def __dir__() -> list[str]:
    return __all__
