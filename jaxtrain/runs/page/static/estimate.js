"use strict";
// The dry run: whether a run fits, how fast it is, how long it takes.

jaxtrain.Estimate = class {
  constructor(root, options) {
    const { el } = jaxtrain;
    const config = el(
      "select",
      { id: "config", name: "config" },
      options.configs.map((name) =>
        el("option", { value: name }, name.startsWith("run:") ? `run ${name.slice(4)}` : name),
      ),
    );
    if (options.configs.includes("quickstart")) config.value = "quickstart";
    const text = (id, hint, kept = "") =>
      el("input", {
        type: "text",
        id,
        name: id,
        placeholder: hint,
        value: kept,
        autocomplete: "off",
        spellcheck: "false",
      });
    this.button = el("button", { type: "submit", class: "main" }, "Estimate");
    const field = (id, label, input) =>
      el("div", { class: "field" }, el("label", { for: id }, label), input);
    this.form = el(
      "form",
      { class: "form", onsubmit: (event) => this.ask(event) },
      field("config", "Configuration", config),
      field("overrides", "Overrides", text("overrides", "train.steps=2000 model.depth=12")),
      field("device", "Device", text("device", "H200, H100, RTX-4090, T4", "H200")),
      field(
        "devices",
        "How many",
        el("input", {
          type: "number",
          id: "devices",
          name: "devices",
          min: "1",
          max: "4096",
          value: "1",
        }),
      ),
      this.button,
    );
    this.answer = el("div", { role: "status" });
    this.command = el("div");
    root.append(
      el(
        "p",
        { class: "note" },
        "Does it fit, how fast is it, how long does it take? " +
          "The step is compiled for devices that are pretended; that takes a while.",
      ),
      this.form,
      this.command,
      this.answer,
    );
    this.form.addEventListener("input", () => this.say());
    this.say();
  }

  values() {
    return Object.fromEntries(new FormData(this.form));
  }

  // Show the equivalent commands.
  say() {
    const { config, overrides, device, devices } = this.values();
    const name = config.startsWith("run:")
      ? `${jaxtrain.folder}/${config.slice(4)}/config.yaml`
      : config;
    const words = ["--config", name, ...overrides.split(/\s+/).filter(Boolean)];
    const where = [
      ...(device ? ["--device", device] : []),
      ...(devices ? ["--devices", devices] : []),
    ];
    jaxtrain.fill(
      this.command,
      jaxtrain.copyable("Start this run", ["jaxtrain", "train", ...words]),
      jaxtrain.copyable("This estimate", ["jaxtrain", "estimate", ...words, ...where]),
    );
  }

  async ask(event) {
    event.preventDefault();
    const { el } = jaxtrain;
    this.button.disabled = true;
    const began = Date.now();
    const wait = el("p", { class: "note" }, "Compiling...");
    const timer = setInterval(() => {
      wait.textContent = `Compiling... ${Math.round((Date.now() - began) / 1000)} s`;
    }, 1000);
    jaxtrain.fill(this.answer, wait);
    try {
      const body = JSON.stringify(this.values());
      this.show(
        await jaxtrain.fetched("/api/estimate", {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body,
        }),
      );
    } catch (error) {
      jaxtrain.fill(this.answer, el("p", { class: "error" }, error.message));
    } finally {
      clearInterval(timer);
      this.button.disabled = false;
    }
  }

  show(r) {
    const { el, number, bytes } = jaxtrain;
    const tile = (label, value, note, css = "") =>
      el(
        "div",
        { class: `tile ${css}` },
        el("span", {}, label),
        el("b", {}, value),
        el("small", {}, note),
      );
    const range = ([low, high], show) =>
      show(low) === show(high) ? show(high) : `${show(low)} to ${show(high)}`;
    const hours = range([r.hours[1], r.hours[0]], (value) => jaxtrain.duration(value * 3600));
    const mesh = Object.entries(r.mesh)
      .map(([axis, size]) => `${axis} ${size}`)
      .join(" x ");
    jaxtrain.fill(
      this.answer,
      el(
        "div",
        { class: "tiles" },
        tile(
          "Fits?",
          r.fits ? "yes" : "no",
          `${bytes(r.total_bytes)} of ${bytes(r.device_bytes)}`,
          r.fits ? "good" : "bad",
        ),
        tile(
          "Tokens per second",
          range(r.tokens_per_s, number),
          `on ${r.device}${mesh ? `, ${mesh}` : ""}`,
        ),
        tile(
          "Time of the run",
          hours,
          `${number(r.steps)} steps of ${number(r.tokens_per_step)} tokens`,
        ),
        tile("Parameters", number(r.parameters), ""),
      ),
      r.advice ? el("p", { class: "note" }, r.advice) : null,
      jaxtrain.table(
        "Memory of one device",
        ["Memory of one device", "Size"],
        Object.entries(r.parts).map(([part, size]) => [part, bytes(size)]),
      ),
      el(
        "p",
        { class: "note" },
        "An estimate from the share of its peak that a large model reaches on such a device, " +
          "not a measurement: a small one is slower. A range is between no exchange hidden behind compute, and all.",
      ),
    );
  }
};
