// During a run: request its state, and update only what has changed.
const PAUSE = 1000; // milliseconds between two requests
let seen = "";
let missed = 0;
const partsShown = {};

const statusLine = document.getElementById("status");

function say(text, over) {
  statusLine.textContent = text;
  statusLine.classList.toggle("over", Boolean(over));
}

function renew(part) {
  let place = document.getElementById(part.id);
  if (!place) {
    place = document.createElement("section");
    place.id = part.id;
  }
  if (partsShown[part.id] !== part.html) {
    const open = [...place.querySelectorAll("details[open]")].map((each) => each.id);
    const selects = Object.fromEntries([...place.querySelectorAll("select")].map((each) => [each.id, each.selectedIndex]));
    const plots = Object.fromEntries([...place.querySelectorAll(".plot")].map((each) => [each.id, each]));
    const focused = document.activeElement && place.contains(document.activeElement) ? mark(document.activeElement) : "";
    place.innerHTML = part.html;
    for (const empty of place.querySelectorAll(".plot")) if (plots[empty.id]) empty.replaceWith(plots[empty.id]);
    // A new section is not in the document yet, so its elements are looked for in the section.
    for (const id of open) inside(place, id)?.setAttribute("open", "");
    for (const [id, index] of Object.entries(selects)) {
      const select = inside(place, id);
      if (select && select.options[index]) select.selectedIndex = index;
    }
    for (const select of place.querySelectorAll(".choice select")) {
      for (const option of select.options) inside(place, option.value).hidden = !option.selected;
    }
    partsShown[part.id] = part.html;
    for (const [tree, node] of Object.entries(chosen)) {
      const branch = place.querySelector(`.branch[data-tree="${tree}"][data-node="${node}"]`);
      if (branch) choose(branch);
    }
    if (focused) place.querySelector(focused)?.focus();
  }
  return place;
}

function inside(place, id) {
  return place.querySelector(`#${CSS.escape(id)}`);
}

function mark(element) {
  if (element.matches(".branch")) return `.branch[data-tree="${element.dataset.tree}"][data-node="${element.dataset.node}"]`;
  return element.id ? `#${element.id}` : "";
}

function show(state) {
  document.getElementById("subtitle").textContent = state.subtitle;
  const places = state.sections.map(renew);
  const holder = document.getElementById("sections");
  places.forEach((place, i) => {
    if (holder.children[i] !== place) holder.insertBefore(place, holder.children[i] || null);
  });
  while (holder.children.length > places.length) holder.lastElementChild.remove();
  const links = state.sections.map((part) => `<li><a href="#${part.id}"></a></li>`).join("");
  const list = document.getElementById("links");
  if (list.children.length !== places.length) list.innerHTML = links;
  state.sections.forEach((part, i) => { list.children[i].firstChild.textContent = part.id[0].toUpperCase() + part.id.slice(1); });
  for (const id of Object.keys(figures)) if (!(id in state.figures)) delete figures[id];
  for (const [id, figure] of Object.entries(state.figures)) {
    const text = JSON.stringify(figure);
    if (text === drawn[id]) continue;
    drawn[id] = text;
    figures[id] = figure;
    const place = document.getElementById(id);
    place.dataset.stale = "yes";
    eyes.unobserve(place); // a new observation reports whether it is visible
    eyes.observe(place);
  }
}

// Only visible figures are drawn again: drawing takes most of the page's processor time, which the run needs.
const drawn = {};
const eyes = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (!isIntersecting || !target.dataset.stale) continue;
    delete target.dataset.stale;
    draw(target.id);
  }
}, { rootMargin: "200px" });

async function fetchState() {
  const response = await fetch(`state?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
  if (!response.ok) throw new Error(`state: ${response.status}`);
  return response.json();
}

function showState(state) {
  say(state.status, state.finished);
  if (state.cards) document.getElementById("cards").innerHTML = state.cards;
  if (state.version !== undefined && state.version !== seen) {
    show(state.page);
    seen = state.version;
    root.dataset.version = seen;
  }
  root.dataset.round = state.round;
}

async function follow() {
  let goes = true;
  if (!document.hidden) {
    let state;
    try {
      state = await fetchState();
      missed = 0;
    } catch {
      missed += 1;
      if (missed >= 3) {
        say("The run has ended or was stopped; this is its last known state.", true);
        return;
      }
    }
    if (state) {
      try {
        showState(state);
      } catch (error) {
        say("This page cannot show the run, because of an error in the page; the browser's console has the error.", true);
        throw error;
      }
      goes = !(state.finished && seen === state.latest);
    }
  }
  if (goes) setTimeout(follow, PAUSE);
}

follow();
