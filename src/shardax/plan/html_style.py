# SPDX-License-Identifier: Apache-2.0
"""How a plan's page looks and what its script does: both stand in the page itself.

The page can be read without the script, which sorts the table and opens what a link points at.
"""

from __future__ import annotations

STYLE = """
:root { --line: #d5d9de; --soft: #f4f6f8; --text: #222; --quiet: #5a6270; --link: #0b57a4;
  --good: #1a7f37; --bad: #b42318; --limit: #b42318; }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1.25rem; }
h1 { font-size: 1.5rem; margin-bottom: 0.25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; }
p { max-width: 46rem; margin: 0.4rem 0; }
a { color: var(--link); }
.quiet { color: var(--quiet); font-size: 13px; }
.scroll { margin-top: 1rem; overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
.scroll table { border-collapse: separate; border-spacing: 0; width: 100%; }
.scroll th, .scroll td { padding: 5px 10px; white-space: nowrap; border-bottom-color: var(--line);
  border-right: 0; }
.scroll tbody tr:last-child > * { border-bottom: 0; }
.scroll thead th { background: var(--soft); vertical-align: bottom; }
.scroll th[scope=row] { position: sticky; left: 0; background: Canvas; font-weight: 600;
  max-width: 20rem; min-width: min(14rem, 34vw); overflow-wrap: anywhere; white-space: normal; }
.scroll td.right, .scroll th.right { text-align: right; font-variant-numeric: tabular-nums; }
.scroll thead button { all: unset; cursor: pointer; font: inherit; font-weight: 600; }
.scroll thead button:focus-visible, summary:focus-visible, .scroll:focus-visible, a:focus-visible {
  outline: 2px solid var(--link); outline-offset: 2px; }
.scroll thead button::after { content: " ⇅"; color: var(--quiet); }
.scroll th[aria-sort=ascending] button::after { content: " ▲"; color: inherit; }
.scroll th[aria-sort=descending] button::after { content: " ▼"; color: inherit; }
.scroll thead small { display: block; color: var(--quiet); font-weight: 400; }
.yes { color: var(--good); font-weight: 600; } .no, .failed { color: var(--bad); font-weight: 600; }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1.1rem; list-style: none; padding: 0;
  margin: 0.5rem 0; font-size: 13px; }
.legend i, .swatch { display: inline-block; width: 0.8rem; height: 0.8rem; border-radius: 2px;
  margin-right: 0.4rem; vertical-align: -1px; }
.legend i.line { width: 2px; background: var(--limit); margin: 0 0.6rem 0 0.4rem; }
.bars { display: grid; grid-template-columns: minmax(6rem, 15rem) 1fr minmax(7rem, max-content);
  grid-auto-flow: dense; gap: 0.35rem 0.9rem; align-items: center; font-size: 13px; margin: 0; }
.bars dt { overflow-wrap: anywhere; } .bars dd { margin: 0; }
.bars dt { grid-column: 1; } .bars .drawn { grid-column: 2; }
.bars .figure { grid-column: 3; font-variant-numeric: tabular-nums; text-align: right; }
.bar { position: relative; height: 1.05rem; background: var(--soft); border-radius: 3px; }
.bar span { position: absolute; top: 0; bottom: 0; box-sizing: border-box;
  border-right: 1px solid Canvas; }
.bar b { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--limit); }
details.layout { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; }
details.layout > summary { cursor: pointer; padding: 0.55rem 0.8rem; overflow-wrap: anywhere; }
details.layout[open] > summary { border-bottom: 1px solid var(--line); background: var(--soft); }
details.layout > div { padding: 0.2rem 0.9rem 1rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr));
  gap: 0.5rem 1rem; margin: 0.8rem 0; }
.facts div { border-left: 3px solid var(--line); padding-left: 0.6rem; }
.facts dt { color: var(--quiet); font-size: 12px; } .facts dd { margin: 0; font-weight: 600; }
.facts dd small { font-weight: 400; color: var(--quiet); }
.pairs { width: auto; } .pairs td { overflow-wrap: anywhere; border-color: var(--line); }
.pictures { display: flex; flex-wrap: wrap; gap: 1rem 1.5rem; }
.pictures figure { margin: 0; max-width: 280px; } .pictures svg { max-width: 100%; height: auto; }
.pictures figcaption { overflow-wrap: anywhere; }
ol.sent { list-style: none; padding: 0; margin: 0; }
ol.sent > li { margin: 0.9rem 0; }
ol.sent .head { display: flex; flex-wrap: wrap; gap: 0 0.8rem; font-weight: 600; }
ol.sent .head code { overflow-wrap: anywhere; }
ol.sent .share { height: 4px; background: var(--soft); margin: 0.25rem 0 0.35rem; }
ol.sent .share span { display: block; height: 100%; background: #4e79a7; }
ol.sent ul { margin: 0; padding-left: 1.1rem; font-size: 14px; }
ol.sent ul li { margin: 0.35rem 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, monospace; font-size: 0.92em; overflow-wrap: anywhere; }
ul.remarks { padding-left: 1.1rem; } ul.remarks li { overflow-wrap: anywhere; margin: 0.3rem 0; }
dl.labels { display: grid; grid-template-columns: max-content 1fr; gap: 0.3rem 1rem; }
dl.labels dd { margin: 0; } dl.labels dt { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a3f46; --soft: #24282d; --text: #ddd; --quiet: #a3abb8; --link: #7ab8ff;
    --good: #57c278; --bad: #ff8a80; --limit: #ff8a80; }
  .scroll th[scope=row] { background: #181818; }
  .bar span { border-right-color: #181818; }
}
@media (max-width: 40rem) {
  body { margin: 1rem auto; padding: 0 0.75rem; }
  .bars { grid-template-columns: 1fr max-content; grid-auto-flow: row; }
  .bars .figure { grid-column: 2; }
  .bars .drawn { grid-column: 1 / -1; margin-bottom: 0.5rem; }
  .facts { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  dl.labels { grid-template-columns: 1fr; }
}
@media print { details.layout > div { display: block; } .scroll { overflow: visible; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') === 'ascending';
    for (const other of heads) other.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const numeric = head.dataset.kind === 'number';
    const value = row => row.cells[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === '' || y === '') return (x === '') - (y === '');
      const order = numeric ? Number(x) - Number(y)
        : x.localeCompare(y, 'en', {numeric: true});
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  }));
}
const reveal = () => {
  const name = decodeURIComponent(location.hash.slice(1));
  const target = name && document.getElementById(name);
  if (target && target.matches('details')) { target.open = true; target.scrollIntoView(); }
};
addEventListener('hashchange', reveal);
reveal();
"""
