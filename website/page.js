// What the theme leaves out for keyboards and screen readers. It takes a block of code from the tab order
// where it believes that no pointer hovers, and adds its menu when the block comes into view.
const SCROLLS = ".md-typeset :is(pre > code, .output, .md-typeset__scrollwrap):not([tabindex])";
const MENUS = ".md-code__nav";
function mend() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll(SCROLLS)) if (part.scrollWidth > part.clientWidth) part.tabIndex = 0;
  document.querySelectorAll(MENUS).forEach((menu, n) => menu.setAttribute("aria-label", `Code ${n + 1}`));
}
mend();
addEventListener("resize", mend);
new MutationObserver(mend).observe(document.querySelector(".md-content"),
  { subtree: true, childList: true, attributes: true, attributeFilter: ["tabindex"] });
