"""Every module has its test file: raydist/pipelines/ops/map.py has tests/pipelines/ops/test_map.py."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "raydist"

# Modules that have nothing of their own to test, each with the tests that run through it.
TESTED_ELSEWHERE: dict[str, str] = {
    "actors/worker_actors.py": "tests/strategies/test_parameter_server.py",
    "actors/ray_link.py": "tests/actors/test_parameter_servers.py",
    "actors/server_host.py": "tests/actors/test_parameter_servers.py",
    "actors/workers/pool_task.py": "tests/actors/workers/test_pool.py",
    "actors/workers/handle.py": "tests/actors/workers/test_pool.py",
    "checkpoints/capture.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/differences.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/places.py": "tests/checkpoints/test_manifest.py",
    "checkpoints/restoring/compared_objects.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/restoring/given_states.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/restoring/restored_objects.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/saved_checkpoint.py": "tests/checkpoints/test_checkpoint.py",
    "checkpoints/sharing/restore_request.py": "tests/checkpoints/sharing/test_shared_restore.py",
    "checkpoints/sharing/share_reader.py": "tests/checkpoints/sharing/test_shared_restore.py",
    "collectives/backend.py": "tests/collectives/test_contract.py",
    "collectives/base.py": "tests/contracts/communicator.py",
    "collectives/hierarchical/conference.py": "tests/collectives/test_mismatches.py",
    "collectives/hierarchical/joining.py": "tests/collectives/hierarchical/test_communicator.py",
    "collectives/hierarchical/other_hosts.py": "tests/collectives/hierarchical/test_faults.py",
    "collectives/hierarchical/ranks.py": "tests/collectives/hierarchical/test_communicator.py",
    "collectives/process_group_backend.py": "tests/collectives/test_contract.py",
    "collectives/shared_memory/comparing.py": "tests/collectives/shared_memory/test_communicator.py",
    "collectives/shared_memory/slots.py": "tests/collectives/shared_memory/test_communicator.py",
    "collectives/shared_memory/outside.py": "tests/collectives/hierarchical/test_faults.py",
    "coordinator/launch_served.py": "tests/strategies/test_parameter_server.py",
    "coordinator/per_worker.py": "tests/coordinator/test_per_worker_input.py",
    "coordinator/ports.py": "tests/coordinator/test_coordinator.py",
    "coordinator/worker_record.py": "tests/coordinator/test_roster.py",
    "coordinator/closure_waits.py": "tests/coordinator/test_coordinator.py",
    "coordinator/worker_questions.py": "tests/coordinator/test_coordinator.py",
    "coordinator/workers_link.py": "tests/strategies/test_parameter_server.py",
    "coordinator/workforce.py": "tests/coordinator/test_coordinator.py",
    "mirroring/aspects.py": "tests/mirroring/test_driver.py",
    "mirroring/on_replica/externals.py": "tests/mirroring/on_replica/test_replica.py",
    "mirroring/on_replica/sent_functions.py": "tests/mirroring/on_replica/test_replica.py",
    "parameter_servers/closure_requests.py": "tests/parameter_servers/serving/test_turn_requests.py",
    "parameter_servers/optimizer_requests.py": "tests/parameter_servers/serving/test_holdings.py",
    "parameter_servers/row_requests.py": "tests/parameter_servers/serving/test_holdings.py",
    "parameter_servers/serving/embedding_tables.py": "tests/parameter_servers/serving/test_holdings.py",
    "pipelines/engine/optional_prefetch.py": "tests/pipelines/autotune/test_tuned_prefetch.py",
    "pipelines/engine/random_access.py": "tests/pipelines/sources/test_indexed.py",
    "pipelines/run/reopened.py": "tests/pipelines/run/test_iterator.py",
    "pipelines/stored/file_directory.py": "tests/pipelines/stored/test_directory_files.py",
    "pipelines/stored/local_files.py": "tests/pipelines/stored/test_directory_files.py",
    "pipelines/stored/remote_files.py": "tests/pipelines/stored/test_directory_files.py",
    "replicas/served/worker_rules.py": "tests/replicas/served/test_worker_runner.py",
    "strategies/closure_scheduler.py": "tests/strategies/test_parameter_server.py",
    "strategies/cluster_coordinator.py": "tests/strategies/test_parameter_server.py",
    "strategies/lock_step_link.py": "tests/strategies/test_mirrored.py",
    "strategies/loop_replicas.py": "tests/checkpoints/loops/test_on_replicas.py",
    "testing/error_checks.py": "tests/strategies/test_contract.py",
    "testing/gradient_checks.py": "tests/strategies/test_contract.py",
    "testing/resuming/zygote.py": "tests/testing/resuming/test_lives.py",
    "testing/mode_checks.py": "tests/strategies/test_contract.py",
    "testing/strategy_calls.py": "tests/strategies/test_contract.py",
    "testing/strategy_contract.py": "tests/strategies/test_contract.py",
    "testing/value_checks.py": "tests/strategies/test_contract.py",
    "testing/variable_checks.py": "tests/strategies/test_contract.py",
    "replicas/group_seat.py": "tests/replicas/test_runner.py",
    "replicas/replica_calls.py": "tests/replicas/test_group.py",
    "replicas/replica_saver.py": "tests/checkpoints/test_on_strategies.py",
    "replicas/served/worker_slices.py": "tests/replicas/served/test_variables.py",
    "replicas/served/model.py": "tests/replicas/served/test_variables.py",
    "replicas/served/push.py": "tests/replicas/served/test_variables.py",
    "replicas/served/servable.py": "tests/replicas/served/test_variables.py",
    "replicas/served/served_optimizers.py": "tests/replicas/served/test_variables.py",
    "strategies/hosted.py": "tests/strategies/test_contract.py",
    "strategies/synchronous.py": "tests/strategies/test_mirrored.py",
    "training/compiled_model.py": "tests/training/test_model.py",
    "training/fitting.py": "tests/training/test_model.py",
    "training/measuring.py": "tests/training/test_model.py",
}

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


def expected_tests_of(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_test_file(module: str) -> None:
    expected = ROOT / TESTED_ELSEWHERE[module] if module in TESTED_ELSEWHERE else expected_tests_of(module)
    assert expected.is_file(), f"raydist/{module} needs {expected.relative_to(ROOT)}"


def test_exceptions_are_needed() -> None:
    assert set(TESTED_ELSEWHERE) <= set(MODULES)
    assert [module for module in TESTED_ELSEWHERE if expected_tests_of(module).is_file()] == []
