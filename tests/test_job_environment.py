from __future__ import annotations

import json
from typing import Any

import pytest

from raydist.cluster.nodes import script_folder_for_workers

FOLDER = "/tmp/package/examples"
SCRIPT = f"{FOLDER}/train.py"


def in_job(runtime_env: dict[str, Any] | None) -> dict[str, str]:
    return {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": runtime_env})}


def test_script_folder_reaches_workers_of_a_job_with_a_working_directory() -> None:
    environ = in_job({"working_dir": "gcs://a.zip", "env_vars": {"DEBUG": "1"}})
    assert script_folder_for_workers(environ, SCRIPT, ["/lib", FOLDER]) == {"PYTHONPATH": FOLDER}


@pytest.mark.parametrize(
    ("environ", "sys_path"),
    [
        ({}, [FOLDER]),
        (in_job(None), [FOLDER]),
        (in_job({"pip": ["x"]}), [FOLDER]),
        (in_job({"working_dir": "gcs://a.zip"}), ["/lib"]),
        (in_job({"working_dir": "gcs://a.zip", "env_vars": {"PYTHONPATH": "/mine"}}), [FOLDER]),
    ],
    ids=["no job", "job without environment", "job without working directory", "python -m", "user has set it"],
)
def test_nothing_is_added_elsewhere(environ: dict[str, str], sys_path: list[str]) -> None:
    assert script_folder_for_workers(environ, SCRIPT, sys_path) == {}
