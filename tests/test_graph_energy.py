"""Attention along edges: beside the dense table of the same graph, for every kind of
graph, both back ends, and what training differentiates. Compiled attention reads the
structs that XLA's header declares; where that is not certain, or something does not
compile, XLA computes instead.
"""

import re
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import doors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from et_nbdev.attention import PairBias, RelativePositions
from et_nbdev.block import EnergyTransformer
from et_nbdev.graph import kernels
from et_nbdev.graph.energy import (
    EdgeAttention,
    EdgeBias,
    EdgeIndex,
    EdgeTransformer,
    attention_weights,
)
from et_nbdev.testing import assert_close, assert_gradient

BACKENDS = ("compiled", "xla")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("compile_quickly")
KINDS = "directed undirected isolated deaf one-way none complete hubs loops".split()


def make(kind, seed, backend="compiled"):
    "A graph, and its table with receivers in rows."
    rng = np.random.default_rng(seed)
    table = rng.random((23, 23)) < 0.2
    if kind == "undirected":
        table |= table.T
    if kind == "isolated":
        table[[0, 7]] = table[:, [0, 7]] = False
    if kind == "deaf":  # 3 sees nobody, nobody sees 9
        table[3] = table[:, 9] = False
    if kind == "one-way":
        table = np.tril(table)
    if kind in ("none", "complete"):
        table[:] = kind == "complete"
    if kind == "hubs":  # wider than a rectangle of XLA's, and no power of two of it
        table = np.zeros((301, 301), bool)
        table[5] = table[:, 250] = table[8, 1:131] = True
    np.fill_diagonal(table, False)
    if kind == "loops":
        table[[1, 4], [1, 4]] = True
    receivers, senders = np.nonzero(table)
    options = dict(self_loops=kind == "loops", backend=backend)
    return EdgeIndex(senders, receivers, len(table), **options), jnp.asarray(table)


def random_weights(module, seed):
    rng, (graphdef, state) = np.random.default_rng(seed), nnx.split(module)
    draw = lambda w: jnp.asarray(0.6 * rng.normal(size=w.shape))
    return nnx.merge(graphdef, jax.tree.map(draw, state))


def attention_of(H=2, Y=3, **options):
    options = dict(beta=[0.3, 1.0, 2.5][:H], param_dtype=jnp.float64) | options
    made = EdgeAttention(4, H, Y, **options, rngs=nnx.Rngs(0))
    return random_weights(made, 1)


def tokens(*shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(*shape, 4)))


def seen(pairs):
    "A table as a mask, anything else as edges."
    return {"mask": pairs} if isinstance(pairs, jax.Array) else {"edges": pairs}


@nnx.jit
def both(attention, g, pairs):
    return attention.energy_and_update(g, **seen(pairs))


def along_edges(edges, Q, K):
    "ℓ of every query, and both pulls: the derivatives of its sum."
    lse, pull = jax.vjp(partial(kernels.neighbor_match, edges), Q, K)
    return lse, *pull(jnp.ones_like(lse))


def all_close(got, wanted, **options):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, **options)


# --- the energy, its update and their derivative


@each_backend
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_dense_table(kind, backend, x64):
    H, Y = [(3, 5), (2, 1), (1, 3)][KINDS.index(kind) % 3]
    edges, table = make(kind, KINDS.index(kind), backend)
    attention = attention_of(H, Y, self_attention=kind == "loops", normalize=H == 2)
    g = tokens(len(table))
    all_close(both(attention, g, edges), both(attention, g, table))
    np.testing.assert_array_equal(edges.mask(), table)


@each_backend
@pytest.mark.parametrize(
    "kind, normalize", [("one-way", False), ("loops", False), ("directed", True)]
)
def test_update_is_minus_the_gradient_of_the_energy(kind, normalize, backend, x64):
    edges, _ = make(kind, 3, backend)
    attention = attention_of(self_attention=kind == "loops", normalize=normalize)
    g, energy = tokens(2, 23), jax.jit(lambda g: attention.energy(g, edges=edges))
    assert_gradient(energy, g, -both(attention, g, edges)[1])


@each_backend
def test_weighted_token_energies_have_their_own_derivative(backend, x64):
    "A sum over tokens with weights, its gradient, and that of a loss on the gradient."
    (edges, table), attention = make("one-way", 21, backend), attention_of(repelling=1)
    g, w, v = tokens(3, 23)

    def slopes(g, w, pairs):
        share = lambda g: attention.token_energy(g, **seen(pairs))
        slope = jax.grad(lambda g, w: jnp.sum(w[:, 0] * share(g)))
        loss = lambda g, w: jnp.sum(jnp.sin(slope(g, w)) * v)
        return slope(g, w), jax.grad(loss, (0, 1))(g, w)

    all_close(*(jax.jit(slopes)(g, w, pairs) for pairs in (edges, table)))


@pytest.mark.parametrize("features", [None, [[1.0], [2.0], [3.0]]])
def test_a_look_costs_two_passes_over_the_edges_and_its_derivative_two_more(features):
    "With respect to the tokens and all parameters; a bias of the edges costs none."
    own = dict(features=features, backend="compiled")
    edges = EdgeIndex([0, 1, 2], [1, 2, 0], 3, **own)
    heads = partial(EdgeAttention, positions=features and EdgeBias(1, 2))
    block = EdgeTransformer(4, 2, 3, 5, attention=heads, rngs=nnx.Rngs(0))
    force = lambda block, g: block.energies_and_update(g, edges=edges)[1]
    loss = lambda block, g: jnp.sum(jnp.sin(force(block, g)))
    for f, passes in ((force, 2), (nnx.grad(loss, argnums=(0, 1)), 4)):
        text = nnx.jit(f).lower(block, jnp.ones((3, 4))).compile().as_text()
        assert text.count('custom_call_target="et_nbdev_graph') == passes


# --- edges with features


@pytest.mark.parametrize(
    "kind, backend", [("hubs", "compiled"), ("deaf", "compiled"), ("directed", "xla")]
)
def test_a_bias_along_edges_is_its_formula_in_a_table(kind, backend, x64):
    """Energy, its gradient by tokens and every parameter, and the gradient of a function
    of that gradient; for a batch, a repelling head, room to spare and any order of edges.
    """
    edges, table = make(kind, 4, backend)
    rng, N = np.random.default_rng(1), len(table)
    ends = rng.permutation(np.stack(edges.edge_list()), axis=1)
    f = rng.normal(size=(ends.shape[1], 3)).astype(np.float32)
    at_edges = np.zeros((N, N, 3))
    at_edges[ends[1], ends[0]] = f
    options = dict(positions=EdgeBias(3, 2), repelling=1, beta=nnx.Param([0.3, 1.0]))
    graph, state = nnx.split(attention_of(**options))
    edges = EdgeIndex(*ends, N, features=f, capacity=len(f) + 9, backend=backend)
    np.testing.assert_array_equal(edges.table(), at_edges)
    dense = {"mask": table, "edge_features": jnp.asarray(at_edges)}

    def energy(state, g, context):
        attention = nnx.merge(graph, state)
        if context is None:
            weight, attention.positions = attention.positions.weight[...], None
            bias = jnp.einsum("hp,cbp->hcb", weight, at_edges)
            context = {"mask": table, "bias": bias}
        return attention.energy(g, **context).sum()

    def bent(state, g, context):
        slopes = jax.grad(energy, (0, 1))(state, g, context)
        return sum(jnp.sin(slope).sum() for slope in jax.tree.leaves(slopes))

    g = tokens(2, N)
    for function in (energy, bent):
        run = jax.jit(jax.value_and_grad(function, (0, 1)))
        wanted = run(state, g, None)
        for context in ({"edges": edges}, dense):
            all_close(run(state, g, context), wanted, atol=1e-11)
    attention = nnx.merge(graph, state)
    P = attention.attended(g[0], **dense)[:, ends[1], ends[0]].T
    assert_close(attention_weights(attention, g[0], edges), P[np.lexsort(ends)])
    assert_gradient(attention, g, edges=edges)


def loss_of(Q, K, edges):
    return sum(jnp.mean(jnp.sin(x)) for x in along_edges(edges, Q, K))


def test_rectangles_of_every_width(x64, monkeypatch):
    """The XLA path as in a large graph: a class for every power of two, worked off in
    many chunks.
    """
    monkeypatch.setattr(kernels, "_SPARE", 0)
    monkeypatch.setattr(kernels, "_ROOM", 200)
    ends = np.nonzero(np.tril(np.ones((33, 33)), -1))[::-1]
    compiled, xla = (EdgeIndex(*ends, 33, backend=b) for b in BACKENDS)
    assert xla.into.classes == ((1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16))
    Q, K = jnp.asarray(np.random.default_rng(15).normal(size=(2, 33, 2, 3)))
    run = jax.jit(jax.value_and_grad(loss_of, (0, 1)))
    all_close(run(Q, K, xla), run(Q, K, compiled))


@each_backend
def test_batches_share_a_graph_and_relations_add_up(backend, x64):
    kinds = [make(kind, 6, backend) for kind in ("directed", "one-way", "isolated")]
    attention, g = attention_of(), tokens(2, 3, 23)
    each = [both(attention, g, table) for _, table in kinds]
    all_close(both(attention, g, kinds[0][0]), each[0])
    one = lambda g: attention.energy_and_update(g, edges=kinds[0][0])
    all_close(jax.jit(jax.vmap(jax.vmap(one)))(g), each[0])
    together = both(attention, g, tuple(edges for edges, _ in kinds))
    all_close(together, jax.tree.map(lambda *parts: sum(parts), *each))


@each_backend
@pytest.mark.parametrize("normalize", [False, True])
def test_explanations(normalize, backend, x64):
    edges, table = make("deaf", 8, backend)
    attention, g = attention_of(normalize=normalize), tokens(23)
    shares = attention.token_energy(g, edges=edges)
    np.testing.assert_array_equal(shares == 0, ~table.any(1))
    for C in (3, 9, 11):  # a node's share is the energy of the graph of its own edges
        only = jnp.zeros_like(table).at[C].set(table[C])
        assert_close(shares[C], both(attention, g, only)[0], atol=1e-15)
    weights = attention_weights(attention, g, edges)
    senders, receivers = edges.edge_list()
    P = attention.attended(g, mask=table)
    assert weights.shape == (edges.num_edges, 2)
    assert_close(weights, P[:, receivers, senders].T)
    assert_close(attention_weights(attention, g, edges, np.r_[5:30:3]), weights[5:30:3])


# --- the same bits


@each_backend
def test_repeats_bit_for_bit_and_back_ends_agree(backend):
    """Over calls, over the order in which edges are listed, and while other calls are
    under way: many chunks and several threads, long rows cut into pieces.
    """
    rng, N = np.random.default_rng(9), 1000
    ends = np.minimum((N * rng.random((2, 40 * N)) ** 3).astype(int), N - 1)
    senders, receivers = np.unique(ends[:, ends[0] != ends[1]], axis=1)
    assert max(np.bincount(receivers)) > 2 * kernels._WIDEST
    mixed = rng.permutation(len(senders))
    edges = EdgeIndex(senders, receivers, N, backend=backend)
    again = senders[mixed].astype(np.int64), receivers[mixed].astype(np.uint16)
    again = EdgeIndex(*again, N, backend=backend)
    Q, K = jnp.asarray(0.5 * rng.normal(size=(2, N, 2, 7)).astype(np.float32))
    run = jax.jit(jax.value_and_grad(loss_of, (0, 1)))
    first, different = jax.tree.leaves(run(Q, K, edges)), []
    if backend == "xla":
        compiled = EdgeIndex(senders, receivers, N, backend="compiled")
        all_close(first, jax.tree.leaves(run(Q, K, compiled)), rtol=2e-5)

    def compare():
        for other in 4 * (edges, again):
            found = jax.tree.leaves(run(Q, K, other))
            different.extend(a for a, b in zip(first, found) if not (a == b).all())

    several = 3 if backend == "compiled" else 1
    threads = [threading.Thread(target=compare) for _ in range(several)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "calls wait for each other"
    assert not different


@pytest.mark.parametrize(
    "degrees", [[0], [5], [0, 0, 7, 0], [1, 1, 1000, 1, 1], list(range(50)), [0] * 9]
)
def test_chunks_cover_every_row_once_and_cost_alike(degrees):
    start = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    for chunks in (1, 2, 3, 7):
        rows = [kernels._first_row(start, i, chunks) for i in range(chunks + 1)]
        assert (rows[0], rows[-1]) == (0, len(degrees)) and rows == sorted(rows)
        costs = [start[b] + b - start[a] - a for a, b in zip(rows, rows[1:])]
        assert max(costs) <= (start[-1] + len(degrees)) / chunks + max(degrees) + 1


# --- numbers and memory


@each_backend
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_seen(bad, backend):
    "A NaN reaches the node's neighbors and nobody else."
    edges = EdgeIndex([0, 1, 2, 3], [1, 0, 3, 2], 4, backend=backend)
    Q = jnp.ones((4, 1, 3)).at[0, 0, 1].set(bad)
    found = along_edges(edges, Q, Q)
    assert not np.isfinite(found[0][:2]).any()
    assert all(np.isfinite(x[2:]).all() for x in found)


def test_memory_is_not_edges_times_width(compile_fully):
    "What the compiler sets aside for forward and backward, beside one array (E, H, Y)."
    N, H, Y, rng = 3000, 2, 64, np.random.default_rng(13)
    ends = np.nonzero(rng.random((N, N)) < 0.03 * (1 - np.eye(N)))
    shape = jax.ShapeDtypeStruct((N, H, Y), jnp.float32)
    train, spare = jax.jit(jax.grad(loss_of, (0, 1))), {}
    for backend in BACKENDS:
        lowered = train.lower(shape, shape, EdgeIndex(*ends, N, backend=backend))
        spare[backend] = lowered.compile().memory_analysis().temp_size_in_bytes
    array = 4 * len(ends[0]) * H * Y
    assert len(ends[0]) > 150_000 and spare["compiled"] < 12 * 4 * N * H * Y, spare
    assert spare["xla"] < array / 3, (spare, array)


@each_backend
def test_room_for_more_edges(backend, x64):
    """Spare capacity changes no number, and compiled programs are shared between graphs
    of one capacity.
    """
    attention, g, traces = attention_of(), tokens(23), []

    @jax.jit
    def run(g, edges):
        traces.append(1)
        return attention.energy_and_update(g, edges=edges)

    for kind in ("directed", "one-way"):
        edges, table = make(kind, 14, backend)
        roomy = EdgeIndex(*edges.edge_list(), 23, capacity=600, backend=backend)
        assert (roomy.num_edges, roomy.num_nodes) == (edges.num_edges, 23)
        all_close(run(g, roomy), attention.energy_and_update(g, mask=table))
        np.testing.assert_array_equal(roomy.mask(), table)
    assert len(traces) == 1 or backend == "xla"


# --- bad input


@pytest.mark.parametrize(
    "arguments, options, words",
    [
        (([0, 5], [1, 2], 5), {}, "^senders: .* from 0 to 4, got 5 at position 1"),
        (([0, 1], [1, -1], 5), {}, "^receivers: .* from 0 to 4, got -1"),
        (([0.0, 1.0], [1, 2], 5), {}, "^senders: must hold integers.*float64"),
        (([0, 1], [True, False], 5), {}, "^receivers: must hold integers.*bool"),
        (([0, 1], [1], 5), {}, r"^senders and receivers: .*\[2, 1\]"),
        (([0, 1], [1, 1], 5), {}, "1 edges lead .*node 1.*self_loops=True"),
        (([0, 1, 0, 0], [1, 2, 1, 1], 5), {}, "2 of the 4 .*np.unique"),
        (([0] * 300, [1] * 300, 2), {}, "299 of the 300"),
        (([0], [1], 2), dict(features=np.ones((3, 1))), r"^features: .*\(1, P\), got"),
    ],
)
def test_bad_edges_and_options_are_refused_by_name(arguments, options, words):
    with doors.unchecked(), pytest.raises(ValueError, match=words):
        EdgeIndex(*arguments, **options)


def head(positions):
    with doors.unchecked():
        return EdgeAttention(4, 1, 3, positions=positions, rngs=nnx.Rngs(0))


EDGES, LOOP = EdgeIndex([0], [1], 2), EdgeIndex([0], [0], 2, self_loops=True)
PAID = EdgeIndex([0], [1], 2, features=np.ones((1, 3)))
BLOCK, PLAIN = (
    kind(4, 1, 3, 2, rngs=nnx.Rngs(0)) for kind in (EdgeTransformer, EnergyTransformer)
)
FEW, GRID = map(head, (EdgeBias(2, 1), RelativePositions(2, 1)))
UNFIT = [  # a term or block, its context, and what is said of it
    (BLOCK, dict(edges=EdgeIndex([0], [1], 3)), "^edges: .*N = 2, got 3"),
    (BLOCK, dict(edges=LOOP), "^edges: .*self_attention=True"),
    (BLOCK, dict(edges=PAID), "^edges: expected 0 features .*, got 3"),
    (BLOCK, dict(edges=()), "^edges: expected at least one graph"),
    (BLOCK, dict(edges=([0], [1])), "^edges: expected an EdgeIndex"),
    (BLOCK, dict(edges=np.array([[0], [1]])), "^edges: expected an EdgeIndex"),
    (BLOCK, dict(edges=EDGES, mask=EDGES.mask()), "^edges: expected no mask"),
    *((BLOCK, dict([("edges", EDGES), (name, jnp.ones((2, 2)))]), "^edges: expected no mask")
      for name in ("weights", "bias")),
    (PLAIN, dict(edges=EDGES), "^edges: no term of this block takes it"),
    (FEW, dict(edges=EDGES), "^edges: expected 2 features .* got 0"),
    (FEW, dict(edges=PAID), "^edges: expected 2 features .* got 3"),
    (GRID, dict(edges=EDGES), "^edges: .*got RelativePositions; numbers"),
    (FEW, dict(edges=SimpleNamespace(match=None)), "^edges: .*EdgeIndex.*EdgeBias"),
    *((head(b), {}, "^positions: ") for b in (RelativePositions(3, 1), PairBias(3, 1))),
    (GRID, dict(maks=EDGES.mask()), "unexpected keyword argument 'maks'"),
]  # fmt: skip


@pytest.mark.parametrize("term, context, words", UNFIT)
def test_context_that_does_not_fit_is_refused_by_name(term, context, words):
    calls = [term.energy, term.update]
    if term is GRID and "edges" in context:
        calls.append(lambda g, edges: attention_weights(term, g, edges))
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=words):
            call(jnp.ones((2, 4)), **context)


@each_backend
@pytest.mark.parametrize(
    "Q, K, words",
    [
        ((3, 1, 2), (3, 1, 5), r"K of \(3, 1, 5\)"),
        ((3, 1, 8), (1, 1, 8), r"K of \(1, 1, 8\)"),
        ((2, 1, 2), (2, 1, 2), "N = 2, got 3"),
        ((3, 1, 2, int), (3, 1, 2, int), "float64, got int"),
        ((3, 1, 2, jnp.bfloat16), (3, 1, 2), "got bfloat16"),
        ((3, 1, 2), (3, 1, 2, jnp.float16), "got float32 and float16"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_any_is_read(Q, K, words, backend):
    "A compiled loop would read, and write, beyond their ends."
    edges, beta = EdgeIndex([0, 1], [1, 2], 3, backend=backend), jnp.ones(1)
    make = lambda N, H, Y, kind=jnp.float32: jnp.ones((N, H, Y), kind)
    match = lambda Q, K: edges.match(Q, K, beta, False)
    with doors.unchecked():
        for call in (match, jax.jit(match)):
            with pytest.raises(ValueError, match=words):
                call(make(*Q), make(*K))


@each_backend
def test_scores_of_ten_thousand(backend):
    attention = EdgeAttention(6, 1, 6, beta=1.0, rngs=nnx.Rngs(0))
    attention.Wq[...] = attention.Wk[...] = jnp.eye(6)[None]
    g = 100.0 * jnp.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [1.0, 1.0]])
    g = jnp.pad(g, ((0, 0), (0, 4)))
    edges = EdgeIndex([0, 0, 1, 1, 2, 2], [1, 2, 0, 2, 0, 1], 4, backend=backend)
    E, u = both(attention, g, edges)
    assert_close(E, jnp.float32(-10_000 - np.log(2)), rtol=1e-6)
    # a score of that size has a last digit of 10⁻³
    all_close((E, u), both(attention, g, edges.mask()), rtol=1e-3)
    squared = lambda g: jnp.sum(attention.update(g, edges=edges) ** 2)
    slope = jax.jit(jax.grad(squared))(g)
    assert jnp.isfinite(slope).all() and (slope[3] == 0).all() and (u[3] == 0).all()


# --- compiled: what XLA declares

HEADER = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text("utf-8")
VERSION = re.compile(r"(#define XLA_FFI_API_(?:MAJOR|MINOR)) (\d+)")
# structs that are named by who holds them, and two that XLA never sees
OTHERS = {"_Extension", "_Version", "_Task", "_Counter"}
STRUCTS = {
    name: dtype
    for name, dtype in vars(kernels).items()
    if isinstance(dtype, np.dtype) and dtype.names and name not in OTHERS
}


# --- the header


def layouts(header):
    """{struct: {field: (offset, size, type)}}, as a C compiler lays them out for 64
    bits.
    """
    text = re.sub(r"//.*|/\*(?:.|\n)*?\*/", "", header)
    # pointers to functions, also those that a macro declares
    text = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"void* \1", text)
    text = re.sub(r"\(\*(\w+)\)\([^)]*\)", r"* \1", text)
    size = {"int": 4, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "size_t": 8}
    size |= dict.fromkeys(re.findall(r"typedef enum \{[^}]*\} (\w+)", text), 4)
    size |= {new: size[old] for old, new in re.findall(r"typedef (\w+_t) (\w+);", text)}
    aligned, found = dict(size), {}
    up = lambda n, step: -(-n // step) * step
    for name, body in re.findall(r"\bstruct (\w+) \{([^{}]*)\}", text):
        found[name], end, widest = {}, 0, 1
        for declared in filter(None, map(str.strip, body.split(";"))):
            kind, stars, field = re.search(r"(\w+)\s*(\**)\s*(\w+)$", declared).groups()
            bytes, step = (8, 8) if stars else (size[kind], aligned[kind])
            offset = up(end, step)
            found[name][field] = offset, bytes, kind
            end, widest = offset + bytes, max(widest, step)
        size[name], aligned[name] = up(end, widest), widest
    return found


def differences(dtype, struct, header):
    "Where a dtype and a struct of the header disagree, in the structs inside as well."
    fields, found = layouts(header).get(struct, {}), []
    for field in dtype.names:
        if field.startswith("_"):
            continue  # stands for what lies between, which is never read
        inner, offset = dtype.fields[field][:2]
        there = fields.get(field, ())
        if there[:2] != (offset, inner.itemsize):
            found.append(f"{struct}.{field}: {(offset, inner.itemsize)}, not {there}")
        elif inner.names:
            found += differences(inner, there[2], header)
    return found


@pytest.mark.parametrize("name", STRUCTS)
def test_structs_are_those_of_the_header(name):
    assert differences(STRUCTS[name], "XLA_FFI" + name, HEADER) == []


def test_a_request_is_whole():
    "XLA compares the size of a request with its own."
    declared = layouts(HEADER)
    name = "_ThreadPool_Schedule_Args"
    assert list(STRUCTS[name].names) == list(declared["XLA_FFI" + name])


def test_numbers_of_the_header():
    kind = re.search(r"XLA_FFI_Extension_Metadata = (\d+)", HEADER)
    double = re.search(r"XLA_FFI_DataType_F64 = (\d+)", HEADER)
    assert (int(kind[1]), int(double[1])) == (kernels._METADATA, kernels._F64)
    version = tuple(int(number) for _, number in VERSION.findall(HEADER))
    assert kernels._OLDEST <= version <= kernels._NEWEST


# --- where they cannot be used


def header_of(version):
    def change(monkeypatch, folder):
        path = folder / "xla/ffi/api/c_api.h"
        path.parent.mkdir(parents=True)
        numbers = iter(version)
        path.write_text(VERSION.sub(lambda m: f"{m[1]} {next(numbers)}", HEADER))
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))

    return change


def no_header(monkeypatch, folder):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(folder))


def no_numba(monkeypatch, folder):
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)


def half_the_bits(monkeypatch, folder):
    monkeypatch.setattr(kernels, "_ptr", np.int32)


def code_that_does_not_compile(monkeypatch, folder):
    def work(task):
        return task.no_such_thing

    monkeypatch.setattr(kernels, "_work", work)


def refused_by_xla(monkeypatch, folder):
    def register(*args, **options):
        raise ValueError("API version (0.3) is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", register)


@pytest.mark.parametrize(
    "change, why",
    [
        (header_of((0, 2)), r"from version 0\.3 to 0\.5, but .*c_api\.h says 0\.2"),
        (header_of((0, 99)), r"says 0\.99"),
        (header_of((1, 3)), r"says 1\.3"),
        (no_header, "says nothing"),
        (no_numba, "pip install"),
        (half_the_bits, "64-bit"),
        (code_that_does_not_compile, "did not build"),
        (refused_by_xla, "did not build.*incompatible"),
    ],
)
def test_falls_back_to_xla_and_says_why(change, why, monkeypatch, tmp_path):
    change(monkeypatch, tmp_path)
    monkeypatch.setattr(kernels, "_KEPT", [])
    kernels.available.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=f"(?s)XLA, which .* slower.*{why}"
        ) as said:
            edges = EdgeIndex([0], [1], 2)
        assert len(said) == 1
        assert edges.backend == "xla"
        attention = EdgeAttention(4, 1, 2, rngs=nnx.Rngs(0))
        assert np.isfinite(attention.energy(jnp.ones((2, 4)), edges=edges))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert EdgeIndex([0], [1], 2).backend == "xla"
        error = (ImportError, RuntimeError)
        with pytest.raises(error, match=f"(?s)^backend 'compiled'.*{why}"):
            EdgeIndex([0], [1], 2, backend="compiled")
    finally:
        kernels.available.cache_clear()
