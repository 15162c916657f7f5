"""A classifier for sets of graphs it never saw: which split is which, its encoding goes
with it, files are whole or refused, and scikit-learn's own checks.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import doors
import jax
import numpy as np
import pytest
import safetensors.numpy
import sklearn.base
from flax import nnx
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.utils import estimator_checks
from test_graph_detector import CHECKS, toy
from test_graph_detector import SMALL as SMALL_DETECTOR

from et_nbdev.graph import set_classifier
from et_nbdev.graph.batches import EdgeLists, laplacian_positions, learn_encoding
from et_nbdev.graph.classify import ClassifyConfig, ClassifyTraining, train_classifier
from et_nbdev.graph.crossval import Fold, deal, predict_logits
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.graph.set_classifier import GraphSetClassifier
from et_nbdev.graph.sets import make_rings
from et_nbdev.training import CheckpointError, read_meta, save_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
MODEL = ClassifyConfig(8, 2, 4, 6, num_positions=3, blocks=1)
SMALL = ClassifyTraining("rings", epochs=2, num_buckets=1, model=MODEL)


def rings(n=40, seed=0, shift=0.0):
    "With an attribute whose mean is `shift`, and classes that a file calls 3 and 7."
    graphs = make_rings(n, seed)
    rng = np.random.default_rng(seed)
    attributes = shift + rng.normal(size=(graphs.num_nodes, 1)).astype(np.float32)
    return replace(graphs, node_attributes=attributes, classes=np.array([3, 7]))


@pytest.fixture(scope="module")
def fitted():
    return GraphSetClassifier(SMALL).fit(rings())


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "classifier.safetensors"
    fitted.save(path)
    return path


def test_nine_folds_train_one_chooses_and_none_is_a_test(fitted, monkeypatch):
    given = []

    def watched(config, graphs, fold, *rest, **options):
        given.append((fold, train_classifier(config, graphs, fold, *rest, **options)))
        return given[0][1]

    monkeypatch.setattr(set_classifier, "train_classifier", watched)
    again = GraphSetClassifier(SMALL).fit(rings())
    ((fold, run),), dealt = given, deal(rings().labels)
    assert np.array_equal(fold.train, np.flatnonzero(dealt != 0))
    assert np.array_equal(fold.validation, np.flatnonzero(dealt == 0))
    assert len(fold.test) == 0 and run.test is None
    assert again.validation_ == run.validation._asdict() == fitted.validation_
    split = again.provenance_["graphs"]
    assert (split["training"], split["validation"]) == (36, 4)
    # a run with a test part has the same weights, and another score for it
    part = Fold(fold.train, fold.validation, fold.train[:5])
    tested = train_classifier(SMALL, rings(), part, progress=False)
    same = map(
        np.array_equal, *(jax.tree.leaves(nnx.state(r.model)) for r in (tested, run))
    )
    assert all(same) and tested.test is not None


def test_another_set_is_encoded_by_the_training_set(fitted):
    there = rings(12, seed=1, shift=5.0)
    encoding = learn_encoding(rings(), np.flatnonzero(deal(rings().labels) != 0))
    supply = EdgeLists(there, encoding, laplacian_positions(there, 3))
    logits = predict_logits(fitted.model_, supply, np.arange(12))
    want = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p = fitted.predict_proba(there)
    assert p.shape == (12, 2) and np.abs(p - want).max() < 1e-5
    # the mean of the training graphs, not its own
    assert fitted.encoding_(there)[0][:, -1].mean() > 3


def test_classes_are_those_of_the_file_and_need_not_be_known(fitted):
    there = rings(12, seed=1)
    found = fitted.predict(there)
    assert set(found) <= {3, 7} and fitted.classes_.tolist() == [3, 7]
    unknown = replace(there, labels=np.full(12, -1), classes=np.array([7]))
    assert np.array_equal(fitted.predict(unknown), found)
    right = np.array([3, 7])[there.labels] == found
    assert fitted.score(there) == right.mean()
    # only class 7 is known there, under another number
    labels = np.where(there.labels == 1, 0, -1)
    some = replace(there, labels=labels, classes=np.array([7]))
    assert fitted.score(some) == right[there.labels == 1].mean()
    with pytest.raises(ValueError, match="no class is known"):
        fitted.score(unknown)


def test_graphs_of_unknown_class_are_left_out_of_training(fitted):
    graphs = rings(50)
    some = replace(graphs, labels=np.where(np.arange(50) < 40, graphs.labels, -1))
    found = [
        GraphSetClassifier(SMALL).fit(given).predict_proba(graphs)
        for given in (some, graphs[np.arange(40)])
    ]
    assert np.array_equal(*found)


def test_what_does_not_fit_is_refused(fitted):
    there, once = (
        rings(12, seed=1),
        rings(12, seed=1).senders < rings(12, seed=1).receivers,
    )
    ends = dict(senders=there.senders[once], receivers=there.receivers[once])
    one_way = replace(there, **ends, edge_labels=None, edge_attributes=None)
    few = replace(there, labels=np.where(np.arange(12) < 9, there.labels, -1))
    new = GraphSetClassifier()
    for call, error, says in (
        (
            lambda: fitted.predict(replace(there, node_labels=there.node_labels + 1)),
            ValueError,
            "label 3 was never met",
        ),
        (
            lambda: fitted.predict(replace(there, node_attributes=None)),
            ValueError,
            "got 1 and 0",
        ),
        (lambda: fitted.predict(one_way), ValueError, "undirected"),
        (
            lambda: fitted.predict(there.graph(0)),
            TypeError,
            "expected a GraphSet.*Graph",
        ),
        (lambda: fitted.score(there.node_labels), TypeError, "GraphSet.*ndarray"),
        (lambda: new.fit(there.graph(0)), TypeError, "graphs: expected a GraphSet"),
        (lambda: new.fit(there, there.labels), ValueError, "y: expected nothing"),
        (lambda: new.fit(few), ValueError, "at least 10 .* known, got 9 of 12"),
    ):
        with doors.unchecked(), pytest.raises(error, match=says):
            call()


FRESH = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[3])
from et_nbdev.graph.set_classifier import GraphSetClassifier
from et_nbdev.graph.sets import GraphSet
arrays = dict(np.load(sys.argv[2]))
own = GraphSetClassifier.load(sys.argv[1])
np.save(sys.argv[2] + ".npy", own.predict_proba(GraphSet(**arrays)))
"""


def test_a_fresh_process_gives_the_same_numbers(fitted, saved, tmp_path, compiled_once):
    there = rings(12, seed=1)
    names = ("start", "senders", "receivers", "labels", "node_labels")
    arrays = {name: getattr(there, name) for name in (*names, "node_attributes")}
    path = tmp_path / "there.npz"
    np.savez(path, **arrays)
    quick = str(jax.config.read("jax_disable_most_optimizations"))
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    env = os.environ | compiled_once | {"JAX_DISABLE_MOST_OPTIMIZATIONS": quick}
    command = [sys.executable, "-c", FRESH, saved, path, root]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert np.array_equal(np.load(f"{path}.npy"), fitted.predict_proba(there))


def test_a_configuration_changed_after_fit_waits_for_the_next(fitted, saved):
    there, again = rings(12, seed=1), GraphSetClassifier.load(saved)
    again.set_params(config=ClassifyTraining(model=ClassifyConfig(num_positions=7)))
    assert np.array_equal(again.predict_proba(there), fitted.predict_proba(there))


@pytest.mark.parametrize(
    "changes, layout",
    [
        (dict(readout="every", positions="returns"), "dense"),
        (dict(normalize_heads=True, learn_beta=True, negative_memories=0.25), "dense"),
        (dict(readout="every", num_positions=0, blocks=2), "edges"),
    ],
)
def test_every_kind_of_model_is_kept_and_used_on_another_set(tmp_path, changes, layout):
    config = replace(SMALL, layout=layout, model=replace(MODEL, **changes))
    own, there = GraphSetClassifier(config), rings(12, seed=1)
    own.fit(rings()).save(tmp_path)
    again = GraphSetClassifier.load(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["classifier.safetensors"]
    assert again.config == again.config_ == own.config_ == config
    assert np.array_equal(again.predict_proba(there), own.predict_proba(there))
    assert again.provenance_ == own.provenance_
    for one, two in zip(again.encoding_, own.encoding_):
        assert jax.tree.all(jax.tree.map(np.array_equal, one, two))


def test_a_classifier_of_an_earlier_version_is_read():
    "Saved by version 0.2.0; then the configuration had a floor of the learning rate."
    folder = Path(__file__).parent / "kept"
    own = GraphSetClassifier.load(folder / "classifier-0.2.0.safetensors")
    p = own.predict_proba(rings(12, seed=1))
    assert np.abs(p - np.load(folder / "classifier-0.2.0.npy")).max() < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: meta.pop("classifier"),
        lambda tensors, meta: meta["classifier"].update(classes=[1]),
        lambda tensors, meta: meta["config"].update(seed="x"),
        lambda tensors, meta: meta["config"]["model"].update(strange=1),
        lambda tensors, meta: tensors.pop("encoding.node.mean"),
        lambda tensors, meta: tensors.pop("encoding.node.known.0"),
    ],
)
def test_a_file_of_another_kind_is_refused(saved, tmp_path, change):
    meta, tensors = read_meta(saved), safetensors.numpy.load_file(saved)
    change(tensors, meta)
    save_checkpoint(tmp_path / "other", tensors, meta)
    with doors.unchecked():
        with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "other"))):
            GraphSetClassifier.load(tmp_path / "other")


def test_a_damaged_file_is_refused(saved, tmp_path):
    data = bytearray(saved.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(CheckpointError, match="bad"):
        GraphSetClassifier.load(tmp_path / "bad")


def test_detectors_and_classifiers_are_told_apart(saved, tmp_path):
    AnomalyDetector(SMALL_DETECTOR).fit(toy()).save(tmp_path / "detector")
    with pytest.raises(CheckpointError, match="holds a detector of nodes"):
        GraphSetClassifier.load(tmp_path / "detector")
    with pytest.raises(CheckpointError, match="holds a classifier of graphs"):
        AnomalyDetector.load(saved)


@pytest.mark.parametrize("check", CHECKS)
def test_scikit_learns_checks_of_estimators(check):
    with doors.unchecked():
        getattr(estimator_checks, check)("GraphSetClassifier", GraphSetClassifier())


def test_the_folds_of_scikit_learn_train_and_score():
    "Two of its folds; a clone has the configuration and nothing that was learned."
    assert len(cross_val_score(GraphSetClassifier(SMALL), rings(30), cv=2)) == 2


def test_what_is_not_fitted_says_so(fitted):
    for unfitted in (GraphSetClassifier(), sklearn.base.clone(fitted)):
        for use in (unfitted.predict, unfitted.predict_proba, unfitted.score):
            with pytest.raises(NotFittedError, match="GraphSetClassifier .* not"):
                use(rings(12))
        assert not hasattr(unfitted, "classes_")
