// The sections of the page, each drawn from its part of the data and left out where there is none.

const data = JSON.parse($("data").textContent);

function drawHead() {
  const model = data.model ?? {};
  $("title").append(named(model.title || "Model"));
  const facts = [
    ["Commit", model.commit],
    ["Note", model.note],
    ["Run", data.run],
    ["Text", [data.text ?? []].flat().join(", ")],
    ["Tokens", known(data.tokens) ? whole(data.tokens) : null],
  ];
  for (const [name, value] of facts) {
    if (value) $("about").append(make("dt", {}, name), make("dd", {}, named(value)));
  }
}

// --- firing ----------------------------------------------------------------------------------------------------------

function drawFiring() {
  const ffns = list(data.firing);
  if (!ffns.length) return;
  open("firing");
  const points = ffns.map((ffn) => list(ffn.ranked).filter(([rank, rate]) => rank > 0 && rate > 0));
  const select = $("ffn");
  const name = (ffn) => {
    const at = ffns.indexOf(ffn);
    if (!points[at].length) return named(ffn.name);
    select.append(make("option", { value: at }, seen(ffn.name, true)));
    const button = make("button", { type: "button", title: "Show in the plot", value: at }, named(ffn.name));
    button.onclick = () => choose(at);
    return button;
  };
  const caption = "Shares of the slots: those that a token needs, and those that rarely fire";
  const box = table(caption, [["FFN", name], ...firingColumns(ffns)], ffns);
  $("firing-table").append(box);
  $("ranked").hidden = !select.options.length;
  const choose = (at) => {
    select.value = at;
    markLine(points[at], at);
    mark(box.querySelectorAll("tbody tr"), (row) => row.sectionRowIndex === at);
    drawRates(ffns[at]);
  };
  select.onchange = () => choose(Number(select.value));
  choose(Number(select.value || 0));
}

/** The columns that the firing table has for these FFNs. */
function firingColumns(ffns) {
  const mixture = ffns.some((ffn) => ffn.experts);
  const experts = (ffn) => whole(ffn.experts) + (ffn.never_routed ? `, ${whole(ffn.never_routed)} never opened` : "");
  const levels = new Set(ffns.flatMap((ffn) => Object.keys(ffn.over_rms ?? {})));
  return [
    ...(mixture ? [["Experts", experts]] : []),
    [mixture ? "Slots of each" : "Slots", (ffn) => whole(ffn.width)],
    ["Tokens", (ffn) => whole(ffn.tokens)],
    ["Over 1/10 of the peak", (ffn) => share(ffn.over_peak)],
    ...[...levels].sort((a, b) => a - b).map((level) => [`Over ${level} × rms`, (ffn) => share(ffn.over_rms?.[level])]),
    ["Fire on < 1/1,000", (ffn) => share(ffn.rare_1000)],
    ["Fire on < 1/10,000", (ffn) => share(ffn.rare_10000)],
    ["Gini", (ffn) => figure(ffn.gini)],
    ["Effective slots", (ffn) => whole(ffn.effective)],
  ];
}

/** Marks the line of a layer in the plot, and tells of it. */
function markLine(points, at) {
  const chosen = $(`ranks-layer-${at}`);
  for (const line of $("firing-plot").querySelectorAll("g[id]")) line.classList.toggle("chosen", line === chosen);
  const some = new Set([points[0], points[Math.floor(points.length / 2)], points.at(-1)].filter(given));
  const words = [...some].map(([rank, rate]) => `rank ${whole(rank)} fires on ${share(rate)} of the tokens`);
  $("told").textContent = words.length ? `Chosen: ${words.join(", ")}.` : "";
}

/** How many slots of an FFN fire how often. */
function drawRates(ffn) {
  const [edges, counts] = [list(ffn.rates?.edges), list(ffn.rates?.slots)];
  const total = counts.reduce((a, b) => a + b, 0);
  $("rates").hidden = !counts.length;
  const columns = [
    ["Fires on", ([at]) => `${share(edges[at])} to ${share(edges[at + 1] ?? 1)}`],
    ["Slots", ([, count]) => whole(count)],
    ["Share", ([, count]) => share(count / total)],
  ];
  $("rates-table").replaceChildren(table(`Slots of ${ffn.name} by firing rate`, columns, [...counts.entries()]));
}

// --- slots -----------------------------------------------------------------------------------------------------------

const ids = new Set(list(data.slots).map((slot) => slot.id));
const gone = list(data.removed?.slots).map((slot) => (typeof slot === "string" ? { id: slot } : slot));
const others = gone.filter((slot) => slot.triggers && !ids.has(slot.id)).map((slot) => ({ ...slot, removed: true }));
const slots = [...list(data.slots), ...others];
const byId = new Map(slots.map((slot) => [slot.id, slot]));
const byPlace = new Map(slots.map((slot) => [`${slot.ffn} ${slot.slot}`, slot.id]));
let hits = slots;

const ORDERS = {
  "as counted": null,
  "often firing first": (slot) => slot.rate,
  "seldom firing first": (slot) => (known(slot.rate) ? -slot.rate : null),
  "clearest pattern first": (slot) => slot.shared?.share,
  "most coherent value first": (slot) => slot.coherence,
  "removed first": (slot) => (slot.removed ? 1 : 0),
};

const address = (id) => `#slot=${encodeURIComponent(id).replaceAll("%3A", ":").replaceAll("%2F", "/")}`;
const link = (id, text = id) => make(byId.has(id) ? "a" : "span", { class: "id", href: address(id) }, text);

/** What a search looks through, in lower case: tokens as they are and as they are shown. */
function haystack(slot) {
  const tokens = [...list(slot.promoted), ...list(slot.suppressed)].map(([text]) => text);
  const texts = [slot.shared?.text ?? "", ...list(slot.triggers).map((item) => item.token), ...tokens].map(String);
  const shown = texts.filter((text) => UNSEEN.test(text)).map((text) => text.replace(/[\p{Z}\p{C}]/gu, sign));
  return [...texts, ...shown].join("\n").toLowerCase();
}

/** The slots in one of the orders; those without the number come last. */
function ordered(by) {
  if (!by) return slots;
  const value = (slot) => by(slot) ?? -Number.MAX_VALUE;
  return [...slots].sort((a, b) => value(b) - value(a));
}

/** The slots that a query finds: the one of that id, those whose id begins so, those with such a token. */
function found(query, among, stacks) {
  const depth = (slot) => {
    const id = slot.id.toLowerCase();
    if (id === query) return 0;
    return id.startsWith(query) ? 1 : stacks.get(slot.id).includes(query) ? 2 : 3;
  };
  const ranked = among.map((slot) => [depth(slot), slot]).filter(([at]) => at < 3);
  return ranked.sort(([a], [b]) => a - b).map(([, slot]) => slot);
}

function drawSlots() {
  if (!slots.length) return;
  open("slots");
  const stacks = new Map(slots.map((slot) => [slot.id, haystack(slot)]));
  const names = Object.keys(ORDERS).filter((name) => name !== "removed first" || slots.some((slot) => slot.removed));
  $("order").append(...names.map((name) => make("option", {}, name)));
  const search = () => {
    const query = $("query").value.trim().toLowerCase();
    const among = ordered(ORDERS[$("order").value]);
    hits = query ? found(query, among, stacks) : among;
    paged($("hits"), hits, entry, $("more"));
    $("found").textContent = `${whole(hits.length)} of ${whole(slots.length)} slots`;
    markShown();
  };
  $("query").oninput = search;
  $("order").onchange = search;
  $("search").onsubmit = (event) => {
    event.preventDefault();
    if (hits.length) location.hash = address(hits[0].id);
  };
  window.addEventListener("hashchange", () => asked() !== null && show(asked(), true));
  search();
  show(asked() ?? slots[0].id, asked() !== null);
}

/** The slot that the address of the page asks for, or null. */
function asked() {
  if (!location.hash.startsWith("#slot=")) return null;
  try {
    return decodeURIComponent(location.hash.slice(6));
  } catch {
    return location.hash.slice(6);
  }
}

/** A slot in the list: what triggers it, what it promotes, how often it fires. */
function entry(slot) {
  const cause = slot.shared?.text ?? list(slot.triggers)[0]?.token;
  const promoted = list(slot.promoted).slice(0, 3).map(([text]) => token(text));
  const words = [given(cause) ? token(cause) : null, promoted.length ? " → " : null, ...promoted];
  const id = make("span", { class: slot.removed ? "id gone" : "id" }, slot.id);
  const parts = [id, make("span", {}, words), make("span", { class: "place" }, share(slot.rate))];
  return make("li", {}, make("a", { href: address(slot.id) }, parts));
}

function markShown() {
  const shown = address($("card").dataset.slot ?? "");
  mark($("hits").querySelectorAll("a"), (each) => each.getAttribute("href") === shown);
}

/** Puts the card of a slot on show; `move` takes the reader there. */
function show(id, move) {
  const slot = byId.get(id);
  const title = make("h3", { id: "card-title" }, "Slot ", make("span", { class: "id" }, id));
  const parts = slot ? card(slot) : [make("p", {}, "This slot is not among those that the page holds.")];
  $("card").dataset.slot = id;
  $("card").replaceChildren(title, ...parts.filter(given));
  markShown();
  if (!move) return;
  $("card").focus({ preventScroll: true });
  const { top } = $("card").getBoundingClientRect();
  if (top < 0 || top > innerHeight / 2) $("card").scrollIntoView();
}

function card(slot) {
  const triggers = list(slot.triggers);
  const reverse = "Where the coefficient is negative it writes the reverse: what is promoted below is then suppressed.";
  return [
    facts(slot),
    make("h4", {}, "Triggers"),
    pattern(slot.shared),
    triggers.length
      ? make("ol", { class: "triggers" }, triggers.map(trigger))
      : make("p", { class: "note" }, "There are none."),
    make("h4", {}, "What its value writes"),
    triggers.some((item) => item.coefficient < 0) ? make("p", { class: "note" }, reverse) : null,
    make("div", { class: "pair" }, logits("Promoted", slot.promoted), logits("Suppressed", slot.suppressed)),
    neighbours(slot),
  ];
}

function facts(slot) {
  const fate = slot.removed ? make("span", { class: "gone" }, "removed") : "kept";
  const rows = [
    ["FFN", given(slot.ffn) ? named(slot.ffn) : null],
    ["Fires on", known(slot.rate) ? `${share(slot.rate)} of the tokens` : null],
    ["Plan", given(slot.removed) ? fate : null],
    ["Coherence", known(slot.coherence) ? `${figure(slot.coherence)}, the mean cosine of the promoted tokens` : null],
  ].filter(([, value]) => given(value));
  return make("dl", {}, rows.map(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]).flat());
}

/** The sentence on what the triggers have in common. */
function pattern(shared) {
  if (!shared || !known(shared.share)) return null;
  const what = shared.kind === "previous token" ? "come after the token " : `end with the ${shared.kind ?? "token"} `;
  const chance = known(shared.chance) ? `; by chance ${share(shared.chance)} would` : "";
  return make("p", { class: "pattern" }, `${share(shared.share)} of them ${what}`, token(shared.text), `${chance}.`);
}

function trigger(item) {
  const sizes = [["coefficient", item.coefficient], ["contribution", item.contribution]];
  const words = sizes.filter(([, value]) => known(value)).map(([name, value]) => `${name} ${figure(value)}`);
  return make("li", {}, context(item), place(words.join(" · "), item));
}

function logits(name, entries) {
  if (!list(entries).length) return null;
  const written = ([text, id]) => {
    const node = token(text);
    if (given(id)) node.title = `token ${id}`;
    return node;
  };
  return table(name, [["Token", written], ["Logit", ([, , logit]) => figure(logit)]], entries);
}

/** Links to the slots before and after this one in the list. */
function neighbours(slot) {
  const at = hits.indexOf(slot);
  const [before, after] = at < 0 ? [] : [hits[at - 1], hits[at + 1]];
  const links = [before ? link(before.id, `← ${before.id}`) : null, after ? link(after.id, `${after.id} →`) : null];
  return make("p", { class: "place neighbours" }, links);
}

// --- values, layers, what is forgotten -------------------------------------------------------------------------------

function drawValues() {
  const rows = list(data.coherence);
  if (!rows.length) return;
  open("values");
  const columns = [
    ["FFN", (row) => named(row.name)],
    ["Mean", (row) => figure(row.mean)],
    ["Null: mean", (row) => figure(row.null_mean)],
    ["Null: 95th percentile", (row) => figure(row.null_p95)],
    ["Slots over it (by chance 5%)", (row) => share(row.above_p95)],
  ];
  $("values-table").append(table("Coherence of values, and of random directions (the null)", columns, rows));
}

function drawLens() {
  const rows = list(data.lens);
  if (!rows.length) return;
  open("lens");
  const columns = [
    ["Layer", (row) => named(row.name)],
    ["Loudest slot", (row) => share(row.slot_top)],
    ["FFN", (row) => share(row.ffn_top)],
    ["Residual stream", (row) => share(row.residual_top)],
    ["KL to the end, nats", (row) => figure(row.kl)],
    ["Value names the token after its trigger", (row) => share(row.key_next)],
    ["By chance", (row) => share(row.chance)],
  ];
  $("lens-table").append(table("Agreement with the final prediction", columns, rows));
}

function drawRemoved() {
  const worst = list(data.removed?.tokens);
  if (!gone.length && !worst.length) return;
  open("removed");
  const { text, loss } = data.removed;
  const where = given(text) ? ` on ${[text].flat().join(", ")}` : "";
  const words = [gone.length ? `${whole(gone.length)} removed slots are listed.` : null];
  if (known(loss?.dense) && known(loss?.slim)) {
    words.push(`The mean loss${where} went from ${figure(loss.dense)} to ${figure(loss.slim)} nats.`);
  }
  $("removed-about").append(...seen(words.filter(given).join(" "), true));
  if (worst.length) longList($("removed-tokens"), "Tokens whose loss rose most", worst, forgotten);
  const lost = gone.map((slot) => byId.get(slot.id) ?? slot);
  if (gone.length) longList($("removed-slots"), "Removed slots", lost, removedSlot);
}

function forgotten(item) {
  const rise = item.rise ?? item.slim - item.dense;
  const words = `loss ${figure(item.dense)} → ${figure(item.slim)} nats (${rise > 0 ? "+" : ""}${figure(rise)})`;
  const size = (slot) => (known(slot.contribution) ? ` (${figure(slot.contribution)})` : "");
  const id = ({ id, ffn, slot }) => id ?? byPlace.get(`${ffn} ${slot}`) ?? `${ffn}:${slot}`;
  const by = list(item.slots).flatMap((slot, at) => [at ? ", " : " ", link(id(slot)), size(slot)]);
  const writers = by.length ? make("p", { class: "place" }, "Removed slots that wrote most here:", by) : null;
  return make("li", {}, context(item), place(words, item), writers);
}

function removedSlot(slot) {
  const rate = known(slot.rate) ? ` fires on ${share(slot.rate)} ` : " ";
  const promoted = list(slot.promoted).slice(0, 5).map(([text]) => token(text));
  const first = list(slot.triggers)[0];
  return make("li", {}, make("p", {}, link(slot.id), rate, promoted), first ? context(first) : null);
}

for (const draw of [drawHead, drawFiring, drawSlots, drawValues, drawLens, drawRemoved]) draw();
