"""A classifier for sets of graphs it never saw: its encoding goes with it, files are
whole or refused, and scikit-learn's own checks.
"""

import os
import re
import subprocess
import sys
from dataclasses import fields, replace

import doors
import jax
import numpy as np
import pytest
import safetensors.numpy
import sklearn.base
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks
from test_graph_detector import CHECKS, toy
from test_graph_detector import SMALL as SMALL_DETECTOR

from et_nbdev.graph import set_classifier
from et_nbdev.graph.batches import EdgeLists, laplacian_positions, learn_encoding
from et_nbdev.graph.classify import ClassifyConfig, ClassifyTraining, train_classifier
from et_nbdev.graph.crossval import _deal, _Fold, _predict_logits
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.graph.set_classifier import GraphSetClassifier
from et_nbdev.graph.sets import make_rings
from et_nbdev.training.checkpoint import CheckpointError, _read_meta, _save_checkpoint

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SMALL = dict(
    dim=8,
    num_heads=2,
    head_dim=4,
    num_memories=6,
    num_positions=3,
    blocks=1,
    epochs=2,
    num_buckets=1,
)


def rings(n=40, seed=0, shift=0.0):
    "With an attribute whose mean is `shift`, and classes that a file calls 3 and 7."
    graphs = make_rings(n, seed)
    rng = np.random.default_rng(seed)
    attributes = shift + rng.normal(size=(graphs.num_nodes, 1)).astype(np.float32)
    return replace(graphs, node_attributes=attributes, classes=np.array([3, 7]))


@pytest.fixture(scope="module")
def fitted():
    return GraphSetClassifier(**SMALL).fit(rings())


@pytest.fixture(scope="module")
def saved(fitted, tmp_path_factory):
    path = tmp_path_factory.mktemp("kept") / "classifier.safetensors"
    fitted.save(path)
    return path


def test_it_is_what_train_classifier_trains(fitted):
    model = {k: v for k, v in SMALL.items() if k not in ("epochs", "num_buckets")}
    config = ClassifyTraining(
        "rings", epochs=2, num_buckets=1, model=ClassifyConfig(**model)
    )
    deal = _deal(rings().labels)
    validation, train = np.flatnonzero(deal == 0), np.flatnonzero(deal != 0)
    fold = _Fold(train, validation, validation)
    run = train_classifier(config, rings(), fold, progress=False)
    assert run.validation._asdict() == fitted.validation_
    same = jax.tree.map(np.array_equal, *map(parameters, (run.model, fitted.model_)))
    assert all(jax.tree.leaves(same))


def parameters(model):
    return set_classifier.nnx.to_pure_dict(set_classifier.nnx.state(model))


def test_every_setting_of_a_run_is_a_hyperparameter_with_the_same_default():
    own = GraphSetClassifier()
    assert own._training("MUTAG") == ClassifyTraining()
    names = {f.name for f in fields(ClassifyTraining)} - {"model", "data"}
    names |= {f.name for f in fields(ClassifyConfig)}
    assert set(own.get_params()) == names


def test_another_set_is_encoded_by_the_training_set(fitted):
    there = rings(12, seed=1, shift=5.0)
    train = np.flatnonzero(_deal(rings().labels) != 0)
    encoding = learn_encoding(rings(), train)
    supply = EdgeLists(there, encoding, laplacian_positions(there, 3))
    logits = _predict_logits(fitted.model_, supply, np.arange(12))
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
    known = graphs[np.arange(40)]
    some = replace(graphs, labels=np.where(np.arange(50) < 40, graphs.labels, -1))
    one = GraphSetClassifier(**SMALL).fit(some)
    two = GraphSetClassifier(**SMALL).fit(known)
    assert np.array_equal(one.predict_proba(graphs), two.predict_proba(graphs))


def test_what_does_not_fit_is_refused(fitted):
    there = rings(12, seed=1)
    for graphs, says in (
        (replace(there, node_labels=there.node_labels + 1), "label 3 was never met"),
        (replace(there, node_attributes=None), "got 1 and 0"),
        (one_way(there), "undirected"),
    ):
        with pytest.raises(ValueError, match=says):
            fitted.predict(graphs)
    with pytest.raises(TypeError, match="graphs: expected a GraphSet.*Graph"):
        fitted.predict(there.graph(0))
    with pytest.raises(TypeError, match="expected a GraphSet.*ndarray"):
        fitted.predict(there.node_attributes)
    with pytest.raises(TypeError, match="graphs: expected a GraphSet"):
        GraphSetClassifier().fit(there.graph(0))
    with pytest.raises(ValueError, match="y: expected nothing"):
        GraphSetClassifier().fit(there, there.labels)
    few = replace(there, labels=np.where(np.arange(12) < 9, there.labels, -1))
    with pytest.raises(ValueError, match="at least 10 .* known, got 9 of 12"):
        GraphSetClassifier().fit(few)


def one_way(graphs):
    once = graphs.senders < graphs.receivers
    return replace(
        graphs,
        senders=graphs.senders[once],
        receivers=graphs.receivers[once],
        edge_labels=None,
        edge_attributes=None,
    )


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
    run = subprocess.run(
        [sys.executable, "-c", FRESH, saved, path, root],
        env=env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert np.array_equal(np.load(f"{path}.npy"), fitted.predict_proba(there))


def test_hyperparameters_changed_after_fit_wait_for_the_next(fitted):
    there, again = rings(12, seed=1), GraphSetClassifier(**SMALL)
    again._kept = fitted._kept
    again.set_params(dim=99, num_positions=7, batch_size=0, layout="none")
    gap = again.predict_proba(there) - fitted.predict_proba(there)
    assert np.abs(gap).max() < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        dict(readout="every", positions="returns"),
        dict(normalize_heads=True, learn_beta=True, negative_memories=0.25),
        dict(readout="every", layout="edges", num_positions=0, blocks=2),
    ],
    ids=lambda options: next(iter(options)),
)
def test_every_kind_of_model_is_kept_and_used_on_another_set(tmp_path, options):
    own, there = GraphSetClassifier(**SMALL | options), rings(12, seed=1)
    own.fit(rings()).save(tmp_path)
    again = GraphSetClassifier.load(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["classifier.safetensors"]
    assert again.get_params() == own.get_params()
    assert np.array_equal(again.predict_proba(there), own.predict_proba(there))


@pytest.mark.parametrize(
    "name, value",
    [("lr", "a"), ("seed", 1.5), ("dropout", None), ("beta", "x"), ("epochs", True)],
)
def test_a_hyperparameter_of_another_kind_is_named(name, value):
    with doors.unchecked():
        own = GraphSetClassifier(**{**SMALL, name: value})
        with pytest.raises(ValueError, match=f"^{name}: expected a (whole )?number"):
            own.fit(rings())


def test_a_file_keeps_everything(fitted, saved):
    again = GraphSetClassifier.load(saved)
    assert again.get_params() == fitted.get_params() and repr(again) == repr(fitted)
    assert again.provenance_ == fitted.provenance_
    assert again.provenance_["graphs"]["graphs"] == 40
    for one, two in zip(again.encoding_, fitted.encoding_):
        assert jax.tree.all(jax.tree.map(np.array_equal, one, two))


@pytest.mark.parametrize("at", [0, 200, 0.5, -1])
def test_a_damaged_file_is_refused(saved, tmp_path, at):
    data = bytearray(saved.read_bytes())
    at = int(at * len(data)) if isinstance(at, float) else at
    data[at] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(CheckpointError, match="bad"):
        GraphSetClassifier.load(tmp_path / "bad")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, meta: meta.pop("classifier"),
        lambda tensors, meta: meta["classifier"].update(classes=[1]),
        lambda tensors, meta: meta["config"].update(strange=1),
        lambda tensors, meta: tensors.pop("encoding.node.mean"),
        lambda tensors, meta: tensors.pop("encoding.node.known.0"),
        lambda tensors, meta: tensors.update(
            {"encoding.node.known.0": np.ones(2, bool)}
        ),
    ],
)
def test_a_file_of_another_kind_is_refused(saved, tmp_path, change):
    meta, tensors = _read_meta(saved), safetensors.numpy.load_file(saved)
    change(tensors, meta)
    _save_checkpoint(tmp_path / "other", tensors, meta)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "other"))):
        GraphSetClassifier.load(tmp_path / "other")


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


def test_what_is_not_fitted_says_so(fitted):
    for unfitted in (GraphSetClassifier(), sklearn.base.clone(fitted)):
        for use in (unfitted.predict, unfitted.predict_proba, unfitted.score):
            with pytest.raises(NotFittedError, match="GraphSetClassifier is not"):
                use(rings(12))
        assert not hasattr(unfitted, "classes_")
