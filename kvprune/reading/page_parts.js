// What the sections of the page are made of: elements, numbers, text, tables. page.js follows in the same module.

const SHOWN = 100; // entries of a long list that are put in at a time

const $ = (id) => document.getElementById(id);
const list = (value) => (Array.isArray(value) ? value : []);
const known = (value) => typeof value === "number" && Number.isFinite(value);
const given = (value) => value !== null && value !== undefined;

/** An element with attributes and children; strings become text, never markup. */
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (given(value)) node.setAttribute(name, value);
  node.append(...children.flat().filter(given));
  return node;
}

/** Marks the elements that are chosen for those who see and those who hear the page. */
function mark(nodes, chosen) {
  for (const node of nodes) {
    if (chosen(node)) node.setAttribute("aria-current", "true");
    else node.removeAttribute("aria-current");
  }
}

/** Shows a section, and names it in the list of sections. */
function open(id) {
  $(id).hidden = false;
  $("sections").append(make("a", { href: `#${id}` }, $(`${id}-title`).textContent));
}

// --- numbers ---------------------------------------------------------------------------------------------------------

const whole = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

/** A number to about three figures. */
function figure(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const decimals = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const short = size < 1e-3 || size >= 1e5 ? value.toExponential(1) : value.toFixed(decimals);
  return short.replaceAll("-", "−");
}

/** A share as a percentage, to two figures where it is small. */
function share(value) {
  if (!known(value)) return "–";
  const percent = value * 100;
  if (percent === 0) return "0%";
  if (percent < 1e-3) return `${percent.toExponential(0).replaceAll("-", "−")}%`;
  return `${percent >= 10 ? percent.toFixed(1) : percent.toPrecision(2)}%`;
}

// --- text of a model: nothing in it is invisible, nothing in it is markup --------------------------------------------

const SIGNS = { " ": "␣", "\n": "⏎", "\r": "‹CR›", "\t": "⇥", "\u00a0": "⍽" };
const UNSEEN = /[\p{Z}\p{C}]/u;

/** What stands for a character that is not seen by itself. */
function sign(char) {
  return SIGNS[char] ?? `‹U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`;
}

/** Text as nodes, its unseen characters as signs; in running text plain spaces stay as they are. */
function seen(text, running = false) {
  const chars = [...String(text ?? "")];
  const joins = (char) => (char === "\u200c" || char === "\u200d") && chars.length > 1;
  const nodes = [];
  let plain = !running && /^\p{M}/u.test(chars[0] ?? "") ? "◌" : "";
  for (const char of chars) {
    if (!UNSEEN.test(char) || joins(char) || (running && char === " ")) {
      plain += char;
      continue;
    }
    nodes.push(plain, make("bdi", { class: "sign" }, sign(char)));
    plain = "";
  }
  return [...nodes, plain].filter((node) => node !== "");
}

/** A name: running text, kept from turning the text around it. */
const named = (text) => make("bdi", {}, seen(text, true));

/** A token by itself. */
function token(text) {
  return make("bdi", { class: "token" }, text === "" ? make("span", { class: "sign" }, "empty") : seen(text));
}

/** A token in its context, in the direction of the text. */
function context(item) {
  const marked = make("mark", {}, seen(item.token));
  return make("p", { class: "context", dir: "auto" }, seen(item.before, true), marked, seen(item.after, true));
}

/** A line under a context: some words, and where in the corpus it stands. */
function place(words, { document, offset }) {
  const parts = words ? [words] : [];
  if (given(document)) parts.push(known(document) ? `document ${document}` : named(document));
  if (known(offset)) parts.push(`character ${whole(offset)}`);
  return make("p", { class: "place" }, parts.flatMap((part, at) => (at ? [" · ", part] : [part])));
}

// --- tables and long lists -------------------------------------------------------------------------------------------

/** A table in a box of its own that scrolls: columns are [heading, row → cell]; the first cell heads its row. */
function table(caption, columns, rows) {
  const cell = (at, content) => make(at ? "td" : "th", { scope: at ? null : "row" }, content);
  const head = columns.map(([heading]) => make("th", { scope: "col" }, heading));
  const body = rows.map((row) => make("tr", {}, columns.map(([, content], at) => cell(at, content(row)))));
  const parts = [make("caption", {}, caption), make("thead", {}, make("tr", {}, head)), make("tbody", {}, body)];
  return make("div", { class: "scroll", role: "region", "aria-label": caption, tabindex: 0 }, make("table", {}, parts));
}

/** Puts the first entries into a box, and has a button for the next ones. */
function paged(box, items, draw, button) {
  let shown = 0;
  const next = () => {
    box.append(...items.slice(shown, shown + SHOWN).map(draw));
    shown = Math.min(shown + SHOWN, items.length);
    button.hidden = shown === items.length;
    button.textContent = `Show more (${whole(items.length - shown)} left)`;
  };
  box.replaceChildren();
  button.onclick = next;
  next();
}

/** A heading with a long list under it. */
function longList(box, title, items, draw) {
  const [entries, button] = [make("ul", { class: "triggers" }), make("button", { type: "button", class: "more" })];
  box.append(make("h3", {}, title), entries, button);
  paged(entries, items, draw, button);
}
