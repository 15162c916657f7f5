"""Numbers on edges: through every reader, a merge, a file, and into a detector."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from et_nbdev.graph.data import (
    Graph,
    from_dgl,
    from_networkx,
    from_pandas,
    from_pyg,
    from_relations,
    from_scipy,
    load_graph,
    save_graph,
    to_networkx,
    to_pandas,
)

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
    plain = Graph(*ENDS, X, Y)
    assert plain.edge_features.shape == plain.symmetric().edge_features.shape[:0] + (
        6,
        0,
    )
    assert (
        len({plain.digest, graph.digest, graph_of(edge_features=ROWS + 1).digest}) == 3
    )


@pytest.mark.parametrize(
    "options, words",
    [
        (
            dict(edge_features=ROWS[:5]),
            r"a row for each of 6 edges, .*\(6, P\), got.*5",
        ),
        (dict(edge_features=ROWS[:, 0]), r"got shape \(6,\); .* a\[:, None\]"),
        (dict(edge_features=ROWS + np.inf), "must be finite in float32, got"),
        (dict(edge_features=[["1"]] * 6), "must hold numbers"),
        (dict(edge_feature_names=["amount"]), "_names: must be 2 or none, got 1"),
    ],
)
def test_features_of_edges_are_checked_once(options, words):
    with pytest.raises(ValueError, match="^edge_feature.*" + words):
        graph_of(**options)


def pyg(graph):
    given = dict(x=X, edge_index=np.stack(graph.edges), y=Y)
    data = SimpleNamespace(**given, edge_attr=graph.edge_features)
    found = from_pyg(data, edge_features=["edge_attr"])
    assert found.edge_feature_names == ("edge_attr_0", "edge_attr_1")
    return found


def dgl(graph):
    class Edges(dict):
        def __call__(self, etype):
            return graph.edges

    kind, data = ("n", "e", "n"), dict(zip(NAMES, graph.edge_features.T))
    data["_ID"] = np.arange(6)
    given = dict(ntypes=["n"], canonical_etypes=[kind], edata=data)
    given |= dict(ndata=dict(feature=X, label=Y))
    given |= dict(edges=Edges({kind: SimpleNamespace(data=data)}))
    return from_dgl(SimpleNamespace(**given), edge_features=NAMES)


def scipy(graph):
    from scipy.sparse import coo_array

    values, graph = graph.edge_features[:, 0], graph.simple()
    A = coo_array((values, ENDS), (4, 4))
    found = from_scipy(A, X, Y, weights="keep")
    assert found.edge_feature_names == ("weight",) and table(found)[0, 1] == 6  # 1 + 5
    return None


@pytest.mark.parametrize("relation", [None, "relation"])
@pytest.mark.parametrize(
    "way",
    [
        lambda graph, **kind: from_pandas(
            *to_pandas(graph), edge_features=NAMES, **kind
        ),
        lambda graph, **kind: from_networkx(
            to_networkx(graph), edge_features=NAMES, **kind
        ),
    ],
)
def test_tables_and_networks_keep_what_is_named(way, relation):
    graph, kind = graph_of(), {}
    if relation:
        kinds = {"a": ENDS[:, ::2], "b": ENDS[:, 1::2]}
        rows = np.vstack([ROWS[::2], ROWS[1::2]])
        own = dict(edge_features=rows, edge_feature_names=NAMES)
        graph, kind = from_relations(kinds, X, Y, **own), dict(relation=relation)
    found = way(graph, **kind)
    assert found.edge_feature_names == NAMES
    assert table(found.simple()) == table(graph.simple())
    assert set(found.relations) == set(graph.relations)


def test_other_readers_and_files(tmp_path):
    graph = graph_of()
    scipy(graph)
    save_graph(graph, tmp_path / "graph.npz")
    read = load_graph(str(tmp_path / "graph.npz"), symmetric=False)
    assert read.edge_feature_names == NAMES and table(read) == table(graph.simple())
    for found in (pyg(graph), dgl(graph)):
        assert table(found) == table(graph)
        assert np.array_equal(found.edge_features, ROWS)


def test_doors_name_what_is_missing_or_no_number():
    edges, nodes = to_pandas(graph_of())
    with pytest.raises(ValueError, match="^edges: no column 'when'"):
        from_pandas(edges, nodes, edge_features=["when"])
    with pytest.raises(ValueError, match="^weights: .*'late', .*edge_features"):
        from_pandas(edges, nodes, edge_features=["amount"])
    with pytest.raises(ValueError, match="^edge_features: 'late' must hold numbers"):
        from_pandas(edges.assign(late="no"), nodes, edge_features=NAMES)
    with pytest.raises(
        ValueError, match=r"^edge_features: edge \(0, 1\) has no 'when'"
    ):
        from_networkx(to_networkx(graph_of()), edge_features=["when"], weights="ignore")
    with pytest.raises(ValueError, match="^data: must have .*edge_attr"):
        from_pyg(
            SimpleNamespace(x=X, edge_index=ENDS, y=Y), edge_features=["edge_attr"]
        )
    with pytest.raises(ValueError, match="^edge_feature_names: 'source'"):
        to_pandas(replace(graph_of(), edge_feature_names=("source", "late")))
