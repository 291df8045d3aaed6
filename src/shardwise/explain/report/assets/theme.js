// Light or dark: as the system has it, until the reader chooses. Colours are read from the style sheet.
const theme = { colours: {}, paints: [], listeners: [] };
const NAMED = [
  ...PAINTS, "ground", "ink", "faint", "rule", "strong-rule", "on-box", "move", "move-faint", "data",
  "gap", "gap-line", "kernel", "nccl", "copies", "gap-exposed", "gap-exposed-line", ...[0, 1, 2, 3, 4, 5].map((place) => "owner-" + place),
];

function applyTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  const style = getComputedStyle(document.documentElement);
  theme.name = name;
  theme.colours = {};
  for (const key of NAMED) theme.colours[key] = style.getPropertyValue("--" + key).trim();
  theme.paints = PAINTS.map((key) => theme.colours[key]);
  for (const listener of theme.listeners) listener();
}

function toggleTheme() {
  applyTheme(theme.name === "dark" ? "light" : "dark");
}

function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  applyTheme(system.matches ? "dark" : "light");
  system.addEventListener("change", () => applyTheme(system.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", toggleTheme);
}
