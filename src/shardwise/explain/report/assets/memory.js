// What one rank holds over time, owner upon owner, in the same stretch of time as the timeline.
class Memory {
  constructor(trace, view, unit) {
    this.trace = trace;
    this.view = view;
    this.unit = unit;
    this.canvas = document.getElementById("held");
    this.choice = document.getElementById("memory-rank");
    if (!trace.held.length) {
      document.getElementById("memory").hidden = true;
      return;
    }
    this.owners = [...new Set(trace.held.map((curve) => curve.owner))];
    this.most = trace.peaks;
    this.fill();
    view.listeners.push(() => this.redraw());
    theme.listeners.push(() => { this.writeLegend(); this.redraw(); });
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
    this.writeLegend();
    this.redraw();
  }

  fill() {
    for (let rank = 0; rank < this.trace.ranks; rank++) {
      this.choice.append(new Option(this.trace.rankNames[rank].replace("rank ", "") + " (" + heldText(this.most[rank], this.unit) + ")", rank));
    }
    this.choice.value = this.most.indexOf(Math.max(...this.most));
    this.choice.addEventListener("change", () => this.redraw());
  }

  curvesOf(rank) {
    return this.owners.map((owner) => this.trace.held.find((curve) => curve.rank === rank && curve.owner === owner));
  }

  writeLegend() {
    const legend = document.getElementById("memory-legend");
    legend.replaceChildren(...this.owners.map((owner, place) => legendEntry(theme.colours["owner-" + (place % 6)], owner)));
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  draw() {
    const height = 180, context = sharpen(this.canvas, height), width = this.canvas.clientWidth - LEFT - RIGHT;
    context.clearRect(0, 0, this.canvas.clientWidth, height);
    const most = Math.max(...this.most) || 1, scale = (height - 16) / most;
    this.drawScale(context, most, width, height);
    const steps = stacked(this.curvesOf(Number(this.choice.value)));
    const x = (time) => LEFT + Math.min(Math.max((time - this.view.from) / this.view.width, 0), 1) * width;
    for (let owner = this.owners.length - 1; owner >= 0; owner--) {
      context.fillStyle = theme.colours["owner-" + (owner % 6)];
      context.beginPath();
      context.moveTo(LEFT, height);
      let level = 0;
      for (const step of steps) {
        context.lineTo(x(step.time), height - level * scale);
        level = step.sums[owner];
        context.lineTo(x(step.time), height - level * scale);
      }
      context.lineTo(x(this.view.length), height - level * scale);
      context.lineTo(LEFT + width, height);
      context.fill();
    }
  }

  drawScale(context, most, width, height) {
    const step = this.unit === "B" ? binaryStep(most / 4) : roundStep(most / 4);
    context.font = "11px ui-sans-serif, system-ui, sans-serif";
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let value = 0; value <= most * 1.0001; value += step) {
      const y = Math.round(height - (value * (height - 16)) / most) - 0.5;
      context.strokeStyle = theme.colours.rule;
      context.beginPath();
      context.moveTo(LEFT, y);
      context.lineTo(LEFT + width, y);
      context.stroke();
      context.fillStyle = theme.colours.faint;
      const text = this.unit === "B" ? heldText(value, "B") : digits(value);
      context.fillText(text, LEFT - 8, Math.max(Math.min(y, height - 6), 18));
    }
    if (this.unit !== "B") context.fillText(this.unit, LEFT - 8, 6);
  }
}

function binaryStep(least) {
  const power = 2 ** Math.ceil(Math.log2(Math.max(least, 1)));
  return power;
}

// Steps of all owners by time: the sum up to each owner, and the total.
function stacked(curves) {
  const changes = [];
  curves.forEach((curve, owner) => {
    if (curve) for (let at = 0; at < curve.time.length; at++) changes.push([curve.time[at], owner, curve.value[at]]);
  });
  changes.sort((a, b) => a[0] - b[0]);
  const now = new Array(curves.length).fill(0), steps = [];
  changes.forEach(([time, owner, value], at) => {
    now[owner] = value;
    if (at + 1 < changes.length && changes[at + 1][0] === time) return;
    let sum = 0;
    const sums = now.map((each) => (sum += each));
    steps.push({ time, sums, total: sum });
  });
  return steps;
}
