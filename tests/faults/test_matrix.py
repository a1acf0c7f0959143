"""The fault matrix (tests/faults): a handful of cases; more with --full; all by `make faults`."""

import json
import shutil
from collections.abc import Iterator

import pytest
from safetensors.numpy import load_file, save_file

from tests.faults import damage
from tests.faults.rows import ROWS, Row, by_tests
from tests.faults.runs import RUN, MissedError, Place, newest
from tools import faults

BY_ID = {row.id: row for row in ROWS}
FAST = "K1-0 K2-5 K2-20 T1-2 T1-3 T2-0 T3-0 S1-0 S1-5 S1-10 S3-0 S3-1 S3-2 S3-3".split()
CASES = [pytest.param(*name.split("-"), id=name) for name in FAST]
CASES += [
    pytest.param(row.id, str(seed), id=f"{row.id}-{seed}", marks=pytest.mark.full)
    for row in ROWS
    for seed in range(row.few)
    if f"{row.id}-{seed}" not in FAST
]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("faults"), minutes=0.2)
    yield place
    place.end_all()


@pytest.mark.parametrize("name, seed", CASES)
def test_a_case(name, seed, place):
    row = BY_ID[name]
    if why := row.skip():
        pytest.skip(why)
    row.run(place, int(seed))
    place.end_all()


def test_a_run_that_differs_in_a_bit_is_noticed(place):
    """In a loss, in a tensor of the final checkpoint, or by a step that is missing."""
    folder = damage.finished(place, "bits", "dp2")
    place.expect_equal("bits", "dp2")
    metrics = folder / RUN / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    record = json.loads(lines[6])
    changed = json.dumps(record | {"lm_loss": record["lm_loss"] * (1 + 2**-52)})
    for others in ([*lines[:6], changed, *lines[7:]], lines[:-1]):
        metrics.write_text("\n".join(others) + "\n")
        with pytest.raises(AssertionError, match="losses differ: step 7|steps"):
            place.expect_equal("bits", "dp2")
    metrics.write_text("\n".join(lines) + "\n")
    shard = newest(folder) / "rank_00001.safetensors"
    tensors = load_file(shard)
    name = next(name for name in sorted(tensors) if name.startswith("exp_avg_sq"))
    tensors[name].view("uint32").reshape(-1)[-1] ^= 1
    save_file(tensors, shard)
    with pytest.raises(AssertionError, match="tensors of the final checkpoint differ"):
        place.expect_equal("bits", "dp2")
    shutil.rmtree(folder)


def test_a_fault_that_comes_too_late_is_no_case(place):
    job = place.start("late", "dp2")
    with pytest.raises(MissedError):
        job.reach(11)


def row_that(run) -> Row:
    return Row("K1", "a fault", "nothing", 1, 3, run)


def test_a_case_that_fails_is_not_run_again(place):
    seen = []

    def run(_, seed: int) -> str:
        seen.append(seed)
        assert seed != 8, "once"
        return "fine"

    result = faults.run_row(row_that(run), place, 7, 3, keep=False)
    assert seen == [7, 8, 9] and (result.reached, result.wanted) == (2, 3) and result.kinds == {"fine": 2}
    assert "AssertionError: once" in result.failure
    assert result.repeat == 'make faults ARGS="K1 --seed 8 --count 1 --keep"'


def test_fewer_cases_do_not_replace_more_but_a_failure_does(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "RESULTS", tmp_path / "faults.json")

    def kept_after(wanted: int, failure: str = "") -> tuple[int, str]:
        result = faults.Result("K1", wanted, 0, wanted, failure=failure)
        result.kinds["in a step"] += wanted
        faults.keep_results([result])
        (row,) = faults.kept()["rows"]
        return row["wanted"], row["failure"]

    assert kept_after(5) == (5, "") and kept_after(9) == (9, "") and kept_after(5) == (9, "")
    assert kept_after(2, "lost a bit") == (2, "lost a bit")
    assert "2 of 2" in faults.table() and "**failed**" in faults.table() and "not yet run" in faults.table()


def test_a_row_of_tests_says_how_many_there_were(place, tmp_path, monkeypatch):
    """They are counted by pytest; one that fails fails the row."""
    monkeypatch.setattr(faults, "RESULTS", tmp_path / "faults.json")
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser): parser.addoption('--full', nargs='?')\n"
    )
    for word, cell in (("True", "2 tests, 1 skipped"), ("False", "none")):
        (tmp_path / "test_it.py").write_text(
            f"import pytest\ndef test_a(): assert {word}\ndef test_b(): pass\ndef test_c(): pytest.skip()\n"
        )
        row = by_tests("Z5", "a fault", "nothing", str(tmp_path / "test_it.py"), "-c/dev/null", "-pno:xdist")
        faults.keep_results([faults.run_row(row, place, 0, 7, keep=False)])
        (kept,) = faults.kept()["rows"]
        assert faults.reached(row, {"Z5": kept}).startswith(f"{cell}, ") and kept["wanted"] == 1
        assert ("1 failed, 1 passed, 1 skipped" in kept["failure"]) == (word == "False")


def test_the_table_is_current():
    assert faults.PAGE.read_text(encoding="utf-8") == faults.page(), "python tools/faults.py --table"


def test_rows_are_known_by_their_names(capsys):
    assert len(BY_ID) == len(ROWS) and faults.main(["K2", "--list"]) == 0
    assert capsys.readouterr().out.startswith("K2    40  SIGKILL at 8 points")
    with pytest.raises(SystemExit, match="no row K0"):
        faults.main(["K0"])
