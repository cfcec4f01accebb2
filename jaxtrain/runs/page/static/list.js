"use strict";
// The list of runs: their selection and states.

jaxtrain.STATES = {
  running: "running",
  finished: "finished",
  stopped: "stopped",
  interrupted: "interrupted",
  failed: "failed",
  died: "died",
  model: "not trained here",
};

jaxtrain.RunList = class {
  // changed(): called when the selection changes. open(name): called to show a run's details.
  constructor(root, filter, changed, open) {
    this.root = root;
    this.filter = filter;
    this.changed = changed;
    this.open = open;
    this.runs = [];
    this.chosen = [];
    this.touched = false; // whether the user has selected runs
    this.colours = new Map();
    this.items = new Map();
    filter.addEventListener("input", () => this.hide());
  }

  // A run keeps its colour as long as the page is open.
  colour(name) {
    if (!this.colours.has(name)) this.colours.set(name, this.colours.size);
    return this.colours.get(name);
  }

  update(runs) {
    this.runs = runs;
    const names = new Set(runs.map((run) => run.name));
    for (const name of this.chosen) if (names.has(name)) this.colour(name); // in this order
    for (const [name, item] of this.items) {
      if (!names.has(name)) {
        item.line.remove();
        this.items.delete(name);
      }
    }
    runs.forEach((run, i) => {
      if (!this.items.has(run.name)) this.items.set(run.name, this.item(run.name));
      const { line } = this.items.get(run.name);
      if (this.root.children[i] !== line)
        this.root.insertBefore(line, this.root.children[i] || null);
      this.refresh(run);
    });
    this.hide();
    document.getElementById("no-runs").hidden = runs.length > 0;
  }

  item(name) {
    const { el } = jaxtrain;
    const box = el("input", {
      type: "checkbox",
      checked: this.chosen.includes(name),
      onchange: () => this.choose(name, box.checked),
    });
    const swatch = el("span", { class: "place" });
    const state = el("span", { class: "state" });
    const figures = el("small");
    const bar = el("progress", {
      max: 1,
      value: 0,
      "aria-label": `Progress of ${name}`,
      hidden: true,
    });
    const more = el(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-label": `Details of ${name}`,
        onclick: () => this.open(name),
      },
      "Details",
    );
    const label = el("label", {}, box, swatch, el("b", {}, name));
    const line = el(
      "li",
      {},
      el("div", { class: "over" }, label, more),
      el("div", { class: "under" }, state, figures),
      bar,
    );
    return { line, box, swatch, state, figures, bar };
  }

  refresh(run) {
    const item = this.items.get(run.name);
    const on = this.chosen.includes(run.name);
    item.box.checked = on;
    jaxtrain.fill(item.swatch, on ? jaxtrain.swatch(this.colour(run.name)) : null);
    item.state.className = `state is-${run.state}`;
    item.state.textContent = jaxtrain.STATES[run.state] || run.state;
    item.state.title = run.status || run.holder || "";
    const { number } = jaxtrain;
    const parts = [];
    const all =
      run.total_steps && run.total_steps !== run.step ? `/${number(run.total_steps)}` : "";
    if (run.step !== null) parts.push(`${number(run.step)}${all} steps`);
    if (run.loss !== null) parts.push(`loss ${number(run.loss)}`);
    if (run.bpb !== null) parts.push(`${number(run.bpb)} bpb`);
    item.figures.textContent = parts.join(" \u00b7 ");
    item.bar.hidden = run.state !== "running" || !run.total_steps;
    item.bar.value = run.total_steps ? run.step / run.total_steps : 0;
  }

  choose(name, on) {
    this.touched = true;
    this.chosen = on ? [...this.chosen, name] : this.chosen.filter((other) => other !== name);
    for (const run of this.runs) this.refresh(run);
    this.changed();
  }

  hide() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [name, item] of this.items) {
      item.line.hidden = !words.every((word) => name.toLowerCase().includes(word));
    }
  }
};
