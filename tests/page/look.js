// Runs in the page: what a person could not read. Gives [text, ratio, foreground, background] of each.
(() => {
  const parse = (text) => {
    const found = /rgba?\(([\d.]+),? ([\d.]+),? ([\d.]+)(?:,? ?\/? ?([\d.]+))?\)/.exec(text);
    return found ? [+found[1], +found[2], +found[3], found[4] === undefined ? 1 : +found[4]] : null;
  };
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const painted = (element) => {
    const style = getComputedStyle(element);
    const color = parse(element instanceof SVGElement ? (element.tagName === "text" || element.tagName === "svg" ? "" : style.fill) : style.backgroundColor);
    return color && color[3] > 0 ? color : null;
  };
  const below = (element, x, y) => {
    const layers = document.elementsFromPoint(x, y).filter((e) => e !== element && !element.contains(e)).map(painted).filter(Boolean);
    let ground = parse(getComputedStyle(document.body).backgroundColor) || [255, 255, 255, 1];
    for (const layer of layers.reverse()) ground = over(layer, ground);
    const own = element instanceof SVGElement ? null : painted(element);
    return own ? over(own, ground) : ground;
  };
  const bad = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, element = node.parentElement;
    if (!node.data.trim() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || box.right < 0 || box.left > innerWidth || box.bottom < 0) continue;
    const style = getComputedStyle(element);
    if (style.visibility === "hidden") continue;
    const color = parse(element instanceof SVGElement ? style.fill : style.color);
    const ground = below(element, box.left + box.width / 2, box.top + box.height / 2);
    const size = parseFloat(style.fontSize), bold = +style.fontWeight >= 700;
    const wanted = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    const found = ratio(over(color, ground), ground);
    if (found < wanted) bad.push([node.data.trim().slice(0, 40), +found.toFixed(2), color.join(), ground.join()]);
    if (size < 11.5) bad.push([node.data.trim().slice(0, 40), `only ${size} px`]);
  }
  for (const shape of document.querySelectorAll("svg .bar, svg .area")) {
    const box = shape.getBoundingClientRect(), color = painted(shape);
    if (!box.width || !color) continue;
    const around = [getComputedStyle(document.querySelector(".card")).backgroundColor, getComputedStyle(document.documentElement).getPropertyValue("--pause")];
    for (const text of around) {
      const hex = /^#(..)(..)(..)$/.exec(text.trim());
      const ground = hex ? [1, 2, 3].map((i) => parseInt(hex[i], 16)) : parse(text);
      const found = ratio(color, ground);
      if (found < 3) bad.push([shape.getAttribute("class"), +found.toFixed(2), color.join(), ground.join()]);
    }
  }
  if (document.documentElement.scrollWidth > innerWidth) bad.push(["it is wider than the window", document.documentElement.scrollWidth]);
  return bad;
})()
