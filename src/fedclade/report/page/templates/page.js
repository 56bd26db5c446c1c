"use strict";
// Figures name their colours, "@ink" or "@c0/0.3" with an opacity; the style sheet defines them for light and dark pages.
const figures = JSON.parse(document.getElementById("figures").textContent);
const NARROW = 560;

function coloured(value) {
  if (typeof value === "string") return value.startsWith("@") ? colour(value.slice(1)) : value;
  if (Array.isArray(value)) return value.map(coloured);
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([key, entry]) => [key, coloured(entry)]));
  }
  return value;
}

function colour(name) {
  const [token, opacity] = name.split("/");
  const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${token}`).trim();
  if (!opacity) return hex || `@${name}`;
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
}

// A phone has no room for wide margins, and a finger that scrolls the page must not draw a zoom box.
function fitted(layout, width) {
  const touch = matchMedia("(pointer: coarse)").matches;
  const fit = { ...layout, dragmode: touch ? false : "zoom", autosize: true };
  if (width < NARROW) {
    fit.font = { ...layout.font, size: 11 };
    fit.margin = { ...layout.margin, l: Math.min(layout.margin.l, 46), r: 8 };
    fit.height = Math.min(layout.height, layout.yaxis && layout.yaxis.scaleanchor ? width + 20 : layout.height);
    for (const name of ["xaxis"]) if (fit[name]) fit[name] = { ...fit[name], nticks: 6 };
  }
  return fit;
}

function draw(id) {
  const place = document.getElementById(id);
  if (!place || place.hidden || !(id in figures)) return Promise.resolve();
  const layout = fitted(coloured(figures[id].layout), place.clientWidth);
  place.style.height = `${layout.height}px`;
  const settings = { displayModeBar: false, responsive: false, doubleClick: "reset+autosize", showTips: false };
  return Plotly.react(place, coloured(figures[id].data), layout, settings);
}

const root = document.documentElement;

async function drawAll() {
  await Promise.all(Object.keys(figures).map(draw));
  root.dataset.drawn = `${root.dataset.theme} ${innerWidth}`; // tests wait for it
}

// Light and dark theme
const themeButton = document.getElementById("theme");

function showTheme(theme) {
  root.dataset.theme = theme;
  themeButton.textContent = theme === "dark" ? "Light" : "Dark";
  themeButton.setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
  themeButton.setAttribute("aria-pressed", String(theme === "dark"));
}

themeButton.addEventListener("click", () => {
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("fedclade-theme", theme); } catch { /* a page from a file may have no storage */ }
  showTheme(theme);
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (change) => {
  showTheme(change.matches ? "dark" : "light");
  drawAll();
});

// The tree: one stop of the Tab key, arrows within it
const chosen = {}; // the selected cluster of each tree

const branches = (tree) => [...document.querySelectorAll(`.branch[data-tree="${tree}"]`)];

function choose(branch) {
  const { tree, node } = branch.dataset;
  chosen[tree] = node;
  for (const each of branches(tree)) {
    each.setAttribute("aria-selected", String(each === branch));
    each.setAttribute("tabindex", each === branch ? "0" : "-1");
  }
  const panels = document.querySelectorAll(`.node[data-tree="${tree}"]`);
  for (const panel of panels) panel.hidden = panel.dataset.node !== node;
  const hint = panels[0].parentElement.querySelector(".hint");
  if (hint) hint.hidden = true;
}

function neighbour(branch, key) {
  const all = branches(branch.dataset.tree);
  const y = (each) => Number(each.querySelector(".bar").getAttribute("y"));
  if (key === "ArrowLeft") return all.find((each) => each.dataset.node === branch.dataset.parent);
  if (key === "ArrowRight") return all.find((each) => each.dataset.parent === branch.dataset.node);
  const sorted = [...all].sort((a, b) => y(a) - y(b));
  if (key === "Home") return all[0];
  if (key === "End") return sorted[sorted.length - 1];
  return sorted[sorted.indexOf(branch) + (key === "ArrowDown" ? 1 : -1)];
}

document.addEventListener("click", (event) => {
  const branch = event.target.closest(".branch");
  if (branch) choose(branch);
});
document.addEventListener("keydown", (event) => {
  const branch = event.target.closest && event.target.closest(".branch");
  if (!branch || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Enter" || event.key === " ") {
    choose(branch);
  } else if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) {
    const next = neighbour(branch, event.key);
    if (next) next.focus();
  } else {
    return;
  }
  event.preventDefault();
});

// Where a section has several figures, one is shown
document.addEventListener("change", (event) => {
  if (!event.target.matches(".choice select")) return;
  for (const option of event.target.options) document.getElementById(option.value).hidden = !option.selected;
  draw(event.target.value);
});

// Tables that a reader sorts by a column: numbers by value, the largest first, and texts by letter
function sortKey(row, column) {
  const text = row.cells[column].textContent.trim();
  const number = parseFloat(text.replace("−", "-").replace(/(\d),(?=\d{3})/g, "$1"));
  return { text, number };
}

function sortTable(head) {
  const table = head.closest("table");
  const column = head.cellIndex;
  const rows = [...table.tBodies[0].rows];
  const keys = new Map(rows.map((row) => [row, sortKey(row, column)]));
  const known = rows.filter((row) => keys.get(row).text !== "–");
  const numeric = known.length > 0 && known.every((row) => !Number.isNaN(keys.get(row).number));
  const first = numeric ? "descending" : "ascending";
  const other = numeric ? "ascending" : "descending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  const sign = order === "ascending" ? 1 : -1;
  const compare = numeric
    ? (a, b) => keys.get(a).number - keys.get(b).number
    : (a, b) => keys.get(a).text.localeCompare(keys.get(b).text, "en", { numeric: true });
  const missing = rows.filter((row) => keys.get(row).text === "–");
  table.tBodies[0].append(...known.sort((a, b) => sign * compare(a, b)), ...missing);
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest(".sortable thead button");
  if (button) sortTable(button.closest("th"));
});

let lastWidth = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === lastWidth) return; // a phone's address bar changes only the height
  lastWidth = innerWidth;
  requestAnimationFrame(drawAll);
});

showTheme(root.dataset.theme);
drawAll();
