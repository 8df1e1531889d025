"""What the workers of a submitted job need beyond what Ray gives them: the folder of the script that runs.

Outside of jobs Ray puts the script's folder on the workers' `sys.path`. In a job with a working directory it does not,
and a module that lies beside a script in a subfolder could be imported by the driver alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

__all__ = ["script_folder_for_workers"]

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # how Ray tells a job's driver what the job was submitted with


def script_folder_for_workers(environ: Mapping[str, str], argv0: str, sys_path: Sequence[str]) -> dict[str, str]:
    """Environment variables for the workers of this driver; empty where Ray does what is needed.

    Args:
        environ: The driver's environment.
        argv0: The script, `sys.argv[0]`.
        sys_path: The driver's `sys.path`. A script that was started with `python -m` has no folder on it.

    >>> job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://package.zip"}}'}
    >>> script_folder_for_workers(job, "/package/examples/train.py", ["/package/examples"])
    {'PYTHONPATH': '/package/examples'}
    >>> script_folder_for_workers({}, "/home/me/train.py", ["/home/me"])
    {}
    """
    submitted = json.loads(environ.get(_JOB_CONFIG) or "{}").get("runtime_env") or {}
    folder = os.path.dirname(os.path.realpath(argv0))
    # Ray refuses a variable that the job has set itself; whoever sets PYTHONPATH has seen to it.
    decided = "PYTHONPATH" in (submitted.get("env_vars") or {})
    if "working_dir" not in submitted or folder not in sys_path or decided:
        return {}
    return {"PYTHONPATH": folder}
