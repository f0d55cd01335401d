"""The page: whole HTML with nothing from outside, whatever the run folder looks like."""

from __future__ import annotations

import json
import random
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import train
from tests.synthetic import of_many, with_a_restart, write_lines
from train.report.command import main, make_report
from train.report.image import LEVELS, colour_of
from train.report.page import MEANING, page_of, page_of_several
from train.report.read import read_run
from train.report.svg import shown, thinned, ticks
from train.report.words import duration
from train.seam import Exit

VOID = {"meta", "img", "br"}
FILES = ["events.jsonl", "metrics.jsonl", "times.jsonl", "plan.json", "environment.json", "verdict.json", "config.yaml"]


class Whole(HTMLParser):
    """Fails where a tag is not closed in its place; keeps what is asked of elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.words: list[str] = []
        self.tags: dict[str, int] = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            assert not name.startswith("on"), f"a script in {tag}"
            self.links += [str(value)] if name in ("href", "src", "srcset", "action", "data", "xlink:href") else []
            self.ids += [str(value)] if name == "id" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def looked_at(page: str) -> Whole:
    """The page, once it is sure that it needs nothing from outside and runs nothing."""
    found = Whole(page)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & found.tags.keys()
    assert all(link.startswith("data:image/png;base64,") for link in found.links), found.links
    assert re.findall(r"url\(([^)]*)\)", page) and set(re.findall(r"url\((.)", page)) == {"#"}
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(found.ids)
    assert len(found.ids) == len(set(found.ids))
    assert not re.search(r"https?:|//[a-z]|@import", page)
    return found


def test_a_run_with_a_restart(tmp_path: Path) -> None:
    page = page_of(read_run(with_a_restart(tmp_path / "run")))
    found = looked_at(page)
    assert "Finished at step 60." in found.text
    assert "1 restarts" in found.text
    assert "20 steps were lost by restarts and done again." in found.text
    assert found.text.count("restart 1") >= 4  # on each curve, and on the heat map
    assert "wall time 84.0 s 100 %" in found.text
    assert "steps lost and done again 15.6 s 18.6 % 15.2 s – 16.0 s" in found.text
    assert "Rank 1 (beta) took 1.2 times as long as the median rank" in found.text
    assert "9.0 s from the first agent to the end of the first step" not in found.text
    assert "11.0 s from the first agent to the end of the first step, on the slowest host." in found.text
    assert "problems" not in page.split("</style>")[1]
    assert re.search(r"0 alpha 10\.0\.0\.1 0 1 beta 10\.0\.0\.2 1", found.text)


def test_with_256_ranks_and_with_one(tmp_path: Path) -> None:
    many = looked_at(page_of(read_run(of_many(tmp_path / "many", 256, slow=77, samples=30))))
    assert "Rank 77 (host09) took 3.0 times as long as the median rank" in many.text
    assert "256 on 32" in many.text
    assert "248–255" in many.text
    one = looked_at(page_of(read_run(of_many(tmp_path / "one", 1))))
    assert "One rank alone: there is nobody to compare it with." in one.text
    for found in (many, one):
        assert "No verdict: it still runs, or all that could have written one was killed." in found.text


def test_eight_ranks_and_ten_thousand_steps_are_small_and_quick(tmp_path: Path) -> None:
    path = of_many(tmp_path / "run", 8, slow=3, steps=10_000, samples=1000)
    began_s = time.process_time()
    file = make_report(path)
    assert time.process_time() - began_s < 5
    assert file.stat().st_size < 2 << 20
    looked_at(file.read_text(encoding="utf-8"))


def test_the_same_folder_gives_the_same_page(tmp_path: Path) -> None:
    path = with_a_restart(tmp_path / "run")
    assert page_of(read_run(path)) == page_of(read_run(path))
    assert make_report(path).read_bytes() == make_report(path).read_bytes()
    assert [each.name for each in path.iterdir() if "report" in each.name] == ["report.html"]


def test_text_of_a_run_is_never_html(tmp_path: Path) -> None:
    path = with_a_restart(tmp_path / "run")
    evil = "</title><script>alert(1)</script><img src=x onerror=y>&\"'\x1b[31m\x00"
    for name in ("events.jsonl", "plan.json", "environment.json", "verdict.json", "metrics.jsonl"):
        text = (path / name).read_text()
        for word in ("alpha", "rank 1 (beta) was killed", "2.13.0", "10.0.0.1", '"grad_norm"', "x.py", '"lr"'):
            text = text.replace(word, json.dumps(evil) if word[0] == '"' else json.dumps(evil)[1:-1])
        (path / name).write_text(text)
    (path / "verdict.json").write_text(json.dumps(
        {"outcome": evil, "exit_code": evil, "cause": evil, "advice": evil, "evidence": [evil], "step": 3}
    ))  # fmt: skip
    (path / "config.yaml").write_text(evil)
    evil_folder = tmp_path / "<b>run"
    path.rename(evil_folder)
    for page in (page_of(read_run(evil_folder)), page_of_several([read_run(evil_folder)] * 2)):
        found = looked_at(page)
        assert "img" not in found.tags
        assert "<script>alert(1)</script>" in found.text
        assert "\x1b" not in page and "\x00" not in page


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_empty_damaged_or_a_folder_is_told(name: str, tmp_path: Path) -> None:
    for count, damage in enumerate(["missing", "empty", "cut", "noise", "folder", "other"]):
        path = with_a_restart(tmp_path / f"run{count}")
        file = path / name
        whole = file.read_bytes()
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage != "missing":
            file.write_bytes(
                {"empty": b"", "cut": whole[:-9], "noise": bytes(range(256)) * 9, "other": b"[1]\n7\n"}[damage]
            )
        run = read_run(path)
        found = looked_at(page_of(run))
        optional = name in ("config.yaml", "times.jsonl", "verdict.json") and damage in ("missing", "empty")
        is_told = any(name in words for words in run.problems)
        assert is_told or optional or name == "config.yaml", (damage, run.problems)
        if is_told:
            assert name in found.text


def test_nothing_at_all_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        assert "nothing of a run was found" in looked_at(page_of(read_run(path))).text
    assert looked_at(page_of_several([read_run(tmp_path)] * 2))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_stands_in_the_files_there_is_a_page(seed: int, tmp_path: Path) -> None:
    """Values changed for others at random places, a hundred times."""
    chance = random.Random(seed)
    odd: list[Any] = [
        None,
        -1,
        1e308,
        -0.5,
        "x",
        [],
        {},
        [[]],
        True,
        float("nan"),
        float("inf"),
        10**30,
        "\ud800",
        {"a": [None]},
    ]
    path = with_a_restart(tmp_path / "run")
    texts = {name: (path / name).read_text() for name in FILES[:-1]}

    def changed(value: object) -> object:
        if chance.random() < 0.04:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: changed(each) for key, each in value.items() if chance.random() > 0.02}
        return [changed(each) for each in value] if isinstance(value, list) else value

    for _ in range(25):
        for name, text in texts.items():
            parts = text.splitlines() if name.endswith("l") else [text]
            (path / name).write_text("\n".join(json.dumps(changed(json.loads(part))) for part in parts) + "\n")
        looked_at(page_of(read_run(path)))
        looked_at(page_of_several([read_run(path)] * 2))


def test_a_script_that_tells_no_times_has_all_the_rest(tmp_path: Path) -> None:
    path = with_a_restart(tmp_path / "run")
    rows = [json.loads(line) for line in (path / "times.jsonl").read_text().splitlines()]
    for row in rows:
        for told in row.get("ranks", ()):
            told[-1] = []
    write_lines(path / "times.jsonl", rows)
    found = looked_at(page_of(read_run(path)))
    assert "Nothing is known of that: its ranks told no times" in found.text
    assert "Too short a run, or no times told: nothing to compare." in found.text
    assert "84.0 s wall time" in found.text


def test_several_runs_lie_beside_each_other(tmp_path: Path) -> None:
    runs = [with_a_restart(tmp_path / "first"), of_many(tmp_path / "second", 8), of_many(tmp_path / "third", 2)]
    found = looked_at(page_of_several([read_run(path) for path in runs]))
    assert "first finished 60 1 0.75 80 2 84.0 s 54.9 %" in found.text
    for name in ("first", "second", "third"):
        assert f"{name}, training" in found.text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        with_a_restart(tmp_path / name)
    where = ["--runs-dir", str(tmp_path)]
    assert main(["first", *where]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'first' / 'report.html'}\n"
    assert main(["first", "second", *where]) == 0
    assert (tmp_path / "compared.html").is_file()
    assert main(["first", "--output", "-", *where]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "<!DOCTYPE html>"
    assert main(["none", *where]) == Exit.USAGE
    assert "there is no run 'none'" in capsys.readouterr().err
    assert main(["first", "--output", str(tmp_path / "no" / "page.html"), *where]) == Exit.USAGE
    assert "cannot write" in capsys.readouterr().err
    assert main([]) == Exit.USAGE
    assert main(["--help"]) == 0


def test_it_is_made_without_torch(tmp_path: Path) -> None:
    with_a_restart(tmp_path / "run")
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was loaded')")
    done = train("report", str(tmp_path / "run"), PYTHONPATH=f"{tmp_path}:{Path.cwd()}")
    assert done.returncode == 0, done.stdout


def test_every_exit_code_has_words() -> None:
    assert set(MEANING) == set(Exit)


def test_numbers_as_people_read_them() -> None:
    cases = {0: "0", 1234: "1234", 12345: "12.35k", 2.5e6: "2.5M", 0.00002: "2e-05", -3.14159: "-3.142", 1e20: "1e+20"}
    assert {value: shown(value) for value in cases} == cases
    lengths = {0.25: "250 ms", 12.34: "12.3 s", 99.96: "1 min 40 s", 3599.6: "1 h 00 min", 7380: "2 h 03 min",
               180000: "2 d 2 h"}  # fmt: skip
    assert {seconds: duration(seconds) for seconds in lengths} == lengths


def test_ticks_are_round_and_hold_all(tmp_path: Path) -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(3.2, 4.1, 5) == [3.2, 3.4, 3.6, 3.8, 4.0, 4.2]
    for low, high in [(0, 0), (5, 5), (-3, 1e-9), (1e-12, 1e12), (1e308, 1e308), (-1e-9, 1e-9)]:
        found = ticks(low, high, 5)
        assert found[0] <= low and found[-1] >= high - 1e-9 * (high - low)
        assert len(found) < 15


def test_thinning_loses_no_spike() -> None:
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= 602
    assert (54_321.0, 99.0) in kept
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_slower_is_darker() -> None:
    light = [0.299 * r + 0.587 * g + 0.114 * b for r, g, b in map(colour_of, [*LEVELS, 9.0])]
    assert light == sorted(light, reverse=True)
    assert colour_of(None) == (128, 128, 128)
