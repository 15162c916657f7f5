"""The classifier of graphs: its energy and update, what padding, batch mates and
numbering may change, and a training that never looks at the test labels.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_graph_sets import graphs_in

from et_nbdev.graph import classify
from et_nbdev.graph.classify import (
    ClassifyConfig,
    ClassifyTraining,
    GraphClassifier,
    WeightedEdges,
    _main,
    load_classifier,
    train_classifier,
)
from et_nbdev.graph.crossval import Scores, deal, graph_loss, parts
from et_nbdev.graph.data import Split
from et_nbdev.graph.energy import EdgeAttention
from et_nbdev.graph.sets import (
    EdgeBatch,
    GraphSet,
    Supply,
    laplacian_positions,
    learn_encoding,
    load_graphs,
)
from et_nbdev.testing import assert_close
from et_nbdev.training import CheckpointError

pytestmark = pytest.mark.usefixtures("compiled_once", "compile_quickly")
SIZES = dict(dim=8, num_heads=2, head_dim=4, num_memories=12, num_positions=3)
SMALL = ClassifyConfig(**SIZES, blocks=2, steps=2, step_size=0.1)
QUICK = ClassifyTraining("rings", epochs=2, batch_size=16, model=SMALL)
RINGS = load_graphs("rings")[:60]
FOLD = parts(deal(RINGS.labels), 0)
call = nnx.jit(lambda model, batch: model(batch))
train_call = nnx.jit(
    lambda model, batch, seed: model(batch, rngs=nnx.Rngs(jax.random.key(seed)))
)
same_weights = lambda one, other: all(
    map(np.array_equal, *(jax.tree.leaves(nnx.state(m)) for m in (one, other)))
)


def toys(sizes=(5, 3, 1, 4)):
    "Graphs of these sizes with two labels of nodes, of edges, and two classes."
    rng, start = np.random.default_rng(0), np.concatenate([[0], np.cumsum(sizes)])
    ends = [
        np.stack(np.nonzero(np.triu(rng.random((n, n)) < 0.7, 1))) + s
        for n, s in zip(sizes, start)
    ]
    ends, classes = np.concatenate(ends, 1), np.arange(len(sizes)) % 2
    labels = dict(node_labels=rng.integers(0, 2, start[-1]))
    labels |= dict(edge_labels=rng.integers(0, 2, ends.shape[1]))
    return GraphSet(start, *ends, classes, **labels).undirected()


def prepared(graphs=None):
    "The graphs in a batch, which is padded, in double precision."
    graphs = toys() if graphs is None else graphs
    ids = np.arange(len(graphs))
    encoding, positions = learn_encoding(graphs, ids), laplacian_positions(graphs, 3)
    with jax.enable_x64(False):
        batch = Supply(graphs, encoding, positions).load(ids)
    double = lambda x: jnp.asarray(x, float if x.dtype == np.float32 else x.dtype)
    return jax.tree.map(double, batch)


def build(config=SMALL, L=2):
    options = dict(num_edge_features=L, param_dtype=jnp.float64)
    model = GraphClassifier(2, 2, config, **options, rngs=nnx.Rngs(0))
    assert (model.adjacency.bias[...] == 1).all()
    model.adjacency.bias[...] = jnp.linspace(0.5, 1.5, config.num_heads)
    for block in model.blocks:
        block.norm.delta[...] = jax.random.normal(jax.random.key(9), (8,), jnp.float64)
    return model


def single(batch):
    "The same batch in single precision."
    lower = lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x
    return jax.tree.map(lower, batch)


def widen(batch, nodes=7, edges=9, graphs=2):
    "The same batch with room for more nodes, edges and graphs."
    last, B = len(batch.graph) + nodes - 1, len(batch.labels) + graphs

    def pad(x, more, value=0):
        return jnp.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)), constant_values=value)

    graph = jnp.where(batch.present, batch.graph, B)
    rows = pad(batch.features, nodes), pad(batch.positions, nodes)
    ends = (pad(end, edges, last) for end in (batch.senders, batch.receivers))
    lists = *rows, *ends, pad(batch.edge_features, edges), pad(graph, nodes, B)
    return EdgeBatch(*lists, pad(batch.present, nodes), pad(batch.labels, graphs, -1))


# --- weighted scores, and the learned adjacency


def test_huge_weighted_scores_stay_finite():
    attention = EdgeAttention(4, 1, 4, beta=1.0, rngs=nnx.Rngs(0))
    g = 100 * jnp.eye(4)[:3]
    weights = 1e3 * jnp.array([[[0.0, 1, -1], [1, 0, 1], [-1, 1, 0]]])
    r, s = np.nonzero(~np.eye(3, dtype=bool))
    ends = jnp.asarray(s), jnp.asarray(r), jnp.ones(6, bool)
    edges = WeightedEdges(*ends, weights[:, r, s])
    for pairs in (dict(weights=weights), dict(edges=edges)):
        f = lambda g: (
            jnp.sum(attention.energy_and_update(g, **pairs)[1] ** 2)
            + attention.energy(g, **pairs)
        )
        assert all(np.isfinite(x).all() for x in jax.jit(jax.value_and_grad(f))(g))


def literal_adjacency(learned, X, e):
    "The convolution of X ⊗ X, for one graph."
    layout = dict(dimension_numbers=("NHWC", "HWIO", "NCHW"))
    image, filters = (X[:, None] * X[None])[None], learned.filters[...]
    A = jax.lax.conv_general_dilated(image, filters, (1, 1), "SAME", **layout)[0]
    own = jnp.einsum("ckl,lh->hck", e, learned.edge_filter[...])
    return A + learned.bias[...][:, None, None] + own


# --- the model


def by_hand(model, batch):
    "Appendix F, graph by graph, without batches, padding or lists."
    c, logits = model.config, []
    for _, x, p, A, e in graphs_in(jax.tree.map(np.asarray, batch)):
        X = jnp.concatenate([model.cls[...][None], model.embed(x) + model.place(p)])
        row = ((1, 0), (1, 0))
        tilde = np.pad(A, row, constant_values=1)
        A = literal_adjacency(model.adjacency, X, jnp.pad(e, (*row, (0, 0))))
        A = A * tilde[None]
        mask = tilde > 0 if c.strangers == "out" else np.ones_like(tilde, bool)
        pairs, passed = dict(weights=A, mask=jnp.asarray(mask)), [X]
        for block in model.blocks:
            for _ in range(c.steps):
                X = X + c.step_size * block.update(block.norm(X), **pairs)
            passed.append(X)
        if c.readout == "cls":
            logits.append(model.head(X[0]))
        else:
            both = [jnp.concatenate([x[0], x[1:].sum(0)]) for x in passed]
            logits.append(sum(head(x) for head, x in zip(model.heads, both)))
    return jnp.stack(logits)


MODELS = {
    "as they are": {},
    "literal": dict(strangers="zero", readout="every", filter_size=5),
    "no memories": dict(num_memories=0),
    "other terms": dict(
        beta=2.0,
        learn_beta=True,
        normalize_heads=True,
        negative_memories=0.25,
        step_size=0.02,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_model_is_appendix_f_graph_by_graph_however_it_is_batched(x64, kind):
    batch = prepared()
    model = build(replace(SMALL, **MODELS[kind]))
    one, other = (block.attention for block in model.blocks)
    assert not np.array_equal(one.Wq[...], other.Wq[...])
    if kind == "other terms":
        assert one.normalize and (one.beta == 2).all() and "log_beta" in vars(one)
        assert model.blocks[0].memory.num_negative == 3
    want = by_hand(model, batch)
    # batch mates and padding change nothing
    assert_close(call(model, batch), want)
    assert_close(call(model, widen(batch))[:4], want)
    loss = lambda model, batch: jnp.sum(jnp.sin(model(batch)[:4]))
    slope = nnx.jit(nnx.grad(loss))
    jax.tree.map(assert_close, slope(model, widen(batch)), slope(model, batch))


QUIET = replace(SMALL, noise=0.0)


@pytest.mark.parametrize(
    "config, differs",
    [
        (SMALL, True),
        (replace(QUIET, dropout=0.5), True),
        (replace(QUIET, readout="every", dropout=0.5), True),
        (QUIET, True),  # signs
        (replace(QUIET, num_positions=0), False),
        (replace(QUIET, positions="returns"), False),  # have no sign
    ],
    ids="noise dropout each signs nothing returns".split(),
)
def test_noise_signs_and_dropout_are_for_training_alone(config, differs):
    batch = single(prepared())
    batch = batch._replace(positions=batch.positions[:, : config.num_positions])
    model = GraphClassifier(2, 2, config, num_edge_features=2, rngs=nnx.Rngs(0))
    one, two = (train_call(model, batch, i) for i in (0, 1))
    assert np.array_equal(one, two) != differs
    assert np.array_equal(call(model, batch), used := call(model, batch))
    if not differs:
        assert_close(one, used, rtol=1e-6)


def test_noise_is_that_of_equation_26():
    """The noise of deviation 0.02 on the gradient moves a token by α · 0.02 in every
    step, and nothing else changes.
    """
    sizes = dict(dim=64, num_positions=0, num_heads=1, num_memories=0)
    config = replace(SMALL, **sizes, noise=0.02, steps=1, blocks=1, step_size=0.5)
    model = GraphClassifier(1, 64, config, rngs=nnx.Rngs(0))
    model.head.kernel[...] = jnp.eye(64)
    alone = GraphSet(np.arange(201), [], [], np.zeros(200, int))
    batch = Supply(alone, learn_encoding(alone, [0]), np.zeros((200, 0), np.float32))
    batch = batch.load(np.arange(200))
    moved = np.asarray(train_call(model, batch, 3) - call(model, batch))
    assert moved.std() == pytest.approx(0.5 * 0.02, rel=0.05)
    assert abs(moved.mean()) < 0.001


# --- training


def test_the_loss_counts_every_graph_once(x64):
    batch = prepared()
    model = build(replace(QUIET, num_positions=0))
    batch = batch._replace(positions=batch.positions[:, :0])
    log_p = np.asarray(jax.nn.log_softmax(call(model, batch)))
    want = -log_p[np.arange(4), np.asarray(batch.labels)].sum() / 16
    for own in (batch, widen(batch)):
        found = nnx.jit(graph_loss)(model, own, jax.random.key(0), 1 / 16)[0]
        assert_close(found, want)


def test_training_repeats_never_looks_at_the_test_labels_and_resumes(tmp_path):
    labels = RINGS.labels.copy()
    labels[FOLD.test] = 1 - labels[FOLD.test]
    other = replace(RINGS, labels=labels)
    train = lambda *a: train_classifier(QUICK, *a, progress=False)
    one, blind = train(RINGS, FOLD, tmp_path), train(other, FOLD)
    assert one.validation == blind.validation
    assert one.test.accuracy == pytest.approx(1 - blind.test.accuracy)
    assert same_weights(one.model, blind.model)
    # finds a finished run
    again = train(RINGS, FOLD, tmp_path)
    assert again.test == one.test and again.best_step == one.best_step
    # but not a run on other graphs, or on another part of the same
    for graphs, fold in ((other, FOLD), (RINGS, parts(deal(RINGS.labels), 5))):
        with pytest.raises(CheckpointError, match=r"data\.(graphs|fold): '"):
            train(graphs, fold, tmp_path)
    loaded = load_classifier(tmp_path / "best.safetensors")
    assert same_weights(one.model, loaded)
    with pytest.raises(CheckpointError):
        load_classifier(tmp_path / "none.safetensors")


def test_the_encoding_is_learned_from_the_training_graphs_alone(monkeypatch):
    learned, given = classify.learn_encoding, []
    watch = lambda graphs, ids: given.append(ids) or learned(graphs, ids)
    monkeypatch.setattr(classify, "learn_encoding", watch)
    config = replace(QUICK, epochs=1, model=replace(SMALL, blocks=1, steps=1))
    train_classifier(config, RINGS, FOLD, progress=False)
    ((ids),) = given
    assert np.array_equal(ids, FOLD.train)


def test_validation_prefers_fewer_errors_to_smaller_losses(monkeypatch):
    """One error less outweighs any cross-entropy, which decides among equal counts; the
    history names what the choice was made by.
    """
    found = [(2 / 6, 0.1), (3 / 6, 1e6), (3 / 6, 1e5), (3 / 6, 1e5)]
    given = iter(Scores(*s) for s in (*found, (0.0, 0.0), (0.0, 0.0)))  # two reports
    seen, fold = [], FOLD._replace(test=FOLD.test[1:])  # of other labels
    monkeypatch.setattr(
        classify, "score", lambda _, own: seen.append(own) or next(given)
    )
    run = train_classifier(replace(QUICK, epochs=4), RINGS, fold, progress=False)
    want = [RINGS.labels[ids] for ids in (*[fold.validation] * 5, fold.test)]
    assert list(map(np.ndarray.tolist, seen)) == list(map(np.ndarray.tolist, want))
    rows = [row for row in run.history if "validation_loss" in row]
    names = ("validation_accuracy", "validation_cross_entropy")
    assert [tuple(row[name] for name in names) for row in rows] == found
    assert run.best_step == rows[2]["step"]
    for row, (accuracy, _) in zip(rows, found):
        assert 1 - accuracy < row["validation_loss"] < 1 - accuracy + 1 / 6


def test_the_script_trains_reports_and_resumes(tmp_path, capsys):
    args = "--data rings --epochs 1 --batch_size 64 --out".split()
    args += [str(tmp_path)]
    for name, size in SIZES.items():
        args += [f"--model.{name}", str(size)]
    _main(args)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["config"]["model"]["dim"] == 8 and "commit" in metrics
    assert metrics["graphs"] == {"train": 192, "validation": 24, "test": 24}
    assert f"{metrics['test']['accuracy']:.3f}" in capsys.readouterr().out
    _main(args)
    again = json.loads((tmp_path / "metrics.json").read_text())
    assert again["test"] == metrics["test"]
    with pytest.raises(SystemExit, match="epochs"):
        _main([*args, "--epochs", "2"])


# --- the doors


def test_bad_input_is_named():
    zeros = Split(*(np.flatnonzero(RINGS.labels == c)[:4] for c in (0, 1, 1)))
    unknown = replace(RINGS, labels=np.where(np.arange(60) == 3, -1, RINGS.labels))
    some = Split(*np.split(np.arange(20), [10, 15]))
    for given, fold, says in ((RINGS, zeros, "one class"), (unknown, some, "no label")):
        with pytest.raises(ValueError, match=says):
            train_classifier(QUICK, given, fold, progress=False)
    model, batch = GraphClassifier(2, 2, SMALL, rngs=nnx.Rngs(0)), prepared()
    with pytest.raises(ValueError, match=r"batch.edge_features: .* axis of 0"):
        model(batch)
    with pytest.raises(ValueError, match=r"batch.positions: .* axis of 3"):
        model(batch._replace(positions=batch.positions[:, :2]))
