"""The protocol: folds that never change, training that cannot see the test fold, and
results that are whole or absent (nbs/engine/cross_validation.ipynb).
"""

import json
from dataclasses import replace
from pathlib import Path

import graph_classification as script
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import examples
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from et_nbdev.graph import crossval
from et_nbdev.graph.classify import ClassifyConfig
from et_nbdev.graph.crossval import (
    Candidate,
    FitConfig,
    cross_validate,
    deal,
    fit_classifier,
    graph_loss,
    parts,
    predict_logits,
    score,
    summary,
)
from et_nbdev.graph.sets import TU_NAMES, Supply, learn_encoding, load_graphs

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/graph-classification"
pytestmark = pytest.mark.usefixtures("compile_quickly")


class Counts(nnx.Module):
    "Sees the sum of all features, normalizes it over the batch, drops some in training."

    def __init__(self, width, sizes, rngs):
        self.first = nnx.Linear(sizes.num_features, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.second = nnx.Linear(width, sizes.num_classes, rngs=rngs)

    def __call__(self, batch, rngs=None):
        x, off = batch.features, rngs is None
        x = jax.ops.segment_sum(x, batch.graph, len(batch.labels))
        x = self.norm(self.first(x), use_running_average=off)
        x = nnx.Dropout(0.1)(jax.nn.relu(x), deterministic=off, rngs=rngs)
        return self.second(x)


GRID = [Candidate(6, FitConfig(epochs=3, lr=lr)) for lr in (1e-3, 1e-2)]
OPTIONS = dict(k=2, progress=False)
ROWS = ("loss", "validation", "predictions", "chosen")
GRAPHS = load_graphs("rings")[:60]
FOLDS = deal(GRAPHS.labels, 5)


def supplied(graphs, train):
    nothing = np.zeros((graphs.num_nodes, 0), np.float32)
    return Supply(graphs, learn_encoding(graphs, train), nothing, 16)


# --- folds


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
    for f, one in enumerate(split):
        assert np.array_equal(np.sort(np.concatenate(one)), everyone)
        assert all(map(len, one))
        assert np.array_equal(one.validation, split[(f + 1) % k].test)
    assert sorted(np.concatenate([one.test for one in split])) == list(everyone)


def test_folds_never_change():
    assert "".join(map(str, deal(np.arange(20) % 2, 5))) == "44342013421021320103"
    labels = np.arange(200) % 2
    assert not np.array_equal(deal(labels, 10, 0), deal(labels, 10, 1))
    for bad, says in (([0] * 9, "at least k = 10 graphs"), ([0, 1] * 6 + [-1], "-1")):
        with pytest.raises(ValueError, match=f"^labels: .*{says}"):
            deal(np.array(bad))


@pytest.mark.parametrize(
    "name", [n for n in TU_NAMES if n not in ("DD", "FRANKENSTEIN")]
)
def test_kept_folds_are_those_of_the_real_labels(et_data, name):
    kept = json.loads((RESULTS / "folds.json").read_text())[f"{name}/10"]
    assert kept == "".join(map(str, deal(load_graphs(name, et_data).labels)))


# --- training


def test_training_is_repeatable_and_compiles_once():
    easy = (GRAPHS.sizes > np.median(GRAPHS.sizes)).astype(int)
    easy = replace(GRAPHS, labels=easy)
    part = parts(deal(easy.labels, 5), 0)
    supply = supplied(easy, part.train)
    config = FitConfig(epochs=12, lr=1e-2, batch_size=16, weight_decay=0.0)
    build = lambda: Counts(6, supply, nnx.Rngs(0))
    split = supply, part.train, part.validation
    run, again = (fit_classifier(build(), *split, config, 0) for _ in range(2))
    assert run.history == again.history and len(run.history) == 12
    losses = [row["loss"] for row in run.history]
    assert losses[-1] < losses[0]
    programs = crossval.programs(nnx.split(build(), nnx.Param, ...)[0])
    before = [p._cache_size() for p in programs]
    other = FitConfig(epochs=2, lr=1e-3, batch_size=16, weight_decay=0.1, clip=0.5)
    fit_classifier(build(), supply, part.train[3:], part.validation, other)
    assert [p._cache_size() for p in programs] == before
    assert fit_classifier(build(), *split, config, 1).history != run.history


def test_the_weights_kept_are_those_of_the_best_epoch(monkeypatch):
    "By accuracy, then by loss, then the first; not the last. And their statistics."
    supply, seen = supplied(GRAPHS, np.arange(40)), []
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
def test_one_step_is_adamw_of_the_summed_loss(clip):
    class Linear(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))

        def __call__(self, batch, rngs=None):
            sums = jax.ops.segment_sum(batch.features, batch.graph, 16)
            return self.linear(sums)

    supply, ids = supplied(GRAPHS, [0]), np.arange(10)
    config = dict(epochs=1, batch_size=16, lr=0.1, warmup=0.0, weight_decay=0.5)
    batch, before = next(supply.stream(ids, 0)), Linear()
    loss = lambda model: graph_loss(model, batch, jax.random.key(0), 1 / 16)[0]
    slope = nnx.grad(loss)(before)
    config = FitConfig(**config, clip=clip)
    run = fit_classifier(Linear(), supply, ids, np.arange(20, 25), config)
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
    assert run.history[0]["loss"] == pytest.approx(float(loss(before)) * 16 / 10)


def test_training_stops_where_the_loss_is_lost():
    class Explodes(Counts):
        def __call__(self, batch, rngs=None):
            return super().__call__(batch, rngs) * jnp.float32(jnp.inf)

    # most of the test graphs are of the class that few others are of
    labels = np.where(FOLDS == 0, 1, np.random.default_rng(0).integers(0, 5, 60) == 0)
    given = replace(GRAPHS, labels=labels.astype(int))
    make = lambda *a: Explodes(*a)
    (row,) = cross_validate(make, given, FOLDS, GRID[:1], folds=[0], **OPTIONS)
    assert row["candidates"][0]["epoch"] == 0 and row["loss"] == []
    assert row["largest_class"] == 0 and 0 <= row["test_accuracy"] <= 1


def test_predictions_are_in_the_order_asked_for_and_scores_are_right():
    supply, ids = supplied(GRAPHS, np.arange(40)), np.arange(40, 60)[::-1]
    model = Counts(6, supply, nnx.Rngs(0))
    logits = predict_logits(model, supply, ids)
    one = model(supply.load(ids[:1]))[0]
    np.testing.assert_allclose(one, logits[0], rtol=1e-5, atol=1e-5)
    got = score(np.array([[2.0, 1.0], [0.0, 1.0], [5.0, 5.0]]), np.array([0, 0, 1]))
    want = (np.log1p(np.exp(-1)) + np.log1p(np.exp(1)) + np.log(2)) / 3
    assert got == pytest.approx((1 / 3, want))


# --- the protocol


def test_training_cannot_see_the_test_fold():
    """Every label of the test fold wrong, and its attributes absurd: training, choice
    and weights are the same to the last bit.
    """
    noise = np.random.default_rng(0).normal(size=(GRAPHS.num_nodes, 2))
    owner = np.repeat(np.arange(60), GRAPHS.sizes)

    def run(ids=(), factor=1.0, flip=True):
        "With labels flipped and attributes scaled in some graphs."
        labels, scale = GRAPHS.labels.copy(), np.where(np.isin(owner, ids), factor, 1)
        labels[list(ids)] ^= flip
        given = replace(GRAPHS, labels=labels, node_attributes=noise * scale[:, None])
        kept = []
        keep = lambda f, model: kept.append(nnx.state(model))
        options = dict(folds=[1], keep=keep, **OPTIONS)
        return cross_validate(Counts, given, FOLDS, GRID, **options)[0], kept[0]

    part = parts(FOLDS, 1)
    (clean, weights), (dirty, others) = run(), run(part.test)
    assert [clean[k] for k in ROWS] == [dirty[k] for k in ROWS]
    # it is scored all the same
    assert clean["test_correct"] + dirty["test_correct"] == len(part.test)
    right = np.array(clean["predictions"]) == GRAPHS.labels[part.test]
    assert clean["test_accuracy"] == right.mean() and len(right) == clean["test_graphs"]
    assert {"seconds", "commit", "date", "jax"} <= set(clean)
    absurd, again = run(part.test, 1e4)
    assert [clean[k] for k in ROWS[:2]] == [absurd[k] for k in ROWS[:2]]
    for other in (others, again):
        jax.tree.map(np.testing.assert_array_equal, weights, other)
    # the hold-out is looked at, but teaches no scale; the comparison can fail
    told = lambda row: row["candidates"][0]["validation_loss"]
    for other in (run(part.validation, 1e2, flip=False), run(part.validation)):
        assert told(other[0]) != told(clean) == told(absurd)


def test_of_equal_candidates_the_first_is_chosen(monkeypatch):
    marks = iter([(0.5, 1.0), (0.75, 2.0), (0.75, 1.0), (0.75, 1.0)])

    def told(model, supply, train, validation, *rest):
        names = ("validation_accuracy", "validation_loss")
        row = dict(zip(names, next(marks)), loss=0.0)
        return crossval.Fitted(model, [row], 1)

    monkeypatch.setattr(crossval, "fit_classifier", told)
    (row,) = cross_validate(Counts, GRAPHS, FOLDS, GRID * 2, folds=[0], **OPTIONS)
    assert row["chosen"] == 2
    two = [{"test_accuracy": 0.5}, {"test_accuracy": 0.7}]
    assert summary(two) == "60.0 ± 14.1 (2 folds)"
    assert summary(two[:1]) == "50.0 (1 fold)"


FOUND = {"test_accuracy": 0.75, "test_correct": 9, "test_graphs": 12}


def test_results_are_written_whole_and_read_again(tmp_path, monkeypatch):
    run = lambda given=GRAPHS, grid=GRID[:1], f=0, **o: cross_validate(
        Counts, given, FOLDS, grid, folds=[f], out=tmp_path / "of", **OPTIONS | o
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
    assert files == ["fold-0.json", "fold-3.json"]
    assert [row["fold"] for row in rows] == [3, 0]
    monkeypatch.setattr(crossval, "_one_fold", boom)
    assert run(keep=lambda f, model: kept.append(f)) == rows[1] and not kept
    with pytest.raises(OSError, match="no more"):  # would be computed
        run(f=1)
    more = {"node_attributes": np.ones((GRAPHS.num_nodes, 1), int)}
    for other, says in (
        (dict(seed=1, f=2), "fold-0.json is of a run with other seed"),  # holds one run
        (dict(grid=GRID), "other candidates"),
        (dict(given=replace(GRAPHS, labels=1 - GRAPHS.labels)), "other graphs"),
        (dict(given=replace(GRAPHS, **more)), "other graphs"),
    ):
        with pytest.raises(ValueError, match=says):
            run(**other)
    (tmp_path / "of/fold-0.json").write_text('{"fold": 0, "te')
    with pytest.raises(ValueError, match="fold-0.json is not the result of a fold"):
        run()


KINDS = [Candidate(ClassifyConfig(positions=p)) for p in ("eigenvectors", "returns")]


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(candidates=[]), "^candidates: .* got no candidate"),
        (dict(candidates=KINDS), "one kind of positions, got eigenv.*returns"),
        (dict(fold=FOLDS[1:]), "^fold: expected one of .* each of the 60 graphs"),
        (dict(fold=FOLDS + 1), "^fold: expected one of"),
        (dict(fold=FOLDS % 2), "^fold: .*k ≥ 3"),
    ],
)
def test_what_makes_no_sense_is_refused(bad, says):
    given = dict(graphs=GRAPHS, fold=FOLDS, candidates=GRID, **OPTIONS)
    with pytest.raises(ValueError, match=says):
        cross_validate(Counts, **given | bad)


# --- the script


def test_the_grid_is_that_of_the_kept_results():
    "So the script knows its folds again; a setting that came later has its default."
    for model in script.MAKE:
        kept = json.loads((RESULTS / f"MUTAG/{model}/fold-0.json").read_text())
        grid = script.grid(model, 15)
        for one, c in zip(kept["settings"]["candidates"], grid, strict=True):
            kept = {k: v for k, v in one["model"].items() if k != "shuffle"}
            assert crossval.asdict(c.model) | kept == crossval.asdict(c.model)


def test_the_script_runs_and_shares_folds(tmp_path, capsys, monkeypatch):
    main, folds = script.main, tmp_path / "folds.json"
    monkeypatch.setattr(script, "FOLDS", folds)
    args = f"--data rings --model agnostic --folds 5 --epochs 1 --out {tmp_path}"
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
    assert np.array_equal(script.fixed_folds("rings", labels, 10), deal(labels))
    with pytest.raises(SystemExit, match="folds kept for rings/10 are not those of"):
        script.fixed_folds("rings", np.sort(labels), 10)
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
