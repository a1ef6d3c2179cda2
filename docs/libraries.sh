#!/usr/bin/env bash
# What draws formulas and charts, from npm into docs/libraries: the site serves it itself.
set -euo pipefail
cd "$(dirname "$0")"
rm -rf libraries && mkdir -p libraries/katex && cd libraries
echo '*' >.gitignore
npm pack --silent katex@0.16.47 mermaid@12.3.0
katex=(katex.min.css katex.min.js contrib/auto-render.js fonts)
tar xzf katex-*.tgz -C katex --strip-components=2 "${katex[@]/#/package/dist/}"
tar xzf mermaid-*.tgz --strip-components=2 package/dist/mermaid.min.js
rm ./*.tgz
