"use strict";
// Rows of runs, and curves made of them. The scripts are no modules; they share this one object.
const jaxtrain = {};

jaxtrain.MAX_POINTS = 1500; // points drawn per line
jaxtrain.AXES = { step: "Steps", tokens: "Tokens", seconds: "Seconds of training" };
jaxtrain.MEASURES = [
  { kind: "train", column: "loss", title: "Training loss", unit: "nats per token", smooth: true },
  { kind: "validation", column: "bpb", title: "Validation", unit: "bits per byte" },
  { kind: "validation", column: "loss", title: "Validation loss", unit: "nats per token" },
  { kind: "train", column: "bpb", title: "Training", unit: "bits per byte", smooth: true },
  { kind: "train", column: "lr", title: "Learning rate", unit: "" },
  { kind: "train", column: "tokens_per_s", title: "Tokens per second", unit: "", zero: true },
  {
    kind: "train",
    column: "memory_bytes",
    title: "Memory",
    unit: "GiB",
    scale: 2 ** -30,
    zero: true,
  },
  { kind: "train", column: "mfu", title: "MFU", unit: "%", scale: 100, zero: true },
  { kind: "train", column: "grad_norm", title: "Gradient norm", unit: "", smooth: true },
  {
    kind: "train",
    column: "data_wait",
    title: "Waiting for data",
    unit: "% of the time",
    scale: 100,
    zero: true,
  },
];
jaxtrain.HIDDEN = new Set(["step", "time", "tokens", "kind", "nonfinite"]);

// One run's rows, as they arrive.
jaxtrain.RunRows = class {
  constructor(name) {
    this.name = name;
    this.clear();
  }

  clear() {
    this.kinds = { train: [], validation: [] };
    this.events = [];
    this.damaged = 0;
    this.version = 0;
    this.clock = { rows: -1 };
  }

  add(rows) {
    for (const row of rows) {
      if (row.kind in this.kinds) this.kinds[row.kind].push(row);
      else if (row.kind === "event") this.events.push(row);
    }
    this.version += 1;
  }

  start() {
    return this.events.findLast((row) => row.event === "start") || {};
  }

  // Names of the numeric columns in rows of a kind.
  columns(kind) {
    const found = new Set();
    const rows = this.kinds[kind];
    const looked = [...rows.slice(0, 3), ...rows.slice(-3)];
    for (const row of looked) {
      for (const key in row)
        if (typeof row[key] === "number" && !jaxtrain.HIDDEN.has(key)) found.add(key);
    }
    return found;
  }

  // Steps, tokens and seconds of training (without validations), as `jaxtrain compare` counts them.
  times() {
    const rows = this.kinds.train;
    if (this.clock.rows === rows.length) return this.clock;
    const rates = rows
      .map((row) => row.tokens_per_s)
      .filter((rate) => rate > 0)
      .sort((a, b) => a - b);
    const middle = rates.length >> 1;
    const usual = rates.length % 2 ? rates[middle] : (rates[middle - 1] + rates[middle]) / 2;
    const per = this.start().tokens_per_step || 0;
    const clock = { rows: rows.length, step: [0], tokens: [0], seconds: [0] };
    for (const row of rows) {
      const total = row.tokens ?? row.step * per;
      const rate = row.tokens_per_s || usual;
      const done = total - clock.tokens.at(-1);
      clock.seconds.push(rate ? clock.seconds.at(-1) + done / rate : row.time);
      clock.tokens.push(total);
      clock.step.push(row.step);
    }
    this.clock = clock;
    return clock;
  }

  // {x, y} of a measure against steps, tokens or seconds; x is increasing.
  curve(measure, axis) {
    const x = [];
    const y = [];
    const clock = this.times();
    for (const row of this.kinds[measure.kind]) {
      const value = row[measure.column];
      if (typeof value !== "number") continue;
      const at = axis === "step" ? row.step : jaxtrain.between(clock.step, clock[axis], row.step);
      if (x.length && at < x.at(-1)) continue;
      if (x.length && at === x.at(-1)) {
        x.pop();
        y.pop();
      }
      x.push(at);
      y.push(value * (measure.scale || 1));
    }
    return { x, y };
  }
};

// The index of the last x at or before a position; -1 before the first.
jaxtrain.lastAt = (xs, place) => {
  let low = -1;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (xs[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
};

// Linear interpolation.
jaxtrain.between = (xs, ys, place) => {
  const i = jaxtrain.lastAt(xs, place);
  if (i < 0) return ys[0];
  if (i === xs.length - 1) return ys[i];
  const share = (place - xs[i]) / (xs[i + 1] - xs[i]);
  return ys[i] + share * (ys[i + 1] - ys[i]);
};

// An exponential moving average that starts at the first value.
jaxtrain.smoothed = (ys, weight) => {
  let sum = 0;
  let total = 0;
  return ys.map((y) => {
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return sum / total;
  });
};

// Downsample a range: the lowest and highest point of each of a few hundred buckets.
jaxtrain.thinned = (xs, columns, range) => {
  let first = 0;
  let last = xs.length;
  if (range) {
    first = Math.max(0, jaxtrain.lastAt(xs, range[0]));
    last = Math.min(xs.length, jaxtrain.lastAt(xs, range[1]) + 2);
  }
  const count = last - first;
  if (count <= jaxtrain.MAX_POINTS)
    return [xs, ...columns].map((column) => column.slice(first, last));
  const size = Math.ceil((2 * count) / jaxtrain.MAX_POINTS);
  const kept = new Set([first, last - 1]);
  const ys = columns.at(-1);
  for (let begin = first; begin < last; begin += size) {
    let low = begin;
    let high = begin;
    for (let i = begin; i < Math.min(begin + size, last); i += 1) {
      if (ys[i] < ys[low]) low = i;
      if (ys[i] > ys[high]) high = i;
    }
    kept.add(low).add(high);
  }
  const picked = [...kept].sort((a, b) => a - b);
  return [xs, ...columns].map((column) => picked.map((i) => column[i]));
};

// ---- numbers for people ------------------------------------------------------------------------

jaxtrain.number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  for (const [unit, letter] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e4, "K"],
  ]) {
    if (size >= unit) return `${+(value / (letter === "K" ? 1e3 : unit)).toPrecision(3)}${letter}`;
  }
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return String(+value.toPrecision(4));
};

jaxtrain.bytes = (count) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(4, Math.max(0, Math.floor(Math.log2(Math.max(count, 1)) / 10)));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
};

jaxtrain.duration = (seconds) => {
  const parts = [
    [86400, "d"],
    [3600, "h"],
    [60, "m"],
    [1, "s"],
  ];
  const i = parts.findIndex(([size]) => seconds >= size);
  if (i < 0) return `${seconds.toFixed(1)}s`;
  const [size, letter] = parts[i];
  const first = `${Math.floor(seconds / size)}${letter}`;
  if (i === parts.length - 1) return first;
  const [small, next] = parts[i + 1];
  return `${first}${String(Math.floor((seconds % size) / small)).padStart(2, "0")}${next}`;
};
