// Reads from a plan's stored runs how another load, other SLOs or another cluster would do.
"use strict";
const data = JSON.parse(document.getElementById("runs").textContent);
const of = id => document.getElementById(id);
const round = (value, digits) => Number(value.toPrecision(digits || 3)).toLocaleString("en-US", {maximumFractionDigits: 6});
const percent = share => (100 * share).toFixed(1) + " %";
const seconds = value => value >= 0.1 ? round(value) + " s" : round(1000 * value) + " ms";

// The share of a run's requests within multiples of their SLOs; with SLO classes, the lowest share of a class.
function judged(run, ttft, tbt) {
  const shares = run.classes.map(one => one.times.reduce(
    (sum, [first, then, number]) => sum + (first <= ttft && then <= tbt ? number : 0), 0) / Math.max(one.requests, 1));
  return Math.min(...shares);
}

// Interpolates a value between the two simulated loads around `load`, on a straight line.
function between(runs, load, value) {
  const after = runs.findIndex(run => run.load >= load - 1e-9);
  if (after < 0) return {value: value(runs[runs.length - 1]), from: runs[runs.length - 1], to: null};
  const to = runs[after];
  if (after === 0 || Math.abs(to.load - load) < 1e-9) return {value: value(to), from: to, to};
  const from = runs[after - 1], part = (load - from.load) / (to.load - from.load);
  return {value: value(from) + part * (value(to) - value(from)), from, to};
}

// The highest load at which the wanted share is kept, from the lowest simulated one on.
function holdsUpTo(runs, ttft, tbt) {
  let before = null;
  for (const run of runs) {
    const share = judged(run, ttft, tbt);
    if (share < data.wanted) {
      if (before === null) return {load: 0, broke: run};
      const part = (before.share - data.wanted) / Math.max(before.share - share, 1e-9);
      return {load: before.load + part * (run.load - before.load), broke: run};
    }
    before = {load: run.load, share};
  }
  return {load: before.load, broke: null};
}

const memoriesOf = machine => data.clusters.filter(one => one.machine === machine);

function chosen() {
  const ttft = Number(of("ttft").value), tbt = Number(of("tbt").value);
  const cluster = memoriesOf(of("machine").value)[Number(of("memory").value)];
  return {load: Number(of("load").value), ttft, tbt, cluster};
}

function setMemory() {
  const clusters = memoriesOf(of("machine").value);
  const own = clusters.findIndex(one => one.chosen);
  of("memory").max = clusters.length - 1;
  of("memory").value = own >= 0 ? own : Math.min(1, clusters.length - 1);
}

const levels = (ttft, tbt) => {
  const one = (slo, name) => `${name}TTFT ${seconds(slo.ttft_s * data.multiples[ttft])}, TBT ${seconds(slo.tbt_s * data.multiples[tbt])}`;
  return [one(data.slo, ""), ...data.slo_classes.map(each => one(each, each.name + ": "))].join("; ");
};

function bars(cluster, ttft, tbt) {
  const list = of("loads");
  list.replaceChildren(...cluster.runs.map(run => {
    const share = judged(run, ttft, tbt), row = document.createElement("div");
    row.className = "load";
    const name = document.createElement("span");
    name.textContent = `${round(run.load)} × (${round(run.load * data.rate)}/s)`;
    const bar = document.createElement("div");
    bar.className = "bar";
    const part = document.createElement("i");
    part.className = share >= data.wanted ? "b3" : "b4";
    part.style.width = 100 * share + "%";
    bar.append(part);
    const text = document.createElement("b");
    text.textContent = percent(share);
    row.append(name, bar, text);
    return row;
  }));
}

function tell() {
  const {load, ttft, tbt, cluster} = chosen();
  const kept = between(cluster.runs, load, run => judged(run, ttft, tbt));
  const late = between(cluster.runs, load, run => run.ttft_p90_s);
  const most = holdsUpTo(cluster.runs, ttft, tbt);
  const rate = load * data.rate, usd = cluster.usd_per_h;
  of("load-text").textContent = `${round(load)} × the trace: ${round(rate)} requests/s`;
  of("ttft-text").textContent = data.slo_classes.length ? `${data.multiples[ttft]} × the SLO` : seconds(data.slo.ttft_s * data.multiples[ttft]);
  of("tbt-text").textContent = data.slo_classes.length ? `${data.multiples[tbt]} × the SLO` : seconds(data.slo.tbt_s * data.multiples[tbt]);
  of("memory-text").textContent = cluster.memory;
  const good = kept.value >= data.wanted;
  of("verdict").textContent = good ? "Holds." : "Does not hold.";
  of("verdict").className = good ? "c3" : "c4";
  of("says").textContent = ` ${percent(kept.value)} of requests keep ${levels(ttft, tbt)} (wanted: ${percent(data.wanted)}).`;
  of("share").textContent = percent(kept.value);
  of("late").textContent = seconds(late.value);
  of("usd").textContent = round(usd, 4);
  of("month").textContent = `${round(usd * 730, 4)} a month`;
  of("million").textContent = round(usd / (rate * 3600 * data.tokens_per_request) * 1e6);
  of("most").textContent = most.load ? `${round(most.load)} ×` : `< ${round(cluster.runs[0].load)} ×`;
  of("most-rate").textContent = most.broke ? `${round(most.load * data.rate)} requests/s` : "no more was simulated";
  of("breaks").textContent = most.broke ? `Breaks first, at ${round(most.broke.load)} × the load: ${most.broke.lacked || "the SLOs chosen here are shorter than its usual times"}.` : "";
  const own = data.multiples.indexOf(1), notes = [];
  notes.push(kept.from === kept.to ? `Simulated at ${round(kept.from.load)} × the load.`
    : `Not simulated at this load: on a straight line between the runs at ${round(kept.from.load)} × and ${round(kept.to.load)} ×.`);
  if (ttft !== own || tbt !== own) notes.push("These runs were made under the plan's own SLOs and are judged by yours: an estimate, too low for longer SLOs, under which fewer requests would be refused. For a promise, run the plan again with them.");
  of("how").textContent = notes.join(" ");
  const cheapest = data.clusters.filter(one => between(one.runs, load, run => judged(run, ttft, tbt)).value >= data.wanted)
    .sort((a, b) => a.usd_per_h - b.usd_per_h)[0];
  of("cheapest").textContent = cheapest ? `Cheapest of the stored clusters that holds here: ${cheapest.machine}, ${cheapest.memory}, ${round(cheapest.usd_per_h, 4)} USD/h.`
    : "None of the stored clusters holds here: run the plan again for this load (--speed) or these SLOs.";
  bars(cluster, ttft, tbt);
}

if (data.clusters.length) {
  of("machine").replaceChildren(...[...new Set(data.clusters.map(one => one.machine))].map(name => new Option(name, name)));
  const loads = data.clusters[0].runs.map(run => run.load);
  Object.assign(of("load"), {min: Math.min(...loads), max: Math.max(...loads), value: 1});
  for (const id of ["ttft", "tbt"]) Object.assign(of(id), {max: data.multiples.length - 1, value: data.multiples.indexOf(1)});
  setMemory();
  of("machine").addEventListener("input", () => { setMemory(); tell(); });
  for (const id of ["load", "ttft", "tbt", "memory"]) of(id).addEventListener("input", tell);
  of("explorer").hidden = false;
  tell();
}
