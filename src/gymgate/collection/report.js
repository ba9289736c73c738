"use strict";
// Sort a table by the column that was clicked: numbers as numbers, missing values last.
for (const header of document.querySelectorAll("th")) {
  header.tabIndex = 0;
  const sort = () => {
    const table = header.closest("table"), body = table.tBodies[0], column = header.cellIndex;
    const down = header.getAttribute("aria-sort") === "descending" ? 1 : -1;
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down < 0 ? "descending" : "ascending");
    const rows = [...body.rows].map(row => [row.cells[column].textContent, row]);
    rows.sort(([a], [b]) => {
      if (a === "-" || b === "-") return (a === "-") - (b === "-");
      const difference = isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
      return down * difference;
    });
    body.append(...rows.map(([, row]) => row));
  };
  header.addEventListener("click", sort);
  header.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
}
// Show the conversations that fit every filter; a task without one is hidden.
const form = document.querySelector("form");
if (form) {
  form.hidden = false;
  const filter = () => {
    const { environment, outcome, low, high } = form.elements;
    let shown = 0;
    for (const task of document.querySelectorAll("details.task")) {
      let any = false;
      for (const rollout of task.querySelectorAll(".rollout")) {
        const { reward } = rollout.dataset;
        const fits = (!environment.value || task.dataset.environment === environment.value)
          && (!outcome.value || rollout.dataset.outcome === outcome.value)
          && (low.value === "" || (reward !== "" && Number(reward) >= Number(low.value)))
          && (high.value === "" || (reward !== "" && Number(reward) <= Number(high.value)));
        rollout.hidden = !fits;
        any ||= fits;
        shown += fits;
      }
      task.hidden = !any;
    }
    form.querySelector("output").textContent = `${shown} conversations`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
  filter();
}
