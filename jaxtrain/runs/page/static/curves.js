"use strict";
// Charts that overlay several runs, and the choice of their x axis.

jaxtrain.Curves = class {
  constructor(root, kept = {}) {
    const { el } = jaxtrain;
    this.root = root;
    this.charts = new Map();
    this.view = {
      runs: [],
      axis: kept.axis in jaxtrain.AXES ? kept.axis : "step",
      logX: !!kept.logX,
      logY: !!kept.logY,
      smooth: kept.smooth ?? 0.6,
      zoom: null,
      theme: 0,
      setZoom: (range) => this.setZoom(range),
    };
    this.changed = () => {};
    const axis = el(
      "select",
      { id: "axis", onchange: () => this.set({ axis: axis.value, zoom: null }) },
      Object.entries(jaxtrain.AXES).map(([value, text]) =>
        el("option", { value, selected: value === this.view.axis }, text),
      ),
    );
    const box = (id, text, key) => {
      const input = el("input", {
        type: "checkbox",
        id,
        checked: this.view[key],
        onchange: () => this.set({ [key]: input.checked }),
      });
      return el("label", { for: id }, input, text);
    };
    const value = el("output", { for: "smooth" }, this.view.smooth.toFixed(2));
    const smooth = el("input", {
      type: "range",
      id: "smooth",
      min: "0",
      max: "0.98",
      step: "0.02",
      value: String(this.view.smooth),
      oninput: () => {
        value.textContent = (+smooth.value).toFixed(2);
        this.set({ smooth: +smooth.value });
      },
    });
    this.all = el(
      "button",
      { type: "button", id: "zoom-reset", disabled: true, onclick: () => this.setZoom(null) },
      "Show all",
    );
    const zoom = (label, factor, name) =>
      el(
        "button",
        { type: "button", "aria-label": name, onclick: () => this.zoomBy(factor) },
        label,
      );
    this.bar = el(
      "div",
      { class: "bar", role: "toolbar", "aria-label": "Curves" },
      el("label", { for: "axis" }, "Against", axis),
      box("log-x", "log x", "logX"),
      box("log-y", "log y", "logY"),
      el("label", { for: "smooth" }, "Smoothing", smooth, value),
      el(
        "span",
        { class: "group" },
        zoom("+", 0.5, "Zoom in"),
        zoom("\u2212", 2, "Zoom out"),
        this.all,
      ),
    );
    this.legend = el("ul", { class: "legend", "aria-label": "Runs in the charts" });
    this.main = el("div", { class: "charts" });
    this.rest = el("div", { class: "charts" });
    this.more = el("details", { class: "more" }, el("summary", {}, "More measures"), this.rest);
    this.none = el(
      "p",
      { class: "empty" },
      "Choose one or more runs that have trained: their curves appear here.",
    );
    this.hint = el(
      "p",
      { class: "hint" },
      "Drag over a chart to zoom, double-click to see all. " +
        "With the keyboard: Tab to a chart, arrow keys, + and \u2212, 0.",
    );
    root.append(this.bar, this.legend, this.none, this.main, this.more, this.hint);
    this.more.addEventListener("toggle", () => this.draw());
  }

  set(values) {
    Object.assign(this.view, values);
    this.all.disabled = !this.view.zoom;
    this.draw();
    this.changed();
  }

  setZoom(range) {
    this.set({ zoom: range });
    if (range)
      jaxtrain.say(`Zoomed to ${jaxtrain.number(range[0])} to ${jaxtrain.number(range[1])}`);
  }

  zoomBy(factor) {
    const first = [...this.charts.values()].find((chart) => chart.lines.length);
    if (first) first.zoomBy(factor, (first.range[0] + first.range[1]) / 2);
  }

  recolour() {
    this.view.theme += 1;
    this.draw();
  }

  // runs: [{name, colour, rows: RunRows}]
  show(runs) {
    this.view.runs = runs;
    jaxtrain.fill(
      this.legend,
      runs.map((run) => jaxtrain.el("li", {}, jaxtrain.swatch(run.colour), run.name)),
    );
    this.draw();
  }

  // The measures that the runs have: known ones first, then all others.
  measures() {
    const there = new Map();
    for (const measure of jaxtrain.MEASURES)
      there.set(`${measure.kind}-${measure.column}`, { ...measure, known: true, found: false });
    for (const run of this.view.runs) {
      for (const kind of ["train", "validation"]) {
        for (const column of run.rows.columns(kind)) {
          const key = `${kind}-${column}`;
          const title =
            kind === "train"
              ? column.replaceAll("_", " ")
              : `validation ${column.replaceAll("_", " ")}`;
          if (!there.has(key)) there.set(key, { kind, column, title, unit: "", known: false });
          there.get(key).found = true;
        }
      }
    }
    return [...there].filter(([, measure]) => measure.found);
  }

  draw() {
    const found = this.measures();
    const keys = new Set(found.map(([key]) => key));
    for (const [key, chart] of this.charts) {
      if (!keys.has(key)) {
        chart.destroy();
        this.charts.delete(key);
      }
    }
    for (const [key, measure] of found) {
      if (!this.charts.has(key)) {
        const chart = new jaxtrain.Chart(measure, this.view);
        this.charts.set(key, chart);
        (measure.known ? this.main : this.rest).append(chart.figure);
      }
      if (measure.known || this.more.open) this.charts.get(key).update();
    }
    // Charts are in the order of the measures, whichever runs have them.
    for (const parent of [this.main, this.rest]) {
      const figures = found
        .map(([key]) => this.charts.get(key).figure)
        .filter((one) => one.parentElement === parent);
      figures.forEach((one, i) => {
        if (parent.children[i] !== one) parent.insertBefore(one, parent.children[i]);
      });
    }
    this.none.hidden = found.length > 0;
    this.more.hidden = !this.rest.children.length;
    this.hint.hidden = !found.length;
  }
};

// ---- figures and settings ----------------------------------------------------------------------

// found: the response of `/api/compare`, or the data in a page of `jaxtrain compare --html`.
jaxtrain.showComparison = (root, found) => {
  const { el } = jaxtrain;
  const number = (value, digits) =>
    value === null || value === undefined ? "-" : value.toFixed(digits);
  const count = (value) =>
    value === null || value === undefined ? "-" : Math.round(value).toLocaleString("en");
  const parts = [];
  if (found.runs) {
    const head = [
      "Run",
      "Device",
      "Steps",
      "Tokens/s",
      "Lowest",
      `At step ${count(found.step)}`,
      `Seconds to ${number(found.target, 4)}`,
      "Speed-up",
    ];
    const rows = found.runs.map((run) => [
      run.name,
      run.device,
      count(run.steps),
      count(run.tokens_per_s),
      number(run.lowest, 4),
      number(run.at_step, 4),
      number(run.seconds, 1),
      number(run.speedup, 2),
    ]);
    parts.push(
      el("h2", {}, "Figures"),
      el(
        "p",
        { class: "note" },
        `By ${found.measure}. The first run is the baseline; ` +
          `seconds are of training, without validations.`,
      ),
      jaxtrain.table("Figures of the runs", head, rows),
    );
  } else parts.push(el("p", { class: "note" }, found.error));
  const differences = Object.entries(found.differences);
  const commit = /^([0-9a-f]{12})[0-9a-f]{28}/; // twelve digits are enough
  const text = (value) =>
    typeof value === "string" ? value.replace(commit, "$1") : JSON.stringify(value);
  parts.push(el("h2", {}, "Settings that differ"));
  if (differences.length)
    parts.push(
      jaxtrain.table(
        "Settings that differ",
        ["Setting", ...found.names],
        differences.map(([key, values]) => [key, ...values.map(text)]),
      ),
    );
  else parts.push(el("p", { class: "note" }, "None: the configurations are the same."));
  jaxtrain.fill(root, parts);
};
