"""Pipeline schedules against published formulas, Megatron's orders and PyTorch's; messages on links."""

import functools
import itertools
import re
import subprocess
import sys
import textwrap
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

import pytest

from nanomegatron import pp, schedules
from nanomegatron.__main__ import main
from nanomegatron.report.schedule_draw import draw_timeline, text_rows
from nanomegatron.schedules import (
    Event,
    Message,
    Op,
    embedding_ranks,
    messages,
    placement,
    schedule,
    simulate,
)

ANY = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zb-v", 2)]
ANY += [("gpipe", 2)] + [("interleaved", chunks) for chunks in (1, 2, 3, 4)]
STAGES, MICROBATCHES = range(1, 9), range(1, 25)
each_schedule = pytest.mark.parametrize("name, chunks", ANY)


def sizes(name, chunks):
    """Every (lists, placement, stages, microbatches) of the grid."""
    for p, m in itertools.product(STAGES, MICROBATCHES):
        yield schedule(name, p, m, chunks), placement(name, p, chunks), p, m


def signed(ops):
    """Megatron's notation: +c a forward of chunk c, counted from 1, -c its backward."""
    return " ".join(f"{op.chunk + 1}" if op.kind == "F" else f"-{op.chunk + 1}" for op in ops)


def test_orders_of_megatron():
    pp2, pp4 = schedule("interleaved", 2, 4, 2), schedule("interleaved", 4, 8, 2)
    assert signed(pp2[0]) == "1 1 2 2 1 -2 1 -2 2 -1 2 -1 -2 -2 -1 -1"
    assert signed(pp2[1]) == "1 1 2 -2 2 -2 1 -1 1 -1 2 -2 2 -2 -1 -1"
    assert signed(pp4[3]) == "1 1 1 1 2 -2 2 -2 2 -2 2 -2 1 -1 1 -1 1 -1 1 -1 2 -2 2 -2 2 -2 2 -2 -1 -1 -1 -1"
    table = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    for ops in schedule("interleaved", 2, 5, 2, group=3):
        assert [(op.microbatch, op.chunk) for op in ops if op.kind == "F"] == table


def loop_of_pp(rank, stages, microbatches):
    """What the loop in the docstring of pp.py does on a rank: ops, receives and sends, in order."""
    done, found = Counter(), []

    def numbered(what, *_):
        done[what] += 1
        found.append((what, done[what] - 1))

    def computed(kind):
        return lambda i, _: found.append((kind, i))

    loop = re.search(r"\n\n( {8}ahead = .+?)\n\n\S", pp.__doc__, re.S)[1]
    names = [f"{verb}_{kind}" for verb in ("receive", "send") for kind in ("forward", "backward")]
    functions = {name: functools.partial(numbered, name) for name in names}
    functions |= {"forward": computed("F"), "backward": computed("BW")}
    exec(textwrap.dedent(loop), dict(rank=rank, stages=stages, microbatches=microbatches, **functions))
    return found


@pytest.mark.parametrize("stages", STAGES)
def test_the_loop_in_the_text_of_pp_is_1f1b(stages):
    """Op by op and message by message, but those that the first and the last rank do not have."""
    for microbatches in MICROBATCHES:
        lists, placed = schedule("1f1b", stages, microbatches), placement("1f1b", stages)
        for rank, exchanges in enumerate(messages(lists, placed)):
            expected = []
            for op, exchange in zip(lists[rank], exchanges, strict=True):
                kind = {"F": "forward", "BW": "backward"}[op.kind]
                assert exchange.receives == (() if exchange.uses is None else (exchange.uses,))
                expected += [(f"receive_{kind}", op.microbatch)] * (exchange.uses is not None)
                expected += [(op.kind, op.microbatch)]
                expected += [(f"send_{kind}", op.microbatch)] * (exchange.sends is not None)
            none = {"receive_forward", "send_backward"} if rank == 0 else set()
            none |= {"send_forward", "receive_backward"} if rank == stages - 1 else set()
            assert [
                each for each in loop_of_pp(rank, stages, microbatches) if each[0] not in none
            ] == expected


def test_every_order_that_megatron_accepts():
    theirs = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    compared = 0
    for p, m, v, group in itertools.product(STAGES, MICROBATCHES, (1, 2, 3, 4), (None, 3, 5, 8)):
        g = group or p
        if not p <= g <= m or 0 < m % g < p or p == 1:
            continue
        table = theirs.get_schedule_table(m, v, g)
        for rank, ops in enumerate(schedule("interleaved", p, m, v, group)):
            axis = SimpleNamespace(size=lambda p=p: p, rank=lambda rank=rank: rank)
            p2p = SimpleNamespace(pp_group=axis, virtual_pipeline_model_parallel_size=v)
            ahead = theirs.get_pp_rank_microbatches(m, v, g, p2p_communicator=p2p)[2]
            forwards = [Op("F", chunk, i) for i, chunk in table]
            backwards = [Op("BW", v - 1 - chunk, i) for i, chunk in table]
            steady = itertools.chain(*zip(forwards[ahead:], backwards))
            assert ops == [*forwards[:ahead], *steady, *backwards[len(table) - ahead :]]
            compared += 1
    assert compared > 2000


def test_zb_v_is_the_order_of_pytorch():
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules").ScheduleZBVZeroBubble
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    for p, m in itertools.product(STAGES, MICROBATCHES):
        this = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
        for rank, ops in enumerate(schedule("zb-v", p, m)):
            actions = filter(None, theirs._calculate_single_rank_operations(this, rank))
            assert ops == [
                Op(kinds[a.computation_type.name], int(a.stage_index != rank), a.microbatch_index)
                for a in actions
            ]


@each_schedule
def test_every_op_once_and_in_order(name, chunks):
    kinds = ("F", "B", "W") if name.startswith("zb") else ("F", "BW")
    for lists, _, _, m in sizes(name, chunks):
        everything = [Op(*op) for op in itertools.product(kinds, range(chunks), range(m))]
        for ops in lists:
            assert sorted(ops) == sorted(everything)
            at = {op: i for i, op in enumerate(ops)}
            for before, after in itertools.pairwise(kinds):
                assert all(at[op] < at[op._replace(kind=after)] for op in ops if op.kind == before)


def published(name, p, m, v):
    """Bubble over ideal time, and the most activations any rank keeps, in chunks."""
    group = max(p, -(-m // max(1, m // p)))  # p, or what it takes to share out a remainder
    return {
        "gpipe": ((p - 1) / (v * m), v * m),
        "1f1b": ((p - 1) / m, min(p, m)),
        "interleaved": ((p - 1) / (v * m), min(v * m, 2 * p - 1 + (v - 1) * group)),
        "zb-h1": ((p - 1) / (3 * m), min(p, m)),
        "zb-v": ((p - 1) / (6 * m), 2 * min(p, m)),
    }[name]


@each_schedule
def test_published_bubble_and_memory(name, chunks):
    """Equal where the formulas hold; with fewer microbatches never a smaller bubble."""
    held = 0
    for lists, placed, p, m in sizes(name, chunks):
        found, (bubble, kept) = simulate(lists, placed), published(name, p, m, chunks)
        if m >= (2 * p - 1 if name == "zb-v" else p):
            assert found.bubble == pytest.approx(bubble, abs=1e-12), (p, m)
            held += 1
        assert found.bubble > bubble - 1e-12, (p, m)
        assert max(found.peak_until_weight) == kept, (p, m)
    assert held > 100


def test_one_f_one_b_keeps_less_on_later_ranks():
    found = simulate(schedule("1f1b", 4, 8), placement("1f1b", 4))
    assert found.peak_until_backward == found.peak_until_weight == [4, 3, 2, 1]
    found = simulate(schedule("zb-h1", 4, 8), placement("zb-h1", 4))
    assert (found.peak_until_backward, found.peak_until_weight) == ([4, 3, 2, 1], [4, 4, 4, 4])


@pytest.mark.parametrize("p, m", [(2, 3), (4, 7), (4, 12), (8, 15), (8, 24)])
def test_no_rank_of_zb_v_is_idle_between_its_first_and_last_op(p, m):
    """What the paper means by zero bubble; the rest is that the ranks start one after the other."""
    events = simulate(schedule("zb-v", p, m), placement("zb-v", p)).events
    for rank in range(p):
        mine = [event for event in events if event.rank == rank]
        assert (mine[0].start, mine[-1].end) == (rank, rank + 6 * m)


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (2, 2, 1), (10, 11, 9), (1.0, 1.2, 0.7)])
def test_bubbles_of_other_costs(f, b, w):
    """(p-1)(F+B+W) for 1f1b, (p-1)(F+B-W) for zb-h1 (arXiv 2401.10241, table 2)."""
    for p, m in [(2, 4), (4, 8), (8, 16)]:
        for name, idle in (("1f1b", f + b + w), ("zb-h1", f + b - w)):
            found = simulate(schedule(name, p, m), placement(name, p), {"F": f, "B": b, "W": w})
            assert found.total - m * (f + b + w) == pytest.approx((p - 1) * idle)


def test_any_group_runs_at_the_published_bubble(full):
    shapes = ((2, 3, 4, 6, 8), (2, 5, 7, 9, 11, 17, 24)) if full else ((2, 3, 8), (2, 9, 11))
    for p, m, v in itertools.product(*shapes, (2, 4)):
        for group in range(p, m + 4):
            found = simulate(schedule("interleaved", p, m, v, group), placement("interleaved", p, v))
            assert m < p or found.bubble == pytest.approx((p - 1) / (v * m))


@pytest.mark.parametrize("name, chunks", ANY[:-1] + [pytest.param(*ANY[-1], marks=pytest.mark.full)])
def test_messages_run_on_links_that_keep_their_order(name, chunks):
    """Ranks that see nothing but their own list of exchanges, over one first-in-first-out link a pair.

    Also: activations reach the next stage, gradients the one before, each once, and by no link if that is on
    the same rank; taken before they are needed only where two kinds of message share a link.
    """
    for lists, placed, p, m in sizes(name, chunks):
        exchanges = messages(lists, placed)
        links, at, moved = defaultdict(deque), [0] * p, True
        waiting, sent = [set() for _ in range(p)], Counter()
        while moved:
            moved = False
            for rank, steps in enumerate(exchanges):
                while at[rank] < len(steps):
                    receives, uses, sends = steps[at[rank]]
                    if any(
                        len(links[source, rank]) < n for source, n in Counter(t[0] for t in receives).items()
                    ):
                        break
                    for message in receives:
                        assert links[message.source, rank].popleft() == message
                        waiting[rank].add(message)
                    if uses:
                        waiting[rank].remove(uses)
                    if sends:
                        assert sends.source == rank
                        there = waiting[rank].add if sends.is_local else links[rank, sends.destination].append
                        there(sends)
                        sent[sends.is_local, *sends[2:]] += 1
                    at[rank], moved = at[rank] + 1, True
                    shared = name == "zb-v" or (name == "interleaved" and p == 2 and m % 2)
                    assert shared or receives == ((uses,) if uses and not uses.is_local else ())
        assert at == [len(ops) for ops in lists] and not any(links.values()) and not any(waiting)
        rank_of = {stage: rank for rank, stages in enumerate(placed) for stage in stages}
        last = p * chunks - 1
        expected = [(rank_of[stage] == rank_of[stage - 1], "F", stage) for stage in range(1, last + 1)]
        expected += [(rank_of[stage] == rank_of[stage + 1], "B", stage) for stage in range(last)]
        assert sent == Counter((*end, i) for end in expected for i in range(m))


def test_uses_match_the_ops():
    lists, placed = schedule("zb-v", 3, 5), placement("zb-v", 3)
    for rank, (ops, steps) in enumerate(zip(lists, messages(lists, placed))):
        for op, step in zip(ops, steps):
            for message, is_end in ((step.uses, True), (step.sends, False)):
                if message:
                    ahead = {"F": 1, "B": -1}[op.kind]
                    stage = placed[rank][op.chunk] + (0 if is_end else ahead)
                    assert message[2:] == (op.kind, stage, op.microbatch)


def test_messages_of_two_ranks_by_hand():
    (_, b1), (_, _) = exchanges = messages(schedule("1f1b", 2, 1), placement("1f1b", 2))
    there, back = Message(0, 1, "F", 1, 0), Message(1, 0, "B", 0, 0)
    assert exchanges == [
        [((), None, there), ((back,), back, None)],
        [((there,), there, None), ((), None, back)],
    ]
    assert b1.uses == back


def test_messages_that_do_not_pair():
    placed = [[0], [1]]
    with pytest.raises(ValueError, match=r"Message\(source=0.*microbatch=1\) is never sent"):
        messages([[Op("F", 0, 0)], [Op("F", 0, 0), Op("F", 0, 1)]], placed)
    with pytest.raises(ValueError, match=r"no op uses: .*microbatch=1"):
        messages([[Op("F", 0, 0), Op("F", 0, 1)], [Op("F", 0, 0)]], placed)
    with pytest.raises(ValueError, match=r"no op uses: .*microbatch=0"):
        messages([[Op("F", 0, 0), Op("F", 0, 1)], [Op("F", 0, 1)]], placed)


def test_timeline_by_hand():
    """Two stages, two microbatches, a message of half a unit."""
    lists, placed = schedule("1f1b", 2, 2), placement("1f1b", 2)
    found = simulate(lists, placed, {"B": 2}, message_time=0.5)
    f0, f1 = Op("F", 0, 0), Op("F", 0, 1)
    b0, b1 = Op("BW", 0, 0), Op("BW", 0, 1)
    assert found.events == [
        *(Event(0, f0, 0, 1), Event(0, f1, 1, 2), Event(0, b0, 6, 9), Event(0, b1, 10, 13)),
        *(Event(1, f0, 1.5, 2.5), Event(1, b0, 2.5, 5.5), Event(1, f1, 5.5, 6.5), Event(1, b1, 6.5, 9.5)),
    ]
    assert (found.total, found.bubbles, found.bubble) == (13, [5 / 8, 5 / 8], 10 / 16)
    assert simulate(lists, placed, {"BW": 1}).total == 6
    assert simulate(lists, placed, {"BW": 1, ("F", 1): 3, ("BW", 0): 2}).total == 11


def test_messages_within_a_rank_take_no_time():
    """The turn of the V: rank 1 goes from stage 1 to stage 2 by itself."""
    found = simulate(schedule("zb-v", 2, 1), placement("zb-v", 2), message_time=10)
    start = {(e.rank, e.op): e.start for e in found.events}
    assert start[1, Op("F", 0, 0)] == 11 and start[1, Op("F", 1, 0)] == 12 and start[0, Op("F", 1, 0)] == 23


def test_deadlock_names_ranks_and_ops():
    """Two ranks that each want the other's work first."""
    lists = [[Op("BW", 0, 0), Op("F", 0, 0)], [Op("F", 0, 0), Op("BW", 0, 0)]]
    with pytest.raises(ValueError) as caught:
        simulate(lists, [[0], [1]])
    rank0 = f"rank 0 at {Op('BW', 0, 0)} waits for [('F', 0, 0), ('B', 1, 0)]"
    rank1 = f"rank 1 at {Op('F', 0, 0)} waits for [('F', 0, 0)]"
    assert str(caught.value) == f"deadlock: {rank0}; {rank1} (kind, stage, microbatch)"


def test_placement():
    assert placement("1f1b", 3) == [[0], [1], [2]]
    assert placement("interleaved", 2, 3) == [[0, 2, 4], [1, 3, 5]]
    assert placement("zb-v", 3) == [[0, 5], [1, 4], [2, 3]]
    for name, ends in (("1f1b", (0, 3)), ("interleaved", (0, 3)), ("zb-v", (0, 0))):
        assert embedding_ranks(placement(name, 4, 2 if name == "interleaved" else 1)) == ends


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("2f2b", 2, 2), "schedule '2f2b': must be one of gpipe, 1f1b"),
        (("1f1b", 0, 2), "0 stages"),
        (("1f1b", 2, 0), "0 microbatches"),
        (("1f1b", 2, 2, 2), "1f1b with 2 chunks a rank"),
        (("zb-v", 2, 2, 3), "zb-v with 3 chunks a rank"),
        (("interleaved", 4, 8, 2, 3), "interleaved in groups of 3: only for interleaved, of at least 4"),
        (("1f1b", 2, 8, 1, 2), "1f1b in groups of 2"),
    ],
)
def test_what_there_is_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)


@pytest.mark.parametrize(
    "shown, name, p, m, chunks",
    [
        (schedules.gpipe, "gpipe", 3, 3, 1),
        (schedules.one_f_one_b, "1f1b", 3, 4, 1),
        (schedules.interleaved, "interleaved", 2, 2, 2),
        (schedules.zb_h1, "zb-h1", 3, 4, 1),
        (schedules.zb_v, "zb-v", 2, 3, 2),
    ],
)
def test_pictures_in_docstrings_are_true(shown, name, p, m, chunks):
    rows = text_rows(simulate(schedule(name, p, m, chunks), placement(name, p, chunks)))
    picture = [line.strip() for line in shown.__doc__.splitlines() if line.strip().startswith("rank")]
    assert picture == rows and len(rows) == p


def test_text_of_times_between_cells():
    found = simulate(schedule("1f1b", 2, 2), placement("1f1b", 2), message_time=0.5)
    assert text_rows(found) == [
        "rank 0  F0  F1  .   .   .   BW0==== .   BW1====",
        "rank 1  .   .   F0  BW0==== F1  BW1====",
    ]


def run(capsys, *arguments):
    code = main(["schedules", *arguments])
    return code, capsys.readouterr()


def test_commands(capsys):
    """One screen lists them; a name that is none of them is an error."""
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"\n  {name} " in out for name in ("generate", "ops", "schedules"))
    assert main(["scedules"]) == 2
    assert "no command 'scedules'" in (err := capsys.readouterr().err) and "\n  schedules " in err
    with pytest.raises(SystemExit) as end:
        main(["generate", "--help"])
    assert end.value.code == 0 and "--max-new-tokens" in capsys.readouterr().out


def test_command_line(capsys, monkeypatch):
    code, out = run(capsys, *"--stages 4 --microbatches 8 --schedule interleaved --chunks 2".split())
    *rows, total = out.out.splitlines()
    assert code == 0 and len(rows) == 4 and "\x1b" not in out.out
    assert rows[3].split()[:9] == "rank 3 . . . F0a F1a F2a F3a".split()
    assert total.startswith("total 28.5 forwards, bubble 18.8 % of ideal time")  # 3 x 8, and 3 / 16 of it
    assert total.endswith("of each rank: 11 9 7 5")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    code, out = run(capsys, *"--stages 2 --microbatches 2 --schedule zb-h1".split())
    assert code == 0 and out.out.splitlines()[1].count("\x1b[48;5;") == 6 and "mW1\x1b[0m" in out.out
    code, out = run(capsys, "--microbatches", "0")
    assert code == 2 and out.err == "nanomegatron schedules: 0 microbatches: a schedule needs at least one\n"


def test_drawing(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    picture = tmp_path / "zbv.png"
    assert run(capsys, "--schedule", "zb-v", "--png", str(picture))[0] == 0
    blue = (abs(imread(picture)[..., :3] - [0, 114 / 255, 178 / 255]) < 0.01).all(-1)
    assert blue.mean() > 0.03
    draw_timeline(simulate(schedule("1f1b", 2, 3), placement("1f1b", 2)), tmp_path / "a.svg", "two ranks")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    code, out = run(capsys, "--png", str(tmp_path / "a.xyz"))
    assert code == 2 and "xyz" in out.err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out = run(capsys, "--png", "a.png")
    assert code == 2 and out.err == "nanomegatron schedules: a.png needs matplotlib: pip install matplotlib\n"


def test_needs_no_torch():
    heavy = "print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    code = f"import sys, nanomegatron.commands.schedules; {heavy}"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
