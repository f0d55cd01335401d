"""Odd things: words that a shell would take for commands, and a job whose rank 1 does something odd."""

from __future__ import annotations

from pathlib import Path

ODD = [
    "it's", 'a "b"', "$(touch canary)", "${HOME}", "$$", "%i", "{image}", "; touch canary", "& touch canary",
    "| touch canary", "`touch canary`", "", "-x", "--", "../../canary", "*", "~", "ä  ö", "a\nb", "a\n; touch canary\n",
    "#", "\\", "a\tb", "=", "!",
]  # fmt: skip
"""Words and values: each may be whatever a user likes."""
ODD_NAMES = [
    "it's", 'a"b', "a b", "$(touch${IFS}canary)", "a;touch${IFS}canary", "`touch${IFS}canary`",
    "-oProxyCommand=touch canary", "--privileged", "a\nb", "a|b", "a&b", "a>canary", "..",
    "../x", "a/../../x", "a\x1b[31m", "a\\b",
]  # fmt: skip
"""Names: of hosts, users, runs, images."""

ODD_LINE = 14
"""Where it does it."""

_OWN = """
import os, signal, time, torch, torch.distributed as dist
from torch.utils.data import TensorDataset
def data():
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1]), TensorDataset(x[:8], x[:8, :1])
class Odd(torch.nn.Linear):
    calls = 0
    def forward(self, x):
        self.calls += 1
        time.sleep(0.02)
        if os.environ["RANK"] == "1" and self.calls == CALL:
            open("event", "w").write(str(time.monotonic()))
            ACT
        return super().forward(x)
def model():
    return Odd(4, 1)
"""


def odd_job(folder: Path, act: str, *flags: str, call: int) -> list[str]:
    """`run …` of that job, for ranks that find `folder` on their PYTHONPATH. The moment is noted in the file `event`.

    Args:
        folder: where its module goes.
        act: what rank 1 does, a line of Python.
        flags: more of the command's options.
        call: in which of its forward passes, from 1.
    """
    (folder / "own_odd.py").write_text(_OWN.replace("CALL", str(call)).replace("ACT", act))
    return ["run", "--strategy.name=ddp", "--data.name=own_odd:data", "--model.name=own_odd:model",
            "--batch.global_size=8", *flags]  # fmt: skip
