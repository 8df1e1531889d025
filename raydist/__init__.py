"""tf.data and tf.distribute for PyTorch, on Ray.

`import raydist as rd` gives the public names below. Each is imported when it is first used, so that the import itself
needs neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist import image as image
    from raydist import text as text
    from raydist.context.current import has_strategy as has_strategy
    from raydist.context.current import in_cross_replica_context as in_cross_replica_context
    from raydist.context.replica_context import ReplicaContext as ReplicaContext
    from raydist.context.strategy import Strategy as Strategy
    from raydist.context.strategy_values import ValueContext as ValueContext
    from raydist.dataset import Dataset as Dataset
    from raydist.dataset.readers import FixedLengthRecordDataset as FixedLengthRecordDataset
    from raydist.dataset.readers import TextLineDataset as TextLineDataset
    from raydist.dataset.readers import TFRecordDataset as TFRecordDataset
    from raydist.distributed_dataset import DistributedDataset as DistributedDataset
    from raydist.distributed_dataset import DistributedIterator as DistributedIterator
    from raydist.errors import CancelledError as CancelledError
    from raydist.errors import CollectiveMismatchError as CollectiveMismatchError
    from raydist.errors import DataLossError as DataLossError
    from raydist.errors import DeadlineExceededError as DeadlineExceededError
    from raydist.errors import FailedPreconditionError as FailedPreconditionError
    from raydist.errors import InvalidArgumentError as InvalidArgumentError
    from raydist.errors import NotFoundError as NotFoundError
    from raydist.errors import OutOfRangeError as OutOfRangeError
    from raydist.errors import RaydistError as RaydistError
    from raydist.errors import SpecError as SpecError
    from raydist.errors import UnavailableError as UnavailableError
    from raydist.metrics import Mean as Mean
    from raydist.options import AutoShardPolicy as AutoShardPolicy
    from raydist.options import AutotuneOptions as AutotuneOptions
    from raydist.options import InputOptions as InputOptions
    from raydist.options import OptimizationOptions as OptimizationOptions
    from raydist.options import Options as Options
    from raydist.options import RunOptions as RunOptions
    from raydist.options import ThreadingOptions as ThreadingOptions
    from raydist.options import Timeouts as Timeouts
    from raydist.pipelines.elements.spec import DatasetSpec as DatasetSpec
    from raydist.pipelines.elements.spec import TensorSpec as TensorSpec
    from raydist.pipelines.elements.tensor_functions import with_tensors as with_tensors
    from raydist.pipelines.engine.op import DatasetOp as DatasetOp
    from raydist.pipelines.formats.tfrecord_writer import TFRecordOptions as TFRecordOptions
    from raydist.pipelines.formats.tfrecord_writer import TFRecordWriter as TFRecordWriter
    from raydist.pipelines.metering.stats import PipelineStats as PipelineStats
    from raydist.pipelines.metering.stats import StageStats as StageStats
    from raydist.pipelines.run.iterator import DatasetIterator as DatasetIterator
    from raydist.pipelines.run.optional import Optional as Optional
    from raydist.pipelines.run.profile import Profile as Profile
    from raydist.pipelines.tf_example.composite_features import FixedLenSequenceFeature as FixedLenSequenceFeature
    from raydist.pipelines.tf_example.composite_features import SparseFeature as SparseFeature
    from raydist.pipelines.tf_example.composite_features import SparseTensorValue as SparseTensorValue
    from raydist.pipelines.tf_example.features import FixedLenFeature as FixedLenFeature
    from raydist.pipelines.tf_example.features import VarLenFeature as VarLenFeature
    from raydist.pipelines.tf_example.parse import parse_example as parse_example
    from raydist.pipelines.tf_example.parse import parse_single_example as parse_single_example
    from raydist.pipelines.tf_example.ragged_features import RaggedFeature as RaggedFeature
    from raydist.pipelines.tf_example.ragged_features import RaggedTensorValue as RaggedTensorValue
    from raydist.strategies.default import get_replica_context as get_replica_context
    from raydist.strategies.default import get_strategy as get_strategy
    from raydist.strategies.losses import compute_average_loss as compute_average_loss
    from raydist.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from raydist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from raydist.strategies.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from raydist.training.callbacks import Callback as Callback
    from raydist.training.callbacks import History as History
    from raydist.training.early_stopping import EarlyStopping as EarlyStopping
    from raydist.training.model import Model as Model
    from raydist.values import AUTOTUNE as AUTOTUNE
    from raydist.values import INFINITE_CARDINALITY as INFINITE_CARDINALITY
    from raydist.values import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
    from raydist.values import InputContext as InputContext
    from raydist.values import PerReplica as PerReplica
    from raydist.values import ReduceOp as ReduceOp

__version__ = "0.1.0"

# The public names and the modules that define them. The imports above say the same to type checkers and editors.
_MODULE_OF = {
    "AUTOTUNE": "raydist.values",
    "AutoShardPolicy": "raydist.options",
    "AutotuneOptions": "raydist.options",
    "Callback": "raydist.training.callbacks",
    "CancelledError": "raydist.errors",
    "CollectiveMismatchError": "raydist.errors",
    "DataLossError": "raydist.errors",
    "Dataset": "raydist.dataset",
    "DatasetIterator": "raydist.pipelines.run.iterator",
    "DatasetOp": "raydist.pipelines.engine.op",
    "DatasetSpec": "raydist.pipelines.elements.spec",
    "DeadlineExceededError": "raydist.errors",
    "DistributedDataset": "raydist.distributed_dataset",
    "DistributedIterator": "raydist.distributed_dataset",
    "EarlyStopping": "raydist.training.early_stopping",
    "FailedPreconditionError": "raydist.errors",
    "FixedLenFeature": "raydist.pipelines.tf_example.features",
    "FixedLenSequenceFeature": "raydist.pipelines.tf_example.composite_features",
    "FixedLengthRecordDataset": "raydist.dataset.readers",
    "History": "raydist.training.callbacks",
    "INFINITE_CARDINALITY": "raydist.values",
    "InputContext": "raydist.values",
    "InputOptions": "raydist.options",
    "InvalidArgumentError": "raydist.errors",
    "Mean": "raydist.metrics",
    "MirroredStrategy": "raydist.strategies.mirrored",
    "Model": "raydist.training.model",
    "NotFoundError": "raydist.errors",
    "OneDeviceStrategy": "raydist.strategies.one_device",
    "OptimizationOptions": "raydist.options",
    "Optional": "raydist.pipelines.run.optional",
    "Options": "raydist.options",
    "OutOfRangeError": "raydist.errors",
    "PerReplica": "raydist.values",
    "PipelineStats": "raydist.pipelines.metering.stats",
    "Profile": "raydist.pipelines.run.profile",
    "RaggedFeature": "raydist.pipelines.tf_example.ragged_features",
    "RaggedTensorValue": "raydist.pipelines.tf_example.ragged_features",
    "RaydistError": "raydist.errors",
    "ReduceOp": "raydist.values",
    "ReplicaContext": "raydist.context.replica_context",
    "RunOptions": "raydist.options",
    "SparseFeature": "raydist.pipelines.tf_example.composite_features",
    "SparseTensorValue": "raydist.pipelines.tf_example.composite_features",
    "SpecError": "raydist.errors",
    "StageStats": "raydist.pipelines.metering.stats",
    "Strategy": "raydist.context.strategy",
    "TFRecordDataset": "raydist.dataset.readers",
    "TFRecordOptions": "raydist.pipelines.formats.tfrecord_writer",
    "TFRecordWriter": "raydist.pipelines.formats.tfrecord_writer",
    "TensorSpec": "raydist.pipelines.elements.spec",
    "TextLineDataset": "raydist.dataset.readers",
    "ThreadingOptions": "raydist.options",
    "Timeouts": "raydist.options",
    "SyncBatchNorm": "raydist.strategies.sync_batch_norm",
    "UNKNOWN_CARDINALITY": "raydist.values",
    "UnavailableError": "raydist.errors",
    "ValueContext": "raydist.context.strategy_values",
    "VarLenFeature": "raydist.pipelines.tf_example.features",
    "compute_average_loss": "raydist.strategies.losses",
    "get_replica_context": "raydist.strategies.default",
    "get_strategy": "raydist.strategies.default",
    "has_strategy": "raydist.context.current",
    "image": "raydist",
    "in_cross_replica_context": "raydist.context.current",
    "parse_example": "raydist.pipelines.tf_example.parse",
    "parse_single_example": "raydist.pipelines.tf_example.parse",
    "text": "raydist",
    "with_tensors": "raydist.pipelines.elements.tensor_functions",
}

__all__ = sorted([*_MODULE_OF, "__version__"])


if not TYPE_CHECKING:  # type checkers know the names above, and should report any other

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'raydist' has no attribute {name!r}.")
        home = _MODULE_OF[name]
        value = import_module(f"raydist.{name}") if home == "raydist" else getattr(import_module(home), name)
        globals()[name] = value  # the next access finds it without coming here
        return value


def __dir__() -> list[str]:
    return __all__
