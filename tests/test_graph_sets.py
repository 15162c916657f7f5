"""Sets of graphs: the promises of nbs/81_set_readers.ipynb, on text sound and broken,
on random sets and, where there are any, on real data.
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
    _bucket_sizes,
    _cached_positions,
    _edge_batch,
    _EdgeLists,
    _flip_signs,
    _laplacian_positions,
    _learn_encoding,
    _make_buckets,
    _read_tu,
    _return_probabilities,
    _take,
    graphs_from_dgl,
    load_graphs,
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

FIELDS = (
    "start senders receivers labels classes node_labels node_attributes edge_labels"
    " edge_attributes".split()
)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    "No data but the test's own, and no network."
    monkeypatch.delenv("ET_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sets, "_TU_URL", (tmp_path / "server").as_uri() + "/{name}.zip")


def write(folder, name="SET", inside="SET//", **changes):
    path = folder / f"{name}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as z:
        for part, text in (TEXT | changes).items():
            if text is not None:
                z.writestr(f"{inside}{name}_{part}.txt", text)
    return path


def assert_same(a, b, values=True):
    """Equal sets; without `values`, up to the numbers that stand for labels, and up to
    the order of edges.
    """
    code = lambda t: (
        np.stack([np.unique(c, return_inverse=True)[1] for c in t.T], 1)
        if t.shape[1] and not values
        else t
    )
    for graphs, (s, r) in ((g, (g.senders, g.receivers)) for g in (a, b)):
        assert graphs.num_edges == len(s) == len(r)
    orders = [
        np.lexsort((g.senders, g.receivers)) if not values else slice(None)
        for g in (a, b)
    ]
    for key in FIELDS:
        if key == "classes" and not values:
            continue
        x, y = getattr(a, key), getattr(b, key)
        if "label" in key and key != "labels":
            x, y = code(x), code(y)
        if key in ("senders", "receivers") or key.startswith("edge"):
            x, y = x[orders[0]], y[orders[1]]
        assert x.dtype == y.dtype and np.array_equal(x, y), key


def random_set(seed, G=7, most=9, p=0.35):
    "Graphs of 1 to `most` nodes, some without edges, labels and attributes everywhere."
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, G)
    start, edges = np.concatenate([[0], np.cumsum(sizes)]), []
    for s, n in zip(start, sizes):
        A = np.triu(rng.random((n, n)) < p, 1)
        edges += [(s + i, s + j) for i, j in np.argwhere(A | A.T)]
    ends = np.array(edges, int).reshape(-1, 2).T
    return GraphSet(
        start,
        *ends,
        rng.integers(0, 3, G),
        np.arange(3),
        node_labels=rng.integers(0, 4, (start[-1], 1)) * 5 - 1,
        node_attributes=rng.normal(size=(start[-1], 2)),
        edge_labels=rng.integers(0, 2, ends.shape[1]),
        edge_attributes=rng.normal(size=(ends.shape[1], 1)),
        name="random",
    )


# ------------------------------------------------------------------------------------
# the container


@pytest.mark.parametrize(
    "bad, match",
    [
        (dict(start=[0, 2, 2]), "^start: must ascend from 0 by at least one node"),
        (dict(start=[1, 2, 3]), "^start: must ascend from 0"),
        (dict(start=[0.0, 2, 3]), "^start: .*float64"),
        (dict(labels=[0]), "^labels: must hold one integer for each of the 2 graphs"),
        (dict(labels=["a", "b"]), "^labels: .*, got <U1 .*; np.unique"),
        (dict(classes=["a", "b"]), "^classes: must hold integers, got <U1"),
        (
            dict(labels=[0, 2], classes=[5, 6]),
            "^labels: must be classes from 0 to 1 or -1, got 0 to 2",
        ),
        (dict(labels=[0, -2]), "^labels: must be classes"),
        (dict(senders=[0, 4]), "^senders: node ids must lie from 0 to 2.*got 4"),
        (
            dict(senders=[0, 2]),
            "^senders and receivers: edge 1 leads from graph 1 to graph 0",
        ),
        (dict(senders=[0]), "an edge has a sender and a receiver"),
        (
            dict(node_labels=[1, 2]),
            "^node_labels: must hold integers, one row for each of 3",
        ),
        (dict(node_labels=[1.0, 2, 3]), "^node_labels: must hold integers"),
        (
            dict(edge_attributes=[[1.0], [np.inf]]),
            "^edge_attributes: must be finite, got inf in row 1",
        ),
    ],
)
def test_set_refuses_by_name(bad, match):
    with pytest.raises(ValueError, match=match):
        GraphSet(
            **{
                "start": [0, 2, 3],
                "senders": [0, 1],
                "receivers": [1, 0],
                "labels": [0, 1],
            }
            | bad
        )


@given(st.integers(0, 2**31), st.data())
@examples(25)
def test_a_subset_holds_the_graphs_it_names(seed, data):
    graphs = random_set(seed)
    ids = data.draw(st.lists(st.integers(0, 6), max_size=10))
    part = graphs[ids]
    assert len(part) == len(ids) and part.num_classes == 3
    for j, i in enumerate(ids):
        assert_same(part[[j]], graphs[[i]])
        one = graphs.graph(i)
        assert (
            one.num_nodes == graphs.sizes[i]
            and one.num_edges
            == (
                (graphs.senders >= graphs.start[i])
                & (graphs.senders < graphs.start[i + 1])
            ).sum()
        )
    assert_same(graphs[np.arange(7)], graphs)
    assert_same(graphs[2:5], graphs[np.isin(np.arange(7), (2, 3, 4))])


def test_undirected_merges_mirrors_and_moves_what_is_known():
    g = GraphSet(
        [0, 3, 5], [0, 0, 1, 4, 4], [1, 1, 1, 3, 4], [0, 1], edge_labels=[5, 6, 7, 8, 9]
    ).undirected()
    assert list(zip(g.senders, g.receivers, g.edge_labels[:, 0])) == [
        (1, 0, 5),
        (0, 1, 5),
        (4, 3, 8),
        (3, 4, 8),
    ]
    assert_same(g.undirected(), g)
    assert GraphSet([0, 1], [], [], [0]).undirected().num_edges == 0
    # each direction keeps its own
    two_ways = GraphSet([0, 2], [0, 1], [1, 0], [0], edge_labels=[1, 2]).undirected()
    assert two_ways.edge_labels[:, 0].tolist() == [2, 1]


def test_rings_can_be_told_apart_by_rings_only():
    rings = load_graphs("rings")
    assert_same(rings, load_graphs("rings"))
    degrees = np.bincount(rings.receivers, minlength=rings.num_nodes)
    for i in range(0, 240, 7):
        one = rings[[i]]
        A = np.zeros((one.num_nodes,) * 2)
        A[one.receivers, one.senders] = 1
        assert one.num_edges == 2 * (one.num_nodes + 1)
        # two triangles, six closed walks each
        assert np.trace(A @ A @ A) == (12 if one.labels[0] else 0)
    sums = [sorted(degrees[rings.start[i] : rings.start[i + 1]]) for i in range(240)]
    assert np.bincount(rings.labels).tolist() == [120, 120] and len(sums) == 240


# ------------------------------------------------------------------------------------
# text


def test_text_is_read_from_zips_and_folders_at_any_depth(tmp_path):
    graphs = _read_tu(write(tmp_path))
    assert (
        graphs.sizes.tolist() == [2, 3, 1]
        and graphs.labels.tolist() == [0, 1, 1]
        and graphs.classes.tolist() == [-1, 7]
        and graphs.name == "SET"
    )
    assert graphs.node_labels[:, 0].tolist() == [
        0,
        3,
        3,
        0,
        0,
        3,
    ] and graphs.node_attributes[2].tolist() == [-300, 4]
    assert graphs.senders.tolist() == [0, 1, 2, 3] and graphs.edge_attributes[
        :, 0
    ].tolist() == [0.5, 0.5, 0.25, 0.25]
    for inside in ("", "SET/", "a/b/SET/"):
        assert_same(_read_tu(write(tmp_path, inside=inside)), graphs)
        with zipfile.ZipFile(tmp_path / "SET.zip") as z:
            z.extractall(tmp_path / f"folder{len(inside)}")
        assert_same(_read_tu(tmp_path / f"folder{len(inside)}"), graphs)


def test_text_variants_mean_the_same(tmp_path):
    graphs = _read_tu(write(tmp_path))
    assert_same(
        _read_tu(
            write(tmp_path, **{k: t.replace("\n", "\r\n") for k, t in TEXT.items()})
        ),
        graphs,
    )
    assert_same(
        _read_tu(write(tmp_path, node_labels="0.0\n3.0\n3.0\n0\n0\n3\n\n\n")), graphs
    )
    mixed = _read_tu(
        write(
            tmp_path,
            graph_indicator="1\n2\n1\n2\n2\n3\n",
            A="1, 3\n3, 1\n2, 4\n4, 2\n",
            node_labels="0\n3\n3\n0\n0\n3\n",
            node_attributes=None,
        )
    )
    assert (
        mixed.sizes.tolist() == [2, 3, 1]
        and mixed.node_labels[:, 0].tolist() == [0, 3, 3, 0, 0, 3]
        and mixed.senders.tolist() == [0, 1, 2, 3]
    )
    bare = _read_tu(
        write(tmp_path, **{k: None for k in TEXT if "node" in k or "edge" in k})
    )
    assert bare.node_labels.shape == (6, 0) and bare.edge_attributes.shape == (4, 0)
    empty = _read_tu(write(tmp_path, A="", edge_labels="", edge_attributes=None))
    assert empty.num_edges == 0 and empty.sizes.tolist() == [2, 3, 1]
    # degrees, for want of anything else
    assert _learn_encoding(bare, [0])(bare)[0].shape == (6, 1)
    pairs = _read_tu(
        write(tmp_path, node_labels="0, 1\n3, 1\n3, 2\n0, 1\n0, 1\n3, 1\n")
    )
    assert pairs.node_labels.shape == (6, 2)


@pytest.mark.parametrize(
    "change, match",
    [
        (dict(A=None), "must hold one set, with one file NAME_A.txt"),
        (dict(graph_indicator=None), "lacks SET_graph_indicator.txt"),
        (dict(graph_labels=None), "lacks SET_graph_labels.txt$"),
        (
            dict(graph_labels=None, graph_attributes="1\n2\n3\n"),
            "targets that are no classes",
        ),
        (
            dict(A="1, 2\n2, 9\n3, 4\n4, 3\n"),
            (
                "SET_A.txt, line 2: nodes must lie from 1 to 6, as many as"
                " graph_indicator has lines, got 9"
            ),
        ),
        (dict(A="1, 2\n2, 1\n0, 4\n4, 3\n"), "SET_A.txt, line 3: nodes .*, got 0"),
        (
            dict(A="1, 2\n2, 3\n3, 4\n4, 3\n"),
            r"SET_A.txt, line 2: the edge \[2, 3\] leads from graph 1 to graph 2",
        ),
        (
            dict(A="1, 2\n2; 1\n3, 4\n4, 3\n"),
            "SET_A.txt, line 2: expected integers separated by commas, got '2; 1'",
        ),
        (
            dict(A="1, 2\n2\n3, 4\n4, 3\n"),
            "SET_A.txt, line 2: expected 2 numbers as in line 1, got 1",
        ),
        (dict(A="1\n2\n3\n4\n"), "SET_A.txt, line 1: expected 2 numbers, got 1"),
        (dict(A="1, 2\n2, 1.5\n3, 4\n4, 3\n"), "SET_A.txt, line 2: expected integers"),
        (
            dict(A="1, 2\n2, 99999999999999999999\n3, 4\n4, 3\n"),
            "SET_A.txt, line 2: expected integers",
        ),
        (
            dict(A="1, 2\n2, 1\n3, 4\n4, 0_3\n"),
            "SET_A.txt, line 4: expected integers separated by commas, got '4, 0_3'",
        ),
        (
            dict(graph_labels="1\n٢\n1\n"),
            "SET_graph_labels.txt, line 2: expected integers",
        ),
        (dict(A="\x00\xff garbage"), "SET_A.txt, line 1: expected integers"),
        (
            dict(node_labels="0\n3\n"),
            "SET_node_labels.txt has 2 lines, but there are 6 nodes",
        ),
        (
            dict(node_labels="0\n3\n\n3\n0\n0\n3\n"),
            "SET_node_labels.txt, line 3: expected integers",
        ),
        (dict(node_labels="0\n3\n3\n0\n0\n3\n3\n"), "SET_node_labels.txt has 7 lines"),
        (
            dict(node_attributes="1\n2\nnan\n4\n5\n6\n"),
            "SET_node_attributes.txt, line 3: expected finite numbers",
        ),
        (
            dict(node_attributes="1\n2\n3\n4\n1e999\n6\n"),
            "SET_node_attributes.txt, line 5: expected finite numbers",
        ),
        (
            dict(edge_labels="1\n1\n0\n"),
            "SET_edge_labels.txt has 3 lines, but there are 4 edges",
        ),
        (
            dict(graph_labels="1\n2\n"),
            (
                "SET_graph_indicator.txt, line 6: graphs must lie from 1 to 2, as many"
                " as graph_labels has lines, got 3"
            ),
        ),
        (
            dict(graph_labels="1\n2\n1\n2\n"),
            (
                "SET_graph_labels.txt, line 4: no node belongs to this graph; the"
                " indicator lists 3 of 4"
            ),
        ),
        (
            dict(graph_labels="a\nb\nc\n"),
            "SET_graph_labels.txt, line 1: expected integers",
        ),
        (
            dict(graph_labels="1, 2\n1, 2\n1, 2\n"),
            "SET_graph_labels.txt, line 1: expected 1 number, got 2",
        ),
        (dict(graph_indicator=""), "SET_graph_indicator.txt is empty"),
        (
            dict(graph_indicator="1\n1\n-2\n2\n2\n3\n"),
            "SET_graph_indicator.txt, line 3: graphs .*got -2",
        ),
    ],
)
def test_malformed_text_is_named_with_its_line(tmp_path, change, match):
    with pytest.raises(ValueError, match=match) as e:
        _read_tu(write(tmp_path, **change))
    assert str(tmp_path) in str(e.value)


def test_damaged_zips_and_missing_files(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    for data in (
        whole[:-30],
        b"",
        b"<html>not found</html>",
        whole[:60] + bytes([whole[60] ^ 255]) + whole[61:],
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="SET.zip is damaged, incomplete"):
            _read_tu(path)
    with pytest.raises(FileNotFoundError):
        _read_tu(tmp_path / "none.zip")
    with zipfile.ZipFile(path, "w") as z:
        for name in "XY":
            for part, text in TEXT.items():
                z.writestr(f"{name}_{part}.txt", text)
    with pytest.raises(ValueError, match=r"\['X', 'Y'\]; say which by name"):
        _read_tu(path)
    assert _read_tu(path, "Y").name == "Y"
    with pytest.raises(
        ValueError, match="holds no Z_A.txt and so no set 'Z'; sets there: X, Y$"
    ):
        _read_tu(path, "Z")
    with zipfile.ZipFile(path, "a") as z:
        z.writestr("._Y_A.txt", b"\x00")  # macOS leaves these
        z.writestr("a/README.txt", "of no interest")
        z.writestr("b/README.txt", "of no interest")
    assert_same(_read_tu(path, "Y"), _read_tu(path, "X"))
    with zipfile.ZipFile(path, "a") as z:
        z.writestr("old/Y_A.txt", "1, 2\n")
    with zipfile.ZipFile(path) as z:
        z.extractall(tmp_path / "twice")
    for place in (path, tmp_path / "twice"):
        with pytest.raises(
            ValueError,
            match=(
                "holds Y_A.txt twice, as (Y_A.txt and old/Y_A.txt|old/Y_A.txt and"
                " Y_A.txt)"
            ),
        ):
            _read_tu(place, "Y")


def test_sets_are_found_or_downloaded_whole_or_not_at_all(tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError,
        match=(
            r"(?s)'SET' was not found, and could not be downloaded from .*\n  -"
            r" .*SET.zip"
        ),
    ):
        load_graphs("SET")
    write(tmp_path / "server", node_labels="0\n")
    with pytest.raises(FileNotFoundError, match="has 1 lines, but there are 6 nodes"):
        load_graphs("SET")
    assert list((tmp_path / "cache").rglob("*.*")) == [], (
        "nothing of a broken download may stay"
    )
    write(tmp_path / "server")
    downloaded = load_graphs("SET")
    (tmp_path / "server/SET.zip").unlink()
    assert_same(load_graphs("SET"), downloaded)
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [
        "SET.zip"
    ]
    write(tmp_path / "data/graphs/tu", graph_labels="1\n1\n1\n")
    monkeypatch.setenv("ET_DATA", str(tmp_path / "data"))
    assert load_graphs("SET").num_classes == 1  # ET_DATA goes first
    write(tmp_path / "mine", graph_labels="1\n2\n3\n")
    assert load_graphs("SET", tmp_path / "mine").num_classes == 3  # and root before it
    with pytest.raises(ValueError, match="^root: .* is not a folder"):
        load_graphs("SET", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="^name: must be"):
        load_graphs("../SET")
    with pytest.raises(ValueError, match="^via: must be"):
        load_graphs("SET", via="pickle")
    write(tmp_path / "mine", "MUTAG", "MUTAG/")
    with pytest.raises(
        ValueError,
        match=(
            "3 graphs, 6 nodes and 4 edges, but MUTAG as published has 188, 3371 and"
            " 7442"
        ),
    ):
        load_graphs("MUTAG", tmp_path / "mine")


def test_no_network_is_said_so(monkeypatch):
    def refuse(*a, **k):
        raise urllib.error.URLError("network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(FileNotFoundError, match="network is unreachable.*\nLooked for"):
        load_graphs("NCI1")


def test_dgl_gives_the_same_small_set(tmp_path, monkeypatch):
    pytest.importorskip(
        "dgl", reason="DGL is not installed: make test DGL=1, Python 3.11"
    )
    # DGL counts nodes from the first to the last one that has an edge, so those have
    # one here
    write(
        tmp_path,
        edge_attributes=None,
        A="1, 2\n2, 1\n4, 6\n6, 4\n",
        graph_indicator="1\n1\n2\n2\n2\n2\n",
        graph_labels="-1\n7\n",
    )
    ours, theirs = load_graphs("SET", tmp_path), load_graphs("SET", tmp_path, via="dgl")
    assert_same(ours, theirs, values=False)
    write(tmp_path, A="1, 2\n2, 1\n4, 6\n6; 4\n")
    with pytest.raises(ValueError, match="could not be read by DGL"):
        sets._by_dgl(tmp_path / "SET.zip", "SET")


def test_dgl_objects_are_read_by_their_attributes():
    class Fake:
        def __init__(self, n, edges):
            self.n, self.ends, self.ndata, self.edata = (
                n,
                np.array(edges).T.reshape(2, -1),
                {"node_labels": np.arange(n)[:, None] * 1.0},
                {"edge_labels": np.ones(len(edges))},
            )

        def num_nodes(self):
            return self.n

        def edges(self):
            return tuple(self.ends)

    graphs = graphs_from_dgl(
        [
            (Fake(2, [(0, 1), (1, 0)]), np.array([4])),
            (Fake(3, [(2, 1)]), np.array([-4])),
        ]
    )
    assert (
        graphs.labels.tolist() == [1, 0]
        and graphs.classes.tolist() == [-4, 4]
        and graphs.senders.tolist() == [0, 1, 4]
        and graphs.node_labels.ravel().tolist() == [0, 1, 0, 1, 2]
    )
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
        _read_tu(et_data / f"graphs/tu/{name}.zip"),
        load_graphs(name, et_data),
    )
    G, nodes, edges, classes, labels, attributes, edge_labels = SETS[name]
    assert (
        len(graphs),
        round(graphs.num_nodes / G, 2),
        round(graphs.num_edges / 2 / G, 2),
        graphs.num_classes,
    ) == (G, nodes, edges, classes)
    found, edge_features = _learn_encoding(graphs, np.arange(G))(graphs)
    assert (
        found.shape[1] == labels + attributes and edge_features.shape[1] == edge_labels
    )
    # neither loops nor missing reverses nor parallel edges
    assert raw.num_edges == graphs.num_edges


@pytest.mark.parametrize("name", SETS)
def test_dgl_gives_the_same_real_sets(et_data, name):
    pytest.importorskip(
        "dgl", reason="DGL is not installed: make test DGL=1, Python 3.11"
    )
    assert_same(
        load_graphs(name, et_data), load_graphs(name, et_data, via="dgl"), values=False
    )


# ------------------------------------------------------------------------------------
# positions


def laplacian(one):
    A = np.zeros((one.num_nodes,) * 2)
    A[one.receivers, one.senders] = 1
    degree = A.sum(1)
    root = np.where(degree > 0, np.maximum(degree, 1) ** -0.5, 0)
    # an isolated node is a part with the eigenvalue 0
    return np.diag((degree > 0) * 1.0) - root[:, None] * A * root


@pytest.mark.parametrize("large", [200, 3])
@pytest.mark.parametrize("seed", range(4))
def test_positions_are_the_smallest_modes_of_each_graph_alone(seed, large, monkeypatch):
    monkeypatch.setattr(
        sets, "_LARGE", large
    )  # 3: nearly everything by Lanczos' method
    k, graphs = (
        (5, random_set(seed, 12, 12))
        if large == 200
        else (2, random_set(seed, 12, 20, 0.5))
    )
    if large == 3:
        graphs = graphs[graphs.sizes > 8]
    P = _laplacian_positions(graphs, k)
    assert P.dtype == np.float32
    for i in range(len(graphs)):
        one, p = graphs[[i]], P[graphs.start[i] : graphs.start[i + 1]].astype(float)
        L = laplacian(one)
        values = np.linalg.eigvalsh(L)
        wanted = values[values > 1e-9][:k]
        m = len(wanted)
        np.testing.assert_allclose(p.T @ p, np.diag(np.arange(k) < m), atol=1e-5)
        np.testing.assert_allclose(L @ p[:, :m], p[:, :m] * wanted, atol=1e-5)
        # whatever stands beside it in the set
        np.testing.assert_array_equal(
            _laplacian_positions(one, k), p.astype(np.float32)
        )
        for v in p[:, :m].T:
            assert v[np.abs(v) > np.abs(v).max() * (1 - 1e-5)][0] > 0
    np.testing.assert_array_equal(_laplacian_positions(graphs, k), P)


@pytest.mark.parametrize("seed", range(3))
def test_return_probabilities_are_those_of_a_random_walk(seed):
    graphs, k = random_set(seed, 12, 9), 7
    P = _return_probabilities(graphs, k)
    assert P.dtype == np.float32 and P.shape == (graphs.num_nodes, k)
    both = graphs.undirected()
    A = np.zeros((graphs.num_nodes,) * 2)
    A[both.receivers, both.senders] = 1
    degree = A.sum(1)
    walk = A / np.maximum(degree, 1)[:, None]
    np.testing.assert_allclose(P[:, 0], np.log1p(degree), rtol=1e-6)
    for t in range(2, k + 1):
        back = np.diag(np.linalg.matrix_power(walk, t))
        np.testing.assert_allclose(P[:, t - 1], back, atol=1e-6, err_msg=str(t))
    # in any order of the nodes of a graph
    order = np.random.default_rng(seed).permutation(graphs.sizes[0])
    place = np.arange(graphs.num_nodes)
    place[: len(order)] = order
    moved = replace(
        graphs, senders=place[graphs.senders], receivers=place[graphs.receivers]
    )
    np.testing.assert_allclose(_return_probabilities(moved, k)[place], P, atol=1e-6)
    for few in (0, 1):
        np.testing.assert_array_equal(_return_probabilities(graphs, few), P[:, :few])
    with pytest.raises(ValueError, match="k: expected"):
        _return_probabilities(graphs, -1)


def test_positions_of_parts_and_of_almost_nothing():
    triangle = lambda s: [(s, s + 1), (s + 1, s + 2), (s + 2, s)]
    edges = np.array(triangle(0) + triangle(3)).T
    P = _laplacian_positions(GraphSet([0, 7, 8, 10], *edges, [0, 0, 0]), 6)
    assert not P[6:].any() and not P[:, 4:].any() and P[:6, :4].any(0).all()
    assert ((P[:3].any(0)).astype(int) + P[3:6].any(0) == (np.arange(6) < 4)).all(), (
        "a mode lives on one part"
    )
    loop = GraphSet([0, 4], [0, 1, 2, 1, 1], [1, 2, 3, 1, 2], [0])
    np.testing.assert_array_equal(
        _laplacian_positions(loop, 2), _laplacian_positions(loop.undirected(), 2)
    )
    assert _laplacian_positions(loop, 0).shape == (4, 0)
    with pytest.raises(ValueError, match="k: expected"):
        _laplacian_positions(loop, -1)


def test_all_modes_of_a_large_part_can_be_asked_for():
    ring, tail = GraphSet([0, 205], np.arange(205), (np.arange(205) + 1) % 205, [0]), 2
    for k in (204, 210):  # as many as there are, and more
        P = _laplacian_positions(ring, k)
        np.testing.assert_allclose(
            P.T.astype(float) @ P, np.diag(np.arange(k) < 204), atol=1e-5
        )
    few = _laplacian_positions(ring, tail)  # by Lanczos' method: the same plane
    np.testing.assert_allclose(few @ few.T, P[:, :tail] @ P[:, :tail].T, atol=1e-5)


def test_positions_are_kept_and_damage_is_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    graphs = random_set(3)
    want = _laplacian_positions(graphs, 3)
    again = lambda g=graphs, k=3: _cached_positions(g, k, least=1)

    def boom(*a):
        raise AssertionError("computed again")

    np.testing.assert_array_equal(again(), want)
    (kept,) = tmp_path.rglob("*.npz")
    with monkeypatch.context() as m:
        m.setattr(sets, "_laplacian_positions", boom)
        np.testing.assert_array_equal(again(), want)
        m.setattr(sets, "_return_probabilities", boom)
        # another k, another kind, other edges, a small set
        for other in (
            lambda: again(k=2),
            lambda: _cached_positions(graphs, 3, "returns", least=1),
            lambda: again(graphs.undirected()),
            lambda: _cached_positions(graphs, 3),
        ):
            with pytest.raises(AssertionError, match="computed again"):
                other()
        m.setattr(sets, "_POSITIONS_VERSION", -1)  # and another version of the method
        with pytest.raises(AssertionError, match="computed again"):
            again()
    # the same senders, other receivers
    turned = replace(GraphSet([0, 4], [0, 1], [1, 2], [0]), receivers=[1, 3])
    for g in (replace(turned, receivers=[1, 2]), turned):
        np.testing.assert_array_equal(again(g), _laplacian_positions(g, 3))
    for other in set(tmp_path.rglob("*.npz")) - {kept}:
        other.unlink()
    for damage in (
        lambda: kept.write_bytes(kept.read_bytes()[:-30]),
        lambda: np.savez(kept, positions=want[1:]),
        lambda: np.savez(kept, other=want),
    ):
        damage()
        np.testing.assert_array_equal(again(), want)
        with monkeypatch.context() as m:
            m.setattr(sets, "_laplacian_positions", boom)
            np.testing.assert_array_equal(again(), want)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="positions are not kept in"):
        np.testing.assert_array_equal(again(), want)


def test_a_new_order_of_nodes_moves_positions_with_them():
    rng = np.random.default_rng(0)
    graphs = random_set(5, 1, 1)
    A = np.triu(rng.random((9, 9)) < 0.4, 1)
    ends = np.argwhere(A | A.T).T
    order = rng.permutation(9)
    a, b = (
        _laplacian_positions(GraphSet([0, 9], *e, [0]), 4)
        for e in (ends, np.argsort(order)[ends])
    )
    np.testing.assert_allclose(np.abs(b), np.abs(a[order]), atol=1e-5)
    assert graphs.num_edges == 0 and not _laplacian_positions(graphs, 3).any()


# ------------------------------------------------------------------------------------
# features


def test_features_are_learned_from_training_graphs_alone():
    graphs = random_set(1)
    train = np.array([0, 2, 3])
    before = _learn_encoding(graphs, train)
    poisoned = np.ones(graphs.num_nodes, bool)
    for i in train:
        poisoned[graphs.start[i] : graphs.start[i + 1]] = False
    others = replace(
        graphs, node_attributes=np.where(poisoned[:, None], 1e6, graphs.node_attributes)
    )
    after = _learn_encoding(others, train)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    x, e = before(graphs)
    rows = np.concatenate(
        [np.arange(graphs.start[i], graphs.start[i + 1]) for i in train]
    )
    np.testing.assert_allclose(x[rows, -2:].mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(x[rows, -2:].std(0), 1, rtol=1e-5)
    assert x.dtype == e.dtype == np.float32 and e.shape == (graphs.num_edges, 3)


def test_labels_not_met_in_training_are_zeros_and_strange_ones_an_error():
    graphs = GraphSet(
        [0, 2, 4], [0, 2], [1, 3], [0, 1], node_labels=[4, 9, 4, 6], edge_labels=[1, 2]
    )
    encoding = _learn_encoding(graphs, [0])
    x, e = encoding(graphs)
    assert x.tolist() == [
        [1, 0, 0],
        [0, 0, 1],
        [1, 0, 0],
        [0, 0, 0],
    ] and e.tolist() == [[1, 0], [0, 0]]
    with pytest.raises(
        ValueError, match=r"the node label 5 was never met; those met are \[4, 6, 9\]"
    ):
        encoding(replace(graphs, node_labels=[4, 9, 4, 5]))
    with pytest.raises(ValueError, match="the edge label 3 was never met"):
        encoding(replace(graphs, edge_labels=[1, 3]))
    with pytest.raises(
        ValueError, match="expected 1 node labels and 0 node attributes"
    ):
        encoding(replace(graphs, node_labels=None))
    flat = replace(graphs, node_attributes=np.full((4, 1), 7.0))
    # a constant is no reason to divide by zero
    assert _learn_encoding(flat, [0])(flat)[0][:, 3].tolist() == [0, 0, 0, 0]


# ------------------------------------------------------------------------------------
# batches


@pytest.mark.parametrize(
    "ends, wrong",
    [
        (([0, 1, 1, 2], [1, 0, 2, 1]), False),
        (([0, 1, 1], [1, 0, 1]), True),
        (([0, 1, 0, 1], [1, 0, 1, 0]), True),
        (([0, 1, 0], [1, 0, 2]), True),
        (([0, 0, 1, 1], [1, 1, 0, 2]), True),
        (([], []), False),
    ],
    ids="fine loop twice one-way balanced-but-wrong empty".split(),
)
def test_only_edges_that_tables_and_lists_agree_on_are_batched(ends, wrong):
    graphs = GraphSet([0, 3], *ends, [0])
    encoding, P = _learn_encoding(graphs, [0]), np.zeros((3, 2), np.float32)
    for make in (
        lambda g: _make_buckets(g, encoding, positions=P, num_buckets=1),
        lambda g: _edge_batch(g, encoding, P, [0]),
        lambda g: _EdgeLists(g, encoding, P),
    ):
        if wrong:
            with pytest.raises(
                ValueError,
                match=(
                    r"^graphs: every edge must be there once in each direction.* take"
                    r" graphs.undirected\(\)"
                ),
            ):
                make(graphs)
        make(graphs.undirected())
        for p in (P[:2], np.zeros((4, 2), np.float32), P[0]):
            with pytest.raises(
                ValueError,
                match="^positions: expected one row for each of the 3 nodes, got shape",
            ):
                _edge_batch(graphs.undirected(), encoding, p, [0])
            with pytest.raises(ValueError, match="^positions: expected one row"):
                _make_buckets(graphs.undirected(), encoding, positions=p)
            with pytest.raises(ValueError, match="^positions: expected one row"):
                _EdgeLists(graphs.undirected(), encoding, p)
    with pytest.raises(ValueError, match="^batch_size: expected"):
        _EdgeLists(graphs.undirected(), encoding, P, 0)
    with pytest.raises(
        ValueError, match="^train: ids of graphs must lie from 0 to 0, got 7"
    ):
        _learn_encoding(graphs, [7])
    with pytest.raises(ValueError, match="^ids: must hold ids of graphs"):
        graphs[[0.5]]


@pytest.mark.parametrize("layout", ["dense", "edges"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_no_batch_is_made_of_numbers_that_are_not_finite(layout, bad):
    graphs = random_set(3).undirected()
    encoding, P = _learn_encoding(graphs, [0]), _laplacian_positions(graphs, 2)
    make = (
        (lambda e, p: _make_buckets(graphs, e, positions=p))
        if layout == "dense"
        else (lambda e, p: _edge_batch(graphs, e, p, np.arange(len(graphs))))
    )
    make(encoding, P)
    broken = P.copy()
    broken[5, 1] = bad
    with pytest.raises(
        ValueError, match=f"^positions: must be finite, got {bad} in row 5"
    ):
        make(encoding, broken)
    with pytest.raises(ValueError, match="^positions: must be finite"):
        _EdgeLists(graphs, encoding, broken)
    # learned from graph 0 alone
    described = replace(
        graphs,
        node_labels=None,
        node_attributes=np.linspace(0, 1, graphs.num_nodes)[:, None],
    )
    measured = _learn_encoding(described, [0])
    far = replace(
        described,
        node_attributes=np.where(
            np.arange(graphs.num_nodes) == 7,
            np.float32(3e38),
            described.node_attributes[:, 0],
        )[:, None],
    )
    tight = measured._replace(node=measured.node._replace(scale=np.float32([1e-6])))
    table = (
        (lambda: _make_buckets(far, tight, positions=P))
        if layout == "dense"
        else (lambda: _edge_batch(far, tight, P, np.arange(len(far))))
    )
    with (
        np.errstate(over="ignore"),
        pytest.raises(ValueError, match="^features: must be finite, got inf in row 7"),
    ):
        table()


def test_a_digest_changes_with_every_number_of_a_set():
    graphs = random_set(1)
    assert (
        graphs.digest
        == replace(graphs, name="other").digest
        == graphs[np.arange(7)].digest
        and len(graphs.digest) == 16
    )
    found = {graphs.digest}
    for key in FIELDS:
        a = np.array(getattr(graphs, key))
        if key == "start":
            changed = dict(
                start=np.concatenate([a[:-1], a[-1:] + 1]),
                **{
                    k: np.concatenate([getattr(graphs, k), getattr(graphs, k)[:1]])
                    for k in ("node_labels", "node_attributes")
                },
            )
        elif key in ("senders", "receivers"):
            changed = {
                key: np.where(
                    np.arange(len(a)) == 0,
                    graphs.receivers[0] if key == "senders" else graphs.senders[0],
                    a,
                )
            }
        elif key == "labels":
            changed = dict(labels=(a + 1) % 3)
        else:
            a.flat[-1] += 1
            changed = {key: a}
        found.add(replace(graphs, **changed).digest)
    assert len(found) == 1 + len(FIELDS)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4))
@examples(40)
def test_bucket_sizes_are_the_best_there_are(sizes, K):
    work = lambda ends: sum(
        n * (n + 64) for n in np.take(ends, np.searchsorted(ends, sizes))
    )
    ends, all_ends = _bucket_sizes(sizes, K, 1), sorted(set(sizes))
    assert len(ends) <= K and set(ends) <= set(sizes) and ends[-1] == max(sizes)
    best = min(
        work(sorted({*c, max(sizes)}))
        for m in range(K)
        for c in itertools.combinations(all_ends, min(m, len(all_ends)))
    )
    assert work(ends) == best
    assert all(n % 4 == 0 for n in _bucket_sizes(sizes, K)) and max(
        _bucket_sizes(sizes, K)
    ) >= max(sizes)


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 9))
@examples(8)
def test_a_batch_holds_what_the_set_does_and_an_epoch_every_graph_once(seed, K, B):
    graphs = random_set(seed, 11).undirected()
    encoding = _learn_encoding(graphs, np.arange(5))
    P, (x, e) = _laplacian_positions(graphs, 3), encoding(graphs)
    buckets = _make_buckets(graphs, encoding, positions=P, num_buckets=K, batch_size=B)
    ids, seen = np.array([0, 3, 4, 8, 9, 10]), []
    for b, rows in buckets.plan(ids, seed=1, epoch=2):
        batch = jax.tree.map(np.asarray, _take(buckets.buckets[b], rows))
        members = np.flatnonzero(buckets.bucket == b)
        assert len(rows) == buckets.batch_sizes[b] <= B
        for i, row in enumerate(rows):
            one = jax.tree.map(lambda a: a[i], batch)
            if row < 0:
                assert (
                    not one.present.any()
                    and one.labels == -1
                    and not any(np.any(a) for a in one[:4])
                )
                continue
            g = members[row]
            seen.append(g)
            s, n, part = graphs.start[g], graphs.sizes[g], graphs[[g]]
            np.testing.assert_array_equal(one.present, np.arange(len(one.present)) < n)
            for have, want in (
                (one.features, x[s : s + n]),
                (one.positions, P[s : s + n]),
            ):
                np.testing.assert_array_equal(have[:n], want)
                assert not have[n:].any()
            A, L = np.zeros_like(one.adjacency), np.zeros_like(one.edge_features)
            A[part.receivers, part.senders] = 1
            L[part.receivers, part.senders] = e[
                graphs.edge_start[g] : graphs.edge_start[g + 1]
            ]
            np.testing.assert_array_equal(one.adjacency, A)
            np.testing.assert_array_equal(one.edge_features, L)
            assert one.labels == graphs.labels[g] and np.array_equal(A, A.T)
    assert sorted(seen) == ids.tolist()


def test_plans_are_random_and_repeatable_and_bounded():
    rings = load_graphs("rings")
    buckets = _make_buckets(
        rings,
        _learn_encoding(rings, [0]),
        k=0,
        num_buckets=3,
        batch_size=32,
        room=24 * 24 * 8,
    )
    plan = lambda *a: [
        (b, rows.tolist()) for b, rows in buckets.plan(np.arange(200), *a)
    ]
    assert (
        plan(0, 1) == plan(0, 1)
        and plan(0, 1) != plan(0, 2)
        and plan(0, 1) != plan(1, 1)
        and plan() == plan()
    )
    for bucket, B in zip(buckets.buckets, buckets.batch_sizes):
        assert B * bucket.adjacency.shape[1] ** 2 <= 24 * 24 * 8
    filled = [sum(r >= 0 for r in rows) for b, rows in plan(0, 1) if b == 0]
    assert max(filled) - min(filled) <= 1
    assert (
        buckets.plan(np.array([], int)) == [] and len(list(buckets.batches([5]))) == 1
    )
    with pytest.raises(
        ValueError, match="^ids: ids of graphs must lie from 0 to 239, got 240"
    ):
        buckets.plan([240])


def test_flipped_signs_are_one_for_each_graph_and_column():
    rings = load_graphs("rings")
    batch = next(
        _make_buckets(
            rings, _learn_encoding(rings, [0]), k=4, num_buckets=1, batch_size=40
        ).batches(np.arange(40))
    )
    flipped = _flip_signs(batch, jax.random.key(3))
    ratio = np.where(
        np.asarray(batch.positions) == 0,
        np.nan,
        np.asarray(flipped.positions)
        / np.where(batch.positions == 0, 1, batch.positions),
    )
    signs = np.nanmax(ratio, 1)
    np.testing.assert_array_equal(np.nanmin(ratio, 1), signs)
    assert set(np.unique(signs)) == {-1, 1} and 0.3 < (signs == 1).mean() < 0.7
    assert all(
        a is b for key, a, b in zip(batch._fields, batch, flipped) if key != "positions"
    )
    encoding = _learn_encoding(rings, [0])
    P = _laplacian_positions(rings, 4)
    ids = np.arange(40)
    sparse = _edge_batch(rings, encoding, P, ids, 900, 2000, 41)
    ratio = np.asarray(_flip_signs(sparse, jax.random.key(3)).positions) / np.where(
        sparse.positions == 0, 1, sparse.positions
    )
    # some entries are 0
    signs = np.stack(
        [np.sign(ratio[np.asarray(sparse.graph) == i].sum(0)) for i in ids]
    )
    np.testing.assert_array_equal(
        ratio,
        np.where(
            sparse.positions == 0,
            0,
            np.pad(signs, ((0, 2), (0, 0)))[np.asarray(sparse.graph)],
        ),
    )
    assert set(np.unique(signs)) == {-1, 1} and 0.3 < (signs == 1).mean() < 0.7


@given(st.integers(0, 2**31), st.integers(1, 9))
@examples(20)
def test_lists_of_edges_come_in_batches_of_equal_size(seed, B):
    rng = np.random.default_rng(seed)
    sizes = np.append(rng.integers(1, 30, 40), 500)
    graphs = GraphSet(
        np.concatenate([[0], np.cumsum(sizes)]), [], [], np.zeros(41, int)
    )
    lists = _EdgeLists(
        graphs,
        _learn_encoding(graphs, [0]),
        np.zeros((graphs.num_nodes, 0), np.float32),
        B,
    )
    ids = rng.permutation(41)[:33]
    plan = lambda *a: [part.tolist() for part in lists.plan(ids, *a)]
    assert (
        plan(seed, 1) == plan(seed, 1)
        and plan() == plan()
        and (B == 1 or plan(seed, 1) != plan(seed, 2))
    )
    for parts in (plan(), plan(seed, 1), plan(seed, 2)):
        assert (
            sorted(sum(parts, [])) == sorted(ids)
            and max(map(len, parts)) <= B
            and np.ptp([len(p) for p in parts]) <= 1
        )
        nodes = [graphs.sizes[p].sum() for p in parts]
        # one of each m in the order of sizes
        assert max(nodes) - min(nodes) <= graphs.sizes[ids].max() * (
            1 + (len(ids) % len(parts) > 0)
        )
    with pytest.raises(ValueError, match="^ids: "):
        lists.plan([41])


def test_a_batch_of_edges_is_rounded_up_to_one_of_few_sizes():
    rings = load_graphs("rings")
    lists = _EdgeLists(
        rings, _learn_encoding(rings, np.arange(240)), _laplacian_positions(rings, 2), 8
    )
    for part, batch in zip(
        lists.plan(np.arange(60), 0), lists.batches(np.arange(60), 0)
    ):
        nodes = int(rings.sizes[part].sum())
        edges = int(np.diff(rings.edge_start)[part].sum())
        assert (
            nodes < len(batch.graph) <= 1.26 * (nodes + 1) + 1
            and edges <= len(batch.senders) <= 1.26 * edges + 1
            and len(batch.labels) == 8
        )
        assert np.array_equal(
            batch.labels,
            np.where(lists.members(part) >= 0, rings.labels[lists.members(part)], -1),
        )
    shapes = {
        (len(b.graph), len(b.senders))
        for epoch in range(9)
        for b in lists.batches(np.arange(60), 0, epoch)
    }
    assert len(shapes) <= 6
    assert (
        lists.num_features,
        lists.num_positions,
        lists.num_edge_features,
        lists.num_classes,
    ) == (3, 2, 0, 2)


@given(st.integers(0, 2**31))
@examples(5)
def test_edges_end_to_end_say_what_the_tables_say(seed):
    graphs = random_set(seed).undirected()
    encoding = _learn_encoding(graphs, np.arange(7))
    P = _laplacian_positions(graphs, 2)
    ids = np.array([5, 0, 2])
    nodes = int(graphs.sizes[ids].sum())
    edges = int(np.diff(graphs.edge_start)[ids].sum())
    sparse = jax.tree.map(
        np.asarray, _edge_batch(graphs, encoding, P, ids, nodes + 3, edges + 5, 4)
    )
    buckets = _make_buckets(graphs, encoding, positions=P, num_buckets=1)
    assert (
        sparse.labels.tolist() == [*graphs.labels[ids], -1]
        and int(sparse.present.sum()) == nodes
    )
    assert (
        (np.diff(sparse.receivers) >= 0).all()
        and (np.diff(sparse.graph) >= 0).all()
        and (sparse.graph[nodes:] == 4).all()
    )
    assert (sparse.senders[edges:] == nodes + 2).all() and not sparse.edge_features[
        edges:
    ].any()
    for i, g in enumerate(ids):
        dense = jax.tree.map(np.asarray, _take(buckets.buckets[0], np.array([g])))
        here = np.flatnonzero(sparse.graph == i)
        n = len(here)
        np.testing.assert_array_equal(sparse.features[here], dense.features[0, :n])
        np.testing.assert_array_equal(sparse.positions[here], dense.positions[0, :n])
        mine = sparse.graph[sparse.receivers] == i
        r, s = (a[mine] - here[0] for a in (sparse.receivers, sparse.senders))
        assert sorted(zip(r, s)) == list(zip(*np.nonzero(dense.adjacency[0])))
        np.testing.assert_array_equal(
            sparse.edge_features[mine], dense.edge_features[0][r, s]
        )
    with pytest.raises(ValueError, match="need at least"):
        _edge_batch(graphs, encoding, P, ids, nodes)
