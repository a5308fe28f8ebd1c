"use strict";
/* What the other scripts share: the data, made into rounds, and the making of elements. Text only ever enters a page by
   textContent, so no text of a model, prompt or file name can become markup. */
const data = JSON.parse(document.getElementById("data").textContent);
const rounds = data.rounds.map(([names, parents, chances, letters, path, made, micros, rows]) =>
  ({ names, parents, chances, letters, path, made, micros, rows, first: 0 }));
/* By token: its round, and its node there (0: the model drew it, nobody had proposed it). */
const roundOf = [], nodeOf = [];
rounds.forEach((round, number) => {
  round.first = roundOf.length;
  for (let i = 0; i < round.made; i++) {
    roundOf.push(number);
    nodeOf.push(round.path[i] ?? 0);
  }
});

const element = (name, marks, content) => {
  const made = document.createElement(name);
  if (marks) made.className = marks;
  if (content !== undefined) made.textContent = content;
  return made;
};
const shape = (name, attributes, content) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (content !== undefined) made.textContent = content;
  return made;
};
const sum = (values) => values.reduce((a, b) => a + b, 0);
const most = (values) => values.reduce((a, b) => Math.max(a, b), 0);
const percent = (thousandths) => thousandths > 0 && thousandths < 1 ? "< 0.1 %" : (thousandths / 10).toFixed(Number.isInteger(thousandths / 10) ? 0 : 1) + " %";
const time = (micros) => micros < 9950 ? (micros / 1000).toFixed(1) + " ms"
  : micros < 995000 ? Math.round(micros / 1000) + " ms" : (micros / 1e6).toFixed(2) + " s";
const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
const quoted = (name) => name.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
const marksOf = (letter) => letter === "-" ? "none" : letter;
const sentence = (number) => {
  const { rows, path, made, micros } = rounds[number];
  return `Round ${number + 1} of ${rounds.length}: ${count(rows, "row")}, ${path.length} accepted, ${count(made, "token")}, ${time(sum(micros))}`;
};
const nodeName = (round, node) => quoted(data.names[round.names[node - 1]]);
/* The probability, in thousandths, that a node and all before it are accepted. */
const along = (round, node) => {
  let chance = 1000;
  for (; node > 0; node = round.parents[node - 1]) chance *= round.chances[node - 1] / 1000;
  return chance;
};
/* The children of every node, accepted ones first. */
const childrenOf = (parents, on) => {
  const children = Array.from({ length: parents.length + 1 }, () => []);
  parents.forEach((parent, i) => children[parent][on.has(i + 1) ? "unshift" : "push"](i + 1));
  return children;
};
