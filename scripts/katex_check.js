// What the site's KaTeX, the first argument, has to say of formulas, [[TeX, displayed], …]
// on the input: for each its complaint, or null.
const katex = require(process.argv[2]);
const complaint = ([tex, displayMode]) => {
  try { katex.renderToString(tex, {displayMode, strict: 'ignore'}); }
  catch (e) { return e.message; }
};
console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map(complaint)));
