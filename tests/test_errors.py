from __future__ import annotations

import pickle
import traceback

import cloudpickle

from raydist.core import errors
from raydist.core.errors import DataLossError, RaydistError

CLASSES = [cls for cls in (getattr(errors, name) for name in errors.__all__) if cls is not errors.Preempted]

BUILTIN_OF = {
    errors.InvalidArgumentError: ValueError,
    errors.SpecError: TypeError,
    errors.NotFoundError: FileNotFoundError,
    errors.DeadlineExceededError: TimeoutError,
}


def test_all_survive_pickling_and_show_their_message() -> None:
    for cls in CLASSES:
        error = cls("what must hold, what was got")
        error.add_note("map-2 (train.py:7), element 5, worker input-1")
        for dumps in (pickle.dumps, cloudpickle.dumps):
            copy = pickle.loads(dumps(error))
            assert (type(copy), str(copy)) == (cls, "what must hold, what was got")
            assert copy.__notes__ == error.__notes__
        shown = "".join(traceback.format_exception_only(cls("got 0")))
        assert issubclass(cls, RaydistError)
        assert shown.strip() == f"raydist.core.errors.{cls.__name__}: got 0"


def test_some_are_caught_as_their_builtin() -> None:
    for cls, builtin in BUILTIN_OF.items():
        assert issubclass(cls, builtin)


def test_the_end_of_a_process_is_no_error_and_keeps_its_code() -> None:
    ended = errors.Preempted(7, "saved in ckpt-3")
    ended.add_note("replica 1")
    copy = pickle.loads(pickle.dumps(ended))
    assert isinstance(copy, SystemExit)
    assert not isinstance(copy, RaydistError | Exception)
    assert (copy.code, str(copy), copy.__notes__) == (7, "saved in ckpt-3", ["replica 1"])


def test_data_loss_keeps_file_and_offset() -> None:
    copy = pickle.loads(pickle.dumps(DataLossError("bad checksum", path="s3://b/a.tfrecord", offset=1234)))
    assert (copy.path, copy.offset, str(copy)) == ("s3://b/a.tfrecord", 1234, "bad checksum")
