// The Energy Transformer as far as a browser needs it: weights from a safetensors file,
// the energies of the tokens, one step downhill; and for pictures, the way to pixels.
// Arrays are Float32Array, row by row; the names are those of the Python library.

const EPS = 1e-5; // of the layer norm and of normalized heads

// --- weights ---

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const ARRAYS = { F32: Float32Array, U16: Uint16Array, U8: Uint8Array };

/** Tensors by name and the model's configuration, from the bytes of a file. */
export function readSafetensors(buffer) {
  const view = new DataView(buffer);
  const size = Number(view.getBigUint64(0, true));
  const text = new TextDecoder().decode(new Uint8Array(buffer, 8, size));
  const { __metadata__: about, ...entries } = JSON.parse(text);
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets }] of Object.entries(entries)) {
    const [start, end] = data_offsets.map((offset) => 8 + size + offset);
    const bytes = buffer.slice(start, end);
    if (dtype === "F16")
      tensors[name] = { shape, data: Float32Array.from(new Uint16Array(bytes), fromHalf) };
    else if (dtype in ARRAYS) tensors[name] = { shape, data: new ARRAYS[dtype](bytes) };
    else throw new Error(`${name}: expected F32, F16, U16 or U8, got ${dtype}`);
  }
  const { config } = JSON.parse(about.meta);
  return { tensors, config: config.model ?? config };
}

// --- matrix products ---

/** out += A B, with A (m, k), B (k, n) and out (m, n): four rows of B at a time. */
export function multiply(out, A, B, m, k, n) {
  for (let i = 0; i < m; i++) {
    const row = i * n;
    let l = 0;
    for (; l + 3 < k; l += 4) {
      const at = i * k + l;
      const a = A[at];
      const b = A[at + 1];
      const c = A[at + 2];
      const d = A[at + 3];
      if (a === 0 && b === 0 && c === 0 && d === 0) continue; // memories at rest
      let from = l * n;
      for (let j = row; j < row + n; j++, from++)
        out[j] += a * B[from] + b * B[from + n] + c * B[from + 2 * n] + d * B[from + 3 * n];
    }
    for (; l < k; l++) {
      const a = A[i * k + l];
      for (let j = 0; j < n; j++) out[row + j] += a * B[l * n + j];
    }
  }
}

/** Rounding as in Python: a half goes to the even neighbor. */
export function roundHalfToEven(x) {
  const low = Math.floor(x);
  return x - low === 0.5 ? low + (low % 2) : Math.round(x);
}

export function transposed(A, m, n) {
  const out = new Float32Array(m * n);
  for (let i = 0; i < m; i++) for (let j = 0; j < n; j++) out[j * m + i] = A[i * n + j];
  return out;
}

// --- parts of the model ---

export const softplus = (rho) => (rho > 20 ? rho : Math.log1p(Math.exp(rho)));

/** γ (x − mean) / std + δ for every token of width D. */
export function layerNorm(x, gamma, delta, D) {
  const g = new Float32Array(x.length);
  for (let at = 0; at < x.length; at += D) {
    let mean = 0;
    let square = 0;
    for (let i = 0; i < D; i++) mean += x[at + i] / D;
    for (let i = 0; i < D; i++) square += (x[at + i] - mean) ** 2 / D;
    const scale = gamma / Math.sqrt(square + EPS);
    for (let i = 0; i < D; i++) g[at + i] = scale * (x[at + i] - mean) + delta[i];
  }
  return g;
}

/** Divide every row of length Y by its root mean square; returns these. */
function normalizeRows(w, Y) {
  const roots = new Float32Array(w.length / Y);
  for (let n = 0; n < roots.length; n++) {
    let square = 0;
    for (let i = 0; i < Y; i++) square += w[n * Y + i] ** 2 / Y;
    roots[n] = Math.sqrt(square + EPS);
    for (let i = 0; i < Y; i++) w[n * Y + i] /= roots[n];
  }
  return roots;
}

/** The Jacobian of that division, applied to the pulls in place. */
function throughNormalization(pull, rows, roots, Y) {
  for (let n = 0; n < roots.length; n++) {
    let along = 0;
    for (let i = 0; i < Y; i++) along += (pull[n * Y + i] * rows[n * Y + i]) / Y;
    for (let i = 0; i < Y; i++)
      pull[n * Y + i] = (pull[n * Y + i] - rows[n * Y + i] * along) / roots[n];
  }
}

/** Soft match of every query of a head, and its pulls: −β⁻¹ Σ log Σ exp(β K·Q + b). */
function attend(Q, K, beta, bias, N, Y) {
  const pullQ = new Float32Array(N * Y);
  const pullK = new Float32Array(N * Y);
  const P = new Float32Array(N);
  let energy = 0;
  for (let c = 0; c < N; c++) {
    let top = -Infinity;
    for (let b = 0; b < N; b++) {
      P[b] = -Infinity;
      if (b === c) continue;
      let score = 0;
      for (let i = 0; i < Y; i++) score += K[b * Y + i] * Q[c * Y + i];
      P[b] = beta * score + (bias ? bias(c, b) : 0);
      if (P[b] > top) top = P[b];
    }
    let sum = 0;
    for (let b = 0; b < N; b++) sum += P[b] = Math.exp(P[b] - top);
    energy -= (top + Math.log(sum)) / beta;
    for (let b = 0; b < N; b++) {
      const p = P[b] / sum;
      if (p < 1e-20) continue; // too far away
      for (let i = 0; i < Y; i++) {
        pullQ[c * Y + i] += p * K[b * Y + i];
        pullK[b * Y + i] += p * Q[c * Y + i];
      }
    }
  }
  return { energy, pullQ, pullK };
}

/** The part of a force that turns a token, and does not stretch it. */
function turning(x, force) {
  const mean = (entry) => x.reduce((sum, _, i) => sum + entry(i), 0) / x.length;
  const [middle, push] = [mean((i) => x[i]), mean((i) => force[i])];
  const along =
    mean((i) => (x[i] - middle) * force[i]) / (mean((i) => (x[i] - middle) ** 2) + EPS);
  return force.map((u, i) => u - push - along * (x[i] - middle));
}

// --- the model ---

/** Tokens, and a block of attention and ReLU memories. A model says how many tokens, N,
 * and how they begin. */
export class EnergyTransformer {
  constructor({ tensors, config }, N) {
    const get = (name) => tensors[`params.${name}`]?.data;
    const [D, H, Y] = [config.dim, config.num_heads, config.head_dim];
    Object.assign(this, { config, N, get });
    this.gamma = softplus(get("block.norm.rho")[0]);
    this.rich = config.recipe === "tiny-imagenet"; // normalized heads, signs
    this.keyTerm = true; // without, the force is no gradient of the energy
    this.heads = Array.from({ length: H }, (_, h) => {
      const part = (name) => get(name).subarray(h * D * Y, (h + 1) * D * Y);
      const Wq = part("block.attention.Wq");
      const Wk = part("block.attention.Wk");
      const WqT = transposed(Wq, D, Y);
      const WkT = transposed(Wk, D, Y);
      const sign = h < H - (config.repelling ?? 0) ? 1 : -1;
      return { Wq, Wk, WqT, WkT, sign, beta: this.betaOf(h), bias: this.biasOf(h) };
    });
    this.xiT = transposed(get("block.memory.xi"), config.num_memories, D);
    const negative = this.rich ? config.num_memories / 4 : 0;
    this.numPositive = config.num_memories - roundHalfToEven(negative);
  }

  betaOf(head) {
    const learned = this.get("block.attention.log_beta");
    return learned ? Math.exp(learned[head]) : this.config.head_dim ** -0.5;
  }

  /** The bias of a head's scores: none, or a function of query and key. */
  biasOf() {
    return null;
  }

  /** Energy of the attention, and −∂E/∂g (N, D). */
  attention(g) {
    const { N } = this;
    const { dim: D, head_dim: Y } = this.config;
    const update = new Float32Array(N * D);
    let energy = 0;
    for (const { Wq, Wk, WqT, WkT, sign, beta, bias } of this.heads) {
      const Q = new Float32Array(N * Y);
      const K = new Float32Array(N * Y);
      multiply(Q, g, Wq, N, D, Y);
      multiply(K, g, Wk, N, D, Y);
      const roots = this.rich ? [normalizeRows(Q, Y), normalizeRows(K, Y)] : null;
      const found = attend(Q, K, beta, bias, N, Y);
      if (roots) {
        throughNormalization(found.pullQ, Q, roots[0], Y);
        throughNormalization(found.pullK, K, roots[1], Y);
      }
      const pulls = [[found.pullQ, WqT]];
      if (this.keyTerm) pulls.push([found.pullK, WkT]);
      for (const [pull, WT] of pulls) multiply(update, pull.map((v) => sign * v), WT, N, Y, D);
      energy += sign * found.energy;
    }
    return { energy, update };
  }

  /** Energy of the memories, and −∂E/∂g (N, D). */
  memory(g) {
    const { N, xiT, numPositive } = this;
    const { dim: D, num_memories: K } = this.config;
    const hidden = new Float32Array(N * K);
    multiply(hidden, g, xiT, N, D, K);
    const threshold = this.get("block.memory.threshold");
    let energy = 0;
    for (let at = 0; at < hidden.length; at++) {
      const mu = at % K;
      const r = Math.max(0, hidden[at] + (threshold ? threshold[mu] : 0));
      const sign = mu < numPositive ? 1 : -1;
      energy -= (sign * r * r) / 2;
      hidden[at] = sign * r;
    }
    const update = new Float32Array(N * D);
    multiply(update, hidden, this.get("block.memory.xi"), N, K, D);
    return { energy, update };
  }

  /** g, both energies, and the update of each: all that is known at x. */
  look(x) {
    const g = layerNorm(x, this.gamma, this.get("block.norm.delta"), this.config.dim);
    return { g, attention: this.attention(g), memory: this.memory(g) };
  }

  /** The next state from `look(x)`; both terms count as `weights` says. */
  step(x, seen, t, weights = { attention: 1, memory: 1 }) {
    const D = this.config.dim;
    const next = new Float32Array(x.length);
    const sizes = this.get("solver.c") && this.channelSizes(seen.g, t);
    for (let n = 0; n < this.N; n++) {
      const own = (array) => array.subarray(n * D, (n + 1) * D);
      const memory = own(seen.memory.update);
      const force = own(seen.attention.update).map(
        (u, i) => weights.attention * u + weights.memory * memory[i],
      );
      const size = sizes && own(sizes);
      const move = sizes
        ? turning(own(x), force).map((u, i) => size[i] * u)
        : force.map((u) => this.stepSize(t) * u);
      next.set(own(x).map((entry, i) => entry + move[i]), n * D);
    }
    return next;
  }

  /** α_t sigmoid(c_t + W_t g): the size of step t for every token and channel. */
  channelSizes(g, t) {
    const D = this.config.dim;
    const [c, W] = [this.get("solver.c"), this.get("solver.W")];
    const now = Math.min(t, c.length / D - 1);
    const map = W.length > D * D ? W.subarray(now * D * D, (now + 1) * D * D) : W;
    const sizes = new Float32Array(g.length);
    multiply(sizes, g, transposed(map, D, D), this.N, D, D);
    const size = (logit, at) => this.stepSize(t) / (1 + Math.exp(-logit - c[now * D + (at % D)]));
    return sizes.map(size);
  }

  /** α of step t: learned, or the configuration's. */
  stepSize(t) {
    const sizes = this.get("solver.log_alpha");
    return sizes ? Math.exp(sizes[Math.min(t, sizes.length - 1)]) : this.config.step_size;
  }
}

export class ImageEnergyTransformer extends EnergyTransformer {
  constructor({ tensors, config }) {
    // files of 0.2 have options in the place of a recipe
    const recipe = config.recipe ?? (config.channel_steps ? "tiny-imagenet" : "plain");
    if (!["plain", "paper", "waves", "tiny-imagenet"].includes(recipe))
      throw new Error(`expected a recipe of the library, with an energy; got ${recipe}`);
    const side = config.image_size / config.patch_size;
    super({ tensors, config: { ...config, recipe } }, side ** 2);
    this.side = side;
    this.P = config.patch_size ** 2 * config.channels;
    const get = this.get;
    this.last = { gamma: softplus(get("norm.rho")[0]), delta: get("norm.delta") };
  }

  /** The bias of a score by the relative position of query and key, if there is one. */
  biasOf(head) {
    const table = this.get("block.attention.positions.table");
    if (!table) return null;
    const side = Math.sqrt(this.N);
    const wide = 2 * side - 1;
    const offset = (c, b) => c - b + side - 1;
    return (c, b) => {
      const row = offset(Math.floor(c / side), Math.floor(b / side));
      return table[(head * wide + row) * wide + offset(c % side, b % side)];
    };
  }

  /** Tokens at t = 0 (N, D), from patches (N, P); `masked[n]` patches are not seen. */
  encode(patches, masked) {
    const { N, P } = this;
    const D = this.config.dim;
    const x = new Float32Array(N * D);
    multiply(x, patches, this.get("encoder.kernel"), N, P, D);
    const bias = this.get("encoder.bias");
    const mask = this.get("mask_token");
    const positions = this.get("positions");
    for (let n = 0; n < N; n++)
      for (let i = 0; i < D; i++) {
        const at = n * D + i;
        x[at] = (masked[n] ? mask[i] : x[at] + bias[i]) + positions[at];
      }
    return x;
  }

  /** Predicted patches (N, P) of tokens at any time. */
  decode(x) {
    const { N, P } = this;
    const D = this.config.dim;
    const patches = new Float32Array(N * P);
    const bias = this.get("decoder.bias");
    for (let n = 0; n < N; n++) patches.set(bias, n * P);
    const g = layerNorm(x, this.last.gamma, this.last.delta, D);
    multiply(patches, g, this.get("decoder.kernel"), N, D, P);
    return patches;
  }

  /** Everything on the way: T + 1 energies and pictures (S, S, C) in [0, 1]. */
  descend(pixels, masked, steps = this.config.steps, weights = undefined) {
    let x = this.encode(this.patchify(pixels), masked);
    const path = [];
    for (let t = 0; t <= steps; t++) {
      const seen = this.look(x);
      const energies = { attention: seen.attention.energy, memory: seen.memory.energy };
      path.push({ energies, pixels: this.completed(pixels, masked, this.decode(x)) });
      if (t < steps) x = this.step(x, seen, t, weights);
    }
    return path;
  }

  // --- pixels ---

  /** Where number i of patch n stands in a picture (S, S, C). */
  place(n, i) {
    const { patch_size: p, channels: C, image_size: S } = this.config;
    const row = Math.floor(n / this.side) * p + Math.floor(i / (p * C));
    const column = (n % this.side) * p + (Math.floor(i / C) % p);
    return (row * S + column) * C + (i % C);
  }

  patchify(pixels) {
    const { mean, std, channels: C } = this.config;
    const of = (values, i) => values[values.length > 1 ? i % C : 0];
    const patches = new Float32Array(this.N * this.P);
    for (let n = 0; n < this.N; n++)
      for (let i = 0; i < this.P; i++)
        patches[n * this.P + i] = (pixels[this.place(n, i)] - of(mean, i)) / of(std, i);
    return patches;
  }

  /** The picture with its masked patches filled in. */
  completed(pixels, masked, patches) {
    const { mean, std, channels: C } = this.config;
    const of = (values, i) => values[values.length > 1 ? i % C : 0];
    const out = Float32Array.from(pixels);
    for (let n = 0; n < this.N; n++)
      for (let i = 0; masked[n] && i < this.P; i++) {
        const value = patches[n * this.P + i] * of(std, i) + of(mean, i);
        out[this.place(n, i)] = Math.min(1, Math.max(0, value));
      }
    return out;
  }
}
