"""Python's last words: which exception a traceback in a log ends with, and where in the user's own files it came from.

Forms: those of CPython 3.8 to 3.14 (traceback, threading, multiprocessing, asyncio, logging), of exception groups, and
of torch, which puts `[rank3]: ` before each line, and a data worker's traceback into the message of another exception.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import IntEnum
from pathlib import PurePath
from typing import NamedTuple

LONGEST = 300
HEADER = "raceback (most recent call last):"
"""In every line that begins one."""
MARKS = (HEADER, "Exception ignored ", "--- Logging error ---", "Exception in thread ", "Task exception was never",
         "Process ")  # fmt: skip
"""Lines without any of these neither begin a traceback nor tell what the next one stands for."""
_HEADER = re.compile(rf"(?P<group>\+ Exception Group )?(?P<original>Original )?T{re.escape(HEADER)}\s*$")
_FRAME = re.compile(r'\s*File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OF_SYNTAX = re.compile(r'  File "[^"]+", line \d+$')  # a script that cannot be compiled: no header, no `in …`
_RAISED = re.compile(r"(?P<type>[^\W\d][\w.<>]*)(?::| *$)")
_CHAIN = re.compile(r"\s*(?:During handling of the above exception, another|The above exception was the direct cause)")
_IGNORED = re.compile(r"Exception ignored |--- Logging error ---")
_ASIDE = re.compile(r"Exception in thread |Process \S+:$|Task exception was never retrieved")
_START = re.compile(rf"(?:Original |\+ Exception Group )?T{re.escape(HEADER)}|{_IGNORED.pattern}|{_ASIDE.pattern}")
_IN_GROUP = re.compile(r"\s*(?:\+-|\|(?: (?P<text>.*))?$)")
_OF_A_RANK = re.compile(r"\[rank\d+\]:(?: |$)")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LIBRARY = ("/site-packages/", "/dist-packages/", "/lib/python")
_MOST_STRAY = 20  # lines of others amid a traceback


class Standing(IntEnum):
    """Whether an exception can have ended the program."""

    IGNORED = 0  # Python itself went on: in `__del__`, at exit, in logging
    ASIDE = 1  # it ended a thread, a task or a child
    MAIN = 2


class Raised(NamedTuple):
    """An exception as a traceback ends with it."""

    text: str
    """`KeyError: 'label_17'`; of a group with the first of those in it."""
    place: str | None
    """`train.py:88`: the innermost frame that is not a library's."""
    standing: Standing
    number: int
    """The line where it stands."""

    @property
    def words(self) -> str:
        """Both in one line."""
        return f"{self.text} ({self.place})" if self.place else self.text


class _Block:
    """A traceback, from behind its header to its exception."""

    def __init__(self, base: int, standing: Standing, *, is_group: bool = False) -> None:
        self._base, self._standing, self.is_group = base, standing, is_group
        self._place: str | None = None
        self._texts: list[str] = []
        self._number = self._stray = 0
        self.is_over = False

    def take(self, line: str, number: int) -> bool:
        """Whether the line is of this traceback, or may stand between its lines."""
        if self.is_group:
            return self._take_of_group(line, number)
        if HEADER in line:  # it was never finished
            self.is_over = True
            return False
        is_deeper = len(line) - len(line.lstrip()) > self._base
        if not line.strip() or (is_deeper and self._look_at(line)):
            return True
        if _RAISED.match(line.strip()) and not is_deeper:
            self._texts.append(line.strip())
            self._number = number
            self.is_over = True
        else:
            self._stray += 1
            self.is_over = self._stray > _MOST_STRAY
        return True

    def _take_of_group(self, line: str, number: int) -> bool:
        found = _IN_GROUP.match(line)
        self.is_over = found is None and bool(line.strip())
        text = (found and found["text"]) or ""
        if text[:1].strip() and HEADER not in text and len(self._texts) < 2:
            self._texts.append(text.strip())
            self._number = self._number or number
        elif text and len(self._texts) < 2:
            self._look_at(text)
        return not self.is_over

    def _look_at(self, line: str) -> bool:
        found = _FRAME.match(line)
        if found and not found["file"].startswith("<") and not any(part in found["file"] for part in _LIBRARY):
            self._place = f"{PurePath(found['file']).name}:{found['line']}"
        return True

    def raised(self) -> Raised | None:
        """What it ended with, if it came to that."""
        text = ", the first: ".join(self._texts)
        return Raised(text[:LONGEST], self._place, self._standing, self._number) if text else None


class Reader:
    """Takes a program's lines one by one, and tells what each traceback ended with: of a chain, its last one."""

    def __init__(self) -> None:
        self._block: _Block | None = None
        self._raised: Raised | None = None
        self._is_chained = False
        self._standing = Standing.MAIN
        self.has_taken = False
        """Whether the last line was of a traceback, or about one."""

    @property
    def is_open(self) -> bool:
        """Whether lines to come may belong to what it has."""
        return self._block is not None or self._raised is not None or self._standing is not Standing.MAIN

    def is_in_group(self, line: str) -> bool:
        """Whether a line, a header even, is a part of the exception group that it reads."""
        return self._block is not None and self._block.is_group and _IN_GROUP.match(line) is not None

    def feed(self, line: str, number: int = 0) -> Raised | None:
        """Take a line; the exception that is complete now."""
        self.has_taken = True
        if self._block is not None:
            is_taken = self._block.take(line, number)
            if self._block.is_over:
                self._raised, self._block = self._block.raised(), None
            if is_taken:
                return None
        header = _HEADER.search(line) if HEADER in line else None
        if header is not None:
            return self._begin(header)
        if self._raised is not None and self._is_more(line):
            return None
        done = self.finish()
        self.has_taken = self._look_out(line, number)
        return done

    def finish(self) -> Raised | None:
        """What it has, where no more lines come."""
        if self._block is not None:
            self._block.take("", 0)
            self._raised, self._block = self._block.raised(), None
        done, self._raised = self._raised, None
        self._is_chained = False
        return done

    def begin_amid(self) -> None:
        """What comes first is the rest of a traceback."""
        self._block = _Block(0, Standing.MAIN)

    def _begin(self, header: re.Match[str]) -> Raised | None:
        before, done = self._raised, None
        if before is not None and (self._is_chained or header["original"] or "RemoteTraceback:" in before.text):
            self._standing = before.standing
        else:
            done = before
        base = len(header.string) - len(header.string.lstrip())
        self._block = _Block(base, self._standing, is_group=header["group"] is not None)
        self._raised, self._is_chained, self._standing = None, False, Standing.MAIN
        return done

    def _is_more(self, line: str) -> bool:
        """Whether a line behind an exception still is about it."""
        assert self._raised is not None
        if _CHAIN.match(line):
            self._is_chained = True
        elif self._raised.text.endswith(":") and line[:1].isspace() and line.strip():
            self._raised = self._raised._replace(text=f"{self._raised.text} {line.strip()}"[:LONGEST])
        else:
            return line.strip() in ("", '"""')
        return True

    def _look_out(self, line: str, number: int) -> bool:
        """Outside of tracebacks: whether the line tells of the next one, or begins one without a header."""
        if _OF_SYNTAX.match(line):
            self._block = _Block(0, Standing.MAIN)
            return self._block.take(line, number)
        if line.startswith("future: ") or not line.strip():
            return False
        told = ((_IGNORED, Standing.IGNORED), (_ASIDE, Standing.ASIDE))
        self._standing = next((standing for mark, standing in told if mark.match(line.lstrip())), Standing.MAIN)
        return self._standing is not Standing.MAIN


def start_of(line: str) -> int:
    """Where in a line a program's own text begins that a traceback may follow; -1: none does."""
    found = _START.search(line)
    return found.start() if found else -1


def plain(line: str) -> str:
    """A line without colours and the `[rank3]: ` that torch puts before each one."""
    return _OF_A_RANK.sub("", _COLOUR.sub("", line), count=1) if line[:1] in "[\x1b" else line


def last_words(lines: Sequence[str]) -> tuple[Raised | None, list[str]]:
    """What ended a program, from the last lines that it wrote, if a traceback tells; and the lines of no traceback."""
    reader, found, rest = Reader(), [], []
    first = next((at for at, line in enumerate(lines) if line[:1].strip()), 0)
    if any(_FRAME.match(line) for line in lines[:first]) and not _OF_SYNTAX.match(lines[0]):
        reader.begin_amid()
    for line in lines:
        found.append(reader.feed(line))
        if not reader.has_taken:
            rest.append(line)
    found.append(reader.finish())
    told = [one for one in found if one is not None and one.standing is not Standing.IGNORED]
    return max(reversed(told), key=lambda one: one.standing, default=None), rest
