"""Imports point down, in the package and inside its folders, and never in a circle. Ray and torch have their places."""

from __future__ import annotations

from tests.import_graph import Import, circles, home_of, imports_of, modules

# From the bottom up. A module may import its own layer and those before it.
LAYERS = (
    {"core"},
    {"options"},
    {"pipelines"},
    {"feature", "image", "text", "video", "compat"},
    {"collectives", "utils", "cluster"},
    {"tpu_slices"},
    {"parameter_servers"},
    {"actors"},
    {"dataset"},
    {"datasets"},
    {"distributed_dataset"},
    {"context"},
    {"summary"},
    {"pickling"},
    {"checkpoints"},
    {"sharding"},
    {"mirroring"},
    {"replicas"},
    {"coordinator"},
    {"strategies"},
    {"training", "ml"},
    {"serve", "estimator"},
    {"tune"},
    {"testing"},
)

# The same inside packages that have folders: what lies in them, from the bottom up.
ROOMS = {
    "pipelines": (
        {"elements"},
        {"metering"},
        {"formats"},
        {"tf_example"},
        {"engine"},
        {"autotune"},
        {"sources"},
        {"stored"},
        {"ops"},
        {"optimize"},
        {"run"},
    ),
    "actors": (
        {
            "reservations",
            "class_tracking",
            "portable_errors",
            "supervision",
            "version_check",
            "background_actor",
            "metric_counters",
            "packed_columns",
        },
        {"workers"},
        {"epochs"},
        {"readers"},
        {"replica", "ray_data", "worker_actors", "xgboost_training"},
        {"parameter_servers"},
    ),
}

RAY_ALLOWED = (
    *("raydist.actors", "raydist.cluster", "raydist.serve", "raydist.tpu_slices"),
    "raydist.collectives.ray_backend",
    "raydist.compat.ray_internals",
    "raydist.tune",
)
WITHOUT_TORCH = ("core", "options", "pipelines", "feature", "image", "text", "video", "dataset", "datasets")
TORCH_AT_IMPORT = (
    "raydist.dataset.to_torch",  # a class of torch's: see Dataset.to_torch
    *(
        "raydist.dataset.collated",
        "raydist.dataset.generator_states",
        "raydist.dataset.torch_loader",
    ),  # for a DataLoader
)


def layer_of(module: str) -> int:
    """The layer of a module or of a name in one; what the package itself exports is the top layer."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(LAYERS) - 1  # suites for others use it as others do
    return next((i for i, layer in enumerate(LAYERS) if parts[1] in layer), len(LAYERS))


def room_of(module: str) -> int:
    """The layer inside a package with folders; 0 where there are none, or for the package itself."""
    parts = module.split(".")
    rooms = ROOMS.get(parts[1], ()) if len(parts) > 2 else ()
    return next((i for i, room in enumerate(rooms) if parts[2] in room), len(rooms))


def belongs(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def problem(module: str, found: Import) -> str | None:
    if found.name.startswith("."):
        return "relative"
    top = found.name.split(".")[0]
    if top == "raydist":
        return problem_inside(module, found.name)
    if top == "ray" and not belongs(module, RAY_ALLOWED):
        return "Ray"
    if top == "torch" and found.kind == "run time" and may_not_load_torch(module):
        return "torch at import time"
    return None


def problem_inside(module: str, name: str) -> str | None:
    if layer_of(name) > layer_of(module):
        return "upward"
    same_package = name.split(".")[1:2] == module.split(".")[1:2]
    return "upward inside the package" if same_package and room_of(name) > room_of(module) else None


def may_not_load_torch(module: str) -> bool:
    package = module.split(".")[1:2]
    return module not in TORCH_AT_IMPORT and (not package or package[0] in WITHOUT_TORCH)


def violations(module: str, source: str) -> list[str]:
    if module == "raydist":
        return []  # the public face: it knows everything, and nothing knows it
    return [f"{found.name} ({found.kind}): {what}" for found in imports_of(source) if (what := problem(module, found))]


def arrows() -> dict[str, set[str]]:
    """Return the modules that each module imports, in whatever way."""
    inside = {name: path for name, path in modules().items() if name != "raydist"}
    found = {name: {home_of(each.name) for each in imports_of(path.read_text())} for name, path in inside.items()}
    return {name: {home for home in homes if home and home != name} for name, homes in found.items()}


def loaded_by(*starts: str) -> set[str]:
    """The modules that are there once these are imported."""
    found = list(starts)
    for module in found:
        source = modules()[module].read_text()
        homes = {home_of(each.name) for each in imports_of(source) if each.kind == "run time"}
        found += sorted(home for home in homes if home and home not in found and home != "raydist")
    return set(found)


def test_a_replica_does_not_load_the_input_engine() -> None:
    """It takes batches that others make: half a second of its start is at stake."""
    loaded = loaded_by("raydist.actors.replica", "raydist.replicas.runner")
    assert "raydist.collectives.opening" in loaded
    assert sorted(module for module in loaded if module.startswith(("raydist.dataset", "raydist.pipelines.ops"))) == []


def test_imports_point_down() -> None:
    found = {module: violations(module, path.read_text()) for module, path in modules().items()}
    assert {module: bad for module, bad in found.items() if bad} == {}


def test_nothing_imports_in_a_circle() -> None:
    assert circles(arrows()) == []


def test_every_module_has_a_layer() -> None:
    """Add a module without one to LAYERS, and inside of a package with ROOMS to these."""
    for module in modules():
        package, *inside = module.split(".")[1:] or ("",)
        assert not package or layer_of(module) < len(LAYERS), module
        assert not inside or package not in ROOMS or room_of(module) < len(ROOMS[package]), module
