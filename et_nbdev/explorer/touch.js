// Presses every patch that a pointer is drawn across, as the first one was pressed.
if (!window.etTouch) {
  window.etTouch = true;
  let start = null;
  let paint = false;
  let moved = false;
  const patch = (event) => event.target.closest && event.target.closest(".et-patch");
  const on = (button) => button.classList.contains("mod-active");
  addEventListener("pointerdown", (event) => {
    start = patch(event);
    moved = false;
    if (!start) return;
    paint = !on(start);
    const held = event.target.hasPointerCapture(event.pointerId);
    if (held) event.target.releasePointerCapture(event.pointerId);
  }, true);
  addEventListener("pointerover", (event) => {
    const button = patch(event);
    if (!start || !button || !(event.buttons & 1)) return;
    if (button === start && !moved) return;
    if (!moved) {
      moved = true;
      start.click();
    }
    if (on(button) !== paint) button.click();
  }, true);
  addEventListener("pointerup", () => { start = null; }, true);
}
