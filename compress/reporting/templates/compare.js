"use strict";
// A budget: in the picture that shows, what costs more steps back, and the best of the rest is named.
const budgets = [];
for (const view of document.querySelectorAll(".view")) {
  const points = Array.from(view.querySelectorAll("li[data-n]"), (item) => item.dataset);
  const costs = [...new Set(points.map((point) => Number(point.cost)))];
  if (costs.length < 2) continue;
  const box = view.querySelector(".budget-box"), slider = box.querySelector("input"), said = box.querySelector("output");
  slider.max = String(costs.length - 1);
  const limit = box.dataset.limit ? Number(box.dataset.limit) : Infinity;
  slider.value = String(Math.max(0, costs.filter((cost) => cost <= limit).length - 1));
  const answer = () => {
    const budget = costs[Number(slider.value)], all = Number(slider.value) === costs.length - 1;
    const within = points.filter((point) => Number(point.cost) <= budget);
    const best = within.reduce((one, other) => (Number(other.score) > Number(one.score) ? other : one));
    const most = points.find((point) => Number(point.cost) === budget).shown;
    said.textContent = `${all ? "Any budget" : `Within ${most}`}: ${best.name}, ${best.facts}`;
    slider.setAttribute("aria-valuetext", said.textContent);
    return { within: new Set(within.map((point) => point.n)), best: best.n, all };
  };
  const show = () => {
    const { within, best, all } = answer();
    for (const mark of [...view.querySelectorAll("g[data-n], tr[data-n]"), ...document.querySelectorAll(".numbered tr[data-n]")]) {
      mark.classList.toggle("over", !within.has(mark.dataset.n));
      mark.classList.toggle("best", mark.dataset.n === best);
    }
    for (const picture of view.querySelectorAll("svg.picture")) {
      const marks = [...picture.querySelectorAll("g[data-n]")].filter((mark) => within.has(mark.dataset.n));
      const line = picture.querySelector(".budget"), x = String(Math.max(...marks.map((mark) => Number(mark.dataset.x))) + 9);
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      line.classList.toggle("on", !all);
    }
  };
  answer();
  box.hidden = false;
  slider.addEventListener("input", show);
  budgets.push({ view, show });
  if (box.dataset.limit && view.offsetParent !== null) show();
}
for (const control of document.querySelectorAll(".controls")) {
  control.addEventListener("change", () => budgets.filter(({ view }) => view.offsetParent !== null).forEach(({ show }) => show()));
}
