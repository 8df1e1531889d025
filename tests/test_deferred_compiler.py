"""Each in a process of its own, since the compiler is loaded once: a fork of one that has trained without it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

BEFORE = """
import json, os, sys, torch, traceback
from raydist.deferred_compiler import defer_compiler
defer_compiler()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.Adam([weight], lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
def step():
    optimizer.zero_grad()
    weight.square().sum().backward()
    optimizer.step()
    scheduler.step()
step()
optimizer.load_state_dict(optimizer.state_dict())
assert "torch._dynamo.eval_frame" not in sys.modules
"""
USES = {
    "nothing": "",
    "compile": """
f = torch.compile(lambda x: x + 1, backend="eager")
assert f(weight).tolist() == (weight + 1).tolist()
""",
    "a module of it": "import torch._dynamo.config as config; assert config is torch._dynamo.config",
    "a module that it does not load": "import torch._dynamo.profiler as it; assert it is torch._dynamo.profiler",
    "a name from it": """
from torch._dynamo import config
import torch._dynamo.config
assert config is torch._dynamo.config
""",
    "a module from it": """
from torch._dynamo.utils import counters
assert counters is torch._dynamo.utils.counters
""",
    "disable": """
disabled = torch.compiler.disable(step)
assert disabled is not step
disabled()
""",
    "all modules": """
import importlib.util, inspect
inspect.getmodule(step)
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
assert "torch._dynamo.eval_frame" not in sys.modules
""",
}
AFTER = """
step()
if "torch._dynamo.eval_frame" in sys.modules:
    import importlib.machinery
    assert type(sys.modules["torch._dynamo"]) is type(sys) and sys.modules["torch._dynamo"] is torch._dynamo
    assert isinstance(torch._dynamo.config.__spec__.loader, importlib.machinery.SourceFileLoader)
    graphs = []
    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    compiled = torch.compile(step, backend=backend)  # what is not for tracing is not traced
    compiled()
    assert graphs
"""
FORK = """
for name, use in json.loads(sys.argv[1]).items():
    sys.stdout.flush()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    try:
        exec(use, globals())
        print(name, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
"""


@pytest.fixture(scope="module")
def went_well() -> tuple[list[str], str]:
    """The uses that were as they should be, and what the others printed."""
    uses = {name: use + AFTER for name, use in USES.items()}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + FORK, json.dumps(uses)], capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout.splitlines(), done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize("use", USES)
def test_plain_training_does_not_load_it_and_whoever_needs_it_has_it(
    went_well: tuple[list[str], str], use: str
) -> None:
    well, errors = went_well
    assert use in well, errors


def test_where_it_is_loaded_it_stays() -> None:
    program = (
        "import torch, torch._dynamo as it\nfrom raydist.deferred_compiler import defer_compiler\ndefer_compiler()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{program}assert it is torch._dynamo and it.config"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
