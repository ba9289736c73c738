// The tables of all environments: a click on a head sorts, and a field filters the lines.
document.addEventListener("DOMContentLoaded", () => {
  if (/findings/.test(location.pathname)) { // paths end a line between words, long answers anywhere
    for (const place of document.querySelectorAll(".md-typeset td:nth-child(n+3)")) {
      place.innerHTML = place.innerHTML.replace(/[/_](?![^<]*>)/g, "$&<wbr>");
    }
    for (const seen of document.querySelectorAll(".md-typeset td:nth-child(2)")) {
      Object.assign(seen.style, { overflowWrap: "anywhere", minWidth: "10rem" });
    }
  }
  if (!/environments-status/.test(location.pathname)) return;
  for (const table of document.querySelectorAll(".md-typeset table")) {
    const body = table.tBodies[0];
    if (!body || body.rows.length < 10) continue;
    body.classList.add("table-names");
    for (const name of body.querySelectorAll("td:first-child code, td:nth-child(2)")) {
      name.innerHTML = name.innerHTML.replace(/[_/]/g, "$&<wbr>"); // a line ends between words only
    }
    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "Filter: words that a line must have, e.g. “match docker”";
    field.className = "table-filter";
    (table.closest(".md-typeset__scrollwrap") || table).before(field);
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase().split(/\s+/);
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const key = (row) => row.cells[column].textContent.trim();
      const number = (text) => (/^-?[\d.]/.test(text) ? parseFloat(text) : NaN);
      const compare = (a, b, sign) => {
        const [x, y] = [number(key(a)), number(key(b))];
        if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1; // lines without a number last
        return sign * (isNaN(x) ? key(a).localeCompare(key(b)) : x - y);
      };
      head.tabIndex = 0;
      head.title = "Sort";
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const cell of head.parentNode.cells) cell.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...[...body.rows].sort((a, b) => compare(a, b, down ? -1 : 1)));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});
