"use strict";
// Helpers that build elements. Strings become text nodes, never HTML.

jaxtrain.el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made && typeof value !== "string") made[name] = value;
    else if (value !== null && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
};

jaxtrain.fill = (parent, ...children) => {
  parent.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined),
  );
  return parent;
};

// A table that may be wider than the page: it has its own scrollbar, also usable by keyboard.
jaxtrain.table = (label, head, rows) => {
  const { el } = jaxtrain;
  const line = (cells) =>
    el(
      "tr",
      {},
      cells.map((cell, i) => (i ? el("td", {}, cell) : el("th", { scope: "row" }, cell))),
    );
  const heads = el(
    "thead",
    {},
    el(
      "tr",
      {},
      head.map((text) => el("th", { scope: "col" }, text)),
    ),
  );
  const body = el("tbody", {}, rows.map(line));
  const table = el("table", {}, el("caption", { class: "hidden" }, label), heads, body);
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": label }, table);
};

// Quote a word for a shell command.
jaxtrain.quoted = (word) =>
  /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\"'\"'")}'`;

// words: the list of the command's words, or the command as a string.
jaxtrain.copyable = (label, words) => {
  const { el } = jaxtrain;
  const command = typeof words === "string" ? words : words.map(jaxtrain.quoted).join(" ");
  const button = el(
    "button",
    { type: "button", class: "copy", "aria-label": `Copy: ${label}` },
    "Copy",
  );
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      button.textContent = "Copied";
      jaxtrain.say(`Copied: ${label}`);
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => {
      button.textContent = "Copy";
    }, 1500);
  });
  const code = el("code", {}, command);
  return el("div", { class: "command" }, el("span", {}, label), code, button);
};

// Announce a text to screen readers.
jaxtrain.say = (text) => {
  const live = document.getElementById("live");
  if (live) live.textContent = text;
};

jaxtrain.swatch = (index) =>
  jaxtrain.el("i", { class: `swatch run-${index % 8}`, "aria-hidden": "true" });

// The colour of a CSS class in the current theme, for canvases.
jaxtrain.colour = (css) => {
  const probe = jaxtrain.el("i", { class: css });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};

// Tabs with keyboard control (arrow keys, Home, End). Calls `show(name)` when one is selected.
jaxtrain.tabs = (list, show) => {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (tab, focus) => {
    for (const other of tabs) {
      const on = other === tab;
      other.setAttribute("aria-selected", String(on));
      other.tabIndex = on ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !on;
    }
    if (focus) tab.focus();
    show(tab.dataset.tab);
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) choose(tab, true);
  });
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(tabs[(to + tabs.length) % tabs.length], true);
  });
  return (name) => choose(tabs.find((tab) => tab.dataset.tab === name) || tabs[0], false);
};

jaxtrain.fetched = async (path, options) => {
  const answer = await fetch(path, options);
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok)
    throw new Error(found.error?.message || found.error || `${path}: ${answer.status}`);
  return found;
};

jaxtrain.query = (path, pairs) => `${path}?${new URLSearchParams(pairs)}`;

// Theme switch: light, dark, or the system's.
jaxtrain.theme = (button, changed) => {
  const names = ["auto", "light", "dark"];
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    changed();
  };
  let kept = "auto";
  try {
    kept = localStorage.getItem("jaxtrain-theme") || "auto";
  } catch {
    /* a page from a file may have no storage */
  }
  button.addEventListener("click", () => {
    kept = names[(names.indexOf(kept) + 1) % names.length];
    try {
      localStorage.setItem("jaxtrain-theme", kept);
    } catch {
      /* as above */
    }
    apply(kept);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  apply(names.includes(kept) ? kept : "auto");
};
