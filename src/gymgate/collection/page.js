"use strict";
// Shows the data of a page: a list of parts, each drawn by the function of its name. Text from the data becomes text only.
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
const shown = value => value === null ? "-" : Number.isInteger(value) ? String(value)
  : typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);

// Tables. A click on a head sorts by that column: numbers as numbers, missing values last.
function table({ columns, rows }) {
  const isText = column => rows.some(row => typeof row[column] === "string");
  const body = element("tbody", {});
  const fill = sorted => body.replaceChildren(...sorted.map(row => element("tr", {}, ...row.map((value, column) =>
    element("td", isText(column) ? { class: "text" } : {}, shown(value))))));
  const heads = columns.map((name, column) => element("th", isText(column) ? { class: "text", tabindex: 0 } : { tabindex: 0 }, name));
  heads.forEach((head, column) => {
    const sort = () => {
      const sign = head.getAttribute("aria-sort") === "descending" ? 1 : -1;
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", sign < 0 ? "descending" : "ascending");
      fill([...rows].sort(({ [column]: a }, { [column]: b }) => a === null || b === null ? (a === null) - (b === null)
        : sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)))));
    };
    head.addEventListener("click", sort);
    head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
  });
  fill(rows);
  return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...heads)), body));
}

// Charts, as SVG.
const WIDTH = 440, HEIGHT = 170, LEFT = 46, BASE = HEIGHT - 24, TALL = BASE - 10;
const short = value => Number.isInteger(value) && Math.abs(value) < 1e6 ? String(value)
  : Math.abs(value) >= 1000 && Math.abs(value) < 1e6 ? value.toFixed(0) : String(Number(value.toPrecision(3)));
const chart = (title, shapes) => {
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  svg.append(...shapes.length ? shapes : [shape("text", { x: 10, y: 40 }, "no values")]);
  return element("figure", {}, element("figcaption", {}, title), svg);
};
// One label in the middle where an axis has one value, otherwise one at each end.
const axes = (left, right, low, high) => [
  shape("line", { class: "axis", x1: LEFT, y1: BASE, x2: WIDTH, y2: BASE }),
  ...(left === right ? [[(LEFT + WIDTH) / 2, "middle", left]] : [[LEFT, "start", left], [WIDTH, "end", right]])
    .map(([x, anchor, value]) => shape("text", { x, y: HEIGHT - 6, "text-anchor": anchor }, short(value))),
  ...[[BASE, low], [18, high]].map(([y, value]) => shape("text", { x: LEFT - 5, y, "text-anchor": "end" }, short(value))),
];
function histogram({ title, bars, count, mean }) {
  if (!bars.length) return chart(title, []);
  const step = (WIDTH - LEFT) / bars.length, most = Math.max(...bars.map(bar => bar[2]));
  const shapes = bars.map(([from, to, number], place) => {
    const height = TALL * number / most, width = Math.min(step, 80);
    const bar = shape("rect", { class: "c0", x: LEFT + place * step + (step - width) / 2, y: BASE - height, width: width - 1, height });
    bar.append(shape("title", {}, `${short(from)}${from === to ? "" : ` to ${short(to)}`}: ${number}`));
    return bar;
  });
  return chart(`${title} (n=${count}, mean ${short(mean)})`, [...shapes, ...axes(bars[0][0], bars.at(-1)[1], 0, most)]);
}
function shares({ title, unit, parts }) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  if (!total) return chart(title, []);
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
  if (!points.length) return chart(title, []);
  const low = Math.min(0, ...points.map(point => point[1])), high = Math.max(1, ...points.map(point => point[2]));
  const line = column => points.map((point, place) =>
    [LEFT + (WIDTH - LEFT) * (place + .5) / points.length, BASE - TALL * (point[column] - low) / (high - low)]);
  return chart(title, [
    shape("polygon", { class: "c0 band", points: [...line(2), ...line(1).reverse()].join(" ") }),
    shape("polyline", { class: "line", points: line(0).join(" ") }),
    ...points.length === 1 ? line(0).map(([cx, cy]) => shape("circle", { class: "c0", cx, cy, r: 4 })) : [],
    ...axes(1, points.length, low, high),
  ]);
}

// Conversations, with filters. A task without a fitting conversation is hidden.
const KINDS = { call: "tool", output: "tool", developer: "system" };
function turn([role, text]) {
  const word = role.split(" ")[0], kind = KINDS[word] ?? word, body = element("pre", {}, text);
  const folded = kind === "tool" || kind === "reasoning";
  return element("div", { class: `turn ${kind.replace(/[^\w-]/g, "")}` }, ...folded
    ? [element("details", {}, element("summary", {}, element("span", { class: "role" }, role), ` (${text.length} characters)`), body)]
    : [element("div", { class: "role" }, role), body]);
}
function rollout({ label, outcome, reward, numbers, turns }) {
  const tone = reward === null ? outcome : reward > 0 ? "good" : "bad";
  return element("div", { class: `rollout ${tone}` }, element("b", {}, label), ` ${outcome}${reward === null ? "" : `, reward ${shown(reward)}`}`,
    ...Object.keys(numbers).length ? [element("pre", {}, JSON.stringify(numbers))] : [], ...turns.map(turn));
}
function conversations(tasks) {
  const select = (name, values) => element("label", {}, `${name} `,
    element("select", { name }, element("option", { value: "" }, "all"), ...values.map(value => element("option", {}, value))));
  const bound = (name, text) => element("label", {}, `${text} `, element("input", { name, type: "number", step: "any" }));
  const all = tasks.flatMap(task => task.rollouts), count = element("output", {});
  const form = element("form", {}, select("environment", [...new Set(tasks.map(task => task.environment))].sort()),
    select("outcome", [...new Set(all.map(each => each.outcome))].sort()), bound("low", "reward from"), bound("high", "to"), count);
  const drawn = tasks.map(task => {
    const rollouts = task.rollouts.map(each => [each, rollout(each)]);
    const side = element("div", { class: "side" }, ...rollouts.map(([, node]) => node));
    return [task, element("details", { class: "task" }, element("summary", {}, task.name), side), rollouts];
  });
  const filter = () => {
    const { environment, outcome, low, high } = form.elements;
    let fitting = 0;
    for (const [task, node, rollouts] of drawn) {
      for (const [each, inner] of rollouts) {
        inner.hidden = !((!environment.value || task.environment === environment.value)
          && (!outcome.value || each.outcome === outcome.value)
          && (low.value === "" || (each.reward !== null && each.reward >= Number(low.value)))
          && (high.value === "" || (each.reward !== null && each.reward <= Number(high.value))));
        fitting += !inner.hidden;
      }
      node.hidden = rollouts.every(([, inner]) => inner.hidden);
    }
    count.textContent = `${fitting} conversations`;
  };
  form.addEventListener("input", filter);
  form.addEventListener("submit", event => event.preventDefault());
  filter();
  return element("section", {}, form, ...drawn.map(([, node]) => node));
}

const draw = {
  heading: text => element("h2", {}, text), note: text => element("p", { class: "note" }, text),
  table, histogram, shares, curve, conversations,
};
const main = document.querySelector("main");
for (const { fold, ...part } of JSON.parse(document.getElementById("data").textContent)) {
  const [[name, value]] = Object.entries(part);
  const node = draw[name](value);
  main.append(fold ? element("details", {}, element("summary", {}, fold), node) : node);
}
