// A walk through a graph: every node is half a digit, its neighbors stand around it,
// and its energy falls in this browser. Press a neighbor to stand there instead.

import { readSafetensors } from "./engine.js";
import { GraphEnergyTransformer } from "./graph.js";
import { button, curveOf, drawCurves, element, fetched } from "./parts.js";
import { rounded, slider, whenSeen } from "./parts.js";

const STEPS = 6; // as far as time can be dragged
const START = 1279; // the eight of the chapter
const CROWDED = 16; // more neighbors than these stand in two rings
const KEY = "Line: attention from the middle. Bar: probability p. Framed: eights.";

const percent = (v) => `${Math.round(100 * v)} %`;

function svg(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const name in attributes) made.setAttribute(name, attributes[name]);
  return made;
}

class Walk {
  constructor(root) {
    this.trail = [];
    this.paths = new Map(); // descents, with attention and without
    const change = () => this.show();
    this.lines = svg("svg", { viewBox: "0 0 100 100", "aria-hidden": "true" });
    const named = { role: "group", "aria-label": "A node and its neighbors" };
    this.map = element("div", { className: "walk-map", set: named });
    this.time = slider("time t", { min: 0, max: STEPS, value: 2 }, change);
    const box = { type: "checkbox", checked: true, onchange: change };
    this.attentive = element("input", box);
    this.back = button("Back", () => this.stand(this.trail.pop()));
    [this.energy, this.chance] = [curveOf(110), curveOf(110)];
    const polite = { "aria-live": "polite" };
    this.status = element("p", { className: "play-status", set: polite });
    const buttons = [
      button("Another eight", () => this.jump((label) => label === 1)),
      button("Any node", () => this.jump(() => true)),
      this.back,
    ];
    const controls = [
      element("div", { className: "play-buttons" }, ...buttons),
      this.time.row,
      element("label", {}, "attention", this.attentive),
      this.energy,
      this.chance,
      this.status,
    ];
    const key = element("p", { className: "walk-key", textContent: KEY });
    root.replaceChildren(
      element("div", { className: "play-picture" }, this.map, key),
      element("div", { className: "play-controls" }, ...controls),
    );
  }

  /** Load the model and its graph, once. */
  wake() {
    this.waking ??= this.start().catch((error) => {
      this.waking = null;
      this.status.textContent = `${error.message}. Is the page opened from a server?`;
      throw error;
    });
    return this.waking;
  }

  async start() {
    this.status.textContent = "Loading the graph …";
    const bytes = await (await fetched("digits-graph.safetensors")).arrayBuffer();
    this.net = new GraphEnergyTransformer(readSafetensors(bytes));
    this.stand(START);
  }

  /** All nodes at every time, with attention or without: computed once each. */
  get path() {
    const on = this.attentive.checked;
    if (!this.paths.has(on)) this.paths.set(on, this.net.descend(STEPS, on));
    return this.paths.get(on);
  }

  /** To some other node with such a label. */
  async jump(wanted) {
    await this.wake();
    const nodes = [...this.net.labels.keys()];
    const found = nodes.filter((n) => n !== this.node && wanted(this.net.labels[n]));
    this.go(found[Math.floor(Math.random() * found.length)]);
  }

  /** To another node; the way back is kept. */
  go(node) {
    this.trail.push(this.node);
    this.stand(node);
  }

  stand(node) {
    const walked = this.map.contains(document.activeElement);
    const { start, senders } = this.net.graph;
    const count = start[node + 1] - start[node];
    const crowded = count > CROWDED;
    const places = crowded ? count + (count % 2) : count; // an even number in two rings
    this.near = Array.from({ length: count }, (_, i) => {
      const edge = start[node] + i;
      const turn = (2 * Math.PI * i) / places;
      const far = crowded && i % 2 ? 28 : 43;
      const [x2, y2] = [50 + far * Math.sin(turn), 50 - far * Math.cos(turn)];
      const step = button("", () => this.go(senders[edge]));
      [step.style.left, step.style.top] = [`${x2}%`, `${y2}%`];
      const line = svg("line", { x1: 50, y1: 50, x2, y2 });
      return { edge, line, ...this.drawn(senders[edge], step) };
    });
    this.here = this.drawn(node, element("div", { className: "walk-here" }));
    this.lines.replaceChildren(...this.near.map(({ line }) => line));
    const roots = this.near.map(({ root }) => root);
    this.map.replaceChildren(this.lines, this.here.root, ...roots);
    this.back.disabled = this.trail.length === 0;
    // the keyboard goes on where it came from
    const from = this.near.find((near) => near.node === this.node) ?? this.near[0];
    if (walked) from.root.focus();
    this.node = node;
    this.show();
  }

  /** A node in its place: a picture, and a bar for its probability. */
  drawn(node, root) {
    const unseen = { "aria-hidden": "true" }; // what holds it is named
    const picture = element("canvas", { width: 4, height: 8, set: unseen });
    const image = new ImageData(4, 8);
    for (let i = 0; i < 32; i++)
      image.data[4 * i + 3] = (255 * this.net.pixels[32 * node + i]) / 16;
    picture.getContext("2d").putImageData(image, 0, 0);
    const bar = element("i");
    const eight = this.net.labels[node] === 1;
    root.classList.toggle("walk-eight", eight);
    root.append(picture, element("span", { className: "walk-bar" }, bar));
    return { node, root, bar, name: `Node ${node}, ${eight ? "an" : "no"} eight` };
  }

  show() {
    const t = +this.time.input.value;
    this.time.said.textContent = t;
    if (!this.net) return;
    const { attention, memory, p } = this.path[t];
    const paid = ({ edge }) => attention.P?.[edge] ?? 0;
    for (const near of this.near) {
      near.line.style.strokeWidth = 0.4 + 5 * paid(near);
      near.line.style.opacity = 0.25 + 0.75 * paid(near);
      near.bar.style.height = `${100 * p[near.node]}%`;
      const how = `p = ${p[near.node].toFixed(2)}, attention ${percent(paid(near))}`;
      near.root.title = `${near.name}: ${how}`;
      near.root.setAttribute("aria-label", near.root.title);
    }
    const { node, here, near } = this;
    here.bar.style.height = `${100 * p[node]}%`;
    this.drawCurves(t);
    const [a, m] = [attention.energies[node], memory.energies[node]];
    const depth = this.net.config.steps;
    const beyond = t > depth ? `, beyond the ${depth} steps it was trained for` : "";
    const most = percent(Math.max(...near.map(paid)));
    this.status.textContent =
      `${here.name}: p = ${p[node].toFixed(3)} at t = ${t}${beyond}. ` +
      `E = ${rounded(a + m)}: attention ${rounded(a)}, memory ${rounded(m)}. ` +
      `${near.length} neighbors${attention.P ? `, at most ${most} on one` : ""}.`;
  }

  /** Energies of the node from where they started, and its probability. */
  drawCurves(t) {
    const { node, path } = this;
    const [a, m] = ["attention", "memory"].map((term) =>
      path.map((at) => at[term].energies[node]),
    );
    const p = path.map((at) => at.p[node]);
    const E = a.map((v, at) => v + m[at]);
    const fallen = (of) => of.map((v) => v - of[0]);
    const curves = [
      ["E", "text", "#000000", fallen(E)],
      ["attention", "note", "#0072b2", fallen(a)],
      ["memory", "warning", "#d55e00", fallen(m)],
    ];
    const chance = [["p", "accent", "#d55e00", p]];
    const draw = (canvas, title, lines, low, high, said, values) => {
      drawCurves(canvas, title, lines, { t, last: STEPS, low, high });
      const list = values.map((v) => v.toFixed(3)).join(", ");
      canvas.setAttribute("aria-label", `${said} at t = 0, 1, …: ${list}`);
    };
    draw(this.energy, "its energy, from its start", curves, -1, 0, "Energy", E);
    draw(this.chance, "probability of an eight", chance, 0, 1, "Probability", p);
  }
}

for (const root of document.querySelectorAll(".et-walk")) {
  const walk = new Walk(root);
  whenSeen(
    root,
    () => walk.wake(),
    () => walk.show(),
  );
}
