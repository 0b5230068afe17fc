// Numbers of the live page in words.
const GAP = "\u00a0"; // keeps a unit with its number
const $ = id => document.getElementById(id);
const ms = s => s == null ? "–" : s >= 10 ? s.toFixed(1) + GAP + "s" : s >= 1 ? s.toFixed(2) + GAP + "s" : s >= 0.1 ? (1000 * s).toFixed(0) + GAP + "ms" : (1000 * s).toFixed(1) + GAP + "ms";
const inWords = s => s.replaceAll("_", " ").replace(/\b(ttft|tbt|slo|ssd)\b/g, short => short.toUpperCase());
const num = n => Math.round(n).toLocaleString("en");
const count = (n, one) => num(n) + " " + one + (n === 1 ? "" : one.endsWith("ch") ? "es" : "s");
// A rate with the digits that tell a quarter from a third, and one answer a minute from none.
const rate = v => v >= 10 ? num(v) : v && v < 1 ? v.toFixed(2) : v.toFixed(1);
const pct = (a, b) => b ? (100 * a / b).toFixed(0) + GAP + "%" : "–";
const bytes = n => n >= 1e12 ? (n / 1e12).toFixed(2) + GAP + "TB" : n >= 1e9 ? (n / 1e9).toFixed(2) + GAP + "GB" : n >= 1e6 ? (n / 1e6).toFixed(1) + GAP + "MB" : n >= 1e3 ? (n / 1e3).toFixed(1) + GAP + "kB" : num(n) + GAP + "B";
const ago = s => s < 90 ? Math.round(s) + " s ago" : s < 5400 ? Math.round(s / 60) + " min ago" : (s / 3600).toFixed(1) + " h ago";
const naturally = (a, b) => a.localeCompare(b, "en", { numeric: true });
