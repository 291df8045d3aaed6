// The numbers of a curve where the pointer is: its step, and what each line has there.
function startCurves() {
  for (const picture of document.querySelectorAll(".charts .chart svg")) {
    const lines = [...picture.querySelectorAll("path")].map(readCurve);
    if (!lines.length) continue;
    const said = drawnIn(picture, "text", "said"), cursor = drawnIn(picture, "line", "cursor");
    picture.addEventListener("pointermove", (event) => sayCurve(picture, lines, said, cursor, event));
    picture.addEventListener("pointerleave", () => { said.textContent = ""; cursor.setAttribute("visibility", "hidden"); });
  }
}

function drawnIn(picture, kind, name) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  node.setAttribute("class", name);
  picture.append(node);
  return node;
}

// Places along a line are those of its path: one for each point.
function readCurve(path) {
  const points = path.dataset.points.split(" ").map((each) => each.split(":").map(Number));
  const places = path.getAttribute("d").split(/[ML]/).slice(1).map((each) => Number(each.split(" ")[0]));
  return { name: path.dataset.name, points, places };
}

function sayCurve(picture, lines, said, cursor, event) {
  const box = picture.getBoundingClientRect(), wide = picture.viewBox.baseVal;
  const x = ((event.clientX - box.left) / box.width) * wide.width;
  const nearest = (line) => line.places.reduce((best, place, at) => (Math.abs(place - x) < Math.abs(line.places[best] - x) ? at : best), 0);
  const found = lines.map((line) => [line, nearest(line)]), [first, at] = found[0];
  const values = found.map(([line, place]) => (lines.length > 1 ? line.name + " " : "") + digits(line.points[place][1]));
  said.textContent = "step " + first.points[at][0] + ": " + values.join(", ");
  said.setAttribute("x", wide.width - 12);
  said.setAttribute("y", 13);
  cursor.setAttribute("visibility", "visible");
  for (const [key, value] of [["x1", first.places[at]], ["x2", first.places[at]], ["y1", 26], ["y2", 136]]) cursor.setAttribute(key, value);
}
