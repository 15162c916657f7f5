"""The protocol: folds that never change, training that cannot see the test fold, and
results that are whole or absent (nbs/89_cross_validation.ipynb).
"""

import json
import os
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

import et_nbdev.graph.crossval as crossval
from et_nbdev.graph.batches import EdgeLists, learn_encoding, make_buckets
from et_nbdev.graph.classify import ClassifyConfig
from et_nbdev.graph.classify_baselines import GIN, GINConfig
from et_nbdev.graph.crossval import (
    FitConfig,
    _Candidate,
    _deal,
    _fit_classifier,
    _parts,
    _predict,
    _predict_logits,
    _summary,
    cross_validate,
)
from et_nbdev.graph.sets import TU_NAMES, load_graphs
from et_nbdev.training.fit import _alone

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")


def make(config, sizes, rngs):
    return GIN(sizes.num_features, sizes.num_classes, config, rngs=rngs)


SMALL = GINConfig(6, 2, dropout=0.1)
GRID = [_Candidate(SMALL, FitConfig(epochs=3, lr=lr)) for lr in (1e-3, 1e-2)]
OPTIONS = dict(k=2, num_buckets=1, progress=False)


@pytest.fixture(scope="module")
def graphs():
    return load_graphs("rings")[np.arange(60)]


@pytest.fixture(scope="module")
def fold(graphs):
    return _deal(graphs.labels, 5)


def same(a, b):
    return {
        k: v
        for k, v in a.items()
        if k
        not in (
            "seconds",
            "date",
            "settings",
            "candidates",
            "test_accuracy",
            "test_correct",
            "largest_class",
        )
    } == {
        k: v
        for k, v in b.items()
        if k
        not in (
            "seconds",
            "date",
            "settings",
            "candidates",
            "test_accuracy",
            "test_correct",
            "largest_class",
        )
    } and [c | {"seconds": 0} for c in a["candidates"]] == [
        c | {"seconds": 0} for c in b["candidates"]
    ]


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
    fold = _deal(labels, k, seed)
    assert np.ptp(np.bincount(fold, minlength=k)) <= 1
    for c in np.unique(labels):
        assert np.ptp(np.bincount(fold[labels == c], minlength=k)) <= 1
    tested = []
    for f in range(k):
        train, validation, test = _parts(fold, f)
        assert np.array_equal(
            np.sort(np.concatenate([train, validation, test])), np.arange(len(labels))
        )
        assert len(test) and len(validation) and len(train)
        tested += test.tolist()
    assert sorted(tested) == list(range(len(labels)))


def test_folds_never_change():
    assert "".join(map(str, _deal(np.arange(20) % 2, 5))) == "44342013421021320103"
    assert not np.array_equal(
        _deal(np.arange(200) % 2, 10, 0), _deal(np.arange(200) % 2, 10, 1)
    )


@pytest.mark.parametrize(
    "bad, match",
    [
        (([0] * 9, 10), "at least k = 10 graphs"),
        (([0, 1, -1], 3), "0 or more, got shape \\(3,\\) with -1"),
        (([0, 1, 0], 2), "k: expected"),
    ],
)
def test_folds_refuse(bad, match):
    with pytest.raises(ValueError, match=match):
        _deal(*bad)
    with pytest.raises(ValueError, match="f: expected a fold from 0 to 2"):
        _parts(np.arange(3), 3)
    for labels in ([0.0, 1, 0, 1], [0, 1, np.nan, 0], ["a", "b", "c"]):
        with pytest.raises(
            ValueError, match="^labels: expected classes, integers, got"
        ):
            _deal(labels, 3)
    for fold in (
        [0, 1, 0, 1],
        [0, 2, 3, 0],
        [0, 1, 2, -1],
        [0.0, 1, 2],
        [],
        [[0, 1, 2]],
    ):
        with pytest.raises(
            ValueError,
            match="^fold: expected a fold for each graph, integers 0, 1, …, k - 1",
        ):
            _parts(fold, 0)
    assert _parts([0, 1, 2], 0).test.tolist() == [0]
    with pytest.raises(ValueError, match="^rows: at least one fold"):
        _summary([])
    assert _summary([{"test_accuracy": 0.5}]) == "50.0 (1 fold)"


def kept_folds():
    return {
        key: np.array(list(map(int, digits)))
        for key, digits in json.loads(
            (ROOT / "results/graph-classification/folds.json").read_text()
        ).items()
    }


@pytest.mark.parametrize("name", [n for n in TU_NAMES if n != "FRANKENSTEIN"])
def test_kept_folds_are_disjoint_and_complete(name):
    fold = kept_folds()[f"{name}/10"]
    counts = {
        "MUTAG": 188,
        "PROTEINS": 1113,
        "ENZYMES": 600,
        "NCI1": 4110,
        "NCI109": 4127,
        "Mutagenicity": 4337,
        "DD": 1178,
    }
    assert (
        len(fold) == counts[name]
        and set(fold) == set(range(10))
        and np.ptp(np.bincount(fold)) <= 1
    )
    for f in range(10):
        assert np.array_equal(
            np.sort(np.concatenate(_parts(fold, f))), np.arange(len(fold))
        )


@pytest.mark.parametrize(
    "name", ["MUTAG", "PROTEINS", "ENZYMES", "NCI1", "NCI109", "Mutagenicity"]
)
def test_kept_folds_are_those_of_the_real_labels(et_data, name):
    assert np.array_equal(
        kept_folds()[f"{name}/10"], _deal(load_graphs(name, et_data).labels)
    )


# ------------------------------------------------------------------------------------
# training


def test_training_is_repeatable_and_compiles_once(graphs):
    easy = replace(graphs, labels=(graphs.sizes > np.median(graphs.sizes)).astype(int))
    part = _parts(_deal(easy.labels, 5), 0)
    buckets = make_buckets(
        easy, learn_encoding(easy, part.train), k=0, num_buckets=1, batch_size=16
    )
    config, rows = FitConfig(epochs=12, lr=1e-2, batch_size=16, weight_decay=0.0), []
    build = lambda seed: GIN(3, 2, SMALL, rngs=nnx.Rngs(seed))
    runs = [
        _fit_classifier(
            build(0), buckets, part.train, part.validation, config, 0, rows.append
        )
        for _ in range(2)
    ]
    assert (
        runs[0].history == runs[1].history
        and rows == 2 * runs[0].history
        and len(rows) == 24
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        nnx.state(runs[0].model),
        nnx.state(runs[1].model),
    )
    assert all(np.isfinite(row["loss"]) for row in runs[0].history)
    best = max(
        runs[0].history, key=lambda r: (r["validation_accuracy"], -r["validation_loss"])
    )
    assert best["epoch"] == runs[0].epoch
    # the weights of that epoch, not the last ones
    found = _predict(runs[0].model, buckets, part.validation)
    assert (found == easy.labels[part.validation]).mean() == pytest.approx(
        best["validation_accuracy"]
    )
    programs = crossval._programs(nnx.split(build(5))[0])
    before = [p._cache_size() for p in programs]
    other = make_buckets(
        easy, learn_encoding(easy, part.validation), k=0, num_buckets=1, batch_size=16
    )
    _fit_classifier(
        build(7),
        other,
        part.train[3:],
        part.test,
        FitConfig(epochs=2, lr=1e-3, batch_size=16, weight_decay=0.1, clip=0.5),
    )
    assert [p._cache_size() for p in programs] == before and before[0] == 1
    assert (
        _fit_classifier(
            build(0), buckets, part.train, part.validation, config, 1
        ).history
        != runs[0].history
    )


def test_one_step_is_adamw_of_the_summed_loss(graphs):
    buckets = make_buckets(
        graphs, learn_encoding(graphs, [0]), k=0, num_buckets=1, batch_size=64
    )

    class Linear(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, batch, rngs=None):
            return self.linear(batch.features.sum(1))

    ids = np.arange(20)
    config = FitConfig(
        epochs=1, batch_size=64, lr=0.1, warmup=0.0, weight_decay=0.5, clip=1e6
    )
    before = Linear()
    batch = next(buckets.batches(ids))

    def loss(model):
        logp = jax.nn.log_softmax(model(batch))
        return (
            -sum(
                logp[i, int(batch.labels[i])]
                for i in range(len(batch.labels))
                if int(batch.labels[i]) >= 0
            )
            / 64
        )

    slope = nnx.grad(loss)(before)
    for clip in (1e6, 1e-8):
        after = _fit_classifier(
            Linear(), buckets, ids, np.arange(20, 25), replace(config, clip=clip)
        ).model
        shrink = min(
            1,
            clip / float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(slope)))),
        )
        # its first step; one of one is half way down the cosine
        adam = lambda g: g * shrink / (jnp.abs(g * shrink) + 1e-8)
        kernel, bias = before.linear.kernel[...], before.linear.bias[...]
        # matrices decay
        np.testing.assert_allclose(
            after.linear.kernel[...],
            kernel - 0.05 * (adam(slope.linear.kernel[...]) + 0.5 * kernel),
            rtol=1e-4,
            atol=1e-6,
        )
        # vectors do not
        np.testing.assert_allclose(
            after.linear.bias[...],
            bias - 0.05 * adam(slope.linear.bias[...]),
            rtol=1e-4,
            atol=1e-6,
        )


def test_training_stops_where_the_loss_is_lost(graphs):
    buckets = make_buckets(graphs, learn_encoding(graphs, [0]), k=0, num_buckets=1)

    class Explodes(nnx.Module):
        def __init__(self):
            self.map = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, batch, rngs=None):
            return self.map(batch.features.sum(1)) * jnp.float32(jnp.inf)

    run = _fit_classifier(
        Explodes(), buckets, np.arange(40), np.arange(40, 50), FitConfig(epochs=3)
    )
    assert run.epoch == 0 and run.history == []
    fold = _deal(graphs.labels, 5)
    train = np.random.default_rng(0).integers(0, 5, 60) == 0
    # most of the test graphs are of the class that few others are of
    labels = np.where(fold == 0, 1, np.where(train, 1, 0))
    rows = cross_validate(
        lambda c, s, r: Explodes(),
        replace(graphs, labels=labels),
        fold,
        [_Candidate(None, FitConfig(epochs=2))],
        folds=[0],
        **OPTIONS,
    )
    assert rows[0]["largest_class"] == 0
    assert rows[0]["candidates"][0]["epoch"] == 0 and 0 <= rows[0]["test_accuracy"] <= 1


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(epochs=0), "epochs"),
        (dict(lr=-1.0), "lr: expected"),
        (dict(warmup=1.0), "warmup"),
        (dict(weight_decay=float("nan")), "weight_decay"),
        (dict(batch_size=1.5), "batch_size"),
    ],
)
def test_settings_are_checked(bad, match):
    with pytest.raises(ValueError, match=match):
        FitConfig(**bad)


# ------------------------------------------------------------------------------------
# the protocol


def test_training_cannot_see_the_test_fold(graphs, fold):
    """Every label of the test fold wrong, and its attributes absurd: training, choice
    and weights are the same to the last bit.
    """
    test, kept = _parts(fold, 1).test, []
    poisoned = graphs.labels.copy()
    poisoned[test] = 1 - poisoned[test]
    run = lambda g: cross_validate(
        make,
        g,
        fold,
        GRID,
        folds=[1],
        keep=lambda f, model: kept.append(nnx.state(model)),
        **OPTIONS,
    )[0]
    clean, dirty = run(graphs), run(replace(graphs, labels=poisoned))
    assert same(clean, dirty) and clean["predictions"] == dirty["predictions"]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    # it is scored all the same
    assert clean["test_correct"] + dirty["test_correct"] == len(test)
    held = _parts(fold, 1).validation
    poisoned = graphs.labels.copy()
    poisoned[held] = 1 - poisoned[held]
    # the comparison can fail
    assert not same(clean, run(replace(graphs, labels=poisoned)))

    measured = replace(
        graphs,
        node_attributes=np.random.default_rng(0).normal(size=(graphs.num_nodes, 2)),
    )
    absurd = measured.node_attributes.copy()
    for i in test:
        absurd[graphs.start[i] : graphs.start[i + 1]] *= 1e4
    kept.clear()
    first = lambda g: cross_validate(
        make,
        g,
        fold,
        GRID[:1],
        folds=[1],
        keep=lambda f, model: kept.append(nnx.state(model)),
        **OPTIONS,
    )[0]
    a, b = first(measured), first(replace(measured, node_attributes=absurd))
    assert (
        a["loss"] == b["loss"]
        and a["candidates"][0]["validation_loss"]
        == b["candidates"][0]["validation_loss"]
    )
    jax.tree.map(np.testing.assert_array_equal, *kept)
    for i in held:
        absurd[graphs.start[i] : graphs.start[i + 1]] *= 1e2
    c = first(replace(measured, node_attributes=absurd))
    # the hold-out is looked at, but teaches no scale
    assert (
        a["loss"] == c["loss"]
        and a["candidates"][0]["validation_loss"]
        != c["candidates"][0]["validation_loss"]
    )


def test_labels_of_the_test_fold_never_reach_the_training_function(
    graphs, fold, monkeypatch
):
    seen = []

    def watch(model, buckets, train, validation, *rest):
        seen.append((buckets, train, validation))
        return _fit_classifier(model, buckets, train, validation, *rest)

    monkeypatch.setattr(crossval, "_fit_classifier", watch)
    cross_validate(make, graphs, fold, GRID[:1], folds=[2], **OPTIONS)
    ((buckets, train, validation),) = seen
    part = _parts(fold, 2)
    assert np.array_equal(train, part.train) and np.array_equal(
        validation, part.validation
    )
    assert (buckets.labels[part.test] == -1).all() and (
        buckets.labels[part.train] == graphs.labels[part.train]
    ).all()
    on_device = np.concatenate([np.asarray(b.labels) for b in buckets.buckets])
    assert (on_device == -1).sum() == len(part.test)
    for train, validation, match in (
        (
            part.test,
            part.train,
            (
                f"train: must name graphs that have a class, but graph {part.test[0]}"
                " has none"
            ),
        ),
        ([60], part.train, "train: must hold ids of graphs from 0 to 59, got 60"),
        (part.train, [-1], "validation: must hold ids of graphs"),
        (
            part.train,
            part.train[3:5],
            (
                "train, validation: must not share graphs, but 2 are in both, such as"
                f" {part.train[3]}"
            ),
        ),
    ):
        with pytest.raises(ValueError, match="^" + match):
            _fit_classifier(
                make(SMALL, crossval._Sizes(3, 2, 0, 0), nnx.Rngs(0)),
                buckets,
                train,
                validation,
                FitConfig(epochs=1),
            )
    with pytest.raises(
        ValueError, match="^ids: must hold ids of graphs from 0 to 59, got 99"
    ):
        _predict(make(SMALL, crossval._Sizes(3, 2, 0, 0), nnx.Rngs(0)), buckets, [99])


def test_the_winner_is_the_best_on_the_hold_out(graphs, fold):
    row = cross_validate(make, graphs, fold, GRID, folds=[0], **OPTIONS)[0]
    marks = [
        (c["validation_accuracy"], -c["validation_loss"]) for c in row["candidates"]
    ]
    assert row["chosen"] == marks.index(max(marks)) and row["test_graphs"] == (
        fold == 0
    ).sum() == len(row["predictions"])
    assert row["test_accuracy"] == pytest.approx(
        (np.array(row["predictions"]) == graphs.labels[fold == 0]).mean()
    )
    assert {
        "seconds",
        "commit",
        "date",
        "jax",
        "settings",
        "loss",
        "validation",
    } <= set(row)
    assert (
        _summary([{"test_accuracy": 0.5}, {"test_accuracy": 0.7}])
        == "60.0 ± 14.1 (2 folds)"
    )


FOUND = {"test_accuracy": 0.75, "test_correct": 9, "test_graphs": 12}


def test_two_runs_in_one_folder_lose_no_fold(graphs, fold, tmp_path, monkeypatch):
    """Both began in an empty one. What was there first stays: of another run it is an
    error, of this one a fold that is done.
    """
    run = lambda **o: cross_validate(
        make, graphs, fold, GRID[:1], out=tmp_path, **OPTIONS | {"folds": [0]} | o
    )

    def meanwhile(*a, **k):
        with monkeypatch.context() as m:
            m.setattr(crossval, "_one_fold", lambda *a, **k: (FOUND, None))
            run(**other)
        return FOUND | {"test_accuracy": 0.5, "test_correct": 6}, None

    kept = []
    monkeypatch.setattr(crossval, "_one_fold", meanwhile)
    for other, says in (  # noqa: B007
        (dict(seed=1), "fold-0.json is of a run with other seed"),
        (dict(seed=1, folds=[2]), "fold-2.json is of a run with other seed"),
    ):
        with pytest.raises(ValueError, match=says):
            run(keep=lambda f, model: kept.append(f))
        (file,) = tmp_path.iterdir()
        assert json.loads(file.read_text())["settings"]["seed"] == 1 and not kept
        file.unlink()
    other = {}
    (row,) = run(keep=lambda f, model: kept.append(f))
    assert (
        row["test_accuracy"] == 0.75
        and row == json.loads((tmp_path / "fold-0.json").read_text())
        and not kept
    )


def test_a_fold_appears_whole_or_not_at_all(graphs, fold, tmp_path, monkeypatch):
    def full(*a):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(crossval, "_one_fold", lambda *a, **k: (FOUND, None))
    with monkeypatch.context() as m:
        m.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left.*fold-0.json"):
            cross_validate(
                make, graphs, fold, GRID[:1], folds=[0], out=tmp_path / "new", **OPTIONS
            )
    assert not list((tmp_path / "new").iterdir())

    def held(*_):
        with pytest.raises(OSError, match="another run"), _alone(tmp_path):
            pass

    cross_validate(
        make,
        graphs,
        fold,
        GRID[:1],
        folds=[0],
        out=tmp_path,
        keep=held if os.name == "posix" else lambda *_: None,
        **OPTIONS,
    )


def test_results_are_written_whole_and_read_again(graphs, fold, tmp_path, monkeypatch):
    run = lambda **o: cross_validate(
        make, graphs, fold, GRID[:1], out=tmp_path, **OPTIONS | o
    )
    rows = run(folds=[3, 0])
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "fold-0.json",
        "fold-3.json",
    ] and [r["fold"] for r in rows] == [3, 0]

    def boom(*a, **k):
        raise AssertionError("computed again")

    with monkeypatch.context() as m:
        m.setattr(crossval, "_one_fold", boom)
        assert run(folds=[0, 3]) == rows[::-1]
        with pytest.raises(AssertionError, match="computed again"):
            run(folds=[1])
        with pytest.raises(ValueError, match="other seed"):
            run(folds=[0], seed=1)
        with pytest.raises(ValueError, match="other candidates"):
            cross_validate(make, graphs, fold, GRID, out=tmp_path, folds=[0], **OPTIONS)
        with pytest.raises(ValueError, match="other graphs"):
            cross_validate(
                make,
                replace(graphs, labels=1 - graphs.labels),
                fold,
                GRID[:1],
                out=tmp_path,
                folds=[0],
                **OPTIONS,
            )
        for key, rows_of in (
            ("node_attributes", graphs.num_nodes),
            ("edge_labels", graphs.num_edges),
            ("edge_attributes", graphs.num_edges),
        ):
            with pytest.raises(ValueError, match="other graphs"):
                cross_validate(
                    make,
                    replace(graphs, **{key: np.ones((rows_of, 1), int)}),
                    fold,
                    GRID[:1],
                    out=tmp_path,
                    folds=[0],
                    **OPTIONS,
                )
        # a folder holds one run
        with pytest.raises(ValueError, match="fold-0.json is of a run with other seed"):
            run(folds=[2], seed=1)
        (tmp_path / "fold-0.json").write_text('{"fold": 0, "te')
        with pytest.raises(ValueError, match="fold-0.json is not the result of a fold"):
            run(folds=[0])
    (tmp_path / "fold-0.json").unlink()
    assert same(run(folds=[0])[0], rows[1])  # the same again
    with pytest.raises(ValueError, match="^candidates: at least one"):
        cross_validate(make, graphs, fold, [], **OPTIONS)
    kinds = [
        _Candidate(ClassifyConfig(positions=kind), FitConfig())
        for kind in ("eigenvectors", "returns")
    ]
    with pytest.raises(ValueError, match="one kind of positions, got eigenv.*returns"):
        cross_validate(make, graphs, fold, kinds, **OPTIONS)
    with pytest.raises(
        ValueError, match="^fold: expected one for each of the 60 graphs"
    ):
        cross_validate(make, graphs, fold[1:], GRID, **OPTIONS)


def test_both_layouts_predict_the_same_and_may_be_trained_on(graphs, fold):
    part = _parts(fold, 0)
    encoding = learn_encoding(graphs, part.train)
    model = make(SMALL, crossval._Sizes(3, 2, 0, 0), nnx.Rngs(0))
    tables = make_buckets(graphs, encoding, k=0, num_buckets=2, batch_size=16)
    lists = EdgeLists(
        graphs, encoding, np.zeros((graphs.num_nodes, 0), np.float32), 16
    )
    ids = part.test[::-1]
    logits = _predict_logits(model, tables, ids)
    np.testing.assert_allclose(
        _predict_logits(model, lists, ids), logits, rtol=1e-5, atol=1e-5
    )
    assert np.array_equal(_predict(model, lists, ids), logits.argmax(-1))
    one = next(tables.batches(ids[:1]))
    # in the order asked for
    np.testing.assert_allclose(model(one)[0], logits[0], rtol=1e-5, atol=1e-5)
    run = lambda **o: cross_validate(
        make, graphs, fold, GRID[:1], folds=[0], **OPTIONS | o
    )[0]
    # other batches
    assert (
        run(layout="edges")["settings"]["layout"] == "edges"
        and run(layout="edges")["loss"] != run()["loss"]
    )
    with pytest.raises(
        ValueError, match="^layout: must be 'dense' or 'edges', got 'list'"
    ):
        run(layout="list")


def test_a_gin_with_positions_is_a_gin_on_wider_features():
    script = runpy.run_path(str(ROOT / "scripts/graph_classification.py"))
    config = script["grid"]("gin-returns", 3)[0].model
    graphs = load_graphs("rings")[np.arange(12)]
    encoding = learn_encoding(graphs, np.arange(12))
    buckets = make_buckets(graphs, encoding, k=3, num_buckets=1)
    batch = next(buckets.batches(np.arange(12)))
    model = script["MAKE"]["gin-returns"](config, buckets, nnx.Rngs(0))
    plain = GIN(buckets.num_features + 3, 2, GINConfig(64, 5, 0.0), rngs=nnx.Rngs(0))
    both = jnp.concatenate([batch.features, batch.positions], -1)
    want = plain(batch._replace(features=both))
    assert np.array_equal(model(batch), want)
    moved = batch._replace(positions=batch.positions + 1)
    assert not np.allclose(model(moved), want)


def test_the_script_runs_and_shares_folds(tmp_path, capsys, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts/graph_classification.py"))
    monkeypatch.setitem(script["main"].__globals__, "FOLDS", tmp_path / "folds.json")
    args = [
        "--data",
        "rings",
        "--model",
        "agnostic",
        "--folds",
        "5",
        "--out",
        str(tmp_path),
        "--epochs",
        "1",
        "--buckets",
        "1",
        "--weights",
        str(tmp_path / "w"),
    ]
    main = script["main"]
    script["main"]([*args, "--part", "1/3"])
    assert sorted(p.name for p in (tmp_path / "rings/agnostic").iterdir()) == [
        "fold-1.json",
        "fold-4.json",
    ]
    assert (
        "fold 4: test" in (said := capsys.readouterr().out)
        and "rings, agnostic: " in said
    )
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == [
        "agnostic-rings-1.safetensors",
        "agnostic-rings-4.safetensors",
    ]
    assert not (tmp_path / "folds.json").exists(), (
        "folds are compared with it and never written"
    )
    labels = load_graphs("rings").labels
    (tmp_path / "folds.json").write_text(
        json.dumps({"rings/10": "".join(map(str, _deal(labels)))})
    )
    assert np.array_equal(
        script["fixed_folds"]("rings", labels, 10), _deal(labels)
    ) and np.array_equal(script["fixed_folds"]("rings", labels, 12), _deal(labels, 12))
    with pytest.raises(
        SystemExit, match="the folds kept for rings/10 are not those of these labels"
    ):
        script["fixed_folds"]("rings", np.sort(labels), 10)
    sizes = {model: len(script["grid"](model, 5)) for model in script["MAKE"]}
    assert sizes.pop("et-paper") == 1, "the paper's setting has nothing to choose"
    paper = script["grid"]("et-paper", 15)[0]
    made = nnx.eval_shape(
        lambda: script["MAKE"]["et-paper"](
            paper.model, crossval._Sizes(7, 2, 15, 4), nnx.Rngs(0)
        )
    )
    assert made.blocks[0].attention.Wk.shape == (12, 128, 64) and len(made.blocks) == 4
    assert paper.model.step_size == 0.1 and paper.model.strangers == "zero"
    assert (paper.fit.epochs, paper.fit.batch_size, paper.fit.lr) == (200, 64, 1e-3)
    assert len(sizes) == 5
    assert set(sizes.values()) == {4}, "every model has the same budget of choice"
    kinds = lambda model: {c.model.positions for c in script["grid"](model, 5)}
    assert kinds("gin-returns") == {"returns"}
    assert kinds("et") == {"returns"} and kinds("et-eigenvectors") == {"eigenvectors"}
    for bad in (
        ["--part", "3/3"],
        ["--folds", "2"],
        ["--which", "9"],
        ["--which", "a"],
    ):
        with pytest.raises(SystemExit):
            main([*args, *bad])
    # beside the ten folds of the repository
    with pytest.raises(SystemExit):
        main(["--data", "rings", "--model", "gin", "--folds", "5"])
    assert (
        "--folds: results/graph-classification holds ten folds a set"
        in capsys.readouterr().err
    )
    for bad, match in (
        (["--data", "no such"], "graph_classification: name: must be"),
        (["--lr", "-1"], "graph_classification: lr: expected"),
        (["--seed", "1"], "graph_classification: out: .* other seed"),
    ):
        with pytest.raises(SystemExit, match=match):
            main([*args, *bad])
