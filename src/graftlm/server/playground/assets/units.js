/** Numbers for people. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  // A line does not break between a number and its unit.
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)}\u00a0${UNITS[unit]}`;
}
