"""The explorer: what it shows is what the models say, every dial is heard, and nothing is
compiled twice.
"""

import base64
import json
import re
import xml.dom.minidom
from io import BytesIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from et_nbdev import explore as room
from et_nbdev.attention import EnergyAttention
from et_nbdev.block import Block
from et_nbdev.dynamics import descend
from et_nbdev.energy import Energies, Energy, Scaled
from et_nbdev.explore import descend_graph, descend_picture, explore
from et_nbdev.graph.anomaly import AnomalyConfig, AnomalyEnergyTransformer
from et_nbdev.graph.data import Graph
from et_nbdev.graph.nodes import scaled
from et_nbdev.norm import EnergyLayerNorm
from et_nbdev.solvers import solve
from et_nbdev.testing import assert_close
from et_nbdev.vision.data import patchify
from et_nbdev.vision.model import ImageConfig, ImageEnergyTransformer, complete

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("compile_quickly")
C = ImageConfig(
    image_size=8, patch_size=2, channels=3, dim=12, num_heads=2, head_dim=4,
    num_memories=16, steps=3, step_size=0.3,
)  # fmt: skip
MODEL = ImageEnergyTransformer(C, rngs=nnx.Rngs(0))
PHOTOS = dict(
    zip("ab", np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8))
)
HALF = np.arange(16) % 2 == 0
A = np.arange(9)
PAIRS = np.r_[np.c_[A, (A + 1) % 9], np.c_[A, (A + 2) % 9], [[0, 5]]]
GRAPH = Graph(  # two rings and a chord, one node alone
    *np.r_[PAIRS, PAIRS[:, ::-1]].T,
    np.random.default_rng(0).normal(size=(10, 4)),
    np.r_[1, -1, np.zeros(8, int)],
)
NET = AnomalyEnergyTransformer(
    5,
    AnomalyConfig(
        dim=8, num_heads=2, head_dim=4, num_memories=8, hidden=8, steps=2, step_size=0.5
    ),
    rngs=nnx.Rngs(0),
)
GIVEN = scaled(GRAPH), NET.prepare(GRAPH)


class Apart(Energy):
    "A term of one's own, which is no sum over tokens."

    def energy(self, g):
        return jnp.sum(jnp.mean(g, -2) ** 2, -1) / 2


def with_own(block):
    return Block(block.norm, **block.terms, apart=Apart())


@pytest.fixture(scope="module")
def explorer():
    return explore(MODEL, PHOTOS)


@pytest.fixture(scope="module")
def walker():
    return explore(NET, GRAPH)


@pytest.fixture
def traces(monkeypatch):
    "Calls of the solver from Python: when a program is made, not when it runs."
    made = []
    counted = lambda *a, **k: made.append(1) or solve(*a, **k)
    monkeypatch.setattr(room, "solve", counted)
    return made


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


# ------------------------------------------------------------------------------------
# the numbers


def test_every_head_hears_the_dial_of_beta():
    "Under whatever name, in whatever wrapper, and once if two terms are one."
    near, far = (EnergyAttention(6, 2, 4, rngs=nnx.Rngs(i)) for i in range(2))
    block = Block(EnergyLayerNorm(6), near=near, far=Scaled(far, 0.5), again=near)
    turned = room._dialed(block, 3.0, dict.fromkeys(block.names, 1.0))
    assert_close(turned.near.term.beta, 3 * near.beta)
    assert_close(turned.far.term.term.beta, 3 * far.beta)
    assert turned.again.term is turned.near.term


@pytest.mark.parametrize("attention, memory", [(0, 2), (0.5, 0)])
def test_an_image_path_is_what_a_model_with_such_a_block_completes(attention, memory):
    weights = dict(attention=attention, memory=memory)
    dials = dict(alpha=0.4, beta=1.7, steps=4, weights=weights)
    under = np.kron(HALF.reshape(4, 4, 1), np.ones((2, 2, 1), bool))
    seen = np.where(under, np.nan, PHOTOS["a"] / 255)  # what is hidden is not looked at
    path = descend_picture(MODEL, seen, HALF, **dials)
    turned = nnx.clone(MODEL)
    turned.block.attention.log_beta = nnx.Param(
        jnp.log(1.7 * MODEL.block.attention.beta)
    )
    terms = {n: Scaled(t, weights[n]) for n, t in turned.block.terms.items()}
    turned.block = Block(turned.block.norm, **terms)
    options = dict(steps=4, step_size=0.4, path=True)
    want = complete(turned, PHOTOS["a"][None], HALF[None], **options)
    assert_close(path.completed, np.asarray(want.path[:, 0]), atol=1e-5)
    shown = patchify(path.completed, 2)
    assert_close(shown[:, HALF], patchify(path.tokens, 2)[:, HALF])
    pixels = PHOTOS["a"][None] / np.float32(255)
    same(shown[:1, ~HALF], patchify(pixels, 2)[:, ~HALF])
    x = MODEL.encode(patchify(2 * pixels - 1, 2), HALF[None])[0]
    for name, update in turned.block.updates(turned.block.norm(x)).items():
        e = np.asarray(want.energies[name][:, 0])
        assert_close(path.energies[name], e, rtol=1e-4, atol=1e-4)
        pull = np.linalg.norm(update, axis=-1)
        assert_close(path.pulls[name][0], pull, rtol=1e-4, atol=1e-4)
        assert (pull == 0).all() == (weights[name] == 0)


def test_solvers_are_those_that_are_named():
    dials = dict(alpha=5.0, steps=9)
    path = lambda name: descend_picture(MODEL, PHOTOS["b"], HALF, solver=name, **dials)
    of = lambda name: path(name).energies.total
    euler, *guarded = map(of, ("Euler", "backtracking", "Anderson"))
    for one in guarded:
        assert (np.diff(one) <= 1e-5 * np.abs(one).max()).all()
        assert np.abs(one / euler - 1).max() > 1e-3
    assert np.abs(guarded[0] / guarded[1] - 1).max() > 1e-3


@pytest.mark.parametrize(
    "course, words",
    [
        ([3.0, 2.0, 1.0], "E never rises"),
        ([3.0, 2.0, 2.5], "E rises in 1 of 2 steps"),
        ([3.0, np.nan, 1.0], "not finite"),
        ([3.0, np.inf, 1.0], "not finite"),
        ([0.0, 0.0, 0.0], "nothing to descend"),
    ],
)
def test_an_energy_is_not_said_to_fall_if_it_does_not(course, words):
    said = room._says(Energies(a=np.array(course)), 0)
    assert said.endswith(words) or words in said.partition(";")[2]
    assert ("never" in said) == (words == "E never rises")


def test_a_graph_path_is_what_the_model_says():
    block, (features, edges) = NET.blocks[0], GIVEN
    path = descend_graph(NET, *GIVEN)
    x = NET.encode(jnp.asarray(features))
    want = descend(block, x, 2, 0.5, edges=edges[0], states=True)[1]
    g = block.norm(want.states[1])
    for name, update in block.updates(g, edges=edges[0]).items():
        assert_close(path.energies[name], want.energies[name], rtol=1e-4)
        assert_close(path.pulls[name][1], np.linalg.norm(update, axis=-1), rtol=1e-4)
    # the attention that a node pays is all it has, and follows the scores
    into = edges[0].edge_list()[1]
    paid = np.array([np.bincount(into, w, 10) for w in path.weights])
    assert_close(paid[:, :9], np.ones((3, 9)), rtol=1e-4)
    assert (paid[:, 9] == 0).all() and np.ptp(path.weights[0]) > 0.01
    off = descend_graph(NET, *GIVEN, weights={"attention": 0})
    nothing = off.weights, off.pulls["attention"], off.shares["attention"]
    assert not any(map(np.any, nothing)) and off.pulls["memory"].all()


def test_no_turn_of_a_dial_makes_a_new_program(traces):
    "Not even of a path as long as one before."
    for turn in range(2):
        for solver in ("Euler", "Anderson"):
            weights = dict(attention=float(turn), memory=0.3 + turn)
            dials = dict(alpha=0.1 + turn, beta=0.5 + turn, steps=3)
            dials |= dict(solver=solver, weights=weights)
            descend_picture(MODEL, PHOTOS["a"], HALF ^ bool(turn), **dials)
            descend_graph(NET, *GIVEN, **dials)
        assert len(traces) == (0 if turn else 4)
        del traces[:]


# ------------------------------------------------------------------------------------
# the instrument


def test_what_is_shown_is_the_path_of_the_dials(explorer):
    explorer.reset.click()
    steps, own = 8 * C.steps, dict(attention=1.0, memory=1.0)
    trained = dict(alpha=0.3, beta=1.0, steps=steps, solver="Euler", weights=own)
    assert explorer.settings == trained
    first = explorer.view.value
    dials = dict(t=4, alpha=0.5, beta=2.0, solver="backtracking", picture="b")
    dials = [(getattr(explorer, name), value) for name, value in dials.items()]
    dials += [(explorer.weights["attention"], 0.0), (explorer.weights["memory"], 0.4)]
    for dial, value in dials:
        before, dial.value = explorer.view.value, value
        assert explorer.view.value != before
        image, hidden = PHOTOS[explorer.picture.value], explorer.occluded
        path = descend_picture(MODEL, image, hidden, **explorer.settings)
        same(explorer.path, path)
        t, total = explorer.t.value, path.energies.total
        assert (
            f"t = {t} of {steps}: E = {room._number(total[t])},"
            in explorer.message.value
        )
    explorer.picture.value = "a"
    explorer.reset.click()
    assert explorer.view.value == first


def test_a_click_hides_a_patch_and_one_computation_serves_many(explorer, monkeypatch):
    explorer.clear.click()
    assert not explorer.occluded.any()
    explorer.patches[6].value = True
    assert explorer.occluded.nonzero()[0].tolist() == [6]
    calls = []
    counted = lambda *a, **k: calls.append(1) or descend_picture(*a, **k)
    monkeypatch.setattr(room, "descend_picture", counted)
    explorer.random.click()
    first = explorer.occluded
    explorer.random.click()
    assert explorer.occluded.sum() == first.sum() == 8 and len(calls) == 2
    assert (explorer.occluded != first).any()
    explorer.t.value = 1
    assert len(calls) == 2  # time is a matter of looking
    explorer.reset.click()
    assert len(calls) == 3


def test_a_graph_is_walked(walker):
    senders, receivers = GIVEN[1][0].edge_list()
    dials = [(walker.node, 3), (walker.t, 0), (walker.alpha, 1.0), (walker.node, 9)]
    for dial, value in [*dials, (walker.weights["memory"], 0.0), (walker.node, 1)]:
        before, dial.value = walker.view.value, value
        assert walker.view.value != before
        same(walker.path, descend_graph(NET, *GIVEN, **walker.settings))
        node, near = walker.node.value, [b for _, b in walker.walk.options[1:]]
        assert f"Node {node} (" in walker.message.value
        p = walker.path.p[walker.t.value, node]
        assert f"anomalous {p:.3f};" in walker.message.value
        assert sorted(near) == sorted(senders[receivers == node])
    nearest = {b: walker.path.weights[-1, e] for b, e in walker.near.items()}
    assert near[0] == max(nearest, key=nearest.get)
    walker.walk.value = near[0]
    assert walker.node.value == near[0] and walker.walk.value is None
    walker.anomalous.click()
    assert walker.node.value == 0
    walker.normal.click()
    assert GRAPH.labels[walker.node.value] == 0


def test_a_term_of_ones_own_has_a_dial_a_map_and_a_curve():
    own, net = nnx.clone(MODEL), nnx.clone(NET)
    own.block, net.blocks = with_own(own.block), nnx.List([with_own(net.blocks[0])])
    explorer, walker = explore(own, PHOTOS), explore(net, GRAPH)
    assert list(explorer.weights) == list(walker.weights) == list(own.block.names)
    before = explorer.view.value
    assert before.count("<img") == 2 + 3 and before.count("<polyline") == 1 + 3
    explorer.weights["apart"].value = 0.0
    assert explorer.view.value != before and not explorer.path.pulls["apart"].any()
    # of a node's energy only what is a sum over nodes; of its pulls all
    assert set(walker.path.pulls) - set(walker.path.shares) == {"apart"}
    assert walker.view.value.count("<polyline") == 3 + 3


# ------------------------------------------------------------------------------------
# what is seen


def test_frames_have_words_for_every_picture(explorer, walker):
    halves = np.random.default_rng(0).random((10, 4, 2))
    pictured = explore(NET, GRAPH, halves)
    ring = pictured._frame(1)
    assert ring.count("<image") == 1 + len(pictured.near)
    for frame in (explorer.view.value, walker.view.value, ring):
        assert not re.search(r"https?:|(src|href)=\"(?!data:)", frame)
        assert frame.count("<img") == len(re.findall(r'<img [^>]*alt="[^"]+"', frame))
        for svg in re.findall(r"<svg.*?</svg>", frame, re.S):
            root = xml.dom.minidom.parseString(svg).firstChild
            assert root.getAttribute("aria-label")


def test_the_pictures_of_a_frame_are_those_of_the_path(explorer):
    path, t = explorer.path, 2
    frame = explorer._frame(t)
    files = map(base64.b64decode, re.findall(r'<img src="data:.*?,([^"]+)', frame))
    pictures = (np.asarray(Image.open(BytesIO(file))) for file in files)
    completed, attention, memory, tokens = pictures
    same(completed, np.round(255 * path.completed[t]).astype(np.uint8))
    same(tokens, np.round(255 * path.tokens[t]).astype(np.uint8))
    for shades, name in ((attention, "attention"), (memory, "memory")):
        by_size = shades.reshape(16, 3)[np.argsort(path.pulls[name][t])].astype(int)
        assert (np.diff(by_size.sum(1)) <= 0).all()  # the larger the darker
        assert (by_size[0] == 255).all() and by_size[-1].sum() < 200


def test_a_ring_shows_the_attention_that_is_paid(walker):
    walker.node.value = 4
    t = walker.t.value
    paid = sorted(walker.path.weights[t, list(walker.near.values())])
    ring = walker._ring(t)
    assert sorted(map(int, re.findall(r">(\d+)%<", ring))) == [
        round(100 * w) for w in paid
    ]
    widths = re.findall(r'<path [^>]*stroke-width="([\d.]+)"', ring)
    wanted = [1 + 22 * float(w) for w in paid]
    assert_close(sorted(map(float, widths)), wanted, atol=0.06)
    nodes = set(map(int, re.findall(r"<title>node (\d+), \w+, p = ", ring)))
    assert nodes == {4, *walker.near}


# ------------------------------------------------------------------------------------
# misuse

PICTURE = lambda **changed: descend_picture(
    **dict(model=MODEL, image=PHOTOS["a"], occluded=HALF) | changed
)
OTHER = AnomalyEnergyTransformer(5, NET.config, kinds=2, rngs=nnx.Rngs(0))
ODD = dict(weights={"apart": 1})
REFUSED = [
    ("images: .*divide by 255", lambda: PICTURE(image=PHOTOS["a"] / 1.0)),
    (r"image: .*\(8, 8, 3\), got \(4, 8, 3\)", lambda: PICTURE(image=PHOTOS["a"][:4])),
    (r"occluded: .*, got int64\(16,\)", lambda: PICTURE(occluded=HALF.astype(int))),
    ("model: .* got AnomalyEnergy", lambda: PICTURE(model=NET)),
    ("model: .* got AnomalyEnergy", lambda: explore(NET)),
    (r"pictures\['half'\]: ", lambda: explore(MODEL, {"half": PHOTOS["a"][:4]})),
    ("weights: .* attention, memory, got {'apart'}", lambda: PICTURE(**ODD)),
    ("weights: .* got {'apart'}", lambda: descend_graph(NET, *GIVEN, **ODD)),
    (r"F = 5, got \(10, 3\)", lambda: descend_graph(NET, GIVEN[0][:, :3], GIVEN[1])),
    ("with one block, got .* with 2", lambda: descend_graph(OTHER, *GIVEN)),
    ("N = 10, got", lambda: explore(NET, GRAPH, np.zeros((9, 2, 2)))),
]  # fmt: skip


def test_what_does_not_fit_is_named():
    for words, call in REFUSED:
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_the_notebook_keeps_no_widgets():
    "A widget without its kernel is an error message."
    notebook = json.loads((ROOT / "nbs/50_explorer.ipynb").read_text(encoding="utf-8"))
    outputs = (o for cell in notebook["cells"] for o in cell.get("outputs", []))
    kinds = {kind for output in outputs for kind in output.get("data", {})}
    assert not any("widget" in kind for kind in kinds)


# ------------------------------------------------------------------------------------
# in a real browser


def test_drawing_across_patches_presses_them(browser):
    "Buttons as ipywidgets makes them; a click on one turns it."
    tab = browser.new_page(viewport=dict(width=400, height=300))
    button = (
        '<button class="et-patch jupyter-button" style="width:50px;height:50px"'
        " onclick=\"this.classList.toggle('mod-active')\"></button>"
    )
    files = {
        n: (ROOT / f"et_nbdev/explorer/touch.{n}").read_text() for n in ("css", "js")
    }
    tab.set_content(
        f"<body style='margin:0'><div style='display:flex'>{4 * button}</div>"
        f"<style>{files['css']}</style><script>{files['js']}</script>"
    )
    pressed = lambda: tab.evaluate(
        "[...document.querySelectorAll('button')]"
        ".map(b => +b.classList.contains('mod-active'))"
    )

    def draw(start, end):
        tab.mouse.move(start, 25)
        tab.mouse.down()
        tab.mouse.move(end, 25, steps=12)
        tab.mouse.up()

    tab.mouse.click(25, 25)
    assert pressed() == [1, 0, 0, 0]
    draw(75, 175)  # starts on a shown patch: hides
    assert pressed() == [1, 1, 1, 1]
    draw(25, 125)  # starts on a hidden one: shows
    assert pressed() == [0, 0, 0, 1]
    tab.close()
