// Markdown as elements. Texts of models are data: nothing here makes an element from a string.
function inlineMarkdown(text) {
  const parts = [], pattern = /`([^`]+)`|\*\*([^*]+)\*\*|__([^_]+)__|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:[^\s)]+)\)/;
  while (text) {
    const found = pattern.exec(text);
    if (!found) { parts.push(text); break; }
    if (found.index) parts.push(text.slice(0, found.index));
    const [whole, code, bold, bolder, slanted, words, link] = found;
    if (code != null) parts.push(el("code", "", code));
    else if (bold != null || bolder != null) parts.push(el("strong", "", ...inlineMarkdown(bold || bolder)));
    else if (slanted != null) parts.push(el("em", "", ...inlineMarkdown(slanted)));
    else { const a = el("a", "", words); a.href = link; a.rel = "noreferrer noopener"; a.target = "_blank"; parts.push(a); }
    text = text.slice(found.index + whole.length);
  }
  return parts;
}
const cellsOf = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
function tableOf(lines) {
  const head = el("tr", "", ...cellsOf(lines[0]).map(cell => { const th = el("th", "", ...inlineMarkdown(cell)); th.scope = "col"; return th; }));
  const rows = lines.slice(2).map(line => el("tr", "", ...cellsOf(line).map(cell => el("td", "", ...inlineMarkdown(cell)))));
  return el("div", "scroll", el("table", "", el("thead", "", head), el("tbody", "", ...rows)));
}
function markdown(text) {
  const lines = text.split("\n"), blocks = []; let i = 0;
  const until = stop => { const from = i; while (i < lines.length && !stop(lines[i])) i++; return lines.slice(from, i); };
  while (i < lines.length) {
    const line = lines[i];
    if (/^\s*```/.test(line)) {
      i++; const code = until(each => /^\s*```/.test(each)); i++;
      const pre = el("pre", "", el("code", "", code.join("\n"))); pre.tabIndex = 0; blocks.push(pre);
    } else if (/^#{1,6}\s/.test(line)) { i++; blocks.push(el(line.startsWith("###") ? "h4" : "h3", "", ...inlineMarkdown(line.replace(/^#+\s+/, "")))); }
    else if (/^\s*([-*+]|\d+[.)])\s/.test(line)) {
      const numbered = /^\s*\d/.test(line), items = until(each => !each.trim() || !/^\s*([-*+]|\d+[.)])\s|^\s{2,}/.test(each));
      const list = el(numbered ? "ol" : "ul", "");
      for (const item of items) {
        const head = /^\s*([-*+]|\d+[.)])\s+/.exec(item);
        if (head) list.append(el("li", "", ...inlineMarkdown(item.slice(head[0].length))));
        else list.lastChild.append(" ", ...inlineMarkdown(item.trim()));
      }
      if (numbered) list.start = parseInt(line.trim(), 10) || 1;
      blocks.push(list);
    } else if (/^>\s?/.test(line)) { blocks.push(el("blockquote", "", ...inlineMarkdown(until(each => !/^>/.test(each)).map(each => each.replace(/^>\s?/, "")).join(" ")))); }
    else if (line.includes("|") && /^\s*\|?[\s:|-]*-[\s:|-]*$/.test(lines[i + 1] || "")) blocks.push(tableOf(until(each => !each.includes("|"))));
    else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) { i++; blocks.push(el("hr")); }
    else if (!line.trim()) i++;
    else {
      const from = i; i++;
      until(each => !each.trim() || /^\s*```|^#{1,6}\s|^\s*([-*+]|\d+[.)])\s|^>/.test(each));
      const paragraph = el("p", "");
      lines.slice(from, i).forEach((each, k) => { if (k) paragraph.append(el("br")); paragraph.append(...inlineMarkdown(each)); });
      blocks.push(paragraph);
    }
  }
  return blocks;
}
