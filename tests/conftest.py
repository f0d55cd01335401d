"""The table of faults, printed at the end of the tests that made them; as JSON where FAULTS_JSON names a file."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

# Under nohup and in the background they are ignored, and all that is started here would take that for its user's wish.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Rows come from `tests/lab/faults.py`, also out of the workers of xdist."""
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if not rows:
        return
    terminalreporter.section("faults: seconds from the event until nothing of the job was left on any host")
    for row in sorted(rows, key=lambda row: str(row["fault"])):
        late = "late!" if row["seconds"] > row["target_s"] else "     "
        terminalreporter.write_line(
            f"{row['seconds']:6.2f} of {row['target_s']:3g} {late} {row['fault']}\n{'':18}{row['said']}"
        )
    if "FAULTS_JSON" in os.environ:
        Path(os.environ["FAULTS_JSON"]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
