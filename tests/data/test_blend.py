"""Blends: order, sizes and samples against megatron-core; then the files and flags around them."""

import random
import time

import numpy as np
import pytest

from nanomegatron.config.settings import DataConfig
from nanomegatron.data import blended_dataset as data_blend
from nanomegatron.data.blended_dataset import BlendedDataset, blend_index, parse_blend
from nanomegatron.data.gpt_dataset import GPTDataset, build_datasets, choose_tokenizer
from nanomegatron.data.tokenizer import build_tokenizer
from tests.megatron_data import megatron, random_documents, write

TOKENIZER = build_tokenizer("NullTokenizer", vocab_size=127)


def greedy(weights, size, limits=None):
    """The rule as the loop it is, in Python's own doubles."""
    taken, order = [0] * len(weights), []
    for n in range(size):
        lags = [w * max(n, 1) - t for w, t in zip(weights, taken)]
        if limits:
            lags = [lag if t < most else -np.inf for lag, t, most in zip(lags, taken, limits)]
        order.append((lags.index(max(lags)), taken[lags.index(max(lags))]))
        taken[order[-1][0]] += 1
    return order


def test_golden_order():
    datasets, samples, taken = blend_index([0.5, 0.3, 0.2], 10)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0] and datasets.dtype == np.int16
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4] and samples.dtype == np.int64
    assert taken.tolist() == [5, 3, 2]
    datasets, samples, _ = blend_index(data_blend._normalized([3, 2, 1]), 6, [3, 2, 1])
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0] and samples.tolist() == [0, 0, 0, 1, 1, 2]


def weights_of(draw, count):
    kind = draw.choice(["random", "small numbers", "equal", "far apart"])
    return {
        "random": lambda: [draw.random() + 1e-9 for _ in range(count)],
        "small numbers": lambda: [float(draw.randint(1, 6)) for _ in range(count)],
        "equal": lambda: [1.0] * count,
        "far apart": lambda: [10.0 ** draw.randint(-6, 3) for _ in range(count)],
    }[kind]()


@pytest.mark.parametrize("case", range(20))
def test_same_order_as_megatron(case):
    """Many stretches from guesses, to the bit as the loop: ties and all."""
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    draw = random.Random(case)
    weights, size = weights_of(draw, draw.randint(2, 9)), draw.choice([1, 511, 512, 513, 30_000])
    weights = data_blend._normalized(weights)
    datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(datasets, samples, weights, len(weights), size, False)
    mine = blend_index(weights, size)
    np.testing.assert_array_equal(mine[0], datasets)
    np.testing.assert_array_equal(mine[1], samples)
    np.testing.assert_array_equal(mine[2], np.bincount(datasets, minlength=len(weights)))


@pytest.mark.parametrize("case", range(10))
def test_same_exhaustive_order_as_megatron(case):
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    draw = random.Random(case)
    sizes = [draw.choice([1, 2, 7, 100, 3000]) for _ in range(draw.randint(2, 9))]
    datasets, samples = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(datasets, samples, sizes, len(sizes))
    mine = blend_index(data_blend._normalized(sizes), sum(sizes), sizes)
    np.testing.assert_array_equal(mine[0], datasets)
    np.testing.assert_array_equal(mine[1], samples)
    assert list(zip(mine[0], mine[1])) == greedy(data_blend._normalized(sizes), sum(sizes), sizes)


def test_ten_million_in_seconds():
    weights = data_blend._normalized([0.31, 0.27, 0.2, 0.13, 0.09])
    begin = time.process_time()
    datasets, _, taken = blend_index(weights, 10_000_000)
    assert time.process_time() - begin < 15
    np.testing.assert_allclose(taken / 1e7, weights, atol=1e-6)
    assert datasets[:3000].tolist() == [i for i, _ in greedy(weights, 3000)]


def three_sizes(draw, tokens, seq_length):
    return [max(1, int(draw.choice([0.3, 1, 1.4, 2.9]) * n / seq_length)) for n in tokens]


class Case:
    """Two to five data sets, weights or none, a split or three lists; ours and Megatron's reading."""

    def __init__(self, folder, case):
        draw = random.Random(case)
        count, self.seed = draw.randint(2, 5), draw.randrange(10_000)
        self.seq_length = draw.choice([5, 8, 16, 32])
        self.prefixes = [str(folder / f"d{i}") for i in range(count)]
        sets = [
            write(prefix, random_documents(case + i, draw.choice([40, 90]), draw.choice([20, 60])))
            for i, prefix in enumerate(self.prefixes)
        ]
        self.weights = weights_of(draw, count) if case % 4 else None
        self.split = draw.choice(["60,20,20", "1,1,1", "100", "90,10", None])
        share = [float(x) for x in (self.split or "1,1,1").split(",")]
        share = np.array(share + [0.0] * (3 - len(share))) / (sum(share) if self.split else 1)
        total = sum(int(s.sequence_lengths.sum()) for s in sets)
        self.sizes = three_sizes(draw, share * total, self.seq_length)
        self.cache = folder / "cache"

    def words(self, weights):
        pairs = zip(weights, self.prefixes) if weights else ((p,) for p in self.prefixes)
        return tuple(str(word) for pair in pairs for word in pair)

    def settings(self, weights):
        if self.split:
            return dict(data_path=self.words(weights), split=self.split)
        one = (str(weights[0]), self.prefixes[0]) if weights else (self.prefixes[0],)
        return dict(train_data_path=self.words(weights), valid_data_path=one, test_data_path=self.words(None))

    def ours(self, weights=None):
        data = DataConfig(
            seq_length=self.seq_length,
            data_cache_path=str(self.cache),
            **self.settings(weights or self.weights),
        )
        return build_datasets(data, self.sizes, self.seed, TOKENIZER)

    def theirs(self):
        blend = (self.prefixes, self.weights)
        if not self.split:
            blend = [blend, (self.prefixes[:1], self.weights and self.weights[:1]), (self.prefixes, None)]
        return megatron(blend, self.sizes, self.seq_length, self.seed, self.split)


def assert_all_samples_same(ours, theirs):
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine is None) == (reference is None)
        if mine is None:
            continue
        assert len(mine) == len(reference)
        for i in range(len(mine)):
            sample = reference[i]
            np.testing.assert_array_equal(mine[i][:-1], sample["tokens"])
            np.testing.assert_array_equal(mine[i][1:], sample["labels"])


@pytest.mark.parametrize("case", [*range(16), 133])
def test_same_samples_as_megatron(tmp_path, case):
    drawn = Case(tmp_path, case)
    try:
        theirs = drawn.theirs()
    except IndexError as error:  # half a percent on top was not enough; ours asks for more then
        assert "oversamples the contributing datasets" in str(error) and case == 133
        for mine in filter(None, drawn.ours()):
            assert all(len(mine[i]) == drawn.seq_length + 1 for i in range(len(mine)))
        return
    for _ in range(2):  # made, and from the cache
        assert_all_samples_same(drawn.ours(), theirs)


def test_training_order_on_data_made_by_megatron(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefixes = [str(tmp_path / name) for name in "ab"]
    for seed, prefix in enumerate(prefixes):
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for document in random_documents(seed, 60, 20):
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")
    words = ("2", prefixes[0], "1", prefixes[1])
    data = DataConfig(data_path=words, split="80,20", seq_length=8)
    theirs = megatron((prefixes, [2.0, 1.0]), [200, 30, 0], 8, 5, "80,20")
    assert_all_samples_same(build_datasets(data, (200, 30, 0), 5, TOKENIZER), theirs)


def test_one_dataset_with_a_weight(tmp_path):
    """Megatron asks it for half a percent more, which can be one epoch more."""
    write(tmp_path / "d", random_documents(1, 60, 20))
    for size in (30, 71, 200):
        data = DataConfig(data_path=("3", str(tmp_path / "d")), split="1", seq_length=8)
        theirs = megatron(([str(tmp_path / "d")], [3.0]), [size, 0, 0], 8, 5, "1")
        assert_all_samples_same(build_datasets(data, (size, 0, 0), 5, TOKENIZER)[:1], theirs[:1])


def mutate_weight(monkeypatch, case):
    changed = [case.weights[0] * 1.2, *case.weights[1:]]
    return case.ours(changed)


def mutate_ties(monkeypatch, case):
    """The last of equals instead of the first."""
    rule = data_blend.blend_index
    monkeypatch.setattr(
        data_blend,
        "blend_index",
        lambda w, n, limits: (len(w) - 1 - rule(w[::-1], n, limits)[0], *rule(w, n, limits)[1:]),
    )
    return case.ours()


def mutate_surplus(monkeypatch, case):
    """Each dataset asked for twice what it gives: other epochs, another order."""
    ask = GPTDataset.__init__
    monkeypatch.setattr(
        GPTDataset, "__init__", lambda self, d, part, n, *a, **k: ask(self, d, part, n and 2 * n, *a, **k)
    )
    return case.ours()


def mutate_label(monkeypatch, case):
    read = GPTDataset.__getitem__
    monkeypatch.setattr(GPTDataset, "__getitem__", lambda self, i: np.roll(read(self, i), 1))
    return case.ours()


def mutate_one_normalization(monkeypatch, case):
    """Megatron divides by the sum twice: a change in last bits."""
    once = data_blend._normalized
    monkeypatch.setattr(data_blend, "_normalized", lambda w: w if abs(sum(w) - 1) < 1e-9 else once(w))
    return case.ours()


def mutate_seed(monkeypatch, case):
    case.seed += 1
    return case.ours()


@pytest.mark.parametrize(
    "mutate",
    [mutate_one_normalization, mutate_weight, mutate_ties, mutate_surplus, mutate_label, mutate_seed],
    ids=lambda f: f.__name__,
)
def test_the_comparison_sees(tmp_path, monkeypatch, mutate):
    """Each mistake is one the comparison with Megatron finds; without one it finds nothing."""
    case = Case(tmp_path, 1)
    case.split, case.weights, case.sizes = "1", [1.0, 4.0, 1.0], [1500, 0, 0]
    theirs = case.theirs()
    assert_all_samples_same(case.ours()[:1], theirs[:1])
    case.cache = tmp_path / "other"
    with pytest.raises(AssertionError):
        assert_all_samples_same(mutate(monkeypatch, case)[:1], theirs[:1])


class Counting:
    """A dataset of at least as many samples as asked, each known by its first token."""

    def __init__(self, name, length, known=None):
        self.name, self.length, self.known = name, length, known

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if not 0 <= i < self.length:
            raise IndexError
        return np.array([self.name, i])

    def bytes_per_token(self):
        return self.known


def test_a_dataset_asked_too_little_is_asked_again():
    """Forty weights make forty samples of rounding, more than half a percent on top of one."""
    asked = []
    blend = BlendedDataset(
        [lambda n, i=i: asked.append((i, n)) or Counting(i, n) for i in range(40)],
        [1.0] + [1e-6] * 39,
        100,
    )
    assert len(blend) == 139 and len(asked) > 40
    assert [tuple(blend[i]) for i in range(len(blend))] == greedy(blend_weights(40), 139)


def blend_weights(count):
    return data_blend._normalized([1.0] + [1e-6] * (count - 1))


def test_without_weights_no_sample_comes_twice():
    blend = BlendedDataset([lambda n, i=i: Counting(i, 5 + 9 * i) for i in range(4)], None, 10_000)
    seen = [tuple(blend[i]) for i in range(len(blend))]
    assert len(seen) == len(set(seen)) == 5 + 14 + 23 + 32


def test_bytes_per_token():
    def blend(*known):
        return BlendedDataset([lambda n, k=k: Counting(0, n, k) for k in known], [3.0, 1.0], 400)

    assert blend(4.0, 2.0).bytes_per_token() == pytest.approx(3.5, abs=0.02)
    assert blend(4.0, None).bytes_per_token() is None


def test_bytes_per_token_of_files(tmp_path):
    tokens = dict(fingerprint=TOKENIZER.fingerprint, max_token=9, tokenizer=TOKENIZER.spec)
    write(tmp_path / "a", [[1] * 300], sidecar={**tokens, "tokens": 300, "text_bytes": 1200})
    write(tmp_path / "b", [[1] * 300], sidecar={**tokens, "tokens": 300, "text_bytes": 600})
    write(tmp_path / "c", [[1] * 300])
    known = {}
    for names in ("a", "ab", "c", "ac"):
        data = DataConfig(data_path=tuple(str(tmp_path / n) for n in names), split="1", seq_length=8)
        known[names] = build_datasets(data, (10, 0, 0), 0, TOKENIZER)[0].bytes_per_token()
    assert known == {"a": 4.0, "ab": 3.0, "c": None, "ac": None}
    mock = build_datasets(DataConfig(mock_data=True, seq_length=8), (10, 0, 0), 0, TOKENIZER)[0]
    assert mock.bytes_per_token() is None


@pytest.mark.parametrize(
    "words, expected",
    [
        ("a", (["a"], None)),
        ("a b", (["a", "b"], None)),
        ("a b c", (["a", "b", "c"], None)),
        ("0.3 a 7e-1 b", (["a", "b"], [0.3, 0.7])),
        ("2 a", (["a"], [2.0])),
        ("1 2 3", (["1", "2", "3"], None)),
        ("0.3 a b c", None),
        ("0 a 1 b", None),
        ("-1 a 1 b", None),
        ("nan a 1 b", None),
        ("inf a 1 b", None),
    ],
)
def test_lists_of_data(words, expected):
    if expected:
        assert tuple(parse_blend(words.split(), "--data-path")) == expected
        theirs = pytest.importorskip("megatron.core.datasets.utils").get_blend_from_list(words.split())
        assert (list(theirs[0]), theirs[1]) == expected
    else:
        with pytest.raises(ValueError, match=f"--data-path {words}: a weight above 0 before every prefix"):
            parse_blend(words.split(), "--data-path")


def test_data_args_path(tmp_path):
    write(tmp_path / "a", random_documents(1, 60, 20))
    write(tmp_path / "b", random_documents(2, 60, 20))
    words = ("0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b"))
    (tmp_path / "list").write_text(f"{words[0]} {words[1]}\n\t{words[2]} {words[3]}\n")
    listed, named = dict(data_args_path=str(tmp_path / "list")), dict(data_path=words)
    built = [
        build_datasets(DataConfig(seq_length=8, split="1", **d), (60, 0, 0), 3, TOKENIZER)[0]
        for d in (listed, named)
    ]
    np.testing.assert_array_equal(*[np.stack([d[i] for i in range(60)]) for d in built])
    with pytest.raises(FileNotFoundError, match="gone"):  # which the checks of a run say first
        choose_tokenizer(DataConfig(data_args_path="gone"))
    with pytest.raises(ValueError, match=r"a.json does not say which tokenizer"):
        choose_tokenizer(DataConfig(**listed))


def test_every_part_of_a_blend_is_checked_first(tmp_path):
    write(tmp_path / "a", random_documents(1, 60, 20))
    write(tmp_path / "b", [[1, 2, 3]])
    data = DataConfig(data_path=(str(tmp_path / "a"), str(tmp_path / "b")), split="1", seq_length=8)
    with pytest.raises(
        ValueError, match=r"train data: 3 tokens in sequences 0..1 of .*b, which has 1; a sample takes"
    ):
        build_datasets(data, (10, 0, 0), 0, TOKENIZER)
    assert not list((tmp_path / "cache").glob("*sample_index.npy"))


def test_one_document_trains_without_validation_as_the_error_says(tmp_path):
    write(tmp_path / "one", random_documents(1, 1, 400))
    data = DataConfig(data_path=(str(tmp_path / "one"),), seq_length=8)
    with pytest.raises(ValueError, match="valid data: 0 tokens .* has 1; .* --eval-iters 0 to train without"):
        build_datasets(data, (10, 8, 8), 0, TOKENIZER)
    assert build_datasets(data, (10, 0, 0), 0, TOKENIZER)[1:] == (None, None)
