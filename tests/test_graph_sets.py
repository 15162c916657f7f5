"""Sets of graphs, their readers, and positions, features and batches of them:
nbs/engine/sets.ipynb.
"""

import itertools
import urllib.request
import zipfile
from dataclasses import replace

import jax
import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

import et_nbdev.graph.sets as sets
from et_nbdev.graph.sets import (
    GraphSet,
    Supply,
    flip_signs,
    graphs_from_dgl,
    laplacian_positions,
    learn_encoding,
    load_graphs,
    read_tu,
    return_probabilities,
)

pytestmark = pytest.mark.usefixtures("compile_quickly")

TEXT = {
    "A": "1, 2\n2, 1\n3, 4\n4, 3\n",
    "graph_indicator": "1\n1\n2\n2\n2\n3\n",
    "graph_labels": "-1\n7\n7\n",
    "node_labels": "0\n3\n3\n0\n0\n3\n",
    "node_attributes": "0.5, 1\n1, 2\n-3e2, 4\n1, 0\n0, 0\n2, 2\n",
    "edge_labels": "1\n1\n0\n0\n",
    "edge_attributes": ".5\n.5\n.25\n.25\n",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    "No data but the test's own, and no network."
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sets, "_TU_URL", (tmp_path / "server").as_uri() + "/{name}.zip")


def write(folder, inside="SET//", **changes):
    path = folder / "SET.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for part, text in (TEXT | changes).items():
            if text is not None:
                z.writestr(f"{inside}SET_{part}.txt", text)
    return path


def random_set(seed, G=7, most=9, p=0.35):
    "Graphs of 1 to `most` nodes, some without edges, labels and attributes everywhere."
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, G)
    start, edges = np.concatenate([[0], np.cumsum(sizes)]), []
    for s, n in zip(start, sizes):
        A = np.triu(rng.random((n, n)) < p, 1)
        edges += [(s + i, s + j) for i, j in np.argwhere(A | A.T)]
    N, E = start[-1], len(edges)
    return GraphSet(
        start,
        *np.array(edges, int).reshape(-1, 2).T,
        rng.integers(0, 3, G),
        np.arange(3),
        node_labels=rng.integers(0, 4, (N, 1)) * 5 - 1,
        node_attributes=rng.normal(size=(N, 2)),
        edge_labels=rng.integers(0, 2, E),
        edge_attributes=rng.normal(size=(E, 1)),
        name="random",
    )


# --- the container


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(start=[0, 2, 2]), "^start: must ascend from 0 by at least one node"),
        (dict(start=[1, 2, 3]), "^start: must ascend from 0"),
        (dict(start=[0.0, 2, 3]), "^start: .*float64"),
        (dict(labels=[0]), r"^labels: must hold integers of shape \(2,\)"),
        (dict(labels=[0, -2]), "^labels: must be classes"),
        (dict(labels=[0, 2], classes=[5, 6]), "^labels: .* classes from 0 to 1 or -1"),
        (dict(classes=["a", "b"]), "^classes: must hold integers .*<U1"),
        (dict(senders=[0, 4]), "^senders: must hold ids of nodes from 0 to 2.*got 4"),
        (dict(senders=[0, 2]), "^senders and .*: edge 1 leads from graph 1 to graph 0"),
        (dict(senders=[0]), "an edge has a sender and a receiver"),
        (dict(node_labels=[1, 2]), r"^node_labels: .*shape \(3, M\)"),
        (dict(node_labels=[1.0, 2, 3]), "^node_labels: must hold integers"),
        (dict(edge_attributes=[[1.0], [np.inf]]), "^edge_attributes: .*finite.*inf at"),
    ],
)
def test_a_set_refuses_by_name(bad, match):
    two = dict(start=[0, 2, 3], senders=[0, 1], receivers=[1, 0], labels=[0, 1])
    with pytest.raises(ValueError, match=match):
        GraphSet(**two | bad)


@given(st.integers(0, 2**31), st.lists(st.integers(-7, 6), max_size=10))
@examples(25)
def test_a_subset_holds_the_graphs_it_names(seed, ids):
    graphs = random_set(seed)
    part = graphs[ids]
    assert part.shape == (len(ids),) and part.num_classes == 3
    for one, i in zip(part, ids):
        assert one.digest == graphs[i].digest
        a, b = graphs.start[i % 7 : i % 7 + 2]
        inside = (graphs.senders >= a) & (graphs.senders < b)
        assert (one.num_nodes, one.num_edges) == (b - a, inside.sum())
        for table in ("node_labels", "node_attributes"):
            own = getattr(graphs, table)[a:b]
            np.testing.assert_array_equal(getattr(one, table), own)
    assert graphs[:].digest == graphs.digest
    assert graphs[2:5].digest == graphs[np.isin(np.arange(7), (2, 3, 4))].digest
    for beyond in (7, [0.5]):
        with pytest.raises(IndexError):
            graphs[beyond]


def test_undirected_merges_mirrors_and_moves_what_is_known():
    ends = [0, 0, 1, 4, 4], [1, 1, 1, 3, 4]
    g = GraphSet([0, 3, 5], *ends, [0, 1], edge_labels=[5, 6, 7, 8, 9])
    assert not g.is_undirected and (g := g.undirected()).is_undirected
    found = zip(g.senders.tolist(), g.receivers.tolist(), g.edge_labels[:, 0].tolist())
    assert list(found) == [(1, 0, 5), (0, 1, 5), (4, 3, 8), (3, 4, 8)]
    assert g.undirected().digest == g.digest
    assert GraphSet([0, 1], [], [], [0]).undirected().num_edges == 0
    two_ways = GraphSet([0, 2], [0, 1], [1, 0], [0], edge_labels=[1, 2]).undirected()
    assert two_ways.edge_labels[:, 0].tolist() == [2, 1]  # each keeps its own
    graphs = random_set(2)  # edges in any order keep their tables
    order = np.random.default_rng(0).permutation(graphs.num_edges)
    keys = ("senders", "receivers", "edge_labels", "edge_attributes")
    mixed = replace(graphs, **{key: getattr(graphs, key)[order] for key in keys})
    assert mixed.undirected().digest == graphs.undirected().digest
    assert mixed.is_undirected and mixed.digest != graphs.digest


def test_a_digest_changes_with_every_number_of_a_set():
    graphs = random_set(1)
    assert graphs.digest == replace(graphs, name="other").digest
    found, more = {graphs.digest}, lambda t: np.concatenate([t, t[:1]])
    nodes = ("node_labels", "node_attributes")
    others = ("classes", *nodes, "edge_labels", "edge_attributes")
    longer = {key: more(getattr(graphs, key)) for key in nodes}
    start = np.array(graphs.start) + (np.arange(8) == 7)  # one node more at the end
    changes = [dict(start=start, **longer), dict(labels=(graphs.labels + 1) % 3)]
    changes += [{key: graphs.senders + 0} for key in ("receivers",)]
    changes += [{key: graphs.receivers + 0} for key in ("senders",)]
    for key in others:
        a = np.array(getattr(graphs, key))
        a.flat[-1] += 1
        changes.append({key: a})
    found |= {replace(graphs, **change).digest for change in changes}
    assert len(found) == 1 + len(changes)


def test_the_set_that_is_always_there():
    "Models and figures rest on it."
    assert load_graphs("rings").digest == "da89af6a27719c3b"


# --- text


@pytest.mark.parametrize("inside", ["", "SET//", "a/b/SET/"])
def test_text_is_read_from_zips_and_folders_at_any_depth(tmp_path, inside):
    with zipfile.ZipFile(write(tmp_path, inside), "a") as z:
        z.writestr("._SET_A.txt", b"\x00")  # macOS leaves these
        z.writestr("b/README.txt", "of no interest")
        z.extractall(tmp_path / "folder")
    for place in (tmp_path / "SET.zip", tmp_path / "folder"):
        graphs = read_tu(place, "SET")
        assert graphs.sizes.tolist() == [2, 3, 1] and graphs.name == "SET"
        named = graphs.classes[graphs.labels]
        assert named.tolist() == [-1, 7, 7]
        assert graphs.node_labels[:, 0].tolist() == [0, 3, 3, 0, 0, 3]
        assert graphs.node_attributes[2].tolist() == [-300, 4]
        assert graphs.senders.tolist() == [0, 1, 2, 3]
        assert graphs.edge_attributes[:, 0].tolist() == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    "text",
    [
        {k: t.replace("\n", "\r\n") for k, t in TEXT.items()},
        {k: t.encode("utf-8-sig") for k, t in TEXT.items()},
        {k: t.replace("\n", "\r\n").encode("utf-16") for k, t in TEXT.items()},
        dict(node_labels="0.0\n3.0\n3.0\n0\n0\n3\n\n\n"),
        # nodes of the graphs in another order
        dict(
            graph_indicator="2\n3\n1\n2\n1\n2\n",
            A="3, 5\n5, 3\n1, 4\n4, 1\n",
            node_labels="3\n3\n0\n0\n3\n0\n",
            node_attributes="-3e2, 4\n2, 2\n0.5, 1\n1, 0\n1, 2\n0, 0\n",
        ),
    ],
)
def test_text_variants_mean_the_same(tmp_path, text):
    graphs = read_tu(write(tmp_path), "SET")
    assert read_tu(write(tmp_path, **text), "SET").digest == graphs.digest
    bare = {k: None for k in TEXT if "node" in k or "edge" in k}
    graphs = read_tu(write(tmp_path, **bare | {"A": ""}), "SET")
    assert graphs.num_edges == 0 and graphs.node_labels.shape == (6, 0)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(A=None), "lacks SET_A.txt"),
        (dict(A="1, 2\n2, 9\n"), "A, counted from 0: receivers: .*got 8 at position 1"),
        (dict(A="1, 2\n0, 1\n"), "A, counted from 0: senders: .*got -1 at position 1"),
        (dict(A="1, 2\n2, 3\n3, 4\n4, 3\n"), "edge 1 leads from graph 0 to graph 1"),
        (dict(A="1, 2\n2; 1\n"), "A: .*from 2 to 1 at row 2"),
        (dict(A="1\n2\n3\n4\n"), "an edge has a sender and a receiver"),
        (dict(A="1, 2\n2, 1.5\n"), r"A: expected integers, got \[2.0, 1.5\] in row 1"),
        (dict(A="1, 2\n2, 99999999999999999999\n"), "A: expected integers"),
        (dict(A=b"\x00\xff garbage"), "A: "),
        (dict(node_labels="0\n3\n"), r"node_labels: .*\(6, M\), got int64 .*\(2, 1\)"),
        (dict(node_attributes="1\n2\nnan\n4\n5\n6\n"), "node_attributes: .*nan at pos"),
        (dict(node_attributes="1\n2\n3\n4\n1e999\n6\n"), "node_attributes: .*inf"),
        (dict(edge_labels="1\n1\n0\n"), r"edge_labels: .*\(4, M\)"),
        (dict(graph_labels="1\n2\n"), "graph_indicator: must name each of the 2"),
        (dict(graph_labels="1\n2\n1\n2\n"), "graph_indicator: must name each of the 4"),
        (dict(graph_labels="a\nb\nc\n"), "graph_labels: .*'a'"),
        (dict(graph_indicator=""), "graph_indicator: must name"),
        (dict(graph_indicator="1\n1\n-2\n2\n2\n3\n"), "no negative"),
    ],
)
def test_malformed_text_is_named_with_its_table(tmp_path, change, match):
    with pytest.raises(ValueError, match=rf"(?s)^path: .*SET.zip is damaged.*{match}"):
        read_tu(write(tmp_path, **change), "SET")


def test_a_file_that_is_there_twice_is_named(tmp_path):
    "Damaged ones are in test_drill.py."
    path = write(tmp_path)
    with zipfile.ZipFile(path, "a") as z:
        z.writestr("old/SET_A.txt", "1, 2\n")
        z.extractall(tmp_path / "twice")
    for place in (path, tmp_path / "twice"):
        with pytest.raises(ValueError, match="holds a file of SET twice"):
            read_tu(place, "SET")


def test_sets_are_found_or_downloaded_whole_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"(?s)'SET' was not .*\n  - .*SET.zip"):
        load_graphs("SET")
    write(tmp_path / "server", node_labels="0\n")
    with pytest.raises(FileNotFoundError, match="node_labels: must hold"):
        load_graphs("SET")
    left = list((tmp_path / "cache").rglob("*.*"))
    assert left == [], "nothing of a broken download may stay"
    write(tmp_path / "server")
    downloaded = load_graphs("SET")
    (tmp_path / "server/SET.zip").unlink()
    assert load_graphs("SET").digest == downloaded.digest
    write(tmp_path / "data/graphs/tu", graph_labels="1\n1\n1\n")
    monkeypatch.setenv("ET_DATA", str(tmp_path / "data"))
    assert load_graphs("SET").num_classes == 1  # ET_DATA goes first
    write(tmp_path / "mine", graph_labels="1\n2\n3\n")
    assert load_graphs("SET", tmp_path / "mine").num_classes == 3  # and root before it
    with pytest.raises(ValueError, match="^root: .* is not a folder"):
        load_graphs("SET", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="^name: must be"):
        load_graphs("../SET")

    def refuse(*a, **k):
        raise urllib.error.URLError("network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(FileNotFoundError, match="network is unreachable.*\nLooked for"):
        load_graphs("NCI1")


# --- DGL, and real sets


class FakeDGL:
    def __init__(self, n, edges):
        self.num_nodes, self.edges = lambda: n, lambda: np.array(edges).T
        self.ndata = {"node_labels": np.arange(n)[:, None] * 1.0}
        self.edata = {"edge_labels": np.ones(len(edges))}


def test_dgl_objects_are_read_by_their_attributes():
    dataset = [
        (FakeDGL(2, [(0, 1), (1, 0)]), np.array([4])),
        (FakeDGL(3, [(2, 1)]), np.array([-4])),
    ]
    graphs = graphs_from_dgl(dataset)
    assert graphs.labels.tolist() == [1, 0] and graphs.classes.tolist() == [-4, 4]
    assert graphs.senders.tolist() == [0, 1, 4]
    assert graphs.node_labels.ravel().tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(ValueError, match="holds no graph"):
        graphs_from_dgl([])


SETS = {
    "MUTAG": (188, 17.93, 19.79, 2, 7, 0, 4),
    "ENZYMES": (600, 32.63, 62.14, 6, 3, 18, 0),
    "PROTEINS": (1113, 39.06, 72.82, 2, 3, 1, 0),
    "NCI1": (4110, 29.87, 32.30, 2, 37, 0, 0),
    "NCI109": (4127, 29.68, 32.13, 2, 38, 0, 0),
    "Mutagenicity": (4337, 30.32, 30.77, 2, 14, 0, 3),
    "DD": (1178, 284.32, 715.66, 2, 82, 0, 0),
}


@pytest.mark.parametrize("name", SETS)
def test_real_sets_are_as_published(et_data, name):
    raw, graphs = (
        read_tu(et_data / f"graphs/tu/{name}.zip", name),
        load_graphs(name, et_data),
    )
    values = lambda table: sum(len(np.unique(column)) for column in table.T)
    assert SETS[name] == (
        len(graphs),
        round(graphs.num_nodes / len(graphs), 2),
        round(graphs.num_edges / 2 / len(graphs), 2),
        graphs.num_classes,
        values(graphs.node_labels),
        graphs.node_attributes.shape[1],
        values(graphs.edge_labels),
    )
    # neither loops nor missing reverses nor parallel edges
    assert raw.num_edges == graphs.num_edges


# --- positions, features and batches

RINGS = load_graphs("rings")


def adjacency(graphs):
    A, both = np.zeros((graphs.num_nodes,) * 2), graphs.undirected()
    A[both.receivers, both.senders] = 1
    return A


# --- positions


@pytest.mark.parametrize("large", [200, 3])
@pytest.mark.parametrize("seed", range(2))
def test_positions_are_the_smallest_modes_of_each_graph_alone(seed, large, monkeypatch):
    "With 3, nearly everything by Lanczos' method."
    monkeypatch.setattr(sets, "_LARGE", large)
    k = 5 if large == 200 else 2
    graphs = random_set(seed, 12, 12) if large == 200 else random_set(seed, 12, 20, 0.5)
    graphs = graphs if large == 200 else graphs[graphs.sizes > 8]
    P = laplacian_positions(graphs, k)
    for one, (a, b) in zip(graphs, itertools.pairwise(graphs.start)):
        p, A = P[a:b].astype(float), adjacency(one)
        degree = A.sum(1)
        root = np.where(degree > 0, np.maximum(degree, 1) ** -0.5, 0)
        # an isolated node is a part with the eigenvalue 0
        L = np.diag((degree > 0) * 1.0) - root[:, None] * A * root
        values = np.linalg.eigvalsh(L)
        values = values[values > 1e-9][:k]
        m = len(values)
        np.testing.assert_allclose(p.T @ p, np.diag(np.arange(k) < m), atol=1e-5)
        np.testing.assert_allclose(L @ p[:, :m], p[:, :m] * values, atol=1e-5)
        # whatever stands beside it in the set, and in every call
        np.testing.assert_array_equal(laplacian_positions(one, k), P[a:b])
        for v in p[:, :m].T:
            assert v[np.abs(v) > np.abs(v).max() * (1 - 1e-5)][0] > 0


def test_positions_of_parts_and_of_almost_nothing():
    triangle = lambda s: [(s, s + 1), (s + 1, s + 2), (s + 2, s)]
    edges = np.array(triangle(0) + triangle(3)).T
    P = laplacian_positions(GraphSet([0, 7, 8, 10], *edges, [0, 0, 0]), 6)
    assert not P[6:].any() and not P[:, 4:].any()
    on = P[:3].any(0).astype(int) + P[3:6].any(0)
    assert (on == (np.arange(6) < 4)).all(), "a mode lives on one part"
    # of a pair and a path, the path's come first
    P = laplacian_positions(GraphSet([0, 7], [0, 2, 3, 4, 5], [1, 3, 4, 5, 6], [0]), 5)
    assert not P[:2, :3].any() and P[2:, :3].any(0).all() and P[:2, 3:].any()
    loop = GraphSet([0, 4], [0, 1, 2, 1, 1], [1, 2, 3, 1, 2], [0])
    both = laplacian_positions(loop.undirected(), 2)
    np.testing.assert_array_equal(laplacian_positions(loop, 2), both)
    assert laplacian_positions(loop, 0).shape == (4, 0)
    ring = GraphSet([0, 205], np.arange(205), (np.arange(205) + 1) % 205, [0])
    P = laplacian_positions(ring, 210)  # more than there are
    found = P.T.astype(float) @ P
    np.testing.assert_allclose(found, np.diag(np.arange(210) < 204), atol=1e-5)
    few = laplacian_positions(ring, 2)  # by Lanczos' method: the same plane
    np.testing.assert_allclose(few @ few.T, P[:, :2] @ P[:, :2].T, atol=1e-5)


def test_return_probabilities_are_those_of_a_random_walk():
    graphs, k = random_set(0, 12, 9), 7
    P, A = return_probabilities(graphs, k), adjacency(graphs)
    degree = A.sum(1)
    walk = A / np.maximum(degree, 1)[:, None]
    np.testing.assert_allclose(P[:, 0], np.log1p(degree), rtol=1e-6)
    for t in range(2, k + 1):
        back = np.diag(np.linalg.matrix_power(walk, t))
        np.testing.assert_allclose(P[:, t - 1], back, atol=1e-6, err_msg=str(t))
    for few in (0, 1):
        np.testing.assert_array_equal(return_probabilities(graphs, few), P[:, :few])


# --- features


def test_features_are_learned_from_training_graphs_alone():
    graphs, train = random_set(1), np.array([0, 2, 3])
    before = learn_encoding(graphs, train)
    ours = np.isin(np.repeat(np.arange(7), graphs.sizes), train)
    far = np.where(ours[:, None], graphs.node_attributes, 1e6)
    after = learn_encoding(replace(graphs, node_attributes=far), train)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    x, e = before(graphs)
    np.testing.assert_allclose(x[ours, -2:].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x[ours, -2:].std(0), 1, rtol=1e-5)
    assert x.dtype == e.dtype == np.float32 and e.shape == (graphs.num_edges, 3)


def test_labels_not_met_in_training_are_zeros_and_strange_ones_an_error():
    ends, names = ([0, 2], [1, 3]), dict(node_labels=[4, 9, 4, 6], edge_labels=[1, 2])
    graphs = GraphSet([0, 2, 4], *ends, [0, 1], **names)
    encoding = learn_encoding(graphs, [0])
    x, e = encoding(graphs)
    assert x.tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 0, 0]]
    assert e.tolist() == [[1, 0], [0, 0]]
    for change, words in (
        (dict(node_labels=[4, 9, 4, 5]), r"node label 5 was never met.* \[4, 6, 9\]"),
        (dict(edge_labels=[1, 3]), "the edge label 3 was never met"),
        (dict(node_labels=None), "expected 1 node labels and 0 node attributes"),
    ):
        with pytest.raises(ValueError, match=words):
            encoding(replace(graphs, **change))
    flat = replace(graphs, node_attributes=np.full((4, 1), 7.0))
    # a constant is no reason to divide by zero
    assert learn_encoding(flat, [0])(flat)[0][:, 3].tolist() == [0, 0, 0, 0]
    bare = replace(graphs, node_labels=None)  # degrees, for want of anything else
    assert learn_encoding(bare, [0, 1])(bare)[0].shape == (4, 1)


# --- batches


@pytest.mark.parametrize(
    "ends",
    [
        ([0, 1, 1], [1, 0, 1]),
        ([0, 1, 0, 1], [1, 0, 1, 0]),
        ([0, 1, 0], [1, 0, 2]),
        ([0, 0, 1, 1], [1, 1, 0, 2]),
    ],
    ids="loop twice one-way balanced-but-wrong".split(),
)
def test_only_undirected_graphs_are_batched(ends):
    graphs, P = GraphSet([0, 3], *ends, [0]), np.zeros((3, 2), np.float32)
    encoding = learn_encoding(graphs, [0])
    with pytest.raises(ValueError, match=r"^graphs: .* take graphs.undirected\(\)"):
        Supply(graphs, encoding, P, 4)
    Supply(graphs.undirected(), encoding, P, 4)


def graphs_in(batch):
    "Of each graph: its label, and features, positions, A and features of edges."
    n, ends = len(batch.graph), (batch.receivers, batch.senders)
    A, L = np.zeros((n, n)), np.zeros((n, n, batch.edge_features.shape[1]))
    np.add.at(A, ends, 1)
    L[ends] = batch.edge_features
    for i, label in enumerate(batch.labels):
        here = batch.present & (batch.graph == i)
        pairs, rows = np.ix_(here, here), (batch.features, batch.positions)
        yield label, *(x[here] for x in rows), *(x[pairs] for x in (A, L))


@pytest.mark.parametrize("seed, B", [(0, 9), (1, 2), (2, 1)])
def test_a_batch_holds_what_the_set_does_and_an_epoch_every_graph_once(seed, B):
    graphs = random_set(seed, 11).undirected()
    encoding, P = learn_encoding(graphs, np.arange(5)), laplacian_positions(graphs, 3)
    x, e = encoding(graphs)
    supply = Supply(graphs, encoding, P, B)
    ids, seen = np.array([0, 3, 4, 8, 9, 10]), []
    for part in supply.plan(ids, seed=1, epoch=2):
        batch, edges = jax.tree.map(np.asarray, supply.load(part)), 0
        assert len(part) == len(batch.labels) <= B
        padding = batch.features[~batch.present], batch.positions[~batch.present]
        assert not any(map(np.any, padding))
        for g, (label, *found) in zip(part, graphs_in(batch)):
            if g < 0:
                assert label == -1 and not len(found[0])
                continue
            seen.append(g)
            nodes, one = slice(*graphs.start[[g, g + 1]]), graphs[g]
            ends, n = (one.receivers, one.senders), one.num_nodes
            A, L = np.zeros((n, n)), np.zeros((n, n, e.shape[1]))
            A[ends], L[ends] = 1, e[slice(*graphs.edge_start[[g, g + 1]])]
            edges += one.num_edges
            assert label == graphs.labels[g]
            for got, want in zip(found, (x[nodes], P[nodes], A, L)):
                np.testing.assert_allclose(got, want, rtol=1e-6)
        assert all((np.diff(a) >= 0).all() for a in (batch.receivers, batch.graph))
        last, loose = len(batch.graph) - 1, np.arange(len(batch.senders)) >= edges
        assert not batch.present[last] and not batch.edge_features[loose].any()
        assert (batch.senders[loose] == last).all()
        assert (batch.receivers[loose] == last).all()
    assert sorted(seen) == ids.tolist()


def test_plans_are_random_and_repeatable_and_even():
    how = learn_encoding(RINGS, [0]), np.zeros((RINGS.num_nodes, 0), np.float32)
    supply = Supply(RINGS, *how, 32)
    ids = np.random.default_rng(0).permutation(240)[:200]
    plan = lambda *a: [part.tolist() for part in supply.plan(ids, *a)]
    assert plan(0, 1) == plan(0, 1) and plan() == plan()
    assert plan(0, 1) != plan(0, 2) and plan(0, 1) != plan(1, 1)
    for parts in (plan(), plan(0, 1)):
        assert sorted(g for part in parts for g in part if g >= 0) == sorted(ids)
    real = [[g for g in part if g >= 0] for part in plan(0, 1)]
    nodes = [RINGS.sizes[part].sum() for part in real]
    assert np.ptp([*map(len, real)]) <= 1 and np.ptp(nodes) <= 2 * RINGS.sizes.max()
    assert len(supply.plan(np.array([], int))) == 0 == len(supply.plan([], 0))
    per = len(plan(0, 0))  # a stream may begin anywhere
    later, parts = supply.stream(ids, 0, per + 1), supply.plan(ids, 0, 1)[1:]
    parts += supply.plan(ids, 0, 2)[:2]
    for part, batch in zip(parts, later):
        jax.tree.map(np.testing.assert_array_equal, batch, supply.load(part))
    few = RINGS[:24]
    how = learn_encoding(few, [0]), np.zeros((few.num_nodes, 0), np.float32)
    found = Supply(few, *how, 3).plan(np.arange(24), 5, 1)
    # as in version 0.2: training resumes in the same order
    frozen = [[17, 0, 8], [11, 15, 22], [12, 13, 18]]
    assert [part.tolist() for part in found[:3]] == frozen


def test_flipped_signs_are_one_for_each_graph_and_column():
    some, P = RINGS[:40], laplacian_positions(RINGS[:40], 4)
    batch = Supply(some, learn_encoding(some, [0]), P, 40).load(np.arange(40))
    flipped = flip_signs(batch, jax.random.key(3))
    same = zip(batch._fields, batch, flipped)
    assert all(a is b for key, a, b in same if key != "positions")
    before, after = (np.asarray(b.positions, float) for b in (batch, flipped))
    np.testing.assert_array_equal(np.abs(before), np.abs(after))
    products = [(before * after)[np.asarray(batch.graph) == i] for i in range(40)]
    signs = np.array([np.sign(row.sum(0)) for row in products])
    assert all((row * sign >= 0).all() for row, sign in zip(products, signs))
    assert set(np.unique(signs)) == {-1, 1} and 0.3 < (signs == 1).mean() < 0.7
