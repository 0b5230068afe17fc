"""The site's style sheet: the colours of moonpool's own pages, for both schemes of the theme."""

from __future__ import annotations

import re
from importlib.resources import files

VARIABLES = re.compile(r":root \{([^{}]*)\}")

THEME = """
[data-md-color-scheme="default"], [data-md-color-scheme="slate"] {
  --md-default-bg-color: var(--bg);
  --md-default-fg-color: var(--ink);
  --md-default-fg-color--light: var(--soft);
  --md-default-fg-color--lighter: var(--field);
  --md-default-fg-color--lightest: var(--rule);
  --md-primary-fg-color: var(--card);
  --md-primary-bg-color: var(--ink);
  --md-primary-bg-color--light: var(--soft);
  --md-accent-fg-color: var(--c2);
  --md-typeset-color: var(--ink);
  --md-typeset-a-color: var(--c1);
  --md-typeset-table-color: var(--rule);
  --md-code-bg-color: var(--code);
  --md-code-fg-color: var(--ink);
  --md-code-hl-string-color: var(--c3);
  --md-code-hl-keyword-color: var(--c1);
  --md-code-hl-number-color: var(--c4);
  --md-code-hl-function-color: var(--c1);
  --md-code-hl-constant-color: var(--c1);
  --md-code-hl-comment-color: var(--soft);
  --md-footer-bg-color: var(--card);
  --md-footer-fg-color: var(--ink);
  --md-footer-fg-color--light: var(--soft);
  --md-footer-bg-color--dark: var(--card);
}
.md-header, .md-tabs { border-bottom: 1px solid var(--rule); box-shadow: none !important; }
.md-search__form, .md-search__form:hover { background: var(--code); border-radius: 7px; }
[data-md-toggle="search"]:checked ~ .md-header .md-search__form { border-radius: 7px 7px 0 0; }
/* What is found is legible on code and tags too, and code in results wraps: it cannot be scrolled
   by the keyboard. */
.md-search-result mark { color: var(--ink); text-decoration-color: var(--c2); }
.md-search-result .md-typeset pre > code { white-space: pre-wrap; overflow: visible; }
.md-header__title { font-weight: 700; }
.md-typeset h1 { color: var(--ink); font-weight: 700; letter-spacing: -.02em; }
.md-typeset h2 { font-weight: 700; padding-bottom: .2em; border-bottom: 1px solid var(--rule); }
.md-typeset h3 { font-weight: 700; }
.md-typeset a { text-underline-offset: .15em; }
.md-content .md-typeset :is(p, li, td) a { text-decoration: underline; }
.md-typeset a code { color: var(--c1); transition: none; }
.md-typeset table:not([class]) code { white-space: nowrap; }
.md-typeset table:not([class]) td { min-width: 6rem; }
@media screen and (max-width: 44em) {
  .md-typeset table:not([class]) :is(td, th) { min-width: 0; padding: .5em .6em; }
  .md-typeset table:not([class]) td:not(:first-child) code {
    white-space: normal; overflow-wrap: break-word; }
}
.md-typeset img { border-radius: 7px; }
.md-typeset img[src$="home.svg"] { display: block; max-width: min(100%, 44rem); margin: 0 auto; }
.md-typeset .output { margin: 0 0 1.2em; padding: .4rem .8rem; overflow-x: auto; font-size: .7rem;
  background: var(--card); border: 1px solid var(--rule); border-radius: 7px; }
.md-typeset .output svg { max-width: 34rem; }
.md-typeset .doors { display: grid; gap: .8rem; margin: 1.2rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 14rem), 1fr)); }
.md-typeset .doors > div { display: flex; flex-direction: column; min-width: 0;
  padding: .2rem .9rem .6rem;
  background: var(--card); border: 1px solid var(--rule); border-top: 3px solid var(--c1);
  border-radius: 7px; }
.md-typeset .doors > div:nth-child(2) { border-top-color: var(--c2); }
.md-typeset .doors > div:nth-child(3) { border-top-color: var(--c3); }
.md-typeset .doors h2 { margin: .6rem 0 0; border: 0; font-size: 1.1rem; }
.md-typeset .doors p { margin: .4rem 0; }
.md-typeset .doors p:last-child { margin-top: auto; }
.md-typeset .doors pre > code { font-size: .62rem; white-space: pre-wrap;
  overflow-wrap: break-word; }
"""


def style_sheet() -> str:
    """Returns the sheet. Raises ValueError if `look.css` has no light and dark colours."""
    text = (files("moonpool") / "pages" / "look.css").read_text()
    found = VARIABLES.findall(text)
    if len(found) != 2:
        raise ValueError(f"look.css has {len(found)} sets of colours, not a light and a dark one")
    light, dark = (re.sub(r"color-scheme:[^;]*;", "", each).strip() for each in found)
    return (
        f'[data-md-color-scheme="default"] {{ {light} --code: #f1f2f4; }}\n'
        f'[data-md-color-scheme="slate"] {{ {dark} --code: #20252c; }}\n{THEME}'
    )
