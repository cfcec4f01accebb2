"use strict";
// One chart of a measure over several runs, drawn by uPlot.

jaxtrain.HEIGHT = 230;

jaxtrain.Chart = class {
  // view: {runs: [{name, colour, rows}], axis, logX, logY, smooth, zoom, setZoom(range)}
  constructor(measure, view) {
    const { el } = jaxtrain;
    this.measure = measure;
    this.view = view;
    this.lines = [];
    this.plot = null;
    this.made = "";
    this.box = el("div", { class: "plot", "aria-hidden": "true" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.box.append(this.tip);
    const unit = measure.unit ? ` (${measure.unit})` : "";
    this.title = `${measure.title}${unit}`;
    const caption = el("figcaption", {}, measure.title, el("small", {}, unit));
    this.figure = el("figure", { class: "chart", tabindex: "0" }, caption, this.box);
    this.figure.dataset.measure = `${measure.kind}-${measure.column}`;
    this.figure.addEventListener("keydown", (event) => this.key(event));
    this.figure.addEventListener("blur", () => this.hideTip());
    this.box.addEventListener("pointerleave", () => this.hideTip());
    this.seen = new ResizeObserver(() => this.resize());
    this.seen.observe(this.box);
  }

  destroy() {
    this.seen.disconnect();
    this.plot?.destroy();
    this.figure.remove();
  }

  resize() {
    const width = this.box.clientWidth;
    if (this.plot && width && width !== this.plot.width)
      this.plot.setSize({ width, height: jaxtrain.HEIGHT });
    else if (!this.plot && width) this.update();
  }

  // Lines to draw, with all points: per run {name, colour, x, y, raw}; raw: y before smoothing.
  read() {
    const { axis, logX, logY, smooth } = this.view;
    const lines = [];
    for (const run of this.view.runs) {
      const { x, y } = run.rows.curve(this.measure, axis);
      const keep = (i) => (!logX || x[i] > 0) && (!logY || y[i] > 0);
      const kept = logX || logY ? x.map((_, i) => i).filter(keep) : null;
      const xs = kept ? kept.map((i) => x[i]) : x;
      const ys = kept ? kept.map((i) => y[i]) : y;
      if (!xs.length) continue;
      const noisy = this.measure.smooth && smooth > 0;
      const shown = noisy ? jaxtrain.smoothed(ys, smooth) : ys;
      lines.push({ name: run.name, colour: run.colour, x: xs, y: shown, raw: noisy ? ys : null });
    }
    return lines;
  }

  update() {
    this.lines = this.read();
    this.figure.hidden = !this.lines.length;
    this.describe();
    const width = this.box.clientWidth;
    if (!this.lines.length || !width) return;
    const { zoom } = this.view;
    const tables = this.lines.map((line) =>
      jaxtrain.thinned(line.x, line.raw ? [line.raw, line.y] : [line.y], zoom),
    );
    const data = uPlot.join(tables);
    const made = JSON.stringify([
      this.view.logX,
      this.view.logY,
      this.view.axis,
      this.view.theme,
      this.lines.map((line) => [line.name, line.colour, !!line.raw, this.dotted(line)]),
    ]);
    this.range = zoom || [
      Math.min(...this.lines.map((l) => l.x[0])),
      Math.max(...this.lines.map((l) => l.x.at(-1))),
    ];
    if (made !== this.made) {
      this.plot?.destroy();
      this.made = made;
      this.plot = new uPlot(this.options(width), data, this.box);
    } else this.plot.setData(data);
    this.box.dataset.points = String(this.lines.reduce((sum, line) => sum + line.x.length, 0));
  }

  options(width) {
    const ink = jaxtrain.colour("ink-soft");
    const edge = jaxtrain.colour("ink-edge");
    const series = [{}];
    for (const line of this.lines) {
      const stroke = jaxtrain.colour(`run-${line.colour % 8}`);
      const dash = line.colour >= 8 ? [6, 4] : undefined;
      const points = { show: this.dotted(line), size: 5, fill: stroke };
      if (line.raw)
        series.push({ stroke, width: 1, alpha: 0.35, spanGaps: true, points: { show: false } });
      series.push({ stroke, dash, width: 1.8, spanGaps: true, points });
    }
    const values = (_, splits) =>
      splits.map((value) => (value === null ? "" : jaxtrain.number(value)));
    const axis = {
      stroke: ink,
      grid: { stroke: edge, width: 1 },
      ticks: { stroke: edge, width: 1 },
      values,
      font: "12px system-ui, sans-serif",
    };
    return {
      width,
      height: jaxtrain.HEIGHT,
      legend: { show: false },
      padding: [10, 14, 0, 0],
      scales: {
        x: { time: false, distr: this.view.logX ? 3 : 1, range: () => this.xRange() },
        y: { distr: this.view.logY ? 3 : 1, range: () => this.yRange() },
      },
      series,
      axes: [
        { ...axis, size: 34, space: 62 },
        { ...axis, size: 58, space: 34 },
      ],
      cursor: {
        sync: { key: "runs", scales: ["x", null] },
        drag: { x: true, y: false, setScale: false },
        points: { show: false },
        y: false,
        bind: { dblclick: () => () => this.view.setZoom(null) },
      },
      hooks: {
        setSelect: [(u) => this.selected(u)],
        setCursor: [(u) => this.moved(u)],
      },
    };
  }

  // Whether a line has so few points that each is drawn as a dot.
  dotted(line) {
    return line.x.length < (this.measure.kind === "validation" ? 40 : 8) && !line.raw;
  }

  xRange() {
    const [low, high] = this.range;
    if (high > low) return [low, high];
    return this.view.logX ? [low / 2, high * 2] : [low - 1, high + 1];
  }

  // [low, high] of the visible values. A few extremes (the first steps, a spike) may lie outside.
  yRange() {
    const [from, to] = this.range;
    const values = [];
    for (const { x, y } of this.lines) {
      for (let i = Math.max(0, jaxtrain.lastAt(x, from)); i < x.length && x[i] <= to; i += 1)
        values.push(y[i]);
    }
    if (!values.length) return this.view.logY ? [0.1, 1] : [0, 1];
    values.sort((a, b) => a - b);
    const low = values[0];
    const full = this.view.zoom || this.view.logY || values.length <= 40;
    const high = values[Math.floor((values.length - 1) * (full ? 1 : 0.97))];
    if (this.view.logY) return [low / 1.1, high * 1.1];
    if (this.measure.zero) return [Math.min(0, low), high * 1.08 || 1];
    const pad = 0.06 * (high - low) || 0.05 * Math.abs(high) || 1;
    return [low - pad, high + pad];
  }

  selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.view.setZoom(range);
  }

  // ---- hover and keyboard ----------------------------------------------------------------------

  // The values at an x position: each run's last point at or before it.
  at(place) {
    const found = [];
    for (const line of this.lines) {
      const i = jaxtrain.lastAt(line.x, place);
      if (i >= 0 && (i < line.x.length - 1 || line.x[i] === place || place <= line.x.at(-1)))
        found.push({ line, x: line.x[i], y: line.y[i] });
    }
    return found;
  }

  moved(u) {
    const { left } = u.cursor;
    const own = this.box.matches(":hover") || this.keyed;
    if (left < 0 || !own) return this.hideTip();
    const place = u.posToVal(left, "x");
    return this.showTip(u, left, this.at(place));
  }

  showTip(u, left, found) {
    if (!found.length) return this.hideTip();
    const { el } = jaxtrain;
    const place = Math.max(...found.map((one) => one.x));
    const rows = found.map(({ line, y }) =>
      el(
        "div",
        {},
        jaxtrain.swatch(line.colour),
        el("span", {}, line.name),
        el("b", {}, jaxtrain.number(y)),
      ),
    );
    jaxtrain.fill(
      this.tip,
      el("small", {}, `${jaxtrain.AXES[this.view.axis]}: ${jaxtrain.number(place)}`),
      rows,
    );
    this.tip.hidden = false;
    const start = u.bbox.left / devicePixelRatio;
    const right = left > u.bbox.width / devicePixelRatio / 2;
    this.tip.style.left = right ? "" : `${start + left + 12}px`;
    this.tip.style.right = right ? `${this.box.clientWidth - start - left + 12}px` : "";
    return undefined;
  }

  hideTip() {
    this.keyed = false;
    this.tip.hidden = true;
  }

  key(event) {
    if (!this.plot || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.range;
    const step = (high - low) / (event.shiftKey ? 10 : 100);
    const now = this.place ?? (low + high) / 2;
    const places = { ArrowLeft: now - step, ArrowRight: now + step, Home: low, End: high };
    if (event.key in places) {
      this.place = Math.min(high, Math.max(low, places[event.key]));
      this.keyed = true;
      this.plot.setCursor({ left: this.plot.valToPos(this.place, "x"), top: 20 });
      const found = this.at(this.place);
      const values = found.map(({ line, y }) => `${line.name} ${jaxtrain.number(y)}`);
      jaxtrain.say(
        `${jaxtrain.AXES[this.view.axis]} ${jaxtrain.number(this.place)}: ` +
          (values.join(", ") || "no value"),
      );
    } else if (event.key === "+" || event.key === "=") this.zoomBy(0.5, now);
    else if (event.key === "-") this.zoomBy(2, now);
    else if (event.key === "0" || event.key === "Escape") this.view.setZoom(null);
    else return;
    event.preventDefault();
  }

  zoomBy(factor, around) {
    const [low, high] = this.range;
    this.view.setZoom([around - (around - low) * factor, around + (high - around) * factor]);
  }

  // Set the chart's description for screen readers.
  describe() {
    const last = this.lines.map((line) => `${line.name} ends at ${jaxtrain.number(line.y.at(-1))}`);
    const keys = "Arrow keys read values, plus and minus zoom, 0 shows all.";
    this.figure.setAttribute(
      "aria-label",
      `${this.title} against ${jaxtrain.AXES[this.view.axis].toLowerCase()}: ` +
        `${last.join(", ")}. ${keys}`,
    );
  }
};
