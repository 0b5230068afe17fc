// The view of the cluster, made anew from each frame.
const TIERS = [["dram", "DRAM", "b3"], ["fetched", "fetched", "b1"], ["ssd", "SSD", "b2"], ["computed", "computed", "b5"]];
const ENDED = { stop: "answered", length: "answered, cut at its limit" };
const STAGES = [["placement", "b5"], ["queue_and_fetch", "b2"], ["prefill", "b1"], ["handover", "b4"], ["decode", "b3"]];
let key = "", model = "", stated = new Set();  // models with a temperature of their own
const headers = more => Object.assign({}, key ? { Authorization: "Bearer " + key } : {}, more);

function tile(name, value, remark) { return el("div", "", el("dt", "", name), el("dd", "", value, el("small", "", remark))); }
function showState(f) {
  const faults = (f.events || []).filter(e => e.fault && e.s_ago < 60), leaving = f.instances.filter(i => i.draining);
  let word = "serving", how = "good";
  if (f.lack) [word, how] = [f.lack, "wrong"];
  else if (!f.instances.length) [word, how] = ["no instance", "wrong"];
  else if (faults.length) [word, how] = ["serving, " + faults[0].kind + " " + ago(faults[0].s_ago), "warn"];
  else if (leaving.length) [word, how] = ["serving, " + leaving.length + " draining", "warn"];
  $("state").textContent = word + (f.tenant ? ", requests of " + f.tenant : ""); $("state").className = how;
  const h = f.head, facts = [model];
  if (h) facts.push("release " + h.release, "up " + ago(h.up_s).replace(" ago", ""), ...(h.restarts ? [count(h.restarts, "earlier head")] : []), ...(f.standbys && f.standbys.length ? ["a standby is there"] : []));
  $("facts").textContent = facts.filter(Boolean).join(" · ");
}
function showTiles(f) {
  const t = f.totals, p = t.ttft_s, g = t.tbt_s, k = t.tokens, all = k.dram + k.fetched + k.ssd + k.computed;
  const slo = k => (f.slo.assumed.includes(k) ? "assumed SLO " : "SLO ") + ms(f.slo[k]);
  const refused = t.ended - t.answered, stages = Object.entries(f.stages).map(([s, n]) => n + " " + inWords(s)).join(", ");
  $("tiles").replaceChildren(
    tile("under way", num(f.under_way), stages || "no request now"),
    tile("answered", num(t.answered), pct(t.effective, t.answered) + " within both SLOs"),
    tile("no answer", num(refused), "refused, failed or cancelled"),
    tile("TTFT p50", ms(p && p.p50), p ? "p90 " + ms(p.p90) + ", p99 " + ms(p.p99) + "; " + slo("ttft_s") : slo("ttft_s")),
    tile("TBT p50", ms(g && g.p50), g ? "p90 " + ms(g.p90) + ", p99 " + ms(g.p99) + "; " + slo("tbt_s") : slo("tbt_s")),
    tile("prompt tokens cached", pct(all - k.computed, all), num(all) + " tokens"),
    tile("tokens generated", num(t.generated_tokens), "in the last ten minutes"));
}
function showEvents(f) {
  $("events-part").hidden = !f.events; if (!f.events) return;
  const rows = f.events.map(e => el("li", e.fault ? "bad" : "", el("span", "soft", ago(e.s_ago)), el("span", "", el("b", "", e.kind), " ", e.text)));
  $("events").replaceChildren(...(rows.length ? rows : [el("li", "", el("span", "soft", "now"), "Nothing has joined, left or failed since this head began.")]));
}
function meter(name, now, ahead) {
  const m = el("div", "meter"), over = Math.max(now, ahead) >= 1 ? "b4" : "b1";
  for (const [v, cls] of [[ahead, over + " ahead"], [now, over]]) { const i = el("i", cls); i.style.width = Math.min(100, 100 * v) + "%"; m.append(i); }
  m.setAttribute("role", "img"); m.setAttribute("aria-label", name + " " + now.toFixed(2) + ", projected " + ahead.toFixed(2));
  return [el("div", "row", el("span", "", name), el("span", "", now.toFixed(2) + " → " + ahead.toFixed(2))), m];
}
function fill(value, whole, cls) { const m = el("div", "meter"), i = el("i", cls); i.style.width = (whole ? Math.min(100, 100 * value / whole) : 0) + "%"; m.append(i); return m; }
function wordOf(i) {
  if (i.draining) return ["draining", "leaving"];
  if (i.load == null) return [];
  if (Math.max(i.load, i.projected) >= 1) return ["full", "full"];
  return i.prefills + i.decodes ? ["busy", "busy"] : ["idle", ""];
}
function showInstances(f) {
  const order = ["prefill", "decode", "mixed"];
  const sorted = [...f.instances].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role) || naturally(a.instance_id, b.instance_id));
  $("load-help").hidden = !f.loads;
  $("instances").replaceChildren(...sorted.map(i => {
    const [word, cls] = wordOf(i), name = el("h3", "", i.instance_id);
    if (word) name.append(el("span", "word " + cls, word));
    const c = el("section", "card", name, el("p", "soft", i.role + (i.host ? " · " + i.host : "") + (i.draining ? " · " + i.draining : "") + (i.note ? " · " + i.note : "")));
    if (i.load == null) return c;
    c.append(...meter("load", i.load, i.projected));
    const held = el("span", "", "blocks held"), cached = el("span", "", "blocks cached");
    held.title = "Blocks of KVCache that running requests use."; cached.title = "Blocks that a later prompt with the same beginning may use.";
    c.append(el("div", "row", held, el("span", "", num(i.held) + " of " + num(i.blocks))), fill(i.held, i.blocks, "b3"));
    c.append(el("div", "row", cached, el("span", "", num(i.cached) + " of " + num(i.blocks))), fill(i.cached, i.blocks, "b3"));
    if (i.ssd) c.append(el("div", "row", el("span", "", "SSD"), el("span", i.ssd.error ? "bad" : "", i.ssd.error || num(i.ssd.cached) + " of " + num(i.ssd.blocks) + " blocks")));
    c.append(el("p", "soft", count(i.prefills, "prefill") + ", " + count(i.decodes, "decode") + ", serves " + count(i.serving_fetches, "fetch")));
    return c;
  }));
  if (!sorted.length) $("instances").replaceChildren(el("p", "soft", "No instance has joined."));
}
// Who hands blocks over, who takes them, and what the disks read and write, as lines of their rates.
function showFlow(f) {
  const rates = new Map((f.moved || []).filter(m => m.bytes_per_s).map(m => [m.instance_id, m.bytes_per_s]));
  const shown = f.instances.filter(i => rates.has(i.instance_id)).sort((a, b) => naturally(a.instance_id, b.instance_id));
  $("flow").hidden = shown.length < 2 || shown.length > 24; if ($("flow").hidden) return;
  const left = shown.filter(i => i.role === "prefill"), right = shown.filter(i => i.role !== "prefill"), rows = Math.max(left.length, right.length);
  const step = 44, height = rows * step + 30, wide = Math.min(640, ($("flow").clientWidth || 670) - 30), box = Math.min(150, wide / 3), svg = shape("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img" });
  const words = [], thick = v => Math.min(14, 1 + 2 * Math.log2(1 + v / 1e5)), middle = [wide / 2, height / 2];
  const line = (x, y, toX, toY, v, what) => {
    if (!v) return;
    words.push(what + " " + bytes(v) + "/s");
    const path = shape("path", { d: `M${x} ${y}C${(x + toX) / 2} ${y} ${(x + toX) / 2} ${toY} ${toX} ${toY}`, class: "flow moving", "stroke-width": thick(v) });
    path.append(shape("title", {}, what + " " + bytes(v) + "/s")); svg.append(path);
  };
  const place = (column, x, side) => column.forEach((i, n) => {
    const y = 24 + n * step + (rows - column.length) * step / 2, r = rates.get(i.instance_id), edge = side < 0 ? x + box : x;
    line(edge, y, ...middle, r.sent, i.instance_id + " hands over");
    line(...middle, edge, y + 6, r.handed_over + r.fetched + r.copied, i.instance_id + " takes in");
    svg.append(shape("rect", { x, y: y - 16, width: box, height: 34, rx: 6 }), shape("text", { x: x + 8, y: y - 1, class: "value" }, i.instance_id));
    svg.append(shape("text", { x: x + 8, y: y + 13 }, r.ssd_loaded || r.ssd_stored ? "SSD " + bytes(r.ssd_loaded) + "/s in, " + bytes(r.ssd_stored) + "/s out" : i.role));
  });
  place(left, 4, -1); place(right, wide - box - 4, 1);
  svg.setAttribute("aria-label", "Blocks that move now: " + (words.join(", ") || "none"));
  svg.append(shape("text", { x: wide / 2, y: height - 6, "text-anchor": "middle" }, words.length ? "lines are as wide as what moves (last ten seconds)" : "no block moves now"));
  $("flow").replaceChildren(el("h3", "", "Blocks between instances"), svg);
}
function showCharts(f) {
  const every = f.history.columns, each = f.history.bin_s, known = every.answered.filter(v => v != null).length;
  const bins = Math.min(Math.max(known, 12), every.answered.length);  // two minutes at least
  const c = Object.fromEntries(Object.entries(every).map(([name, v]) => [name, v.slice(-bins)])), per = name => c[name].map(v => v == null ? null : v / each);
  if ($("charts").matches(":hover")) return;  // a value is being read
  $("charts").replaceChildren(
    ...(c.prefill_load ? [chart("Load by role", each, [["prefill", c.prefill_load], ["decode", c.decode_load]], v => v.toFixed(2), 1)] : []),
    chart("TTFT", each, [["p50", c.ttft_p50_s], ["p90", c.ttft_p90_s]], ms, f.slo.ttft_s), chart("TBT", each, [["p50", c.tbt_p50_s], ["p90", c.tbt_p90_s]], ms, f.slo.tbt_s),
    chart("Requests per second", each, [["answered", per("answered")], ["no answer", per("not_answered")]], rate),
    chart("Tokens per second", each, [["", per("generated_tokens")]], num), chart("Prompt tokens cached", each, [["", c.hit]], v => (100 * v).toFixed(0) + " %", 0, 1));
}
function chips(names) { const cell = el("td", "left", ...[...names].sort(naturally).map(name => el("span", "chip", name))); if (!names.length) cell.textContent = "–"; return cell; }
function emptyRow(text, columns) { const cell = el("td", "soft left", text); cell.colSpan = columns; return el("tr", "", cell); }
function showPool(f) {
  $("pool").hidden = !f.moved; if (!f.moved) return;
  $("hot-part").hidden = f.hot && !f.hot.length; $("moved-part").hidden = !f.moved.length;
  $("hot").replaceChildren(...(f.hot || []).map(p => {
    const name = el("th", "", p.name); name.scope = "row"; name.title = "hash of the last block: " + p.key;
    return el("tr", "", name, el("td", "", num(p.tokens)), el("td", "", bytes(p.bytes)), el("td", "", num(p.hits)), el("td", "", num(p.replicas)), chips(p.dram), chips(p.ssd));
  }));
  if (!f.hot) $("hot").replaceChildren(emptyRow("The instances cache too many blocks to rank them for this page. GET /cluster/hot ranks them once.", 7));
  const flows = ["handed_over", "sent", "fetched", "copied", "ssd_loaded", "ssd_stored"];
  const cell = (sum, rate) => sum ? el("td", "", rate == null ? "–" : bytes(rate) + "/s", el("small", "", bytes(sum))) : el("td", "soft", "–");
  $("moved").replaceChildren(...[...f.moved].sort((a, b) => naturally(a.instance_id, b.instance_id)).map(m => {
    const name = el("th", "", m.instance_id); name.scope = "row";
    return el("tr", "", name, ...flows.map(flow => cell(m.bytes[flow], m.bytes_per_s && m.bytes_per_s[flow])));
  }));
}
function tierBar(k) { const all = TIERS.reduce((s, [n]) => s + k[n], 0); return bar(TIERS.map(([n, , c]) => [k[n], c]), all, TIERS.map(([n, t]) => t + " " + num(k[n])).join(", ")); }
function tierKey(k) { const p = el("p", "key"); keyOf(p, TIERS.map(([n, t, c]) => [t + " " + num(k[n]), c])); return p; }
function showTotals(f) {
  $("tiers").replaceChildren(tierBar(f.totals.tokens), tierKey(f.totals.tokens));
  const r = Object.entries(f.totals.not_answered);
  $("refusals").replaceChildren(...(r.length ? r.map(([why, n]) => el("div", "row", el("span", "", inWords(why)), el("span", "", num(n)))) : [el("p", "soft", "None in the last ten minutes.")]));
}
function groupRow(p, unnamed) {
  const name = el("th", "", p.name || unnamed); name.scope = "row"; const k = p.tokens, all = k.dram + k.fetched + k.ssd + k.computed;
  return el("tr", "", name, ...[num(p.under_way), num(p.answered), pct(p.effective, p.answered), num(p.ended - p.answered), num(all), pct(all - k.computed, all), num(p.generated_tokens), ms(p.ttft_s && p.ttft_s.p50)].map(text => el("td", "", text)));
}
function showGroups(f) {
  const payers = f.payers || [], programs = f.programs.filter(p => p.name);
  $("payers-part").hidden = payers.length < 2; $("programs-part").hidden = !programs.length;
  $("payers").replaceChildren(...payers.map(p => groupRow(p, "without a key")));
  $("programs").replaceChildren(...programs.map(p => groupRow(p, "")));
}
function stageBar(r) { const s = r.stages_s, w = STAGES.reduce((a, [n]) => a + (s[n] || 0), 0); return bar(STAGES.map(([n, c]) => [s[n] || 0, c]), w, STAGES.map(([n]) => inWords(n) + " " + ms(s[n])).join(", ")); }
function showRequests(f) {
  const focus = document.activeElement && document.activeElement.dataset.id;
  $("requests").replaceChildren(...f.requests.map(r => {
    const id = el("button", "id", r.id); id.dataset.id = r.id; id.title = "Why did it go there?"; id.onclick = () => explain(r.id, r.tenant);
    const first = el("th", "", id); first.scope = "row"; if (r.tenant && !f.tenant) first.append(" ", el("span", "soft", r.tenant));
    const ok = r.outcome === "stop" || r.outcome === "length", cached = r.tokens.dram + r.tokens.fetched + r.tokens.ssd;
    const state = el("td", r.outcome && !ok ? "bad" : "", r.outcome ? ENDED[r.outcome] || inWords(r.outcome) : inWords(r.stage) + " …");
    const where = r.prefill ? r.prefill + (r.decode && r.decode !== r.prefill ? " → " + r.decode : "") : "–";
    const late = ok && !r.effective, hit = el("td", "", cached + r.tokens.computed ? num(cached) : "–"); hit.title = TIERS.map(([n, t]) => t + " " + num(r.tokens[n])).join(", ");
    return el("tr", "", first, state, el("td", "", where), el("td", "", num(r.prompt_tokens)), hit, el("td", "", num(r.generated_tokens)), el("td", late && r.ttft_s > f.slo.ttft_s ? "bad" : "", ms(r.ttft_s)), el("td", late && r.tbt_s > f.slo.tbt_s ? "bad" : "", ms(r.tbt_s)), el("td", "", ms(r.seconds)), el("td", "", stageBar(r)));
  }));
  if (!f.requests.length) $("requests").replaceChildren(emptyRow("No request yet. Ask something in the chat.", 10));
  if (focus) for (const b of $("requests").querySelectorAll("button")) if (b.dataset.id === focus) b.focus();
}
async function explain(id, tenant) {
  $("why-title").textContent = "Request " + id; $("why-text").replaceChildren("…"); $("why").showModal();
  const asked = await fetch("explain/" + encodeURIComponent(id) + (tenant ? "?tenant=" + encodeURIComponent(tenant) : ""), { headers: headers() });
  const found = await asked.json();
  if (!asked.ok) { $("why-text").replaceChildren(found.error.message); return; }
  $("why-text").replaceChildren(el("p", "", timesOf(found) + `, ${count(found.attempts, "attempt")}`),
    stageBar(found), el("p", "soft", STAGES.map(([n]) => inWords(n) + " " + ms(found.stages_s[n])).join(" · ")),
    el("pre", "", found.why.join("\n")));
}
const timesOf = r => `TTFT ${ms(r.observed.ttft_s)} (predicted ${ms(r.predicted.ttft_s)}), TBT ${ms(r.observed.tbt_top10_mean_s)} (predicted ${ms(r.predicted.tbt_s)})`;
$("close").onclick = () => $("why").close();

function show(f) { for (const part of [showState, showTiles, showEvents, showInstances, showFlow, showCharts, showPool, showTotals, showGroups, showRequests]) part(f); }
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); let text = "";
  for (;;) {
    const { value, done } = await reader.read(); if (done) return;
    text += value; let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const block = text.slice(0, end); text = text.slice(end + 2);
      const data = block.split("\n").filter(l => l.startsWith("data: ")).map(l => l.slice(6)).join("\n");
      if (data && !block.startsWith("event: end")) yield data;
    }
  }
}
const pause = s => new Promise(r => setTimeout(r, 1000 * s));
function tell(text, how) { $("state").textContent = text; $("state").className = how; }
let running = 0, stream = null;
async function watch() {
  const own = ++running;
  while (own === running) {
    if (document.hidden) { await pause(1); continue; }
    try {
      stream = new AbortController();
      const response = await fetch("cluster/events", { headers: headers(), signal: stream.signal, cache: "no-store" });
      if (response.status === 401) { $("login").hidden = false; tell(key ? "the server does not know this key" : "needs a key", "warn"); $("key").focus(); return; }
      if (!response.ok) { tell((await response.json()).error.message, "wrong"); await pause(5); continue; }
      $("login").hidden = true; names();
      for await (const data of eventsOf(response)) show(JSON.parse(data));
    } catch (error) { if (own !== running) return; }
    if (document.hidden) tell("paused", "none"); else tell("no connection, trying again", "wrong");
    await pause(1);
  }
}
document.addEventListener("visibilitychange", () => { if (document.hidden && stream) stream.abort(); });
async function names() {
  const found = await fetch("v1/models", { headers: headers() }); if (!found.ok) return;
  const cards = (await found.json()).data, listed = cards.map(each => each.id), chosen = $("model").value;
  model = listed[0] || "";
  stated = new Set(cards.filter(each => "temperature" in (each.default_sampling_params || {})).map(each => each.id));
  $("model").replaceChildren(...listed.map(id => { const o = el("option", "", id); o.value = id; return o; }));
  if (listed.includes(chosen)) $("model").value = chosen;
}
$("login").onsubmit = e => { e.preventDefault(); key = $("key").value.trim(); $("key").value = ""; watch(); };
keyOf($("stage-key"), STAGES.map(([n, c]) => [inWords(n), c]));

// Two views, one of them at a time; the address keeps which.
const VIEWS = [["tab-cluster", "cluster"], ["tab-chat", "chat-view"]];
function choose(tab) {
  for (const [each, panel] of VIEWS) {
    $(each).setAttribute("aria-selected", each === tab); $(each).tabIndex = each === tab ? 0 : -1; $(panel).hidden = each !== tab;
  }
  if (tab === "tab-chat") $("say").focus();
}
VIEWS.forEach(([tab], n) => {
  $(tab).onclick = () => { location.hash = tab === "tab-chat" ? "chat" : ""; choose(tab); };
  $(tab).onkeydown = e => { if (e.key === "ArrowLeft" || e.key === "ArrowRight") { const other = VIEWS[1 - n][0]; $(other).click(); $(other).focus(); } };
});
if (location.hash === "#chat") choose("tab-chat");
