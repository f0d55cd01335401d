"""A rank that compiles nothing does not load the compiler; who needs it after all gets the real one.

In processes of their own: within the tests' process somebody has loaded it already.
"""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import ROOT, clean_environment, free_port

TRAIN = """
import hashlib, sys, torch, torch.distributed as dist
from train.eager import keep_compiler_out

REAL = "torch._dynamo.config"  # the real package imports it first of all

def train(steps=3):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 4)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    return [float(value) for value in torch.cat([p.detach().flatten() for p in model.parameters()])]

dist.init_process_group("gloo", init_method="tcp://127.0.0.1:PORT", rank=0, world_size=1)
"""

NOT_LOADED_THEN_REAL = """
keep_compiler_out()
first = train()
import inspect, torch.distributed.tensor  # which looks through all modules for its own source
inspect.getmodule(sys._getframe())
assert REAL not in sys.modules, "the compiler was loaded though nothing was compiled"
stand_in = torch._dynamo

calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph.forward
assert torch.compile(lambda x: 2 * x + 1, backend=backend)(torch.ones(3)).tolist() == [3.0] * 3
assert len(calls) == 1, "torch.compile did not compile"
assert REAL in sys.modules and sys.modules["torch._dynamo"] is torch._dynamo is not stand_in
assert not any(type(finder).__module__ == "train.eager" for finder in sys.meta_path)
assert train() == first
marked = torch.optim.Optimizer.zero_grad.__wrapped__
assert vars(marked)["__dynamo_disable"] is not marked, "zero_grad would be traced"
assert stand_in.config is torch._dynamo.config
keep_compiler_out()
assert sys.modules["torch._dynamo"] is not stand_in, "what is loaded must stay"
"""

SUBMODULE = """
keep_compiler_out()
import torch._dynamo.testing as testing
from torch._dynamo.utils import counters
assert testing is sys.modules["torch._dynamo.testing"] is torch._dynamo.testing
assert testing.__spec__.origin == testing.__file__
assert counters is torch._dynamo.utils.counters
try:
    import torch._dynamo.nothing_of_that_name
except ModuleNotFoundError as error:
    assert error.name == "torch._dynamo.nothing_of_that_name"
else:
    raise AssertionError("found what is not there")
"""


def _run(code: str) -> None:
    text = TRAIN.replace("PORT", str(free_port())) + code
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_nothing_is_loaded_until_something_is_compiled_and_then_it_is_real() -> None:
    _run(NOT_LOADED_THEN_REAL)


def test_a_submodule_that_is_imported_is_the_real_one() -> None:
    _run(SUBMODULE)
