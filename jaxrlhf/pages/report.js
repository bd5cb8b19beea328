"use strict";
// Draws the curves and samples of a report from the data in the page. `page.data` is what report_data.py gives.
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const WIDTH = 380, HEIGHT = 210, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 24;
const SMOOTHING = 0.85;

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function shown(value) {
  if (value === null || value === undefined) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// Themes -------------------------------------------------------------------------------------------------------------

document.getElementById("theme").addEventListener("click", () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark";
  document.documentElement.dataset.theme = dark ? "light" : "dark";
});

// Curves -------------------------------------------------------------------------------------------------------------

function ticks(low, high, count, whole) {
  const raw = (high - low) / Math.max(1, count), size = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map(factor => factor * size).find(each => each >= raw * 0.8);
  if (whole) step = Math.max(1, step);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(i * step);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map(tick => [tick, text(tick, decimals)]);
}

function text(value, decimals) {
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6 || size < 1e-4) return value.toExponential(1).replace(".0e", "e").replace("e+", "e");
  if (size >= 1e4) return `${Number((value / 1e3).toFixed(2))}k`;
  return String(Number(value.toFixed(decimals)));
}

function logTicks(low, high) {
  const factors = high - low > 2 ? [1] : [1, 2, 5], found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++)
    for (const factor of factors) {
      const tick = Math.log10(factor) + power;
      if (tick >= low && tick <= high) found.push([tick, shown(factor * 10 ** power)]);
    }
  const every = Math.max(1, Math.ceil(found.length / 7));
  return found.filter((_, i) => i % every === 0);
}

function range(values, margin) {
  let low = Math.min(...values), high = Math.max(...values);
  if (high - low <= 1e-12 * Math.max(Math.abs(low), Math.abs(high))) {
    low -= Math.abs(low) * 0.1 || 0.5;
    high += Math.abs(high) * 0.1 || 0.5;
  }
  return [low - margin * (high - low), high + margin * (high - low)];
}

// The exponential mean of what was there so far, without bias at the beginning.
function smoothed(values) {
  let sum = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = SMOOTHING * sum + (1 - SMOOTHING) * value;
    weight = SMOOTHING * weight + (1 - SMOOTHING);
    return sum / weight;
  });
}

function path(xs, ys, place) {
  let line = "", pen = false;
  xs.forEach((x, i) => {
    if (ys[i] === null) { pen = false; return; }
    const [px, py] = place(x, ys[i]);
    const alone = !pen && (i + 1 >= xs.length || ys[i + 1] === null);
    line += `${pen ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}${alone ? "h0.01" : ""}`;
    pen = true;
  });
  return line;
}

function chart(name) {
  const log = document.getElementById("log").checked, smooth = document.getElementById("smooth").checked;
  const curves = data.metrics[name].map((curve, i) => curve && {
    ...data.runs[i], ...curve, y: curve.y.map(value => (log && value !== null && value <= 0 ? null : value)),
    lost: log ? curve.y.filter(value => value !== null && value <= 0).length : 0,
  }).filter(Boolean);
  const picture = draw("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name, "font-size": 10});
  const ys = curves.flatMap(curve => curve.y.filter(value => value !== null));
  const notes = [];
  const thin = curves.find(curve => curve.of);
  if (thin) notes.push(`thinned out to ${thin.x.length} of ${thin.of} points`);
  const lost = curves.reduce((sum, curve) => sum + curve.lost, 0);
  if (lost) notes.push(`${lost} values that are not positive left out`);
  if (!ys.length) {
    picture.append(draw("text", {x: WIDTH / 2, y: HEIGHT / 2, "text-anchor": "middle", fill: "currentColor"}, "no values"));
    return card(name, picture, notes);
  }
  const scaled = value => (log ? Math.log10(value) : value);
  const [xLow, xHigh] = range(curves.flatMap(curve => curve.x), 0), [yLow, yHigh] = range(ys.map(scaled), 0.04);
  const place = (x, y) => [
    LEFT + (WIDTH - LEFT - RIGHT) * (x - xLow) / (xHigh - xLow),
    TOP + (HEIGHT - TOP - BOTTOM) * (1 - (scaled(y) - yLow) / (yHigh - yLow)),
  ];
  const look = {stroke: "currentColor", "stroke-opacity": 0.14};
  for (const [tick, label] of log ? logTicks(yLow, yHigh) : ticks(yLow, yHigh, 5, false)) {
    const y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (tick - yLow) / (yHigh - yLow));
    picture.append(draw("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y, ...look}));
    const at = {x: LEFT - 6, y: y + 3.5, "text-anchor": "end", fill: "currentColor", "fill-opacity": 0.75};
    picture.append(draw("text", at, label));
  }
  for (const [tick, label] of ticks(xLow, xHigh, 5, true)) {
    const [x] = place(tick, ys[0]);
    picture.append(draw("line", {x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4, stroke: "currentColor"}));
    const at = {x, y: HEIGHT - 8, "text-anchor": "middle", fill: "currentColor", "fill-opacity": 0.75};
    picture.append(draw("text", at, label));
  }
  for (const curve of curves) {
    const line = {fill: "none", stroke: curve.color, "stroke-linejoin": "round", "stroke-linecap": "round"};
    const faint = smooth ? {"stroke-opacity": 0.25, "stroke-width": 1.2} : {"stroke-width": 1.7};
    picture.append(draw("path", {d: path(curve.x, curve.y, place), class: "curve", ...line, ...faint}));
    if (smooth) {
      const means = {d: path(curve.x, smoothed(curve.y), place), class: "smoothed", ...line, "stroke-width": 2};
      picture.append(draw("path", means));
    }
    if (curve.x.length <= 12)
      curve.x.forEach((x, i) => {
        if (curve.y[i] === null) return;
        const [cx, cy] = place(x, curve.y[i]);
        picture.append(draw("circle", {cx, cy, r: 2.4, fill: curve.color}));
      });
  }
  picture.append(...hover(picture, name, curves, place, xLow, xHigh));
  return card(name, picture, notes);
}

function card(name, picture, notes) {
  const close = make("button", {type: "button", class: "close", "aria-label": `hide ${name}`}, "×");
  close.addEventListener("click", () => toggle(name));
  const parts = [make("h4", {}, name), close, picture];
  if (notes.length) parts.push(make("p", {class: "note"}, notes.join("; ")));
  return make("div", {class: "chart-card", "data-name": name}, ...parts);
}

function nearest(xs, x) {
  let best = 0;
  xs.forEach((each, i) => { if (Math.abs(each - x) < Math.abs(xs[best] - x)) best = i; });
  return best;
}

// A line and the values of all runs at the step under the pointer.
function hover(picture, name, curves, place, xLow, xHigh) {
  const line = draw("line", {y1: TOP, y2: HEIGHT - BOTTOM, stroke: "currentColor", "stroke-opacity": 0.5, visibility: "hidden"});
  const dots = curves.map(curve => draw("circle", {r: 3.2, fill: curve.color, visibility: "hidden"}));
  const hide = () => {
    tip.style.display = "none";
    for (const mark of [line, ...dots]) mark.setAttribute("visibility", "hidden");
  };
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("pointermove", event => {
    const box = picture.getBoundingClientRect();
    const x = xLow + (xHigh - xLow) * ((event.clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
    const all = curves.flatMap(curve => curve.x), step = all[nearest(all, x)];
    const [at] = place(step, 1);
    line.setAttribute("x1", at);
    line.setAttribute("x2", at);
    line.setAttribute("visibility", "visible");
    const lines = [`step ${step}`];
    curves.forEach((curve, i) => {
      const index = nearest(curve.x, step), value = curve.y[index];
      dots[i].setAttribute("visibility", value === null ? "hidden" : "visible");
      if (value !== null) {
        const [px, py] = place(curve.x[index], value);
        dots[i].setAttribute("cx", px);
        dots[i].setAttribute("cy", py);
      }
      const where = curve.x[index] === step ? "" : ` (step ${curve.x[index]})`;
      lines.push(`${data.runs.length > 1 ? curve.name : name}: ${shown(value)}${where}`);
    });
    tip.textContent = lines.join("\n");
    tip.style.display = "block";
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8))}px`;
  });
  return [line, ...dots];
}

const chosen = new Set(data.shown);
const charts = document.getElementById("charts"), names = document.getElementById("names");

function toggle(name) {
  if (!chosen.delete(name)) chosen.add(name);
  drawAll();
}

function drawAll() {
  const search = document.getElementById("search").value.trim().toLowerCase();
  names.replaceChildren(...Object.keys(data.metrics).filter(name => name.toLowerCase().includes(search)).map(name => {
    const button = make("button", {type: "button", "aria-pressed": String(chosen.has(name))}, name);
    if (search) button.className = "match";
    button.addEventListener("click", () => toggle(name));
    return button;
  }));
  charts.replaceChildren(...[...chosen].map(chart));
}

if (charts) {
  for (const id of ["smooth", "log"]) document.getElementById(id).addEventListener("change", drawAll);
  document.getElementById("search").addEventListener("input", drawAll);
  drawAll();
}

// Samples ------------------------------------------------------------------------------------------------------------

const choice = document.getElementById("sample-step");

function one(sample) {
  const whole = make("div", {class: "one"});
  whole.append(make("div", {class: `text${sample.completion.length > 600 ? " long" : ""}`}, sample.completion || "(empty)"));
  for (const [name, value] of Object.entries(sample.scores))
    whole.append(make("span", {class: "score"}, `${name} ${shown(value)}`));
  if (sample.finish) whole.append(make("span", {class: "score"}, sample.finish));
  return whole;
}

function showSamples() {
  const group = data.samples[choice.selectedIndex];
  const prompts = [...new Set(group.runs.flat().map(sample => sample.prompt))];
  const askedOf = prompt => group.runs.filter(samples => samples.some(sample => sample.prompt === prompt)).length;
  prompts.sort((a, b) => askedOf(b) - askedOf(a));  // those that several runs were asked come first
  const heads = ["prompt", ...(data.runs.length > 1 ? data.runs.map(run => run.name) : ["completion"])];
  const rows = prompts.map(prompt => {
    const cells = group.runs.map(samples => {
      const own = samples.filter(sample => sample.prompt === prompt);
      const first = own.slice(0, 2).map(one), more = own.slice(2).map(one);
      if (more.length) first.push(make("details", {}, make("summary", {}, `${more.length} more`), ...more));
      return make("td", {}, ...(own.length ? first : ["-"]));
    });
    const asked = make("div", {class: `text${prompt.length > 600 ? " long" : ""}`}, prompt);
    return make("tr", {}, make("td", {}, asked), ...cells);
  });
  const head = make("thead", {}, make("tr", {}, ...heads.map(name => make("th", {}, name))));
  document.getElementById("sample-table").replaceChildren(make("table", {}, head, make("tbody", {}, ...rows)));
}

if (choice && data.samples.length) {
  for (const group of data.samples) choice.append(make("option", {}, `${group.step}${group.split ? `, ${group.split}` : ""}`));
  // the last one in which runs were asked the same, which can be compared
  const isShared = group => group.runs.some((samples, i) => samples.some(sample =>
    group.runs.some((others, j) => j > i && others.some(other => other.prompt === sample.prompt))));
  const shared = data.samples.findLastIndex(isShared);
  choice.selectedIndex = shared < 0 ? data.samples.length - 1 : shared;
  choice.addEventListener("change", showSamples);
  const move = by => {
    choice.selectedIndex = Math.max(0, Math.min(data.samples.length - 1, choice.selectedIndex + by));
    showSamples();
  };
  document.getElementById("sample-before").addEventListener("click", () => move(-1));
  document.getElementById("sample-after").addEventListener("click", () => move(1));
  const left = data.sample_steps - data.samples.length;
  document.getElementById("sample-note").textContent = left > 0 ? `${left} of ${data.sample_steps} are left out, evenly` : "";
  showSamples();
}
})();
