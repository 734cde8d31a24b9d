"use strict";
// Makes the page's tables sortable, its target a slider, its colours a choice. All can be read without it.
(() => {
  const MANY = 8; // rows of a table that can be filtered
  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9 };

  const make = (name, text = "", attributes = {}) => {
    const element = document.createElement(name);
    element.textContent = text;
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };

  // The first number of a cell, in bytes where it has such a unit; NaN for words and dashes.
  const number = (text) => {
    const found = /^([+-]?[\d,]*\.?\d+)\s*(\S*)/.exec(text.trim());
    return found ? Number(found[1].replaceAll(",", "")) * (UNITS[found[2]] ?? 1) : NaN;
  };

  const bytes = (count) => {
    const unit = Object.keys(UNITS).findLast((name) => count >= UNITS[name]) ?? "B";
    return `${Number((count / UNITS[unit]).toPrecision(3))} ${unit}`;
  };

  const sortBy = (table, header, place) => {
    const body = table.tBodies[0];
    const text = (row) => row.cells[place].textContent.trim();
    const rows = [...body.rows];
    const known = rows.filter((row) => text(row) !== "–");
    const numeric = known.every((row) => !Number.isNaN(number(text(row))));
    const now = header.getAttribute("aria-sort");
    const up = now ? now === "descending" : !numeric; // of numbers the largest come first
    const compare = (a, b) =>
      numeric ? number(text(a)) - number(text(b)) : text(a).localeCompare(text(b), undefined, { numeric: true });
    known.sort((a, b) => (up ? compare(a, b) : compare(b, a)));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
    body.append(...known, ...rows.filter((row) => text(row) === "–"));
  };

  const filter = (table) => {
    const input = make("input", "", { type: "search", autocomplete: "off" });
    const label = make("label", "Filter rows ");
    const status = make("output");
    label.append(input);
    const box = make("p", "", { class: "filter" });
    box.append(label, " ", status);
    table.closest(".scroll").before(box);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
      status.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
    });
  };

  const sortable = (table) => {
    [...table.tHead.rows[0].cells].forEach((header, place) => {
      const button = make("button", header.textContent, { type: "button" });
      button.addEventListener("click", () => sortBy(table, header, place));
      header.replaceChildren(button);
    });
  };

  const target = (box) => {
    const curves = JSON.parse(box.querySelector("script").textContent);
    const slider = box.querySelector(".slider");
    const input = slider.querySelector("input");
    const said = slider.querySelector("output");
    const table = make("table", "", { class: "numbers" });
    const head = table.createTHead().insertRow();
    for (const name of ["method", "rounds", "bytes per client"]) head.append(make("th", name, { scope: "col" }));
    const body = table.createTBody();
    const show = () => {
      const wanted = Number(input.value);
      const found = curves.map(({ points }) => points.find(([, score]) => score >= wanted));
      body.replaceChildren(...curves.map(({ method }, i) => {
        const row = make("tr");
        row.append(make("th", method, { scope: "row" }));
        const texts = found[i] ? [`${found[i][0]}`, bytes(found[i][2])] : ["not reached", "–"];
        row.append(...texts.map((text) => make("td", text)));
        return row;
      }));
      const reached = found.filter(Boolean).length;
      said.textContent = `${wanted} %, reached by ${reached} of ${curves.length}`;
    };
    slider.querySelector(".costs").append(table);
    input.addEventListener("input", show);
    show();
    slider.hidden = false;
    box.querySelector(".static").hidden = true; // but printed
  };

  const theme = (box) => {
    box.hidden = false;
    box.querySelector("select").addEventListener("change", (event) => {
      document.documentElement.dataset.theme = event.target.value;
    });
  };

  const filterable = (table) => table.tBodies[0].rows.length > MANY && filter(table);

  const enhance = (root) => {
    root.querySelectorAll("table.sortable").forEach(sortable);
    root.querySelectorAll("table.filterable").forEach(filterable);
    root.querySelectorAll(".target").forEach(target);
    root.querySelectorAll(".theme").forEach(theme);
  };

  enhance(document);
  document.addEventListener("report", (event) => enhance(event.target)); // the live page has put in a new one
})();
