"""A detector for graphs it never saw: the training graph's statistics, files that are
whole or refused, what differs by name, and scikit-learn's own checks.
"""

import copy
import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import sklearn.base
from flax import nnx
from sklearn.exceptions import NotFittedError
from sklearn.preprocessing import QuantileTransformer
from sklearn.utils import estimator_checks
from sklearn.utils.validation import check_is_fitted

import et_nbdev
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyTraining,
    explain,
    train_anomaly,
)
from et_nbdev.graph.data import Graph, Split, from_relations, save_graph, split
from et_nbdev.graph.detector import AnomalyDetector, score, train
from et_nbdev.graph.nodes import Scaling, anomaly_scores
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


def test_another_graph_is_encoded_by_the_training_graph():
    here, there = toy(), toy(seed=1, shift=2.0)
    own = columns(here)
    want = (columns(there) - own.mean(0)) / own.std(0)
    found = Scaling.learn(here)(there)
    assert found.dtype == np.float32 and np.abs(found - want).max() < 1e-5
    # one standard deviation further out, where its own statistics would show none
    assert found[:, :5].mean() > 0.5 and abs(Scaling.learn(there)(there).mean()) < 1e-5


@pytest.mark.parametrize("scale", ["rank", "both"])
def test_ranks_are_those_of_scikit_learn(scale):
    "Of the training graph, for another graph too; ties and far values included."
    here, there = toy(), toy(seed=1)
    counts = [np.round(g.features[:, :1]) for g in (here, there)]
    here, there = (
        replace(g, features=np.hstack([g.features, c]))
        for g, c in zip((here, there), counts)
    )
    far = replace(there, features=there.features + 1e6)
    ranks = QuantileTransformer(n_quantiles=60, output_distribution="normal")
    ranks.fit(columns(here))
    scaling = Scaling.learn(here, scale=scale)
    take = lambda g: (
        ranks.transform(columns(g))
        if scale == "rank"
        else np.hstack([columns(g), ranks.transform(columns(g))])
    )
    own = take(here)
    for graph in (here, there, far):
        want = (take(graph) - own.mean(0)) / own.std(0)
        assert_close(scaling(graph), want.astype(np.float32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", ["standard", "rank", "both"])
def test_a_column_that_was_constant_stays_zero(scale):
    here = toy()
    features = np.hstack([here.features, np.full((60, 1), 0.1, np.float32)])
    scaling = Scaling.learn(replace(here, features=features), False, scale)
    features[:, 5] = np.arange(60)
    found = scaling(replace(here, features=features))
    assert np.all(found[:, 5::6] == 0) and np.any(found[:, 4])


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
    unlabeled = replace(there, labels=np.full(60, -1))
    assert np.array_equal(fitted.predict_proba(unlabeled), p)
    at = fitted.predict_proba(toy())[:, 1] == fitted.threshold_
    assert at.any() and fitted.predict(toy())[at].all()  # a node at the threshold


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


def test_a_graph_without_edges_can_be_scored(fitted):
    alone = Graph([], [], toy().features, np.full(60, -1))
    assert np.isfinite(fitted.predict_proba(alone)).all()


def test_a_split_of_ones_own_is_kept(fitted):
    graph, ids = toy(), np.random.default_rng(0).permutation(60)
    parts = Split(ids[:30], ids[30:45], ids[45:])
    own = AnomalyDetector(SMALL).fit(graph, split=parts)
    p = own.predict_proba(graph)[:, 1]
    for found, some in ((own.validation_, parts[1]), (own.test_, parts[2])):
        assert found == anomaly_scores(graph.labels[some], p[some], own.threshold_)
    assert own.test_ != fitted.test_


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


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda g: replace(g, features=g.features[:, :3]), "expected 5.* 'toy', got 3"),
        (lambda g: g.features, "expected a Graph.*ndarray"),
        (lambda g: replace(g, features=g.features * 1e20), "of node .* lie .e.* devia"),
        (
            lambda g: one_way(g),
            "both directions .see symmetric.*'toy', got edges in on",
        ),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(fitted, change, says):
    with doors.unchecked(), pytest.raises((ValueError, TypeError), match=says):
        fitted.predict(change(toy()))


def one_way(graph):
    up = graph.senders < graph.receivers
    ends = dict(senders=graph.senders[up], receivers=graph.receivers[up])
    return replace(graph, **ends, relations={})


def test_a_graph_of_edges_in_one_direction_has_a_detector_too():
    directed = AnomalyDetector(SMALL).fit(replace(one_way(toy()), name=""))
    assert directed.predict_proba(one_way(toy())).shape == (60, 2)
    with pytest.raises(
        ValueError, match="one direction, as in the training graph, got"
    ):
        directed.predict_proba(toy())


def test_other_features_are_refused_by_name(fitted):
    graph, names = toy(), tuple("abcde")
    known = AnomalyDetector(SMALL).fit(replace(graph, feature_names=names))
    assert known.feature_names_in_.tolist() == list(names)
    assert known.predict(graph).shape == (60,)  # without names: by their number
    for given, says in (
        ("abcdx", r"'toy', which differ in \['e', 'x'\]"),
        ("abced", "which differ in their order"),
        ("abcd", r"which differ in \['e'\]"),
    ):
        features = graph.features[:, : len(given)]
        other = replace(graph, features=features, feature_names=tuple(given))
        with pytest.raises(ValueError, match=says):
            known.predict(other)
    assert not hasattr(fitted, "feature_names_in_")


def test_other_relations_are_refused_and_their_order_is_free(fitted):
    graph, known = toy(), small(relations="concat").fit(toy())
    turned = dict(reversed(graph.relations.items()))
    p = known.predict_proba(graph)
    assert np.array_equal(known.predict_proba(replace(graph, relations=turned)), p)
    one = {"kind0": graph.relations["kind0"]}
    other = from_relations(one, graph.features, graph.labels)
    with pytest.raises(ValueError, match=r"\['kind0', 'kind1'\], as in the train"):
        known.predict(other)
    assert fitted.predict(other).shape == (60,)  # merged


def test_what_cannot_be_fitted_is_refused():
    with doors.unchecked(), pytest.raises(TypeError, match="graph: expected a Graph"):
        AnomalyDetector().fit(toy().features)
    with doors.unchecked(), pytest.raises(ValueError, match="y: expected nothing"):
        AnomalyDetector().fit(toy(), toy().labels)


def test_a_probability_that_is_no_number_is_refused(fitted):
    spoiled = copy.copy(fitted)
    spoiled.model_ = nnx.clone(fitted.model_)
    bias = spoiled.model_.encoder.bias
    bias[...] = jnp.full_like(bias[...], jnp.nan)
    with pytest.raises(FloatingPointError, match="^graph: no finite probability"):
        spoiled.predict(toy(seed=1))


# --- files


FRESH = """
import sys
import numpy as np
from et_nbdev.graph.data import load_graph
from et_nbdev.graph.detector import AnomalyDetector, score, train
own = AnomalyDetector.load(sys.argv[1])
np.save(sys.argv[3], own.predict_proba(load_graph(sys.argv[2])))
"""


def test_a_fresh_process_gives_the_same_numbers(fitted, saved, tmp_path, compiled_once):
    save_graph(toy(n=40, seed=2, shift=0.5, kinds=1), tmp_path / "other.npz")
    argv = [str(saved), str(tmp_path / "other.npz"), str(tmp_path / "p.npy")]
    quickly = str(jax.config.read("jax_disable_most_optimizations"))
    env = os.environ | compiled_once | {"JAX_DISABLE_MOST_OPTIMIZATIONS": quickly}
    run = subprocess.run(
        [sys.executable, "-c", FRESH, *argv], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    here = fitted.predict_proba(et_nbdev.load_graph(argv[1]))
    assert np.array_equal(np.load(argv[2]), here)


@pytest.mark.parametrize("scale, beta", [("rank", None), ("both", 0.7)])
def test_everything_is_kept(tmp_path, scale, beta):
    own = small(scale=scale, beta=beta, relations="max").fit(toy())
    own.save(tmp_path)
    again, other = AnomalyDetector.load(tmp_path), toy(seed=3)
    assert np.array_equal(again.predict_proba(other), own.predict_proba(other))
    assert again.config == replace(own.config, data="toy")
    assert again.provenance_ == own.provenance_ == _read_meta_of(tmp_path)["detector"]
    assert (again.threshold_, again.n_features_in_) == (own.threshold_, 5)
    about = again.provenance_
    assert {"commit", "jax", "date", "threshold", "validation"} <= set(about)
    assert about["graph"]["name"] == "toy" and about["graph"]["nodes"] == 60


def _read_meta_of(folder):
    return read_meta(folder / "detector.safetensors")


@pytest.mark.parametrize("at", [0, 9, 200, 0.5, 0.9, -1])
def test_a_damaged_file_is_refused(saved, tmp_path, at):
    data, path = bytearray(saved.read_bytes()), tmp_path / "damaged"
    at = int(at * len(data)) if isinstance(at, float) else at
    cut = data[:at]
    data[at] ^= 1
    for damaged in (data, cut):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            AnomalyDetector.load(path)


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
        lambda tensors, meta: meta["detector"].pop("threshold"),
        lambda tensors, meta: meta["detector"].update(threshold="high"),
        lambda tensors, meta: meta["config"].update(optim=["lr"]),
        lambda tensors, meta: tensors.pop("statistics.mean"),
        lambda tensors, meta: tensors.update({"statistics.std": np.zeros(3)}),
        lambda tensors, meta: tensors.update({"statistics.more": np.zeros(3)}),
        lambda tensors, meta: meta["config"].pop("optim"),
        lambda tensors, meta: meta["config"]["optim"].update(strange=1),
        lambda tensors, meta: meta["config"]["model"].update(positions=True),
        lambda tensors, meta: meta["detector"].pop("num_features"),
        lambda tensors, meta: tensors.update(
            {"statistics.quantiles": np.zeros((4, 1))}
        ),
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
        if not learn:
            tensors.pop("params.blocks.0.attention.log_beta")

    old = AnomalyDetector.load(rewritten(saved, tmp_path / "old", older))
    assert old.config.model == replace(SMALL.model, beta=now)
    same = np.array_equal(old.predict_proba(toy()), fitted.predict_proba(toy()))
    assert same == learn


def test_an_interrupted_save_leaves_the_old_file(fitted, saved, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_bytes(before := saved.read_bytes())

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        fitted.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["kept"]


# --- scikit-learn's conventions

CHECKS = [  # of scikit-learn, those that pass no table to fit
    "check_estimator_cloneable",
    "check_estimator_repr",
    "check_estimator_tags_renamed",
    "check_valid_tag_types",
    "check_no_attributes_set_in_init",
    "check_parameters_default_constructible",
    "check_do_not_raise_errors_in_init_or_set_params",
    "check_get_params_invariance",
    "check_set_params",
    "check_mixin_order",
    "check_estimators_unfitted",
]


@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learns_checks_of_estimators(check):
    with doors.unchecked():  # it tries values of any type
        getattr(estimator_checks, check)("AnomalyDetector", AnomalyDetector())


def test_clones_are_not_fitted_and_parameters_are_only_stored(fitted):
    own = AnomalyDetector(SMALL)
    assert vars(own) == own.get_params(deep=False) == {"config": SMALL}
    unfitted = sklearn.base.clone(fitted)
    assert asdict(unfitted.config) == asdict(fitted.config)
    check_is_fitted(fitted)
    assert sklearn.base.is_classifier(own) and not hasattr(own, "threshold_")
    for use in ("predict", "evaluate", "predict_proba", "decision_function"):
        with pytest.raises(NotFittedError, match="AnomalyDetector instance is not fit"):
            getattr(unfitted, use)(toy())
    with pytest.raises(NotFittedError):
        unfitted.explain(toy(), 0)
    with pytest.raises(NotFittedError):
        unfitted.save("nowhere")


def test_it_stands_in_a_pipeline():
    from sklearn.pipeline import make_pipeline

    own = make_pipeline(AnomalyDetector(SMALL)).fit(toy())
    assert np.array_equal(own.classes_, [0, 1])
    assert own.predict_proba(toy(seed=1)).shape == (60, 2)


# --- et_score

TINY = "--optim.steps 4 --optim.warmup 1 --every 2 --model.dim 8".split()


def test_a_command_trains_on_a_file_and_another_scores_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_graph(toy(kinds=1), "march.npz")
    other = toy(n=40, seed=1, kinds=1)
    save_graph(replace(other, labels=np.full(40, -1)), "april.npz")
    train([*TINY, "--data", "march.npz", "--splits", "2", "--out", "runs"])
    Path("scores.csv").write_text("old")
    argv = ["--model", "runs/seed-1", "--data", "april.npz", "--out", "scores.csv"]
    capsys.readouterr()
    assert score(argv) is None  # what a console script returns is its exit status
    own, graph = AnomalyDetector.load("runs/seed-1"), et_nbdev.load_graph("april.npz")
    metrics = json.loads(Path("runs/metrics.json").read_text())
    assert own.threshold_ == metrics["runs"][1]["threshold"]
    with open("scores.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["node", "p", "flagged"]
    assert [int(row["node"]) for row in rows] == list(range(40))
    p, flags = own.predict_proba(graph)[:, 1], own.predict(graph)
    assert [float(np.float32(row["p"])) for row in rows] == p.tolist()
    assert [int(row["flagged"]) for row in rows] == flags.tolist()
    assert f"{flags.sum()} of 40 nodes flagged" in capsys.readouterr().out
    # a file without labels, which are not looked at
    names = ("senders", "receivers", "features", "feature_names")
    np.savez("bare.npz", **{name: np.asarray(getattr(graph, name)) for name in names})
    score([*argv[:3], "bare.npz", *argv[4:]])
    with open("scores.csv", newline="") as f:
        assert list(csv.DictReader(f)) == rows
    with pytest.raises(SystemExit) as stopped:
        score(["--model", "runs", *argv[2:]])
    assert "2 detectors in this folder" in stopped.value.code
    assert "runs/seed-0/detector.safetensors" in stopped.value.code


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(model="nowhere"), "nowhere: no such checkpoint"),
        (dict(model="."), "no detectors in this folder"),
        (dict(data="nowhere.npz"), "nowhere.npz"),
        (dict(data="narrow.npz"), "expected 5 features"),
        (dict(out="folder"), "expected a file"),
        (dict(out="toy.npz"), "is the file of --data"),
        (dict(out="MODEL"), "is the file of --model"),
        (dict(model="FOLDER", out="MODEL"), "is the file of --model"),
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
