// The whole step in a narrow strip, with the stretch that is shown in the chart beneath it.
class Overview {
  constructor(timeline, view) {
    this.canvas = document.getElementById("overview");
    this.timeline = timeline;
    this.view = view;
    this.picture = null;
    view.listeners.push(() => this.redraw());
    theme.listeners.push(() => { this.picture = null; this.redraw(); });
    new ResizeObserver(() => { this.picture = null; this.redraw(); }).observe(this.canvas);
    this.listen();
  }

  redraw() {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }

  draw() {
    const context = sharpen(this.canvas, 34), width = this.canvas.clientWidth - LEFT - RIGHT;
    context.clearRect(0, 0, this.canvas.clientWidth, 34);
    this.picture ||= this.paint(width);
    context.drawImage(this.picture, LEFT, 0, width, 34);
    const left = LEFT + (this.view.from / this.view.length) * width;
    const right = LEFT + (this.view.to / this.view.length) * width;
    context.fillStyle = theme.colours.ground;
    context.globalAlpha = 0.72;
    context.fillRect(LEFT, 0, left - LEFT, 34);
    context.fillRect(right, 0, LEFT + width - right, 34);
    context.globalAlpha = 1;
    context.strokeStyle = theme.colours["strong-rule"];
    context.strokeRect(left + 0.5, 0.5, Math.max(right - left - 1, 2), 33);
  }

  // Drawn once for a width and a theme: all ranks, a pixel or a few each.
  paint(width) {
    const picture = document.createElement("canvas"), trace = this.timeline.main, ratio = window.devicePixelRatio || 1;
    picture.width = Math.max(Math.round(width * ratio), 1);
    picture.height = Math.round(34 * ratio);
    const context = picture.getContext("2d"), each = 30 / trace.ranks;
    context.scale(ratio, ratio);
    const whole = { from: 0, to: this.view.length, width: this.view.length };
    for (let rank = 0; rank < trace.ranks; rank++) {
      const area = { x: 0, y: 2 + rank * each, width, height: Math.max(each - (each > 3 ? 1 : 0), 0.5) };
      drawColumns(context, trace, rank, whole, area, 0);
    }
    return picture;
  }

  listen() {
    let from = null;
    const timeAt = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return Math.min(Math.max((event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT), 0), 1) * this.view.length;
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      from = timeAt(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (from === null) return;
      const to = timeAt(event);
      if (Math.abs(to - from) > this.view.length / 300) this.view.set(Math.min(from, to), Math.max(from, to));
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const to = timeAt(event);
      if (from !== null && Math.abs(to - from) <= this.view.length / 300) {
        this.view.glide(to - this.view.width / 2, to + this.view.width / 2);
      }
      from = null;
    });
  }
}
