/* One token is shown at a time: the one pointed at, else the one that was kept by focus, click or Enter. */
const text = document.getElementById("text"), panel = document.getElementById("panel");
const spans = [...text.querySelectorAll("span:not(.rest)")];
const numberOf = new Map(spans.map((span, i) => [span, i]));
let kept = -1, shown = -2, selectRound = () => {};

const chip = (letter) => {
  const made = element("span", `chip ${marksOf(letter)}`);
  made.append(element("b", "", letter), element("span", "", data.called[letter]));
  return made;
};

const chanceOf = (i) => {
  const round = rounds[roundOf[i]], node = nodeOf[i];
  if (!round) return "";
  if (!node) return round.rows > 1 ? "No proposal at this place was it: the model drew it itself." : "Nothing was proposed in this round.";
  const path = round.parents[node - 1] ? `; together with the ${count(round.path.indexOf(node), "token")} before it ${percent(Math.round(along(round, node)) || along(round, node))}` : "";
  return `Expected to be accepted with ${percent(round.chances[node - 1])}${path}.`;
};

const aboutToken = (i) => {
  const { tokens } = data, source = element("p"), parts = [element("p", "token code", quoted(data.names[tokens.name[i]])), source];
  source.append(chip(tokens.source[i]));
  const [place, line] = data.places[tokens.place[i]];
  if (place) parts.push(element("p", "", `From ${place}${line ? ":" : "."}`));
  if (line) parts.push(element("p", "code line", line));
  parts.push(element("p", "", chanceOf(i)));
  const chance = tokens.chance[i] ?? null;
  if (chance !== null) parts.push(element("p", "", `The model's own probability: ${percent(Math.round(1000 * Math.exp(chance)))}.`));
  parts.push(element("p", "quiet", `Token ${i + 1} of ${spans.length}, id ${tokens.id[i]}`));
  return parts;
};

const aboutRound = (number, here) => {
  const round = rounds[number], times = data.stages.map((stage, i) => `${stage} ${time(round.micros[i])}`).join(" · ");
  const parts = [element("h3", "", sentence(number)), element("p", "quiet", times)];
  if (round.rows < 2) return parts;
  const box = element("div", "tree"), details = element("details"), { picture, x, y } = drawTree(number, here);
  box.append(picture);
  details.append(element("summary", "", "The tree in words"));
  details.addEventListener("toggle", () => { if (details.open && details.children.length < 2) details.append(listTree(number)); });
  requestAnimationFrame(() => box.scrollTo(x - box.clientWidth / 2, y - box.clientHeight / 2));
  parts.push(box, details);
  if (round.parents.length + 1 < round.rows) parts.push(element("p", "quiet", `Shown: the ${round.parents.length} likeliest of ${round.rows - 1} nodes.`));
  return parts;
};

/* On a narrow screen the panel covers part of the page, and there may be no Escape key. */
const closer = () => {
  const made = element("button", "close", "×");
  made.type = "button";
  made.setAttribute("aria-label", "Let this token go");
  made.addEventListener("click", letGo);
  return made;
};

const show = (i) => {
  if (i === shown) return;
  shown = i;
  document.body.classList.toggle("open", i >= 0);
  text.querySelectorAll(".at, .mate").forEach((span) => span.classList.remove("at", "mate"));
  panel.replaceChildren();
  if (i < 0) {
    panel.append(element("p", "quiet", "No token is chosen. Point at one to see where it came from and the tree of its round."));
    return;
  }
  const number = roundOf[i], round = rounds[number];
  spans[i].classList.add("at");
  if (round) for (let k = round.first; k < round.first + round.made; k++) spans[k]?.classList.add("mate");
  panel.append(closer(), ...aboutToken(i), ...(round ? aboutRound(number, nodeOf[i]) : []));
  panel.scrollTop = 0;
  if (round) selectRound(number);
};

const keep = (i, takesFocus) => {
  kept = i;
  show(i);
  if (i < 0) return;
  /* One token at a time is a stop for Tab; never take it from the one that has the focus, which would lose it. */
  const stop = text.querySelector("[tabindex]");
  spans[i].tabIndex = 0;
  if (takesFocus) spans[i].focus();
  if (stop !== spans[i]) stop?.removeAttribute("tabindex");
};

const letGo = () => {
  keep(-1, false);
  document.activeElement?.blur();
};

const steps = { ArrowRight: 1, ArrowLeft: -1 };
const nextRound = (i, way) => rounds[(roundOf[i] ?? 0) + way]?.first ?? i;
text.addEventListener("pointerover", (event) => { const i = numberOf.get(event.target); if (i !== undefined && event.pointerType === "mouse") show(i); });
text.addEventListener("pointerleave", () => show(kept));
text.addEventListener("click", (event) => { const i = numberOf.get(event.target); if (i !== undefined) keep(i, true); });
text.addEventListener("focusin", (event) => { const i = numberOf.get(event.target); if (i !== undefined) keep(i, false); });
text.addEventListener("keydown", (event) => {
  const i = numberOf.get(event.target);
  if (i === undefined) return;
  const to = event.key in steps ? i + steps[event.key] : { ArrowDown: nextRound(i, 1), ArrowUp: nextRound(i, -1), Home: 0, End: spans.length - 1 }[event.key];
  if (to === undefined || !spans[to]) return;
  event.preventDefault();
  keep(to, true);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") letGo();
});

/* The theme: that of the system until the reader chooses; remembered where the browser lets a file remember. */
const theme = document.getElementById("theme"), themes = ["system", "light", "dark"];
const remembered = (value) => {
  try {
    if (value !== undefined) localStorage.setItem("longgraft-theme", value);
    return localStorage.getItem("longgraft-theme");
  } catch { return null; }
};
const setTheme = (name) => {
  document.documentElement.dataset.theme = name;
  theme.textContent = `Theme: ${name}`;
};
theme.addEventListener("click", () => {
  const name = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
  setTheme(name);
  remembered(name);
});
setTheme(themes.includes(remembered()) ? remembered() : "system");
theme.hidden = false;

document.documentElement.classList.add("js");
panel.hidden = false;
show(-1);
if (spans.length) spans[0].tabIndex = 0;
if (rounds.length) {
  document.getElementById("rounds").hidden = false;
  drawLegend();
  const draw = () => {
    selectRound = drawLine((number) => keep(rounds[number].first, false));
    selectRound(roundOf[shown] ?? 0);
  };
  draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; draw(); } });
  document.getElementById("table").addEventListener("toggle", (event) => {
    const box = event.target.querySelector("div");
    if (event.target.open && !box.children.length) fillTable(box);
  });
}
