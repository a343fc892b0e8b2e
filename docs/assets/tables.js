// Long tables can be sorted by a click on a heading, and filtered by words: a row stays if every word begins a word of it.
const LONG = 20;

function sortBy(table, column, button) {
  const ascending = button.parentElement.getAttribute("aria-sort") !== "ascending";
  for (const heading of table.tHead.rows[0].cells) heading.removeAttribute("aria-sort");
  button.parentElement.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const text = (row) => row.cells[column].textContent.trim();
  const order = new Intl.Collator("en", { numeric: true });
  const rows = [...table.tBodies[0].rows].sort((a, b) => order.compare(text(a), text(b)));
  table.tBodies[0].append(...(ascending ? rows : rows.reverse()));
}

function filterBy(table, text, count) {
  const words = text.trim().split(/\s+/).map((word) => word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const patterns = words.map((word) => new RegExp(`(^|[^a-z0-9])${word}`, "i"));
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) {
    const content = [...row.cells].map((cell) => cell.textContent).join(" ");
    row.hidden = !patterns.every((pattern) => pattern.test(content));
  }
  count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
}

for (const table of document.querySelectorAll("article table")) {
  if (!table.tHead || table.tBodies[0].rows.length < LONG) continue;
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    button.addEventListener("click", () => sortBy(table, column, button));
    heading.append(button);
  });
  const bar = document.createElement("p");
  bar.className = "table-filter";
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter, e.g. moe TP";
  input.setAttribute("aria-label", "Filter the rows of the table");
  const count = document.createElement("output");
  input.addEventListener("input", () => filterBy(table, input.value, count));
  bar.append(input, count);
  (table.closest(".md-typeset__scrollwrap") ?? table).before(bar);
  filterBy(table, "", count);
}
