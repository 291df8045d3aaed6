// One row of boxes. Where boxes are wide each is drawn with its number; where many share a pixel, each column of
// pixels is drawn in the colour of whatever ran there, and neighbours of one colour in one stroke.
function drawWork(context, trace, rank, view, area, options) {
  const row = trace.rows[rank], scale = area.width / view.width;
  const first = firstEndingAfter(row.work, trace.end, view.from);
  let last = first;
  while (last < row.work.length && trace.begin[row.work[last]] < view.to && last - first <= area.width) last += 1;
  if (last - first > area.width) return drawColumns(context, trace, rank, view, area, first);
  for (let place = first; place < last; place++) {
    const event = row.work[place];
    const x = area.x + (trace.begin[event] - view.from) * scale;
    const wide = Math.max((trace.end[event] - trace.begin[event]) * scale, 0.6);
    const drawn = wide > 4 ? wide - 1 : wide;
    const left = Math.max(x, area.x - 2), right = Math.min(x + drawn, area.x + area.width + 2);
    if (right <= left) continue;
    context.globalAlpha = options.isFound && !options.isFound(event) ? 0.22 : 1;
    drawBox(context, trace, event, left, right, area);
  }
  context.globalAlpha = 1;
  if (options.labels && area.height >= 12) drawLabels(context, trace, row.work, first, last, view, area);
}

// The number of its microbatch on every box that is wide enough for it.
function drawLabels(context, trace, work, first, last, view, area) {
  const scale = area.width / view.width, y = area.y + area.height / 2 + 0.5;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.font = "10.5px ui-sans-serif, system-ui, sans-serif";
  context.fillStyle = theme.colours["on-box"];
  for (let place = first; place < last; place++) {
    const event = work[place], wide = (trace.end[event] - trace.begin[event]) * scale;
    if (wide < 9 || trace.paint[event] >= 8) continue;
    const text = String(trace.microbatch[event]);
    if (wide <= 6.4 * text.length + 3) continue;
    const left = Math.max(area.x + (trace.begin[event] - view.from) * scale, area.x);
    const right = Math.min(area.x + (trace.end[event] - view.from) * scale, area.x + area.width);
    const other = trace.secondMicrobatch.get(event);
    if (other === undefined) context.fillText(text, (left + right) / 2, y);
    else {
      context.fillText(text, (left + right) / 2, area.y + area.height * 0.27);
      context.fillText(other, (left + right) / 2, area.y + area.height * 0.77);
    }
  }
}

// A box; the halves of an overlapped pair lie above each other, since they run at once.
function drawBox(context, trace, event, left, right, area) {
  const second = trace.second[event], height = second === 255 ? area.height : area.height / 2;
  context.fillStyle = theme.paints[trace.paint[event]];
  context.fillRect(left, area.y, right - left, height);
  if (second === 255) return;
  context.fillStyle = theme.paints[second];
  context.fillRect(left, area.y + height, right - left, height);
}

function drawColumns(context, trace, rank, view, area, first) {
  const row = trace.rows[rank], work = row.work, perPixel = view.width / area.width;
  let place = first, paint = -1, since = 0;
  const flush = (until) => {
    if (paint >= 0 && until > since) {
      context.fillStyle = theme.paints[paint];
      context.fillRect(area.x + since, area.y, until - since, area.height);
    }
  };
  for (let column = 0; column < area.width; column++) {
    const time = view.from + (column + 0.5) * perPixel;
    while (place < work.length && trace.end[work[place]] <= time) place += 1;
    const event = place < work.length && trace.begin[work[place]] <= time ? work[place] : -1;
    const now = event < 0 ? -1 : trace.paint[event];
    if (now !== paint) { flush(column); paint = now; since = column; }
  }
  flush(Math.floor(area.width));
}

// Where a rank stands still: hatched, and reddish where bytes are what it waits for.
function drawGaps(context, trace, rank, view, area, hatches) {
  const gaps = trace.gaps, list = trace.rows[rank].gaps, scale = area.width / view.width;
  for (let place = firstEndingAfter(list, gaps.end, view.from); place < list.length; place++) {
    const gap = list[place];
    if (gaps.begin[gap] >= view.to) break;
    const left = Math.max(area.x, area.x + (gaps.begin[gap] - view.from) * scale);
    const right = Math.min(area.x + area.width, area.x + (gaps.end[gap] - view.from) * scale);
    if (right - left < 0.7) continue;
    context.fillStyle = hatches[gaps.part[gap]];
    context.fillRect(left, area.y, right - left, area.height);
  }
}

function makeHatch(context, ground, line) {
  const tile = document.createElement("canvas"), ratio = window.devicePixelRatio || 1;
  tile.width = tile.height = Math.round(6 * ratio);
  const pen = tile.getContext("2d");
  pen.scale(ratio, ratio);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = line;
  pen.lineWidth = 1;
  for (const shift of [-6, 0, 6]) {
    pen.beginPath();
    pen.moveTo(shift, 6);
    pen.lineTo(shift + 6, 0);
    pen.stroke();
  }
  const pattern = context.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}
