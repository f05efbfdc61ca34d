"""One self-contained HTML page about an artifact, and its figures, from the JSON files in it.

artifact.py   reads what builds and evaluations left: manifests, engines, results
blocks.py     what a page is made of: tables, figures, notices
charts.py     a chart as data; drawing.py draws it, as SVG for the page and as PNG
conditions.py under which conditions a result was measured, in words
sections.py   the page's parts in order, each in its file: tiles.py, pair.py, verification.py,
              acceptance.py, draft_length.py, load.py, quantization.py, provenance.py
page.py       renders page.html.j2 with page.css, and writes it with the PNG files
"""
