"""Environment of the workers of a submitted job: adds the folder of the script to their import path.

Outside of jobs Ray adds the script's folder to the workers' `sys.path`. In a job with a working directory Ray does not,
so that only the driver could import a module beside a script in a subfolder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

__all__ = ["script_folder_for_workers"]

_JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's description of the job, for the job's driver


def script_folder_for_workers(environ: Mapping[str, str], argv0: str, sys_path: Sequence[str]) -> dict[str, str]:
    """Return environment variables for the workers of this driver; empty if Ray adds the folder itself.

    Args:
        environ: The driver's environment.
        argv0: Path of the script, `sys.argv[0]`.
        sys_path: The driver's `sys.path`. With `python -m` it does not contain the script's folder.

    >>> job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": '{"runtime_env": {"working_dir": "gcs://package.zip"}}'}
    >>> script_folder_for_workers(job, "/package/examples/train.py", ["/package/examples"])
    {'PYTHONPATH': '/package/examples'}
    >>> script_folder_for_workers({}, "/home/me/train.py", ["/home/me"])
    {}
    """
    submitted = json.loads(environ.get(_JOB_CONFIG) or "{}").get("runtime_env") or {}
    folder = os.path.dirname(os.path.realpath(argv0))
    # Ray refuses a variable that the job sets itself; a job that sets PYTHONPATH is responsible for it.
    decided = "PYTHONPATH" in (submitted.get("env_vars") or {})
    if "working_dir" not in submitted or folder not in sys_path or decided:
        return {}
    return {"PYTHONPATH": folder}
