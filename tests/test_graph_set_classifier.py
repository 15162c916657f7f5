"""A classifier for sets of graphs it never saw: which split is which, its encoding goes
with it, files are whole or refused, and scikit-learn's own checks.
"""

import re
from dataclasses import replace
from pathlib import Path

import doors
import jax
import numpy as np
import pytest
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.utils import estimator_checks
from test_graph_detector import rewritten

from et_nbdev.graph import set_classifier
from et_nbdev.graph.classify import ClassifyConfig, ClassifyTraining, train_classifier
from et_nbdev.graph.crossval import deal, predict_logits
from et_nbdev.graph.data import load_graph
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.graph.set_classifier import GraphSetClassifier
from et_nbdev.graph.sets import (
    GraphSet,
    Supply,
    laplacian_positions,
    learn_encoding,
    make_rings,
)
from et_nbdev.training import CheckpointError, save_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
MODEL = ClassifyConfig(8, 2, 4, 6, num_positions=3, blocks=1)
SMALL = ClassifyTraining("rings", epochs=2, model=MODEL)
KEPT = Path(__file__).parent / "kept"


def rings(n=40, seed=0, shift=0.0):
    "With an attribute whose mean is `shift`, and classes that a file calls 3 and 7."
    graphs = make_rings(n, seed)
    rng = np.random.default_rng(seed)
    attributes = shift + rng.normal(size=(graphs.num_nodes, 1)).astype(np.float32)
    return replace(graphs, node_attributes=attributes, classes=np.array([3, 7]))


HERE, THERE = rings(), rings(12, seed=1, shift=5.0)


@pytest.fixture(scope="module")
def fitted():
    return GraphSetClassifier(SMALL).fit(HERE)


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
    # graphs of unknown class are left out, so the run is the same
    more, labels = rings(50), np.where(np.arange(50) < 40, rings(50).labels, -1)
    attributes = np.ones((more.num_nodes, 1))
    attributes[: HERE.num_nodes] = HERE.node_attributes
    more = replace(more, labels=labels, node_attributes=attributes)
    again = GraphSetClassifier(SMALL).fit(more)
    ((fold, run),), dealt = given, deal(HERE.labels)
    assert np.array_equal(fold.train, np.flatnonzero(dealt != 0))
    assert np.array_equal(fold.validation, np.flatnonzero(dealt == 0))
    assert len(fold.test) == 0 and run.test is None
    assert again.validation_ == run.validation._asdict() == fitted.validation_
    assert np.array_equal(again.predict_proba(THERE), fitted.predict_proba(THERE))
    split = again.provenance_["graphs"]
    assert (split["training"], split["validation"]) == (36, 4)


def test_another_set_is_encoded_by_the_training_set(fitted):
    encoding = learn_encoding(HERE, np.flatnonzero(deal(HERE.labels) != 0))
    supply = Supply(THERE, encoding, laplacian_positions(THERE, 3))
    logits = predict_logits(fitted.model_, supply, np.arange(12))
    want = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    p = fitted.predict_proba(THERE)
    assert p.shape == (12, 2) and np.abs(p - want).max() < 1e-5
    # the mean of the training graphs, not its own
    assert fitted.encoding_(THERE)[0][:, -1].mean() > 3


def test_classes_are_those_of_the_file_and_need_not_be_known(fitted):
    found = fitted.predict(THERE)
    assert set(found) <= {3, 7} and fitted.classes_.tolist() == [3, 7]
    unknown = replace(THERE, labels=np.full(12, -1), classes=np.array([7]))
    assert np.array_equal(fitted.predict(unknown), found)
    right = np.array([3, 7])[THERE.labels] == found
    assert fitted.score(THERE) == right.mean()
    # only class 7 is known there, under another number
    labels = np.where(THERE.labels == 1, 0, -1)
    some = replace(THERE, labels=labels, classes=np.array([7]))
    assert fitted.score(some) == right[THERE.labels == 1].mean()
    for wrong, says in (
        (unknown, "no class is known"),
        (replace(THERE, classes=[0, 7]), r"^graphs: hold the classes \[0\], which"),
    ):
        with pytest.raises(ValueError, match=says):
            fitted.score(wrong)


def test_what_does_not_fit_is_refused(fitted):
    once, new = THERE.senders < THERE.receivers, GraphSetClassifier()
    ends = dict(senders=THERE.senders[once], receivers=THERE.receivers[once])
    one_way = replace(THERE, **ends, edge_labels=None, edge_attributes=None)
    few = replace(THERE, labels=np.where(np.arange(12) < 9, THERE.labels, -1))
    strange = replace(THERE, node_labels=THERE.node_labels + 1)
    bare = replace(THERE, node_attributes=None)
    vast = replace(THERE, node_attributes=np.full((THERE.num_nodes, 1), 3e38))
    for call, error, says in (
        (lambda: fitted.predict(strange), ValueError, "label 3 was never met"),
        (lambda: fitted.predict(bare), ValueError, "got 1 and 0"),
        (lambda: fitted.predict(one_way), ValueError, "undirected"),
        (lambda: fitted.predict(vast), FloatingPointError, "not finite"),
        (
            lambda: fitted.predict(load_graph("digits-knn")),
            TypeError,
            "GraphSet.*got Graph",
        ),
        (lambda: fitted.score(THERE.node_labels), TypeError, "GraphSet.*ndarray"),
        (
            lambda: new.fit(load_graph("digits-knn")),
            TypeError,
            "graphs: expected a GraphSet",
        ),
        (lambda: new.fit(THERE, THERE.labels), ValueError, "y: expected nothing"),
        (lambda: new.fit(few), ValueError, "at least 10 .* known, got 9 of 12"),
    ):
        with doors.unchecked(), pytest.raises(error, match=says):
            with np.errstate(over="ignore"):
                call()


@pytest.mark.parametrize(
    "changes",
    [
        dict(readout="every", positions="returns"),
        dict(normalize_heads=True, learn_beta=True, negative_memories=0.25),
        dict(readout="every", num_positions=0, blocks=2),
    ],
)
def test_every_kind_of_model_is_kept_and_used_on_another_set(tmp_path, changes):
    config = replace(SMALL, model=replace(MODEL, **changes))
    own = GraphSetClassifier(config).fit(HERE)
    own.save(tmp_path)
    again = GraphSetClassifier.load(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["classifier.safetensors"]
    assert again.config == again.config_ == own.config_ == config
    # a configuration changed after fit waits for the next
    again.set_params(config=ClassifyTraining(model=ClassifyConfig(num_positions=7)))
    assert np.array_equal(again.predict_proba(THERE), own.predict_proba(THERE))
    assert again.provenance_ == own.provenance_
    jax.tree.map(np.testing.assert_array_equal, again.encoding_, own.encoding_)


def test_a_classifier_of_an_earlier_version_is_read():
    "Saved by version 0.2.0; then the configuration had a floor of the learning rate."
    own = GraphSetClassifier.load(KEPT / "classifier-0.2.0.safetensors")
    p = own.predict_proba(rings(12, seed=1))
    assert np.abs(p - np.load(KEPT / "classifier-0.2.0.npy")).max() < 1e-6


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
    path = rewritten(saved, tmp_path / "other", change)
    with doors.unchecked(), pytest.raises(CheckpointError, match=re.escape(str(path))):
        GraphSetClassifier.load(path)


def test_classifiers_and_detectors_are_told_apart(saved, tmp_path):
    save_checkpoint(
        tmp_path / "detector", {"params": np.ones(2)}, {"detector": {"x": 1}}
    )
    with pytest.raises(CheckpointError, match="holds a detector of nodes"):
        GraphSetClassifier.load(tmp_path / "detector")
    with pytest.raises(CheckpointError, match="holds a classifier of graphs"):
        AnomalyDetector.load(saved)


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
@pytest.mark.parametrize("kind", [AnomalyDetector, GraphSetClassifier])
def test_scikit_learns_checks_of_estimators(kind, check):
    with doors.unchecked():  # it tries values of any type
        getattr(estimator_checks, check)(kind.__name__, kind())


def test_the_tools_of_scikit_learn_divide_a_set():
    classes = HERE.classes[HERE.labels]
    parts = train_test_split(HERE, test_size=10, random_state=0, stratify=classes)
    assert [len(part) for part in parts[:1]] == [30] and isinstance(parts[0], GraphSet)

    # two of its folds train and score
    assert len(cross_val_score(GraphSetClassifier(SMALL), HERE[:30], cv=2)) == 2
