"""What stands in the pictures of a run, a trace and a schedule: axes, labels, legends and the data drawn."""

import itertools
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import table
from nanomegatron.commands.schedules import main as show_schedule
from nanomegatron.config.settings import Config, ParallelConfig
from nanomegatron.report.plots import draw_pictures, plot_experts, plot_loss, smoothed
from nanomegatron.report.schedule_draw import bars, canvas
from nanomegatron.report.trace import trace_title
from nanomegatron.report.trace_draw import write
from nanomegatron.schedules import placement, schedule, simulate
from tests.report.test_metrics import record, started
from tests.report.test_trace import alone, recording

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures in the order in which they are written, perhaps in several formats."""
    from matplotlib.figure import Figure

    written, save = [], Figure.savefig

    def savefig(figure: Figure, path: Path) -> None:
        written.extend([figure] * (figure not in written))
        save(figure, path)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return written


def words(legend) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def drawn(axes, label: str):
    """The one line of that label."""
    (found,) = (line for line in axes.lines if line.get_label() == label)
    return found


# The loss curve


def write_series(folder: Path, losses, validation=((0, 2.5),)) -> None:
    """validation: pairs of a place in the list of losses, from its end, and a loss."""
    log = started(folder)
    for i, loss in enumerate(losses, 1):
        log.step(record(i, lm_loss=loss, lr=i * 1e-5))
    for before_end, loss in validation:
        log.evaluation(len(losses) - before_end, "validation", loss)
    log.close()


def test_a_loss_picture_fits_a_page(tmp_path):
    from matplotlib.image import imread

    write_series(tmp_path, [5.5, float("nan"), 4.0, 3.0])
    assert plot_loss(tmp_path) == tmp_path / "loss.png"
    pixels = imread(tmp_path / "loss.png")
    assert pixels.shape[1] == 800 and pixels[..., :3].std() > 0.01


def test_plot_says_what_it_lacks(tmp_path, monkeypatch):
    said: list[str] = []
    write_series(tmp_path, [float("nan")])
    assert plot_loss(tmp_path, said.append) is None and "no finite loss" in said[0]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    log = started(tmp_path)
    log.line = said.append
    draw_pictures(log)
    assert said[1:] == ["loss.png needs matplotlib: pip install matplotlib"]


def test_smoothing_does_not_end_with_one_steps_loss():
    """A last step far below the others moves the end by its share of the mean, as anywhere else."""
    noise = np.random.default_rng(0).normal(size=4000)
    assert smoothed(noise)[100:].std() < 0.15  # also at the end
    noise[7] = np.nan
    assert np.isfinite(smoothed(noise)).all()
    losses = np.full(400, 5.0)
    losses[-1] = 1.0
    assert smoothed(losses)[-1] == pytest.approx(5 - 4 / 11) and smoothed(losses)[-12] == 5
    assert smoothed(losses)[-11:] == pytest.approx([5 - 4 / n for n in range(21, 10, -1)])
    line = np.arange(400.0)
    assert smoothed(line)[:-10] == pytest.approx(line[:-10])  # a straight line stays one, from the first step
    assert smoothed(line[:99]).tolist() == line[:99].tolist()


def test_a_long_run_has_two_curves_and_their_last_values(tmp_path, figures):
    losses = np.linspace(8, 4, 400) + np.tile([0.3, -0.3], 200)
    write_series(tmp_path, losses, [(200, 6.5), (0, 4.125)])
    plot_loss(tmp_path)
    above, below = figures[0].axes
    assert above.get_title() == tmp_path.name and above.get_ylabel() == "loss (nats per token)"
    entries = ["training, each step", "training, mean of 21 steps", "validation"]
    assert words(above.get_legend()) == entries
    each, mean, validation = (drawn(above, label) for label in entries)
    assert each.get_ydata() == pytest.approx(losses)
    assert mean.get_ydata() == pytest.approx(smoothed(losses))
    assert validation.get_xydata().tolist() == [[200, 6.5], [400, 4.125]]
    ends = {text.get_text(): text for text in above.texts}
    assert set(ends) == {"4.125", f"{losses[-11:].mean():.3f}"}
    assert {text.xy[0] for text in ends.values()} == {400}
    assert ends["4.125"].get_va() == "bottom"  # that of the higher curve, so that they do not overlap
    assert [text.get_va() for text in ends.values()].count("top") == 1
    assert below.get_ylabel() == "learning rate" and below.get_xlabel() == "iteration"
    assert below.lines[0].get_ydata() == pytest.approx(np.arange(1, 401) * 1e-5)
    assert below.get_xlim() == above.get_xlim() and below.get_ylim()[0] == 0


@pytest.mark.parametrize("steps, marker", [(1, "o"), (60, "None")])
def test_a_short_run_has_one_curve(steps, marker, tmp_path, figures):
    write_series(tmp_path, np.linspace(8, 4, steps), [])
    plot_loss(tmp_path)
    axes = figures[0].axes[0]
    assert words(axes.get_legend()) == ["training"] and len(axes.lines) == 1
    assert axes.lines[0].get_marker() == marker  # one point is no line
    assert [text.get_text() for text in axes.texts] == ["4.000" if steps > 1 else "8.000"]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_checkpoints_and_resumes_are_marked(tmp_path, figures):
    """Stopped after 9 steps, resumed from step 4: the checkpoint of step 8 is of steps that were dropped."""
    write_series(tmp_path, np.linspace(8, 4, 12), [])
    (tmp_path / "log.txt").write_text(
        "saved   runs/a/ckpt, step 4\n iteration 5/12 | saved nothing, step 5\nsaved   runs/a/ckpt, step 8\n"
        "resumed runs/b/ckpt, step 700 (weights only)\nresumed runs/a/ckpt, step 4\n"
        "saved   runs/a/ckpt, step 12\nsaved   runs/a/ckpt, step 12\n"
    )
    plot_loss(tmp_path)
    axes = figures[0].axes[0]
    assert words(axes.get_legend()) == ["training", "resumed", "checkpoint"]
    assert list(drawn(axes, "checkpoint").get_xdata()) == [4, 12]
    (resumed,) = axes.collections
    assert [segment[:, 0].tolist() for segment in resumed.get_segments()] == [[4, 4]]
    low, high = axes.get_ylim()
    assert 3 < low < 4 and 8 < high < 9  # marks do not stretch the axis


# Experts


def test_picture_of_experts(tmp_path, monkeypatch, figures):
    """First one expert is red, one blue, two are dead, then all are white, in each of 30 layers."""
    from matplotlib.image import imread

    said: list[str] = []
    assert plot_experts(tmp_path, said.append) is None and "no tokens of experts" in said[0]
    log = started(tmp_path)
    for i in range(1, 1001):
        tokens = [4000, 96, 0, 0] if i <= 500 else [1024] * 4
        log.details("experts", i, i, {f"decoder.layers.{n}/tokens": tokens for n in range(30)})
    log.close()
    assert plot_experts(tmp_path) == tmp_path / "experts.png"
    pixels = imread(tmp_path / "experts.png")[..., :3]
    assert pixels.shape == (600, 800, 3)
    first, second = pixels[:, 70:320], pixels[:, 400:620]
    red, blue, dark = first @ [1, -1, 0] > 0.3, first @ [-1, 0, 1] > 0.3, first.max(-1) < 0.2
    shares = [red.mean(), blue.mean(), dark.mean(), (second.min(-1) > 0.9).mean()]
    assert 0.15 < shares[0] < 0.3 and 0.15 < shares[1] < 0.3 and shares[2] > 0.2 and shares[3] > 0.9, shares
    check_axes(figures[0], 30)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^experts.png needs matplotlib"):
        plot_experts(tmp_path)


def check_axes(figure, number: int) -> None:
    """Integer ticks, labels, arrows at both ends of the colours, dead experts hatched."""
    axes, bar = figure.axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [f"layer {n}" for n in range(0, number, 2)]
    assert axes.get_xlabel() == "iteration" and words(axes.get_legend()) == ["no token"]
    assert all(float(tick).is_integer() for tick in [*axes.get_yticks(), *axes.get_xticks()])
    assert axes.patch.get_hatch() and axes.patch.get_facecolor() == (0, 0, 0, 1)
    image = axes.images[0].get_array()
    assert image.shape == (4 * number, 1000) and axes.images[0].get_extent() == [0.5, 1000.5, number, 0]
    layers = image.mask.reshape(number, 4, 1000)
    assert layers[:, 2:, :500].all() and not layers[:, :2].any() and not layers[:, :, 500:].any()
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["1/4", "1/2", "1", "2", "4"]
    assert bar.get_ylabel() == "tokens of an expert, as a multiple of an even share"
    assert axes.images[0].colorbar.extend == "both"


# Schedules and traces


def swatches(axes) -> dict[str, list]:
    """The colours that the legend shows beside each of its words; of a line, none."""
    legend, found = axes.get_legend(), {}
    boxes = legend.findobj(lambda artist: type(artist).__name__ == "HPacker")
    for name in words(legend):
        (row,) = (
            box
            for box in boxes
            if [t.get_text() for t in box.findobj(lambda a: type(a).__name__ == "Text")] == [name]
        )
        patches = row.findobj(lambda artist: type(artist).__name__ == "Rectangle")
        found[name] = [tuple(round(255 * part) for part in patch.get_facecolor()[:3]) for patch in patches]
    return found


def test_a_schedule_is_drawn_in_forwards(tmp_path, capsys, figures):
    """Two chunks a rank take half as long each: the total is comparable with that of one chunk."""
    totals = {}
    for name, chunks in (("1f1b", "1"), ("interleaved", "2"), ("zb-v", "1")):
        path = str(tmp_path / f"{name}.png")
        assert show_schedule(["--schedule", name, "--stages", "2", "--chunks", chunks, "--png", path]) == 0
        totals[name] = capsys.readouterr().out.splitlines()[-1].split(",")[0]
    # ideal: 8 microbatches of F + B + W; then a bubble of 1/8, 1/16 and 1/48 of it
    assert totals == {
        "1f1b": "total 27 forwards",
        "interleaved": "total 25.5 forwards",
        "zb-v": totals["zb-v"],
    }
    assert totals["zb-v"] == "total 24.5 forwards"
    for figure, total in zip(figures, (27, 25.5, 24.5), strict=True):
        (axes,) = figure.axes
        assert axes.get_xlabel().startswith("time in units of one forward")
        assert axes.get_xlim() == (0, total) and axes.get_yticks().tolist() == [0, 1]
        assert f"total {total:g} forwards" in figure._suptitle.get_text()
        assert any(line.get_visible() for line in axes.get_xgridlines())
    legends = [swatches(figure.axes[0]) for figure in figures]
    assert list(legends[0]) == ["forward", "backward", "idle"]
    assert list(legends[1]) == ["forward, chunks 0-1", "backward, chunks 0-1", "idle"]
    assert list(legends[2]) == [
        f"{x}, chunks 0-1" for x in ("forward", "input gradient", "weight gradient")
    ] + ["idle"]
    for figure, shown in zip(figures, legends):
        colours = set(itertools.chain(*shown.values()))
        bars = [c.get_facecolor() for c in figure.axes[0].collections]
        bars += [patch.get_facecolor() for patch in figure.axes[0].patches]
        painted = {tuple(round(255 * part) for part in np.ravel(colour)[:3]) for colour in bars}
        assert painted == colours  # every shade has its swatch, idle too
    assert len(set(itertools.chain(*legends[2].values()))) == 7


@pytest.mark.parametrize("microbatches, shown", [(8, 32), (60, 120), (150, 0)])
def test_digits_are_left_out_where_they_do_not_fit(microbatches, shown):
    """All of 8 microbatches, those of the backward of 60, none of 150; they lie within their bars."""
    timeline = simulate(schedule("1f1b", 2, microbatches), placement("1f1b", 2))
    figure = canvas("", (14, 3))
    axes = figure.add_subplot()
    bars(axes, timeline)
    assert len(axes.texts) == shown
    figure.canvas.draw()
    spans = {(event.rank, (event.start + event.end) / 2): event for event in timeline.events}
    for text in axes.texts:
        box = text.get_window_extent().transformed(axes.transData.inverted())
        time, rank = text.get_position()
        event = spans[rank, time]
        assert text.get_text() == str(event.op.microbatch)
        assert event.start <= box.x0 and box.x1 <= event.end


def test_a_trace_names_model_layout_and_schedule(figures, tmp_path):
    title = "tiny: 4 layers, hidden 192 | tp1 pp2 | 1f1b, 1 chunks a rank"
    write(recording(0.5), tmp_path, title)
    figure = figures[0]
    assert figure._suptitle.get_text().splitlines() == [
        title,
        "iteration 9: pipeline of dp 0, tp 0, cp 0, 2 microbatches",
    ]
    above, below = figure.axes
    assert list(swatches(above)) == ["forward", "backward", "idle", "message"]
    assert below.get_xlabel() == "time (ms)" and above.get_xlim() == below.get_xlim() == (0, 9.5)
    for axes, total in ((above, 9), (below, 9.5)):
        idle = [patch for patch in axes.patches if patch.get_width() == total]
        assert len(idle) == 2 and all(line.get_visible() for line in axes.get_xgridlines())
        assert all(patch.get_zorder() < axes.collections[0].get_zorder() for patch in idle)
    assert len(below.lines) == 4 and not above.lines  # two activations, two gradients


def test_title_of_a_trace():
    config = Config(parallel=ParallelConfig(num_virtual_stages_per_pipeline_rank=2))
    config = replace(config, model=replace(config.model, num_layers=8, hidden_size=64))
    assert trace_title("a", config, alone()) == ("a: 8 layers, hidden 64 | tp1 pp1 dp1 cp1 ep1 | no pipeline")
    mesh = alone()
    mesh = replace(mesh, pp=replace(mesh.pp, size=2))
    assert trace_title("a", config, mesh).endswith("| tp1 pp2 dp1 cp1 ep1 | interleaved, 2 chunks a rank")
    assert trace_title("a", Config(), mesh).endswith("| 1f1b")


# The pictures of benchmarks


def test_legends_of_benchmarks_show_each_line():
    """A word and, beside it, the mark of its series: the same colour, dashes and width as in the plot."""
    panels = [panel for plot in table.SPEC["plots"] for panel in plot["panels"]]
    seen = []
    for panel in panels:
        elements = [ElementTree.fromstring(element) for element in table.draw(panel, 0)]
        named = [series for series in panel["series"] if "label" in series]
        for series in named:
            place = [x.text for x in elements].index(series["label"])
            look = [dict(x.attrib) for x in elements[place + 1 :]]
            count = len(table.curve(panel, series)[0]) if series.get("style") == "dots" else 1
            marked = [{k: v for k, v in x.items() if k != "d"} for x in look[: count + 1]]
            assert len({tuple(x.items()) for x in marked}) == 1 and len(marked) == count + 1, series["label"]
            seen.append((series["label"], marked[0].get("stroke-dasharray")))
        colours = [series.get("colour", i) for i, series in enumerate(panel["series"]) if "label" in series]
        assert len(set(colours)) == len(named)
    memory = ["no recompute", "selective: norms, SwiGLU", "full: layers", "memory of a GPU"]
    assert [label for label, _ in seen[-4:]] == memory and ("FP8 tensorwise", "7 3") in seen
