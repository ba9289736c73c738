"use strict";
// Shows the data of a page: a list of parts, each drawn by the function of its name. Text from the data becomes text only.
// A node with an `update` takes its part's next content and keeps what the reader did to it; others are drawn anew.
const element = (name, attributes, ...children) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};
const shape = (name, attributes, text = "") => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};
// A number of a column with decimals has three of them.
const shown = (value, decimals = false) => value === null ? "-" : typeof value !== "number" ? String(value)
  : decimals && (value === 0 || (Math.abs(value) >= 5e-4 && Math.abs(value) < 1e9)) ? value.toFixed(3)
  : Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(4)));

// Tables. A click on a head sorts by that column: numbers as numbers, missing values last.
function table(content) {
  const head = element("tr", {}), body = element("tbody", {});
  let columns = [], rows = [], decimals = [], isText = [], by = null, sign = 1;
  const compare = ({ [by]: a }, { [by]: b }) => a === null || b === null ? (a === null) - (b === null)
    : sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const fill = () => {
    while (body.rows.length > rows.length) body.deleteRow(-1);
    (by === null ? rows : [...rows].sort(compare)).forEach((row, place) => {
      const line = body.rows[place] ?? body.insertRow();
      while (line.cells.length > row.length) line.deleteCell(-1);
      row.forEach((value, column) => {
        const cell = line.cells[column] ?? line.insertCell(), text = shown(value, decimals[column]);
        if (cell.textContent !== text) cell.textContent = text;
        cell.classList.toggle("text", isText[column]);
      });
    });
  };
  const sort = column => {
    sign = by === column && sign < 0 ? 1 : -1;
    by = column;
    [...head.cells].forEach(cell => cell.removeAttribute("aria-sort"));
    head.cells[column].setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
    fill();
  };
  const box = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), body));
  const hint = element("p", { class: "note" }), node = element("div", {}, box, hint);
  new ResizeObserver(() => {
    const ways = [["sideways", box.scrollWidth > box.clientWidth], ["down", box.scrollHeight > box.clientHeight]];
    hint.textContent = `scroll ${ways.filter(way => way[1]).map(way => way[0]).join(" and ")} for more`;
    hint.hidden = !ways.some(way => way[1]);
  }).observe(box.firstChild);
  node.update = content => {
    const sorted = columns[by], before = String(columns);
    ({ columns, rows, decimals } = content);
    isText = columns.map((_, column) => rows.some(row => typeof row[column] === "string"));
    if (String(columns) !== before) {
      by = columns.includes(sorted) ? columns.indexOf(sorted) : null;
      head.replaceChildren(...columns.map((name, column) => {
        const cell = element("th", { tabindex: 0 }, name);
        if (column === by) cell.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
        cell.addEventListener("click", () => sort(column));
        cell.addEventListener("keydown", event => { if (event.key === "Enter") sort(column); });
        return cell;
      }));
    }
    [...head.cells].forEach((cell, column) => cell.classList.toggle("text", isText[column]));
    fill();
  };
  node.update(content);
  return node;
}

// Charts, as SVG.
const WIDTH = 440, HEIGHT = 190, LEFT = 46, TOP = 32, BASE = HEIGHT - 38, TALL = BASE - TOP, FEW_BARS = 12;
const short = value => Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value)
  : Math.abs(value) >= 1000 && Math.abs(value) < 1e6 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
const chart = (title, shapes) => {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.append(...shapes);
  return element("figure", {}, element("figcaption", {}, title), svg);
};
const label = (x, y, anchor, text) => shape("text", { x, y, "text-anchor": anchor }, text);
const axes = (across, up, marks, low, high) => [
  shape("line", { class: "axis", x1: LEFT, y1: BASE, x2: WIDTH, y2: BASE }),
  ...marks.map(([x, anchor, value]) => label(x, BASE + 14, anchor, short(value))),
  ...[[BASE, low], [TOP + 8, high]].map(([y, value]) => label(LEFT - 5, y, "end", short(value))),
  label((LEFT + WIDTH) / 2, HEIGHT - 6, "middle", across), label(2, 12, "start", up),
];
function histogram({ title, bars, count, mean }) {
  const step = (WIDTH - LEFT) / bars.length, most = Math.max(...bars.map(bar => bar[2])), middle = place => LEFT + (place + .5) * step;
  const shapes = bars.map(([from, to, number], place) => {
    const height = number && Math.max(2, TALL * number / most), width = Math.min(step, 80);
    const bar = shape("rect", { class: "c0", x: middle(place) - width / 2, y: BASE - height, width: width - 1, height });
    bar.append(shape("title", {}, `${short(from)}${from === to ? "" : ` to ${short(to)}`}: ${number}`));
    return bar;
  });
  const few = bars.length <= FEW_BARS;
  if (few) shapes.push(...bars.map(([, , number], place) => label(middle(place), BASE - 4 - shapes[place].getAttribute("height"), "middle", number)));
  const marks = few && bars[0][0] === bars[0][1] ? bars.map(([value], place) => [middle(place), "middle", value])
    : [[LEFT, "start", bars[0][0]], [WIDTH, "end", bars.at(-1)[1]]];
  return chart(`${title} (n=${count}, mean ${short(mean)})`, [...shapes, ...axes(title, "rollouts", marks, 0, most)]);
}
function shares({ title, unit, parts }) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  let x = 10;
  return chart(title, parts.flatMap(([name, value], place) => {
    const width = (WIDTH - 20) * value / total, colour = `c${place % 6}`, y = 62 + 20 * place;
    x += width;
    return [
      shape("rect", { class: colour, x: x - width, y: 14, width, height: 34 }),
      shape("rect", { class: colour, x: 10, y, width: 11, height: 11 }),
      shape("text", { x: 28, y: y + 10 }, `${name}: ${short(value)} ${unit}, ${(100 * value / total).toFixed(0)} %`),
    ];
  }));
}
function curve({ title, points }) {
  let low = 0, high = 1;  // not by Math.min(...): a call takes no more than some hundred thousand arguments
  for (const [, least, most] of points) [low, high] = [Math.min(low, least), Math.max(high, most)];
  const line = column => points.map((point, place) =>
    [LEFT + (WIDTH - LEFT) * (place + .5) / points.length, BASE - TALL * (point[column] - low) / (high - low)]);
  return chart(title, [
    shape("polygon", { class: "c0 band", points: [...line(2), ...line(1).reverse()].join(" ") }),
    shape("polyline", { class: "line", points: line(0).join(" ") }),
    ...points.length === 1 ? line(0).map(([cx, cy]) => shape("circle", { class: "c0", cx, cy, r: 4 })) : [],
    ...axes("tasks", "reward", points.length === 1 ? [[(LEFT + WIDTH) / 2, "middle", 1]] : [[LEFT, "start", 1], [WIDTH, "end", points.length]], low, high),
  ]);
}

// Conversations, with filters. A task without a fitting conversation is hidden.
const KINDS = new Map([["call", "tool"], ["output", "tool"], ["developer", "system"]]);
function turn([role, text]) {
  const word = role.split(" ")[0], kind = KINDS.get(word) ?? word, body = element("pre", {}, text);
  const folded = kind === "tool" || kind === "reasoning";
  return element("div", { class: `turn ${kind.replace(/[^\w-]/g, "")}` }, ...folded
    ? [element("details", {}, element("summary", {}, element("span", { class: "role" }, role), ` (${text.length} characters)`), body)]
    : [element("div", { class: "role" }, role), body]);
}
function rollout(content) {
  const { label, outcome, reward, expected, extracted, numbers, turns } = content, tone = reward === null ? outcome : reward > 0 ? "good" : "bad";
  const answers = [["expected", expected], ["extracted", extracted]].filter(([, answer]) => answer !== null);
  const node = element("div", { class: `rollout ${tone}` }, element("b", {}, label), ` ${outcome}${reward === null ? "" : `, reward ${shown(reward)}`}`,
    ...answers.map(([name, answer]) => element("div", { class: "answer" }, element("span", { class: "role" }, `${name} `), answer)),
    ...Object.keys(numbers).length ? [element("pre", {}, JSON.stringify(numbers))] : [], ...turns.map(turn));
  node.rollout = content;
  return node;
}
function task(content) {
  const summary = element("summary", {}), shared = element("div", { class: "prompt" }), side = element("div", { class: "side" });
  const node = element("details", { class: "task" }, summary, shared, side);
  node.side = side;
  node.update = ({ environment, name, prompt }) => {
    node.environment = environment;
    summary.textContent = name;
    shared.replaceChildren(...prompt.map(turn));
  };
  node.update(content);
  return node;
}
function filters() {
  const select = name => element("label", {}, `${name} `, element("select", { name }, element("option", { value: "" }, "all")));
  const bound = (name, text) => element("label", {}, `${text} `, element("input", { name, type: "number", step: "any" }));
  const form = element("form", {}, select("environment"), select("outcome"), bound("low", "reward from"), bound("high", "to"), element("output", {}));
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
  form.update = () => {};
  return form;
}
function filter() {
  const form = document.forms[0], tasks = [...document.querySelectorAll(".task")];
  if (!form) return;
  const { environment, outcome, low, high } = form.elements;
  const offer = (select, values) => {
    const known = [...select.options].map(option => option.value);
    select.append(...[...new Set(values)].filter(value => !known.includes(value)).sort().map(value => element("option", {}, value)));
  };
  offer(environment, tasks.map(node => node.environment));
  offer(outcome, tasks.flatMap(node => [...node.side.children].map(inner => inner.rollout.outcome)));
  let fitting = 0;
  for (const node of tasks) {
    const rollouts = [...node.side.children];
    for (const inner of rollouts) {
      const { outcome: is, reward } = inner.rollout;
      inner.hidden = !((!environment.value || node.environment === environment.value) && (!outcome.value || is === outcome.value)
        && (low.value === "" || (reward !== null && reward >= Number(low.value)))
        && (high.value === "" || (reward !== null && reward <= Number(high.value))));
      fitting += !inner.hidden;
    }
    node.hidden = rollouts.every(inner => inner.hidden);
  }
  form.querySelector("output").textContent = `${fitting} conversations`;
}

function progress(content) {
  const bar = element("progress", {}), text = element("span", {}), node = element("p", { class: "progress" }, bar, " ", text);
  node.update = ({ done, total }) => {
    bar.hidden = total === null;
    bar.max = total || 1;
    bar.value = done;
    text.textContent = `${done}${total === null ? "" : ` of ${total}`} rollouts`;
  };
  node.update(content);
  return node;
}

const draw = {
  headline: text => element("p", { class: "headline" }, text), heading: text => element("h2", {}, text), account: text => element("p", {}, text), note: text => element("p", { class: "note" }, text),
  table, histogram, shares, curve, filters, task, rollout, progress,
};
const main = document.querySelector("main"), nodes = new Map();
// Draws or updates `parts`, by key; the page then has those of `keys`, in that order, each rollout within the task before it.
function show(keys, parts) {
  for (const [key, { fold, key: _, ...part }] of Object.entries(parts)) {
    const [[name, value]] = Object.entries(part), before = nodes.get(key);
    if (before?.update) {
      before.update(value);
      continue;
    }
    const node = draw[name](value);
    before?.replaceWith(node);
    nodes.set(key, node);
    if (fold) nodes.set(key, Object.assign(element("details", {}, element("summary", {}, fold), node), { update: node.update }));
  }
  const lists = new Map([[main, []]]);
  let side = null;
  for (const key of keys) {
    const node = nodes.get(key);
    lists.get(node.rollout ? side : main).push(node);
    if (node.side) lists.set(side = node.side, []);
  }
  for (const [parent, list] of lists) {
    const wanted = new Set(list);
    for (const node of [...parent.children]) if (!wanted.has(node)) node.remove();
    list.forEach((node, place) => { if (parent.children[place] !== node) parent.insertBefore(node, parent.children[place] ?? null); });
  }
  const known = new Set(keys);
  for (const key of nodes.keys()) if (!known.has(key)) nodes.delete(key);
  filter();
}
// Takes what changes from the server, while the page is in view.
function follow(url) {
  const state = element("p", { class: "live", role: "status" }, "connecting");
  let keys = [], last = "", source = null;
  const open = () => {
    source = new EventSource(`${url}?since=${last}`);
    source.onmessage = ({ data, lastEventId }) => {
      const { title, keys: order = keys, parts } = JSON.parse(data);
      document.title = document.querySelector("h1").textContent = title;
      show(keys = order, parts);
      last = lastEventId;
    };
    source.onopen = () => { state.textContent = "live"; state.classList.add("on"); };
    source.onerror = () => { state.textContent = "gymgate view has ended, or is out of reach"; state.classList.remove("on"); };
  };
  document.addEventListener("visibilitychange", () => {
    source.close();
    if (!document.hidden) open();
  });
  main.before(state);
  open();
}
const parts = JSON.parse(document.getElementById("data").textContent);
if (main.dataset.events) follow(main.dataset.events);
else show(Object.keys(parts), parts);
