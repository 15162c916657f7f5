"Sets of graphs, and their readers: nbs/engine/sets.ipynb."

import urllib.request
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

import et_nbdev.graph.sets as sets
from et_nbdev.graph.sets import GraphSet, graphs_from_dgl, load_graphs, read_tu

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


def test_rings_can_be_told_apart_by_rings_only():
    rings = load_graphs("rings")
    assert rings.digest == "da89af6a27719c3b"  # frozen: models and figures rest on it
    assert np.bincount(rings.labels).tolist() == [120, 120]
    for one in rings[::7]:
        A = np.zeros((one.num_nodes,) * 2)
        A[one.receivers, one.senders] = 1
        assert one.num_edges == 2 * (one.num_nodes + 1)
        # two triangles, six closed walks each
        assert np.trace(A @ A @ A) == (12 if one.labels[0] else 0)


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
