"""A detector for graphs it never saw: the training graph's statistics, files that are
whole or refused, what differs by name, and scikit-learn's own checks.
"""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
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
from sklearn.utils import estimator_checks
from sklearn.utils.validation import check_is_fitted

import et_nbdev
from et_nbdev.graph import _anomaly_command
from et_nbdev.graph import _detector_engine as engine
from et_nbdev.graph._anomaly_engine import _scores, _Statistics
from et_nbdev.graph.anomaly import (
    AnomalyConfig,
    AnomalyTraining,
    SampleConfig,
    _inputs,
    explain,
    train_anomaly,
)
from et_nbdev.graph.data import Graph, Split, from_relations, save_graph, split
from et_nbdev.graph.detector import AnomalyDetector, _main
from et_nbdev.training.checkpoint import CheckpointError, _read_meta, _save_checkpoint
from et_nbdev.training.loop import OptimConfig

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SMALL = dict(
    dim=8, head_dim=4, num_memories=6, hidden=8, training_steps=6, lr=1e-2, every=3
)


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
    return AnomalyDetector(**SMALL).fit(toy())


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "detector.safetensors"
    fitted.save(path)
    return path


# --- what it computes ---


def test_it_is_what_train_anomaly_trains():
    config = AnomalyTraining(
        data="toy",
        every=3,
        model=AnomalyConfig(dim=8, head_dim=4, num_memories=6, hidden=8),
        optim=replace(AnomalyTraining.optim, steps=6, lr=1e-2, lr_floor=1e-2),
    )
    run = train_anomaly(config, toy(), progress=False)
    own = AnomalyDetector(**SMALL).fit(toy())
    assert np.array_equal(own.predict_proba(toy())[:, 1], run.p)
    assert (own.threshold_, own.test_) == (run.threshold, run.test)
    assert own.validation_ == run.validation
    parts = split(toy().labels, 0.4, 0)
    assert own.test_ == _scores(
        toy().labels[parts.test], run.p[parts.test], own.threshold_
    )


def test_every_setting_of_a_run_is_a_hyperparameter_with_the_same_default():
    own = AnomalyDetector().get_params()
    assert engine._training(own, "digits-knn") == AnomalyTraining()
    nested = {"model", "optim", "sample", "data"}
    names = {f.name for f in fields(AnomalyTraining)} - nested
    for kind in (AnomalyConfig, SampleConfig, OptimConfig):
        names |= {f.name for f in fields(kind)}
    assert set(own) == names | {"training_steps"}
    assert engine._training(own | {"steps": 7}, "").model.steps == 7
    assert engine._training(own | {"training_steps": 7}, "").optim.steps == 7


@pytest.mark.parametrize("scale", ["standard", "rank", "both"])
def test_on_the_training_graph_the_statistics_give_its_inputs(scale):
    graph = toy()
    flat = np.full((graph.num_nodes, 1), 0.1, np.float32)
    counts = np.round(graph.features[:, :1])
    graph = replace(graph, features=np.hstack([graph.features, counts, flat]))
    for degree in (True, False):
        found = _Statistics.learn(graph, degree, scale)(graph)
        assert found.dtype == np.float32
        assert np.abs(found - _inputs(graph, degree, scale)).max() < 1e-5
        assert np.abs(found[:, 6]).max() < 1e-6  # constant


def test_another_graph_is_encoded_by_the_training_graph(fitted):
    "By hand: its mean and standard deviation, and log(1 + degree) as one more column."
    here, there = toy(), toy(seed=1, shift=2.0)

    def columns(graph):
        ends = graph.simple().receivers  # attention sees each neighbor once
        degrees = np.bincount(ends, minlength=graph.num_nodes)
        return np.column_stack([graph.features.astype(np.float64), np.log1p(degrees)])

    want = (columns(there) - columns(here).mean(0)) / columns(here).std(0)
    found, _ = engine._inputs_for(fitted._kept, there)
    assert np.abs(np.asarray(found) - want).max() < 1e-5
    # one standard deviation further out, where its own statistics would show none
    assert found[:, :5].mean() > 0.5 and abs(_inputs(there)[:, :5].mean()) < 1e-5


def test_a_column_that_was_constant_stays_zero():
    here = toy()
    features = np.hstack([here.features, np.full((60, 1), 0.1, np.float32)])
    statistics = _Statistics.learn(replace(here, features=features))
    features[:, 5] = np.arange(60)
    assert np.all(statistics(replace(here, features=features))[:, 5] == 0)


def test_ranks_of_another_graph_are_among_the_training_graph():
    here = toy()
    statistics = _Statistics.learn(here, degree=False, scale="rank")
    order = np.argsort(here.features[:, 0])
    own = statistics(here)[order, 0]
    between = (here.features[order][1:] + here.features[order][:-1])[:, :1] / 2
    features = np.repeat(between, 5, 1)
    found = statistics(replace(here.simple(), **part(here, 59), features=features))
    assert np.all(own[:-1] <= found[:, 0]) and np.all(found[:, 0] <= own[1:])
    far = here.features + 1e6
    assert np.allclose(statistics(replace(here, features=far)), statistics(here).max())


def part(graph, n):
    "The first n nodes, as arguments of Graph."
    keep = (graph.senders < n) & (graph.receivers < n)
    return dict(
        senders=graph.senders[keep],
        receivers=graph.receivers[keep],
        labels=graph.labels[:n],
        relations={},
    )


def test_one_node_does_not_change_what_the_others_are_compared_with(fitted):
    "Encoded by its own statistics, a graph with one huge value would look flat."
    there = toy(seed=1)
    features = there.features.copy()
    features[7, 0] = 1e4
    found = [
        np.asarray(engine._inputs_for(fitted._kept, graph)[0])
        for graph in (there, replace(there, features=features))
    ]
    others = np.arange(60) != 7
    assert np.array_equal(found[0][others], found[1][others])


def test_probabilities_decisions_and_flags_agree(fitted):
    there = toy(seed=1)
    p = fitted.predict_proba(there)
    assert p.shape == (60, 2) and p.dtype == np.float64
    assert np.abs(p.sum(1) - 1).max() < 1e-12 and (p >= 0).all()
    flags = fitted.predict(there)
    assert np.array_equal(flags, p[:, 1] >= fitted.threshold_)
    assert 0 < flags.sum() < 60
    assert np.array_equal(fitted.decision_function(there) >= 0, flags == 1)
    assert fitted.evaluate(there) == _scores(
        there.labels, p[:, 1].astype(np.float64), fitted.threshold_
    )
    unlabeled = replace(there, labels=np.full(60, -1))
    assert np.array_equal(fitted.predict_proba(unlabeled), p)


def test_a_node_at_the_threshold_is_flagged(fitted, monkeypatch):
    p = fitted.predict_proba(toy())[:, 1]
    assert fitted.threshold_ in p
    assert fitted.predict(toy())[np.flatnonzero(p == fitted.threshold_)].all()


def test_an_explanation_is_that_of_its_node(fitted):
    there = toy(seed=1)
    features, edges = engine._inputs_for(fitted._kept, there)
    seen = explain(fitted.model_, features, edges)
    senders, receivers = edges[0].edge_list()
    for node in (0, 17):
        why = fitted.explain(there, node)
        assert why.p == fitted.predict_proba(there)[node, 1]
        assert why.flagged == fitted.predict(there)[node]
        assert why.memory_energy == seen.memory_energy[node]
        assert why.attention_energy == seen.attention_energy[node]
        lower = np.sum(seen.memory_energy < seen.memory_energy[node])
        assert why.memory_rank == lower / 60
        assert set(why.neighbors) == set(senders[receivers == node])
        assert np.all(np.diff(why.weights) <= 0) and abs(why.weights.sum() - 1) < 1e-5
        assert np.array_equal(why.memories, seen.memories[node])
    for node in (-1, 60, True, 1.5, 3.0):
        with doors.unchecked(), pytest.raises(ValueError, match="node: expected 0 to"):
            fitted.explain(there, node)


def test_features_that_no_number_could_follow_are_refused(fitted):
    there = toy(seed=1)
    features = there.features.copy()
    features[7] = 1e30
    with pytest.raises(ValueError, match="^graph: features of node 7 lie .e.* devia"):
        fitted.predict_proba(replace(there, features=features))


def test_a_probability_that_is_no_number_is_refused(fitted):
    kept = fitted._kept
    spoiled = nnx.clone(kept.model)
    spoiled.encoder.bias[...] = jnp.full_like(spoiled.encoder.bias[...], jnp.nan)
    with pytest.raises(FloatingPointError, match="^graph: no finite probability"):
        engine._probabilities(kept._replace(model=spoiled), toy(seed=1))


def test_a_pair_is_no_split():
    with doors.unchecked(), pytest.raises(TypeError, match="^split: .*got tuple of 2"):
        AnomalyDetector(**SMALL).fit(toy(), split=(np.arange(5), np.arange(5, 9)))


@pytest.mark.parametrize(
    "bad, says",
    [
        (dict(training_steps=0), "^training_steps: expected a whole number"),
        (dict(learn_beta="false"), "^learn_beta: expected True or False"),
    ],
)
def test_hyperparameters_are_refused_by_their_own_names(bad, says):
    with doors.unchecked(), pytest.raises(ValueError, match=says):
        AnomalyDetector(**SMALL | bad).fit(toy())


def test_a_graph_without_edges_can_be_scored(fitted):
    x = toy().features
    alone = Graph([], [], x, np.full(60, -1))
    assert np.isfinite(fitted.predict_proba(alone)).all()


def test_a_split_of_ones_own_is_kept():
    graph = toy()
    nodes = np.random.default_rng(0).permutation(60)
    parts = Split(nodes[:30], nodes[30:45], nodes[45:])
    own = AnomalyDetector(**SMALL).fit(graph, split=parts)
    p = own.predict_proba(graph)[:, 1]
    for found, ids in ((own.validation_, parts[1]), (own.test_, parts[2])):
        assert found == _scores(graph.labels[ids], p[ids], own.threshold_)
    assert own.test_ != AnomalyDetector(**SMALL).fit(graph).test_


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(train=[0, 1, 60]), "split.train: expected ids from 0 to 59"),
        (dict(train=[]), "split.train: expected ids"),
        (dict(train=[0.5, 1.0]), "split.train: expected ids"),
        (dict(validation=[0, 1]), "split.validation: a node of it is there twice"),
        (dict(test=[20, 20, 21]), "split.test: a node of it is there twice"),
        (dict(test=[21, 22]), r"split.test: expected labels 0 and 1.*got \[0\]"),
    ],
)
def test_a_split_that_is_none_is_refused(change, says):
    parts = {"train": [0, 1, 2, 4], "validation": [8, 9], "test": [12, 13]} | change
    parts = Split(**{name: np.array(ids) for name, ids in parts.items()})
    with doors.unchecked(), pytest.raises(ValueError, match=says):
        AnomalyDetector(**SMALL).fit(toy(), split=parts)


# --- what it refuses ---


def test_other_features_are_refused_by_name(fitted):
    graph = toy()
    with pytest.raises(ValueError, match="expected 5 features.*'toy', got 3"):
        fitted.predict(replace(graph, features=graph.features[:, :3]))
    names = tuple("abcde")
    known = AnomalyDetector(**SMALL).fit(replace(graph, feature_names=names))
    assert known.feature_names_in_.tolist() == list(names)
    assert known.predict(graph).shape == (60,)  # without names: by their number
    for given, says in (
        ("abcdx", "missing 'e'; unknown 'x'"),
        ("abced", "in another order; expected"),
    ):
        with pytest.raises(ValueError, match=says):
            known.predict(replace(graph, feature_names=tuple(given)))
    fewer = replace(graph, features=graph.features[:, :4], feature_names=names[:4])
    with pytest.raises(ValueError, match="missing 'e'"):
        known.predict(fewer)
    with pytest.raises(AttributeError, match="no names"):
        fitted.feature_names_in_


def test_edges_run_as_in_the_training_graph(fitted):
    graph = toy()
    up = graph.senders < graph.receivers
    one_way = replace(
        graph, senders=graph.senders[up], receivers=graph.receivers[up], relations={}
    )
    with pytest.raises(ValueError, match="both directions, .* 'toy'; call .*symmetric"):
        fitted.predict_proba(one_way)
    assert fitted.predict_proba(one_way.symmetric()).shape == (60, 2)
    directed = AnomalyDetector(**SMALL).fit(replace(one_way, name=""))
    assert directed.predict_proba(one_way).shape == (60, 2)
    with pytest.raises(ValueError, match="one direction, as in the training graph$"):
        directed.predict_proba(graph)


def test_other_relations_are_refused_and_their_order_is_free():
    graph = toy()
    known = AnomalyDetector(**SMALL, relations="concat").fit(graph)
    turned = dict(reversed(graph.relations.items()))
    p = known.predict_proba(graph)
    assert np.array_equal(known.predict_proba(replace(graph, relations=turned)), p)
    for relations in ({}, {"kind0": graph.relations["kind0"]}):
        ends = next(iter(relations.values()), graph.edges)
        other = replace(graph, senders=ends[0], receivers=ends[1], relations=relations)
        with pytest.raises(ValueError, match=r"\['kind0', 'kind1'\], as in the train"):
            known.predict(other)
    merged = AnomalyDetector(**SMALL).fit(graph)
    assert merged.predict(replace(graph, relations={})).shape == (60,)


def test_learned_positions_are_of_the_training_graph_alone():
    known = AnomalyDetector(**SMALL, positions=True).fit(toy())
    unlabeled = replace(toy(), labels=np.full(60, -1), name="another name")
    assert known.predict(unlabeled).shape == (60,)
    with pytest.raises(ValueError, match="positions=True only the training graph"):
        known.predict(toy(seed=1))


def test_what_is_no_graph_is_refused(fitted):
    x = toy().features
    with pytest.raises(TypeError, match="graph: expected a Graph.*ndarray"):
        fitted.predict(x)
    with pytest.raises(TypeError, match="graph: expected a Graph"):
        AnomalyDetector().fit(x)
    with pytest.raises(ValueError, match="y: expected nothing"):
        AnomalyDetector().fit(toy(), toy().labels)


@pytest.mark.parametrize(
    "bad",
    [
        *(dict(dim=0), dict(lr=-1.0), dict(train_fraction=2.0), dict(seeds=1)),
        *(dict(seed=None), dict(dropout="a"), dict(train_fraction="0.4")),
        *(dict(lr="1e-3"), dict(seeds=3.5), dict(beta="x"), dict(b1=True)),
    ],
)
def test_hyperparameters_are_checked_by_fit_alone(bad):
    with doors.unchecked():
        own = AnomalyDetector(**bad)
        with pytest.raises(ValueError, match=rf"^{next(iter(bad))}\b.* expected"):
            own.fit(toy())


# --- files ---


FRESH = """
import sys
import numpy as np
from et_nbdev.graph.data import load_graph
from et_nbdev.graph.detector import AnomalyDetector
own = AnomalyDetector.load(sys.argv[1])
np.save(sys.argv[3], own.predict_proba(load_graph(sys.argv[2])))
assert "sklearn" not in sys.modules, "scikit-learn is optional"
"""


def test_a_fresh_process_gives_the_same_numbers(fitted, saved, tmp_path, compiled_once):
    other = toy(n=40, seed=2, shift=0.5, kinds=1)
    save_graph(other, tmp_path / "other.npz")
    argv = [str(saved), str(tmp_path / "other.npz"), str(tmp_path / "p.npy")]
    config = {
        "JAX_DISABLE_MOST_OPTIMIZATIONS": str(
            jax.config.read("jax_disable_most_optimizations")
        )
    }
    env = dict(os.environ) | compiled_once | config
    run = subprocess.run(
        [sys.executable, "-c", FRESH, *argv], env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    here = fitted.predict_proba(et_nbdev.load_graph(argv[1]))
    assert np.array_equal(np.load(argv[2]), here)


@pytest.mark.parametrize("scale", ["rank", "both"])
def test_ranks_are_kept(tmp_path, scale):
    own = AnomalyDetector(**SMALL, scale=scale, beta=0.7, learn_beta=False).fit(toy())
    own.save(tmp_path)
    again = AnomalyDetector.load(tmp_path)
    other = toy(seed=3)
    assert np.array_equal(again.predict_proba(other), own.predict_proba(other))
    assert again.get_params() == own.get_params()


def test_a_file_says_where_it_comes_from(fitted, saved):
    about = _read_meta(saved)["detector"]
    assert {"commit", "jax", "date", "threshold", "validation"} <= set(about)
    assert about["graph"]["name"] == "toy" and about["graph"]["nodes"] == 60
    again = AnomalyDetector.load(saved)
    assert again.provenance_ == fitted.provenance_ == about
    assert (again.threshold_, again.n_features_in_) == (fitted.threshold_, 5)
    assert repr(again) == repr(fitted)


@pytest.mark.parametrize("at", [0, 9, 200, 0.5, 0.9, -1])
def test_a_damaged_file_is_refused(saved, tmp_path, at):
    data = bytearray(saved.read_bytes())
    at = int(at * len(data)) if isinstance(at, float) else at
    for name, damaged in (
        ("bit", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 if at + 1 else None :]),
        ("cut", data[:at]),
    ):
        path = tmp_path / name
        path.write_bytes(damaged)
        assert path.read_bytes() != saved.read_bytes()
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            AnomalyDetector.load(path)


def rewritten(saved, path, change):
    "The file with other contents, and a checksum that is right."
    meta = _read_meta(saved)
    tensors = safetensors.numpy.load_file(saved)
    change(tensors, meta)
    _save_checkpoint(path, tensors, meta)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: meta.pop("detector"),
        lambda tensors, meta: meta["detector"].pop("threshold"),
        lambda tensors, meta: meta["detector"].update(threshold=10**400),
        lambda tensors, meta: meta["detector"].update(threshold="0.5"),
        lambda tensors, meta: meta["config"].update(optim=["lr"]),
        lambda tensors, meta: tensors.pop("statistics.mean"),
        lambda tensors, meta: tensors.update({"statistics.std": np.zeros(3)}),
        lambda tensors, meta: tensors.update({"statistics.more": np.zeros(3)}),
        lambda tensors, meta: meta["config"].pop("seed"),
        lambda tensors, meta: meta["config"]["optim"].update(strange=1),
        lambda tensors, meta: meta["config"]["model"].update(strange=1),
        lambda tensors, meta: meta["detector"].pop("num_features"),
        lambda tensors, meta: meta["detector"].update(relations=3),
        lambda tensors, meta: meta["detector"]["graph"].pop("symmetric"),
        lambda tensors, meta: meta["detector"]["graph"].update(symmetric="yes"),
        lambda tensors, meta: tensors.update(
            {"statistics.quantiles": np.zeros((4, 1))}
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(saved, tmp_path, change):
    path = rewritten(saved, tmp_path / "other", change)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        AnomalyDetector.load(path)


def test_an_interrupted_save_leaves_the_old_file(fitted, saved, tmp_path, monkeypatch):
    path = tmp_path / "kept"
    path.write_bytes(before := saved.read_bytes())

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        fitted.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["kept"]


# --- scikit-learn's conventions ---

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
    own = AnomalyDetector(dim=7)
    assert set(vars(own)) == set(own.get_params())
    copy = sklearn.base.clone(fitted)
    assert copy.get_params() == fitted.get_params() and copy is not fitted
    check_is_fitted(fitted)
    for unfitted in (copy, own):
        with pytest.raises(NotFittedError):
            check_is_fitted(unfitted)
    assert sklearn.base.is_classifier(own)
    assert own.set_params(dim=9, lr=0.1) is own and (own.dim, own.lr) == (9, 0.1)
    with pytest.raises(ValueError, match="width: no hyperparameter of AnomalyDet"):
        own.set_params(width=3, dim=5)
    assert own.dim == 9
    assert repr(own) == "AnomalyDetector(dim=9, lr=0.1)"


@pytest.mark.parametrize(
    "use",
    [
        lambda own: own.predict(toy()),
        lambda own: own.predict_proba(toy()),
        lambda own: own.decision_function(toy()),
        lambda own: own.evaluate(toy()),
        lambda own: own.explain(toy(), 0),
        lambda own: own.save("nowhere"),
        lambda own: own.threshold_,
        lambda own: own.classes_,
        lambda own: own.provenance_,
    ],
)
def test_what_is_not_fitted_says_so(use):
    with pytest.raises(NotFittedError, match="AnomalyDetector is not fitted"):
        use(AnomalyDetector())
    assert not hasattr(AnomalyDetector(), "threshold_")


def test_without_scikit_learn_the_error_is_alike(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.exceptions", None)
    with pytest.raises(ValueError, match="not fitted") as raised:
        AnomalyDetector().predict(toy())
    assert isinstance(raised.value, AttributeError)
    assert type(raised.value).__name__ == "NotFittedError"


def test_it_stands_in_a_pipeline():
    from sklearn.pipeline import make_pipeline

    own = make_pipeline(AnomalyDetector(**SMALL)).fit(toy())
    assert np.array_equal(own.classes_, [0, 1])
    assert own.predict_proba(toy(seed=1)).shape == (60, 2)


# --- commands ---


TINY = "--optim.steps 4 --optim.warmup 1 --every 2 --model.dim 8".split()


def test_a_command_trains_on_a_file_and_another_scores_one(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    save_graph(toy(kinds=1), "march.npz")
    other = toy(n=40, seed=1, kinds=1)
    save_graph(replace(other, labels=np.full(40, -1)), "april.npz")
    _anomaly_command._main(
        [*TINY, "--data", "march.npz", "--splits", "2", "--out", "runs"]
    )
    Path("scores.csv").write_text("old")
    argv = ["--model", "runs/seed-1", "--data", "april.npz", "--out", "scores.csv"]
    capsys.readouterr()
    assert _main(argv) is None  # what a console script returns is its exit status
    said = capsys.readouterr().out
    own = AnomalyDetector.load("runs/seed-1")
    metrics = json.loads(Path("runs/metrics.json").read_text())
    assert own.threshold_ == metrics["runs"][1]["threshold"]
    graph = et_nbdev.load_graph("april.npz")
    with open("scores.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert list(rows[0]) == ["node", "p", "flagged"]
    assert [int(row["node"]) for row in rows] == list(range(40))
    p = own.predict_proba(graph)[:, 1]
    assert [float(np.float32(row["p"])) for row in rows] == p.tolist()
    flags = own.predict(graph)
    assert [int(row["flagged"]) for row in rows] == flags.tolist()
    assert f"{flags.sum()} of 40 nodes flagged" in said
    # a file without labels, which are not looked at
    names = ("senders", "receivers", "features", "feature_names")
    np.savez("bare.npz", **{name: np.asarray(getattr(graph, name)) for name in names})
    assert _main([*argv[:3], "bare.npz", *argv[4:]]) is None
    with open("scores.csv", newline="") as f:
        assert list(csv.DictReader(f)) == rows
    with pytest.raises(SystemExit) as stopped:
        _main(["--model", "runs", *argv[2:]])
    assert "2 detectors in this folder" in stopped.value.code
    assert "runs/seed-0/detector.safetensors" in stopped.value.code


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(model="nowhere"), "nowhere: no such checkpoint"),
        (dict(model="."), "no detectors in this folder"),
        (dict(data="nowhere.npz"), "nowhere.npz"),
        (dict(data="narrow.npz"), "expected 5 features"),
    ],
)
def test_the_command_ends_with_one_line(saved, tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    save_graph(toy(), "toy.npz")
    save_graph(replace(toy(), features=toy().features[:, :3]), "narrow.npz")
    options = dict(model=saved, data="toy.npz", out="scores.csv") | change
    argv = [str(w) for k, v in options.items() for w in (f"--{k}", v)]
    with pytest.raises(SystemExit) as stopped:
        _main(argv)
    assert stopped.value.code.startswith("et_score: ") and says in stopped.value.code
    assert not Path("scores.csv").exists()


@pytest.mark.skipif(os.name != "posix", reason="no such files elsewhere")
@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_scores_are_written_to_files_only(saved, tmp_path, capsys, kind):
    out = tmp_path / "out"
    out.mkdir() if kind == "folder" else os.mkfifo(out)
    before = out.stat().st_mode
    with pytest.raises(SystemExit) as stopped:
        _main(["--model", str(saved), "--data", "digits-knn", "--out", str(out)])
    assert stopped.value.code == 2 and "expected a file" in capsys.readouterr().err
    assert out.stat().st_mode == before


def test_scores_are_not_written_over_what_they_are_made_from(saved, tmp_path, capsys):
    save_graph(toy(), data := tmp_path / "toy.npz")
    for model, out, name in (
        (saved, saved, "model"),
        (saved.parent, saved, "model"),  # as the folder of a run
        (saved, data, "data"),
    ):
        whole = out.read_bytes()
        with pytest.raises(SystemExit, match="2"):
            _main(f"--model {model} --data {data} --out {out}".split())
        assert f"is the file of --{name}" in capsys.readouterr().err
        assert out.read_bytes() == whole


def test_the_console_script_ends_with_status_zero(saved, tmp_path):
    save_graph(toy(), tmp_path / "toy.npz")
    # as the wrapper that pip writes calls it
    code = "import sys; from et_nbdev.graph.detector import _main; sys.exit(_main())"
    argv = ["--model", saved, "--data", "toy.npz", "--out", "scores.csv"]
    run = subprocess.run(
        [sys.executable, "-c", code, *map(str, argv)],
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(Path(et_nbdev.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 61
