/* All rounds side by side: time by stage above, rows and accepted nodes below. One path for each stage, so that
   thousands of rounds are a handful of shapes. `choose(number)` is told which round the reader picks. */
const TALL = 92, LOW = 64, GAP = 22, LEFT = 4;

const drawLine = (choose) => {
  const box = document.getElementById("line"), said = document.getElementById("said");
  const step = Math.max(3, Math.min(22, Math.floor((box.clientWidth - 2 * LEFT) / rounds.length))), bar = Math.max(2, step - (step > 6 ? 2 : 1));
  const slowest = most(rounds.map((round) => sum(round.micros))) || 1, widest = most(rounds.map((round) => round.rows));
  const width = Math.max(LEFT * 2 + step * rounds.length, box.clientWidth - 2), top = 18, floor = top + TALL, ground = floor + GAP + LOW;
  const picture = shape("svg", { width, height: ground + 6, "aria-hidden": "true" });
  const x = (number) => LEFT + number * step;
  const block = (number, from, tall) => tall > 0 ? `M${x(number)} ${from.toFixed(1)}h${bar}v${(-tall).toFixed(1)}h${-bar}z` : "";
  const below = rounds.map(() => 0);
  data.stages.forEach((stage, i) => {
    const path = rounds.map((round, number) => {
      const tall = TALL * round.micros[i] / slowest, from = floor - below[number];
      below[number] += tall;
      return block(number, from, tall);
    });
    picture.append(shape("path", { class: stage, d: path.join("") }));
  });
  picture.append(shape("path", { class: "accepted", d: rounds.map((round, n) => block(n, ground, LOW * round.path.length / widest)).join("") }));
  picture.append(shape("path", { class: "rows", d: rounds.map((round, n) => block(n, ground, LOW * round.rows / widest)).join("") }));
  for (const y of [floor, ground]) picture.append(shape("line", { class: "base", x1: 0, x2: width, y1: y + .5, y2: y + .5 }));
  picture.append(shape("text", { class: "axis", x: LEFT, y: 9 }, `time, the slowest round ${time(slowest)}`),
    shape("text", { class: "axis", x: LEFT, y: floor + 12 }, `rows, at most ${widest}`));
  const pick = shape("rect", { class: "pick", y: 1, height: ground + 4, width: bar + 4, rx: 3, visibility: "hidden" });
  picture.append(pick);
  box.replaceChildren(picture);

  let now = 0;
  const select = (number) => {
    now = number;
    pick.setAttribute("x", x(number) - 2);
    pick.setAttribute("visibility", "visible");
    said.textContent = sentence(number);
    box.setAttribute("aria-valuenow", number + 1);
    box.setAttribute("aria-valuetext", sentence(number));
    if (x(number) < box.scrollLeft + 20 || x(number) > box.scrollLeft + box.clientWidth - 20) box.scrollLeft = x(number) - box.clientWidth / 2;
  };
  const under = (event) => Math.floor((event.clientX - picture.getBoundingClientRect().left - LEFT) / step);
  box.setAttribute("aria-valuemax", rounds.length);
  picture.addEventListener("pointermove", (event) => { if (rounds[under(event)]) said.textContent = sentence(under(event)); });
  picture.addEventListener("pointerleave", () => { said.textContent = sentence(now); });
  picture.addEventListener("click", (event) => { if (rounds[under(event)]) choose(under(event)); });
  box.addEventListener("keydown", (event) => {
    const to = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, PageDown: now - 10, PageUp: now + 10, Home: 0, End: rounds.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(rounds.length - 1, to)));
  });
  return select;
};

const drawLegend = () => {
  const legend = document.getElementById("stages");
  data.stages.forEach((stage, i) => {
    const item = element("li"), sample = shape("svg", { "aria-hidden": "true" });
    sample.append(shape("rect", { width: 12, height: 12, rx: 2, class: stage }));
    item.append(sample, document.createTextNode(`${i + 1} ${stage} ${time(sum(rounds.map((round) => round.micros[i])))}`));
    legend.append(item);
  });
};

const fillTable = (box) => {
  const table = element("table"), head = element("tr"), body = element("tbody"), top = element("thead");
  for (const name of ["round", "rows", "accepted", "tokens", ...data.stages]) head.append(element("th", "", name));
  top.append(head);
  rounds.forEach((round, number) => {
    const row = element("tr");
    for (const cell of [number + 1, round.rows, round.path.length, round.made, ...round.micros.map(time)]) row.append(element("td", "", cell));
    body.append(row);
  });
  table.append(top, body);
  box.append(table);
};
