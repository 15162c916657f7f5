// [height of the page, its faults]: what is wider than the window although nothing
// around it scrolls; text that is too pale; on a desk also what has to be scrolled
// sideways, names that break, and something to play with that nobody will find.
async (desk) => {
  await document.fonts.ready;
  // what can be played with is built by a script, and wakes when it is seen
  const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
  const waiting = ":is(.et-play, .et-walk):not(:has(button))";
  for (let i = 0; i < 50 && document.querySelector(waiting); i++) await pause(100);
  if (document.querySelector(waiting)) return [0, ["a player that does not start"]];
  for (const player of document.querySelectorAll(".et-play, .et-walk")) {
    player.scrollIntoView();
    await pause(800);
  }
  scrollTo(0, 0);
  const faults = [];
  const all = (selector) =>
    [...document.querySelectorAll(selector)].filter((e) => e.getClientRects().length);
  const name = (e) => `${e.tagName.toLowerCase()} ${e.textContent.trim().slice(0, 40)}`;
  const style = (e) => getComputedStyle(e);
  const folds = all("details.callout").filter((e) => !e.open);
  folds.forEach((e) => (e.open = true)); // to be looked at, too
  const top = (e) => Math.round(e.getBoundingClientRect().top);

  const inside = (e) => {
    for (let a = e.parentElement; a; a = a.parentElement)
      if (style(a).overflowX !== "visible") return true;
    return false;
  };
  if (document.documentElement.scrollWidth > innerWidth) {
    all("body *")
      .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !inside(e))
      .slice(-3)
      .forEach((e) => faults.push(`wider than the window: ${name(e)}`));
  }

  if (desk) {
    all("main pre, main .math.display, main .cell-output-display, main table")
      .filter((e) => e.scrollWidth > e.clientWidth + 1)
      .filter((e) => style(e).overflowX !== "visible")
      .forEach((e) => {
        const more = e.scrollWidth - e.clientWidth;
        faults.push(`${more} pixels wider than the column: ${name(e)}`);
      });
    all("main td:first-child a")
      .filter((e) => e.getClientRects().length > 1)
      .forEach((e) => faults.push(`a name that breaks: ${name(e)}`));
    const play = all("main input, main button, main .et-play") // that needs a server
      .find((e) => !e.closest(".animation"));
    if (play && top(play) > 2 * innerHeight)
      faults.push(`the first thing to play with is ${top(play)} pixels down`);
  }

  if (document.body.className === "quarto-dark")
    all("main .drawn img, main img.drawn")
      .filter((e) => !style(e).filter.includes("invert") || style(e).padding !== "0px")
      .forEach((e) => faults.push(`a drawing that stays white by night: ${e.alt}`));

  // contrast, as WCAG defines it
  const parts = (color) => (color.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = parts(color).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (e) => {
    for (; e; e = e.parentElement)
      if (parts(style(e).backgroundColor)[3] !== 0) return style(e).backgroundColor;
    return "rgb(255, 255, 255)";
  };
  const pale = {};
  const read = ":is(a, summary, p, code, button, figcaption, label, select, output)";
  all(`main ${read}`)
    .filter((e) => !e.closest("pre"))
    .forEach((e) => {
      const pair = [style(e).color, ground(e)];
      const [a, b] = pair.map(light).sort((x, y) => x - y);
      const contrast = (b + 0.05) / (a + 0.05);
      if (contrast < 4.5)
        pale[pair] ||= `a contrast of ${contrast.toFixed(1)}: ${name(e)}`;
    });
  folds.forEach((e) => (e.open = false));
  const height = Math.ceil(document.body.getBoundingClientRect().height) + 40;
  if (desk && document.querySelector(".start-buttons") && height > 11000)
    faults.push(`the landing page is ${height} pixels high`);
  return [height, [...faults, ...Object.values(pale)]];
}
