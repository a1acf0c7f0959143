"""What a tuner measures, the table of it, and the file in which it keeps its times."""

import json
from types import SimpleNamespace

import pytest
import torch

from nanomegatron.ops.matmul import Problem
from nanomegatron.ops.tuner import Tuned, read_times, time_under_load
from tests import fake_cublaslt
from tests.fake_cublaslt import made
from tests.test_ops_matmul import BF16, GPU, LISTED, module, tuner, whole  # noqa: F401 (module: a fixture)

pytestmark = fake_cublaslt.emulated


def test_the_table_counts_a_step(tmp_path):
    """After the first step without a new problem, with its calls alone, once."""
    chosen, a, b = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0), whole(4, 8), whole(8, 2)

    def step(*pairs) -> list[str]:
        for pair in pairs:
            chosen.product(*pair)
        return chosen.table(50.0)

    assert step() == step((a, b), (a, b), (a, b)) == []
    name = "[4, 8] [8, 2] bfloat16 x bfloat16 = bfloat16"
    first = f"{name}: 5.0000 -> 4.0000 ms, algorithm 2 of 4, 2 calls"
    assert step((a, b), (a, b)) == [first, "all: 10.00 -> 8.00 ms a step, a gain of 4.00 % of 50.0 ms"]
    assert step((a, b)) == step((b, a)) == []
    assert len(step((b, a))) == 3


class Clock:
    """Events of a GPU whose time advances as candidates run."""

    def __init__(self, monkeypatch, cost) -> None:
        self.now, self.cost, self.runs = 0.0, cost, []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(**self.event()))

    def event(self) -> dict:
        at = []
        return {
            "record": lambda: at.append(self.now),
            "synchronize": lambda: None,
            "elapsed_time": lambda end: end.at[0] - at[0],
            "at": at,
        }

    def run(self, choice: int) -> None:
        self.runs.append(choice)
        self.now += self.cost(choice, len(self.runs))


def test_candidates_are_timed_hot(monkeypatch):
    """After the warm-up, each for a run that does not count and one that does; slow ones only once."""
    costs = 2.0, 1.9, 4.0, 2.05
    clock = Clock(monkeypatch, lambda choice, _: costs[choice])
    assert time_under_load(clock.run, 4) == pytest.approx(costs)
    warm = 2 + 4 + 150  # calls of 2 ms: 0.3 s behind the six that show how long they take
    assert clock.runs[:warm] == [0] * warm
    rounds = clock.runs[warm::20]  # two runs of 20 ms each
    assert rounds == [0, 1, 2, 3, 0, 1, 3, 0, 1, 3] and len(clock.runs) == warm + 200


def test_one_slow_run_does_not_decide(monkeypatch):
    """As when another process used the GPU for a moment."""
    hiccup = 156 + 80 + 60 + 20 + 15  # in the second round, while candidate 1 is timed
    clock = Clock(monkeypatch, lambda choice, n: 50.0 if n == hiccup else 2.0 - 0.1 * choice)
    assert time_under_load(clock.run, 4) == pytest.approx([2.0, 1.9, 1.8, 1.7])
    assert 50.0 in [clock.cost(clock.runs[n - 1], n) for n in range(1, len(clock.runs) + 1)]


# The file.


def test_the_file_is_read_by_the_next_run(tmp_path):
    first, a, b = tuner(tmp_path, 5.0, 4.0, 3.0, 6.0), whole(4, 8), whole(8, 2)
    first.product(a, b)
    first.product(b, a)
    assert "0 known" in first.describe() and str(first.path) in first.describe()
    again = tuner(tmp_path)
    assert "2 known" in again.describe() and again.saved["[4, 8] [8, 2] bfloat16 x bfloat16 = bfloat16"] == (
        Tuned(choice=2, candidates=4, first=5.0, time=3.0)
    )
    assert torch.equal(again.product(a, b), a @ b)
    assert again.time.taken == 0 and made("last_algorithm") == 3
    assert list(again.path.parent.iterdir()) == [again.path]


def test_another_gpu_or_library_has_times_of_its_own(tmp_path):
    a, b = whole(4, 8), whole(8, 2)
    tuner(tmp_path, 5.0, 4.0, 5.0, 5.0).product(a, b)
    other = tuner(tmp_path, 5.0, 5.0, 5.0, 4.0, owner="GPU, cuBLASLt 2")
    other.product(a, b)
    assert other.time.taken == 1 and made("last_algorithm") == 4
    entries, damage = read_times(other.path)
    assert damage == "" and {
        owner: [one.choice for one in own.values()] for owner, own in entries.items()
    } == {
        GPU: [1],
        "GPU, cuBLASLt 2": [3],
    }


def test_a_list_of_another_length_is_timed_again(tmp_path):
    chosen, a, b = tuner(tmp_path), whole(4, 8), whole(8, 2)
    chosen.saved = {str(Problem(4, 2, 8, BF16, BF16, BF16, 0)): Tuned(1, LISTED + 1, 2.0, 1.0)}
    chosen.product(a, b)
    assert chosen.time.taken == 1 and made("last_algorithm") == 0


def test_only_one_rank_writes(tmp_path):
    chosen = tuner(tmp_path, writes=False)
    chosen.product(whole(4, 8), whole(8, 2))
    assert chosen.time.taken == 1 and not chosen.path.exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "new").write_text("a file")
    chosen = tuner(tmp_path, 5.0, 4.0, 5.0, 5.0)
    assert "damaged and ignored" in chosen.describe()
    with pytest.warns(UserWarning, match="gemm.json: times of matmuls are not kept: "):
        chosen.product(whole(4, 8), whole(8, 2))
    chosen.product(whole(2, 8), whole(8, 2))
    assert made("last_algorithm") == 1


ENTRY = {"choice": 1, "candidates": 4, "first": 2.0, "time": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"GPU": []}',
        "\udcff",
        json.dumps({GPU: {"x": [1, 4, 2.0, 1.0]}}),
        *(
            json.dumps({GPU: {"x": ENTRY | change}})
            for change in (
                {"choice": 4},
                {"choice": -1},
                {"choice": 1.5},
                {"time": 3.0},
                {"time": 0},
                {"more": 1},
            )
        ),
        json.dumps({GPU: {"x": {"choice": 0}}}),
        json.dumps({GPU: {"x": ENTRY | {"first": "2"}}}),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path, text):
    """With one line that says so; the next times replace it."""
    chosen = tuner(tmp_path)
    chosen.path.parent.mkdir()
    chosen.path.write_text(text, errors="surrogateescape")
    chosen = tuner(tmp_path)
    assert "the file is damaged and ignored: " in chosen.describe() and chosen.saved == {}
    assert "\n" not in chosen.describe()
    chosen.product(whole(4, 8), whole(8, 2))
    assert chosen.time.taken == 1 and "1 known" in tuner(tmp_path).describe()
