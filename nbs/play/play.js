// Something to play with: hide patches of a photograph or a digit, let the energy fall,
// and see the picture fill in. Everything runs in this browser; weights are loaded when
// wanted.

import { ImageEnergyTransformer, readSafetensors } from "./engine.js";
import { button, curveOf, drawCurves, element, fetched, rounded, slider, whenSeen } from "./parts.js";

const HIDDEN = "#c8a2c8";
const PACE = 80; // milliseconds that a step stays on the screen, at least
const STILL = matchMedia("(prefers-reduced-motion: reduce)").matches; // only the end

// The models, with their pictures side by side in one file, and how far time can be dragged.
const MODELS = [
  {
    title: "photographs, 128 × 128",
    file: "photographs",
    last: 48,
    name: (i) => `photograph ${i + 1}`,
  },
  {
    title: "digits, 8 × 8",
    file: "digits",
    last: 12,
    name: (i) => `a handwritten ${i}`,
  },
];

/** The pictures of a sheet as pixels in [0, 1] (S, S, C). */
async function picturesOf(name, config) {
  const sheet = await createImageBitmap(await (await fetched(`${name}.png`)).blob());
  const count = sheet.width / sheet.height;
  return Array.from({ length: count }, (_, i) => pixelsOf(sheet, config, i));
}

/** The square number `i` of a picture, or its middle, shrunk to S pixels a side. */
function pixelsOf(picture, { image_size: S, channels: C }, i = undefined) {
  const side = Math.min(picture.width, picture.height);
  const left = i === undefined ? (picture.width - side) / 2 : i * side;
  const top = (picture.height - side) / 2;
  const canvas = element("canvas", { width: S, height: S });
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, left, top, side, side, 0, 0, S, S);
  const { data } = context.getImageData(0, 0, S, S);
  const gray = (at) => (0.299 * data[at] + 0.587 * data[at + 1] + 0.114 * data[at + 2]) / 255;
  return Float32Array.from({ length: S * S * C }, (_, at) => {
    return C === 1 ? gray(4 * at) : data[4 * Math.floor(at / 3) + (at % 3)] / 255;
  });
}

/** A model and its pictures. */
async function load({ file }) {
  const bytes = await (await fetched(`${file}.safetensors`)).arrayBuffer();
  const net = new ImageEnergyTransformer(readSafetensors(bytes));
  return { net, pictures: await picturesOf(file, net.config) };
}

class Player {
  constructor(root) {
    this.model = MODELS[0];
    this.net = null;
    this.path = [];
    this.t = 0;
    this.build(root);
  }

  // --- the page ---

  build(root) {
    const weight = () => this.descend();
    this.canvas = element("canvas", {
      width: 384,
      height: 384,
      tabIndex: 0,
      set: {
        role: "application",
        "aria-label": "Picture in patches. Press to hide or show one; with the keyboard: arrows and space.",
      },
    });
    this.curve = curveOf(150);
    const range = { min: 0, max: this.model.last, value: 0 };
    this.time = slider("time t", range, (e) => this.drag(+e.target.value));
    this.attention = slider("attention ×", { min: 0, max: 2, step: 0.1, value: 1 }, weight);
    this.memory = slider("memory ×", { min: 0, max: 2, step: 0.1, value: 1 }, weight);
    const own = element("input", { type: "file", accept: "image/*", hidden: true });
    own.onchange = () => {
      if (own.files.length) this.load(own.files[0]);
      own.value = ""; // so that the same file can be chosen again
    };
    this.pictures = element("div", { className: "play-pictures" });
    const models = element("select", { onchange: () => this.use(MODELS[models.selectedIndex]) });
    models.append(...MODELS.map(({ title }) => element("option", { textContent: title })));
    this.status = element("p", { className: "play-status", set: { "aria-live": "polite" } });
    root.replaceChildren(
      element("div", { className: "play-picture" }, this.canvas, this.pictures),
      element(
        "div",
        { className: "play-controls" },
        element("label", {}, "pictures", models),
        element(
          "div",
          { className: "play-buttons" },
          button("Let E fall", () => this.descend(true)),
          button("Hide half", () => this.hideHalf()),
          button("Show all", () => this.hide(() => false)),
          button("Own picture …", () => own.click()),
          own,
        ),
        this.time.row,
        this.attention.row,
        this.memory.row,
        this.curve,
        this.status,
      ),
    );
    this.listen();
    this.say("Press a patch to hide it, or “Hide half”.");
  }

  listen() {
    const patch = ({ offsetX, offsetY }) => {
      const at = (offset) =>
        Math.min(this.side - 1, Math.max(0, Math.floor((offset / this.canvas.clientWidth) * this.side)));
      return at(offsetY) * this.side + at(offsetX);
    };
    const toggle = (n) => this.hide((hidden, i) => (i === n ? !hidden : hidden));
    let drawing = null; // what patches under a moving pointer become
    let before = null; // where it was, and what was hidden when it went down
    this.canvas.onpointerdown = async (event) => {
      await this.wake();
      const n = patch(event);
      drawing = !this.masked[n];
      before = { n, masked: this.masked };
      toggle(n);
    };
    this.canvas.onpointermove = (event) => {
      if (drawing === null || !event.buttons) return;
      const n = patch(event);
      if (n === before.n) return;
      const crossed = new Set(this.between(before.n, n));
      before.n = n;
      const changed = this.masked.some((hidden, i) => crossed.has(i) && hidden !== drawing);
      if (changed) this.hide((hidden, i) => (crossed.has(i) ? drawing : hidden));
    };
    window.addEventListener("pointerup", () => (drawing = null));
    // the page is scrolled by this touch: it was not meant for the picture
    this.canvas.onpointercancel = () => {
      if (drawing !== null) this.hide((_, i) => before.masked[i]);
      drawing = null;
    };
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: "up", ArrowDown: "down" };
    this.canvas.onkeydown = async (event) => {
      if (!(event.key in moves) && event.key !== " ") return;
      event.preventDefault();
      await this.wake();
      const step = { up: -this.side, down: this.side }[moves[event.key]] ?? moves[event.key];
      if (event.key === " ") return toggle(this.cursor);
      this.cursor = (this.cursor + step + this.net.N) % this.net.N;
      this.draw();
    };
  }

  /** The patches on a straight line from one to another. */
  between(from, to) {
    const place = (n) => [n % this.side, Math.floor(n / this.side)];
    const [[x, y], [u, v]] = [place(from), place(to)];
    const count = Math.max(Math.abs(u - x), Math.abs(v - y), 1);
    return Array.from({ length: count + 1 }, (_, i) => {
      const along = (a, b) => Math.round(a + ((b - a) * i) / count);
      return along(y, v) * this.side + along(x, u);
    });
  }

  say(text) {
    this.status.textContent = text;
  }

  // --- the model ---

  /** Load weights and pictures, once. */
  wake() {
    if (this.awake !== this.model) {
      this.awake = this.model;
      this.awakening = this.start(this.model);
    }
    return this.awakening;
  }

  /** Play with another model. */
  use(model) {
    cancelAnimationFrame(this.frame);
    this.model = model;
    return this.wake();
  }

  async start(model) {
    this.say("Loading the model …");
    model.loading ??= load(model);
    const { net, pictures } = await model.loading.catch((error) => {
      this.awake = model.loading = null;
      this.say(`${error.message}. Is the page opened from a server?`);
      throw error;
    });
    if (model !== this.model) return; // another one was chosen meanwhile
    this.net = net;
    this.time.input.max = this.last = model.last;
    this.side = net.side;
    this.cursor = 0;
    this.masked = Array(net.N).fill(false);
    const choices = pictures.map((pixels, i) => {
      const set = { "aria-label": model.name(i) };
      const choose = element("button", { type: "button", set });
      choose.append(this.thumbnail(pixels));
      choose.onclick = () => this.choose(pixels);
      return choose;
    });
    this.pictures.replaceChildren(...choices);
    this.choose(pictures[0]);
  }

  thumbnail(pixels) {
    const S = this.net.config.image_size;
    const canvas = element("canvas", { width: S, height: S });
    canvas.getContext("2d").putImageData(this.image(pixels), 0, 0);
    return canvas;
  }

  async load(file) {
    await this.wake();
    try {
      const picture = await createImageBitmap(file);
      this.choose(pixelsOf(picture, this.net.config));
    } catch {
      this.say(`${file.name} is not a picture that this browser can read.`);
    }
  }

  choose(pixels) {
    this.pixels = pixels;
    this.hideHalf();
  }

  async hideHalf() {
    await this.wake();
    const order = Array.from({ length: this.net.N }, (_, n) => [Math.random(), n]);
    const half = new Set(order.sort(([a], [b]) => a - b).slice(0, this.net.N / 2).map(([, n]) => n));
    this.hide((_, n) => half.has(n));
  }

  async hide(rule) {
    await this.wake();
    this.masked = this.masked.map(rule);
    this.descend();
  }

  /** Start again at t = 0, and from there step by step, at most one step a frame. */
  async descend(play = true) {
    await this.wake();
    this.x = this.net.encode(this.net.patchify(this.pixels), this.masked);
    this.path = [];
    this.playing = play;
    this.goal = this.net.config.steps;
    this.look();
    this.show(0);
    this.shown = performance.now();
    cancelAnimationFrame(this.frame);
    this.next();
  }

  next() {
    this.frame = requestAnimationFrame((now) => this.advance(now));
  }

  look() {
    this.seen = this.net.look(this.x);
    const { attention, memory } = this.seen;
    const pixels = this.net.completed(this.pixels, this.masked, this.net.decode(this.x));
    this.path.push({ attention: attention.energy, memory: memory.energy, pixels });
  }

  advance(now) {
    if (this.path.length <= this.goal) this.step();
    const next = STILL ? this.goal : this.t + 1;
    const ready = next <= Math.min(this.path.length - 1, this.goal);
    if (this.playing && ready && now - this.shown >= PACE) {
      this.show(next);
      this.shown = now;
    }
    this.playing &&= this.t < this.goal;
    if (this.playing || this.path.length <= this.goal) this.next();
  }

  /** Time is dragged: to a state that is known, or on to one that is not yet. */
  async drag(t) {
    await this.wake();
    this.playing = t >= this.path.length;
    if (!this.playing) return this.show(t);
    this.goal = t;
    cancelAnimationFrame(this.frame);
    this.next();
  }

  step() {
    const weights = { attention: +this.attention.input.value, memory: +this.memory.input.value };
    this.x = this.net.step(this.x, this.seen, this.path.length - 1, weights);
    this.look();
    this.drawCurve();
  }

  // --- drawing ---

  show(t) {
    this.t = Math.min(t, this.path.length - 1);
    // a thumb that was dragged ahead stays there
    this.time.input.value = this.playing && this.goal > this.net.config.steps ? this.goal : this.t;
    for (const { input, said } of [this.time, this.attention, this.memory]) said.textContent = input.value;
    this.draw();
    this.drawCurve();
    const { attention, memory } = this.path[this.t];
    const E = rounded(attention + memory);
    const depth = this.net.config.steps;
    const beyond = this.t > depth ? `, beyond T = ${depth}` : "";
    const hidden = this.masked.filter(Boolean).length;
    // read out where the descent ends, not at every step of it
    this.status.setAttribute("aria-live", this.playing && this.t < this.goal ? "off" : "polite");
    this.say(`t = ${this.t}: E = ${E}, ${hidden} of ${this.net.N} patches hidden${beyond}`);
  }

  image(pixels) {
    const { image_size: S, channels: C } = this.net.config;
    const image = new ImageData(S, S);
    for (let at = 0; at < S * S; at++) {
      for (let c = 0; c < 3; c++) image.data[4 * at + c] = 255 * pixels[C * at + (c % C)];
      image.data[4 * at + 3] = 255;
    }
    return image;
  }

  draw() {
    const context = this.canvas.getContext("2d");
    const { width } = this.canvas;
    const size = width / this.side;
    const shown = this.path[this.t].pixels;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.thumbnail(shown), 0, 0, width, width);
    const corner = (n) => [(n % this.side) * size, Math.floor(n / this.side) * size];
    context.lineWidth = 1;
    context.globalAlpha = this.t === 0 ? 1 : 0.4; // that the picture be seen
    this.masked.forEach((hidden, n) => {
      if (!hidden) return;
      const [x, y] = corner(n);
      context.fillStyle = context.strokeStyle = HIDDEN;
      if (this.t === 0) context.fillRect(x, y, size, size);
      else context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    });
    context.globalAlpha = 1;
    if (document.activeElement === this.canvas) {
      const [x, y] = corner(this.cursor);
      context.strokeStyle = "#d55e00";
      context.lineWidth = 3;
      context.strokeRect(x + 1.5, y + 1.5, size - 3, size - 3);
    }
  }

  /** E and its two terms over time, each from where it started. */
  drawCurve() {
    const from = this.path[0];
    const over = (of) => this.path.map((p) => of(p) - of(from));
    const curves = [
      ["E", "text", "#000000", over((p) => p.attention + p.memory)],
      ["attention", "note", "#0072b2", over((p) => p.attention)],
      ["memory", "warning", "#d55e00", over((p) => p.memory)],
    ];
    const range = { t: this.t, last: this.last, low: -1, high: 0 };
    drawCurves(this.curve, "energy, from its start", curves, range);
    const total = this.path.map((p) => (p.attention + p.memory).toFixed(1));
    this.curve.setAttribute("aria-label", `Energy at t = 0, 1, …: ${total.join(", ")}`);
  }
}

for (const root of document.querySelectorAll(".et-play")) {
  const player = new Player(root);
  whenSeen(
    root,
    () => player.wake(),
    () => player.path.length && player.drawCurve(),
  );
}
