"""The look of the report.

Invariant: the page needs nothing but itself, is legible at 1200 px and on a phone, and prints on white paper.
"""

from __future__ import annotations

STYLE = """
:root { --ink: #1d2733; --soft: #5a6673; --line: #e1e6eb; --paper: #ffffff; --ground: #f5f7f9; --alarm: #b3261e; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 12px; }
h3 { font-size: 16px; margin: 0; }
p { margin: 8px 0; }
.verdict { font-size: 17px; max-width: 62em; }
.note { color: var(--soft); font-size: 13px; }
.missing { color: var(--soft); }
.notices { margin: 14px 0; padding: 0; list-style: none; }
.notices li { background: #fdf0ee; border-left: 4px solid var(--alarm); padding: 8px 12px; margin: 6px 0;
  overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 12px; margin: 18px 0 0; }
.tile, .card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.tile.alarm { border-color: var(--alarm); }
.tile.alarm b { color: var(--alarm); }
.cards { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
.card { margin: 0; min-width: 0; }
.card.wide { grid-column: 1 / -1; }
.card.table { margin: 0 0 14px; }
.cards + .card.table { margin-top: 14px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0; padding: 0; font-size: 13px; }
.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px;
  vertical-align: -1px; }
.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 13px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: var(--soft); }
.chart .unit { fill: var(--ink); }
.chart .marker { font-weight: 600; }
.chart .lane { fill: var(--ink); }
.chart .grid { stroke: var(--line); }
.chart .zero { stroke: #9aa5b1; }
.chart .empty { fill: #f1f3f5; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 13px; }
th, td { padding: 7px 12px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.numbers td:not(:first-child), .events td:first-child { font-variant-numeric: tabular-nums; }
.last-words td:last-child { color: var(--soft); }
.settings td:first-child { width: 40%; color: var(--soft); }
.when { font-weight: 600; }
.refused .when { font-weight: 400; }
.change { margin: 2px 0; }
.moves { margin: 4px 0 0; padding-left: 18px; font-size: 13px; color: var(--soft); }
.decisions td { width: 25%; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 1px 10px; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; font-variant-numeric: tabular-nums; }
details { margin-top: 10px; }
summary { cursor: pointer; color: var(--soft); }
.refused { color: var(--soft); }
@media (max-width: 900px) { .tiles { grid-template-columns: 1fr 1fr; } .cards { grid-template-columns: 1fr; } }
@media (max-width: 640px) {
  main { padding: 18px 12px 40px; }
  .chart text { font-size: 17px; }
  .scroll { overflow-x: auto; overflow-y: hidden; }
  .scroll .chart { width: 820px; }
  .scroll .chart text { font-size: 15px; }
  .tile b { font-size: 17px; }
  .rows thead { display: none; }
  .rows tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  .rows tbody tr:last-child { border-bottom: 0; }
  .rows td, .decisions td, .settings td:first-child { display: block; width: auto; border: 0; padding: 2px 0; }
  .rows td::before { content: attr(data-label); display: block; color: var(--soft); font-size: 12px; }
  .numbers td, .events td, .settings td { display: flex; gap: 12px; }
  .numbers td::before, .events td::before, .settings td::before { flex: 0 0 42%; padding-top: 2px; }
}
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""
