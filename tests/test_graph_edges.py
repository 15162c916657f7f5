"""Numbers on edges: through readers, a merge, a file, and into a detector."""

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyTraining, SampleConfig
from et_nbdev.graph.data import (
    Graph,
    from_dgl,
    from_networkx,
    from_pandas,
    from_pyg,
    from_relations,
    load_graph,
    save_graph,
    to_networkx,
    to_pandas,
)
from et_nbdev.graph.detector import AnomalyDetector
from et_nbdev.graph.energy import EdgeAttention, EdgeBias, EdgeIndex, edge_energies
from et_nbdev.graph.nodes import aggregate, sample_nodes
from et_nbdev.testing import assert_close
from et_nbdev.training import OptimConfig

X, Y = np.eye(4), np.array([0, 1, 0, -1])
ENDS = np.array([[0, 1, 1, 2, 0, 3], [1, 0, 2, 1, 1, 3]])  # 0 → 1 twice, and a loop
ROWS = np.array([[1, 0], [2, 0], [3, 1], [4, 1], [5, 0], [6, 1]], np.float32)
NAMES = ("amount", "late")


def graph_of(**options):
    own = dict(edge_features=ROWS, edge_feature_names=NAMES)
    return Graph(*ENDS, X, Y, **own | options)


def table(graph):
    "Features by edge."
    return dict(zip(zip(*(e.tolist() for e in graph.edges)), graph.edge_features[:, 0]))


def test_edges_that_become_one_have_the_mean_of_their_features():
    graph = graph_of()
    assert "6 edges with 2 features, 4 features" in repr(graph)
    merged = {(0, 1): 3, (1, 0): 2, (1, 2): 3, (2, 1): 4}
    assert table(graph.simple()) == merged
    assert table(graph.simple(self_loops=True)) == merged | {(3, 3): 6}
    both = {(0, 1): 8 / 3, (1, 2): 3.5, (3, 3): 6}
    both |= {ends[::-1]: value for ends, value in both.items()}
    found = graph.symmetric()
    assert table(found) == pytest.approx(both)
    assert table(found.symmetric()) == table(found)
    kinds = {"a": ENDS[:, :3], "b": ENDS[:, 3:]}
    several = from_relations(kinds, X, Y, edge_features=ROWS)
    assert table(several) == merged | {(3, 3): 6}
    assert table(several.relation("a")) == {(0, 1): 3, (1, 0): 2, (1, 2): 3}
    others = Graph(*ENDS, X, Y), graph_of(edge_features=ROWS + 1)
    assert len({graph.digest, *(other.digest for other in others)}) == 3


def through_pyg(graph):
    data = dict(x=X, edge_index=ENDS, y=Y, edge_attr=graph.edge_features)
    return from_pyg(SimpleNamespace(**data), edge_features=["edge_attr"])


def through_dgl(graph):
    class Edges(dict):
        __call__ = lambda self, etype: graph.edges

    kind, data = ("n", "e", "n"), dict(zip(NAMES, graph.edge_features.T))
    given = dict(ntypes=["n"], canonical_etypes=[kind], edata=data | {"_ID": 0})
    given |= dict(edges=Edges({kind: SimpleNamespace(data=data)}))
    given |= dict(ndata=dict(feature=X, label=Y))
    return from_dgl(SimpleNamespace(**given), edge_features=NAMES)


OWN = dict(edge_features=NAMES)
TABLES = {
    "pandas": lambda graph, **kind: from_pandas(*to_pandas(graph), **OWN, **kind),
    "nx": lambda graph, **kind: from_networkx(to_networkx(graph), **OWN, **kind),
}


def test_readers_and_files_keep_what_is_named(tmp_path):
    graph, path = graph_of(), str(tmp_path / "graph.npz")
    save_graph(graph, path)
    ways = [through_pyg(graph), through_dgl(graph), load_graph(path, symmetric=False)]
    for found in ways + [way(graph) for way in TABLES.values()]:
        assert table(found.simple()) == table(graph.simple())
        made = tuple(f"edge_attr_{i}" for i in range(2))
        assert found.edge_feature_names == (made if found is ways[0] else NAMES)
    kinds = {"a": ENDS[:, ::2], "b": ENDS[:, 1::2]}
    own = dict(
        edge_feature_names=NAMES, edge_features=np.vstack([ROWS[::2], ROWS[1::2]])
    )
    graph = from_relations(kinds, X, Y, **own)
    for way in TABLES.values():
        found = way(graph, relation="relation")
        assert table(found) == table(graph) and {*found.relations} == {"a", "b"}


EDGES, NODES = to_pandas(graph_of())
WRONG = [
    (
        r"features: must have a row for each of 6 edges, .*\(6, P\), got .*\(5, 2\)",
        lambda: graph_of(edge_features=ROWS[:5]),
    ),
    (
        r"features: .*\(6,\); .* a\[:, None\]",
        lambda: graph_of(edge_features=ROWS[:, 0]),
    ),
    ("features: must be finite", lambda: graph_of(edge_features=ROWS + np.inf)),
    ("features: must hold numbers", lambda: graph_of(edge_features=[["1"]] * 6)),
    ("feature_names: must be 2 or", lambda: graph_of(edge_feature_names=["amount"])),
    (
        "feature_names: 'source'",
        lambda: to_pandas(graph_of(edge_feature_names=("source", "late"))),
    ),
    ("s: no column 'when'", lambda: from_pandas(EDGES, NODES, edge_features=["when"])),
    (
        "features: 'late': must hold numbers",
        lambda: from_pandas(EDGES.assign(late="no"), NODES, **OWN),
    ),
    (
        r"features: edge \(0, 1\) has no 'late'",
        lambda: from_networkx(to_networkx(Graph(*ENDS, X, Y)), edge_features=["late"]),
    ),
]


@pytest.mark.parametrize("words, call", WRONG)
def test_features_of_edges_are_checked_and_named(words, call):
    with pytest.raises(ValueError, match="^edge_?" + words):
        call()


def test_what_is_not_named_is_not_dropped_in_silence():
    with pytest.raises(ValueError, match="^weights: .*'late', .*edge_features"):
        from_pandas(EDGES, NODES, edge_features=["amount"])
    with pytest.raises(ValueError, match="^data: must have .*edge_attr"):
        from_pyg(
            SimpleNamespace(x=X, edge_index=ENDS, y=Y), edge_features=["edge_attr"]
        )


# --- a detector


def made(seed=0, N=60):
    "Two groups that pay among themselves; only the first payment leads across."
    rng = np.random.default_rng(seed)
    group = np.arange(N) % 2
    senders, receivers = rng.integers(N, size=(2, 6 * N))
    keep = (senders != receivers) & (group[senders] == group[receivers])
    ends = np.stack([senders, receivers])[:, keep]
    ends = np.hstack([[[0], [1]], ends])
    x = np.eye(2)[group] + 0.1 * rng.normal(size=(N, 2))
    rows = 5 + rng.normal(size=(len(ends[0]), 1))
    own = dict(edge_features=rows, edge_feature_names=["amount"])
    return Graph(*ends, x, group, **own)


@pytest.fixture(scope="module")
def fitted():
    model = AnomalyConfig(dim=8, head_dim=4, num_memories=6, hidden=6)
    optim = OptimConfig(steps=15, warmup=2, lr=0.03, weight_decay=0)
    return AnomalyDetector(AnomalyTraining(model=model, optim=optim)).fit(made())


def test_a_detector_uses_the_features_of_edges_and_keeps_their_units(fitted, tmp_path):
    graph, own = made(), fitted.model_.blocks[0].attention.positions.weight[...]
    assert own.shape == (1, 1) and abs(own[0, 0]) > 1e-3
    rows = graph.edge_features.astype(float)
    assert_close(fitted.scaling_.edge_mean, rows.mean(0))
    assert_close(fitted.scaling_.edge_std, rows.std(0))
    _, (edges,) = fitted._kept.inputs(graph)
    found = np.asarray(edges.into.features)[0]
    assert abs(found.mean()) < 0.2 and abs(found.std() - 1) < 0.2
    other = made(seed=1)
    p = fitted.predict_proba(other)
    moved = replace(other, edge_features=-other.edge_features)
    assert np.abs(fitted.predict_proba(moved) - p).max() > 1e-4
    fitted.save(tmp_path / "kept.safetensors")
    again = AnomalyDetector.load(tmp_path / "kept.safetensors")
    assert np.array_equal(again.predict_proba(other), p)
    assert "statistics.edge_mean" in load_file(tmp_path / "kept.safetensors")
    assert aggregate(graph).shape == (60, 7)  # trees see them, too


@pytest.mark.parametrize(
    "columns, names, words",
    [
        (0, [], "expected 1 edge features.*got 0 edge features"),
        (2, [], "expected 1 edge features.*got 2 edge features"),
        (1, ["price"], r"the edge features \['amount'\], .*\['price'\]"),
    ],
)
def test_other_features_of_edges_are_refused_in_words(columns, names, words, fitted):
    graph = made()
    rows = np.repeat(graph.edge_features, columns, 1)
    other = replace(graph, edge_features=rows, edge_feature_names=names)
    with pytest.raises(ValueError, match="^graph: .*" + words):
        fitted.predict(other)


@pytest.mark.parametrize("backend", ["compiled", "xla"])
def test_parts_of_a_graph_keep_the_features_of_their_edges(backend):
    graph = made().simple()
    own = dict(features=graph.edge_features, backend=backend)
    edges = EdgeIndex(*graph.edges, 60, **own)
    config, rng = SampleConfig(2, 20, 3), np.random.default_rng(0)
    nodes, (part,) = sample_nodes((edges,), np.array([4, 9]), config, rng)
    if backend == "compiled":
        ends, rows = part.edge_list(), part.table()
        part = {"edges": part}
    else:
        ends, rows = np.nonzero(part["mask"])[::-1], part["edge_features"]
    for sender, receiver in zip(*ends):
        wanted = table(graph)[int(nodes[sender]), int(nodes[receiver])]
        assert rows[receiver, sender, 0] == wanted
    assert len(ends[0]) > 20
    attention = EdgeAttention(2, 1, 2, positions=EdgeBias(1, 1), rngs=nnx.Rngs(0))
    assert np.isfinite(attention.energy(jnp.ones((20, 2)), **part))


def test_the_score_of_an_edge_is_by_how_much_the_energy_rises_without_it():
    graph, rng = made().simple(), np.random.default_rng(0)
    edges = EdgeIndex(*graph.edges, 60, features=graph.edge_features)
    attention = EdgeAttention(
        2, 2, 3, [0.5, 3.0], positions=EdgeBias(1, 2), repelling=1, rngs=nnx.Rngs(0)
    )
    attention.positions.weight[...] = jnp.asarray([[0.4], [-0.3]])
    g = jnp.asarray(rng.normal(size=(60, 2)), jnp.float32)
    scores = edge_energies(attention, g, edges)
    alone = int(np.argmin(graph.degrees[graph.receivers]))  # all that a node sees
    for e in [*range(0, len(scores), 40), alone]:
        rest = np.arange(len(scores)) != e
        left = [end[rest] for end in graph.edges]
        without = EdgeIndex(*left, 60, features=graph.edge_features[rest])
        change = attention.energy(g, edges=without) - attention.energy(g, edges=edges)
        assert_close(scores[e], float(change), atol=1e-3)


def test_a_planted_edge_has_the_lowest_score(fitted):
    graph = made(seed=2)
    scores = fitted.score_edges(graph)
    assert np.argmin(scores) == 0 and scores[0] < np.sort(scores)[1] / 2
    again, loop = [graph.senders[3], 7], [graph.receivers[3], 7]
    rows = np.vstack([graph.edge_features, graph.edge_features[[3, 3]]])
    ends = [np.append(*pair) for pair in zip(graph.edges, (again, loop))]
    more = replace(graph, senders=ends[0], receivers=ends[1], edge_features=rows)
    wanted = [*scores, scores[3], 0]
    assert_close(fitted.score_edges(more), np.array(wanted), rtol=1e-4)
