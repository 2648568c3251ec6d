"use strict";
// Tables of three columns or more know their heads in each cell: website.css shows them on a phone.
for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
  const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent);
  if (heads.length < 3) continue;
  table.dataset.wide = "";
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, column) => { cell.dataset.head = heads[column]; });
  }
}
