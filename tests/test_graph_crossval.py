"""The protocol: folds that never change, training that cannot see the test fold, and
results that are whole or absent (nbs/89_cross_validation.ipynb).
"""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.graph import crossval
from et_nbdev.graph.batches import EdgeLists, learn_encoding, make_buckets
from et_nbdev.graph.classify import ClassifyConfig
from et_nbdev.graph.crossval import (
    Candidate,
    FitConfig,
    cross_validate,
    deal,
    fit_classifier,
    parts,
    predict_logits,
    score,
    stream,
    summary,
)
from et_nbdev.graph.sets import TU_NAMES, load_graphs

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")


class Counts(nnx.Module):
    "Sees the sum of all features, normalizes it over the batch, drops some in training."

    def __init__(self, width, sizes, rngs):
        self.first = nnx.Linear(sizes.num_features, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Linear(width, sizes.num_classes, rngs=rngs)

    def __call__(self, batch, rngs=None):
        x, off = batch.features, rngs is None
        if x.ndim == 2:
            x = jax.ops.segment_sum(x, batch.graph, len(batch.labels))
        else:
            x = x.sum(1)
        x = self.norm(self.first(x), use_running_average=off)
        x = nnx.Dropout(0.1)(jax.nn.relu(x), deterministic=off, rngs=rngs)
        return self.second(x)


GRID = [Candidate(6, FitConfig(epochs=3, lr=lr)) for lr in (1e-3, 1e-2)]
OPTIONS = dict(k=2, num_buckets=1, progress=False)
ROWS = ("loss", "validation", "predictions", "chosen")


@pytest.fixture(scope="module")
def graphs():
    return load_graphs("rings")[np.arange(60)]


@pytest.fixture(scope="module")
def fold(graphs):
    return deal(graphs.labels, 5)


def supplies(graphs, train):
    encoding, k = learn_encoding(graphs, train), (graphs.num_nodes, 0)
    options = dict(k=0, num_buckets=2, batch_size=16)
    return {
        "dense": make_buckets(graphs, encoding, **options),
        "edges": EdgeLists(graphs, encoding, np.zeros(k, np.float32), 16),
    }


# ------------------------------------------------------------------------------------
# folds


@given(
    st.lists(st.integers(0, 5), min_size=12, max_size=80),
    st.integers(3, 10),
    st.integers(0, 5),
)
@examples(50)
def test_folds_are_disjoint_complete_and_stratified(labels, k, seed):
    labels = np.array(labels)
    fold, everyone = deal(labels, k, seed), np.arange(len(labels))
    assert np.ptp(np.bincount(fold, minlength=k)) <= 1
    for c in np.unique(labels):
        assert np.ptp(np.bincount(fold[labels == c], minlength=k)) <= 1
    split = [parts(fold, f) for f in range(k)]
    for one in split:
        assert np.array_equal(np.sort(np.concatenate(one)), everyone) and all(
            map(len, one)
        )
    assert sorted(np.concatenate([one.test for one in split])) == list(everyone)


def test_folds_never_change():
    assert "".join(map(str, deal(np.arange(20) % 2, 5))) == "44342013421021320103"
    labels = np.arange(200) % 2
    assert not np.array_equal(deal(labels, 10, 0), deal(labels, 10, 1))
    for bad, says in (([0] * 9, "at least k = 10 graphs"), ([0, 1] * 6 + [-1], "-1")):
        with pytest.raises(ValueError, match=f"^labels: .*{says}"):
            deal(np.array(bad))


def kept_folds(name):
    kept = json.loads((ROOT / "results/graph-classification/folds.json").read_text())
    return np.array(list(map(int, kept[f"{name}/10"])))


GRAPHS = dict(MUTAG=188, PROTEINS=1113, ENZYMES=600, NCI1=4110, NCI109=4127)
GRAPHS |= dict(Mutagenicity=4337, DD=1178)


@pytest.mark.parametrize("name", [n for n in TU_NAMES if n != "FRANKENSTEIN"])
def test_kept_folds_are_complete(name):
    sizes = np.bincount(kept_folds(name))
    assert sizes.sum() == GRAPHS[name] and len(sizes) == 10 and np.ptp(sizes) <= 1


@pytest.mark.parametrize("name", [n for n in GRAPHS if n != "DD"])
def test_kept_folds_are_those_of_the_real_labels(et_data, name):
    assert np.array_equal(kept_folds(name), deal(load_graphs(name, et_data).labels))


# ------------------------------------------------------------------------------------
# training


@pytest.mark.parametrize("layout", ["dense", "edges"])
def test_batches_hold_every_graph_once_and_depend_on_their_number(graphs, layout):
    ids = np.arange(5, 55)
    supply = supplies(graphs, ids)[layout]
    per, load = len(supply.plan(ids, 0)), supply.load
    numbers = lambda loaded: np.concatenate(
        [np.ravel(x) for x in jax.tree.leaves(loaded)]
    )
    for epoch in (0, 1):
        plan = supply.plan(ids, 0, epoch)
        which = np.concatenate([supply.members(part) for part in plan])
        assert sorted(which[which >= 0]) == list(ids)
        later = stream(supply, ids, 0, epoch * per + 1)
        for part, loaded in zip(plan[1:], later):
            assert np.array_equal(numbers(load(part)), numbers(loaded))


def test_training_is_repeatable_and_compiles_once(graphs):
    easy = replace(graphs, labels=(graphs.sizes > np.median(graphs.sizes)).astype(int))
    part = parts(deal(easy.labels, 5), 0)
    buckets = supplies(easy, part.train)["dense"]
    config, rows = FitConfig(epochs=12, lr=1e-2, batch_size=16, weight_decay=0.0), []
    build = lambda: Counts(6, buckets, nnx.Rngs(0))
    split = buckets, part.train, part.validation
    runs = [fit_classifier(build(), *split, config, 0, rows.append) for _ in range(2)]
    history = runs[0].history
    assert history == runs[1].history and rows == 2 * history and len(rows) == 24
    states = (nnx.state(run.model) for run in runs)
    jax.tree.map(np.testing.assert_array_equal, *states)
    best = max(history, key=lambda r: (r["validation_accuracy"], -r["validation_loss"]))
    assert best["epoch"] == runs[0].epoch
    # the weights and statistics of that epoch, not the last ones
    logits = predict_logits(runs[0].model, buckets, part.validation)
    found = score(logits, easy.labels[part.validation])
    assert found == (best["validation_accuracy"], best["validation_loss"])
    programs = crossval.programs(nnx.split(build(), nnx.Param, ...)[0])
    before = [p._cache_size() for p in programs]
    other = FitConfig(epochs=2, lr=1e-3, batch_size=16, weight_decay=0.1, clip=0.5)
    fit_classifier(build(), buckets, part.train[3:], part.test, other)
    assert [p._cache_size() for p in programs] == before == [2, 2]
    assert fit_classifier(build(), *split, config, 1).history != history


def test_the_weights_kept_are_those_of_the_best_epoch(graphs, monkeypatch):
    "By accuracy, then by loss, then the first; not the last."
    supply, seen = supplies(graphs, np.arange(40))["dense"], []
    marks = [(0.5, 0.1), (0.75, 2.0), (0.75, 1.0), (0.75, 1.0), (0.25, 0.1)]

    def told(logits, labels):
        seen.append(logits)
        return crossval.Scores(*marks[len(seen) - 1])

    monkeypatch.setattr(crossval, "score", told)
    model, held = Counts(6, supply, nnx.Rngs(0)), np.arange(40, 50)
    config = FitConfig(epochs=5, lr=1e-2)
    run = fit_classifier(model, supply, np.arange(40), held, config)
    assert run.epoch == 3 and len(run.history) == 5
    assert np.array_equal(predict_logits(run.model, supply, held), seen[2])


@pytest.mark.parametrize("clip", [1e6, 1e-8])
def test_one_step_is_adamw_of_the_summed_loss(graphs, clip):
    class Linear(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, batch, rngs=None):
            return self.linear(batch.features.sum(1))

    encoding, ids = learn_encoding(graphs, [0]), np.arange(20)
    buckets = make_buckets(graphs, encoding, k=0, num_buckets=1, batch_size=64)
    config = dict(epochs=1, batch_size=64, lr=0.1, warmup=0.0, weight_decay=0.5)
    batch, before = next(buckets.batches(ids)), Linear()

    def loss(model):
        own = jax.nn.log_softmax(model(batch))[
            jnp.arange(len(batch.labels)), batch.labels
        ]
        return -jnp.sum(own, where=batch.labels >= 0) / 64

    slope = nnx.grad(loss)(before)
    run = fit_classifier(
        Linear(), buckets, ids, np.arange(20, 25), FitConfig(**config, clip=clip)
    )
    norm = float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(slope))))
    shrink, after = min(1, clip / norm), run.model.linear
    # its first step; one of one is half way down the cosine
    adam = lambda g: g[...] * shrink / (jnp.abs(g[...] * shrink) + 1e-8)
    kernel, bias = before.linear.kernel[...], before.linear.bias[...]
    # matrices decay, vectors do not
    kernel = kernel - 0.05 * (adam(slope.linear.kernel) + 0.5 * kernel)
    bias = bias - 0.05 * adam(slope.linear.bias)
    np.testing.assert_allclose(after.kernel[...], kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(after.bias[...], bias, rtol=1e-4, atol=1e-6)
    assert run.history[0]["loss"] == pytest.approx(float(loss(before)) * 64 / 20)


def test_training_stops_where_the_loss_is_lost(graphs, fold):
    class Explodes(Counts):
        def __call__(self, batch, rngs=None):
            return super().__call__(batch, rngs) * jnp.float32(jnp.inf)

    # most of the test graphs are of the class that few others are of
    labels = np.where(fold == 0, 1, np.random.default_rng(0).integers(0, 5, 60) == 0)
    given = replace(graphs, labels=labels.astype(int))
    make = lambda *a: Explodes(*a)
    (row,) = cross_validate(make, given, fold, GRID[:1], folds=[0], **OPTIONS)
    assert row["candidates"][0]["epoch"] == 0 and row["loss"] == []
    assert row["largest_class"] == 0 and 0 <= row["test_accuracy"] <= 1


@pytest.mark.parametrize(
    "bad",
    [dict(epochs=0), dict(lr=-1.0), dict(warmup=1.0), dict(weight_decay=float("nan"))],
    ids=str,
)
def test_settings_are_checked(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        FitConfig(**bad)


# ------------------------------------------------------------------------------------
# the protocol


def test_training_cannot_see_the_test_fold(graphs, fold):
    """Every label of the test fold wrong, and its attributes absurd: training, choice
    and weights are the same to the last bit.
    """
    noise = np.random.default_rng(0).normal(size=(graphs.num_nodes, 2))
    measured = replace(graphs, node_attributes=noise)
    owner = np.repeat(np.arange(60), graphs.sizes)

    def run(ids=(), factor=1.0, flip=True):
        "With labels flipped and attributes scaled in some graphs."
        labels, scale = graphs.labels.copy(), np.where(np.isin(owner, ids), factor, 1)
        labels[list(ids)] ^= flip
        given = replace(measured, labels=labels, node_attributes=noise * scale[:, None])
        kept = []
        keep = lambda f, model: kept.append(nnx.state(model))
        options = dict(folds=[1], keep=keep, **OPTIONS)
        return cross_validate(Counts, given, fold, GRID, **options)[0], kept[0]

    part = parts(fold, 1)
    (clean, weights), (dirty, others) = run(), run(part.test)
    assert [clean[k] for k in ROWS] == [dirty[k] for k in ROWS]
    # it is scored all the same
    assert clean["test_correct"] + dirty["test_correct"] == len(part.test)
    absurd, again = run(part.test, 1e4)
    assert [clean[k] for k in ROWS[:2]] == [absurd[k] for k in ROWS[:2]]
    for other in (others, again):
        jax.tree.map(np.testing.assert_array_equal, weights, other)
    # the hold-out is looked at, but teaches no scale; the comparison can fail
    told = lambda row: row["candidates"][0]["validation_loss"]
    for other in (run(part.validation, 1e2, flip=False), run(part.validation)):
        assert told(other[0]) != told(clean) == told(absurd)


def test_labels_of_the_test_fold_never_reach_the_training_function(
    graphs, fold, monkeypatch
):
    seen = []

    def watch(model, supply, train, validation, *rest):
        seen.append((supply, train, validation))
        return fit_classifier(model, supply, train, validation, *rest)

    monkeypatch.setattr(crossval, "fit_classifier", watch)
    cross_validate(Counts, graphs, fold, GRID[:1], folds=[2], **OPTIONS)
    ((supply, train, validation),), part = seen, parts(fold, 2)
    assert np.array_equal(train, part.train)
    assert np.array_equal(validation, part.validation)
    assert (supply.labels[part.test] == -1).all()
    assert (supply.labels[part.train] == graphs.labels[part.train]).all()
    on_device = np.concatenate([np.asarray(b.labels) for b in supply.buckets])
    assert (on_device == -1).sum() == len(part.test)


def test_the_winner_is_the_best_on_the_hold_out(graphs, fold):
    row = cross_validate(Counts, graphs, fold, GRID, folds=[0], **OPTIONS)[0]
    tried = row["candidates"]
    marks = [(c["validation_accuracy"], -c["validation_loss"]) for c in tried]
    assert row["chosen"] == marks.index(max(marks))
    truth = graphs.labels[fold == 0]
    assert row["test_graphs"] == len(row["predictions"]) == len(truth)
    assert row["test_accuracy"] == (np.array(row["predictions"]) == truth).mean()
    assert {"seconds", "commit", "date", "jax", "settings"} <= set(row)
    two = [{"test_accuracy": 0.5}, {"test_accuracy": 0.7}]
    assert summary(two) == "60.0 ± 14.1 (2 folds)"
    assert summary(two[:1]) == "50.0 (1 fold)"


FOUND = {"test_accuracy": 0.75, "test_correct": 9, "test_graphs": 12}


def test_results_are_written_whole_and_read_again(graphs, fold, tmp_path, monkeypatch):
    run = lambda given=graphs, grid=GRID[:1], f=0, **o: cross_validate(
        Counts, given, fold, grid, folds=[f], out=tmp_path / "of", **OPTIONS | o
    )[0]

    def boom(*a, **k):
        raise OSError("no more")

    monkeypatch.setattr(crossval, "_one_fold", lambda *a: (FOUND, None))
    with monkeypatch.context() as m:
        m.setattr("os.replace", boom)
        with pytest.raises(OSError, match="no more"):
            run()
    assert not list((tmp_path / "of").iterdir())
    rows, kept = [run(f=f) for f in (3, 0)], []
    files = sorted(p.name for p in (tmp_path / "of").iterdir())
    assert files == ["fold-0.json", "fold-3.json"] and [r["fold"] for r in rows] == [
        3,
        0,
    ]
    monkeypatch.setattr(crossval, "_one_fold", boom)
    assert run(keep=lambda f, model: kept.append(f)) == rows[1] and not kept
    with pytest.raises(OSError, match="no more"):  # would be computed
        run(f=1)
    more = {"node_attributes": np.ones((graphs.num_nodes, 1), int)}
    for other, says in (
        (dict(seed=1), "fold-0.json is of a run with other seed"),
        (dict(seed=1, f=2), "fold-0.json is of a run with other seed"),  # holds one run
        (dict(grid=GRID), "other candidates"),
        (dict(given=replace(graphs, labels=1 - graphs.labels)), "other graphs"),
        (dict(given=replace(graphs, **more)), "other graphs"),
    ):
        with pytest.raises(ValueError, match=says):
            run(**other)
    (tmp_path / "of/fold-0.json").write_text('{"fold": 0, "te')
    with pytest.raises(ValueError, match="fold-0.json is not the result of a fold"):
        run()


def test_what_makes_no_sense_is_refused(graphs, fold):
    run = lambda fold=fold, grid=GRID, **o: cross_validate(
        Counts, graphs, fold, grid, **OPTIONS | o
    )
    kinds = [
        Candidate(ClassifyConfig(positions=kind))
        for kind in ("eigenvectors", "returns")
    ]
    for bad, says in (
        (dict(grid=[]), "^candidates: .* got no candidate"),
        (dict(grid=kinds), "one kind of positions, got eigenv.*returns"),
        (dict(fold=fold[1:]), "^fold: expected one of .* each of the 60 graphs"),
        (dict(fold=fold + 1), "^fold: expected one of"),
        (dict(fold=fold % 2), "at least 3 folds"),
        (dict(layout="list"), "'dense' or 'edges', got 5 and 'list'"),
    ):
        with pytest.raises(ValueError, match=says):
            run(**bad)


def test_both_layouts_predict_the_same_and_may_be_trained_on(graphs, fold):
    part, two = parts(fold, 0), supplies(graphs, parts(fold, 0).train)
    model, ids = Counts(6, two["dense"], nnx.Rngs(0)), part.test[::-1]
    logits, lists = (predict_logits(model, two[k], ids) for k in ("dense", "edges"))
    np.testing.assert_allclose(lists, logits, rtol=1e-5, atol=1e-5)
    # in the order asked for
    one = model(next(two["dense"].batches(ids[:1])))[0]
    np.testing.assert_allclose(one, logits[0], rtol=1e-5, atol=1e-5)
    run = lambda **o: cross_validate(
        Counts, graphs, fold, GRID[:1], folds=[0], **OPTIONS | o
    )[0]
    lists = run(layout="edges")
    assert lists["settings"]["layout"] == "edges" and lists["loss"] != run()["loss"]


def test_scores_by_hand():
    got = score(np.array([[2.0, 1.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0, 0, 1]))
    want = (np.log1p(np.exp(-1)) + np.log1p(np.exp(1)) + np.log(2)) / 3
    assert got == pytest.approx((1 / 3, want))


# ------------------------------------------------------------------------------------
# the script


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "experiments/graph_classification.py"))


def test_a_gin_with_positions_is_a_gin_on_wider_features(script, graphs):
    config = script["grid"]("gin-returns", 3)[0].model
    encoding = learn_encoding(graphs, np.arange(12))
    buckets = make_buckets(graphs, encoding, k=3, num_buckets=1)
    batch = next(buckets.batches(np.arange(12)))
    model = script["MAKE"]["gin-returns"](config, buckets, nnx.Rngs(0))
    plain = script["GIN"](6, 2, config, rngs=nnx.Rngs(0))
    both = jnp.concatenate([batch.features, batch.positions], -1)
    assert np.array_equal(model(batch), plain(batch._replace(features=both)))
    moved = batch._replace(positions=batch.positions + 1)
    assert not np.allclose(model(moved), model(batch))


def test_every_model_has_the_same_budget_of_choice(script):
    grids = {model: script["grid"](model, 5) for model in script["MAKE"]}
    (paper,) = grids.pop("et-paper")  # has nothing to choose
    assert {len(grid) for grid in grids.values()} == {4} and len(grids) == 5
    sizes = paper.model.dim, paper.model.num_heads, paper.model.head_dim
    assert sizes == (128, 12, 64) and paper.model.blocks == 4
    assert (paper.model.step_size, paper.model.strangers) == (0.1, "zero")
    assert (paper.fit.epochs, paper.fit.batch_size, paper.fit.lr) == (200, 64, 1e-3)
    for model, kind in (("gin-returns", "returns"), ("et", "returns")):
        assert {c.model.positions for c in grids[model]} == {kind}


def test_settings_of_the_kept_results_are_those_of_the_grid(script):
    "So the script knows its folds again."
    for model in script["MAKE"]:
        path = ROOT / f"results/graph-classification/MUTAG/{model}/fold-0.json"
        kept = json.loads(path.read_text())["settings"]["candidates"]
        for one, c in zip(kept, script["grid"](model, 15), strict=True):
            # a setting that came later has its default
            assert crossval.asdict(c.model) | one["model"] == crossval.asdict(c.model)


def test_the_script_runs_and_shares_folds(script, tmp_path, capsys, monkeypatch):
    main, folds = script["main"], tmp_path / "folds.json"
    monkeypatch.setitem(main.__globals__, "FOLDS", folds)
    args = f"--data rings --model agnostic --folds 5 --epochs 1 --buckets 1 --out {tmp_path}"
    args = [*args.split(), "--weights", str(tmp_path / "w")]
    main([*args, "--part", "1/3"])
    names = lambda folder: sorted(p.name for p in (tmp_path / folder).iterdir())
    assert names("rings/agnostic") == ["fold-1.json", "fold-4.json"]
    assert names("w") == [f"agnostic-rings-{f}.safetensors" for f in (1, 4)]
    said = capsys.readouterr().out
    assert "fold 4: test" in said and "rings, agnostic: " in said
    assert not folds.exists(), "folds are compared with it and never written"
    labels = load_graphs("rings").labels
    folds.write_text(json.dumps({"rings/10": "".join(map(str, deal(labels)))}))
    assert np.array_equal(script["fixed_folds"]("rings", labels, 10), deal(labels))
    with pytest.raises(SystemExit, match="folds kept for rings/10 are not those of"):
        script["fixed_folds"]("rings", np.sort(labels), 10)
    for bad in ("--part 3/3", "--folds 2", "--which 9", "--which a"):
        with pytest.raises(SystemExit):
            main([*args, *bad.split()])
    # beside the ten folds of the repository
    with pytest.raises(SystemExit):
        main("--data rings --model gin --folds 5".split())
    assert "--folds: results/graph-class" in capsys.readouterr().err
    for bad, match in (
        (["--data", "no such"], "graph_classification: name: must be"),
        (["--lr", "-1"], "graph_classification: lr.*: expected"),
        (["--seed", "1"], "graph_classification: out: .* other seed"),
    ):
        with pytest.raises(SystemExit, match=match):
            main([*args, *bad])
