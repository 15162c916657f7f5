// A page of the explorer: shows the frame of one time, and plays them in order.
function explorerPage(root) {
  const frames = [...root.querySelectorAll(".et-frame")];
  const last = frames.length - 1;
  const slider = root.querySelector("input");
  const button = root.querySelector("button");
  const out = root.querySelector("output");
  let timer = null;
  const show = (t) => {
    frames.forEach((frame, i) => {
      frame.hidden = i !== t;
    });
    slider.value = t;
    out.textContent = frames[t].dataset.says;
    slider.setAttribute("aria-valuetext", frames[t].dataset.says);
  };
  const stop = () => {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  };
  const turn = () => {
    if (+slider.value === last) return stop();
    show(+slider.value + 1);
  };
  slider.addEventListener("input", () => {
    stop();
    show(+slider.value);
  });
  button.addEventListener("click", () => {
    if (timer) return stop();
    button.textContent = "Pause";
    if (+slider.value === last) show(0);
    timer = setInterval(turn, 800);
  });
}
