"""A detector for graphs it never saw: the training graph's statistics, files that are
whole or refused, what differs by name, and scikit-learn's own checks.
"""

import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import doors
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import sklearn.base
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.preprocessing import QuantileTransformer

from et_nbdev.graph import detector
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyTraining,
    explain,
    train_anomaly,
)
from et_nbdev.graph.data import (
    Graph,
    Split,
    from_relations,
    load_graph,
    save_graph,
    split,
)
from et_nbdev.graph.detector import AnomalyDetector, score, train
from et_nbdev.graph.nodes import (
    ALONE,
    OURS,
    TWO_HOPS,
    Scaling,
    advice,
    anomaly_scores,
    compared,
)
from et_nbdev.testing import assert_close
from et_nbdev.training import CheckpointError, read_meta, save_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SMALL = AnomalyTraining(
    every=3,
    model=AnomalyConfig(dim=8, head_dim=4, num_memories=6, hidden=8),
    optim=replace(AnomalyTraining.optim, steps=6, lr=1e-2, lr_floor=1e-2),
)


def small(**model):
    return AnomalyDetector(replace(SMALL, model=replace(SMALL.model, **model)))


def toy(n=60, seed=0, shift=0.0, kinds=2, name="toy"):
    "A random graph; anomalous nodes have larger features, `shift` moves all of them."
    rng = np.random.default_rng(seed)
    relations = {}
    for kind in range(kinds):
        a, b = rng.integers(0, n, (2, 2 * n))
        relations[f"kind{kind}"] = (np.concatenate([a, b]), np.concatenate([b, a]))
    labels = (np.arange(n) % 4 == 0).astype(np.int8)
    features = 3 + shift + 2 * rng.normal(size=(n, 5)) + 2 * labels[:, None]
    return from_relations(relations, features.astype(np.float32), labels, name)


@pytest.fixture(scope="module")
def fitted():
    return AnomalyDetector(SMALL).fit(toy())


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "detector.safetensors"
    fitted.save(path)
    return path


# --- what it computes


def test_it_is_what_train_anomaly_trains(fitted):
    run = train_anomaly(replace(SMALL, data="toy"), toy(), progress=False)
    assert np.array_equal(fitted.predict_proba(toy())[:, 1], run.p)
    assert (fitted.threshold_, fitted.test_) == (run.threshold, run.test)
    ids = split(toy().labels, 0.4, 0).test
    own = anomaly_scores(toy().labels[ids], run.p[ids], fitted.threshold_)
    assert fitted.test_ == own and fitted.validation_ == run.validation


def columns(graph):
    "By hand: features and log(1 + degree), where attention sees each neighbor once."
    degrees = np.bincount(graph.simple().receivers, minlength=graph.num_nodes)
    return np.column_stack([graph.features.astype(np.float64), np.log1p(degrees)])


@pytest.mark.parametrize("scale", ["standard", "rank", "both"])
def test_another_graph_is_encoded_by_the_training_graph(scale):
    "Ranks are scikit-learn's; ties, far values and a column that was constant, too."
    here, there = toy(), toy(seed=1, shift=2.0)
    counts = [np.round(g.features[:, :1]) for g in (here, there)]
    here, there = (
        replace(g, features=np.hstack([g.features, c, np.full((60, 1), v, np.float32)]))
        for g, c, v in zip((here, there), counts, (0.1, 5))
    )
    far = replace(there, features=there.features + 1e6)
    ranks = QuantileTransformer(n_quantiles=60, output_distribution="normal")
    ranks.fit(columns(here))
    parts = {"standard": [columns], "rank": [lambda g: ranks.transform(columns(g))]}
    parts["both"] = parts["standard"] + parts["rank"]
    take = lambda g: np.hstack([part(g) for part in parts[scale]])
    own, scaling = take(here), Scaling.learn(here, scale=scale)
    varies = np.ptp(own, 0) > 0
    for graph in (here, there, far):
        want = (take(graph) - own.mean(0)) / np.where(varies, own.std(0), np.inf)
        assert scaling(graph).dtype == np.float32
        assert_close(scaling(graph), want.astype(np.float32), rtol=1e-5, atol=1e-5)
    # one standard deviation further out, where its own statistics would show none
    assert scaling(there)[:, :5].mean() > 0.5 > 1e-5 > abs(scaling(here).mean())
    assert varies.sum() == len(varies) - len(parts[scale])


def test_probabilities_decisions_and_flags_agree(fitted):
    there = toy(seed=1)
    p = fitted.predict_proba(there)
    assert p.shape == (60, 2) and p.dtype == np.float64
    assert np.abs(p.sum(1) - 1).max() < 1e-12 and (p >= 0).all()
    flags = fitted.predict(there)
    assert np.array_equal(flags, p[:, 1] >= fitted.threshold_) and 0 < flags.sum() < 60
    assert np.array_equal(fitted.decision_function(there) >= 0, flags == 1)
    own = anomaly_scores(there.labels, p[:, 1], fitted.threshold_)
    assert fitted.evaluate(there) == own
    own = anomaly_scores(there.labels, p[:, 1], fitted.threshold_, 7)
    assert fitted.evaluate(there, k=7) == own
    with pytest.raises(ValueError, match="^k: expected"):
        fitted.evaluate(there, k=0)
    unlabeled = replace(there, labels=np.full(60, -1))
    assert np.array_equal(fitted.predict_proba(unlabeled), p)
    at = fitted.predict_proba(toy())[:, 1] == fitted.threshold_
    assert at.any() and fitted.predict(toy())[at].all()  # a node at the threshold
    alone = Graph([], [], toy().features, np.full(60, -1))  # and without edges
    assert np.isfinite(fitted.predict_proba(alone)).all()


def test_an_explanation_is_that_of_its_node(fitted):
    there = toy(seed=1)
    edges = fitted.model_.prepare(there)
    inputs = jnp.asarray(fitted.scaling_(there)), edges
    seen, (senders, receivers) = explain(fitted.model_, *inputs), edges[0].edge_list()
    for node in (0, 17):
        why = fitted.explain(there, node)
        assert why.p == fitted.predict_proba(there)[node, 1]
        assert why.flagged == fitted.predict(there)[node]
        for name in ("memory", "attention"):
            energy = getattr(seen, f"{name}_energy")
            assert getattr(why, f"{name}_energy") == energy[node]
            assert getattr(why, f"{name}_rank") == np.sum(energy < energy[node]) / 60
        assert set(why.neighbors) == set(senders[receivers == node])
        assert np.all(np.diff(why.weights) <= 0) and abs(why.weights.sum() - 1) < 1e-5
        assert np.array_equal(why.memories, seen.memories[node])
    for node in (-1, 60, True, 1.5):
        with doors.unchecked(), pytest.raises(ValueError, match="^node: expected "):
            fitted.explain(there, node)


def test_a_split_of_ones_own_is_kept(fitted):
    graph, ids = toy(), np.random.default_rng(0).permutation(60)
    parts = Split(ids[:30], ids[30:45], ids[45:])
    own = AnomalyDetector(SMALL).fit(graph, split=parts)
    p = own.predict_proba(graph)[:, 1]
    for found, some in ((own.validation_, parts[1]), (own.test_, parts[2])):
        assert found == anomaly_scores(graph.labels[some], p[some], own.threshold_)
    assert own.test_ != fitted.test_


def test_the_report_is_of_trees_without_and_with_the_graph(fitted):
    assert [*fitted.report_] == [ALONE, TWO_HOPS, OURS]
    assert fitted.report_[OURS] == fitted.validation_
    graph, p = named("abcde")(toy(n=400)), np.random.default_rng(0).random(400)
    train, validation, _ = split(graph)
    A, x = np.zeros((400, 400)), columns(graph)
    A[graph.receivers, graph.senders] = 1
    mean = A / np.maximum(A.sum(1, keepdims=True), 1)
    hops = np.hstack([x, mean @ x, mean @ mean @ x])
    inputs = {ALONE: graph.features, TWO_HOPS: hops}
    said, labels = {OURS: p[validation]}, graph.labels
    for name, x in inputs.items():
        trees = HistGradientBoostingClassifier(random_state=3)
        trees.fit(x[train].astype(np.float32), labels[train])
        said[name] = trees.predict_proba(x[validation].astype(np.float32))[:, 1]
    found = compared(graph, split(graph), p, 3)
    for name, p in said.items():
        scores = average_precision_score, roc_auc_score
        want = [score(labels[validation], p) for score in scores]
        got = [found[name][score] for score in ("auprc", "auroc")]
        assert got == pytest.approx(want, abs=0.01), name


@pytest.mark.parametrize(
    "alone, two, ours, says",
    [
        (0.3, 0.4, 0.5, "^$"),
        (0.3, 0.6, 0.5, "^boosted trees, two hops: .*0.600.*0.500.*the trees win"),
        (0.6, 0.4, 0.5, "^boosted trees, features alone: .*0.600.*graph adds nothing"),
        (0.5, 0.4, 0.5, "features alone"),
    ],
)
def test_where_trees_are_as_good_it_says_so(alone, two, ours, says):
    scores = {ALONE: alone, TWO_HOPS: two, OURS: ours}
    told = advice({name: {"auprc": score} for name, score in scores.items()})
    assert re.search(says, told)


def test_a_split_looks_ahead():
    "Equal times stay together; unlabeled nodes are in no part."
    graph = toy(n=300)
    graph = replace(graph, labels=np.where(np.arange(300) % 7, graph.labels, -1))
    days = np.random.default_rng(0).permutation(300) // 3
    for time in (days, days.astype("M8[D]"), days / 7):
        parts = split(graph, 0.5, time=time)
        when = [time[ids] for ids in parts]
        assert when[0].max() < when[1].min() and when[1].max() < when[2].min()
        assert np.array_equal(np.sort(np.concatenate(parts)), graph.labeled)
        sizes = np.array([*map(len, parts)]) / len(graph.labeled)
        assert np.abs(sizes - [1 / 2, 1 / 6, 1 / 3]).max() < 0.02 and sizes[0] <= 0.5
        assert all(np.all(np.diff(ids) > 0) for ids in parts)
    for bad in (days[:5], days.astype(str), np.where(days, days, np.nan)):
        with pytest.raises(ValueError, match="^time: must hold a number or a date"):
            split(graph, time=bad)
    with pytest.raises(ValueError, match="one class only"):
        split(graph, time=graph.labels)


# --- what it refuses


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(train=[0, 1, 60]), "^split.train: .* 0 to 59, got 60"),
        (dict(train=[]), "^split.train: expected normal .0. and"),
        (dict(train=[0.5, 1.0]), "^split.train: must hold integers"),
        (dict(validation=[0, 1]), "^split: node 0 is in it twice"),
        (dict(test=[20, 20, 21]), "^split: node 20 is in it twice"),
        (dict(test=[21, 22]), r"^split.test: expected normal .*got \[0\]"),
    ],
)
def test_a_split_that_is_none_is_refused(change, says):
    parts = {"train": [0, 1, 2, 4], "validation": [8, 9], "test": [12, 13]} | change
    parts = Split(**{name: np.array(ids) for name, ids in parts.items()})
    with doors.unchecked(), pytest.raises(ValueError, match=says):
        AnomalyDetector(SMALL).fit(toy(), split=parts)
    with doors.unchecked(), pytest.raises(TypeError, match="^split: .*got tuple"):
        AnomalyDetector(SMALL).fit(toy(), split=parts[:2])


def one_way(graph):
    up = graph.senders < graph.receivers
    ends = dict(senders=graph.senders[up], receivers=graph.receivers[up])
    return replace(graph, **ends, relations={})


def one_kind(graph):
    one = {"kind0": graph.relations["kind0"]}
    return from_relations(one, graph.features, graph.labels)


def named(names):
    some = lambda x: x[:, : len(names)]
    return lambda g: replace(g, features=some(g.features), feature_names=tuple(names))


SIDES = "edges in %s, as in the training graph '.*', got edges in %s"
SIDE, SIDES_ = "one direction", r"both directions \(see symmetric\)"


@pytest.mark.parametrize(
    "fit_on, model, change, says",
    [
        (toy, {}, lambda g: replace(g, features=g.features[:, :3]), "5.*'toy', got 3"),
        (toy, {}, lambda g: g.features, "expected a Graph.*ndarray"),
        (
            toy,
            {},
            lambda g: replace(g, features=g.features * 1e20),
            "of node .* lie .e",
        ),
        (toy, {}, one_way, SIDES % (SIDES_, SIDE)),
        (lambda: one_way(toy()), {}, toy, SIDES % (SIDE, SIDES_)),
        (toy, dict(relations="concat"), one_kind, r"\['kind0', 'kind1'\].*\['kind0'\]"),
        (lambda: named("abcde")(toy()), {}, named("abcdx"), r"\['e'\], .* \['x'\]"),
        (lambda: named("abcde")(toy()), {}, named("abced"), "'d', 'e'.*'e', 'd'"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(fit_on, model, change, says):
    known = small(**model).fit(fit_on())
    assert known.predict(fit_on()).shape == (60,)
    with doors.unchecked(), pytest.raises((ValueError, TypeError), match=says):
        known.predict(change(toy()) if change is not toy else toy())


def test_names_and_the_order_of_relations_are_free(fitted):
    "Features without names count by their number; merged edges are of any kind."
    graph, known = toy(), small(relations="concat").fit(named("abcde")(toy()))
    assert known.feature_names_in_.tolist() == list("abcde")
    assert not hasattr(fitted, "feature_names_in_")
    turned = replace(graph, relations=dict(reversed(graph.relations.items())))
    p = known.predict_proba(graph)
    assert np.array_equal(known.predict_proba(turned), p)
    assert fitted.predict(one_kind(graph)).shape == (60,)


def test_what_cannot_be_fitted_is_refused():
    with doors.unchecked(), pytest.raises(TypeError, match="graph: expected a Graph"):
        AnomalyDetector().fit(toy().features)
    with doors.unchecked(), pytest.raises(ValueError, match="y: expected nothing"):
        AnomalyDetector().fit(toy(), toy().labels)


# --- files


@pytest.mark.parametrize("scale, beta", [("rank", None), ("both", 0.7)])
def test_everything_is_kept(tmp_path, monkeypatch, scale, beta):
    "And a report in which trees are ahead is no secret."
    scores = {ALONE: 0.9, TWO_HOPS: 0.5, OURS: 0.5}
    report = {name: {"auprc": p} for name, p in scores.items()}
    monkeypatch.setattr(detector, "compared", lambda *args: report)
    own = small(scale=scale, beta=beta, relations="max")
    with pytest.warns(UserWarning, match="the graph adds nothing"):
        own.fit(toy(), folder=tmp_path)
    again, other = AnomalyDetector.load(tmp_path), toy(seed=3)
    assert np.array_equal(again.predict_proba(other), own.predict_proba(other))
    assert again.config == replace(own.config, data="toy")
    meta = read_meta(tmp_path / "detector.safetensors")["detector"]
    assert again.provenance_ == own.provenance_ == meta
    assert (again.threshold_, again.n_features_in_) == (own.threshold_, 5)
    assert again.report_ == report
    about = again.provenance_
    assert {"commit", "jax", "date", "threshold", "validation"} <= set(about)
    assert about["graph"]["name"] == "toy" and about["graph"]["nodes"] == 60


def rewritten(saved, path, change):
    "The file with other contents, and a checksum that is right."
    meta, tensors = read_meta(saved), safetensors.numpy.load_file(saved)
    change(tensors, meta)
    save_checkpoint(path, tensors, meta)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: meta.pop("detector"),
        lambda tensors, meta: meta["detector"].update(threshold="high"),
        lambda tensors, meta: meta["config"].update(optim=["lr"]),
        lambda tensors, meta: tensors.pop("statistics.mean"),
        lambda tensors, meta: meta["config"]["optim"].update(strange=1),
        lambda tensors, meta: meta["config"]["model"].update(positions=True),
    ],
)
def test_a_file_of_another_kind_is_refused(saved, tmp_path, change):
    path = rewritten(saved, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        AnomalyDetector.load(path)


@pytest.mark.parametrize("learn, beta, now", [(True, None, None), (False, None, 0.5)])
def test_a_file_of_version_0_2_is_read(saved, fitted, tmp_path, learn, beta, now):
    "Two more fields, and β was either a number or an array that was trained."

    def older(tensors, meta):
        meta["config"]["model"] |= dict(learn_beta=learn, beta=beta, positions=False)
        meta["config"]["graph"]["num_nodes"] = 60
        meta["detector"].pop("report")
        if not learn:
            tensors.pop("params.blocks.0.attention.log_beta")

    old = AnomalyDetector.load(rewritten(saved, tmp_path / "old", older))
    assert old.config.model == replace(SMALL.model, beta=now) and old.report_ == {}
    same = np.array_equal(old.predict_proba(toy()), fitted.predict_proba(toy()))
    assert same == learn


# --- scikit-learn's conventions


def test_a_clone_is_not_fitted(fitted):
    unfitted = sklearn.base.clone(fitted)
    for use in (unfitted.save, lambda graph: unfitted.explain(graph, 0)):
        with pytest.raises(NotFittedError, match="AnomalyDetector instance is not fit"):
            use(toy())


# --- et_score

TINY = "--optim.steps 4 --optim.warmup 1 --every 2 --model.dim 8".split()


def test_a_command_trains_on_a_file_and_another_scores_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_graph(toy(kinds=1), "march.npz")
    graph = toy(n=40, seed=1, kinds=1)
    names = ("senders", "receivers", "features")  # and no labels
    np.savez("april.npz", **{name: np.asarray(getattr(graph, name)) for name in names})
    options = [*TINY, "--data", "march.npz", "--splits", "2", "--out"]
    train([*options, "runs"])
    Path("scores.csv").write_text("old")
    argv = ["--model", "runs/seed-1", "--data", "april.npz", "--out", "scores.csv"]
    capsys.readouterr()
    assert score(argv) is None  # what a console script returns is its exit status
    own, graph = AnomalyDetector.load("runs/seed-1"), load_graph("april.npz")
    metrics = json.loads(Path("runs/metrics.json").read_text())
    assert own.threshold_ == metrics["runs"][1]["threshold"]
    with open("scores.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["node", "p", "flagged"]
    assert [int(row["node"]) for row in rows] == list(range(40))
    p, flags = own.predict_proba(graph)[:, 1], own.predict(graph)
    assert [float(np.float32(row["p"])) for row in rows] == p.tolist()
    assert [int(row["flagged"]) for row in rows] == flags.tolist()
    assert f"{flags.sum()} of 40 nodes flagged" in (out := capsys.readouterr().out)
    assert ", chosen on validation;" in out
    says = r"expected one detector.safetensors .*got runs/seed-0/.*, runs/seed-1/"
    with pytest.raises(SystemExit, match=says):
        score(["--model", "runs", *argv[2:]])
    days = np.random.default_rng(0).permutation(60).astype("M8[D]")
    np.save("days.npy", days)  # a split that looks ahead, of any seed
    train([*options, "ahead", "--time", "days.npy"])
    assert "over 2 seeds" in capsys.readouterr().out
    first, second = (AnomalyDetector.load(f"ahead/seed-{n}") for n in (0, 1))
    parts = split(toy(kinds=1), time=days)
    want = AnomalyDetector(first.config).fit(toy(kinds=1), split=parts)
    assert first.test_ == want.test_ != second.test_
    np.save("days.npy", days[1:])
    Path("days.txt").write_text("Monday")
    for bad, says in (
        ("days.npy", "time: must hold"),
        ("days.txt", "of another form(?!.*pickle)"),
    ):
        with pytest.raises(SystemExit, match=says):
            train([*options, "bad", "--time", bad])


def test_scores_are_written_where_no_greek_can_be_shown(saved, tmp_path, monkeypatch):
    graph, shown = tmp_path / "g.npz", io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    save_graph(replace(toy(), node_names=[f"Ж, {i}" for i in range(60)]), graph)
    monkeypatch.setattr(sys, "stdout", shown)
    out = tmp_path / "scores.csv"
    score(["--model", str(saved), "--data", str(graph), "--out", str(out)])
    shown.flush()
    assert b"of 60 nodes flagged" in shown.buffer.getvalue()
    rows = out.read_text("utf-8").splitlines()
    assert rows[0] == "node,p,flagged" and rows[1].startswith('"Ж, 0",')


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(model="nowhere"), "nowhere: no such checkpoint"),
        (dict(model="."), "got none"),
        (dict(data="nowhere.npz"), "nowhere.npz"),
        (dict(data="narrow.npz"), "expected 5 features"),
        (dict(out="folder"), "expected a file to write"),
        (dict(out="toy.npz"), "or the file of --model or --data"),
        (dict(out="MODEL"), "or the file of --model or --data"),
        (dict(model="FOLDER", out="MODEL"), "or the file of --model or --data"),
    ],
)
def test_the_command_ends_with_one_line(
    saved, tmp_path, monkeypatch, capsys, change, says
):
    "And writes over nothing that it is made from."
    monkeypatch.chdir(tmp_path)
    save_graph(toy(), "toy.npz")
    save_graph(replace(toy(), features=toy().features[:, :3]), "narrow.npz")
    Path("folder").mkdir()
    before = saved.read_bytes(), Path("toy.npz").read_bytes()
    options = dict(model="MODEL", data="toy.npz", out="scores.csv") | change
    stand = {"MODEL": saved, "FOLDER": saved.parent}
    argv = [str(stand.get(w, w)) for k, v in options.items() for w in (f"--{k}", v)]
    with pytest.raises(SystemExit) as stopped:
        score(argv)
    message = f"{stopped.value.code} {capsys.readouterr().err}"
    assert "et_score: " in message and says in message
    assert not Path("scores.csv").exists()
    assert before == (saved.read_bytes(), Path("toy.npz").read_bytes())
