// What the page shows, as jaxspec.evaluation.report writes it.  Samples are
// `cells[prompt][image][run]`: null where nothing was drawn, else a failure or a picture.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

function el(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "line", "path", "text", "title", "circle", "rect"].includes(tag);
  const node = svg
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// Text with what stands between backticks as code.
const prose = (text) => text.split("`").map((part, k) => (k % 2 ? el("code", {}, part) : part));

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const words = (text) => new Uint16Array(bytes(text).buffer);
const rgb = (c, alpha = 1) => `rgb(${c[0]} ${c[1]} ${c[2]} / ${alpha})`;
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// A place of 0 to 1 on the scale that the passes are drawn in.
function scaled(place) {
  const x = Math.min(Math.max(place, 0), 1) * (data.scale.length - 1);
  const k = Math.min(Math.floor(x), data.scale.length - 2);
  return data.scale[k].map((a, i) => Math.round(a + (x - k) * (data.scale[k + 1][i] - a)));
}
const gradient = `linear-gradient(to right, ${data.scale.map((c) => rgb(c)).join(", ")})`;

// ---------------------------------------------------------------- tables

function table(into, { columns, rows }) {
  if (!rows.length) {
    $(into).replaceChildren(el("p", { class: "quiet" }, "None."));
    return;
  }
  const kind = columns.map((column) => (column.number ? "number" : ""));
  const cell = (content, k) => {
    const [main, under] = Array.isArray(content) ? content : [content, null];
    const inner = [main ?? "", under ? el("small", {}, under) : null];
    return k ? el("td", { class: kind[k] }, inner) : el("th", { scope: "row" }, inner);
  };
  const head = columns.map((column, k) =>
    el("th", { scope: "col", class: kind[k] }, column.name));
  const lines = rows.map((row) =>
    el("tr", { class: row.differs ? "differs" : null }, row.cells.map(cell)));
  $(into).replaceChildren(
    el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines)));
}

// ---------------------------------------------------------------- maps

function mapCanvas([h, w], shares, colour, label) {
  const canvas = el("canvas", { width: w, height: h, role: "img", "aria-label": label });
  const image = new ImageData(w, h);
  shares.forEach((share, k) => image.data.set([...colour(share / 255), 255], 4 * k));
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function maps() {
  const scale = (low, high) => el("div", { class: "scale", "aria-hidden": "true" },
    low, el("i", { style: `background:${gradient}` }), high);
  for (const run of data.runs) {
    if (!run.maps) continue;
    const figure = (of, caption, low, high) => el("figure", {},
      mapCanvas(run.grid, bytes(of.cells), scaled, of.told), scale(low, high),
      el("figcaption", {}, caption));
    $("maps-list").append(el("article", {}, el("h3", {}, run.name), el("div", { class: "pair" },
      run.maps.accepted && figure(run.maps.accepted,
        "share of pictures in which the cell is an accepted draft", "0 %", "100 %"),
      figure(run.maps.pass, "mean pass that made a cell final", "0", run.maps.pass.most))));
  }
}

// ---------------------------------------------------------------- pictures

const entries = [];  // one a prompt and image: what the list shows and the viewer opens
data.prompts.forEach((prompt, p) => data.cells[p].forEach((samples, image) =>
  entries.push({ prompt, image, samples, node: null })));

const lazily = new IntersectionObserver((seen) => seen.filter((s) => s.isIntersecting)
  .forEach(({ target }) => {
    target.src = data.pictures[target.dataset.picture];
    lazily.unobserve(target);
  }), { rootMargin: "400px" });

const gapText = (sample) => (sample ? `failed: ${sample.error}` : "missing");
const passText = (sample) => plural(sample.passes + 1, "pass").replace("passs", "passes");

function tile(entry, run, k) {
  const sample = entry.samples[k];
  const name = el("span", { class: "name" }, run.name);
  if (!sample || sample.error) {
    return el("div", { class: "tile", "data-run": k },
      el("span", { class: `gap ${sample ? "failed" : ""}` }, gapText(sample)), name);
  }
  const picture = el("img", { alt: `${entry.prompt.text}, drawn by ${run.name}`,
    decoding: "async", "data-picture": sample.picture });
  lazily.observe(picture);
  return el("button", { class: "tile", type: "button", "data-run": k,
    onclick: () => openViewer(entry) },
  picture, name, el("span", { class: "passes" }, passText(sample)));
}

function list() {
  $("prompts").style.setProperty("--runs", Math.min(data.runs.length, 8));
  const several = data.images > 1;
  for (const entry of entries) {
    const about = [entry.prompt.category, several ? `image ${entry.image}` : null, entry.prompt.id];
    entry.node = el("article", { class: "prompt" },
      el("h3", {}, entry.prompt.text || "(empty prompt)",
        el("small", {}, about.filter(Boolean).join(" · "))),
      el("div", { class: "row" }, data.runs.map((run, k) => tile(entry, run, k))));
    $("prompts").append(entry.node);
  }
}

const shownRuns = () => data.runs.map((run, k) => k)
  .filter((k) => $(`run-${k}`) === null || $(`run-${k}`).checked);
const shownEntries = () => entries.filter((entry) => !entry.node.hidden);

function filter() {
  const wanted = $("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const [category, image] = [$("filter-category").value, $("filter-image").value];
  const runs = new Set(shownRuns());
  for (const entry of entries) {
    const text = `${entry.prompt.text} ${entry.prompt.id}`.toLowerCase();
    entry.node.hidden = !(wanted.every((word) => text.includes(word)) &&
      (!category || entry.prompt.category === category) &&
      (image === "" || entry.image === Number(image)));
    for (const node of entry.node.querySelectorAll(".tile")) {
      node.hidden = !runs.has(Number(node.dataset.run));
    }
  }
  const shown = shownEntries().length;
  $("shown").textContent = `${shown} of ${entries.length} shown${data.more}`;
}

function filters() {
  const options = (select, all, values, told) => select.append(
    el("option", { value: "" }, all), ...values.map((v) => el("option", { value: v }, told(v))));
  const categories = [...new Set(data.prompts.map((p) => p.category).filter(Boolean))].sort();
  options($("filter-category"), "all", categories, (c) => c);
  $("category-label").hidden = categories.length < 2;
  options($("filter-image"), "all", [...Array(data.images).keys()], (k) => `image ${k}`);
  $("image-label").hidden = data.images < 2;
  if (data.runs.length > 1) {
    $("filter-runs").append(...data.runs.map((run, k) => el("label", {},
      el("input", { type: "checkbox", id: `run-${k}`, checked: "" }), " ", run.name)));
  } else {
    $("filter-runs").hidden = true;
  }
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  filter();
}

// ---------------------------------------------------------------- viewer

const view = { entry: null, stages: [], playing: null };
const chosen = () => document.querySelector('input[name="overlay"]:checked').value;

function openViewer(entry) {
  pause();
  view.entry = entry;
  view.stages = [];
  const figures = shownRuns().map((k) => {
    const [run, sample] = [data.runs[k], entry.samples[k]];
    if (!sample || sample.error) {
      return el("figure", {}, el("div", { class: "gap" }, gapText(sample)),
        el("figcaption", {}, run.name));
    }
    const stage = { run, sample, final: words(sample.final), origin: bytes(sample.origin),
      canvas: el("canvas", { role: "img" }), told: el("span"), image: new Image() };
    stage.parts = run.islands ? islands(stage) : 0;
    stage.image.onload = () => draw();
    stage.image.src = data.pictures[sample.picture];
    view.stages.push(stage);
    return el("figure", {}, stage.canvas, el("figcaption", {}, run.name, stage.told));
  });
  $("stages").replaceChildren(...figures);
  $("stages").style.setProperty("--stages", figures.length);
  $("viewer-head").textContent = entry.prompt.text || "(empty prompt)";
  $("islands-label").hidden = !view.stages.some((stage) => stage.run.islands);
  const slider = $("pass");
  slider.max = Math.max(0, ...view.stages.map((stage) => stage.sample.passes));
  slider.value = slider.max;
  const list = shownEntries();
  const place = list.indexOf(entry);
  $("viewer-about").textContent =
    [entry.prompt.category, `image ${entry.image}`, `${place + 1} of ${list.length}`]
      .filter(Boolean).join(" · ");
  $("previous").disabled = place <= 0;
  $("next").disabled = place + 1 >= list.length;
  if (!$("viewer").open) {
    $("viewer").showModal();
    slider.focus();
  }
  draw();
}

// Parts of the cells that were not kept drafts, joined also at corners.
function islands({ origin, sample: { grid: [h, w] } }) {
  const open = new Set([...origin.keys()].filter((u) => origin[u] !== data.accepted));
  let parts = 0;
  while (open.size) {
    parts += 1;
    const todo = [open.values().next().value];
    open.delete(todo[0]);
    while (todo.length) {
      const u = todo.pop();
      for (let i = -1; i <= 1; i += 1) {
        for (let j = -1; j <= 1; j += 1) {
          const [row, column] = [Math.floor(u / w) + i, (u % w) + j];
          const v = row * w + column;
          if (row >= 0 && row < h && column >= 0 && column < w && open.delete(v)) todo.push(v);
        }
      }
    }
  }
  return parts;
}

function draw() {
  const pass = Number($("pass").value);
  const last = Number($("pass").max);
  const label = pass === 0 ? "Pass 0 (prefill)" : `Pass ${pass} of ${last}`;
  $("pass-label").textContent = label;
  const told = view.stages.map((stage) => drawStage(stage, pass, last));
  $("pass").setAttribute("aria-valuetext", `${label}. ${told.join(". ")}`);
  legend(last);
}

function drawStage(stage, pass, last) {
  const { run, sample, final, origin, canvas, image } = stage;
  const [h, w] = sample.grid;
  const side = Math.max(image.naturalWidth, 512);
  const scale = Math.max(1, Math.round(side / w));
  if (canvas.width !== w * scale) [canvas.width, canvas.height] = [w * scale, h * scale];
  const pen = canvas.getContext("2d");
  pen.imageSmoothingEnabled = image.naturalWidth > canvas.width;
  if (image.complete && image.naturalWidth) pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  const overlay = chosen();
  const blank = getComputedStyle(canvas).getPropertyValue("--blank");
  const counts = data.origins.map(() => 0);
  const at = (u) => [(u % w) * scale, Math.floor(u / w) * scale, scale, scale];
  for (let u = 0; u < h * w; u += 1) {
    if (final[u] > pass) {
      pen.fillStyle = blank;
      pen.fillRect(...at(u));
      continue;
    }
    counts[origin[u]] += 1;
    if (overlay === "picture") continue;
    pen.fillStyle = overlay === "origin"
      ? rgb(data.origins[origin[u]].colour, 0.7)
      : rgb(scaled(final[u] / Math.max(last, 1)), 0.85);
    pen.fillRect(...at(u));
  }
  if ($("new-cells").checked && pass < last) outline(pen, scale, h, w, (u) => final[u] === pass);
  if ($("islands").checked && run.islands) {
    outline(pen, scale, h, w, (u) => origin[u] !== data.accepted);
  }
  const done = counts.reduce((a, b) => a + b);
  const parts = data.origins.map(({ name }, k) => (counts[k] ? `${counts[k]} ${name}` : null));
  const text = `${done} of ${h * w} cells: ${parts.filter(Boolean).join(", ") || "none"}` +
    (run.islands ? `; ${plural(stage.parts, "island")}` : "");
  const finished = stage.sample.passes <= pass ? `, done in pass ${stage.sample.passes}` : "";
  stage.told.textContent = text + finished;
  canvas.setAttribute("aria-label", `${view.entry.prompt.text}, drawn by ${run.name}: ${text}`);
  return `${run.name}: ${done} of ${h * w} cells`;
}

// The edges between cells that are in and those that are not: light on dark, to be seen anywhere.
function outline(pen, scale, h, w, inside) {
  const edges = new Path2D();
  const is = (i, j) => i >= 0 && i < h && j >= 0 && j < w && inside(i * w + j);
  const edge = (x, y, dx, dy) => {
    edges.moveTo(x * scale, y * scale);
    edges.lineTo((x + dx) * scale, (y + dy) * scale);
  };
  for (let i = 0; i <= h; i += 1) {
    for (let j = 0; j <= w; j += 1) {
      if (is(i, j) !== is(i - 1, j)) edge(j, i, 1, 0);
      if (is(i, j) !== is(i, j - 1)) edge(j, i, 0, 1);
    }
  }
  const wide = Math.max(3, pen.canvas.width / 150);
  for (const [colour, width] of [["#000", wide], ["#fff", wide / 2]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.lineCap = "square";
    pen.stroke(edges);
  }
}

function legend(last) {
  const swatch = (colour, text, kind = "") =>
    el("li", {}, el("i", { class: kind, style: `background:${colour}` }), text);
  const items = { picture: [], origin: data.origins.map((o) => swatch(rgb(o.colour), o.name)),
    pass: [swatch(gradient, `pass 0 to ${last}`, "wide")] }[chosen()];
  $("legend").replaceChildren(swatch("var(--blank)", "not final yet"), ...items);
}

function step(by) {
  pause();
  $("pass").value = Number($("pass").value) + by;
  draw();
}

function pause() {
  clearInterval(view.playing);
  view.playing = null;
  $("play").textContent = "Play";
}

function play() {
  if (view.playing) return pause();
  const slider = $("pass");
  const last = Number(slider.max);
  if (Number(slider.value) >= last) slider.value = 0;
  const [frames, rate] = [120, 20];
  const stride = Math.max(1, Math.round(last / frames));
  $("play").textContent = "Pause";
  view.playing = setInterval(() => {
    slider.value = Number(slider.value) + stride;
    draw();
    if (Number(slider.value) >= last) pause();
  }, Math.max(1000 / rate, Math.min(400, 4000 / Math.max(last, 1))));
  return undefined;
}

function move(by) {
  const list = shownEntries();
  const entry = list[list.indexOf(view.entry) + by];
  if (entry) openViewer(entry);
}

function viewer() {
  $("pass").addEventListener("input", () => { pause(); draw(); });
  for (const id of ["overlay", "new-cells", "islands"]) $(id).addEventListener("change", draw);
  $("play").addEventListener("click", play);
  $("previous").addEventListener("click", () => move(-1));
  $("next").addEventListener("click", () => move(1));
  $("close").addEventListener("click", () => $("viewer").close());
  $("viewer").addEventListener("close", () => {
    pause();
    const back = view.entry?.node.querySelector("button.tile:not([hidden])");
    if (back) back.focus();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    if ($("viewer").open) draw();
  });
}

// ---------------------------------------------------------------- keys

function overlays(next) {
  const inputs = [...document.querySelectorAll('input[name="overlay"]')];
  inputs[(inputs.findIndex((i) => i.checked) + next) % inputs.length].checked = true;
  draw();
}

function toggle(id) {
  $(id).checked = !$(id).checked;
  draw();
}

const VIEWER_KEYS = {
  ArrowLeft: (event) => step(event.shiftKey ? -10 : -1),
  ArrowRight: (event) => step(event.shiftKey ? 10 : 1),
  Home: () => step(-1e6),
  End: () => step(1e6),
  j: () => move(1),
  k: () => move(-1),
  p: play,
  o: () => overlays(1),
  n: () => toggle("new-cells"),
  i: () => toggle("islands"),
};

// From one prompt of the list to the next, where the focus is.
function walk(by) {
  const list = shownEntries();
  const now = list.findIndex((entry) => entry.node.contains(document.activeElement));
  const entry = list[now < 0 ? 0 : now + by];
  const button = entry?.node.querySelector("button.tile:not([hidden])");
  if (button) {
    button.focus({ preventScroll: true });
    entry.node.scrollIntoView({ block: "center" });
  }
}

document.addEventListener("keydown", (event) => {
  const { target } = event;
  const typing = target.matches('input[type="search"], select');
  if (event.ctrlKey || event.metaKey || event.altKey || typing || $("help").open) return;
  const inView = $("viewer").open;
  // Radio buttons move by arrows themselves.
  if (inView && target.matches('input[type="radio"]') && event.key.startsWith("Arrow")) return;
  const act = inView
    ? VIEWER_KEYS[event.key]
    : { "/": () => $("filter-text").focus(), j: () => walk(1), k: () => walk(-1) }[event.key];
  if (event.key === "?") $("help").showModal();
  else if (act) act(event);
  else return;
  event.preventDefault();
});

// ---------------------------------------------------------------- start

$("about").textContent = data.about;
$("runs-note").textContent = data.notes.runs;
$("failure-count").textContent = data.tables.failures.rows.length
  ? `(${data.tables.failures.rows.length})` : "";
table("runs-table", data.tables.runs);
table("failures-table", data.tables.failures);
table("settings-table", data.tables.settings);
if (data.tables.paired) {
  $("paired").hidden = false;
  $("paired-head").textContent = data.notes.paired_head;
  $("paired-note").replaceChildren(...data.notes.paired.map((note) => el("p", {}, prose(note))));
  table("paired-table", data.tables.paired);
}
plots();
maps();
list();
filters();
viewer();
