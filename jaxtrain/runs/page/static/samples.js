"use strict";
// Samples generated during training, side by side: one run at several steps, or several runs.

jaxtrain.Samples = class {
  constructor(root) {
    this.root = root;
    this.texts = new Map();
    this.names = [];
    this.shown = "";
  }

  async show(names) {
    this.names = names;
    const { el } = jaxtrain;
    const lists = await Promise.all(
      names.map((name) =>
        jaxtrain
          .fetched(jaxtrain.query("/api/samples", { run: name }))
          .catch(() => ({ steps: [] })),
      ),
    );
    const there = names
      .map((name, i) => ({ name, steps: lists[i].steps }))
      .filter((run) => run.steps.length);
    const key = JSON.stringify(there);
    if (key === this.shown || this.names !== names) return;
    this.shown = key;
    if (!there.length) {
      jaxtrain.fill(
        this.root,
        el(
          "p",
          { class: "empty" },
          names.length
            ? "These runs have no samples: sample.every says how often a run writes some."
            : "Choose one or more runs: what their models wrote appears here.",
        ),
      );
      return;
    }
    const steps = [...new Set(there.flatMap((run) => run.steps))].sort((a, b) => a - b);
    const alone = there.length === 1;
    const picks = alone ? jaxtrain.spaced(there[0].steps, 3) : [steps.at(-1)];
    const panels = alone
      ? picks.map((step) => this.panel(there[0], step))
      : there.map((run) => this.panel(run, picks[0]));
    const out = el("output", { for: "through" }, `step ${jaxtrain.number(steps.at(-1))}`);
    const slider = el("input", {
      type: "range",
      id: "through",
      min: "0",
      max: String(steps.length - 1),
      value: String(steps.length - 1),
      step: "1",
      oninput: () => {
        const step = steps[+slider.value];
        out.textContent = `step ${jaxtrain.number(step)}`;
        for (const panel of alone ? panels.slice(-1) : panels) panel.go(step);
      },
    });
    const label = el(
      "label",
      { for: "through" },
      alone ? "Last column" : "Through training",
      slider,
      out,
    );
    jaxtrain.fill(
      this.root,
      el("div", { class: "bar" }, label),
      el(
        "div",
        { class: "side" },
        panels.map((panel) => panel.node),
      ),
    );
  }

  panel(run, step) {
    const { el } = jaxtrain;
    const text = el("pre", { tabindex: "0", "aria-label": `Sample of ${run.name}` });
    const choice = el(
      "select",
      { "aria-label": `Step of the sample of ${run.name}`, onchange: () => go(+choice.value) },
      run.steps.map((one) =>
        el("option", { value: String(one) }, `step ${one.toLocaleString("en")}`),
      ),
    );
    // Show the run's newest sample at or before a step.
    const go = async (wanted) => {
      const at = run.steps[Math.max(0, jaxtrain.lastAt(run.steps, wanted))];
      choice.value = String(at);
      const key = `${at} ${run.name}`;
      if (!this.texts.has(key)) {
        try {
          this.texts.set(
            key,
            (await jaxtrain.fetched(jaxtrain.query("/api/samples", { run: run.name, step: at })))
              .text,
          );
        } catch (error) {
          text.textContent = error.message;
          return;
        }
      }
      if (choice.value === String(at)) text.textContent = this.texts.get(key);
    };
    go(step);
    return { node: el("div", { class: "panel" }, el("h2", {}, run.name), choice, text), go };
  }
};

// Select `count` evenly spaced values, including the first and the last.
jaxtrain.spaced = (values, count) => {
  if (values.length <= count) return values;
  return Array.from(
    { length: count },
    (_, i) => values[Math.round((i * (values.length - 1)) / (count - 1))],
  );
};
