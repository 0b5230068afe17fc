// Charts of pages that run scripts. Reports have none: chart.py draws theirs, with the same classes and steps.
const el = (tag, cls, ...inner) => { const e = document.createElement(tag); if (cls) e.className = cls; e.append(...inner); return e; };
function keyOf(target, entries) {
  target.replaceChildren(...entries.map(([text, cls]) => el("span", "", el("i", cls), text)));
}
function bar(parts, whole, label) {
  const b = el("div", "bar"); b.setAttribute("role", "img"); b.setAttribute("aria-label", label); b.title = label;
  for (const [value, cls] of parts) { const i = el("i", cls); i.style.width = (whole ? 100 * value / whole : 0) + "%"; b.append(i); }
  return b;
}
const SVG = "http://www.w3.org/2000/svg";
function shape(tag, attributes, text) {
  const e = document.createElementNS(SVG, tag);
  for (const [n, v] of Object.entries(attributes)) e.setAttribute(n, v);
  if (text != null) e.textContent = text;
  return e;
}
const lastOf = values => { const known = values.filter(v => v != null); return known.length ? known[known.length - 1] : null; };
function roundUp(v) { const unit = 10 ** Math.floor(Math.log10(v)); return [1, 2, 5, 10].map(m => m * unit).find(m => v <= m * (1 + 1e-9)); }
// Coordinates of a chart: a plot of W x H with room for the axes' labels.
const W = 420, H = 150, LEFT = 70, RIGHT = 8, TOP = 8, BOTTOM = 22;
function stepPath(values, x, y) {  // each sample is a step; an unknown one leaves a gap
  let d = "", open = false;
  values.forEach((v, i) => {
    if (v == null) { open = false; return; }
    d += (open ? "L" : "M") + x(i).toFixed(1) + " " + y(v).toFixed(1) + "H" + x(i + 1).toFixed(1); open = true;
  });
  return d;
}
// lines: [[name, values], …]; text: a value in words; limit: the SLO, always drawn if it is not far above.
function chart(title, binS, lines, text, limit, least) {
  const known = lines.flatMap(([, v]) => v).filter(v => v != null), most = Math.max(...known, 0);
  const shown = limit && (limit <= 4 * most || !most) ? Math.max(most, 1.12 * limit) : most;
  const top = roundUp(Math.max(shown, least || 0, 1e-6)), n = lines[0][1].length, named = lines.length > 1;
  const x = i => LEFT + (W - LEFT - RIGHT) * i / n, y = v => TOP + (H - TOP - BOTTOM) * (1 - Math.min(v, top) / top);
  const said = v => v == null ? "–" : text(v);
  const svg = shape("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  const spanMin = n * binS / 60;
  svg.setAttribute("aria-label", `${title}, last ${spanMin.toFixed(0)} minutes: ` + lines.map(([name, v]) => (named ? name + " " : "") + "last " + said(lastOf(v))).join(", ") + ", highest " + (known.length ? text(most) : "–"));
  for (const share of [0, .5, 1]) {
    svg.append(shape("path", { d: `M${LEFT} ${y(share * top)}H${W - RIGHT}`, class: share ? "grid" : "base" }));
    svg.append(shape("text", { x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" }, share ? text(share * top).replace(/\.0+(?=\s|$)/, "") : "0"));
  }
  const every = spanMin > 40 ? 15 : spanMin > 20 ? 10 : spanMin > 8 ? 5 : spanMin > 3 ? 2 : 1;
  for (let minute = 0; minute <= spanMin + 1e-9; minute += every) {
    const at = x(n - minute * 60 / binS);
    svg.append(shape("text", { x: at, y: H - 6, "text-anchor": minute ? "middle" : "end" }, minute ? "-" + minute + " min" : "now"));
  }
  [...lines].reverse().forEach(([, v], back) => {
    const i = lines.length - 1 - back, d = stepPath(v, x, y); if (!d) return;
    if (!named) svg.append(shape("path", { d: stepPath(v.map(each => each || 0), x, y) + `V${y(0)}H${x(0)}Z`, class: "area c" + (i + 1) }));
    svg.append(shape("path", { d, class: "line c" + (i + 1) }));
  });
  if (limit && limit <= top) {
    svg.append(shape("path", { d: `M${LEFT} ${y(limit)}H${W - RIGHT}`, class: "bound" }));
    svg.append(shape("text", { x: W - RIGHT, y: y(limit) - 4, "text-anchor": "end", class: "limit" }, "SLO " + text(limit)));
  }
  const cross = shape("path", { class: "base", d: "" }); svg.append(cross);
  const keys = el("span", named ? "key" : ""), rest = lines.map(([name, v], i) => [(named ? name + " " : "last ") + said(lastOf(v)), "b" + (i + 1)]);
  keys.style.margin = 0;
  const entries = list => named ? keyOf(keys, list) : keys.replaceChildren(list[0][0]);
  const note = el("span", "soft", (limit && limit > top ? "SLO " + text(limit) + ", " : "") + "highest " + (known.length ? text(most) : "–"));
  entries(rest);
  const over = event => {
    const box = svg.getBoundingClientRect(), i = Math.floor(((event.clientX - box.left) / box.width * W - LEFT) / (W - LEFT - RIGHT) * n);
    if (i < 0 || i >= n) return out();
    cross.setAttribute("d", `M${x(i + .5)} ${TOP}V${H - BOTTOM}`);
    entries(lines.map(([name, v], k) => [(named ? name + " " : "") + said(v[i]), "b" + (k + 1)]));
    note.textContent = i === n - 1 ? "now" : ago((n - 1 - i) * binS);
  };
  const out = () => { cross.setAttribute("d", ""); entries(rest); note.textContent = note.dataset.rest; };
  note.dataset.rest = note.textContent;
  svg.addEventListener("pointermove", over); svg.addEventListener("pointerleave", out);
  return el("section", "card", el("h3", "", title), el("div", "row soft said", keys, note), svg);
}
