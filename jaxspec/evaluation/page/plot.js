// Quality against passes, as SVG; `script.js` has the helpers and the data.

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, k) => (first + k) * step);
}

const short = (x) => Number(x.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 3 });
const interval = ([x, low, high]) =>
  low === null ? short(x) : `${short(x)} [${short(low)}, ${short(high)}]`;

function span(estimates) {
  const all = estimates.flat().filter((x) => x !== null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const room = (high - low || Math.abs(high) || 1) * 0.12;
  return [low - room, high + room];
}

function plot(measure) {
  const points = data.runs
    .map((run, k) => ({ run, k, x: run.passes, y: run.scores[measure.key] }))
    .filter((p) => p.x && p.y);
  // As wide as there is room: letters keep their size on a phone.
  const width = Math.max(320, Math.min(680, $("plot").clientWidth));
  const [height, left, bottom, right, top] = [380, 64, 48, width / 6, 16];
  const [x0, x1] = [0, span(points.map((p) => p.x))[1]];
  const [y0, y1] = span(points.map((p) => p.y));
  const px = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const py = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - bottom - top);
  const better = measure.better === "higher" ? 1 : -1;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${measure.name} against passes a picture: ` + points.map((p) =>
      `${p.run.name}, ${interval(p.x)} passes, ${interval(p.y)}`).join("; ") });
  const axes = el("g", { class: "axis", "aria-hidden": "true" });
  for (const x of ticks(x0, x1, 6)) {
    axes.append(el("line", { class: "grid", x1: px(x), x2: px(x), y1: top, y2: height - bottom }),
      el("text", { x: px(x), y: height - bottom + 18, "text-anchor": "middle" }, short(x)));
  }
  for (const y of ticks(y0, y1, 5)) {
    axes.append(el("line", { class: "grid", x1: left, x2: width - right, y1: py(y), y2: py(y) }),
      el("text", { x: left - 8, y: py(y) + 4, "text-anchor": "end" }, short(y)));
  }
  axes.append(
    el("text", { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" },
      "passes a picture, prefill included"),
    el("text", { x: 14, y: (top + height - bottom) / 2, "text-anchor": "middle",
      transform: `rotate(-90 14 ${(top + height - bottom) / 2})` },
    `${measure.name}, ${measure.better} is better`));
  svg.append(axes);
  // What no other run beats in both.
  const front = points
    .filter((p) => !points.some((q) => q !== p && q.x[0] <= p.x[0] &&
      better * q.y[0] >= better * p.y[0] &&
      (q.x[0] < p.x[0] || better * q.y[0] > better * p.y[0])))
    .sort((p, q) => p.x[0] - q.x[0]);
  svg.append(el("path", { class: "front",
    d: front.map((p, k) => `${k ? "L" : "M"}${px(p.x[0])} ${py(p.y[0])}`).join("") }));
  for (const p of points) svg.append(mark(p, px, py, measure));
  svg.append(...labels(points.map((p) => ({ x: px(p.x[0]), y: py(p.y[0]), text: p.run.name })),
    [left, width - 2]));
  $("plot-area").replaceChildren(svg);
  $("plot-note").textContent =
    "Circles are exact methods, squares biased ones; bars are 95 % intervals; the dashed " +
    `line joins runs that no other beats in both. ${measure.note}`;
}

function mark(p, px, py, measure) {
  const [x, y] = [px(p.x[0]), py(p.y[0])];
  const group = el("g", { class: p.run.exact ? "exact" : "biased" },
    el("title", {}, `${p.run.name}: ${interval(p.x)} passes, ${measure.name} ${interval(p.y)}`));
  if (p.y[1] !== null) group.append(el("line", { x1: x, x2: x, y1: py(p.y[1]), y2: py(p.y[2]) }));
  if (p.x[1] !== null) group.append(el("line", { x1: px(p.x[1]), x2: px(p.x[2]), y1: y, y2: y }));
  group.append(p.run.exact
    ? el("circle", { cx: x, cy: y, r: 5 })
    : el("rect", { x: x - 4.5, y: y - 4.5, width: 9, height: 9 }));
  return group;
}

// Names beside their points, where they cover neither a point nor another name.
function labels(points, [from, to]) {
  const taken = points.map(({ x, y }) => [x - 6, y - 6, x + 6, y + 6]);
  const free = (box) => box[0] >= from && box[2] <= to && !taken.some((t) =>
    box[0] < t[2] && t[0] < box[2] && box[1] < t[3] && t[1] < box[3]);
  return points.map(({ x, y, text }) => {
    const wide = 7.2 * text.length;
    const places = [-4, 12, -18, 26, -32, 40, -46, 54, -60].flatMap((dy) =>
      [[x + 9, y + dy], [x - 9 - wide, y + dy], [x - wide / 2, y + dy]]);
    const box = ([left, base]) => [left, base - 12, left + wide, base + 3];
    const at = places.find((place) => free(box(place))) ?? places[0];
    taken.push(box(at));
    return el("text", { class: "halo", x: at[0], y: at[1] }, text);
  });
}

function plots() {
  if (!data.measures.length) {
    $("plot-bar").hidden = true;
    $("plot-note").replaceChildren(...prose("No quality to plot yet: " +
      "`jaxspec evaluate score` each run, then write the report again."));
    return;
  }
  $("measure").append(...data.measures.map((m, k) => el("option", { value: k }, m.name)));
  const again = () => plot(data.measures[$("measure").value]);
  $("measure").addEventListener("change", again);
  addEventListener("resize", again);
  again();
}
