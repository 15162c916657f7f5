// What the two players share: elements of a page, files beside this one, and curves.

const HERE = new URL(".", import.meta.url);

/** An element with properties, attributes in `set`, and children. */
export function element(tag, properties = {}, ...children) {
  const { set = {}, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [name, value] of Object.entries(set)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

export async function fetched(name) {
  const answer = await fetch(new URL(name, HERE));
  if (!answer.ok) throw new Error(`${name} could not be loaded (${answer.status})`);
  return answer;
}

export const rounded = (v) => v.toFixed(Math.abs(v) < 100 ? 1 : 0).replace("-", "−");

/** A slider with its label and what it says. */
export function slider(label, options, listener) {
  const input = element("input", { type: "range", ...options, oninput: listener });
  const said = element("output", { textContent: options.value });
  return { input, said, row: element("label", {}, label, input, said) };
}

export function button(textContent, onclick) {
  return element("button", { type: "button", textContent, onclick });
}

/** Call `wake` as soon as an element is seen, and `turned` when the light is. */
export function whenSeen(root, wake, turned) {
  const seen = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    wake();
  });
  seen.observe(root);
  new MutationObserver(turned).observe(document.body, { attributeFilter: ["class"] });
}

/** A color of the page's theme; `plain` where there is none. */
function color(name, plain) {
  return getComputedStyle(document.body).getPropertyValue(`--${name}`).trim() || plain;
}

/** A canvas of curves; play.css says how wide it is. */
export function curveOf(height) {
  return element("canvas", { style: `height: ${height}px`, set: { role: "img" } });
}

/** A blank canvas to draw on in CSS pixels, with as many dots as the screen has. */
function sharp(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  return { context, width, height };
}

/** Curves [name, color in the theme, color without one, values] over t = 0 … last. */
export function drawCurves(canvas, title, curves, { t, last, low, high }) {
  const { context, width, height } = sharp(canvas);
  const [left, right, top, bottom] = [58, width - 76, 20, height - 22];
  const values = curves.flatMap(([, , , of]) => of);
  const [least, most] = [Math.min(...values, low), Math.max(...values, high)];
  const x = (at) => left + ((right - left) * at) / last;
  const floor = bottom - 8; // so that no label lies on the axis
  const y = (v) => floor - ((floor - top) * (v - least)) / (most - least);
  const write = (text, at, down, align = "left") => {
    context.textAlign = align;
    context.fillText(text, at, down);
  };
  context.font = "13px sans-serif";
  context.fillStyle = context.strokeStyle = color("muted", "#555555");
  write(title, left, 12);
  for (const v of [least, most]) write(rounded(v), left - 6, y(v) + 4, "right");
  for (const at of [0, last]) {
    if (Math.abs(at - t) > last / 4) write(at, x(at), height - 6, "center");
  }
  write(`t = ${t}`, x(t), height - 6, "center");
  context.beginPath();
  context.moveTo(left, top);
  context.lineTo(left, bottom);
  context.lineTo(right, bottom);
  context.stroke();
  context.lineWidth = 2;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x(t), top);
  context.lineTo(x(t), bottom);
  context.stroke();
  context.setLineDash([]);
  const labels = [];
  for (const [name, themed, plain, of] of curves) {
    context.strokeStyle = context.fillStyle = color(themed, plain);
    context.beginPath();
    of.forEach((v, at) => context.lineTo(x(at), y(v)));
    context.stroke();
    let down = y(of.at(-1)) + 4;
    while (labels.some((other) => Math.abs(other - down) < 14)) down += 14;
    labels.push(down);
    write(name, x(of.length - 1) + 6, down);
  }
}
