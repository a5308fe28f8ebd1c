/* One round's tree: drawn, depth across and leaves down, the accepted path as a straight line on top; and in words. */
const ACROSS = 26, DOWN = 22, EDGE = 15;

/* The token that the model drew at the end of a round, made a node behind the last accepted one: its number, or 0. */
const withDrawn = (round) => {
  const hasDrawn = round.made > round.path.length;
  const last = round.path.length ? round.path[round.path.length - 1] : 0;
  const parents = hasDrawn ? [...round.parents, last] : round.parents;
  return { parents, drawn: hasDrawn ? parents.length : 0, on: new Set([0, ...round.path, ...hasDrawn ? [parents.length] : []]) };
};

const laidOut = (parents, on) => {
  const children = childrenOf(parents, on), depth = [0], row = [0], open = [0];
  let lowest = 0;
  while (open.length) {
    const node = open.pop();
    row[node] ??= ++lowest;
    for (const child of children[node]) depth[child] = depth[node] + 1;
    if (children[node].length) row[children[node][0]] = row[node];
    open.push(...children[node].slice().reverse());
  }
  return { depth, row };
};

/* Returns the picture and where the node `here` stands in it (0: the drawn token). */
const drawTree = (number, here) => {
  const round = rounds[number], { parents, drawn, on } = withDrawn(round), { depth, row } = laidOut(parents, on);
  const x = (node) => EDGE + depth[node] * ACROSS, y = (node) => EDGE + row[node] * DOWN;
  const width = 2 * EDGE + most(depth) * ACROSS, height = 2 * EDGE + most(row) * DOWN;
  const picture = shape("svg", { width, height, role: "img", "aria-label": `The tree of round ${number + 1}` });
  const links = parents.map((parent, i) => [parent, i + 1]).sort((a, b) => on.has(a[1]) - on.has(b[1]));
  for (const [a, b] of links) {
    picture.append(shape("path", { class: on.has(b) ? "link in" : "link", d: `M${x(a)} ${y(a)}C${x(a) + 14} ${y(a)} ${x(a) + 6} ${y(b)} ${x(b)} ${y(b)}` }));
  }
  const at = here || drawn;
  for (let node = 0; node <= parents.length; node++) {
    const isProposed = node > 0 && node !== drawn, letter = isProposed ? round.letters[node - 1] : "-";
    const marks = marksOf(letter) + (on.has(node) ? " in" : ""), group = shape("g", {}), [cx, cy] = [x(node), y(node)];
    const said = isProposed ? `${nodeName(round, node)} ${percent(round.chances[node - 1])}` : node ? "drawn by the model" : "the token before";
    group.append(shape("title", {}, said));
    group.append(node === drawn && node ? shape("rect", { x: cx - 7, y: cy - 7, width: 14, height: 14, rx: 2, class: `node ${marks}` })
      : shape("circle", { cx, cy, r: node ? 8 : 5, class: `node ${marks}` }));
    if (isProposed) group.append(shape("text", { x: cx, y: cy + .5, class: marks }, letter));
    if (node === at && node) group.append(shape("rect", { x: cx - 11, y: cy - 11, width: 22, height: 22, rx: 5, class: "here" }));
    picture.append(group);
  }
  return { picture, x: x(at), y: y(at) };
};

const listTree = (number) => {
  const round = rounds[number], on = new Set(round.path), children = childrenOf(round.parents, on);
  const { depth } = laidOut(round.parents, on), list = element("ol"), open = children[0].slice().reverse();
  while (open.length) {
    const node = open.pop(), item = element("li", "code");
    open.push(...children[node].slice().reverse());
    item.append(element("span", "", "· ".repeat(depth[node] - 1) + nodeName(round, node)),
      element("span", "", `${on.has(node) ? "✓ " : ""}${round.letters[node - 1]} ${percent(round.chances[node - 1])}`));
    list.append(item);
  }
  return list;
};
