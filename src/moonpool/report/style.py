"""The page's style: light and dark by the reader's choice, always light on paper."""

STYLE = """
:root { color-scheme: light dark;
  --bg: #fbfbfa; --card: #fff; --ink: #1b1f24; --soft: #5b636e; --rule: #e3e5e8;
  --c1: #2463c4; --c2: #cf6a10; --c3: #14866a; --c4: #c0304c; --c5: #868d97; --heat: #2463c4; }
@media screen and (prefers-color-scheme: dark) { :root {
  --bg: #14171b; --card: #1b1f25; --ink: #e4e7eb; --soft: #9aa3ae; --rule: #30363e;
  --c1: #79a9f7; --c2: #f0a256; --c3: #52c5a3; --c4: #f47f8f; --c5: #8b939e; --heat: #79a9f7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.2rem 1.4rem 3rem; max-width: 1180px; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans",
  sans-serif; }
header p { max-width: 66rem; }
h1 { font-size: 1rem; font-weight: 600; color: var(--soft); margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .9rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--rule); }
h3 { font-size: .98rem; margin: 0; }
h4 { font: 600 .85rem ui-monospace, monospace; margin: 0 0 .3rem; color: var(--soft); }
.lead { font-size: 1.32rem; line-height: 1.42; margin: 0 0 .8rem; }
.small { font-size: .87rem; color: var(--soft); margin: 1rem 0 .4rem; }
.small b { color: var(--ink); }
.none { color: var(--soft); font-style: italic; margin: 1.2rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: .7rem;
  margin: 1.5rem 0 0; }
.tiles div, figure, .settings section { background: var(--card); border: 1px solid var(--rule);
  border-radius: 7px; }
.tiles div { padding: .6rem .8rem; }
.tiles dt { font-size: .8rem; color: var(--soft); }
.tiles dd { margin: 0; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles small { display: block; font-size: .78rem; font-weight: 400; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .9rem 1rem .7rem; display: flex; flex-direction: column;
  break-inside: avoid; }
figure > svg, figure > .scroll { margin-top: auto; }
figure > .bars { margin-block: auto; }
.wide { grid-column: 1 / -1; }
figcaption p { font-size: .85rem; color: var(--soft); margin: .2rem 0 .6rem; max-width: 62rem; }
.key { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: 0 0 .4rem; font-size: .83rem; }
.key i { display: inline-block; width: 20px; margin-right: 6px; vertical-align: middle;
  border-top: 3px solid; }
.key i.dash { border-top-style: dashed; }
.key i.heat-key { border-top: 12px solid var(--heat); }
svg { display: block; width: 100%; height: auto; }
svg text { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .value, svg .mark { fill: var(--ink); }
svg .mark, svg .limit { paint-order: stroke; stroke: var(--card); stroke-width: 3px; }
svg .limit { fill: var(--c4); }
.grid { stroke: var(--rule); fill: none; }
.base { stroke: var(--soft); fill: none; }
.bound { stroke: var(--c4); stroke-dasharray: 5 4; }
.line { fill: none; stroke: currentColor; stroke-width: 1.7; stroke-linejoin: round; }
.line.dash { stroke-dasharray: 5 3; }
.area { fill: currentColor; fill-opacity: .16; }
.bar, .dot { fill: currentColor; }
.tip { fill: transparent; }
.tip:hover { fill: var(--soft); fill-opacity: .14; }
.heat { stroke: var(--heat); stroke-width: 14; fill: none; }
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); }
LEVELS
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .84rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .5rem; border-top: 1px solid var(--rule);
  font-weight: 400; }
thead th { color: var(--soft); border: 0; vertical-align: bottom; }
th:first-child { text-align: left; }
td { white-space: nowrap; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: 7px; margin: 0;
  padding: .6rem .8rem; overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .84rem/1.5 ui-monospace, "Liberation Mono", monospace; }
.settings { columns: 3 17rem; column-gap: 1rem; }
.settings section { padding: .7rem .9rem; margin: 0 0 1rem; break-inside: avoid; }
.settings dl, .glossary { margin: 0; font-size: .84rem; }
.settings dl div { display: flex; justify-content: space-between; gap: 1rem; }
.settings dt { color: var(--soft); overflow-wrap: anywhere; }
.settings dd { margin: 0; text-align: right; overflow-wrap: anywhere; }
.glossary { columns: 2 24rem; column-gap: 2rem; }
.glossary div { break-inside: avoid; margin-bottom: .5rem; }
.glossary dt { font-weight: 600; }
.glossary dd { margin: 0; color: var(--soft); }
details { margin-top: 1.2rem; } summary { cursor: pointer; font-size: .87rem; color: var(--soft); }
details pre { margin-top: .6rem; }
@media screen and (max-width: 760px) { .figures { grid-template-columns: minmax(0, 1fr); }
  .lead { font-size: 1.12rem; } figure { overflow-x: auto; } .wide > svg { min-width: 640px; } }
@media print { @page { margin: 12mm; } :root { font-size: 10.5px; } body { padding: 0;
    max-width: none; font-size: 1rem; background: none; }
  th, td { padding: .2rem .3rem; font-size: .9em; } td { white-space: normal; }
  .tiles { grid-template-columns: repeat(8, minmax(0, 1fr)); }
  h2 { break-after: avoid; margin-top: 1.4rem; } .tip, details { display: none; }
  .figures { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .6rem; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
""".replace(
    "LEVELS",
    "\n".join(
        f".heat.h{level} {{ stroke-opacity: {(level + 0.4) / 10.4:.2f}; }}"
        f" .heat-key.h{level} {{ opacity: {(level + 0.4) / 10.4:.2f}; }}"
        for level in range(11)
    ),
)
