"""Graphs from pandas, NetworkX and SciPy, and back: by hand, refused by name, and there
and back.
"""

import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace

import doors
import networkx as nx
import numpy as np
import pandas as pd
import pytest

from et_nbdev.graph.data import (
    Graph,
    _from_npz,
    _subgraph,
    from_dgl,
    from_networkx,
    from_pandas,
    from_pyg,
    from_relations,
    from_scipy,
    save_graph,
    to_dgl,
    to_networkx,
    to_pandas,
    to_pyg,
    to_scipy,
)


def pairs(edges):
    return list(zip(*(ends.tolist() for ends in edges)))


def tables():
    "Payments between accounts by name; one account is not known."
    nodes = pd.DataFrame(
        {"amount": [12.5, 80, 15, 3], "new": [False, True, False, True]},
        index=["ann", "bob", "cy", 7],
    )
    nodes["label"] = [0, 1, None, 0]
    edges = pd.DataFrame({"source": ["ann", "bob", 7], "target": ["bob", "cy", "ann"]})
    return edges, nodes


def test_from_pandas_by_hand():
    edges, nodes = tables()
    graph = from_pandas(edges, nodes, name="paid")
    assert pairs(graph.edges) == [(0, 1), (1, 2), (3, 0)]
    want = [[12.5, 0], [80, 1], [15, 0], [3, 1]]
    assert np.array_equal(graph.features, np.array(want, np.float32))
    assert graph.feature_names == ("amount", "new") and graph.name == "paid"
    assert graph.labels.tolist() == [0, 1, -1, 0]
    unlabeled = from_pandas(edges, nodes.drop(columns="label"))
    assert unlabeled.labels.tolist() == [-1] * 4
    edges.columns = ["payer", "payee"]
    kinds = edges.assign(how=["card", "cash", "card"])
    both = from_pandas(kinds, nodes, source="payer", target="payee", relation="how")
    assert {k: pairs(e) for k, e in both.relations.items()} == {
        "card": [(0, 1), (3, 0)],
        "cash": [(1, 2)],
    }


@pytest.mark.parametrize("kind", ["Int64", "boolean", "Float64", "object"])
def test_a_missing_label_of_any_kind_is_no_label(kind):
    edges, nodes = tables()
    nodes["label"] = pd.array([0, 1, None, 0], dtype=kind)
    assert from_pandas(edges, nodes).labels.tolist() == [0, 1, -1, 0]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda e, n: (e.rename(columns={"source": "from"}), n), "no column 'source'"),
        (lambda e, n: (e.assign(weight=1), n), "have 'weight'.*weights='ignore'"),
        (lambda e, n: (e.replace("cy", "dora"), n), "target 'dora' is not in the ind"),
        (lambda e, n: (e, pd.concat([n, n])), "nodes: 'ann' is in the index twice"),
        (lambda e, n: (e, n.assign(city="Ulm")), "column 'city' must hold numbers"),
        (lambda e, n: (e, n.assign(label="bad")), "label: must be 1 .* 0 .* or noth"),
        (lambda e, n: (e, n.assign(label=2)), "labels: must be 1 .* got 2"),
        (lambda e, n: (e, n.assign(amount=np.nan)), "finite in float32.*feature 0"),
    ],
)
def test_tables_are_refused_by_name(change, says):
    with pytest.raises(ValueError, match=says):
        from_pandas(*change(*tables()))


def test_what_is_no_table_is_refused():
    edges, nodes = tables()
    for wrong in (("edges.csv", nodes), (edges, nodes.to_numpy())):
        with pytest.raises(TypeError, match="^(edges|nodes): expected a DataFrame"):
            from_pandas(*wrong)
    with pytest.raises(ValueError, match="index of nodes, 0, 1, 2, …"):
        from_pandas(edges, nodes.reset_index())


def test_weights_are_left_out_where_that_is_said():
    edges, nodes = tables()
    heavy = edges.assign(weight=[1.0, 2, 3], day=0)
    graph = from_pandas(heavy, nodes, weights="ignore")
    assert graph.digest == from_pandas(edges, nodes).digest
    with doors.unchecked(), pytest.raises(ValueError, match="weights: expected 'ref"):
        from_pandas(heavy, nodes, weights="yes")


def test_from_networkx_by_hand():
    made = nx.Graph([("a", "b"), ("b", "b"), ("c", "a")])
    for i, node in enumerate("abc"):
        made.nodes[node].update(x=i, y=i > 1, features=[i, 2 * i])
    made.nodes["b"]["label"] = 1
    graph = from_networkx(made, ["x", "y"])
    assert sorted(pairs(graph.edges)) == [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
    assert np.array_equal(graph.features, [[0, 0], [1, 0], [2, 1]])
    assert graph.feature_names == ("x", "y") and graph.labels.tolist() == [-1, 1, -1]
    vectors = from_networkx(made, label="none")
    assert np.array_equal(vectors.features, [[0, 0], [1, 2], [2, 4]])
    assert vectors.feature_names == () and set(vectors.labels) == {-1}
    one_way = from_networkx(made.to_directed(), "x")
    assert one_way.num_edges == 5 and one_way.features.shape == (3, 1)


def test_networkx_is_refused_by_name():
    made = nx.Graph([("a", "b")])
    made.nodes["a"].update(x=1)
    with pytest.raises(ValueError, match=r"node 'b' lacks 'x'; it has \[\]"):
        from_networkx(made, ["x"])
    made.nodes["b"].update(x=2)
    with pytest.raises(ValueError, match="edge .'a', 'b'. has no 'kind'"):
        from_networkx(made, ["x"], relation="kind")
    made.edges["a", "b"]["weight"] = 0.5
    with pytest.raises(ValueError, match="have 'weight'"):
        from_networkx(made, ["x"])
    assert from_networkx(made, ["x"], weights="ignore").num_edges == 2


def plain(n=12):
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, n, (2, 40))  # some twice, some loops
    labels = np.arange(n) % 3 - 1
    return Graph(senders, receivers, rng.normal(size=(n, 4)), labels, name="plain")


def hetero():
    graph = plain()
    half = slice(0, 20), slice(15, 40)
    relations = {
        kind: (graph.senders[part], graph.receivers[part])
        for kind, part in zip(("mail", "a call"), half)
    }
    return from_relations(relations, graph.features, graph.labels)


@pytest.mark.parametrize("names", [(), tuple("abcd")])
@pytest.mark.parametrize("make", [plain, hetero])
def test_there_and_back(make, names):
    graph = replace(make(), feature_names=names)
    kind = "relation" if graph.relations else None
    edges, nodes = to_pandas(graph)
    net = to_networkx(graph)
    for found in (
        from_pandas(edges, nodes, relation=kind),
        from_networkx(net, names or "features", relation=kind),
    ):
        assert np.array_equal(found.features, graph.features)
        assert np.array_equal(found.labels, graph.labels)
        if not graph.relations:
            assert sorted(pairs(found.edges)) == sorted(pairs(graph.edges))
        assert {k: sorted(pairs(e)) for k, e in found.relations.items()} == {
            k: sorted(pairs(e)) for k, e in graph.relations.items()
        }
    assert found.feature_names == names and net.name == graph.name
    assert list(nodes.columns) == [*(names or ("x0", "x1", "x2", "x3")), "label"]
    # in a matrix parallel edges are one entry
    again = from_scipy(to_scipy(graph), graph.features, graph.labels)
    assert again.simple(True).digest == graph.simple(True).digest


def test_a_matrix_counts_edges_and_a_simple_graph_is_a_digraph():
    graph = plain()
    A = to_scipy(graph).toarray()
    want = np.zeros((12, 12))
    np.add.at(want, graph.edges, 1)
    assert np.array_equal(A, want) and want.max() > 1
    assert to_networkx(graph).is_multigraph()
    assert not to_networkx(graph.simple()).is_multigraph()


@pytest.mark.parametrize(
    "way, module", [(to_pandas, "pandas"), (to_networkx, "networkx")]
)
def test_a_missing_library_is_named_with_what_installs_it(monkeypatch, way, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"{module}.*pip install"):
        way(plain())


def test_names_of_features_are_kept_and_checked(tmp_path):
    graph = replace(plain(), feature_names=list("abcd"))
    assert graph.feature_names == tuple("abcd")
    assert graph.digest == plain().digest
    save_graph(graph, tmp_path / "x.npz")
    for found in (
        _from_npz(tmp_path / "x.npz"),
        _subgraph(graph, [3, 1]),
        graph.symmetric(),
    ):
        assert found.feature_names == tuple("abcd")
    for names, says in (
        ("abc", "one for each of the 4 features, or none, got 3"),
        ("abca", "'a' is given twice"),
        ((1, 2, 3, 4), "must be strings"),
    ):
        with doors.unchecked(), pytest.raises(ValueError, match=says):
            replace(plain(), feature_names=tuple(names))


# --- PyTorch Geometric and DGL: the libraries where they are, else what is asked of them


HERE = {name for name in ("torch", "torch_geometric", "dgl") if find_spec(name)}


class FakeDGL:
    "As much of a heterogeneous DGLGraph as is filled and read."

    ntypes = ["node"]

    def __init__(self, edges, nodes):
        self.ends, self.ndata = edges, {}
        self.canonical_etypes = sorted(edges)
        assert list(nodes) == self.ntypes
        self.num_nodes = nodes["node"]

    def edges(self, etype):
        return self.ends[etype]


@pytest.fixture
def torch_world(monkeypatch):
    fakes = {
        "torch": SimpleNamespace(from_numpy=lambda array: array),
        "torch_geometric.data": SimpleNamespace(Data=SimpleNamespace),
        "dgl": SimpleNamespace(heterograph=FakeDGL),
    }
    if "torch" not in HERE:
        for name, fake in fakes.items():
            monkeypatch.setitem(sys.modules, name, fake)
        monkeypatch.setitem(sys.modules, "torch_geometric", SimpleNamespace())


def same(a: Graph, b: Graph):
    assert a.digest == b.digest and list(a.relations) == list(b.relations)


def test_there_and_back_through_pyg(torch_world):
    if "torch" in HERE and "torch_geometric" not in HERE:
        pytest.skip("needs torch_geometric beside torch")
    same(from_pyg(to_pyg(plain())), plain())
    # the edges of all kinds
    union = from_pyg(to_pyg(hetero()))
    assert pairs(union.edges) == pairs(hetero().edges) and not union.relations


def test_there_and_back_through_dgl(torch_world):
    if "torch" in HERE and "dgl" not in HERE:
        pytest.skip("needs dgl beside torch")
    same(from_dgl(to_dgl(plain())), plain())
    kinds = hetero()
    sort = dict(sorted(kinds.relations.items()))  # as DGL does
    assert list(sort) != list(kinds.relations)
    same(from_dgl(to_dgl(kinds)), from_relations(sort, kinds.features, kinds.labels))
    # a graph with a node that no edge reaches
    lonely = Graph([0], [1], np.eye(5), [0, 1, 0, -1, 1])
    made = to_dgl(lonely)
    count = made.num_nodes if isinstance(made.num_nodes, int) else made.num_nodes()
    assert count == 5
    same(from_dgl(made), lonely)


def test_without_these_libraries_their_package_is_named(monkeypatch):
    for convert, missing in ((to_pyg, "torch"), (to_dgl, "torch")):
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ModuleNotFoundError, match=f"pip install {missing}"):
            convert(plain())
