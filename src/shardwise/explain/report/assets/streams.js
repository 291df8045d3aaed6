// What a rank's GPU did: a lane for each of its streams, beneath the rank's row.
const MOST_LANES = 8, NEVER = 0xffffffff;
const PAINT_OF_KIND = { NCCL: "nccl", "host to device": "copies", "device to host": "copies", "peer to peer": "copies" };

// Lanes of each rank, the busiest streams first.
function readStreams(given, kinds) {
  const ranks = Array.from({ length: given.ranks }, () => []), texts = (given.texts || "").split("\n");
  for (const lane of given.streams || []) {
    const read = { ...lane, ...columnsOf(lane.columns), texts, kinds };
    read.order = Array.from(read.begin.keys());
    if (ranks[lane.rank].length < MOST_LANES) ranks[lane.rank].push(read);
  }
  return ranks;
}

function lanePaint(lane, place) {
  return PAINT_OF_KIND[lane.kinds[lane.kind[place]]] || "kernel";
}

// Each activity by itself; where many share a pixel, each column of pixels as high as the stream was busy in it.
function drawLane(context, lane, view, area) {
  const scale = area.width / view.width, first = firstEndingAfter(lane.order, lane.end, view.from);
  let last = first;
  while (last < lane.begin.length && lane.begin[last] < view.to) last += 1;
  context.fillStyle = theme.colours.gap;
  context.fillRect(area.x, area.y, area.width, area.height);
  if (last - first > area.width / 2) return drawDensity(context, lane, view, area, first, last);
  for (let place = first; place < last; place++) {
    const left = Math.max(area.x + (lane.begin[place] - view.from) * scale, area.x);
    const right = Math.min(area.x + (lane.end[place] - view.from) * scale, area.x + area.width);
    context.fillStyle = theme.colours[lanePaint(lane, place)];
    context.fillRect(left, area.y, Math.max(right - left - (right - left > 3 ? 0.6 : 0), 0.6), area.height);
  }
}

function drawDensity(context, lane, view, area, first, last) {
  const paints = ["kernel", "nccl", "copies"], columns = Math.max(Math.floor(area.width), 1), scale = columns / view.width;
  const busy = paints.map(() => new Float32Array(columns));
  for (let place = first; place < last; place++) {
    const sums = busy[paints.indexOf(lanePaint(lane, place))];
    const from = Math.max((lane.begin[place] - view.from) * scale, 0), to = Math.min((lane.end[place] - view.from) * scale, columns);
    for (let column = Math.floor(from); column < to; column++) sums[column] += Math.min(to, column + 1) - Math.max(from, column);
  }
  for (let column = 0; column < columns; column++) {
    let top = area.y + area.height;
    busy.forEach((sums, number) => {
      const high = Math.min(sums[column], 1) * area.height;
      if (high <= 0) return;
      context.fillStyle = theme.colours[paints[number]];
      context.fillRect(area.x + column, Math.max(top - high, area.y), 1, high);
      top -= high;
    });
  }
}

// What a stream did at a time, or null.
function activityAt(lane, time) {
  const place = firstEndingAfter(lane.order, lane.end, time);
  return place < lane.begin.length && lane.begin[place] <= time ? { lane, place } : null;
}
