"""Which exception ended a program, from what Python really prints: each case is run, and its last lines are judged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import clean_environment
from tests.unit.test_verdict import judged
from train.launch.output import LAST_LINES
from train.launch.tracebacks import last_words

ENDS = {  # a script, and what is to be said of its end
    "raise ValueError('bad')": "ValueError: bad (train.py:1)",
    "class DataCorrupt(Exception): pass\n\nraise DataCorrupt('shard 7')": "DataCorrupt: shard 7 (train.py:3)",
    "class DataCorrupt(Exception): pass\nraise DataCorrupt": "DataCorrupt (train.py:2)",
    "next(iter([]))": "StopIteration (train.py:1)",
    "raise KeyError('')": "KeyError: '' (train.py:1)",
    "import json\n\njson.loads('')":
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) (train.py:3)",
    "x = (": "SyntaxError: '(' was never closed (train.py:1)",
    "def f(n): return f(n) + 1\nf(1)": "RecursionError: maximum recursion depth exceeded (train.py:1)",
    "raise RuntimeError('Errors in loading:\\n\\tMissing key a\\n\\tb')":
        "RuntimeError: Errors in loading: Missing key a (train.py:1)",
    "error = ValueError('bad')\nerror.add_note('KeyError: a note')\nraise error": "ValueError: bad (train.py:3)",
    # Chains and groups
    "try: 1 / 0\nexcept ArithmeticError as e: raise LookupError('no part') from e": "LookupError: no part (train.py:2)",
    "try: 1 / 0\nexcept ArithmeticError: {}['a']": "KeyError: 'a' (train.py:2)",
    "raise ExceptionGroup('two went', [ValueError('a'), KeyError('b')])":
        "ExceptionGroup: two went (2 sub-exceptions), the first: ValueError: a (train.py:1)",
    # What follows it, and is none of it
    "class D:\n  def __del__(self): raise RuntimeError('late')\nd = D()\nraise ValueError('bad')":
        "ValueError: bad (train.py:4)",
    "import atexit\natexit.register(lambda: {}['a'])\nraise ValueError('bad')": "ValueError: bad (train.py:3)",
    "import atexit, warnings\natexit.register(lambda: warnings.warn('bye'))\nraise ValueError('bad')":
        "ValueError: bad (train.py:3)",
    "import atexit\natexit.register(lambda: print('Error: bye'))\nraise ValueError('bad')":
        "ValueError: bad (train.py:3)",
    "import logging\nlogging.warning('%d', 'a')\nraise SystemExit('no data')":
        "it ended with status 1, and said last: no data",
    # Threads, children
    "import threading as t\ndef f(): {}['a']\nt = t.Thread(target=f)\nt.start(); t.join()\nraise SystemExit('gave up')":
        "KeyError: 'a' (train.py:2)",
    "import threading as t\ndef f(): {}['a']\nt = t.Thread(target=f)\nt.start(); t.join()\nraise ValueError('bad')":
        "ValueError: bad (train.py:5)",
    "import multiprocessing as m\ndef f(x): raise ValueError(f'bad {x}')\n"
    "if __name__ == '__main__':\n  with m.Pool(1) as p: p.map(f, [7])": "ValueError: bad 7 (train.py:4)",
    "import torch.utils.data as d\nclass S:\n  def __len__(self): return 4\n"
    "  def __getitem__(self, i): {}[f'label_{i}']\n"
    "if __name__ == '__main__':\n  for _ in d.DataLoader(S(), num_workers=1): pass": "KeyError: 'label_0' (train.py:4)",
    # No traceback
    "raise SystemExit('no data in /data')": "it ended with status 1, and said last: no data in /data",
    "import warnings\nprint('step 3')\nwarnings.warn('bye')\nraise SystemExit(1)":
        "it ended with status 1, and said last: step 3",
    "print('Warning: deprecated')\nraise SystemExit(9)": "it ended with status 9",
    "raise SystemExit(1)": "it ended with status 1",
    "import argparse\nargparse.ArgumentParser('train.py').parse_args(['--no'])":
        "it ended with status 2, and said last: train.py: error: unrecognized arguments: --no",
    "try: 1 / 0\nexcept ArithmeticError:\n  import traceback; traceback.print_exc()\n  raise SystemExit(7)":
        "ZeroDivisionError: division by zero (train.py:1, status 7)",
    "import os, sys\nprint('ValueError: bad', file=sys.stderr)\nos._exit(3)": "ValueError: bad (status 3)",
}  # fmt: skip


@pytest.mark.parametrize("script", ENDS, ids=range(len(ENDS)))
def test_what_ended_a_program(script: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-u", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), text=True, check=False, stdout=subprocess.PIPE, stderr=-2
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()][-LAST_LINES:]
    expected = ENDS[script]
    assert judged(done.returncode, *lines, step=None).words == f"rank 3 (node1) failed: {expected}", done.stdout
    of_torch = [f"[rank3]: {line}" for line in lines]
    assert judged(done.returncode, *of_torch, step=None).words == f"rank 3 (node1) failed: {expected}"


def test_the_end_of_a_traceback_is_enough() -> None:
    """Of a program of many calls the last lines do not hold the header."""
    lines = ['  File "a.py", line 3, in f', "    g()", '  File "b.py", line 4, in g', "    h()", "pkg.mod.Odd: text"]
    for cut in range(3):
        raised, rest = last_words(lines[cut:])
        assert raised is not None
        assert (raised.words, rest) == ("pkg.mod.Odd: text (b.py:4)", [])


def test_other_lines_amid_a_traceback() -> None:
    lines = ["Traceback (most recent call last):", "step 3 loss 1.0", '  File "a.py", line 3, in f', "all is well",
             "    raise", "[W socket.cpp:755] Connection refused", "Odd: text", "step 4"]  # fmt: skip
    raised, rest = last_words(lines)
    assert raised is not None
    assert (raised.words, rest) == ("Odd: text (a.py:3)", ["step 4"])


def test_a_traceback_that_was_cut_off_is_none() -> None:
    header = "Traceback (most recent call last):"
    assert last_words([header])[0] is None
    raised, _ = last_words([header, '  File "a.py", line 3, in f', header, "ValueError: b"])
    assert raised is not None
    assert raised.words == "ValueError: b"
