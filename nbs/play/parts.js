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

/** Curves [name, color in the theme, color without one, values] over t = 0 … last. */
export function drawCurves(canvas, title, curves, { t, last, low, high }) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const [left, right, top, bottom] = [10, width - 90, 18, height - 22];
  const values = curves.flatMap(([, , , of]) => of);
  const [least, most] = [Math.min(...values, low), Math.max(...values, high)];
  const x = (at) => left + ((right - left) * at) / last;
  const y = (v) => bottom - ((bottom - top) * (v - least)) / (most - least);
  context.clearRect(0, 0, width, height);
  context.font = "13px sans-serif";
  context.fillStyle = context.strokeStyle = color("muted", "#555555");
  context.fillText(title, left, 12);
  context.textAlign = t > last / 2 ? "right" : "left";
  context.fillText(` t = ${t} `, x(t), height - 6);
  context.textAlign = "left";
  context.lineWidth = 2;
  context.setLineDash([3, 3]);
  context.strokeRect(x(t), top, 0, bottom - top);
  context.setLineDash([]);
  const labels = [];
  for (const [name, themed, plain, of] of curves) {
    context.strokeStyle = context.fillStyle = color(themed, plain);
    context.beginPath();
    of.forEach((v, at) => context.lineTo(x(at), y(v)));
    context.stroke();
    let at = y(of.at(-1)) + 4;
    while (labels.some((other) => Math.abs(other - at) < 14)) at += 14;
    labels.push(at);
    context.fillText(name, x(of.length - 1) + 6, at);
  }
}
